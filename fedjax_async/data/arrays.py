"""The arrays of a published data set: their container, their hashes, and the folder that stores them.

Layout: ``DATA_DIR/arrays/NAME/VERSION/{x,y,test_x,test_y[,groups]}.npy``, and the files of a pretrained model in
``DATA_DIR/pretrained/NAME/VERSION``. Examples are memory-mapped when read. A folder is written under a temporary name
and renamed when it is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_async.base import disk
from fedjax_async.base.check import require
from fedjax_async.base.inputs import reading

EXAMPLES = ("x", "test_x")


class Arrays(NamedTuple):
    """Examples and labels of a data set, in the published order."""

    x: np.ndarray  # [M, ...]; images: uint8 [M, H, W] or [M, H, W, C]
    y: np.ndarray  # int32 [M]
    test_x: np.ndarray  # [T, ...]
    test_y: np.ndarray  # int32 [T]
    groups: np.ndarray | None = None  # int32 [M]: the natural owner of each training example

    def present(self) -> dict[str, np.ndarray]:
        """The arrays by name, without those that are None."""
        return {field: array for field, array in self._asdict().items() if array is not None}


def file_hash(data: bytes, like: str) -> str:
    """The hash of ``data`` by the algorithm of ``like``, in the form ``"md5:..."``."""
    algorithm = like.split(":", 1)[0]
    return f"{algorithm}:{hashlib.new(algorithm, data, usedforsecurity=False).hexdigest()}"


def array_hash(array: np.ndarray) -> str:
    """sha256 of the values in row-major order, little-endian."""
    dtype = array.dtype.newbyteorder("<")
    return hashlib.sha256(np.ascontiguousarray(array, dtype).data).hexdigest()


def read_cache(folder: Path, remedy: str = "fetch the data set again") -> Arrays | None:
    """Memory-mapped examples and loaded labels; None if the folder does not exist.

    Raises ``ValueError`` naming the first file that is damaged or missing, with ``remedy`` at its end.
    """
    if not folder.is_dir():
        return None
    found = {}
    for field in Arrays._fields:
        path = folder / f"{field}.npy"
        if field == "groups" and not path.exists():
            continue  # most data sets have no natural owners
        try:
            found[field] = np.load(reading(path), mmap_mode="r" if field in EXAMPLES else None, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise ValueError(f"cache = '{path}': is damaged ({reason}); {remedy}") from error
    return Arrays(**found)


def check_cache(
    arrays: Arrays,
    folder: Path,
    remedy: str,
    *,
    shape: tuple[int, ...],
    dtype: str,
    examples: tuple[int, int],
    owned: bool = False,
) -> None:
    """Raise ``ValueError`` for the first array that is missing or has another shape or dtype than the data set.

    ``shape`` and ``dtype`` describe one example, ``examples`` is (M, T). ``owned``: whether each example has a natural
    owner. The error names the file and ends with ``remedy``.
    """
    train, test = examples
    expected = {"x": (dtype, (train, *shape)), "y": ("int32", (train,))}
    expected |= {"test_x": (dtype, (test, *shape)), "test_y": ("int32", (test,))}
    expected |= {"groups": ("int32", (train,))} if owned else {}
    for field, (kind, sizes) in expected.items():
        array = getattr(arrays, field)
        found = "missing" if array is None else f"{array.dtype} {array.shape}"
        require(found == f"{kind} {sizes}", str(folder / f"{field}.npy"), found, f"{kind} {sizes}; {remedy}")


def write_cache(arrays: Arrays, folder: Path) -> Path:
    """Write all arrays in one step, in place of an older folder. Returns the folder."""
    with appearing(folder) as temporary:
        for field, array in arrays.present().items():
            np.save(temporary / f"{field}.npy", np.ascontiguousarray(array), allow_pickle=False)
        if folder.exists():
            shutil.rmtree(folder)
    return folder


def write_files(files: Mapping[str, bytes], folder: Path) -> Path:
    """Write all files in one step, in place of an older folder. Returns the folder."""
    with appearing(folder) as temporary:
        for name, content in files.items():
            (temporary / name).write_bytes(content)
        if folder.exists():
            shutil.rmtree(folder)
    return folder


@contextlib.contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder beside ``folder``. At the end, rename it to ``folder``; after an error, remove it.

    An ``OSError``, such as that of a full disk, names ``folder``.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with disk.naming(folder):
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with disk.naming(folder):
            temporary.chmod(0o755)
            yield temporary
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
