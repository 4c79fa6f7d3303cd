"""Tables in CSV files written by users: measured delays, links of the network, recorded availability.

A table has a header line and one line per row. Empty cells, text instead of numbers, unknown columns and lines with
more or fewer cells are errors that name the file, the line and the column: a missing value is never taken as zero.
"""

from __future__ import annotations

import csv
import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedjax_async.base import check, disk
from fedjax_async.base.notices import RunWarning

CsvRow = tuple[str, dict[str, str]]  # its line, such as "FILE, line 3", for errors; the text of each column


def read(path: str | Path, known: Sequence[str], required: Sequence[str]) -> list[CsvRow]:
    """The rows of a table, at least one; each has exactly the columns of the header.

    ``known``: columns that may occur; ``required``: columns that must. If ``device`` is known, exactly one of the
    columns ``client`` and ``device`` must occur. Lines without text are skipped.

    Raises ``ValueError`` if the file cannot be read, is not text, has other columns, no row, or a line of wrong length.
    """
    try:
        lines = disk.csv_lines(check.path("path", path))
    except OSError as error:
        raise ValueError(f"path = {str(path)!r}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"path = {str(path)!r}: not a text file") from None
    except csv.Error as error:
        raise ValueError(f"path = {str(path)!r}: not a table ({error})") from None
    if len(lines) < 2:
        raise ValueError(f"{path}: must have a header line and at least one line of values")
    header = [name.lower() for name in lines[0][1]]
    _check_header(f"{path}, line 1", header, known, required)
    rows = []
    for number, cells in lines[1:]:
        line = f"{path}, line {number}"
        if len(cells) != len(header):
            raise ValueError(f"{line}: {len(cells)} cells for {len(header)} columns")
        rows.append((line, dict(zip(header, cells))))
    return rows


def _check_header(line: str, header: list[str], known: Sequence[str], required: Sequence[str]) -> None:
    for name in header:
        if name not in known:
            raise ValueError(f"{line}, column {name!r}: unknown (known: {', '.join(known)})")
        if header.count(name) > 1:
            raise ValueError(f"{line}, column {name!r}: occurs twice")
    missing = [name for name in required if name not in header]
    if missing:
        raise ValueError(f"{line}, column {missing[0]!r}: missing")
    if "device" in known and ("client" in header) == ("device" in header):
        raise ValueError(f"{line}: must have one of the columns 'client' and 'device'")


def by_device(rows: list[CsvRow]) -> list[CsvRow]:
    """The rows in order of their devices' names, if they have any; ``ValueError`` for an empty name.

    Clients then draw positions from the stream ``devices``, so that a client is the same device in all tables that
    list the same devices, in whatever order.
    """
    return sorted(rows, key=lambda row: label(row, "device")) if "device" in rows[0][1] else rows


def label(row: CsvRow, column: str) -> str:
    """The text of a cell; ``ValueError`` if it is empty."""
    line, cells = row
    if not cells[column]:
        raise ValueError(f"{line}, column {column!r}: empty")
    return cells[column]


def number(row: CsvRow, column: str, above_zero: bool = False) -> float:
    """The finite number >= 0 (or > 0) in a cell; ``ValueError`` for anything else."""
    text = label(row, column)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0 or (above_zero and value == 0):
        allowed = f"a finite number {'> 0' if above_zero else '>= 0'}"
        raise ValueError(f"{row[0]}, column {column!r}: {text!r} must be {allowed}")
    return value


def client(row: CsvRow, column: str = "client") -> int:
    """The client that a row names: the whole number in its column ``client``, or in another one."""
    text = label(row, column)
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):  # fits in int64
        raise ValueError(f"{row[0]}, column {column!r}: {text!r} must be a client number 0, 1, ...")
    return int(text)


def distinct_clients(rows: Sequence[CsvRow]) -> np.ndarray:
    """The client of each row, int64[rows]; ``ValueError`` if one has two rows."""
    seen: dict[int, CsvRow] = {}
    for row in rows:
        if seen.setdefault(client(row), row) is not row:
            raise ValueError(f"{row[0]}, column 'client': {client(row)} occurs twice")
    return np.array(list(seen), np.int64)


def rows_of(clients: np.ndarray, num_clients: int, path: str | Path) -> np.ndarray:
    """The row of each client 0..N-1 in a table with one row for each of ``clients``; int64[N].

    Raises ``ValueError`` naming the first client without a row. Rows of further clients are warned of.
    """
    missing = np.setdiff1d(np.arange(num_clients), clients)
    if len(missing):
        raise ValueError(f"{path}, column 'client': no line for client {missing[0]} of {num_clients} (0 is the first)")
    if more := int(np.sum(clients >= num_clients)):
        text = f"{path}: the lines of {more} further client{'s' * (more > 1)} are not used (clients = {num_clients})"
        warnings.warn(text, RunWarning, stacklevel=2)
    rows = np.zeros(num_clients, np.int64)
    inside = clients < num_clients
    rows[clients[inside]] = np.flatnonzero(inside)
    return rows
