"""The IDX file format of MNIST and Fashion-MNIST.

Two zero bytes, a type code, the number of axes, then the axes' lengths as big-endian uint32, then the
values in row-major order, big-endian. Source: Y. LeCun, C. Cortes and C. Burges, the MNIST database.
"""

from __future__ import annotations

import math
import struct

import numpy as np

DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def parse_idx(data: bytes) -> np.ndarray:
    """The array held by an IDX file, in native byte order; ``ValueError`` if the bytes are not exactly one.

    >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9])).tolist()
    [7, 8, 9]
    """
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in DTYPES:
        raise ValueError(
            f"idx = bytes that begin {data[:4].hex() or 'with nothing'}: must be an IDX file (0000, type, axes)"
        )
    axes = data[3]
    start = 4 + 4 * axes
    if len(data) < start:
        raise ValueError(f"idx = {len(data)} bytes: must be at least {start}, the header of {axes} axes")
    shape = struct.unpack(f">{axes}I", data[4:start])
    dtype = np.dtype(DTYPES[data[2]])
    expected = start + dtype.itemsize * math.prod(shape)
    if len(data) != expected:
        raise ValueError(f"idx = {len(data)} bytes: must be {expected}, the header and the values of shape {shape}")
    array = np.frombuffer(data, dtype, offset=start).reshape(shape)
    return array.astype(dtype.newbyteorder("="))


def format_idx(array: np.ndarray) -> bytes:
    """The IDX file that holds ``array``; the inverse of ``parse_idx``."""
    dtype = np.asarray(array).dtype.newbyteorder(">")
    codes = {np.dtype(name): code for code, name in DTYPES.items()}
    if dtype not in codes:
        raise ValueError(f"dtype = {array.dtype}: must be one of uint8, int8, int16, int32, float32, float64")
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, codes[dtype], array.ndim, *array.shape)
    return header + np.ascontiguousarray(array, dtype).tobytes()
