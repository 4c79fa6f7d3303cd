"""What a compressor makes of a vector: the contract, and the four kinds of payload.

A payload is a pytree whose arrays are what is sent and whose lengths are static, so it goes through
``jit`` and ``vmap``. Kinds nest: the values of a :class:`Sparse` payload are a payload themselves.
What ``on_tree`` makes of a pytree is a tuple of payloads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async import check
from fedjax_async.types import Array, Key

Payload = Any  # Dense | Signs | Levels | Sparse, or a tuple of them

MOST_STEPS = 32767


class Compressor(NamedTuple):
    """Pure functions of one vector (of one pytree after ``on_tree``); ``vmap`` them for several.

    ``compress(key, x) -> payload`` with x [D] of any float type (deterministic compressors ignore the key);
    ``decompress(payload) -> x_hat`` [D]; ``bits(payload) -> int32[]``, exactly ``8 * len(encode(payload))``. If x is
    not finite, neither is x_hat, so that the server can refuse it.
    """

    compress: Callable[[Key, Any], Payload]
    decompress: Callable[[Payload], Any]
    bits: Callable[[Payload], Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Dense:
    """All values, as they are."""

    values: Any  # float[D]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Signs:
    """``scale * (-1 where negative, else +1)``; an unscaled one is sent without its scale, which is 1."""

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
class Sparse:
    """Zero but for the entries ``index``, ascending, whose values are a payload of that many scalars."""

    index: Any  # int32[k]
    values: Payload
    size: int = field(metadata={"static": True})  # D


def require_vector(x: Any) -> None:
    """A ``ValueError`` unless x is a vector of floats."""
    fits = jnp.ndim(x) == 1 and jnp.issubdtype(x.dtype, jnp.floating)
    check.require(fits, "x", f"{jnp.result_type(x)}{list(jnp.shape(x))}", "a vector of floats (on_tree takes pytrees)")


def real_of(x: Array) -> Any:
    """The float type to calculate in: that of x, but at least float32."""
    return x.dtype if x.dtype.itemsize >= 4 else jnp.float32


def refusable(value: Array, x: Array) -> Array:
    """``value``, or NaN throughout if any entry of x is not finite."""
    largest = jnp.max(jnp.abs(x), initial=0)
    return jnp.where(jnp.isfinite(largest), value, jnp.full((), jnp.nan, value.dtype))


def spread(index: Array, values: Array, size: int) -> Array:
    """A vector of ``size`` zeros with ``values`` at the ascending positions ``index``."""
    zeros = jnp.zeros(size, values.dtype)
    return zeros.at[index].set(values, indices_are_sorted=True, unique_indices=True, mode="promise_in_bounds")
