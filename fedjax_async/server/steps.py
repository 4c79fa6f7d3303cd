"""Step rules: how the server moves from its params towards the corrected end of a client.

``STEPS`` names them. A step rule is ``step(params, change, aside, s) -> direction``. Its arguments are the server's
params Theta^tau, the corrected change ``d = E - Theta^tau``, the distance of the curve from its chord at s as a vector
(``geometry.CurveFamily.aside``), and the position s in [0, 1].
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_async.base import registry, tree
from fedjax_async.geometry import MANIFOLDS, CurveFamily, geodesic, quadratic, rotate
from fedjax_async.server.running_statistics import weights_of, with_statistics
from fedjax_async.server.step_size import StepSize
from fedjax_async.server.transforms import Transform, scaled
from fedjax_async.types import Array, Arrival, Facts, Params, State

Step = Callable[[Params, Params, Params, Array], Params]


def along_line(params: Params, change: Params, aside: Params, s: Array) -> Params:
    """``s d``."""
    return scaled(change, s)


def along_curve(params: Params, change: Params, aside: Params, s: Array) -> Params:
    """``gamma(s) - Theta^tau = s d + sum_j b_j(s) o_j``; for the quadratic curve ``s d + 2 s (1 - s) o``."""
    return jax.tree.map(jnp.add, scaled(change, s), aside)


def along_geodesic(params: Params, change: Params, aside: Params, s: Array) -> Params:
    """The step to the position s on the geodesic from Theta^tau to E, in hyperbolic space of curvature -1."""
    end = jax.tree.map(jnp.add, params, change)
    there = geodesic(MANIFOLDS["lorentz"](), params, end, s)
    return jax.tree.map(jnp.subtract, there, params)


STEPS: dict[str, Step] = {"line": along_line, "curve": along_curve, "geodesic": along_geodesic}


def _kept(offset: Params, old: Params, new: Params) -> Params:
    return offset


# ``control(offset, old chord, new chord) -> offset``: the offset of one inner point from its chord, for a new chord
CONTROLS: dict[str, Callable[[Params, Params, Params], Params]] = {"none": _kept, "rotation": rotate}


def stepping(size: StepSize, step: Step, control: str, family: CurveFamily | None = None) -> Transform:
    """Take a step from the server's params towards ``x + d``, where d is the direction so far.

    ``arrival.extra`` has the offsets of the inner points of the client's curve from its own chord; for the quadratic
    curve, that of the control point from the midpoint. ``control``, a name in ``CONTROLS``, changes each of them when
    the chord changes from the client's change to d (``geometry.CONTROL_POINTS`` are the same functions of control
    points). ``family``: of the curve, quadratic by default. Running statistics move by s times their change. The weight
    is the position s; the arrival is rejected if the step is not finite.

    Source: AsyncManifold (2025), eqs. 17, 20 and 31; eq. 17 for each inner point.
    """
    family = quadratic() if family is None else family
    moves = family.each(registry.find("control", CONTROLS, control))

    def init(params: Params, facts: Facts = Facts()) -> State:
        return size.init(facts)

    def update(direction: Params, state: State, params: Params, arrival: Arrival) -> tuple[Params, State, Array]:
        position, after = size.of(arrival, state)
        change = weights_of(direction)
        family.require_offsets(arrival.extra, change)
        bend = moves(arrival.extra, weights_of(arrival.upload), change)
        moved = step(weights_of(params), change, family.aside(bend, position), position)
        finite = tree.is_finite(moved)
        moved = tree.where(finite, moved, jax.tree.map(jnp.zeros_like, moved))
        weight = jnp.where(finite, position, 0.0).astype(arrival.weight.dtype)
        return with_statistics(moved, scaled(direction, position)), after, weight

    return Transform(init, update)
