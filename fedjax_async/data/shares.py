"""Tables of class shares, one row per client and one column per class: read, and put into the order of the classes."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence

import numpy as np

from fedjax_async.base import check, disk
from fedjax_async.base.check import require


def read_shares(path: str) -> tuple[list[str], np.ndarray]:
    """The names of a table's classes, and its numbers, float64 [N, C]; each class needs a positive one."""
    try:
        header, *rows = [cells for _, cells in disk.csv_lines(check.path("path", path))] or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())[:100]
        raise ValueError(f"path = {path!r}: cannot be read as a table ({type(error).__name__}: {reason})") from error
    require(len(header) > 1 and len(rows) > 0, "path", path, "a table with one column per class and one row per client")
    found = np.zeros((len(rows), len(header) - 1))
    for line, cells in enumerate(rows):
        require(len(cells) == len(header), f"{path}, row {line + 1}", f"{len(cells)} cells", f"{len(header)} cells")
        for column, cell in enumerate(cells[1:]):
            value = _number(cell)
            require(
                0 <= value < math.inf, f"{path}, row {line + 1}, {header[column + 1]}", cell, "a finite number >= 0"
            )
            found[line, column] = value
    unowned = np.flatnonzero(found.sum(axis=0) == 0)
    require(
        len(unowned) == 0, path, f"only zeros for {[header[1 + c] for c in unowned[:3]]}", "a client for each class"
    )
    return header[1:], found


def order_of(path: str, names: Sequence[str], class_names: Sequence[str] | None) -> tuple[list[int], list[int] | None]:
    """The columns of a table in the order of the classes, and the labels of the classes that are named.

    The second is None where numbers order the columns. Raises ``ValueError`` for names that do not tell the order.
    """
    require(len(set(names)) == len(names), f"'{path}': classes", list(names), "different from each other")
    known = list(class_names or ())
    unknown = [name for name in names if name not in known]
    if unknown and all(_number(name) < math.inf for name in names):
        return sorted(range(len(names)), key=lambda column: _number(names[column])), None
    allowed = f"those of the data set, {', '.join(known)}" if known else "numbers, as the data set names no classes"
    require(not unknown, f"'{path}': classes", unknown[:3], allowed)
    labels = [known.index(name) for name in names]
    order = sorted(range(len(names)), key=lambda column: labels[column])
    return order, [labels[column] for column in order]


def _number(text: str) -> float:
    """The finite number that a text is, else infinity."""
    try:
        value = float(text)
    except ValueError:
        return math.inf
    return value if math.isfinite(value) else math.inf
