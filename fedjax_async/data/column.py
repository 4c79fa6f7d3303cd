"""One array in one ``.npy`` file: written row by row without knowing how many will come, opened without reading it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Self

import numpy as np

from fedjax_async.check import require

Header = dict[str, Any]


class Column:
    """A growing file; a context manager. The first rows appended decide type and shape of all."""

    def __init__(self, path: Path) -> None:
        self.rows = 0
        self._path, self._file = path, path.open("wb")
        self._header: Header = {}
        self._hash = hashlib.sha256()

    def __enter__(self) -> Self:
        return self

    def append(self, rows: np.ndarray) -> None:
        """Write ``rows`` [R, ...] behind the others."""
        rows = np.asarray(rows)
        dtype = rows.dtype.newbyteorder("<")
        if not self._header:
            good = rows.ndim >= 1 and dtype.kind in "biuf"
            require(good, self._path.stem, f"{rows.dtype}{list(rows.shape)}", "rows of numbers or truth values")
            self._header = {"descr": dtype.str, "fortran_order": False, "shape": (0, *rows.shape[1:])}
            np.lib.format.write_array_header_1_0(self._file, self._header)
            self._start = self._file.tell()
        descr, item = self._header["descr"], self._header["shape"][1:]
        good = dtype.str == descr and rows.ndim >= 1 and rows.shape[1:] == item
        found = f"{rows.dtype}{list(rows.shape)}"
        require(good, self._path.stem, found, f"like the rows before, {np.dtype(descr)} of shape {item}")
        content = np.ascontiguousarray(rows, dtype)
        self._file.write(content.data)
        self._hash.update(content.data)
        self.rows += len(rows)

    def __exit__(self, *error: Any) -> None:
        try:
            if self._header:  # NumPy leaves room in the header for a longer first axis
                self._file.seek(0)
                self._header["shape"] = (self.rows, *self._header["shape"][1:])
                np.lib.format.write_array_header_1_0(self._file, self._header)
                require(self._file.tell() == self._start, self._path.stem, "its header", f"{self._start} bytes long")
        finally:
            self._file.close()

    def about(self) -> dict[str, Any]:
        """What :func:`open_column` compares: dtype, shape, sha256 of the values and the bytes of the file."""
        h = self._header
        return {
            "dtype": np.dtype(h["descr"]).name,
            "shape": list(h["shape"]),
            "bytes": self._path.stat().st_size,
            "sha256": self._hash.hexdigest(),
        }


def open_column(path: Path, about: dict[str, Any]) -> np.ndarray:
    """The array of a file, memory-mapped; ``ValueError`` if it is missing or its type or length is not as stated."""
    found = path.stat().st_size if path.is_file() else None
    require(found == about["bytes"], str(path), found, f"{about['bytes']} bytes long, as its metadata say")
    mode: Any = "r" if 0 not in about["shape"] else None  # an empty array cannot be mapped
    try:
        array: np.ndarray = np.load(path, mmap_mode=mode, allow_pickle=False)
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"'{path}': must be a NumPy file of numbers ({str(error).splitlines()[0]})") from error
    is_as_stated = array.dtype.name == about["dtype"] and list(array.shape) == about["shape"]
    stated = f"{about['dtype']}{about['shape']}, as its metadata say"
    require(is_as_stated and array.flags.c_contiguous, str(path), f"{array.dtype}{list(array.shape)}", stated)
    return array
