"""Families of curves between two models: quadratic and cubic Bezier curves, and polygonal chains.

A curve of a family is given by its ends and m inner points, as offsets from the chord ``c = E - A``: inner point j is
``P_j = A + j / (m + 1) c + o_j``, j = 1, ..., m. Both kinds of curve reproduce the line when all offsets are zero, so

``gamma(s) = A + s c + sum_j b_j(s) o_j``

where b_j are the Bernstein polynomials of degree m + 1, or the hat functions of a chain. With one inner point, the
offset is a pytree like the ends; with several, its leaves have them on a leading axis, [m, ...].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async.base import check, registry
from fedjax_async.geometry.bezier import bezier, line, polygon
from fedjax_async.types import Array, Number, Params, Tree

CurvePath = Callable[[Sequence[Params], Number], Params]  # (points, s) -> the point of the curve at s


class CurveFamily(NamedTuple):
    """Curves with m inner points."""

    inner: int  # m
    weights: Callable[[Array], Array]  # s in [0, 1] -> b_j(s): float[] for m = 1, otherwise float[m]
    path: CurvePath  # the curve through or near its points A, P_1, ..., P_m, E

    def each(self, function: Callable[..., Tree]) -> Callable[..., Tree]:
        """``function`` of one offset, for the offsets of all inner points; further arguments are the same for all."""
        if self.inner == 1:
            return function
        return lambda offsets, *others: jax.vmap(lambda offset: function(offset, *others))(offsets)

    def require_offsets(self, offsets: Params, end: Params) -> None:
        """Raise ``ValueError`` unless the offsets have the shapes of m inner points beside an end of this curve."""
        axis = () if self.inner == 1 else (self.inner,)
        have, want = (
            [jnp.shape(leaf) for leaf in jax.tree.leaves(offsets)],
            [(*axis, *jnp.shape(leaf)) for leaf in jax.tree.leaves(end)],
        )
        check.require(have == want, "shapes of the curve's offsets", have, f"{want}: the curve that clients train")

    def aside(self, offsets: Params, s: Array) -> Params:
        """``sum_j b_j(s) o_j``, how far the curve is from its chord at s; a pytree like an end."""
        weights = self.weights(s)
        if self.inner == 1:
            return jax.tree.map(lambda leaf: weights.astype(leaf.dtype) * leaf, offsets)
        return jax.tree.map(lambda leaf: jnp.tensordot(weights.astype(leaf.dtype), leaf, 1), offsets)

    def spread(self, vector: Array, s: Array) -> Array:
        """``b_j(s) v`` for every j: the derivative of ``<v, aside>`` with respect to the offsets, [D] or [m, D]."""
        weights = self.weights(s)
        return weights * vector if self.inner == 1 else weights[:, None] * vector[None]

    def points(self, start: Params, end: Params, offsets: Params) -> tuple[Params, ...]:
        """The points ``A, P_1, ..., P_m, E``, as :attr:`path` takes them."""
        rows = [offsets] if self.inner == 1 else [_row(offsets, j) for j in range(self.inner)]
        on_chord = [line(start, end, j / (self.inner + 1)) for j in range(1, self.inner + 1)]
        return (start, *(jax.tree.map(jnp.add, point, row) for point, row in zip(on_chord, rows, strict=True)), end)


def _row(offsets: Params, j: int) -> Params:
    return jax.tree.map(lambda leaf: leaf[j], offsets)


def quadratic() -> CurveFamily:
    """``(1 - s)^2 A + 2 s (1 - s) P_1 + s^2 E``, with one control point (AsyncManifold 2025, eq. 28)."""
    return CurveFamily(1, lambda s: 2.0 * s * (1.0 - s), bezier)


def cubic() -> CurveFamily:
    """``(1 - s)^3 A + 3 s (1 - s)^2 P_1 + 3 s^2 (1 - s) P_2 + s^3 E``, with two control points."""

    def weights(s: Array) -> Array:
        return jnp.stack([math.comb(3, j) * s**j * (1.0 - s) ** (3 - j) for j in (1, 2)])

    return CurveFamily(2, weights, bezier)


def chain(*, bends: int = 1) -> CurveFamily:
    """The polygonal chain through A, P_1, ..., P_m and E; every side takes the same share of s.

    Args:
      bends: m >= 1. Source: Garipov et al. (2018), section 3.2, with one bend.
    """
    check.whole("bends", bends)
    if bends == 1:
        return CurveFamily(1, lambda s: jnp.maximum(1.0 - jnp.abs(2.0 * s - 1.0), 0.0), polygon)

    def weights(s: Array) -> Array:
        return jnp.maximum(1.0 - jnp.abs((bends + 1) * s - jnp.arange(1, bends + 1).astype(s.dtype)), 0.0)

    return CurveFamily(bends, weights, polygon)


FAMILIES: dict[str, Callable[..., CurveFamily]] = {"quadratic": quadratic, "cubic": cubic, "chain": chain}


def family(curve: str = "quadratic", bends: int | None = None) -> CurveFamily:
    """The family by its name in ``FAMILIES``, as options of methods give it.

    Args:
      curve: ``quadratic``, ``cubic`` or ``chain``.
      bends: of ``chain`` alone, its inner points, >= 1; 1 by default.

    Raises: ``ValueError`` for an unknown name, for ``bends`` of another curve, or out of range.
    """
    make = registry.find("curve", FAMILIES, curve)
    if make is not chain:
        check.require(bends is None, "bends", bends, "left out unless curve=chain")
        return make()
    return chain() if bends is None else chain(bends=bends)
