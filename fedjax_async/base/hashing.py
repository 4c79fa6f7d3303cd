"""Random numbers by index: a hash of a stream and a counter, at the same cost in any order and any batch.

A *stream* is two 32-bit words. :func:`fold` derives the stream of a numbered child (a client, an example) from its
parent; :func:`words` gives the numbers of a stream. All arithmetic but the last step is on integers, so that a compiled
program draws the same numbers as plain evaluation. ``jax.random`` does this with a cryptographic round function, at
five times the cost on a CPU.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_async.types import Array

GOLDEN = 0x9E3779B9  # 2^32 divided by the golden ratio
HashState = tuple[Array, Array]  # two words, uint32[]

# z = s (A + B s^2) has variance 1 and kurtosis 3 when s is a centred sum of four uniform bytes
_A, _B = 0.0064210406128, 5.7739542833e-9


def mix(x: Array) -> Array:
    """A 32-bit integer bijection with good avalanche ("lowbias32", C. Wellons 2018); uint32 in and out."""
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x7FEB352D)
    x = x ^ (x >> 15)
    x = x * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def fold(stream: HashState, number: Array | int) -> HashState:
    """The stream of child ``number`` (an integer, modulo 2^32); different numbers give different streams."""
    n = jnp.asarray(number).astype(jnp.uint32)
    first = mix(stream[0] + n)
    return first, mix(stream[1] ^ (first + n * jnp.uint32(GOLDEN)))


def words(stream: HashState, count: int) -> Array:
    """The first ``count`` numbers of a stream; uint32[count].

    The counter's step depends on the stream, so that two streams with one common number differ in the next.
    """
    first, step = stream
    return mix(first + jnp.arange(count, dtype=jnp.uint32) * (step | jnp.uint32(1)))


def uniform(word: Array) -> Array:
    """Uniform numbers in [0, 1) from words, multiples of 2^-24; float32."""
    return (word >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def normal(word: Array) -> Array:
    """Nearly standard normal numbers from words: mean 0, variance 1, kurtosis 3, absolute value below 4.05; float32.

    A cubic polynomial of the sum of a word's four bytes. It has 1,021 values, and its distribution function is within
    0.0021 of the normal one. It costs a third of inverting the normal distribution function.
    """
    halves = (word & jnp.uint32(0x00FF00FF)) + ((word >> 8) & jnp.uint32(0x00FF00FF))
    total = (halves & jnp.uint32(0xFFFF)) + (halves >> 16)
    s = jax.lax.convert_element_type(total, jnp.float32) - jnp.float32(510.0)
    return s * (jnp.float32(_A) + jnp.float32(_B) * s * s)
