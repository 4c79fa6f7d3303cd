"""Compressors that keep every entry, in fewer bits."""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_async import check
from fedjax_async.compress.chance import uniform
from fedjax_async.compress.payload import MOST_STEPS, Compressor, Dense, Levels, real_of, require_vector
from fedjax_async.compress.sizes import bits
from fedjax_async.types import Array, Key, Traced


def levels_of(width: int) -> int:
    """Steps s of QSGD with ``width`` bits an entry: the 2 s + 1 values -s .. s fit for s = 2^(width-1) - 1."""
    check.whole("width", width, 2, 16)
    return 2 ** (width - 1) - 1


def qsgd(*, levels: Traced = 7, scaled: bool = False) -> Compressor:
    """Stochastic rounding to `levels` steps of the norm: ``||x|| sign(x_j) l_j / s``, E l_j = s |x_j| / ||x||.

    b bits an entry are levels = 2^(b-1) - 1: 1, 7, 127 for 2, 4, 8; any number from 1 to 32767, which may be traced.
    Unbiased, ``E||C(x) - x||^2 <= beta ||x||^2`` with ``beta = min(D/s^2, sqrt(D)/s)``. If `scaled`, multiplied by
    ``1/(1 + beta)``: biased, but a contraction by that factor whatever beta, as error feedback needs it.
    Source: Alistarh et al. (2017), section 3.1 and lemma 3.1; Basu et al. (2019), lemma 2.
    """
    if isinstance(levels, (int, float)):
        check.whole("levels", levels, 1, MOST_STEPS)
    check.one_of("scaled", scaled, [True, False])

    def compress(key: Key, x: Array) -> Levels:
        require_vector(x)
        steps, norm = jnp.asarray(levels, jnp.int32), euclidean(x)
        real = real_of(x)
        unit = jnp.where(norm > 0, norm, jnp.ones_like(norm)).astype(real)
        most = steps.astype(real)
        share = jnp.minimum(jnp.abs(x).astype(real) / unit * most, most)
        low = jnp.floor(share)
        up = uniform(key, len(x)).astype(real) < share - low
        level = (low + up.astype(real)).astype(jnp.int16)
        sent = norm.astype(real) / (1 + spread_of(len(x), steps).astype(real)) if scaled else norm
        return Levels(jnp.where(jnp.less(x, 0), -level, level), sent.astype(x.dtype), steps)

    def decompress(payload: Levels) -> Array:
        norm, level = jnp.asarray(payload.norm), jnp.asarray(payload.level)
        real = real_of(norm)
        share = level.astype(real) / jnp.asarray(payload.steps).astype(real)
        return (norm.astype(real) * share).astype(norm.dtype)

    return Compressor(compress, decompress, bits)


def spread_of(size: int, steps: Array) -> Array:
    """``beta = min(D/s^2, sqrt(D)/s)``, QSGD's relative variance at most; float32[]."""
    s = steps.astype(jnp.float32)
    return jnp.minimum(size / s**2, size**0.5 / s)


def euclidean(x: Array) -> Array:
    """``||x||`` without over- or underflow of the squares, 0 of an empty vector, in the type of x."""
    x_real = x.astype(real_of(x))
    largest = jnp.max(jnp.abs(x_real), initial=0)
    unit = jnp.where(largest > 0, largest, jnp.ones_like(largest))
    return (largest * jnp.sqrt(jnp.sum(jnp.square(x_real / unit)))).astype(x.dtype)


_CASTS = {"float16": jnp.float16, "bfloat16": jnp.bfloat16}


def cast(*, dtype: str = "bfloat16") -> Compressor:
    """Every entry in 16 bits, `dtype` float16 or bfloat16, rounded to nearest; too large ones become the largest.

    Relative error at most 2^-11 and 2^-8, for float16 only from 2^-14 to 65504. ``x_hat`` is in JAX's default float
    type.
    """
    check.one_of("dtype", dtype, _CASTS)
    narrow = _CASTS[dtype]

    def compress(key: Key, x: Array) -> Dense:
        del key
        require_vector(x)
        most = jnp.array(jnp.finfo(narrow).max).astype(real_of(x))
        x_real = x.astype(real_of(x))
        return Dense(jnp.where(jnp.isfinite(x_real), jnp.clip(x_real, -most, most), x_real).astype(narrow))

    return Compressor(compress, lambda payload: jnp.asarray(payload.values).astype(jnp.result_type(float)), bits)


def identity() -> Compressor:
    """Nothing is lost: all entries, in their own float type."""

    def compress(key: Key, x: Array) -> Dense:
        del key
        require_vector(x)
        return Dense(x)

    return Compressor(compress, lambda payload: jnp.asarray(payload.values), bits)
