"""Files that are whole or not there; arrays in them as ``.npz``, without pickling, the same bytes each time."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import ml_dtypes  # noqa: F401  (NumPy learns the names bfloat16, float8_...; JAX depends on it)
import numpy as np

EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time a zip entry can carry
LOCK = ".fedjax_async.lock"  # in a folder that a process uses: see results.claim
_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """A file to write, which becomes ``path`` when all of it is on the disk; a reader never sees half of it.

    It has a temporary name in the same folder until then. After an error, such as the ``OSError`` of a full disk,
    ``path`` is what it was and the temporary file is gone.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """The new name too survives a loss of power, where the file system can promise that of a folder."""
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def is_leftover(path: Path) -> bool:
    """Whether a path is named as what a killed process leaves: a temporary file of ``replacing``, or a lock's file."""
    return path.name == LOCK or _is_temporary(path)


def _is_temporary(path: Path) -> bool:
    return _TEMPORARY.fullmatch(path.name) is not None


def sweep_up(folder: Path) -> None:
    """Remove temporary files of processes that were killed while they wrote; a lock's file may be in use and stays."""
    for path in filter(_is_temporary, folder.iterdir()):
        path.unlink(missing_ok=True)


def prove(path: Path) -> None:
    """``OSError`` unless a file can be written at ``path``: one beside it is written, renamed and removed."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    proof = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(proof, b"a file can be written here\n")
    finally:
        proof.unlink(missing_ok=True)


def write(path: str | Path, content: bytes) -> None:
    """Replace ``path`` by ``content``, whole or not at all."""
    with replacing(path) as file:
        file.write(content)


def write_npz(file: IO[bytes], arrays: Mapping[str, Any]) -> None:
    """``numpy.savez`` with fixed time stamps, array by array, without pickling; bfloat16 and the like keep their type.

    No name may hold a ``:``.
    """
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, value in arrays.items():
            array = np.asarray(value)
            entry = name
            if array.dtype.isbuiltin == 2:  # a type NumPy's own format does not know: store the bits, name the type
                entry, array = f"{name}:{array.dtype.name}", array.view(f"u{array.dtype.itemsize}")
            with archive.open(zipfile.ZipInfo(f"{entry}.npy", EPOCH), "w", force_zip64=True) as part:
                np.lib.format.write_array(part, array, allow_pickle=False)


def npz_bytes(arrays: Mapping[str, Any]) -> bytes:
    """What ``write_npz`` writes."""
    stream = io.BytesIO()
    write_npz(stream, arrays)
    return stream.getvalue()


def read_npz(source: Path | IO[bytes]) -> dict[str, np.ndarray]:
    """The arrays that ``write_npz`` or ``numpy.savez`` wrote, in their order.

    ``ValueError`` unless it is such an archive, whole and with the check sums of its entries; ``OSError`` if
    ``source`` cannot be opened.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(source, "rb")) if isinstance(source, Path) else source
        try:
            with zipfile.ZipFile(file) as archive:
                if (damaged := archive.testzip()) is not None:  # before anything in it is interpreted
                    raise ValueError(f"the check sum of {damaged!r} differs")
                return dict(_entry(archive, name) for name in archive.namelist())
        except Exception as error:  # zipfile raises anything: BadZipFile, RuntimeError, zlib.error, MemoryError
            raise ValueError((str(error).splitlines() or [type(error).__name__])[0]) from error


def _entry(archive: zipfile.ZipFile, entry: str) -> tuple[str, np.ndarray]:
    name, _, dtype = entry.removesuffix(".npy").partition(":")
    with archive.open(entry) as part:
        array = np.lib.format.read_array(part, allow_pickle=False)
    return name, array.view(dtype) if dtype else array
