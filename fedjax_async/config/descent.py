"""Tune a run's numbers by gradient descent through the whole run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_async.base import check, tree
from fedjax_async.config import paths
from fedjax_async.config.differentiable import PerClient, PerStaleness, Trajectory, require_settings, trajectory
from fedjax_async.config.experiment import resolve
from fedjax_async.config.grid import seeds_of
from fedjax_async.config.resolving import with_objects
from fedjax_async.config.settings import Settings, fields_of
from fedjax_async.engine import trial
from fedjax_async.engine.components import bound, row_of
from fedjax_async.engine.devices import parse_size
from fedjax_async.types import Array, Facts, Key, Params

__all__ = ["Tuned", "tune"]

WRAP: dict[str, Callable[[Array], object]] = {
    "run": lambda value: value,
    "client": PerClient,
    "staleness": PerStaleness,
}
Free = dict[str, Array]  # path -> the coordinate that descent changes
Gradient = Callable[[Free], tuple[Array, Free]]  # the objective and its slope
EDGE = 1e-3  # numbers below 1 start at least this far from 0 and 1


class Tuned(NamedTuple):
    """The result of :func:`tune`."""

    hyper: dict[str, Any]  # for ``Trajectory.function``: all numbers of the run, the tuned ones at their best
    values: dict[str, np.ndarray]  # path -> the number before each step and at the end, [rows, ...]
    losses: np.ndarray  # float[rows], the objective at each row of values, a mean over seeds; at most steps + 1 rows
    best: int  # the row with the lowest loss
    settings: Settings | None  # with the best numbers; None if some have values per client or staleness


class _Number(NamedTuple):
    """A tuned number, descended on without bounds."""

    path: str
    name: str  # in ``hyper``
    kind: str
    share: bool  # whether it must not exceed 1
    length: int  # values; 0: a scalar

    def free(self, value: Array) -> Array:
        """The coordinate that descent changes: the logarithm, or the logit of a share; [length]."""
        inside = jnp.clip(value, EDGE, 1 - EDGE) if self.share else value
        found = jnp.log(inside) - (jnp.log1p(-inside) if self.share else 0.0)
        return jnp.full(self.length, found) if self.length else found

    def value(self, free: Array) -> Array:
        return jax.nn.sigmoid(free) if self.share else jnp.exp(free)

    def entry(self, free: Array) -> object:
        return WRAP[self.kind](self.value(free))


def tune(
    settings: Settings,
    names: Sequence[str] | Mapping[str, str],
    *,
    steps: int = 30,
    rate: float | None = None,
    optimizer: optax.GradientTransformation | None = None,
    seeds: int | Iterable[int] | None = None,
    last: int = 1,
    staleness_values: int | None = None,
    segment: int | None = None,
    memory_limit: str = "8GB",
    **objects: object,
) -> Tuned:
    """Minimise the validation loss at the end of a run by gradient descent on the run's numbers.

    ``names`` are paths of numbers that are not 0, such as ``["method.mixing", "lr"]``; or a mapping from paths to
    ``"run"``, ``"client"`` (a value for each client) or ``"staleness"`` (a value for each staleness up to the largest
    one; larger ones take the last value). Descent changes the logarithm of a number, or its logit if the number must
    not exceed 1, so that it stays in range.

    Args:
      settings: need a validation part (``validation_fraction``, unless the data have one); the test set is never used.
      steps: number of descent steps. Each costs four to five runs of ``trajectory`` per seed, besides one compilation
        per seed.
      rate: learning rate of Adam on the logarithms and logits [0.1].
      optimizer: an optax transformation in place of Adam.
      seeds: a list of seeds, or their number; the mean loss over their runs is minimised [the settings' seed]. The
        schedules are planned once and do not change.
      last: the mean over this many last evaluations is minimised.
      staleness_values: at most this many values by staleness; all larger ones share the last [no limit].
      segment, objects: as in :func:`trajectory`, with the same limits.
      memory_limit: refuse gradients that need more temporary memory, by XLA's estimate.

    Use it for small models and runs: each arrival is trained alone, twice per gradient. 1,000 arrivals of an MLP with
    50,000 parameters and one epoch of local steps take about 12 s of processor time per step of descent.

    Returns: a :class:`Tuned`. It has fewer rows if a step leads to a loss that is not finite, which ends the descent.

    Raises: ``ValueError`` for unknown names, numbers with gradient 0, settings without a validation part, losses that
    are not finite at the start, and runs that need more memory or have local training in loops of unknown length.
    """
    require_settings(settings, objects)
    settings = with_objects(settings, **objects)
    kinds = _kinds(names)
    _require_validation(settings)
    check.whole("steps", steps)
    check.whole("last", last)
    check.optional(check.whole, "staleness_values", staleness_values)
    limit = parse_size("memory_limit", memory_limit)
    seeds = [settings.seed] if seeds is None else seeds_of(seeds, settings.seed)
    optimizer = _optimizer(rate, optimizer)
    _require_gradient(settings)
    runs = [trajectory(dataclasses.replace(settings, seed=seed), segment=segment) for seed in seeds]
    _require_room(runs[0], limit, memory_limit)
    fewest = min(len(run.times) for run in runs)
    check.require(last <= fewest, "last", last, f"at most {fewest}, the evaluations of a run")
    hyper = runs[0].hyper
    longest = max(int(run.schedule.staleness.max()) for run in runs) + 1
    longest = min(longest, staleness_values or longest)
    counts = {"run": 0, "client": runs[0].schedule.num_clients, "staleness": longest}
    numbers = [_number(settings, hyper, path, kind, counts[kind]) for path, kind in kinds.items()]
    free = {number.path: number.free(hyper[number.name]) for number in numbers}

    def with_numbers(run: Trajectory, free: Free) -> dict[str, object]:  # noise of dp may differ between the seeds
        return {**run.hyper, **{number.name: number.entry(free[number.path]) for number in numbers}}

    gradients = [_compiled(_objective(run, with_numbers, last), free, limit) for run in runs]
    found = _descended(gradients, free, optimizer, steps)
    losses = np.asarray([loss for loss, _ in found])
    values = [{number.path: np.asarray(number.value(free[number.path])) for number in numbers} for _, free in found]
    best = int(np.argmin(losses))
    entries = {number.name: WRAP[number.kind](jnp.asarray(values[best][number.path])) for number in numbers}
    plain = {number.path: float(values[best][number.path]) for number in numbers if number.kind == "run"}
    placed = Settings(**paths.changed(fields_of(settings), plain)) if len(plain) == len(numbers) else None
    columns = {number.path: np.stack([row[number.path] for row in values]) for number in numbers}
    return Tuned({**hyper, **entries}, columns, losses, best, placed)


def _optimizer(rate: float | None, given: object) -> optax.GradientTransformation:
    """The optimiser of the descent; ``ValueError`` if ``given`` is not an optimiser, or a rate is given too."""
    if given is None:
        check.optional(check.positive, "rate", rate)
        return optax.adam(0.1 if rate is None else rate)
    check.kind("optimizer", given, optax.GradientTransformation, "an optax transformation, such as optax.adam(0.1)")
    check.require(rate is None, "rate", rate, "left out beside an optimizer, which has its own")
    optimizer: optax.GradientTransformation = given
    return optimizer


def _descended(
    gradients: Sequence[Gradient], free: Free, optimizer: optax.GradientTransformation, steps: int
) -> list[tuple[float, Free]]:
    """The mean loss and the coordinates before each step and at the end, up to the first loss that is not finite."""
    found: list[tuple[float, Free]] = []
    state = optimizer.init(free)
    for step in range(steps + 1):
        each = [gradient(free) for gradient in gradients]
        loss = float(np.mean([value for value, _ in each]))
        if not np.isfinite(loss):
            check.require(step > 0, "validation loss", loss, "finite at the start of the descent: lower lr or mixing")
            break
        found.append((loss, free))
        if step < steps:
            slope = jax.tree.map(lambda *slopes: sum(slopes) / len(slopes), *(slope for _, slope in each))
            if step == 0:
                _require_slopes(slope)
            free, state = tree.optimize(optimizer, slope, state, free)
    return found


def _require_slopes(slope: Mapping[str, Array]) -> None:
    """``ValueError`` for a number whose gradient is 0: it would stay where it is."""
    for path, values in slope.items():
        allowed = (
            "one that the validation loss depends on smoothly: its gradient is 0 at the start (a threshold, such as"
        )
        check.require(
            bool(np.any(values)), "names", path, f"{allowed} swa's start, or a term that this run never uses)"
        )


def _kinds(names: Any) -> dict[str, str]:
    """Path -> kind of value; ``names`` is such a mapping, or a list of paths."""
    several = np.iterable(names) and not isinstance(names, str)
    listed = names if isinstance(names, Mapping) or not several else list(names)
    several = several and len(listed) > 0 and all(isinstance(path, str) for path in listed)
    check.require(several, "names", names, "at least one path, such as ['lr']")
    kinds = dict(listed) if isinstance(listed, Mapping) else dict.fromkeys(listed, "run")
    check.require(len(kinds) == len(listed), "names", names, "paths that are different from each other")
    for path, kind in kinds.items():
        check.one_of(f"names[{path!r}]", kind, tuple(WRAP))
    return kinds


def _number(settings: Settings, hyper: Mapping[str, Array], path: str, kind: str, count: int) -> _Number:
    """The number that a path names; ``ValueError`` naming the known ones for any other path."""
    field, _, option = path.partition(".")
    names = (path,) if field != "method" else (f"server.{option}", f"client.{option}", option)
    found = next((name for name in names if name in hyper and not name.startswith("compress.")), None)
    known = [_path_of(name) for name in hyper if not name.startswith("compress.")]
    allowed = f"one of {', '.join(known)} (an option of value 0 is switched off and cannot be tuned)"
    if field == "method" and option:
        paths.changed(fields_of(settings), {path: 1.0})  # refuses options of objects: no path reaches them
    check.require(found is not None, "names", path, allowed)
    value = float(hyper[str(found)])
    check.require(value > 0, path, value, "positive: tuning moves by its logarithm")
    return _Number(path, str(found), kind, value <= 1 and _refuses_more(settings, path), count)


def _path_of(name: str) -> str:
    """The path of a number in ``hyper``."""
    field, _, option = name.partition(".")
    return f"method.{option}" if field in ("server", "client") else "method.proximal" if name == "proximal" else name


def _refuses_more(settings: Settings, path: str) -> bool:
    """Whether values above 1 are out of the number's range."""
    try:
        resolve(Settings(**paths.changed(fields_of(settings), {path: 1.5})))
    except ValueError:
        return True
    return False


def _objective(
    run: Trajectory, with_numbers: Callable[[Trajectory, Free], dict[str, object]], last: int
) -> Callable[[Free], Array]:
    return lambda free: jnp.mean(run.function(with_numbers(run, free), run.params)["validation_loss"][-last:])


def _require_validation(settings: Settings) -> None:
    """``ValueError`` if clients hold no examples out."""
    held_out = (
        settings.validation_fraction is not None or resolve(settings).components.data.validation_order is not None
    )
    allowed = "given: tuning needs examples that are held out"
    check.require(held_out, "validation_fraction", settings.validation_fraction, allowed)


def _require_gradient(settings: Settings) -> None:
    """``ValueError`` if reverse mode cannot differentiate a local step; found from shapes, before planning."""
    run = resolve(settings)
    components, data = run.components, run.components.data
    rule, client = (bound(one, components.hyper) for one in (components.rule, components.client))
    facts = Facts(len(data.size))

    def moved(params: Params, key: Key, pool: tuple[Array, Array], zero: Array) -> Array:
        leaves = jax.tree.leaves(trial.job(rule, client, params, key, pool, facts, zero=zero, steps=1).upload)
        floats = [jnp.sum(leaf) for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        return sum(floats, jnp.zeros((), jnp.result_type(float)))

    pool, zero = (row_of(data.x), row_of(data.y)), jax.ShapeDtypeStruct((), jnp.int32)
    try:
        jax.eval_shape(jax.grad(moved, allow_int=True), run.shapes, jax.eval_shape(jax.random.key, 0), pool, zero)
    except ValueError as error:
        if "Reverse-mode differentiation does not work" not in str(error):
            raise
        allowed = "one with local training in loops of fixed length, or reverse mode has no gradient"
        raise ValueError(f"method = {str(settings.method)!r}: must be {allowed}") from error


def _require_room(run: Trajectory, limit: int, given: str) -> None:
    """``ValueError`` for a model that cannot fit, before anything compiles.

    Reverse mode keeps a model for each of ``segment + E / segment`` arrivals, or for all E: at least ``2 sqrt(E)``.
    """
    arrivals = max(len(run.schedule.job), 1)
    copies = max(int(min(arrivals, 2 * arrivals**0.5)), 1)
    least = copies * tree.num_bytes(run.params)
    allowed = f"at least {least / 1e9:.2g}GB: the gradient through {arrivals} arrivals keeps {copies} models or more"
    check.require(limit >= least, "memory_limit", given, f"{allowed} (fewer updates, a smaller model)")


def _compiled(objective: Callable[[Free], Array], free: Free, limit: int) -> Gradient:
    """The compiled ``value_and_grad``; ``ValueError`` if it needs too much memory."""
    compiled = jax.jit(jax.value_and_grad(objective)).lower(free).compile()
    analysis = compiled.memory_analysis()
    need = 0 if analysis is None else int(analysis.temp_size_in_bytes)
    allowed = f"at least {need / 1e9:.2g}GB for this run's gradient (fewer updates, a smaller model, another segment)"
    check.require(need <= limit, "memory_limit", f"{limit / 1e9:.2g}GB", allowed)
    return compiled
