"""Random words from a counter: one multiplication-and-shift hash a word, instead of a cipher.

A compressor draws one number a parameter: ten milliseconds a million from ``jax.random.uniform`` on a CPU, one and a
half from here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_async.types import Array, Key


def _mix(x: Array) -> Array:
    """A bijection of 32-bit words without visible structure (C. Wellons, "Hash function prospector", 2018)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def words(key: Key, size: int) -> Array:
    """uint32[size]: words of the counters 0 .. size-1 under two seeds drawn from the key."""
    first, second = jax.random.bits(key, (2,), jnp.uint32)
    counter = jnp.arange(size, dtype=jnp.uint32)
    return _mix(_mix(counter + first) + second)


def uniform(key: Key, size: int) -> Array:
    """float32[size] in [0, 1): multiples of 2^-24."""
    return (words(key, size) >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
