"""Server parts by name, for any rule: ``fedbuff+swa:start=0.5`` or ``orthofl+dominance``.

``PARTS`` names them, :func:`with_parts` adds them to the factory of a rule. A part acts at one of four places, which an
upload passes in this order:

1. ``arriving``: on the delta as the client sent it, before anything else: the delay correction;
2. ``direction``: on the direction after the rule's guard rails, for each arrival: the dominance penalty, momentum of
   changes. In FedAsync and in OrthoFL's average the direction leads from the server's model to the client's;
3. ``step``: on the change of the server's model when a step closes, after the rule's own optimizer: momentum of steps,
   the cyclic schedule, the geodesic;
4. ``around``: on the whole rule: stochastic weight averaging.

Parts at the same place act in the order in which they are given. The step rule along a Bezier curve and the correction
of control points need clients that upload curves: they are options of ``asynccurve``.

Source: the general family of AsyncManifold (2025), section 5.1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_async.base import check, factories, tree
from fedjax_async.server.asynccurve import end_correction
from fedjax_async.server.delay_correction import delay_corrected
from fedjax_async.server.step_size import cyclic as cycle
from fedjax_async.server.step_size import moving_on, scale_by_dominance
from fedjax_async.server.steps import along_geodesic
from fedjax_async.server.swa import averaged
from fedjax_async.server.transforms import Transform, chain
from fedjax_async.types import Array, Params, ServerAlgorithm, State, Traced

Factory = Callable[..., ServerAlgorithm]


class Part(NamedTuple):
    """What a part does at each place; ``None``: nothing. A factory of keyword-only options makes it."""

    arriving: Transform | None = None
    direction: Transform | None = None
    step: optax.GradientTransformation | None = None
    around: Callable[[ServerAlgorithm], ServerAlgorithm] | None = None


def correction(
    *,
    by: str = "orthograd",
    switch: str | None = None,
    fraction: Traced | None = None,
    decay: Traced | None = None,
    per: str = "whole",
) -> Part:
    """Correct each arriving delta for the server's drift since its start (AsyncManifold 2025, eq. 15).

    It is for rules that step along the clients' deltas. Rules that move towards the clients' models (FedAsync, OrthoFL,
    FedDyn, AREA, QuAFL) and rules that correct deltas themselves refuse it.

    Args:
      by: a name in ``geometry.CORRECTIONS``: ``orthograd``, ``orthopos``, ``orthodyn``, ``dc_asgd_a`` ...
      switch, fraction, decay, per: of the correction, as in ``asynccurve``.
    """
    chosen = end_correction(correction=by, switch=switch, fraction=fraction, decay=decay, per=per)
    return Part(arriving=delay_corrected(chosen))


def dominance(*, limit: Traced = 1.0) -> Part:
    """Divide each direction by N p_i, p_i its client's share of accepted arrivals (AsyncManifold 2025, 5.1).

    Each arrival has the factor ``min(limit, 1 / (N p_i))``. A ``limit`` of ``1 / eta``, with eta the learning rate of
    the rule, is the bound of AsyncCurve: no step is longer than the direction. A median or Krum compares the divided
    directions.
    """
    return Part(direction=scale_by_dominance(limit))


def momentum(*, beta: Traced = 0.9, of: str = "steps") -> Part:
    """Heavy ball: add beta times the last movement to each movement.

    ``u <- beta u + d``. ``fedavg+momentum`` is FedAvgM.

    Args:
      beta: in [0, 1).
      of: ``steps`` of the server, when they close (Euclidean); or ``changes``: the directions of the arrivals, before
        learning rate and staleness weight (in ``asynccurve`` momentum on the curve).
    """
    check.below_one("beta", beta)
    check.one_of("of", of, ("steps", "changes"))
    return Part(step=optax.trace(decay=beta)) if of == "steps" else Part(direction=moving_on(beta))


def cyclic(*, lowest: Traced = 0.2, length: int = 10) -> Part:
    """Multiply the server's steps by a factor that falls linearly from 1 to ``lowest``, in cycles of ``length`` steps.

    Steps without accepted uploads do not count. With ``swa:every=LENGTH`` the models at the same place of each cycle
    are averaged. Source: Izmailov et al. (2018), section 3.1.
    """
    rate = cycle(highest=1.0, lowest=lowest, length=length)
    return Part(step=optax.scale_by_schedule(rate))


def geodesic(*, size: Traced = 0.5) -> Part:
    """Go the share ``size`` of each server step on a geodesic of hyperbolic space (AsyncManifold 2025, eq. 20).

    The geodesic leads from the server's model to where the rule would go; ``size`` in (0, 1], 1 goes all the way. A
    step that is not finite is skipped.
    """
    check.positive("size", size)
    check.in_range("size", size, 0.0, 1.0)

    def update(change: Params, state: State, params: Params | None = None) -> tuple[Params, State]:
        position: Array = jnp.asarray(size, jnp.result_type(float))
        moved = along_geodesic(params, change, change, position)
        return tree.where(tree.is_finite(moved), moved, jax.tree.map(jnp.zeros_like, moved)), state

    return Part(step=optax.GradientTransformation(lambda params: optax.EmptyState(), update))


def swa(*, start: Traced = 0.75, every: int = 1, overwrite: int | None = None) -> Part:
    """Evaluate the average of the models of the run's last part: SWA, periodic SWA (Izmailov et al. 2018).

    Args:
      start: sigma in [0, 1], the share of the run's server steps before the first averaged model.
      every: c, server steps from one averaged model to the next.
      overwrite: C; every C server steps the average becomes the model (periodic SWA). ``None``: never.
    """
    return Part(around=functools.partial(averaged, start=start, every=every, overwrite=overwrite))


PARTS: dict[str, Callable[..., Part]] = {
    "correction": correction,
    "dominance": dominance,
    "momentum": momentum,
    "cyclic": cyclic,
    "geodesic": geodesic,
    "swa": swa,
}

# part -> the option of a rule that does the same, and the value that switches this option off
OWN: dict[str, tuple[str, bool | int]] = {
    "dominance": ("dominance", False),
    "momentum": ("momentum", 0),
    "cyclic": ("lowest", 1),
    "swa": ("swa", 1),
}


def with_parts(factory: Factory, parts: Mapping[str, Part]) -> Factory:
    """The factory of the same rule with these parts by name, in their order; its options stay the same.

    Raises ``ValueError`` if a part acts on deltas, directions or steps and the rule has no guard rails
    (``base.factories.takes(guards=server.guard_rails)``). The returned factory raises ``ValueError`` for a part that
    its rule cannot use, and for one that its rule has by an option that is not switched off.

    >>> from fedjax_async.server import fedbuff
    >>> server = with_parts(fedbuff, {"dominance": dominance(), "swa": swa(start=0.5)})(server_lr=0.7)
    """
    found = list(parts.values())
    arriving = [part.arriving._replace(first=True) for part in found if part.arriving is not None]
    after = [part.direction for part in found if part.direction is not None]
    steps = tuple(part.step for part in found if part.step is not None)
    if arriving or after or steps:
        groups = getattr(factory, "groups", {})
        name = getattr(factory, "__name__", "the rule")
        allowed = f"swa alone: {name} has no guard rails, factories.takes(guards=server.guard_rails)"
        check.require("guards" in groups, "parts", ", ".join(parts), allowed)
        rails = groups["guards"]

        @functools.wraps(rails)
        def guards(**options: object) -> Transform:
            chained = chain(*arriving, rails(**options), *after)
            return chained._replace(steps=chained.steps + steps)

        factory = factories.regrouped(factory, guards=guards)

    @functools.wraps(factory)
    def made(**options: object) -> ServerAlgorithm:
        for name in parts:
            _require_off(factory, name, options)
        rule = factory(**options)
        for part in found:
            rule = rule if part.around is None else part.around(rule)
        return rule

    made.__dict__.pop("groups", None)  # those of the factory inside
    return made


def _require_off(factory: Factory, part: str, options: Mapping[str, object]) -> None:
    """Raise ``ValueError`` if the rule has this part by an option of its own that is not switched off."""
    option, off = OWN.get(part, ("", None))
    known = factories.options_of(factory)
    if option in known:
        value = options.get(option, known[option].default)
        if isinstance(value, jax.core.Tracer):  # in a compiled program; the number itself was checked before
            return
        same = isinstance(value, (bool, int, float)) and value == off
        allowed = f"left out: the rule has it by its option {option} ({option}={str(off).lower()} switches that off)"
        check.require(same, "part", part, allowed)
