"""Bit codes of whole numbers, in NumPy, without a loop over the numbers.

Streams are packed most significant bit first and padded with zeros to whole bytes. A code whose words differ in
length is two streams, all lengths in unary before all remainders. Readers take bytes from the front of a
:class:`Source`; whatever does not fit is a ``ValueError``.

Readers of numbers take the bytes of the whole stream at once, so that a count that does not fit is refused before
anything of that length is allocated. The numbers follow in chunks, int64 arrays of at most ``8 * CHUNK`` numbers: a
stream needs less than 2 MiB besides what the caller keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

CHUNK = 2048  # bytes of a stream of bits that are unpacked at a time

Chunks = Iterator[np.ndarray]  # int64[at least 1, at most 8 * CHUNK] each


@dataclass
class Source:
    """Bytes, and how many of them are read."""

    data: memoryview
    place: int = 0

    def take(self, count: int) -> memoryview:
        """The next ``count`` bytes, not copied."""
        if count > len(self.data) - self.place:
            raise ValueError("message: it ends too early")
        self.place += count
        return self.data[self.place - count : self.place]

    def take_bits(self, count: int) -> memoryview:
        """The whole bytes that hold the next ``count`` bits; the rest of the last byte must be zeros."""
        taken = self.take(-(-count // 8))
        if count % 8 and taken[-1] & 255 >> count % 8:
            raise ValueError("message: padding is not zero")
        return taken


def pack(bits: np.ndarray) -> bytes:
    """bool[T] as whole bytes."""
    return np.packbits(bits).tobytes()


def read_bits(source: Source, count: int) -> np.ndarray:
    """The next ``count`` bits, bool[count]."""
    taken = np.frombuffer(source.take_bits(count), np.uint8)
    return np.unpackbits(taken, count=count).view(bool)


def read_ones(source: Source, count: int) -> Chunks:
    """Which of the next ``count`` bits are ones, ascending from 0."""
    return _ones(source.take_bits(count), count)


def _ones(data: memoryview, count: int) -> Chunks:
    for low in range(0, count, 8 * CHUNK):
        part = np.frombuffer(data[low // 8 : low // 8 + CHUNK], np.uint8)
        ones = np.flatnonzero(np.unpackbits(part, count=min(8 * CHUNK, count - low)).view(bool))
        if len(ones):
            yield ones + low


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


def read_fixed(source: Source, count: int, width: int) -> Chunks:
    """``count`` numbers of ``width`` bits (at most 32)."""
    first = 8 * source.place
    source.take_bits(count * width)
    lows = range(0, count, 8 * CHUNK)
    return (_at(source, first + width * np.arange(low, min(low + 8 * CHUNK, count)), width, width) for low in lows)


def _at(source: Source, first: np.ndarray, width: np.ndarray | int, most: int) -> np.ndarray:
    """The numbers of ``width`` bits, at most ``most``, whose first bits are the bits ``first`` of the message."""
    if most == 0:
        return np.zeros(len(first), np.int64)
    data = np.frombuffer(source.data, np.uint8)
    count = (most + 14) // 8  # bytes that hold a number wherever in a byte it starts
    byte, window = first >> 3, np.zeros(len(first), np.int64)
    for i in range(count):
        window = window << 8 | data.take(byte + i, mode="clip")  # past the end: bits that are shifted out
    return (window >> (8 * count - (first & 7) - width)) & (np.left_shift(1, width) - 1)


def unary(numbers: np.ndarray) -> bytes:
    """Each of int64[n], >= 0, as that many zeros and a one."""
    bits = np.zeros(int(numbers.sum()) + len(numbers), bool)
    bits[np.cumsum(numbers + 1) - 1] = True
    return pack(bits)


def read_unary(source: Source, count: int) -> tuple[int, Chunks]:
    """The sum of ``count`` numbers, and the numbers."""
    rest, left, end = source.data[source.place :], count, 0
    for ones in _ones(rest, 8 * len(rest) if count else 0):
        end = int(ones[min(left, len(ones)) - 1]) + 1
        left -= min(left, len(ones))
        if not left:
            break
    if left:
        raise ValueError("message: it ends too early")
    return end - count, _gaps(read_ones(source, end))


def _gaps(chunks: Chunks) -> Chunks:
    """How many integers lie between each of ascending ones and the one before, the first of all from 0."""
    last = -1
    for places in chunks:
        yield np.diff(places, prepend=last) - 1
        last = places[-1]


def read_rice(source: Source, count: int, width: int, most: int) -> Chunks:
    """``count`` numbers in Rice's code: all but the lowest ``width`` bits of each in unary, then those bits.

    Refused if the parts in unary alone sum to more than ``most``, so that no number overflows.
    """
    total, quotients = read_unary(source, count)
    if total << width > most:
        raise ValueError("message: a number is out of range")
    first = 8 * source.place
    source.take_bits(count * width)
    return _rice(source, first, quotients, width)


def _rice(source: Source, first: int, quotients: Chunks, width: int) -> Chunks:
    for quotient in quotients:
        yield quotient << width | _at(source, first + width * np.arange(len(quotient)), width, width)
        first += width * len(quotient)


def varying(numbers: np.ndarray, widths: np.ndarray) -> bytes:
    """The lowest ``widths[i]`` bits of each number."""
    owner = np.repeat(np.arange(len(widths)), widths)
    shift = np.cumsum(widths)[owner] - 1 - np.arange(len(owner))
    return pack((numbers[owner] >> shift & 1).astype(bool))


def gamma(numbers: np.ndarray) -> bytes:
    """Each of int64[n], >= 1, in Elias' gamma code: how many bits follow its first one in unary, then those bits."""
    widths = np.frexp(numbers)[1].astype(np.int64) - 1
    return unary(widths) + varying(numbers, widths)


def read_gamma(source: Source, count: int, most: int) -> Chunks:
    """``count`` numbers >= 1 with at most ``most`` bits (at most 32) after the first one."""
    total, widths = read_unary(source, count)
    first = 8 * source.place
    source.take_bits(total)
    return _gamma(source, first, widths, most)


def _gamma(source: Source, first: int, chunks: Chunks, most: int) -> Chunks:
    for width in chunks:
        widest = int(width.max())
        if widest > most:
            raise ValueError("message: a number is out of range")
        end = first + np.cumsum(width)
        yield np.int64(1) << width | _at(source, end - width, width, widest)
        first = int(end[-1])
