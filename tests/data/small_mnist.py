"""A made-up data set of 30 + 12 tiny images in the format of MNIST, and packages that contain it."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

from fedjax_async.data.arrays import Arrays, array_hash, file_hash
from fedjax_async.data.images import DTYPES
from fedjax_async.data.published import SOURCES, Published

NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def format_idx(array: np.ndarray) -> bytes:
    """The IDX file of ``array``: the inverse of ``parse_idx``."""
    codes = {np.dtype(name): code for code, name in DTYPES.items()}
    dtype = array.dtype.newbyteorder(">")
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, codes[dtype], array.ndim, *array.shape)
    return header + np.ascontiguousarray(array, dtype).tobytes()


def small_arrays(seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    x, test_x = (rng.integers(0, 256, (n, 28, 28), dtype=np.uint8) for n in (30, 12))
    return Arrays(x, rng.integers(0, 10, 30, dtype=np.int32), test_x, rng.integers(0, 10, 12, dtype=np.int32))


def small_files(seed: int = 0) -> dict[str, bytes]:
    arrays = small_arrays(seed)
    return {
        name: format_idx(array.astype(np.uint8))
        for name, array in zip(NAMES, (arrays.x, arrays.y, arrays.test_x, arrays.test_y))
    }


def published_as(name: str, arrays: Arrays, files: dict[str, bytes], algorithm: str = "sha256") -> Published:
    """The entry of a data set with the hashes and sizes of made-up files and arrays."""
    return SOURCES[name]._replace(
        files={file: file_hash(data, algorithm) for file, data in files.items()},
        arrays={field: array_hash(array) for field, array in arrays.present().items()},
        examples=(len(arrays.x), len(arrays.test_x)),
    )


def small_published() -> Published:
    return published_as("mnist", small_arrays(), small_files(), "md5")


def tar_bytes(files: dict[str, bytes], mode: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


def ar_bytes(members: dict[str, bytes]) -> bytes:
    out = b"!<arch>\n"
    for name, data in members.items():
        out += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode() + data + b"\n" * (len(data) % 2)
    return out


def zip_bytes(files: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return file.getvalue()


def image_bytes(pixels: np.ndarray, kind: str = "PNG", mode: str = "RGB", **options: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, format=kind, **options)
    return file.getvalue()


def npm_package(path: Path, files: dict[str, bytes]) -> Path:
    inside = {f"package/data/{name}": data for name, data in files.items()} | {"package/index.js": b"throw 1"}
    path.write_bytes(tar_bytes(inside, "w:gz"))
    return path


def deb_package(path: Path, files: dict[str, bytes], compression: str = "xz") -> Path:
    inside = {f"./usr/share/datasets/{name}.gz": gzip.compress(data) for name, data in files.items()}
    data = tar_bytes(inside, f"w:{compression}")
    members = {"debian-binary": b"2.0\n", "control.tar.xz": tar_bytes({}, "w:xz"), f"data.tar.{compression}": data}
    path.write_bytes(ar_bytes(members))
    return path
