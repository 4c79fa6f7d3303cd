"""Compressors and payloads: the contract, the six kinds of payload, and functions that all compressors share.

A payload is the compressed form of a vector: a pytree of the arrays that are sent. Its lengths are static, so it
passes through ``jit`` and ``vmap``. Payloads nest: the values of a :class:`Sparse` payload are a payload themselves.
``on_tree`` compresses a pytree to a tuple of payloads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async.base import check, hashing
from fedjax_async.types import Array, Key, Params

Payload = Any  # Dense | Signs | Levels | Buckets | Sparse | Centroids, or a tuple of them

MOST_STEPS = 32767
MOST_CENTROIDS = 256  # an index is one byte


class Compressor(NamedTuple):
    """Pure functions of one vector (of one pytree after ``on_tree``); ``vmap`` them for several.

    ``compress(key, x) -> payload`` with x [D] of any float type (deterministic compressors ignore the key);
    ``decompress(payload) -> x_hat`` [D]; ``bits(payload) -> int32[]``, exactly ``8 * len(encode(payload))``. If x is
    not finite, neither is x_hat, so that the server can reject it. ``error(D)``: about how large ``||x_hat - x||^2`` is
    of D normal numbers, relative to ``||x||^2``. From 1 on, error feedback adds up errors without bound, and a run
    warns; ``None``: it is below 1. ``feedback``: whether a run that does not say so keeps the error for the next
    message; not for unbiased compressors, whose errors cancel in the mean, and where it always grows.
    """

    compress: Callable[[Key, Params], Payload]
    decompress: Callable[[Payload], Params]
    bits: Callable[[Payload], Array]
    error: Callable[[int], float] | None = None
    feedback: bool = True


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Dense:
    """All values, unchanged."""

    values: Any  # float[D]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Signs:
    """``scale * (-1 where negative, else +1)``; if not ``scaled``, the scale is 1 and is not sent."""

    negative: Any  # bool[D]
    scale: Any  # float[]
    scaled: bool = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Levels:
    """``norm * level / steps``, where ``|level| <= steps``."""

    level: Any  # int16[D]
    norm: Any  # float[]
    steps: Any  # int32[], from 1 to MOST_STEPS


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Buckets:
    """Levels with a norm for every ``bucket`` entries: entry j is ``norm[j // bucket] * level[j] / steps``."""

    level: Any  # int16[D]
    norm: Any  # float[ceil(D / bucket)]
    steps: Any  # int32[], from 1 to MOST_STEPS
    bucket: int = field(metadata={"static": True})  # at least 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Sparse:
    """Zero except at ``index``; the values there are a payload of k scalars."""

    index: Any  # int32[k], ascending
    values: Payload
    size: int = field(metadata={"static": True})  # D


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Centroids:
    """Zero where the index is 0, else ``centroid[index - 1]``."""

    centroid: Any  # float[K-1], ascending, K from 1 to MOST_CENTROIDS; zero is not sent
    index: Any  # uint8[D], below K


def require_vector(x: Array) -> None:
    """Raise ``ValueError`` unless x is a vector of floats."""
    fits = jnp.ndim(x) == 1 and jnp.issubdtype(x.dtype, jnp.floating)
    check.require(fits, "x", f"{jnp.result_type(x)}{list(jnp.shape(x))}", "a vector of floats (on_tree takes pytrees)")


def real_of(x: Array) -> jnp.dtype:
    """The float type for calculations: that of x, but at least float32."""
    return x.dtype if x.dtype.itemsize >= 4 else jnp.float32


def nan_unless_finite(value: Array, x: Array) -> Array:
    """``value``, or all NaN if any entry of x is not finite."""
    largest = jnp.max(jnp.abs(x), initial=0)
    return jnp.where(jnp.isfinite(largest), value, jnp.full((), jnp.nan, value.dtype))


def to_dense(index: Array, values: Array, size: int) -> Array:
    """A vector of ``size`` zeros with ``values`` at the ascending positions ``index``."""
    zeros = jnp.zeros(size, values.dtype)
    return zeros.at[index].set(values, indices_are_sorted=True, unique_indices=True, mode="promise_in_bounds")


# --- random numbers ---------------------------------------------------------------------------

# A counter is hashed by multiplications and shifts instead of a cipher. A compressor draws one number per parameter:
# on a CPU, a million numbers take 10 ms by jax.random.uniform and 1.5 ms by these functions.


def words(key: Key, size: int) -> Array:
    """Random words uint32[size]: hashes of the counters 0 .. size-1 under two seeds drawn from the key."""
    first, second = jax.random.bits(key, (2,), jnp.uint32)
    counter = jnp.arange(size, dtype=jnp.uint32)
    return hashing.mix(hashing.mix(counter + first) + second)


def uniform(key: Key, size: int) -> Array:
    """Random float32[size] in [0, 1): multiples of 2^-24."""
    return (words(key, size) >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
