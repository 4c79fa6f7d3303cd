"""Read the image files of published data sets: IDX (MNIST, Fashion-MNIST) and PNG with one image per row (CIFAR-10).

IDX: two zero bytes, a type code, the number of axes, the length of each axis as a big-endian uint32, then the values
in row-major order, big-endian. Source: Y. LeCun, C. Cortes and C. Burges, the MNIST database.
"""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Mapping
from types import ModuleType

import numpy as np

from fedjax_async.base import lazy
from fedjax_async.base.check import require
from fedjax_async.data.arrays import Arrays

DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def parse_idx(data: bytes) -> np.ndarray:
    """The array in an IDX file, in native byte order; raises ``ValueError`` unless the bytes are exactly one IDX file.

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


def from_idx(files: Mapping[str, bytes]) -> Arrays:
    """Arrays from the four IDX files of MNIST and its relatives."""
    train, train_y, test, test_y = (
        parse_idx(files[name])
        for name in (
            "train-images-idx3-ubyte",
            "train-labels-idx1-ubyte",
            "t10k-images-idx3-ubyte",
            "t10k-labels-idx1-ubyte",
        )
    )
    return Arrays(train, train_y.astype(np.int32), test, test_y.astype(np.int32))


def from_png_rows(files: Mapping[str, bytes]) -> Arrays:
    """CIFAR-10 from PNG files, one 32 x 32 image in each row of 1024 RGB pixels; labels as JSON lists."""
    train = np.concatenate([_png_rows(files[f"data_batch_{i}.png"]) for i in range(1, 6)])
    labels = [np.array(json.loads(files[name]), np.int32) for name in ("train_lables.json", "test_lables.json")]
    return Arrays(train, labels[0], _png_rows(files["test_batch.png"]), labels[1])


def import_pillow(what: str) -> ModuleType:
    """The module ``PIL.Image``; raises ``ValueError`` if it is missing."""
    return lazy.optional("PIL.Image", what, "pillow")


def _png_rows(data: bytes) -> np.ndarray:
    """uint8[n, 32, 32, 3] from one PNG of n rows of 1024 RGB pixels."""
    with import_pillow("PNG files").open(io.BytesIO(data), formats=("PNG",)) as image:
        # the published sizes, 1024 x 10000, are within Pillow's limit against decompression bombs
        good = image.width == 1024 and image.mode == "RGB"
        require(good, "png", f"{image.size} {image.mode}", "1024 RGB pixels wide")
        return np.asarray(image).reshape(-1, 32, 32, 3)
