"""A made-up data set of 30 + 12 tiny images in the format of MNIST, and packages that contain it."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np

from fedjax_async.data.arrays import Arrays, array_hash, file_hash
from fedjax_async.data.images import format_idx
from fedjax_async.data.published import SOURCES, Published

NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


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


def small_published() -> Published:
    """The entry of MNIST with the hashes and sizes of the made-up data."""
    return SOURCES["mnist"]._replace(
        files={name: file_hash(data, "md5") for name, data in small_files().items()},
        arrays={field: array_hash(array) for field, array in small_arrays().present().items()},
        examples=(30, 12),
    )


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
