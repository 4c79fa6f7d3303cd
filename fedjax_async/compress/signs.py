"""Compressors that keep the signs."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from fedjax_async.compress.payload import Compressor, Signs, real_of, refusable, require_vector
from fedjax_async.compress.sizes import bits
from fedjax_async.types import Array, Key


def _decompress(payload: Signs) -> Array:
    scale = jnp.asarray(payload.scale)
    return jnp.where(payload.negative, -scale, scale)


def sign() -> Compressor:
    """+1 where x >= 0, else -1, as in AsynFLC's experiments; no contraction: the server's rate must be tiny.

    One bit an entry. Zeros, -0 too, become +1. Source: Bernstein et al. (2018).
    """

    def compress(key: Key, x: Array) -> Signs:
        del key
        require_vector(x)
        return Signs(jnp.less(x, 0), refusable(jnp.ones((), x.dtype), x), scaled=False)

    return Compressor(compress, _decompress, bits)


def scaled_sign() -> Compressor:
    """The signs times the mean magnitude, ``(||x||_1 / D) sign(x)``: one bit an entry and one number.

    ``||C(x) - x||^2 = (1 - ||x||_1^2 / (D ||x||^2)) ||x||^2``, at most ``(1 - 1/D) ||x||^2``. A scale a layer:
    ``per="layer"``. Source: Karimireddy et al. (2019), section 4.
    """

    def compress(key: Key, x: Array) -> Signs:
        del key
        require_vector(x)
        return Signs(jnp.less(x, 0), mean_magnitude(x), scaled=True)

    return Compressor(compress, _decompress, bits)


def mean_magnitude(x: Array) -> Array:
    """``||x||_1 / D`` without overflow, 0 of an empty vector, in the type of x."""
    x_real: Any = jnp.abs(x).astype(real_of(x))
    largest = jnp.max(x_real, initial=0)
    unit = jnp.where(largest > 0, largest, jnp.ones_like(largest))
    return (largest * (jnp.sum(x_real / unit) / max(1, len(x)))).astype(x.dtype)
