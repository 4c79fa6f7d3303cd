"""Compressors that keep k of D entries: the largest, nearly the largest, random ones."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from fedjax_async import check
from fedjax_async.compress.chance import words
from fedjax_async.compress.payload import Compressor, Dense, Sparse, refusable, require_vector, spread
from fedjax_async.compress.select import largest, magnitude
from fedjax_async.compress.sizes import bits
from fedjax_async.types import Array, Key


def kept(ratio: float, size: int) -> int:
    """k = ceil(ratio * D); a product that only rounding lifted above a whole number is that number."""
    return min(size, math.ceil(ratio * size * (1 - 1e-12)))


def _require_ratio(ratio: Any) -> None:
    allowed = "a number above 0 and at most 1 (it sets a shape, so it cannot be traced)"
    fits = isinstance(ratio, (int, float)) and not isinstance(ratio, bool) and 0 < ratio <= 1
    check.require(fits, "ratio", ratio, allowed)


def _decompress(payload: Sparse) -> Array:
    return spread(jnp.asarray(payload.index), jnp.asarray(payload.values.values), payload.size)


def topk(*, ratio: float = 0.1) -> Compressor:
    """The k = ceil(`ratio` D) entries of largest magnitude, exactly; of equals those of the lowest index.

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
    """k = ceil(`ratio` D) of the largest entries, compared by their leading bits, `mantissa` of the mantissa.

    One histogram instead of three. Every entry left out is smaller than ``(1 + eps) = 1 + 2^-mantissa`` times every
    entry kept (above the subnormals), so ``||C(x) - x||^2 <= (1 + eps)^2 ||TopK(x) - x||^2``. Entries with the same
    leading bits are taken in the order of their index.
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

    Unbiased: ``E C(x) = x`` and ``E||C(x) - x||^2 = (D/k - 1) ||x||^2``. Else ``(1 - k/D) ||x||^2``, for use with
    error feedback. Source: Stich, Cordonnier, Jaggi (2018), definition 2.2.
    """
    _require_ratio(ratio)
    check.one_of("unbiased", unbiased, [True, False])

    def compress(key: Key, x: Array) -> Sparse:
        require_vector(x)
        size = len(x)
        k = kept(ratio, size)
        index = largest(words(key, size), k, 32)
        factor = size / k if unbiased and size else 1.0
        return Sparse(index, Dense(refusable(x[index] * jnp.array(factor, x.dtype), x)), size)

    return Compressor(compress, _decompress, bits)
