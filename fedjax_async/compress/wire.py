"""Payloads as bytes, and back: what a client would really send (host, NumPy).

    message = "FA" version body crc32        body = part | 0 count part...
    part    = kind + 16 * detail, fields     numbers of lengths are varints, all others little-endian

====== ============================ =====================================================================
kind   detail                       fields
====== ============================ =====================================================================
1      float type                   D, values
2, 3   float type of the scale      D, D bits, scale (kind 3 is unscaled: no scale)
4, 5   float type of the norm       D, steps in 2 bytes, norm, levels: 4 at a fixed width, 5 in Elias' gamma code
6      code of the places           D, k, places, part of k values
====== ============================ =====================================================================

Places are a bitmap (0), k numbers of ceil(log2 D) bits (1), or their gaps in Rice's code (2): whichever is shortest,
and so are levels. Nothing in a message is compressed further, and no message is shorter or longer than
``sizes.wire_bytes`` says.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async import check
from fedjax_async.compress import codes, sizes
from fedjax_async.compress.codes import Source
from fedjax_async.compress.payload import MOST_STEPS, Dense, Levels, Payload, Signs, Sparse

_REALS = {1: np.dtype("float16"), 2: np.dtype(jnp.bfloat16), 3: np.dtype("float32"), 4: np.dtype("float64")}
_MOST_LENGTH = 2**31 - 1
_MOST_PARTS = 65535
_DEEPEST = 8
_TUPLE, _DENSE, _SCALED, _UNSCALED, _FIXED, _GAMMA, _SPARSE = range(7)


def encode(payload: Payload) -> bytes:
    """The bytes of one payload, or of a tuple of them; ``8 * len`` is what ``bits(payload)`` reports.

    A ``ValueError`` if a value is not finite, or if the payload is a batch or inconsistent.
    """
    body = sizes.MAGIC
    if isinstance(payload, tuple):
        check.require(len(payload) <= _MOST_PARTS, "payload", f"{len(payload)} parts", f"at most {_MOST_PARTS} parts")
        body += bytes([_TUPLE]) + codes.varint(len(payload))
    body += b"".join(map(_encode_part, sizes.parts(payload)))
    return body + zlib.crc32(body).to_bytes(sizes.CHECKSUM, "little")


def decode(data: bytes) -> Payload:
    """The payload whose bytes these are, its arrays NumPy's.

    A one-line ``ValueError`` for anything else: other or damaged bytes, a part of a message, two messages, values
    that are not finite.
    """
    check.require(isinstance(data, bytes), "message", type(data).__name__, "bytes")
    head, tail = len(sizes.MAGIC), len(data) - sizes.CHECKSUM
    own = tail >= head and data[: head - 1] == sizes.MAGIC[:-1]
    check.require(own, "message", data[:8], "a message of this package")
    check.require(data[head - 1] == sizes.MAGIC[-1], "message version", data[head - 1], str(sizes.MAGIC[-1]))
    if zlib.crc32(data[:tail]).to_bytes(sizes.CHECKSUM, "little") != data[tail:]:
        raise ValueError("message: the checksum does not fit; it is damaged or cut off")
    source = Source(data[:tail], head)
    if data[head : head + 1] == bytes([_TUPLE]) and tail > head:
        source.take(1)
        count = codes.read_varint(source, _MOST_PARTS)
        payload: Payload = tuple(_decode_part(source) for _ in range(count))
    else:
        payload = _decode_part(source)
    if source.place != tail:
        raise ValueError(f"message: {tail - source.place} bytes too long")
    return payload


# --- encoding ---------------------------------------------------------------------------------


def _encode_part(payload: Payload) -> bytes:
    writer = _WRITERS.get(type(payload))
    if writer is None:
        raise ValueError(f"payload = {type(payload).__name__}: must be one of Dense, Signs, Levels, Sparse")
    return writer(jax.tree.map(np.asarray, payload))


def _shaped(field: str, array: np.ndarray, dimensions: int, kind: str) -> None:
    fits = array.ndim == dimensions and array.dtype.kind == kind
    what = {0: "one number", 1: "a vector"}[dimensions]
    check.require(fits, field, f"{array.dtype}{list(array.shape)}", f"{what} of one payload, of its kind {kind!r}")


def _real_bytes(field: str, array: np.ndarray, dimensions: int) -> tuple[int, bytes]:
    """Code of the float type, and the values' own bits."""
    known = {dtype: code for code, dtype in _REALS.items()}
    fits = array.dtype in known and array.ndim == dimensions
    check.require(fits, field, f"{array.dtype}{list(array.shape)}", "floats of one payload")
    check.require(_all_finite(array), field, "NaN or infinite", "finite")
    word = f"<u{array.dtype.itemsize}"
    return known[array.dtype], np.ascontiguousarray(array).view(word[1:]).astype(word).tobytes()


def _all_finite(array: np.ndarray) -> bool:
    with np.errstate(invalid="ignore"):  # NumPy warns of a bfloat16 NaN
        return bool(np.isfinite(array).all())


def _head(kind: int, detail: int, *lengths: int) -> bytes:
    check.require(max(lengths) <= _MOST_LENGTH, "payload length", max(lengths), f"at most {_MOST_LENGTH}")
    return bytes([kind + 16 * detail]) + b"".join(map(codes.varint, lengths))


def _write_dense(payload: Dense) -> bytes:
    code, values = _real_bytes("values", payload.values, 1)
    return _head(_DENSE, code, len(payload.values)) + values


def _write_signs(payload: Signs) -> bytes:
    _shaped("negative", payload.negative, 1, "b")
    code, scale = _real_bytes("scale", payload.scale, 0)
    check.require(payload.scaled or payload.scale == 1, "scale", float(payload.scale), "1 unless it is sent")
    head = _head(_SCALED if payload.scaled else _UNSCALED, code, len(payload.negative))
    return head + codes.pack(payload.negative) + (scale if payload.scaled else b"")


def _write_levels(payload: Levels) -> bytes:
    _shaped("level", payload.level, 1, "i")
    _shaped("steps", payload.steps, 0, "i")
    code, norm = _real_bytes("norm", payload.norm, 0)
    level, steps = payload.level.astype(np.int64), int(payload.steps)
    check.whole("steps", steps, 1, MOST_STEPS)
    check.require(bool((np.abs(level) <= steps).all()), "level", int(np.abs(level).max(initial=0)), f"within {steps}")
    plain = codes.fixed(level + steps, (2 * steps).bit_length())
    gamma = _gamma(level)
    kind = _FIXED if len(plain) <= len(gamma) else _GAMMA
    stream = plain if kind == _FIXED else gamma
    return _head(kind, code, len(level)) + steps.to_bytes(2, "little") + norm + stream


def _gamma(level: np.ndarray) -> bytes:
    number = 2 * np.abs(level) + (level < 1)  # 0, +1, -1, +2, ... are 1, 2, 3, 4, ...
    width = np.frexp(number)[1].astype(np.int64) - 1
    return codes.unary(width) + codes.varying(number, width)


def _write_sparse(payload: Sparse) -> bytes:
    _shaped("index", payload.index, 1, "i")
    index, size, k = payload.index.astype(np.int64), payload.size, len(payload.index)
    _require_places(index, size)
    values = _encode_part(payload.values)
    check.require(sizes.length_of(payload.values) == k, "values", sizes.length_of(payload.values), f"{k}, one a place")
    streams = [write(index, size) for write, _ in _PLACES]
    code = min(range(len(streams)), key=lambda i: len(streams[i]))
    return _head(_SPARSE, code, size, k) + streams[code] + values


def _require_places(index: np.ndarray, size: int) -> None:
    inside = not len(index) or (index[0] >= 0 and index[-1] < size)
    check.require(bool(inside and (np.diff(index) > 0).all()), "index", "places", f"ascending, from 0 to {size - 1}")


def _write_bitmap(index: np.ndarray, size: int) -> bytes:
    bits = np.zeros(size, bool)
    bits[index] = True
    return codes.pack(bits)


def _write_rice(index: np.ndarray, size: int) -> bytes:
    gaps, width = np.diff(index, prepend=-1) - 1, sizes.rice_width(size, len(index))
    return codes.unary(gaps >> width) + codes.fixed(gaps, width)


_WRITERS: dict[type, Callable[[Any], bytes]] = {
    Dense: _write_dense,
    Signs: _write_signs,
    Levels: _write_levels,
    Sparse: _write_sparse,
}


# --- decoding ---------------------------------------------------------------------------------


def _decode_part(source: Source, depth: int = 0) -> Payload:
    head = source.take(1)[0]
    reader = _READERS.get(head & 15)
    if reader is None or depth > _DEEPEST:
        raise ValueError(f"message: unknown kind of payload {head & 15}, or too many of them in each other")
    return reader(source, head >> 4, depth)


def _read_real(source: Source, code: int, count: int) -> np.ndarray:
    """float[count], refused unless all are finite."""
    dtype = _REALS.get(code)
    if dtype is None:
        raise ValueError(f"message: unknown float type {code}")
    word = f"<u{dtype.itemsize}"
    values = np.frombuffer(source.take(count * dtype.itemsize), word).astype(word[1:]).view(dtype)
    if not _all_finite(values):
        raise ValueError("message: a value is NaN or infinite")
    return values


def _read_length(source: Source, most: int = _MOST_LENGTH) -> int:
    return codes.read_varint(source, most)


def _read_dense(source: Source, detail: int, depth: int) -> Dense:
    return Dense(_read_real(source, detail, _read_length(source)))


def _read_scaled(source: Source, detail: int, depth: int) -> Signs:
    negative = codes.read_bits(source, _read_length(source))
    return Signs(negative, _read_real(source, detail, 1)[0], scaled=True)


def _read_unscaled(source: Source, detail: int, depth: int) -> Signs:
    if detail not in _REALS:
        raise ValueError(f"message: unknown float type {detail}")
    return Signs(codes.read_bits(source, _read_length(source)), np.ones((), _REALS[detail]), scaled=False)


def _read_levels(source: Source, detail: int, stream: Callable[[Source, int, int], np.ndarray]) -> Levels:
    size, steps = _read_length(source), int.from_bytes(source.take(2), "little")
    norm = _read_real(source, detail, 1)[0]
    if not 1 <= steps <= MOST_STEPS:
        raise ValueError(f"message: {steps} steps")
    level = stream(source, size, steps)
    if (np.abs(level) > steps).any():
        raise ValueError("message: a level is out of range")
    return Levels(level.astype(np.int16), norm, np.int32(steps))


def _read_fixed_levels(source: Source, size: int, steps: int) -> np.ndarray:
    return codes.read_fixed(source, size, (2 * steps).bit_length()) - steps


def _read_gamma_levels(source: Source, size: int, steps: int) -> np.ndarray:
    width = codes.read_unary(source, size)
    if (width > (2 * steps).bit_length()).any():
        raise ValueError("message: a level is out of range")
    number = (np.int64(1) << width) + codes.read_varying(source, width)
    return np.where(number % 2 == 0, number // 2, -(number // 2))


def _read_sparse(source: Source, detail: int, depth: int) -> Sparse:
    size = _read_length(source)
    k = _read_length(source, size)
    if detail >= len(_PLACES):
        raise ValueError(f"message: unknown code of places {detail}")
    index = _PLACES[detail][1](source, size, k)
    _require_places(index, size)
    values = _decode_part(source, depth + 1)
    if sizes.length_of(values) != k:
        raise ValueError(f"message: {sizes.length_of(values)} values at {k} places")
    return Sparse(index.astype(np.int32), values, size)


def _read_bitmap(source: Source, size: int, k: int) -> np.ndarray:
    index = np.flatnonzero(codes.read_bits(source, size))
    if len(index) != k:
        raise ValueError(f"message: {len(index)} places, not {k}")
    return index


def _read_fixed_places(source: Source, size: int, k: int) -> np.ndarray:
    return codes.read_fixed(source, k, sizes.index_width(size))


def _read_rice(source: Source, size: int, k: int) -> np.ndarray:
    width = sizes.rice_width(size, k)
    quotients = codes.read_unary(source, k)
    return np.cumsum((quotients << width) + codes.read_fixed(source, k, width) + 1) - 1


_READERS: dict[int, Callable[[Source, int, int], Payload]] = {
    _DENSE: _read_dense,
    _SCALED: _read_scaled,
    _UNSCALED: _read_unscaled,
    _FIXED: lambda source, detail, depth: _read_levels(source, detail, _read_fixed_levels),
    _GAMMA: lambda source, detail, depth: _read_levels(source, detail, _read_gamma_levels),
    _SPARSE: _read_sparse,
}

_PLACES: list[tuple[Callable[[np.ndarray, int], bytes], Callable[[Source, int, int], np.ndarray]]] = [
    (_write_bitmap, _read_bitmap),
    (lambda index, size: codes.fixed(index, sizes.index_width(size)), _read_fixed_places),
    (_write_rice, _read_rice),
]
