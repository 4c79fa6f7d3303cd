"""The wire format: payloads as the bytes that a client would send, and back (host, NumPy).

    message = "FA" version body crc32        body = part | 0 count part...
    part    = kind + 16 * detail, fields     lengths are varints, all other numbers little-endian

====== ============================ =====================================================================
kind   detail                       fields
====== ============================ =====================================================================
1      float type                   D, values
2, 3   float type of the scale      D, D bits, scale (kind 3 is unscaled: no scale)
4, 5   float type of the norm       D, steps in 2 bytes, norm, levels: 4 at a fixed width, 5 in Elias' gamma code
6      code of the indices          D, k, indices, part of k values
7      float type of the centroids  D, K - 1 in a byte, K - 1 centroids, D indices of ceil(log2 K) bits, at least 1
8, 9   float type of the norms      D, entries of a bucket, steps in 2 bytes, norms, levels as in 4, 5
====== ============================ =====================================================================

Indices are a bitmap (0), k numbers of ceil(log2 D) bits (1), or their gaps in Rice's code (2): the shortest of the
three. Levels too are in the shorter of their two codes. Nothing in a message is compressed further, and its length is
exactly ``sizes.wire_bytes``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_async.base import check
from fedjax_async.compress import codes, sizes
from fedjax_async.compress.codes import ByteReader, Chunks
from fedjax_async.compress.fields import REALS, read_real, read_whole, real_bytes, shaped
from fedjax_async.compress.payload import (
    MOST_CENTROIDS,
    MOST_STEPS,
    Buckets,
    Centroids,
    Dense,
    Levels,
    Payload,
    Signs,
    Sparse,
)

_MOST_LENGTH = 2**31 - 1
_MOST_PARTS = 65535
_DEEPEST = 8
_TUPLE, _DENSE, _SCALED, _UNSCALED, _FIXED, _GAMMA, _SPARSE, _CENTROIDS = range(8)
_FIXED_BUCKETS, _GAMMA_BUCKETS = 8, 9


def encode(payload: Payload) -> bytes:
    """The bytes of one payload, or of a tuple of payloads; ``8 * len(encode(payload))`` equals ``bits(payload)``.

    Raises ``ValueError`` if a value is not finite, or if the payload is a batch or its arrays do not fit together.
    """
    body = sizes.MAGIC
    if isinstance(payload, tuple):
        check.require(len(payload) <= _MOST_PARTS, "payload", f"{len(payload)} parts", f"at most {_MOST_PARTS} parts")
        body += bytes([_TUPLE]) + codes.varint(len(payload))
    for part in sizes.parts(payload):
        depth = _depth(part)
        check.require(depth <= _DEEPEST, "payload", f"{depth} payloads within each other", f"at most {_DEEPEST}")
        body += _encode_part(part)
    return body + zlib.crc32(body).to_bytes(sizes.CHECKSUM, "little")


def decode(data: bytes, *, size: int | Sequence[int] | None = None) -> Payload:
    """The payload of the message ``data``; its arrays are NumPy's.

    Decoding needs at most ``40 len(data)`` bytes of memory, plus 1 KiB for each payload (the values of a ``Sparse`` one
    are a payload too), plus 2 MiB, whatever lengths the message claims. ``decompress`` has no such limit: a ``Sparse``
    payload of a few bytes may represent 2^31 - 1 scalars, and ``decompress`` allocates them all. Give ``size`` if you
    do not trust the sender.

    Args:
      size: how many scalars the receiver expects. A number D is for one payload of a vector [D]. A sequence is for a
        tuple of payloads, one number each: ``[D]`` for a model of D parameters that ``on_tree`` compresses as a whole,
        the sizes of the groups in their order if it groups the leaves. ``None`` accepts any payload of any size.

    Raises a one-line ``ValueError`` for bytes of another format, damaged bytes, an incomplete message, more than one
    message and values that are not finite. Lengths other than ``size`` are refused before arrays of these lengths are
    allocated.
    """
    check.require(isinstance(data, bytes), "message", type(data).__name__, "bytes")
    _require_size(size)
    head, tail = len(sizes.MAGIC), len(data) - sizes.CHECKSUM
    known = tail >= head and data[: head - 1] == sizes.MAGIC[:-1]
    check.require(known, "message", data[:8], "a message of this package")
    check.require(data[head - 1] == sizes.MAGIC[-1], "message version", data[head - 1], str(sizes.MAGIC[-1]))
    source = ByteReader(memoryview(data)[:tail], head)
    if zlib.crc32(source.data).to_bytes(sizes.CHECKSUM, "little") != data[tail:]:
        raise ValueError("message: the checksum differs; the message is damaged or cut off")
    if data[head : head + 1] == bytes([_TUPLE]) and tail > head:
        source.read(1)
        payload: Payload = _decode_tuple(source, size)
    elif isinstance(size, Sequence):
        raise ValueError(f"message: one payload, not a tuple of {len(size)}")
    else:
        payload = _decode_part(source, size)
    if source.offset != tail:
        raise ValueError(f"message: {tail - source.offset} bytes too long")
    return payload


def _require_size(size: int | Sequence[int] | None) -> None:
    if size is None:
        return
    lengths = size if isinstance(size, Sequence) else [size]
    for length in lengths:
        check.whole("size", length, 0, _MOST_LENGTH)


# --- encoding ---------------------------------------------------------------------------------


def _depth(payload: Payload) -> int:
    """How many ``Sparse`` payloads are inside each other."""
    return 1 + _depth(payload.values) if isinstance(payload, Sparse) else 0


def _encode_part(payload: Payload) -> bytes:
    writer = _WRITERS.get(type(payload))
    if writer is None:
        raise ValueError(
            f"payload = {type(payload).__name__}: must be one of Dense, Signs, Levels, Buckets, Sparse, Centroids"
        )
    return writer(jax.tree.map(np.asarray, payload))


def _head(kind: int, detail: int, *lengths: int) -> bytes:
    check.require(max(lengths) <= _MOST_LENGTH, "payload length", max(lengths), f"at most {_MOST_LENGTH}")
    return bytes([kind + 16 * detail]) + b"".join(map(codes.varint, lengths))


def _write_dense(payload: Dense) -> bytes:
    code, values = real_bytes("values", payload.values, 1)
    return _head(_DENSE, code, len(payload.values)) + values


def _write_signs(payload: Signs) -> bytes:
    shaped("negative", payload.negative, 1, "b")
    code, scale = real_bytes("scale", payload.scale, 0)
    check.require(payload.scaled or payload.scale == 1, "scale", float(payload.scale), "1 unless it is sent")
    head = _head(_SCALED if payload.scaled else _UNSCALED, code, len(payload.negative))
    return head + codes.pack(payload.negative) + (scale if payload.scaled else b"")


def _write_levels(payload: Levels) -> bytes:
    return _leveled(payload, 0, _FIXED, _GAMMA)


def _write_buckets(payload: Buckets) -> bytes:
    check.whole("bucket", payload.bucket, 1, _MOST_LENGTH)
    norms, levels = payload.norm.size, payload.level.size
    check.require(norms == -(-levels // payload.bucket), "norm", f"{norms} numbers", "one for each bucket")
    return _leveled(payload, 1, _FIXED_BUCKETS, _GAMMA_BUCKETS, payload.bucket)


def _leveled(payload: Levels | Buckets, dimensions: int, by_width: int, by_gamma: int, *lengths: int) -> bytes:
    shaped("level", payload.level, 1, "i")
    shaped("steps", payload.steps, 0, "i")
    code, norm = real_bytes("norm", payload.norm, dimensions)
    level, steps = payload.level.astype(np.int64), int(payload.steps)
    check.whole("steps", steps, 1, MOST_STEPS)
    check.require(bool((np.abs(level) <= steps).all()), "level", int(np.abs(level).max(initial=0)), f"within {steps}")
    plain = codes.fixed(level + steps, (2 * steps).bit_length())
    gamma = codes.gamma(2 * np.abs(level) + (level < 1))  # 0, +1, -1, +2, ... are 1, 2, 3, 4, ...
    kind, stream = (by_width, plain) if len(plain) <= len(gamma) else (by_gamma, gamma)
    return _head(kind, code, len(level), *lengths) + steps.to_bytes(2, "little") + norm + stream


def _write_sparse(payload: Sparse) -> bytes:
    shaped("index", payload.index, 1, "i")
    index, size, k = payload.index.astype(np.int64), payload.size, len(payload.index)
    _require_indices(index, size)
    values = _encode_part(payload.values)
    check.require(
        sizes.length_of(payload.values) == k, "values", sizes.length_of(payload.values), f"{k}, one for each index"
    )
    streams = [write(index, size) for write, _ in _INDEX_CODES[1:]]
    code = 1 + min(range(len(streams)), key=lambda i: len(streams[i]))
    stream = streams[code - 1]
    if -(-size // 8) <= len(stream):  # a bitmap takes the time and memory of the whole model, so only a short one
        code, stream = 0, _write_bitmap(index, size)
    return _head(_SPARSE, code, size, k) + stream + values


def _require_indices(index: np.ndarray, size: int, last: int = -1) -> None:
    inside = not len(index) or (index[0] > last and index[-1] < size)
    ascending = bool(inside and (index[1:] > index[:-1]).all())
    check.require(ascending, "index", f"{len(index)} integers", f"ascending, from 0 to {size - 1}")


def _write_bitmap(index: np.ndarray, size: int) -> bytes:
    bits = np.zeros(size, bool)
    bits[index] = True
    return codes.pack(bits)


def _write_rice(index: np.ndarray, size: int) -> bytes:
    gaps, width = np.diff(index, prepend=-1) - 1, sizes.rice_width(size, len(index))
    return codes.unary(gaps >> width) + codes.fixed(gaps, width)


def _write_centroids(payload: Centroids) -> bytes:
    shaped("index", payload.index, 1, "u")
    code, values = real_bytes("centroid", payload.centroid, 1)
    sent = len(payload.centroid)
    check.require(sent < MOST_CENTROIDS, "centroid", f"{sent} numbers", f"at most {MOST_CENTROIDS - 1} numbers")
    ascending = bool((payload.centroid[1:] >= payload.centroid[:-1]).all())
    check.require(ascending, "centroid", f"{sent} numbers", "ascending")
    index = payload.index.astype(np.int64)
    check.require(bool((index <= sent).all()), "index", int(index.max(initial=0)), f"at most {sent}")
    return (
        _head(_CENTROIDS, code, len(index))
        + bytes([sent])
        + values
        + codes.fixed(index, sizes.centroid_width(sent + 1))
    )


_WRITERS: dict[type, Callable[[Any], bytes]] = {
    Dense: _write_dense,
    Signs: _write_signs,
    Levels: _write_levels,
    Buckets: _write_buckets,
    Sparse: _write_sparse,
    Centroids: _write_centroids,
}


# --- decoding ---------------------------------------------------------------------------------


def _decode_tuple(source: ByteReader, size: int | Sequence[int] | None) -> tuple[Payload, ...]:
    count = codes.read_varint(source, _MOST_PARTS)
    if size is None:
        return tuple(_decode_part(source) for _ in range(count))
    if not isinstance(size, Sequence):
        raise ValueError(f"message: a tuple of {count} payloads, not one payload")
    if count != len(size):
        raise ValueError(f"message: {count} payloads, not {len(size)}")
    return tuple(_decode_part(source, length) for length in size)


def _decode_part(source: ByteReader, expected: int | None = None, depth: int = 0) -> Payload:
    """One payload; ``ValueError`` if it does not represent ``expected`` scalars."""
    head = source.read(1)[0]
    reader = _READERS.get(head & 15)
    if reader is None or depth > _DEEPEST:
        raise ValueError(f"message: unknown kind of payload {head & 15}, or payloads nested too deep")
    size = codes.read_varint(source, _MOST_LENGTH)
    if expected is not None and size != expected:
        raise ValueError(f"message: a payload of {size} scalars, not {expected}")
    return reader(source, head >> 4, size, depth)


def _read_dense(source: ByteReader, detail: int, size: int, depth: int) -> Dense:
    return Dense(read_real(source, detail, size))


def _read_scaled(source: ByteReader, detail: int, size: int, depth: int) -> Signs:
    negative = codes.read_bits(source, size)
    return Signs(negative, read_real(source, detail, 1)[0], scaled=True)


def _read_unscaled(source: ByteReader, detail: int, size: int, depth: int) -> Signs:
    if detail not in REALS:
        raise ValueError(f"message: unknown float type {detail}")
    return Signs(codes.read_bits(source, size), np.ones((), REALS[detail]), scaled=False)


ReadChunks = Callable[[ByteReader, int, int], Chunks]


def _read_levels(source: ByteReader, detail: int, size: int, stream: ReadChunks) -> Levels:
    norm, level, steps = _read_leveled(source, detail, size, 1, stream)
    return Levels(level, norm[0], steps)


def _read_buckets(source: ByteReader, detail: int, size: int, stream: ReadChunks) -> Buckets:
    bucket = codes.read_varint(source, _MOST_LENGTH)
    if bucket == 0:
        raise ValueError("message: a bucket of 0 entries")
    norm, level, steps = _read_leveled(source, detail, size, -(-size // bucket), stream)
    return Buckets(level, norm, steps, bucket)


def _read_leveled(
    source: ByteReader, detail: int, size: int, norms: int, stream: ReadChunks
) -> tuple[np.ndarray, np.ndarray, np.integer]:
    """The norms, the levels and the steps."""
    steps = int.from_bytes(source.read(2), "little")
    norm = read_real(source, detail, norms)
    if not 1 <= steps <= MOST_STEPS:
        raise ValueError(f"message: {steps} steps")
    level = read_whole(_within(stream(source, size, steps), steps), size, np.int16)
    return norm, level, np.int32(steps)


def _within(levels: Chunks, steps: int) -> Chunks:
    for level in levels:
        if (np.abs(level) > steps).any():
            raise ValueError("message: a level is out of range")
        yield level


def _fixed_levels(source: ByteReader, size: int, steps: int) -> Chunks:
    return (number - steps for number in codes.read_fixed(source, size, (2 * steps).bit_length()))


def _gamma_levels(source: ByteReader, size: int, steps: int) -> Chunks:
    numbers = codes.read_gamma(source, size, (2 * steps).bit_length())
    return (np.where(number & 1, -(number >> 1), number >> 1) for number in numbers)


def _read_sparse(source: ByteReader, detail: int, size: int, depth: int) -> Sparse:
    k = codes.read_varint(source, size)
    if detail >= len(_INDEX_CODES):
        raise ValueError(f"message: unknown code of indices {detail}")
    index = read_whole(_ascending(_INDEX_CODES[detail][1](source, size, k), size), k, np.int32)
    return Sparse(index, _decode_part(source, k, depth + 1), size)


def _ascending(chunks: Chunks, size: int) -> Chunks:
    last = -1
    for indices in chunks:
        _require_indices(indices, size, last)
        last = int(indices[-1])
        yield indices


def _read_bitmap(source: ByteReader, size: int, k: int) -> Chunks:
    return codes.read_ones(source, size)


def _read_fixed_indices(source: ByteReader, size: int, k: int) -> Chunks:
    return codes.read_fixed(source, k, sizes.index_width(size))


def _read_rice(source: ByteReader, size: int, k: int) -> Chunks:
    return _summed(codes.read_rice(source, k, sizes.rice_width(size, k), size))


def _summed(gaps: Chunks) -> Chunks:
    last = -1
    for gap in gaps:
        indices = last + np.cumsum(gap + 1)
        last = indices[-1]
        yield indices


def _read_centroids(source: ByteReader, detail: int, size: int, depth: int) -> Centroids:
    sent = source.read(1)[0]
    centroid = read_real(source, detail, sent)
    if not (centroid[1:] >= centroid[:-1]).all():
        raise ValueError("message: centroids are not ascending")
    index = read_whole(_at_most(codes.read_fixed(source, size, sizes.centroid_width(sent + 1)), sent), size, np.uint8)
    return Centroids(centroid, index)


def _at_most(indices: Chunks, most: int) -> Chunks:
    for index in indices:
        if index.max() > most:
            raise ValueError("message: the index of a centroid is out of range")
        yield index


_READERS: dict[int, Callable[[ByteReader, int, int, int], Payload]] = {
    _DENSE: _read_dense,
    _SCALED: _read_scaled,
    _UNSCALED: _read_unscaled,
    _FIXED: lambda source, detail, size, depth: _read_levels(source, detail, size, _fixed_levels),
    _GAMMA: lambda source, detail, size, depth: _read_levels(source, detail, size, _gamma_levels),
    _SPARSE: _read_sparse,
    _CENTROIDS: _read_centroids,
    _FIXED_BUCKETS: lambda source, detail, size, depth: _read_buckets(source, detail, size, _fixed_levels),
    _GAMMA_BUCKETS: lambda source, detail, size, depth: _read_buckets(source, detail, size, _gamma_levels),
}

_INDEX_CODES: list[tuple[Callable[[np.ndarray, int], bytes], Callable[[ByteReader, int, int], Chunks]]] = [
    (_write_bitmap, _read_bitmap),
    (lambda index, size: codes.fixed(index, sizes.index_width(size)), _read_fixed_indices),
    (_write_rice, _read_rice),
]
