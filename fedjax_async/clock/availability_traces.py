"""Availability as recorded: stretches of clients or devices, read from CSV files.

A file has a header line with the columns ``client`` (0, 1, ...) or ``device`` (any label), ``start`` and
``end`` (seconds, 0 <= start < end), and one line a stretch. Empty cells, words where numbers belong and
overlaps are errors that name the line: a hole in a recording is never taken for presence.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_async.clock import chance
from fedjax_async.clock.csv_lines import read_lines

_COLUMNS = ("client", "device", "start", "end")


class Traces(NamedTuple):
    """``changes[r]``: the times at which row r comes (even places) and goes (odd places), in order."""

    source: str
    changes: list[list[float]]
    client: np.ndarray | None  # int64[rows]; None when clients draw devices


def read(path: str | Path, repeat: float | None = None) -> Traces:
    """Read recorded stretches; ``ValueError`` naming file, line and column for anything amiss."""
    lines = read_lines(path)
    columns = [name.strip().lower() for name in lines[0][1]]
    who = _header(path, columns)
    stretches: dict[str, list[tuple[float, float, int]]] = {}
    for number, cells in lines[1:]:
        place = f"{path}, line {number}"
        if len(cells) != len(columns):
            raise ValueError(f"{place}: {len(cells)} cells for {len(columns)} columns")
        row = dict(zip(columns, map(str.strip, cells)))
        start, end = (_seconds(place, name, row[name]) for name in ("start", "end"))
        if not start < end:
            raise ValueError(f"{place}, column 'end': {row['end']} must be after the start, {row['start']}")
        if repeat is not None and end > repeat:
            raise ValueError(f"{place}, column 'end': {row['end']} must be at most repeat = {repeat}")
        stretches.setdefault(_label(place, who, row[who]), []).append((start, end, number))
    changes = [_joined(path, stretches[label]) for label in stretches]
    return Traces(str(path), changes, np.array([int(label) for label in stretches]) if who == "client" else None)


def _header(path: str | Path, columns: list[str]) -> str:
    """Which of the columns ``client`` and ``device`` the file has."""
    for name in columns:
        if name not in _COLUMNS:
            raise ValueError(f"{path}, line 1, column {name!r}: unknown (known: {', '.join(_COLUMNS)})")
        if columns.count(name) > 1:
            raise ValueError(f"{path}, line 1, column {name!r}: occurs twice")
    for name in ("start", "end"):
        if name not in columns:
            raise ValueError(f"{path}, line 1, column {name!r}: missing")
    if ("client" in columns) == ("device" in columns):
        raise ValueError(f"{path}, line 1: must have one of the columns 'client' and 'device'")
    return "client" if "client" in columns else "device"


def _label(place: str, column: str, text: str) -> str:
    if not text:
        raise ValueError(f"{place}, column {column!r}: empty")
    if column == "client":
        if not (text.isascii() and text.isdecimal()):
            raise ValueError(f"{place}, column {column!r}: {text!r} must be a client number 0, 1, ...")
        return str(int(text))
    return text


def _seconds(place: str, column: str, text: str) -> float:
    if not text:
        raise ValueError(f"{place}, column {column!r}: empty")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{place}, column {column!r}: {text!r} must be a finite number >= 0")
    return value


def _joined(path: str | Path, stretches: list[tuple[float, float, int]]) -> list[float]:
    """Comings and goings in order; stretches that touch are one."""
    changes: list[float] = []
    for start, end, number in sorted(stretches):
        if changes and start < changes[-1]:
            raise ValueError(f"{path}, line {number}, column 'start': {start} overlaps a stretch until {changes[-1]}")
        if changes and start == changes[-1]:
            changes[-1] = end
        else:
            changes += [start, end]
    return changes


def assign(traces: Traces, num_clients: int, seed: int, part: int) -> list[int]:
    """The row of each client: its own, or one from a shuffled deck."""
    if traces.client is None:
        return chance.deck(seed, "traces", len(traces.changes), num_clients, part).tolist()
    missing = np.setdiff1d(np.arange(num_clients), traces.client)
    if len(missing):
        raise ValueError(f"{traces.source}, column 'client': no line for client {missing[0]} of {num_clients}")
    rows = np.zeros(num_clients, np.int64)
    inside = traces.client < num_clients
    rows[traces.client[inside]] = np.flatnonzero(inside)
    return rows.tolist()
