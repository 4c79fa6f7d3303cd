"""Rotation in the plane of two vectors, and the new control point of a curve when its ends move."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_async.geometry.bezier import line
from fedjax_async.geometry.projection import project_out
from fedjax_async.geometry.vectors import inner, leaves, rebuild, unit
from fedjax_async.types import Params

Ends = tuple[Params, Params]  # start and end of a curve


def reflect(vector: Params, normal: Params) -> Params:
    """The mirror image ``x - 2 (<x, n> / <n, n>) n`` in the plane orthogonal to ``n``; ``x`` itself if n is zero."""
    flat = project_out(vector, normal, per="whole")
    return jax.tree.map(lambda a, b: 2.0 * a - b, flat, vector)


def rotate(vector: Params, source: Params, target: Params) -> Params:
    """``R x``: the rotation in the plane of u and w that takes the direction of u to that of w.

    ``R u / |u| = w / |w|``. R keeps lengths and angles, and every vector orthogonal to u and w. R is the product
    of two reflections, first in the plane orthogonal to ``u / |u| + w / |w|``, then in the plane orthogonal to w. Time
    and memory are O(D); no matrix is formed.

    Special cases: R is the identity if u and w are parallel, or if one of them is zero and has no direction.
    Anti-parallel vectors define no plane. R is then the reflection ``x - 2 (<x, w> / <w, w>) w``: it keeps lengths,
    angles and every vector orthogonal to w, and takes u to the direction of w. Vectors count as anti-parallel if the
    sum of their unit vectors is no longer than the square root of the machine epsilon.

    Args:
      vector: x, a pytree.
      source: u, shaped like x.
      target: w, shaped like x.

    Returns: a pytree like ``vector``, in its dtypes. R is an isometry to rounding. Its other properties also hold to
    rounding, but near the anti-parallel case only to the square root of the machine epsilon.

    Source: AsyncManifold (2025), the matrix R of eq. 17.
    """
    u, w = unit(leaves(source)), unit(leaves(target))
    between = list(map(jnp.add, u, w))
    square = inner(between, between)
    given = (inner(u, u) > 0) & (inner(w, w) > 0)  # both have a direction
    twice = given & (square > jnp.finfo(square.dtype).eps)
    first = [jnp.where(twice, a, jnp.zeros_like(a)) for a in between]
    second = [jnp.where(given, a, jnp.zeros_like(a)) for a in w]
    return rebuild(reflect(reflect(leaves(vector), first), second), vector)


def keep_offset(control: Params, old: Ends, new: Ends) -> Params:
    """``phi' = M' + (phi - M)``: the control point keeps its offset from the midpoint of the ends.

    Args:
      control: phi, the control point of the curve between the old ends.
      old: ``(Theta^t, Theta_i)``, the ends between which it was learned, with midpoint M.
      new: ``(Theta^tau, E)``, the present ends, with midpoint M'. The new end is corrected first.

    Source: AsyncManifold (2025), section 4: no correction of the control point.
    """
    return jax.tree.map(jnp.add, line(*new, 0.5), _offset(control, old))


def rotate_offset(control: Params, old: Ends, new: Ends) -> Params:
    """``phi' = M' + R (phi - M)``: the offset turns with the chord, so that the angle between the two is kept.

    R takes the direction ``Theta_i - Theta^t`` to ``E - Theta^tau``, see :func:`rotate`. Arguments as in
    :func:`keep_offset`.

    Source: AsyncManifold (2025), eq. 17. Deviation: Algorithm 1 uses the new end before it computes it; here the end
    is corrected first.
    """
    turned = rotate(_offset(control, old), *(jax.tree.map(jnp.subtract, end, start) for start, end in (old, new)))
    return jax.tree.map(jnp.add, line(*new, 0.5), turned)


CONTROL_POINTS: dict[str, Callable[[Params, Ends, Ends], Params]] = {"none": keep_offset, "rotation": rotate_offset}


def _offset(control: Params, ends: Ends) -> Params:
    return jax.tree.map(jnp.subtract, control, line(*ends, 0.5))
