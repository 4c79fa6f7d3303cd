"""One-dimensional k-means of a vector with one centroid fixed at zero: the centroids and the nearest one of each entry.

The centroids are sorted, so the nearest centroid of an entry follows from the midpoints between neighbours. XLA makes
of the comparisons with all midpoints one pass over the vector that needs no memory: measured for K = 32 on a CPU, a
tenth of the time of a binary search (``searchsorted``) and a hundredth of that of a sort. The sums of the clusters are
sums of the differences ``x - centroid``, so that float32 suffices for long vectors, and means of equal entries are
exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async.compress.payload import real_of
from fedjax_async.types import Array, Key, Traced

MOST_CENTROIDS = 256  # an index is one byte


class Reference(NamedTuple):
    """What the paper and the code that its authors released do differently."""

    centred: bool  # whether the mean of the vector is subtracted first, and never added again
    refilled: bool  # whether an empty cluster gets a random entry of the vector; if not, it keeps its centroid
    zero_first: bool  # whether the zero is in slot 0 of the table; if not, in its place among the sorted centroids
    stops: Callable[[Array, Array, Traced], Array]  # from the loss before and now, and the tolerance


REFERENCES = {
    "paper": Reference(False, False, True, lambda before, now, tolerance: jnp.abs(before - now) <= tolerance * before),
    "released": Reference(True, True, False, lambda before, now, tolerance: jnp.abs(before - now) < tolerance * before),
}


def random_entries(key: Key, x: Array, count: int) -> Array:
    """One random entry of each of ``count`` equal stretches of x [D]; float[count].

    They are entries at different positions if D >= ``count``, and zeros if D = 0.
    """
    if x.shape[0] == 0:
        return jnp.zeros(count, x.dtype)
    stretch = x.shape[0] / max(count, 1)
    places = (jnp.arange(count, dtype=jnp.float32) + jax.random.uniform(key, (count,), jnp.float32)) * stretch
    return x[jnp.clip(places.astype(jnp.int32), 0, x.shape[0] - 1)]


def cluster(
    x: Array, start: Array, *, key: Key, max_iter: Traced, tolerance: Traced, reference: Reference
) -> tuple[Array, Array]:
    """K-means of x [D] from the K - 1 centroids ``start`` and zero: ``(table [K], index uint8[D])``.

    An iteration assigns each entry to its nearest centroid (a tie to the lower one) and moves each centroid but zero to
    the mean of its entries. The loop ends after ``max_iter`` iterations, or after the second or a later one if the loss
    ``sum (x - table[index])^2`` before the update differs from the one before by at most the share ``tolerance``. The
    index is the nearest centroid after the last update. ``key`` is needed if the reference refills empty clusters.

    If any entry of x or of ``start`` is not finite, the whole table is NaN: no entry decodes to a finite number.
    """
    real: Any = real_of(x)
    largest = jnp.maximum(jnp.max(jnp.abs(x), initial=0), jnp.max(jnp.abs(start), initial=0)).astype(real)
    unit = _unit(largest)
    scaled, others = x.astype(real) / unit, jnp.sort(start.astype(real) / unit)
    if reference.centred:
        scaled = scaled - jnp.sum(scaled) / max(1, scaled.shape[0])

    def unfinished(state: Any) -> Array:
        number, _, _, done = state
        return (number < max_iter) & ~done

    def iterate(state: Any) -> Any:
        number, others, before, _ = state
        table, zero = with_zero(others)
        rank = nearest(scaled, table, jnp.arange(table.shape[0], dtype=jnp.uint8))
        difference = scaled - table.at[rank].get(mode="promise_in_bounds")
        sums, counts = per_cluster(rank, difference, table.shape[0])
        means = table + sums / jnp.maximum(counts, 1)
        if reference.refilled:
            drawn = random_entries(jax.random.fold_in(key, number), scaled, table.shape[0])
            means = jnp.where(counts > 0, means, drawn)
        moved = without(means, zero)
        loss = jnp.sum(jnp.square(difference))
        done = (number > 0) & reference.stops(before, loss, jnp.asarray(tolerance, real))
        return number + 1, jnp.sort(moved) if reference.refilled else moved, loss, done

    first = (jnp.int32(0), others, jnp.zeros((), real), jnp.zeros((), jnp.bool_))
    others = jax.lax.while_loop(unfinished, iterate, first)[1]
    table, zero = with_zero(others)
    place = jnp.arange(table.shape[0], dtype=jnp.int32)
    slot = (
        jnp.where(place == zero, 0, place + jnp.less(place, zero).astype(jnp.int32)) if reference.zero_first else place
    )
    index = nearest(scaled, table, slot.astype(jnp.uint8))
    table = jnp.zeros_like(table).at[slot].set(table * unit)
    return jnp.where(jnp.isfinite(largest), table, jnp.nan).astype(x.dtype), index


def _unit(largest: Array) -> Array:
    """A power of two near the largest magnitude: no square or sum of ``x / unit`` overflows. 1 for 0 and for NaN."""
    most = jnp.finfo(largest.dtype).maxexp - 28
    exponent = jnp.clip(jnp.frexp(largest)[1], -most, most)
    unit = jnp.ldexp(jnp.ones((), largest.dtype), exponent)
    return jnp.where(jnp.isfinite(largest) & (largest > 0), unit, 1)


def with_zero(others: Array) -> tuple[Array, Array]:
    """The ascending centroids ``others`` [K-1] and zero in one ascending table [K]; the place of zero, int32[]."""
    return jnp.sort(jnp.append(others, 0)), jnp.sum(others < 0, dtype=jnp.int32)


def without(table: Array, place: Array) -> Array:
    """``table`` [K] without its entry at ``place``."""
    return jnp.where(jnp.arange(table.shape[0] - 1, dtype=jnp.int32) < place, table[:-1], table[1:])


def nearest(x: Array, table: Array, slot: Array) -> Array:
    """``slot[j]`` of the entry j of the ascending ``table`` [K] that is nearest, a tie to the lower; uint8[D]."""
    middle = 0.5 * table[1:] + 0.5 * table[:-1]
    numbers = slot.astype(x.dtype)  # selections among numbers as wide as x run in as many lanes
    found = jnp.full(x.shape, numbers[0])
    for j in range(table.shape[0] - 1):
        found = jnp.where(x > middle[j], numbers[j + 1], found)
    return found.astype(jnp.uint8)


def per_cluster(rank: Array, x: Array, count: int) -> tuple[Array, Array]:
    """Sums of x [D] over the entries of each rank, and their numbers; float[count] each."""
    sums = jnp.zeros(count, x.dtype).at[rank].add(x, mode="promise_in_bounds")
    counts = jnp.zeros(count, jnp.int32).at[rank].add(1, mode="promise_in_bounds")
    return sums, counts.astype(x.dtype)
