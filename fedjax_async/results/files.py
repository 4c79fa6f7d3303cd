"""Deterministic, atomic files: the same content gives the same bytes, and a reader never sees half a file."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (NumPy learns the names bfloat16, float8_...; JAX depends on it)
import numpy as np

EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time a zip entry can carry


def write(path: Path, content: bytes) -> None:
    """Write to a temporary name in the same folder, then rename over ``path``."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def plain(value: Any) -> Any:
    """``value`` as JSON can hold it.

    Arrays become lists, tuples lists, NaN and infinities None; a function or another object becomes
    its qualified name, never its address, so that two equal runs write equal files.
    """
    if hasattr(value, "_asdict"):
        value = value._asdict()
    elif hasattr(value, "tolist"):  # NumPy and JAX arrays and scalars
        value = value.tolist()
    elif isinstance(value, os.PathLike):
        value = Path(value).as_posix()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def json_bytes(value: Any) -> bytes:
    """Indented JSON with sorted keys."""
    return (json.dumps(plain(value), indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def _cells(column: np.ndarray) -> list[Any]:
    """Python values whose text reads back exactly, with the fewest digits that do."""
    if column.dtype.kind == "f" and column.dtype.itemsize < 8:
        texts = [str(value) for value in column]
        if np.array_equal(np.array(texts, np.float64).astype(column.dtype), column, equal_nan=True):
            return texts
    return column.tolist()


def csv_bytes(columns: Mapping[str, np.ndarray]) -> bytes:
    """A header and one line a row; floats with as many digits as reading back exactly takes."""
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    for name, array in arrays.items():
        if array.ndim != 1 or len({len(a) for a in arrays.values() if a.ndim}) > 1:
            shapes = {key: a.shape for key, a in arrays.items()}
            raise ValueError(f"column {name!r} of {shapes}: columns must be one-dimensional and equally long")
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(arrays)
    writer.writerows(zip(*(_cells(array) for array in arrays.values()), strict=True))
    return stream.getvalue().encode()


def csv_columns(content: bytes, dtypes: Mapping[str, str]) -> dict[str, np.ndarray]:
    """The inverse of ``csv_bytes``; ``dtypes`` gives each column's NumPy type."""
    header, *rows = list(csv.reader(io.StringIO(content.decode())))
    texts = dict(zip(header, zip(*rows, strict=True), strict=True)) if rows else dict.fromkeys(header, ())
    columns = {}
    for name in header:
        dtype = dtypes[name]
        cells = [cell == "True" for cell in texts[name]] if np.dtype(dtype).kind == "b" else list(texts[name])
        through = np.float64 if np.dtype(dtype).kind == "f" else dtype
        columns[name] = np.array(cells, dtype=through).astype(dtype)
    return columns


def npz_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    """``numpy.savez`` with fixed time stamps, without pickling; bfloat16 and the like keep their type."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, value in arrays.items():
            array = np.asarray(value)
            entry = name
            if array.dtype.kind == "V":  # a type NumPy's own format does not know: store the bits, name the type
                entry, array = f"{name}:{array.dtype.name}", array.view(f"u{array.dtype.itemsize}")
            with archive.open(zipfile.ZipInfo(f"{entry}.npy", EPOCH), "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
    return stream.getvalue()


def npz_arrays(content: bytes) -> dict[str, np.ndarray]:
    """The inverse of ``npz_bytes``."""
    arrays = {}
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        for entry in archive.files:
            name, _, dtype = entry.partition(":")
            arrays[name] = archive[entry].view(dtype) if dtype else archive[entry]
    return arrays
