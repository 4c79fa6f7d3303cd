"""Atomic writing of files; ``.npz`` files without pickling, with the same bytes each time; the lines of CSV files."""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import ml_dtypes  # noqa: F401  (NumPy learns the names bfloat16, float8_...; JAX depends on it)
import numpy as np

EPOCH = (1980, 1, 1, 0, 0, 0)  # the time stamp of all zip entries: the earliest one possible
LOCK = ".fedjax_async.lock"  # in a folder that a process uses (see results.claim)
_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Name ``path`` in an ``OSError`` that names a temporary file for it, or no file, as that of a full disk."""
    own = f".{Path(path).name}"  # the names of its temporary files and folders begin like this
    try:
        yield
    except OSError as error:
        if error.filename is not None and not any(p.startswith(own) for p in Path(str(error.filename)).parts):
            raise
        # NumPy's error of a short write has neither number nor text
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), str(path)) from error


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a temporary file in the folder of ``path``; it is renamed to ``path`` when it is complete and on the disk.

    A reader never sees half a file. After an error, such as the ``OSError`` of a full disk, which names ``path``,
    ``path`` is unchanged and the temporary file is removed.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path):
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):  # such as a folder that has become read-only
            temporary.unlink(missing_ok=True)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Write the folder's entries to the disk, so that a new name survives a loss of power (where this is supported)."""
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def is_leftover(path: Path) -> bool:
    """Whether a killed process may have left ``path``: its name is that of a temporary file or of a lock file."""
    return path.name == LOCK or _is_temporary(path)


def _is_temporary(path: Path) -> bool:
    return _TEMPORARY.fullmatch(path.name) is not None


def sweep_up(folder: Path) -> None:
    """Remove the temporary files of killed processes; a lock file stays, because it may be in use."""
    for path in filter(_is_temporary, folder.iterdir()):
        path.unlink(missing_ok=True)


def prove(path: Path) -> None:
    """``OSError`` unless a file can be written at ``path``; tests it with a file beside it, which is then removed."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    probe = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(probe, b"a file can be written here\n")
    finally:
        probe.unlink(missing_ok=True)


def write(path: str | Path, content: bytes) -> None:
    """Replace the file ``path`` by ``content``, atomically."""
    with replacing(path) as file:
        file.write(content)


def write_npz(file: IO[bytes], arrays: Mapping[str, object]) -> None:
    """``numpy.savez`` with fixed time stamps and without pickling; bfloat16 and similar types are kept.

    Names must not contain ``:``.
    """
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, value in arrays.items():
            array = np.asarray(value)
            entry = name
            if array.dtype.isbuiltin == 2:  # not a type of NumPy's format: store the bits, and the type in the name
                entry, array = f"{name}:{array.dtype.name}", array.view(f"u{array.dtype.itemsize}")
            with archive.open(zipfile.ZipInfo(f"{entry}.npy", EPOCH), "w", force_zip64=True) as part:
                np.lib.format.write_array(part, array, allow_pickle=False)


def npz_bytes(arrays: Mapping[str, object]) -> bytes:
    """The bytes that ``write_npz`` writes."""
    stream = io.BytesIO()
    write_npz(stream, arrays)
    return stream.getvalue()


def read_npz(source: Path | IO[bytes]) -> dict[str, np.ndarray]:
    """The arrays that ``write_npz`` or ``numpy.savez`` wrote, in the same order.

    ``ValueError`` if the file is no such archive, is incomplete, or an entry has another checksum; ``OSError`` if
    ``source`` cannot be opened.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(source, "rb")) if isinstance(source, Path) else source
        try:
            with zipfile.ZipFile(file) as archive:
                if (damaged := archive.testzip()) is not None:  # before any entry is interpreted
                    raise ValueError(f"the checksum of {damaged!r} differs")
                return dict(_entry(archive, name) for name in archive.namelist())
        except Exception as error:  # zipfile raises many kinds: BadZipFile, RuntimeError, zlib.error, MemoryError
            raise ValueError((str(error).splitlines() or [type(error).__name__])[0]) from error


def _entry(archive: zipfile.ZipFile, entry: str) -> tuple[str, np.ndarray]:
    name, _, dtype = entry.removesuffix(".npy").partition(":")
    with archive.open(entry) as part:
        array = np.lib.format.read_array(part, allow_pickle=False)
    return name, array.view(dtype) if dtype else array


def csv_lines(path: str | Path) -> list[tuple[int, list[str]]]:
    """The lines of a CSV file with text in them, the header first: the number of a line, and its cells.

    Spaces around cells and the byte order mark of some spreadsheets are left out. Raises ``OSError``,
    ``UnicodeDecodeError`` or ``csv.Error`` for a file that cannot be read or has another separator.
    """
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = enumerate(csv.reader(file, strict=True, skipinitialspace=True), 1)
        lines = [(number, [cell.strip() for cell in cells]) for number, cells in reader if any(cells)]
    header = lines[0][1] if lines else []
    other = next((name for sign, name in SEPARATORS.items() if len(header) == 1 and sign in header[0]), None)
    if other is not None:
        raise csv.Error(f"separated by {other}, but must be by commas, with a point in decimals")
    return lines


SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}  # of tables that are not separated by commas
