"""A run as a differentiable function, from settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedjax_async.base import check, registry
from fedjax_async.base.tree import Columns
from fedjax_async.config import concerns
from fedjax_async.config.experiment import prepare
from fedjax_async.config.methods import usual_of
from fedjax_async.config.resolving import with_objects, without_server
from fedjax_async.config.settings import Settings, given_in
from fedjax_async.engine.trajectory import EXAMPLE_WEIGHT, PerClient, PerExample, PerStaleness, Varying, make_trajectory
from fedjax_async.types import Array, Params, Schedule

__all__ = ["PerClient", "PerExample", "PerStaleness", "Trajectory", "trajectory"]


class Trajectory(NamedTuple):
    """A run as a function of its numbers, and the numbers with which ``simulate`` runs it."""

    function: Callable[[Varying, Params], dict[str, Array]]  # f(hyper, params) -> scores
    hyper: dict[str, Array]  # by name: "lr", "proximal", "server.mixing", "optimizer.momentum", ...; float[]
    params: Params  # the initial parameters
    times: np.ndarray  # float64[V], virtual seconds of the evaluations
    schedule: Schedule  # planned; ``hyper`` does not change it


_OBJECTS = ("method", "model", "data", "client")  # of ``prepare``


def require_settings(settings: object, objects: Mapping[str, object]) -> None:
    """``ValueError`` for anything but ``Settings``, and for objects that a trajectory does not take."""
    allowed = "Settings, such as Settings(model='logistic', updates=20)"
    check.require(isinstance(settings, Settings), "settings", settings, allowed)
    for name in objects:
        registry.find("object", dict.fromkeys(_OBJECTS), name)


def trajectory(settings: Settings, *, segment: int | None = None, **objects: object) -> Trajectory:
    """The run of ``settings`` as a pure function, for ``jax.grad`` and ``jax.jvp``.

    ``f(hyper, params)`` returns the values of ``simulate``: ``loss`` and ``accuracy`` at every evaluation, float[V];
    ``validation_loss`` and ``validation_accuracy`` if clients have a validation part; ``params``, those at the end. The
    schedule is planned before and does not depend on ``hyper``. A number in ``hyper`` may be replaced by
    ``PerClient(values)``, one value per client, or ``PerStaleness(values)``. An option with value 0 is not in
    ``hyper``: zero switches a term off.

    ``hyper`` may also have ``example_weight``, factors of the training losses (1 if left out): a number, ``PerClient``,
    or ``PerExample``, one value per row of the data. The derivative of a loss with respect to it is the influence of a
    client or an example. The package's local training applies it; a client algorithm of your own has to multiply its
    losses by ``data.weight``.

    Args:
      segment: arrivals between two checkpoints of reverse mode. By default all E, so that memory grows with E times a
        few copies of the model; if that may need more than 4 GiB, the square root of E. Then memory grows with
        ``segment + E / segment`` copies, and every arrival is computed once more.
      objects: as in ``prepare``.

    Use it for small models: one job is trained at a time. Models with layers that define their own gradients
    (convolutions in tiles, BatchNorm) support only ``jax.grad``; local training in loops of unknown length
    (AsyncCurve's with ``order=after``) supports only ``jax.jvp``.

    Raises: ``ValueError`` as ``prepare``, for streamed data, and for settings that only ``simulate`` has. ``f`` raises
    it for missing and unknown names, and for a wrong number of values.

    >>> f, hyper, params, *_ = trajectory(Settings(method="fedasync", model="logistic", clients=3, updates=4, steps=1))
    >>> sorted(hyper)
    ['lr', 'server.mixing']
    """
    require_settings(settings, objects)
    settings = with_objects(settings, **objects)
    allowed = "a method with a server: only those have a trajectory"
    check.require(not without_server(settings), "method", str(settings.method), allowed)
    allowed = "a method without a policy, which plans the run while it trains"
    check.require(usual_of(settings.method).policy is None, "method", str(settings.method), allowed)
    concerns.refuse("trajectory", given_in(settings))
    experiment = prepare(settings)
    components = experiment.components
    check.require(not components.data.streamed, "dataset", settings.dataset, "one that fits into memory")
    planned, limit = (components, experiment.schedule, experiment.key, experiment.points), experiment.norm_limit
    function = make_trajectory(*planned, norm_limit=limit, segment=segment)
    hyper = {name: jnp.asarray(value, jnp.result_type(float)) for name, value in components.hyper.items()}
    counts: dict[type, int] = {PerClient: len(components.data.size), PerExample: len(components.data.y)}

    def checking(given: Varying, params: Params) -> Columns:
        missing = [name for name in hyper if name not in given]
        check.require(not missing, "hyper", list(given), f"all numbers of the run, also {', '.join(missing)}")
        return Columns(function({name: _entry(name, value, hyper, counts) for name, value in given.items()}, params))

    return Trajectory(checking, hyper, experiment.params, experiment.points.time, experiment.schedule)


def _entry(name: str, value: Any, hyper: Mapping[str, Array], counts: Mapping[type, int]) -> Any:
    """A number of ``hyper`` as arrays; ``ValueError`` for an unknown name or a wrong length."""
    registry.find("hyper", dict.fromkeys((*hyper, EXAMPLE_WEIGHT)), name)
    if not isinstance(value, (PerClient, PerStaleness, PerExample)):
        allowed = "one number, or PerClient(values) or PerStaleness(values)"
        check.require(np.shape(value) == (), f"hyper[{name!r}]", value, allowed)
        return value
    kind, shape = type(value).__name__, np.shape(value.values)
    only = not isinstance(value, PerExample) or name == EXAMPLE_WEIGHT
    check.require(only, f"hyper[{name!r}]", kind, f"PerClient or PerStaleness: PerExample is for {EXAMPLE_WEIGHT}")
    wanted = counts.get(type(value))
    good = shape == (wanted,) if wanted is not None else len(shape) == 1 and shape[0] > 0
    allowed = "one value per staleness" if wanted is None else f"[{wanted}], one value each"
    check.require(good, f"shape of {kind} of hyper[{name!r}]", list(shape), allowed)
    return type(value)(jnp.asarray(value.values))
