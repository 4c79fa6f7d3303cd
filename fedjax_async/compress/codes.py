"""Bit codes of whole numbers, in NumPy, without a loop over the numbers.

Streams are packed most significant bit first and padded with zeros to whole bytes. A code whose words differ in
length is two streams, all lengths in unary before all remainders, so that either can be read at one go. Readers take
bytes from the front of a :class:`Source`; whatever does not fit is a ``ValueError``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Source:
    """Bytes, and how many of them are read."""

    data: bytes
    place: int = 0

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        if count > len(self.data) - self.place:
            raise ValueError("message: it ends too early")
        self.place += count
        return self.data[self.place - count : self.place]


def pack(bits: np.ndarray) -> bytes:
    """bool[T] as whole bytes."""
    return np.packbits(bits).tobytes()


def read_bits(source: Source, count: int) -> np.ndarray:
    """The next ``count`` bits, bool[count]; the rest of their last byte must be zeros."""
    bits = np.unpackbits(np.frombuffer(source.take(-(-count // 8)), np.uint8))
    if bits[count:].any():
        raise ValueError("message: padding is not zero")
    return bits[:count].astype(bool)


def varint(number: int) -> bytes:
    """A whole number >= 0, 7 bits a byte, low ones first; the high bit says that more follow."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def read_varint(source: Source, most: int) -> int:
    """A number up to ``most``, in its shortest form."""
    number, shift = 0, 0
    while True:
        byte = source.take(1)[0]
        number |= (byte & 127) << shift
        shift += 7
        if number > most or shift > 63 or (byte == 0 and shift > 7):
            raise ValueError("message: a length is out of range")
        if byte < 128:
            return number


def fixed(numbers: np.ndarray, width: int) -> bytes:
    """Each of int64[n], >= 0, in ``width`` bits."""
    shifts = np.arange(width - 1, -1, -1)
    return pack((numbers[:, None] >> shifts[None, :] & 1).astype(bool).ravel())


def read_fixed(source: Source, count: int, width: int) -> np.ndarray:
    """int64[count]."""
    if width == 0:
        return np.zeros(count, np.int64)
    bits = read_bits(source, count * width).reshape(count, width)
    return bits @ (np.int64(1) << np.arange(width - 1, -1, -1))


def unary(numbers: np.ndarray) -> bytes:
    """Each of int64[n], >= 0, as that many zeros and a one."""
    bits = np.zeros(int(numbers.sum()) + len(numbers), bool)
    bits[np.cumsum(numbers + 1) - 1] = True
    return pack(bits)


def read_unary(source: Source, count: int) -> np.ndarray:
    """int64[count]."""
    rest = np.frombuffer(source.data, np.uint8, offset=source.place)
    ends = np.flatnonzero(np.unpackbits(rest))[:count]
    if len(ends) < count:
        raise ValueError("message: it ends too early")
    read_bits(source, int(ends[-1]) + 1 if count else 0)  # checks the padding
    return np.diff(ends, prepend=-1) - 1


def varying(numbers: np.ndarray, widths: np.ndarray) -> bytes:
    """The lowest ``widths[i]`` bits of each number."""
    owner, shift = _layout(widths)
    return pack((numbers[owner] >> shift & 1).astype(bool))


def read_varying(source: Source, widths: np.ndarray) -> np.ndarray:
    """int64[n] of the given widths (at most 52)."""
    bits = read_bits(source, int(widths.sum()))
    owner, shift = _layout(widths)
    return np.bincount(owner, weights=bits * np.exp2(shift), minlength=len(widths)).astype(np.int64)


def _layout(widths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each bit of the stream: whose it is, and its weight as a power of two."""
    owner = np.repeat(np.arange(len(widths)), widths)
    return owner, np.cumsum(widths)[owner] - 1 - np.arange(len(owner))
