"""The contents of result files: JSON and CSV. Equal values give equal bytes."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import numpy as np

from fedjax_async.engine.client_scores import is_accuracy
from fedjax_async.results.client_names import COLUMN as CLIENT_NAMES

OfColumn = TypeVar("OfColumn")


def plain(value: object) -> object:
    """``value`` in the types that JSON has.

    Arrays and tuples become lists, NaN and infinities None. A function or another object becomes its qualified
    name, never its address, so that two equal runs write equal files.
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


def json_bytes(value: object) -> bytes:
    """Indented JSON with sorted keys."""
    return (json.dumps(plain(value), indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def _cells(column: np.ndarray) -> Sequence[object]:
    """The values as Python numbers or strings, with the fewest digits that read back exactly."""
    if column.dtype.kind == "f" and column.dtype.itemsize < 8:
        texts = [str(value) for value in column]
        if np.array_equal(np.array(texts, np.float64).astype(column.dtype), column, equal_nan=True):
            return texts
    return column.tolist()


def applicable(columns: Mapping[str, OfColumn]) -> dict[str, OfColumn]:
    """The columns without the accuracies of targets that are not classes: those that are NaN throughout.

    >>> list(applicable({"loss": [2.0, 1.0], "accuracy": [math.nan, math.nan], "train_loss": [math.nan, math.nan]}))
    ['loss', 'train_loss']
    """
    absent = [
        name for name, values in columns.items() if is_accuracy(name) and np.isnan(np.asarray(values, np.float64)).all()
    ]
    return {name: values for name, values in columns.items() if name not in absent}


def csv_bytes(columns: Mapping[str, np.ndarray]) -> bytes:
    """A header and one line per row; every float reads back exactly.

    ``ValueError`` unless all columns are one-dimensional and equally long.
    """
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    for name, array in arrays.items():
        if array.ndim != 1 or len({len(a) for a in arrays.values() if a.ndim}) > 1:
            shapes = {key: a.shape for key, a in arrays.items()}
            raise ValueError(f"column {name!r} of {shapes}: columns must be one-dimensional and equally long")
    lines: list[str] = []
    # cells with a character of the line's end are quoted, and \r ends a line for most readers
    writer = csv.writer(SimpleNamespace(write=lines.append), lineterminator="\r\n")
    writer.writerow(arrays)
    writer.writerows(zip(*(_cells(array) for array in arrays.values()), strict=True))
    return "".join(f"{line[:-2]}\n" for line in lines).encode()


def csv_columns(content: bytes, dtypes: Mapping[str, str]) -> dict[str, np.ndarray]:
    """The inverse of ``csv_bytes``; ``dtypes`` gives each column's NumPy type. The clients' names are left out.

    Accuracies that ``applicable`` left out are NaN.
    """
    header, *rows = list(csv.reader(io.StringIO(content.decode())))
    texts = dict(zip(header, zip(*rows, strict=True), strict=True)) if rows else dict.fromkeys(header, ())
    columns = {}
    for name in header:
        if name == CLIENT_NAMES:
            continue
        dtype = dtypes[name]
        cells = [cell == "True" for cell in texts[name]] if np.dtype(dtype).kind == "b" else list(texts[name])
        parsed = np.float64 if np.dtype(dtype).kind == "f" else dtype
        columns[name] = np.array(cells, dtype=parsed).astype(dtype)
    absent = [name for name in dtypes if name not in columns and is_accuracy(name)]
    return columns | {name: np.full(len(rows), math.nan, dtypes[name]) for name in absent}
