"""Tables: rows are dicts; one function writes them as Markdown, CSV or aligned text."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedjax_async.base import check, disk
from fedjax_async.results.metrics import Spread, spread
from fedjax_async.results.significance import Interval, PValue

NOTHING = "-"  # a cell without a value, such as the time to a target that was never reached


@dataclass(frozen=True)
class Reached:
    """Replaces a :class:`Spread` if only ``reached`` of ``seeds`` runs have a value, such as the time to a target."""

    reached: int
    seeds: int
    mean: float = math.nan
    std: float = math.nan

    def __str__(self) -> str:
        return f"{self.reached} of {self.seeds} reached"


Cell = str | int | float | Spread | Interval | Reached | None
Row = Mapping[str, object]


def spread_or_count(values: Sequence[float] | np.ndarray) -> Spread | Reached:
    """The spread of one value per seed, or how many seeds have a value if it is NaN for some of several.

    >>> cell(spread_or_count([10.0, math.nan, 20.0]))
    '2 of 3 reached'
    """
    count = int(np.isfinite(np.asarray(values, np.float64)).sum())
    return spread(values) if count == len(values) or len(values) == 1 else Reached(count, len(values))


def mean_std(values: Sequence[float] | np.ndarray, decimals: int = 2) -> str:
    """``mean ± standard deviation`` over seeds as text; the mean alone for one seed, ``-`` for NaN.

    >>> mean_std([75.0, 76.0])
    '75.50 ± 0.71'
    >>> mean_std([75.0], decimals=1)
    '75.0'
    """
    return cell(spread(values), decimals)


def cell(value: object, decimals: int = 2) -> str:
    """The text of one cell: floats with ``decimals`` places, integers as they are, spreads as mean ± std.

    Intervals are ``[low, high]``; p values have four places, and those below 0.0001 say so.
    """
    if isinstance(value, Interval):
        return NOTHING if math.isnan(value.low) else f"[{value.low:.{decimals}f}, {value.high:.{decimals}f}]"
    if isinstance(value, Reached):
        return str(value)
    if isinstance(value, Spread):
        tail = f" ± {value.std:.{decimals}f}" if value.seeds > 1 and not math.isnan(value.mean) else ""
        return cell(value.mean, decimals) + tail
    if isinstance(value, PValue):
        return NOTHING if math.isnan(value) else str(value)
    if isinstance(value, (float, np.floating)):
        return NOTHING if math.isnan(value) else f"{value:.{decimals}f}"
    return NOTHING if value is None else str(value)


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _grid(rows: Sequence[Row], decimals: Mapping[str, int]) -> tuple[list[list[str]], list[bool]]:
    """Header and cells, padded to equal widths, and whether each column holds numbers."""
    columns = _columns(rows)
    grid = [columns] + [[cell(row.get(name), decimals.get(name, 2)) for name in columns] for row in rows]
    numbers = [all(not isinstance(row.get(name), str) for row in rows) for name in columns]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    pad = [str.rjust if number else str.ljust for number in numbers]
    return [[p(text, w) for p, text, w in zip(pad, line, widths, strict=True)] for line in grid], numbers


def _markdown(rows: Sequence[Row], decimals: Mapping[str, int]) -> str:
    def bars(name: str) -> str:
        return name.replace("|", "\\|")

    escaped = [{bars(n): bars(value) if isinstance(value, str) else value for n, value in row.items()} for row in rows]
    (header, *body), numbers = _grid(escaped, {bars(name): places for name, places in decimals.items()})
    rule = ["-" * (len(name) - 1) + ":" if number else "-" * len(name) for name, number in zip(header, numbers)]
    return "".join(f"| {' | '.join(line)} |\n" for line in [header, rule, *body])


def _text(rows: Sequence[Row], decimals: Mapping[str, int]) -> str:
    (header, *body), _ = _grid(rows, decimals)
    return "".join("  ".join(line).rstrip() + "\n" for line in [header, ["-" * len(name) for name in header], *body])


def _csv(rows: Sequence[Row], decimals: Mapping[str, int]) -> str:
    """All digits; a spread over several seeds becomes two columns, ``name`` and ``name std``.

    An interval becomes ``name low`` and ``name high``. If only some seeds have a value, mean and deviation are NaN, and
    the column ``name reached`` says how many.
    """
    del decimals
    flat: list[dict[str, object]] = []
    for row in rows:
        flat.append({})
        for name, value in row.items():
            if isinstance(value, Interval):
                flat[-1] |= {f"{name} low": value.low, f"{name} high": value.high}
                continue
            if not isinstance(value, Spread | Reached):
                flat[-1][name] = float(value) if isinstance(value, PValue) else value
                continue
            flat[-1][name] = value.mean
            if value.seeds > 1:
                flat[-1][f"{name} std"] = value.std
            if isinstance(value, Reached):
                flat[-1][f"{name} reached"] = value.reached
    stream = io.StringIO()
    writer = csv.DictWriter(stream, _columns(flat), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return stream.getvalue()


STYLES: dict[str, Callable[[Sequence[Row], Mapping[str, int]], str]] = {
    "markdown": _markdown,
    "csv": _csv,
    "text": _text,
}
SUFFIXES = {".md": "markdown", ".csv": "csv", ".txt": "text"}


# Beginning of a column that may have small numbers -> its least decimal places.
COSTS = {"time ": 0, "sent ": 1, "relative ": 2, "MB to ": 2, "energy (": 2, "carbon (": 2}
MOST_OF_LOSS = 10  # decimal places of final losses and metrics
MOST_DECIMALS = 17  # a float64 has no more digits
Decimals = int | Mapping[str, int]


def table(rows: Sequence[Row], style: str = "text", *, decimals: Decimals = 2) -> str:
    """``rows`` as one string; ``style``: ``markdown``, ``csv`` or ``text``; columns in order of first use.

    ``decimals``: decimal places of floats, one number for all columns, or a dict, column -> number (2 for the others).
    Columns that the table lacks may be named, so that several tables can share a dict. CSV has all digits anyway.

    >>> print(table([{"method": "fedavg", "accuracy": 0.75}, {"method": "fedasync", "accuracy": 0.7}]), end="")
    method    accuracy
    --------  --------
    fedavg        0.75
    fedasync      0.70
    >>> print(table([{"accuracy": 0.75, "loss": 0.7}], decimals={"loss": 4}), end="")
    accuracy    loss
    --------  ------
        0.75  0.7000
    """
    check.one_of("style", style, STYLES)
    listed = isinstance(rows, Sequence) and len(rows) > 0 and all(isinstance(row, Mapping) for row in rows)
    check.require(listed, "rows", rows, "a list of at least one row, a dict, column -> value")
    return STYLES[style](rows, _of_columns(decimals, _columns(rows)))


def _of_columns(decimals: Decimals, columns: Sequence[str]) -> Mapping[str, int]:
    """The decimal places of the columns; ``ValueError`` for a number out of range."""
    allowed = "a whole number, or a dict, column -> decimal places, such as {'loss': 4}"
    check.require(isinstance(decimals, Mapping | int), "decimals", decimals, allowed)
    per_column = decimals if isinstance(decimals, Mapping) else dict.fromkeys(columns, decimals)
    for name, places in per_column.items():
        check.whole(f"decimals[{name!r}]", places, 0, MOST_DECIMALS)
    return per_column


def write(rows: Sequence[Row], path: str | Path, *, decimals: Decimals = 2) -> Path:
    """Write ``rows`` in the style of the file ending, ``.md``, ``.csv`` or ``.txt``; returns the path.

    ``decimals``: as for :func:`table`; CSV files have all digits.
    """
    path = check.path("path", path)
    check.one_of("file ending", path.suffix, SUFFIXES)
    content = table(rows, SUFFIXES[path.suffix], decimals=decimals).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.write(path, content)
    return path


def decimals_of(rows: Sequence[Row]) -> dict[str, int]:
    """The decimal places of the columns of a comparison or of a sweep's settings."""
    columns = _columns(rows)
    loss = not any(name.startswith("accuracy") for name in columns)  # whether the intervals are of a loss
    whole = (
        "updates",
        "unused",
        "rejected",
        "dropped_",
        "attackers",
        "malicious",
        "lost",
        "late",
        "duplicates",
        "local_steps",
        "gradients",
    )

    def places(name: str) -> int:
        if any(f", {way}" in name for way in ("mean of last ", "last", "best")):  # a final value, also of lateness
            return 2 if name.endswith("(%)") else two_digits(_means(rows, name), least=4, most=MOST_OF_LOSS)
        return 0 if name.startswith(whole) else 2

    decimals = {name: places(name) for name in columns}
    of_loss = next((places for name, places in decimals.items() if name.startswith("loss, ")), 4)
    intervals = {name: of_loss for name in columns if loss and name.startswith("95% ")}
    small = {
        name: two_digits(_means(rows, name), least)
        for name in (*columns, "sent (MB)")
        for start, least in COSTS.items()
        if name.startswith(start)
    }
    return decimals | intervals | small


def _means(rows: Sequence[Row], column: str) -> list[float]:
    cells = [row.get(column) for row in rows]
    numbers = [cell.mean if isinstance(cell, Spread) else cell for cell in cells]
    return [number for number in numbers if isinstance(number, (int, float))]


def two_digits(numbers: Iterable[float], least: int = 1, most: int = 6) -> int:
    """The decimal places, from ``least`` to ``most``, with which the smallest of the numbers > 0 has two digits.

    >>> two_digits([0.0, 12.0, 0.0345])
    3
    """
    smallest = min((number for number in numbers if 0 < number < math.inf), default=1.0)
    return min(most, max(least, 1 - math.floor(math.log10(smallest))))
