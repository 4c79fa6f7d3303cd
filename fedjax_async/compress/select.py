"""The places of the k largest of D unsigned integers, without sorting.

Non-negative floats are in the order of their bit patterns, so the k-th largest is found digit by digit: a histogram
of the leading digit says in which bin it lies, one of the next digit, within that bin, the next digits. What lies
above it is kept, and of what equals it as many of the lowest index as are still needed. The kept places are then
listed by counting them in words of 32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_async.types import Array

LANES = 32


def magnitude(x: Array) -> Array:
    """The bit pattern of |x| as an unsigned integer of its width: in the order of |x|, NaN above everything."""
    return jax.lax.bitcast_convert_type(jnp.abs(x), jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def _digit_widths(bits: int, size: int) -> list[int]:
    """Widths of the digits, leading one first: as many bins as a histogram of ``size`` numbers pays for."""
    widest = min(16, max(6, size.bit_length() - 4))
    count = -(-bits // widest)
    return [bits * (i + 1) // count - bits * i // count for i in range(count)]


def _kth_largest(patterns: Array, k: int, bits: int) -> tuple[Array, Array]:
    """The k-th largest pattern, and how many of its equals belong to the k largest, int32[]."""
    prefix, needed, shift = jnp.zeros((), patterns.dtype), jnp.int32(k), bits
    for width in _digit_widths(bits, patterns.shape[0]):
        bins = 1 << width
        digit = ((patterns >> (shift - width)) & jnp.array(bins - 1, patterns.dtype)).astype(jnp.int32)
        if shift < bits:  # outside of the bin found so far: nowhere
            digit = jnp.where((patterns >> shift) == prefix, digit, bins)
        shift -= width
        histogram = jnp.zeros(bins, jnp.int32).at[digit].add(1, mode="drop")
        at_least = jnp.cumsum(histogram[::-1], dtype=jnp.int32)[::-1]
        found = jnp.sum(at_least >= needed, dtype=jnp.int32) - 1
        needed = needed - (at_least[found] - histogram[found])
        prefix = (prefix << width) | found.astype(patterns.dtype)
    return prefix, needed


def _nth_set_bit(word: Array, n: Array) -> Array:
    """Position of the n-th set bit (n = 1: the lowest) of each 32-bit word; int32."""
    position = jnp.zeros(word.shape, jnp.int32)
    for half in (16, 8, 4, 2, 1):
        low = word & jnp.uint32((1 << half) - 1)
        count = jax.lax.population_count(low).astype(jnp.int32)
        beyond = n > count
        n = jnp.where(beyond, n - count, n)
        word = jnp.where(beyond, word >> half, low)
        position = position + half * beyond.astype(jnp.int32)
    return position


def _first_equals(equal: Array, needed: Array) -> Array:
    """bool[W, 32]: of the places ``equal`` the first ``needed``."""
    counts = jnp.sum(equal, axis=1, dtype=jnp.int32)
    through = jnp.cumsum(counts, dtype=jnp.int32)
    row = jnp.sum(through < needed, dtype=jnp.int32)  # the row that holds the last of them
    within = jnp.cumsum(equal[row], dtype=jnp.int32) <= needed - (through[row] - counts[row])
    rows = jnp.arange(equal.shape[0], dtype=jnp.int32)[:, None]
    return equal & ((rows < row) | ((rows == row) & within[None, :]))


def _places(keep: Array, k: int) -> Array:
    """int32[k]: where the k trues of ``keep`` [W, 32] are, ascending."""
    lanes = jnp.uint32(1) << jnp.arange(LANES, dtype=jnp.uint32)
    word = jnp.sum(jnp.where(keep, lanes[None, :], jnp.uint32(0)), axis=1, dtype=jnp.uint32)
    through = jnp.cumsum(jax.lax.population_count(word), dtype=jnp.int32)
    ends = jnp.zeros(k, jnp.int32).at[through].add(1, mode="drop")  # words that end before the j-th place
    owner = jnp.cumsum(ends, dtype=jnp.int32)
    before = jnp.where(owner > 0, through[jnp.maximum(owner - 1, 0)], 0)
    return LANES * owner + _nth_set_bit(word[owner], jnp.arange(1, k + 1, dtype=jnp.int32) - before)


def largest(patterns: Array, k: int, bits: int) -> Array:
    """Places of the k largest of ``patterns`` [D] (unsigned), of equals those of the lowest index; int32[k], ascending.

    ``0 <= k <= D``; the patterns are below ``2^bits``. Both are static.
    """
    size = patterns.shape[0]
    if k in (0, size):
        return jnp.arange(k, dtype=jnp.int32)
    threshold, needed = _kth_largest(patterns, k, bits)
    rows = -(-size // LANES)
    valid = (jnp.arange(rows * LANES, dtype=jnp.int32) < size).reshape(rows, LANES)
    padded = jnp.pad(patterns, (0, rows * LANES - size)).reshape(rows, LANES)
    equal = (padded == threshold) & valid
    return _places((padded > threshold) | _first_equals(equal, needed), k)
