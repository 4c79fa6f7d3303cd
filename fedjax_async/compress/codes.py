"""Bit codes of whole numbers, in NumPy, without a loop over the numbers.

Streams are packed most significant bit first and padded with zeros to whole bytes. A variable-length code is two
streams: all lengths in unary, then all remainders. The functions ``read_...`` take bytes from the front of a
:class:`ByteReader` and raise ``ValueError`` for bytes that do not fit.

A reader of numbers first reads the bytes of the whole stream, so a count that does not fit is refused before an array
of that length is allocated. Then it yields the numbers in chunks, int64 arrays of at most ``8 * CHUNK`` numbers: a
stream needs less than 2 MiB, besides the arrays that the caller keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

CHUNK = 2048  # bytes of a stream of bits, unpacked at a time

Chunks = Iterator[np.ndarray]  # each int64[1 to 8 * CHUNK]


@dataclass
class ByteReader:
    """Bytes, and how many of them have been read."""

    data: memoryview
    offset: int = 0

    def read(self, count: int) -> memoryview:
        """The next ``count`` bytes, not copied."""
        if count > len(self.data) - self.offset:
            raise ValueError("message: it ends too early")
        self.offset += count
        return self.data[self.offset - count : self.offset]

    def read_bits(self, count: int) -> memoryview:
        """The bytes that hold the next ``count`` bits; the unused bits of the last byte must be zeros."""
        data = self.read(-(-count // 8))
        if count % 8 and data[-1] & 255 >> count % 8:
            raise ValueError("message: padding is not zero")
        return data


def pack(bits: np.ndarray) -> bytes:
    """bool[T] packed into bytes."""
    return np.packbits(bits).tobytes()


def read_bits(source: ByteReader, count: int) -> np.ndarray:
    """The next ``count`` bits, bool[count]."""
    data = np.frombuffer(source.read_bits(count), np.uint8)
    return np.unpackbits(data, count=count).view(bool)


def read_ones(source: ByteReader, count: int) -> Chunks:
    """Indices of the ones among the next ``count`` bits, ascending, the first bit being 0."""
    return _ones(source.read_bits(count), count)


def _ones(data: memoryview, count: int) -> Chunks:
    for low in range(0, count, 8 * CHUNK):
        part = np.frombuffer(data[low // 8 : low // 8 + CHUNK], np.uint8)
        ones = np.flatnonzero(np.unpackbits(part, count=min(8 * CHUNK, count - low)).view(bool))
        if len(ones):
            yield ones + low


def varint(number: int) -> bytes:
    """A whole number >= 0, 7 bits per byte, low bits first; the high bit of a byte means that more bytes follow."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def read_varint(source: ByteReader, most: int) -> int:
    """A number up to ``most``; ``ValueError`` for a larger one and for a form longer than the shortest."""
    number, shift = 0, 0
    while True:
        byte = source.read(1)[0]
        number |= (byte & 127) << shift
        shift += 7
        if number > most or shift > 63 or (byte == 0 and shift > 7):
            raise ValueError("message: a length is out of range")
        if byte < 128:
            return number


def fixed(numbers: np.ndarray, width: int) -> bytes:
    """Each number of int64[n], >= 0, in ``width`` bits."""
    shifts = np.arange(width - 1, -1, -1)
    return pack((numbers[:, None] >> shifts[None, :] & 1).astype(bool).ravel())


def read_fixed(source: ByteReader, count: int, width: int) -> Chunks:
    """``count`` numbers of ``width`` bits, at most 32."""
    first = 8 * source.offset
    source.read_bits(count * width)
    lows = range(0, count, 8 * CHUNK)
    return (_at(source, first + width * np.arange(low, min(low + 8 * CHUNK, count)), width, width) for low in lows)


def _at(source: ByteReader, first: np.ndarray, width: np.ndarray | int, most: int) -> np.ndarray:
    """The numbers of ``width`` <= ``most`` bits that start at the bits ``first`` of the message."""
    if most == 0:
        return np.zeros(len(first), np.int64)
    data = np.frombuffer(source.data, np.uint8)
    count = (most + 14) // 8  # bytes that hold a number, whichever bit of a byte it starts at
    byte, window = first >> 3, np.zeros(len(first), np.int64)
    for i in range(count):
        window = window << 8 | data.take(byte + i, mode="clip")  # bytes past the end are shifted out
    return (window >> (8 * count - (first & 7) - width)) & (np.left_shift(1, width) - 1)


def unary(numbers: np.ndarray) -> bytes:
    """Each number of int64[n], >= 0, as that many zeros and a one."""
    bits = np.zeros(int(numbers.sum()) + len(numbers), bool)
    bits[np.cumsum(numbers + 1) - 1] = True
    return pack(bits)


def read_unary(source: ByteReader, count: int) -> tuple[int, Chunks]:
    """The sum of ``count`` numbers, and the numbers."""
    unread, left, end = source.data[source.offset :], count, 0
    for ones in _ones(unread, 8 * len(unread) if count else 0):
        end = int(ones[min(left, len(ones)) - 1]) + 1
        left -= min(left, len(ones))
        if not left:
            break
    if left:
        raise ValueError("message: it ends too early")
    return end - count, _gaps(read_ones(source, end))


def _gaps(chunks: Chunks) -> Chunks:
    """How many integers lie between each of the ascending indices and the one before it (-1 before the first)."""
    last = -1
    for indices in chunks:
        yield np.diff(indices, prepend=last) - 1
        last = indices[-1]


def read_rice(source: ByteReader, count: int, width: int, most: int) -> Chunks:
    """``count`` numbers in Rice's code: the higher bits of each in unary, then its lowest ``width`` bits.

    Raises ``ValueError`` if the higher bits alone sum to more than ``most``, so that no number overflows.
    """
    total, quotients = read_unary(source, count)
    if total << width > most:
        raise ValueError("message: a number is out of range")
    first = 8 * source.offset
    source.read_bits(count * width)
    return _rice(source, first, quotients, width)


def _rice(source: ByteReader, first: int, quotients: Chunks, width: int) -> Chunks:
    for quotient in quotients:
        yield quotient << width | _at(source, first + width * np.arange(len(quotient)), width, width)
        first += width * len(quotient)


def varying(numbers: np.ndarray, widths: np.ndarray) -> bytes:
    """The lowest ``widths[i]`` bits of each number."""
    owner = np.repeat(np.arange(len(widths)), widths)
    shift = np.cumsum(widths)[owner] - 1 - np.arange(len(owner))
    return pack((numbers[owner] >> shift & 1).astype(bool))


def gamma(numbers: np.ndarray) -> bytes:
    """Each number of int64[n], >= 1, in Elias' gamma code: how many bits follow its leading one (unary), those bits."""
    widths = np.frexp(numbers)[1].astype(np.int64) - 1
    return unary(widths) + varying(numbers, widths)


def read_gamma(source: ByteReader, count: int, most: int) -> Chunks:
    """``count`` numbers >= 1 in Elias' gamma code, with at most ``most`` <= 32 bits after the leading one."""
    total, widths = read_unary(source, count)
    first = 8 * source.offset
    source.read_bits(total)
    return _gamma(source, first, widths, most)


def _gamma(source: ByteReader, first: int, chunks: Chunks, most: int) -> Chunks:
    for width in chunks:
        widest = int(width.max())
        if widest > most:
            raise ValueError("message: a number is out of range")
        end = first + np.cumsum(width)
        yield np.int64(1) << width | _at(source, end - width, width, widest)
        first = int(end[-1])
