"""The file of finished runs: one line a run, with its curve; tables and pages are made of it alone.

``scores``: the score at times 0, T/n, ..., T, an accuracy in [0, 1] or the decimal logarithm of a loss gap. ``sent``:
megabytes in both directions until then. Both are lists with spaces, of five significant digits.
"""

from __future__ import annotations

import csv
import io
import typing
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_async.base import disk


class Kept(NamedTuple):
    """A finished run with the tuned point of its method."""

    world: str
    task: str
    method: str
    seed: int
    point: str  # the spec
    lr: float  # local rate
    time: float  # virtual seconds
    updates: int
    steps: int  # of the server
    staleness: float  # mean over the applied updates
    longest: int  # the largest staleness
    worst: float  # accuracy for the worst tenth of clients, at the end
    scores: np.ndarray  # float64 [n + 1]
    sent: np.ndarray  # float64 [n + 1]


class Tried(NamedTuple):
    """A tuning run: a point of a method, and its score on validation examples."""

    world: str
    task: str
    method: str
    spec: str
    lr: float
    validation: float  # accuracy, or loss where the score is a loss gap; NaN if the point is refused
    chosen: str  # "yes" or ""


class Refused(NamedTuple):
    """A method that does not run in a block."""

    world: str
    task: str
    method: str
    why: str


class Results(NamedTuple):
    """All that a scale has found."""

    runs: list[Kept]
    tried: list[Tried]
    refused: list[Refused]


KINDS: dict[str, Any] = {"runs": Kept, "tuning": Tried, "refused": Refused}


def _text(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return " ".join(f"{number:.5g}" for number in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _value(text: str, kind: Any) -> Any:
    return np.array(text.split(), np.float64) if kind is np.ndarray else kind(text)


def content(kind: Any, rows: Iterable[Any]) -> bytes:
    """The rows as CSV."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(kind._fields)
    writer.writerows([_text(value) for value in row] for row in rows)
    return stream.getvalue().encode()


def parsed(kind: Any, text: str) -> list[Any]:
    """The rows of a CSV text; ``ValueError`` for another header."""
    header, *rows = csv.reader(io.StringIO(text))
    if tuple(header) != kind._fields:
        raise ValueError(f"header = {header}: must be {', '.join(kind._fields)}")
    types = list(typing.get_type_hints(kind).values())
    return [kind(*(_value(cell, of) for cell, of in zip(row, types, strict=True))) for row in rows]


def write(folder: Path, stem: str, found: Results) -> None:
    """Write ``STEM_runs.csv``, ``STEM_tuning.csv`` and ``STEM_refused.csv``."""
    folder.mkdir(parents=True, exist_ok=True)
    for (name, kind), rows in zip(KINDS.items(), found, strict=True):
        disk.write(folder / f"{stem}_{name}.csv", content(kind, rows))


def read(folder: Path, stem: str) -> Results:
    """What :func:`write` wrote; ``ValueError`` naming a file that is missing or damaged."""
    found = []
    for name, kind in KINDS.items():
        path = folder / f"{stem}_{name}.csv"
        if not path.is_file():
            allowed = f"results of the scale {stem}, made by --scale {stem} without --add and --new"
            raise ValueError(f"known = {str(folder)!r}: must be a folder with {allowed}; it has no {path.name}")
        try:
            found.append(parsed(kind, path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}: must be a file of the comparison's runs; {error}") from error
    return Results(*found)


def joined(parts: Sequence[Results]) -> Results:
    """The rows of several results, one after the other."""
    return Results(*([row for part in parts for row in part[k]] for k in range(len(KINDS))))


def without(found: Results, methods: Collection[str]) -> Results:
    """The results without those of these methods."""
    return Results(*([row for row in rows if row.method not in methods] for rows in found))


def rounded(values: Sequence[float]) -> np.ndarray:
    """The values with the digits that the file keeps, so that tables are the same before and after."""
    return np.array([float(f"{value:.5g}") for value in values])
