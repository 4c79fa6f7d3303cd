"""Sizes of a payload: of its encoded message, exact to the byte, and of its values alone.

``wire_bytes`` computes the length of the bytes that ``wire.encode`` makes, from the payload's arrays. So a compiled run
counts true sizes without leaving the device. Sizes that depend on lengths alone are Python numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from fedjax_async.base import check
from fedjax_async.compress.payload import MOST_STEPS, Buckets, Centroids, Dense, Levels, Payload, Signs, Sparse
from fedjax_async.types import AnyArray, Array, Whole

MAGIC = b"FA\x01"  # the format's version is its last byte
CHECKSUM = 4  # bytes
BYTE = 8
Count = TypeVar("Count", int, Array)


def bytes_of_bits(count: Count) -> Count:
    """Whole bytes that hold ``count`` bits."""
    return (count + BYTE - 1) // BYTE


def varint_bytes(number: int) -> int:
    """Bytes of a whole number >= 0 with 7 bits per byte."""
    return max(1, -(-number.bit_length() // 7))


def index_width(size: int) -> int:
    """Bits of one index below ``size``."""
    return (size - 1).bit_length() if size else 0


def rice_width(size: int, k: int) -> int:
    """Bits r of the remainder of a gap in Rice's code: 2^r is about ln 2 times the mean gap ``size / k``."""
    return max(0, (45426 * size // (65536 * max(1, k))).bit_length() - 1)


def length_of(payload: Payload) -> int:
    """D, the number of scalars that a payload represents."""
    return _LENGTH[type(payload)](payload)


_LENGTH: dict[type, Callable[[Any], int]] = {
    Dense: lambda payload: payload.values.shape[0],
    Signs: lambda payload: payload.negative.shape[0],
    Levels: lambda payload: payload.level.shape[0],
    Buckets: lambda payload: payload.level.shape[0],
    Sparse: lambda payload: payload.size,
    Centroids: lambda payload: payload.index.shape[0],
}


def bit_length(number: Whole) -> Array:
    """Binary digits of int32 numbers >= 0: 0 has 0, 1 has 1, 2 and 3 have 2."""
    return 32 - jax.lax.clz(jnp.asarray(number, jnp.int32))


def _real_bytes(array: AnyArray) -> int:
    return array.dtype.itemsize


def _dense(payload: Dense) -> int:
    size = payload.values.shape[0]
    return 1 + varint_bytes(size) + size * _real_bytes(payload.values)


def _signs(payload: Signs) -> int:
    size = payload.negative.shape[0]
    return 1 + varint_bytes(size) + bytes_of_bits(size) + payload.scaled * _real_bytes(payload.scale)


def _fixed_levels(size: int, steps: Whole) -> Array:
    return bytes_of_bits(size * bit_length(2 * jnp.asarray(steps, jnp.int32)))


def _levels(payload: Levels | Buckets) -> Array:
    """The shorter of a fixed width and Elias' gamma code of 1, 2, 3, ... for the levels 0, +1, -1, ..."""
    size, level = payload.level.shape[0], jnp.asarray(payload.level).astype(jnp.int32)
    suffix = jnp.sum(bit_length(2 * jnp.abs(level) + jnp.less(level, 1).astype(jnp.int32)) - 1, dtype=jnp.int32)
    gamma = bytes_of_bits(size + suffix) + bytes_of_bits(suffix)
    return _levels_head(payload) + jnp.minimum(_fixed_levels(size, payload.steps), gamma)


def _levels_head(payload: Levels | Buckets) -> int:
    """Bytes of everything but the levels: kind, lengths, steps, norms."""
    lengths = [payload.level.shape[0], *([payload.bucket] if isinstance(payload, Buckets) else [])]
    norms = payload.norm.shape[0] if isinstance(payload, Buckets) else 1
    return 3 + sum(map(varint_bytes, lengths)) + norms * _real_bytes(payload.norm)


def plain_index_bytes(size: int, k: int) -> tuple[int, int]:
    """Bytes of k indices below ``size`` as a bitmap, and at a fixed width."""
    return bytes_of_bits(size), bytes_of_bits(k * index_width(size))


def _rice(size: int, k: int, quotients: Count) -> Count:
    return bytes_of_bits(k + quotients) + bytes_of_bits(k * rice_width(size, k))


def _sparse(payload: Sparse) -> Array:
    """The shortest of a bitmap, a fixed width and Rice's code of the gaps."""
    index, size = jnp.asarray(payload.index), payload.size
    k = index.shape[0]
    gaps = jnp.diff(index, prepend=jnp.full(1, -1, index.dtype)) - 1
    rice = _rice(size, k, jnp.sum(gaps >> rice_width(size, k), dtype=jnp.int32))
    head = 1 + varint_bytes(size) + varint_bytes(k)
    return head + jnp.minimum(min(plain_index_bytes(size, k)), rice) + _part(payload.values)


def centroid_width(count: int) -> int:
    """Bits of one index among ``count`` centroids, zero included: ``ceil(log2 K)``, but at least one."""
    return max(1, index_width(count))


def _centroids(payload: Centroids) -> int:
    size, sent = payload.index.shape[0], payload.centroid.shape[0]
    indices = bytes_of_bits(size * centroid_width(sent + 1))
    return 2 + varint_bytes(size) + sent * _real_bytes(payload.centroid) + indices


_BYTES: dict[type, Callable[[Any], Array | int]] = {
    Dense: _dense,
    Signs: _signs,
    Levels: _levels,
    Buckets: _levels,
    Sparse: _sparse,
    Centroids: _centroids,
}


def _part(payload: Payload) -> Array | int:
    return _BYTES[type(payload)](payload)


def parts(payload: Payload) -> tuple[Payload, ...]:
    """The payloads of a tuple, or the single payload."""
    return payload if isinstance(payload, tuple) else (payload,)


def _frame(payload: Payload) -> int:
    """Bytes of header and checksum."""
    several = 1 + varint_bytes(len(payload)) if isinstance(payload, tuple) else 0
    return len(MAGIC) + several + CHECKSUM


def wire_bytes(payload: Payload) -> Array:
    """``len(encode(payload))``; int32[]."""
    return jnp.asarray(sum(map(_part, parts(payload)), _frame(payload)), jnp.int32)


def bits(payload: Payload) -> Array:
    """``8 * len(encode(payload))``: values, indices, scales, header and checksum; int32[].

    Raises ``ValueError`` for a payload that may exceed 2^31 bits (256 MiB).
    """
    check.in_range("bits", 8 * _most_bytes(payload, lambda steps: MOST_STEPS), 0, 2**31 - 1)
    return BYTE * wire_bytes(payload)


def values_bits(payload: Payload) -> Array:
    """Bits of the values alone, as the AsynFLC paper counts: no indices, scales, norms or header; int32[].

    A float32 entry has 32 bits, a sign 1, a level ``ceil(log2(2 s + 1))``; this is the traffic in the paper's Table
    III. Centroids are counted by eq. 13 of PushCen-ADFL, K - 1 centroids and ``ceil(log2 K)`` bits per entry.
    """
    return jnp.asarray(sum(_VALUES[type(part)](part) for part in parts(payload)), jnp.int32)


_VALUES: dict[type, Callable[[Any], Array | int]] = {
    Dense: lambda payload: BYTE * _real_bytes(payload.values) * payload.values.shape[0],
    Signs: lambda payload: payload.negative.shape[0],
    **dict.fromkeys(
        (Levels, Buckets),
        lambda payload: payload.level.shape[0] * bit_length(2 * jnp.asarray(payload.steps, jnp.int32)),
    ),
    Sparse: lambda payload: values_bits(payload.values),
    Centroids: lambda payload: (
        BYTE * _real_bytes(payload.centroid) * payload.centroid.shape[0]
        + payload.index.shape[0] * centroid_width(payload.centroid.shape[0] + 1)
    ),
}


def most_bits(payload: Payload) -> int:
    """The most bits that a payload of these lengths can have, for any values; a Python number.

    Call it on compressed zeros to plan transfers before any training. Levels must not be traced.
    """
    return BYTE * _most_bytes(payload, int)


def _most_bytes(payload: Payload, steps_of: Callable[[Array], int]) -> int:
    def most(part: Payload) -> int:
        if isinstance(part, (Levels, Buckets)):
            width = (2 * steps_of(part.steps)).bit_length()
            return _levels_head(part) + bytes_of_bits(part.level.shape[0] * width)
        if isinstance(part, Sparse):
            size, k = part.size, part.index.shape[0]
            rice = _rice(size, k, size >> rice_width(size, k))
            head = 1 + varint_bytes(size) + varint_bytes(k)
            return head + min(*plain_index_bytes(size, k), rice) + most(part.values)
        return int(_part(part))

    return sum(map(most, parts(payload)), _frame(payload))
