"""Compressors that keep every entry in fewer bits: signs, QSGD's levels, 16-bit floats; and the identity."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_async.base import check
from fedjax_async.compress.payload import (
    MOST_STEPS,
    Buckets,
    Compressor,
    Dense,
    Levels,
    Signs,
    nan_unless_finite,
    real_of,
    require_vector,
    uniform,
)
from fedjax_async.compress.sizes import bits
from fedjax_async.types import Array, Key, Traced


def sign() -> Compressor:
    """+1 where x >= 0, else -1, as in AsynFLC's experiments; no contraction, so use a tiny server learning rate.

    One bit per entry. Zeros, -0 too, become +1. Source: Bernstein et al. (2018).
    """

    def compress(key: Key, x: Array) -> Signs:
        del key
        require_vector(x)
        return Signs(jnp.less(x, 0), nan_unless_finite(jnp.ones((), x.dtype), x), scaled=False)

    # an error far larger than small numbers
    return Compressor(compress, _decompress_signs, bits, error=lambda size: math.inf, feedback=False)


def scaled_sign() -> Compressor:
    """The signs times the mean magnitude, ``(||x||_1 / D) sign(x)``: one bit per entry and one number.

    ``||C(x) - x||^2 = (1 - ||x||_1^2 / (D ||x||^2)) ||x||^2``, at most ``(1 - 1/D) ||x||^2``. With ``per="layer"``
    each layer has its own scale. Source: Karimireddy et al. (2019), section 4.
    """

    def compress(key: Key, x: Array) -> Signs:
        del key
        require_vector(x)
        return Signs(jnp.less(x, 0), mean_magnitude(x), scaled=True)

    return Compressor(compress, _decompress_signs, bits)


def _decompress_signs(payload: Signs) -> Array:
    scale = jnp.asarray(payload.scale)
    return jnp.where(payload.negative, -scale, scale)


def mean_magnitude(x: Array) -> Array:
    """``||x||_1 / D`` without overflow, 0 for an empty vector, in the type of x."""
    x_real = jnp.abs(x).astype(real_of(x))
    largest = jnp.max(x_real, initial=0)
    unit = jnp.where(largest > 0, largest, jnp.ones_like(largest))
    return (largest * (jnp.sum(x_real / unit) / max(1, len(x)))).astype(x.dtype)


def levels_of(width: int) -> int:
    """Steps s of QSGD with ``width`` bits per entry: the 2 s + 1 values -s .. s fit for s = 2^(width-1) - 1."""
    check.whole("width", width, 2, 16)
    return 2 ** (width - 1) - 1


def qsgd(*, levels: Traced = 7, scaled: bool = False, bucket: int | None = None, norm: str = "euclidean") -> Compressor:
    """Stochastic rounding to `levels` steps of the norm: ``||x|| sign(x_j) l_j / s``, E l_j = s |x_j| / ||x||.

    With b bits per entry, levels = 2^(b-1) - 1: 1, 7, 127 for 2, 4, 8 bits. Any integer from 1 to 32767 is allowed, and
    it may be traced. Unbiased, with ``E||C(x) - x||^2 <= beta ||x||^2``, ``beta = min(D/s^2, sqrt(D)/s)``. If
    `scaled`, the result is multiplied by ``1/(1 + beta)``: biased, but a contraction by that factor for every beta, as
    error feedback needs; it is the default then.

    Args:
      bucket: give every `bucket` entries a norm of their own, which is sent with them; D in beta is then `bucket`.
        None: one norm for the whole vector.
      norm: ``euclidean``, or ``max``, the largest magnitude, which makes the steps shorter, above all in long vectors.
        Then ``beta = min(D/(4 s^2), sqrt(D)/s)``.

    Source: Alistarh et al. (2017), sections 3.1 and 4 (buckets, maximum norm) and lemma 3.1; Basu et al. (2019),
    lemma 2. The bound for the maximum norm: a rounding has variance at most 1/4 of a step's square.
    """
    if isinstance(levels, numbers.Real):
        check.whole("levels", levels, 1, MOST_STEPS)
    check.one_of("scaled", scaled, [True, False])
    check.one_of("norm", norm, NORMS)
    if bucket is not None:
        check.whole("bucket", bucket, 1, 2**31 - 1)

    def quantised(x: Array, random: Array, steps: Array, count: int) -> tuple[Array, Array]:
        """The levels of x under one norm, and the norm that is sent."""
        size, real = NORMS[norm](x), real_of(x)
        unit = jnp.where(size > 0, size, jnp.ones_like(size)).astype(real)
        most = steps.astype(real)
        share = jnp.minimum(jnp.abs(x).astype(real) / unit * most, most)
        low = jnp.floor(share)
        level = (low + (random.astype(real) < share - low).astype(real)).astype(jnp.int16)
        beta = relative_variance(count, steps, norm).astype(real)
        sent = size.astype(real) / (1 + beta) if scaled else size
        return jnp.where(jnp.less(x, 0), -level, level), sent.astype(x.dtype)

    def compress(key: Key, x: Array) -> Levels | Buckets:
        require_vector(x)
        steps, random = jnp.asarray(levels, jnp.int32), uniform(key, len(x))
        if bucket is None:
            return Levels(*quantised(x, random, steps, len(x)), steps)
        rows = -(-len(x) // bucket)
        both = (jnp.pad(each, (0, rows * bucket - len(x))).reshape(rows, bucket) for each in (x, random))
        level, sent = jax.vmap(lambda row, drawn: quantised(row, drawn, steps, bucket))(*both)
        return Buckets(level.reshape(-1)[: len(x)], sent, steps, bucket)

    def decompress(payload: Levels | Buckets) -> Array:
        sent, level = jnp.asarray(payload.norm), jnp.asarray(payload.level)
        if isinstance(payload, Buckets):
            sent = jnp.repeat(sent, payload.bucket)[: len(level)]
        real = real_of(sent)
        share = level.astype(real) / jnp.asarray(payload.steps).astype(real)
        return (sent.astype(real) * share).astype(sent.dtype)

    def error(size: int) -> float:
        count, steps = size if bucket is None else min(size, bucket), float(levels)
        # a long step leaves most entries at 0 and is the mean magnitude times the step; a short one rounds evenly
        longest = count**0.5 if norm == "euclidean" else (2 * math.log(max(count, 2))) ** 0.5
        return min((longest / steps) ** 2 / 6, (2 / math.pi) ** 0.5 * longest / steps)

    return Compressor(compress, decompress, bits, None if scaled else error, feedback=scaled)


def relative_variance(size: int, steps: Array, norm: str = "euclidean") -> Array:
    """The bound beta on the relative variance of ``qsgd`` for ``size`` entries with one norm; float32[]."""
    s = steps.astype(jnp.float32)
    return jnp.minimum((size if norm == "euclidean" else size / 4) / s**2, size**0.5 / s)


def euclidean(x: Array) -> Array:
    """``||x||`` without over- or underflow of the squares, 0 for an empty vector, in the type of x."""
    x_real = x.astype(real_of(x))
    largest = jnp.max(jnp.abs(x_real), initial=0)
    unit = jnp.where(largest > 0, largest, jnp.ones_like(largest))
    return (largest * jnp.sqrt(jnp.sum(jnp.square(x_real / unit)))).astype(x.dtype)


def largest_magnitude(x: Array) -> Array:
    """``max |x_j|``, 0 for an empty vector, in the type of x."""
    return jnp.max(jnp.abs(x), initial=0)


NORMS: dict[str, Callable[[Array], Array]] = {"euclidean": euclidean, "max": largest_magnitude}

_CASTS = {"float16": jnp.float16, "bfloat16": jnp.bfloat16}


def cast(*, dtype: str = "bfloat16") -> Compressor:
    """Every entry in 16 bits, `dtype` float16 or bfloat16, rounded to nearest; finite entries out of range are clipped.

    Relative error at most 2^-11 (float16, from 2^-14 to 65504) or 2^-8 (bfloat16). ``x_hat`` is in JAX's default float
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
    """No compression: all entries, in their own float type."""

    def compress(key: Key, x: Array) -> Dense:
        del key
        require_vector(x)
        return Dense(x)

    return Compressor(compress, lambda payload: jnp.asarray(payload.values), bits)
