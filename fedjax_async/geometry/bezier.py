"""Curves through models: Bezier curves of any degree, polygonal chains, and the learned control point of AsyncCurve.

A curve is a sequence of points, each a pytree of one structure. The quadratic curve of AsyncCurve is
``bezier((A, phi, E), s)``: A is the start, phi the control point and E the end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.base import check
from fedjax_async.geometry.projection import project_out
from fedjax_async.geometry.vectors import inner, leaves, measure, rebuild, require_alike, root
from fedjax_async.types import Array, Number, Params, Traced


def line(start: Params, end: Params, s: Number) -> Params:
    """The point ``(1 - s) start + s end``, in the dtypes of ``start``.

    It is exactly ``start`` at s = 0, exactly ``end`` at s = 1, and exactly ``start`` everywhere if both are equal.

    Args:
      start, end: pytrees of float arrays, of the same structure and shapes.
      s: the position, float[]; from 0 to 1 it is between the two points, otherwise beyond them. For several positions,
        use ``jax.vmap``.

    Raises: ``ValueError`` if the points differ in structure or shapes or hold no floats, or if s is no scalar.
    """
    require_alike({"start": start, "end": end})
    return _between(start, end, _position(s))


def _between(start: Params, end: Params, s: Array) -> Params:
    near = s < 0.5
    share = jnp.where(near, s, s - 1.0)  # counted from the nearer end
    mixed = [jnp.where(near, a, b) + share * (b - a) for a, b in zip(leaves(start), leaves(end), strict=True)]
    return rebuild(mixed, start)


def bezier(points: Sequence[Params], s: Number) -> Params:
    """The Bezier curve ``B(s) = sum_j C(n, j) s^j (1 - s)^(n - j) P_j`` of degree n, by de Casteljau's algorithm.

    For three points: ``B(s) = (1 - s)^2 A + 2 s (1 - s) phi + s^2 E``. The ends ``B(0)`` and ``B(1)`` are exact. With
    phi at the midpoint of A and E the curve is the line. Time is ``O(n^2 D)``.

    Args:
      points: the n + 1 points P_0, ..., P_n, at least one: pytrees of float arrays, of the same structure and shapes.
      s: the position, float[], from 0 to 1 between the ends. For several, use :func:`bezier_points` or ``jax.vmap``.

    Returns: a pytree like ``points[0]``, in its dtypes.

    Raises: ``ValueError`` as in :func:`line`.

    >>> float(bezier((0.0 * jnp.ones(()), jnp.ones(()), jnp.zeros(())), 0.5))
    0.5

    Source: AsyncManifold (2025), eqs. 28 and 31 and Algorithms 1 and 2. Deviation: the paper drops the factor 2 of the
    middle term; without it the weights do not sum to 1, and a step along the curve shrinks the model towards zero.
    """
    level, s = _checked(points), _position(s)
    while len(level) > 1:
        level = [_between(a, b, s) for a, b in itertools.pairwise(level)]
    return level[0]


def bezier_points(points: Sequence[Params], count: int) -> Params:
    """``count`` >= 2 points of the curve at evenly spaced positions from 0 to 1: a pytree with leaves [count, ...]."""
    check.whole("count", count, 2)
    return jax.vmap(lambda s: bezier(points, s))(jnp.linspace(0.0, 1.0, count))


def bezier_derivative(points: Sequence[Params], s: Number) -> Params:
    """The derivative ``B'(s) = n sum_j C(n - 1, j) s^j (1 - s)^(n - 1 - j) (P_{j+1} - P_j)``; zeros for one point.

    For three points: ``2 (1 - s) (phi - A) + 2 s (E - phi)``. Arguments and result as in :func:`bezier`.
    """
    degree = len(_checked(points)) - 1
    if degree == 0:
        return jax.tree.map(jnp.zeros_like, points[0])
    return bezier([rebuild([degree * a for a in side], points[0]) for side in _sides(points)], s)


def bezier_length(points: Sequence[Params], *, nodes: int = 32) -> Array:
    """The length of the curve from s = 0 to s = 1; float[].

    The speed ``|B'(s)|`` is integrated by Gauss-Legendre quadrature. Its square is a quadratic form in the scalar
    products of the sides ``P_{j+1} - P_j``, so the D parameters are read once, whatever the number of nodes. The
    result is exact to rounding where the speed stays away from 0. Where it reaches 0 (a curve that turns back on
    itself) the relative error is below 1 / nodes^2.

    Args:
      points: as in :func:`bezier`.
      nodes: positions at which the speed is evaluated, at least 1.
    """
    check.whole("nodes", nodes)
    degree, sides = len(_checked(points)) - 1, _sides(points)
    real = jnp.result_type(float)
    if degree == 0:
        return jnp.zeros((), real)
    inverse, _ = measure([leaf for side in sides for leaf in side])
    sides = [[leaf * inverse for leaf in side] for side in sides]
    products = jnp.stack([jnp.stack([inner(a, b) for b in sides]) for a in sides])
    node, weight = np.polynomial.legendre.leggauss(nodes)
    s = (node + 1.0) / 2.0
    bernstein = [math.comb(degree - 1, j) * s**j * (1.0 - s) ** (degree - 1 - j) for j in range(degree)]
    basis = jnp.asarray(np.stack(bernstein), real)  # [n, nodes]
    speed = degree * root(jnp.sum(basis * (products @ basis), axis=0))
    return jnp.sum(jnp.asarray(weight / 2.0, real) * speed) / inverse


def polygon(points: Sequence[Params], s: Number) -> Params:
    """The polygonal chain through ``points``; every side takes the same share of s in [0, 1].

    ``P_j + (n s - j) (P_{j+1} - P_j)`` for ``j <= n s <= j + 1``, with n the number of sides. A position outside
    [0, 1] gives the nearer end. Arguments and result as in :func:`bezier`.

    Source: Garipov et al. (2018), section 3.2, here with any number of bends.
    """
    sides = len(_checked(points)) - 1
    position = jnp.clip(_position(s), 0.0, 1.0) * sides
    weights = [jnp.maximum(1.0 - jnp.abs(position - j), 0.0) for j in range(sides + 1)]
    terms = zip(*map(leaves, points), strict=True)
    mixed = [sum(w * a for w, a in zip(weights[1:], term[1:], strict=True)) + weights[0] * term[0] for term in terms]
    return rebuild(mixed, points[0])


def control_point(start: Params, end: Params, displacement: Params, *, gamma: Traced = 1.0) -> Params:
    """The control point ``phi = M + (dphi - gamma P_Delta(dphi))`` of a learned displacement ``dphi``.

    ``M = (A + E) / 2`` is the midpoint, ``P_Delta`` the orthogonal projection on the chord ``Delta = A - E``, all
    parameters as one vector. With gamma = 1 the curve bends only orthogonally to its chord. If the chord has length
    zero, nothing is removed.

    Args:
      start: A.
      end: E.
      displacement: dphi, shaped like both.
      gamma: the share of the projection that is removed, in [0, 1]; 0 keeps the displacement as it is.

    Source: AsyncManifold (2025), eq. 30. Deviation: Algorithm 2 returns ``M + dphi``, without the projection.
    """
    check.in_range("gamma", gamma, 0.0, 1.0)
    require_alike({"start": start, "end": end, "displacement": displacement})
    bent = project_out(displacement, jax.tree.map(jnp.subtract, start, end), per="whole")
    return jax.tree.map(jnp.add, line(start, end, 0.5), line(displacement, bent, gamma))


def _checked(points: Sequence[Params]) -> list[Params]:
    """The points as a list. Raises ``ValueError`` if there are none, or if their structures or shapes differ."""
    check.require(len(points) > 0, "points", list(points), "at least one point")
    require_alike({f"points[{j}]": point for j, point in enumerate(points)})
    return list(points)


def _position(s: Number) -> Array:
    """A position as a scalar in JAX's default float type."""
    check.require(jnp.shape(s) == (), "s.shape", jnp.shape(s), "(): jax.vmap evaluates at several positions")
    return jnp.asarray(s, jnp.result_type(float))


def _sides(points: Sequence[Params]) -> list[list[Array]]:
    """The differences ``P_{j+1} - P_j``, each as a list of leaves."""
    each = list(map(leaves, points))
    return [list(map(jnp.subtract, b, a)) for a, b in itertools.pairwise(each)]
