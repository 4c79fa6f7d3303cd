"""Compressors that keep k of D entries: the largest, approximately the largest, or random ones.

The second half finds the k largest of D unsigned integers without sorting. Non-negative floats have the same order as
their bit patterns, so the k-th largest is found digit by digit. A histogram of the leading digit tells its bin; a
histogram of the next digit, over the entries of that bin, tells the next digit, and so on. All larger entries are kept.
Entries equal to the k-th largest fill the rest, the lowest indices first. The indices of the kept entries are then
listed by counting bits in words of 32. Of few numbers each one counts those that come before it.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from fedjax_async.base import check
from fedjax_async.compress.payload import (
    Compressor,
    Dense,
    Sparse,
    nan_unless_finite,
    require_vector,
    to_dense,
    words,
)
from fedjax_async.compress.sizes import bits
from fedjax_async.types import Array, Key

WORD = 32  # bits of a word
FEW = 64  # as many numbers are compared each with each, which compiles in a fifth of the time; of more it runs slower


def kept(ratio: float, size: int) -> int:
    """k = ceil(ratio * D); a rounding error just above an integer does not make k one larger."""
    return min(size, math.ceil(ratio * size * (1 - 1e-12)))


def _require_ratio(ratio: object) -> None:
    allowed = "a number above 0 and at most 1"
    fits = isinstance(ratio, (int, float)) and not isinstance(ratio, bool) and 0 < ratio <= 1
    check.require(fits, "ratio", ratio, allowed)


def _decompress(payload: Sparse) -> Array:
    return to_dense(jnp.asarray(payload.index), jnp.asarray(payload.values.values), payload.size)


def topk(*, ratio: float = 0.1) -> Compressor:
    """The k = ceil(`ratio` D) entries of largest magnitude, exactly; among equal ones the lowest indices.

    ``||C(x) - x||^2 <= (1 - k/D) ||x||^2``. Source: Alistarh et al. (2018), section 3.
    """
    _require_ratio(ratio)

    def compress(key: Key, x: Array) -> Sparse:
        del key
        require_vector(x)
        index = largest(magnitude(x), kept(ratio, len(x)), 8 * x.dtype.itemsize - 1)
        return Sparse(index, Dense(x[index]), len(x))

    return Compressor(compress, _decompress, bits)


def topk_fast(*, ratio: float = 0.1, mantissa: int = 3) -> Compressor:
    """Approximate top-k: k = ceil(`ratio` D) entries, compared by their leading bits (`mantissa` bits of the mantissa).

    It needs one histogram instead of three. Every entry left out is smaller than ``(1 + eps) = 1 + 2^-mantissa`` times
    every entry kept (above the subnormals), so ``||C(x) - x||^2 <= (1 + eps)^2 ||TopK(x) - x||^2``. Among entries with
    the same leading bits, the lowest indices are kept.
    """
    _require_ratio(ratio)
    check.whole("mantissa", mantissa, 0, 7)

    def compress(key: Key, x: Array) -> Sparse:
        del key
        require_vector(x)
        cut = jnp.finfo(x.dtype).nmant - mantissa
        index = largest(magnitude(x) >> cut, kept(ratio, len(x)), 8 * x.dtype.itemsize - 1 - cut)
        return Sparse(index, Dense(x[index]), len(x))

    return Compressor(compress, _decompress, bits)


def randk(*, ratio: float = 0.1, unbiased: bool = True) -> Compressor:
    """k = ceil(`ratio` D) entries drawn at random; multiplied by D/k if `unbiased`.

    If unbiased, ``E C(x) = x`` and ``E||C(x) - x||^2 = (D/k - 1) ||x||^2``. If not, ``E||C(x) - x||^2 = (1 - k/D)
    ||x||^2``; use it with error feedback. Source: Stich, Cordonnier, Jaggi (2018), definition 2.2.
    """
    _require_ratio(ratio)
    check.one_of("unbiased", unbiased, [True, False])

    def compress(key: Key, x: Array) -> Sparse:
        require_vector(x)
        size = len(x)
        k = kept(ratio, size)
        index = largest(words(key, size), k, 32)
        factor = size / k if unbiased and size else 1.0
        return Sparse(index, Dense(nan_unless_finite(x[index] * jnp.array(factor, x.dtype), x)), size)

    def error(size: int) -> float:
        return size / max(1, kept(ratio, size)) - 1

    return Compressor(compress, _decompress, bits, error if unbiased else None, feedback=not unbiased)


# --- the k largest, without sorting -----------------------------------------------------------


def magnitude(x: Array) -> Array:
    """The bit pattern of |x| as an unsigned integer of its width; ordered like |x|, NaN above everything."""
    return jax.lax.bitcast_convert_type(jnp.abs(x), jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def largest(patterns: Array, k: int, bits: int) -> Array:
    """Indices of the k largest of ``patterns`` [D] (unsigned), the lowest ones among equals; int32[k], ascending.

    ``0 <= k <= D``; the patterns are below ``2^bits``. Both are static.
    """
    size = patterns.shape[0]
    if k in (0, size):
        return jnp.arange(k, dtype=jnp.int32)
    if size <= FEW:
        return _largest_of_few(patterns, k)
    threshold, needed = _kth_largest(patterns, k, bits)
    rows = -(-size // WORD)
    valid = (jnp.arange(rows * WORD, dtype=jnp.int32) < size).reshape(rows, WORD)
    padded = jnp.pad(patterns, (0, rows * WORD - size)).reshape(rows, WORD)
    equal = (padded == threshold) & valid
    return _indices((padded > threshold) | _first_equals(equal, needed), k)


def _largest_of_few(patterns: Array, k: int) -> Array:
    """As :func:`largest`, by D^2 comparisons."""
    place = jnp.arange(patterns.shape[0], dtype=jnp.int32)
    earlier = place[None, :] < place[:, None]
    other, own = patterns[None, :], patterns[:, None]
    keep = jnp.sum((other > own) | ((other == own) & earlier), axis=1, dtype=jnp.int32) < k
    rank = jnp.sum(keep[None, :] & earlier, axis=1, dtype=jnp.int32)
    wanted = jnp.arange(k, dtype=jnp.int32)[:, None]
    return jnp.sum(jnp.where(keep[None, :] & (rank[None, :] == wanted), place[None, :], 0), axis=1, dtype=jnp.int32)


def _kth_largest(patterns: Array, k: int, bits: int) -> tuple[Array, Array]:
    """The k-th largest pattern, and how many patterns equal to it belong to the k largest, int32[]."""
    prefix, needed, shift = jnp.zeros((), patterns.dtype), jnp.int32(k), bits
    for width in _digit_widths(bits, patterns.shape[0]):
        bins = 1 << width
        digit = ((patterns >> (shift - width)) & jnp.array(bins - 1, patterns.dtype)).astype(jnp.int32)
        if shift < bits:  # drop the entries outside the bin found so far
            digit = jnp.where((patterns >> shift) == prefix, digit, bins)
        shift -= width
        histogram = jnp.zeros(bins, jnp.int32).at[digit].add(1, mode="drop")
        at_least = jnp.cumsum(histogram[::-1], dtype=jnp.int32)[::-1]
        found = jnp.sum(at_least >= needed, dtype=jnp.int32) - 1
        needed = needed - (at_least[found] - histogram[found])
        prefix = (prefix << width) | found.astype(patterns.dtype)
    return prefix, needed


def _digit_widths(bits: int, size: int) -> list[int]:
    """Widths of the digits, the leading one first: more bins for a histogram of more numbers."""
    widest = min(16, max(6, size.bit_length() - 4))
    count = -(-bits // widest)
    return [bits * (i + 1) // count - bits * i // count for i in range(count)]


def _first_equals(equal: Array, needed: Array) -> Array:
    """bool[rows, 32]: the first ``needed`` trues of ``equal``."""
    counts = jnp.sum(equal, axis=1, dtype=jnp.int32)
    through = jnp.cumsum(counts, dtype=jnp.int32)
    row = jnp.sum(through < needed, dtype=jnp.int32)  # the row that holds the last of them
    within = jnp.cumsum(equal[row], dtype=jnp.int32) <= needed - (through[row] - counts[row])
    rows = jnp.arange(equal.shape[0], dtype=jnp.int32)[:, None]
    return equal & ((rows < row) | ((rows == row) & within[None, :]))


def _indices(keep: Array, k: int) -> Array:
    """int32[k]: indices of the k trues of ``keep`` [rows, 32], ascending."""
    bit = jnp.uint32(1) << jnp.arange(WORD, dtype=jnp.uint32)
    word = jnp.sum(jnp.where(keep, bit[None, :], jnp.uint32(0)), axis=1, dtype=jnp.uint32)
    through = jnp.cumsum(jax.lax.population_count(word), dtype=jnp.int32)
    ends = jnp.zeros(k, jnp.int32).at[through].add(1, mode="drop")  # words that end before the j-th index
    owner = jnp.cumsum(ends, dtype=jnp.int32)
    before = jnp.where(owner > 0, through[jnp.maximum(owner - 1, 0)], 0)
    return WORD * owner + _nth_set_bit(word[owner], jnp.arange(1, k + 1, dtype=jnp.int32) - before)


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
