"""What a published data set is: its names, its package, its hashes, and how its files become arrays.

A source package is only a carrier. What counts are the hashes: of every file in it, and of the arrays
that come out, which also identify a copy that reached the machine by another way.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from fedjax_async.check import require
from fedjax_async.data.idx import parse_idx
from fedjax_async.types import Array


class Arrays(NamedTuple):
    """A data set's examples and labels in the order in which they were published."""

    x: np.ndarray  # [M, ...]; images: uint8 [M, H, W] or [M, H, W, C]
    y: np.ndarray  # int32 [M]
    test_x: np.ndarray
    test_y: np.ndarray
    groups: np.ndarray | None = None  # int32 [M]: the natural owner of each training example

    def present(self) -> dict[str, np.ndarray]:
        """The arrays that there are, by name."""
        return {field: array for field, array in self._asdict().items() if array is not None}


class Package(NamedTuple):
    """Where the files are: a package of a registry, and the client that fetches it by name and version."""

    client: str
    name: str
    version: str
    megabytes: float


class Published(NamedTuple):
    """One published data set; images under their official TFDS name and version."""

    name: str
    version: str
    licence: str
    homepage: str
    class_names: tuple[str, ...]
    shape: tuple[int, ...]  # of one example
    examples: tuple[int, int]
    package: Package
    files: dict[str, str]  # name -> "md5:..." or "sha256:..." of the uncompressed file
    arrays: dict[str, str]  # field of Arrays -> sha256 of its bytes
    parse: Callable[[Mapping[str, bytes]], Arrays]
    decode: Callable[[Array], Array]
    dtype: str = "uint8"
    has_id: bool = False  # whether the TFDS features include an ``id`` text
    in_tfds: bool = True  # whether TFDS knows images under this name
    needs: str | None = None  # the pretrained model one of whose files ``parse`` is given too


class Pretrained(NamedTuple):
    """The published files of a pretrained model, kept as they are."""

    name: str
    version: str
    licence: str
    about: str
    package: Package
    files: dict[str, str]  # name -> "sha256:..."


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
    """CIFAR-10 from PNG files in which every row of 1024 RGB pixels is one 32 x 32 image; labels as JSON lists."""
    train = np.concatenate([_png_rows(files[f"data_batch_{i}.png"]) for i in range(1, 6)])
    labels = [np.array(json.loads(files[name]), np.int32) for name in ("train_lables.json", "test_lables.json")]
    return Arrays(train, labels[0], _png_rows(files["test_batch.png"]), labels[1])


def _png_rows(data: bytes) -> np.ndarray:
    """uint8[n, 32, 32, 3] from one PNG of n rows of 1024 RGB pixels."""
    try:
        from PIL import Image  # noqa: PLC0415 - an extra, needed only here
    except ImportError as error:
        raise ValueError(
            "pillow = not installed: needed for PNG files; run: pip install 'fedjax-async[data]'"
        ) from error
    with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
        # 1024 x 10000 is within Pillow's limit against decompression bombs, and its width is checked
        good = image.width == 1024 and image.mode == "RGB"
        require(good, "png", f"{image.size} {image.mode}", "1024 RGB pixels wide")
        return np.asarray(image).reshape(-1, 32, 32, 3)


def file_hash(data: bytes, like: str) -> str:
    """The hash of ``data`` by the algorithm of ``like``, in the form ``"md5:..."``."""
    algorithm = like.split(":", 1)[0]
    return f"{algorithm}:{hashlib.new(algorithm, data, usedforsecurity=False).hexdigest()}"


def array_hash(array: np.ndarray) -> str:
    """sha256 of an array's values in row-major order, numbers of several bytes little-endian."""
    dtype = array.dtype.newbyteorder("<")
    return hashlib.sha256(np.ascontiguousarray(array, dtype).data).hexdigest()


def check_files(published: Published | Pretrained, files: Mapping[str, bytes], where: str) -> None:
    """``ValueError`` naming the first of the published files whose hash differs."""
    for file, expected in published.files.items():
        found = file_hash(files[file], expected)
        require(found == expected, f"{published.name}: {file} in {where}", found, expected)


def check_arrays(published: Published, arrays: Arrays, where: str) -> Arrays:
    """The arrays themselves if they are bit for bit the published ones, else a ``ValueError`` saying which is not."""
    require(set(arrays.present()) == set(published.arrays), published.name, where, f"{', '.join(published.arrays)}")
    for field, array in arrays.present().items():
        good = array_hash(array) == published.arrays[field]
        allowed = f"bit for bit the published data (sha256 {published.arrays[field][:12]}...)"
        require(good, f"{published.name}.{field}", where, allowed)
    return arrays
