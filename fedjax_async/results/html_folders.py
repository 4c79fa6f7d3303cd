"""What the HTML report shows of a folder: its finished runs in groups, and its tables.

The tables of methods and settings in the folder are shown if they belong to its finished runs, because they were
written with the options of their command. Otherwise new ones are made with the default options.
"""

from __future__ import annotations

import csv
import io
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_async.config.grid import GridPoint
from fedjax_async.config.settings import Settings
from fedjax_async.results import significance, store, sweep_folder, sweep_table, tables, tuning
from fedjax_async.results.beside import command_in
from fedjax_async.results.reading import grouped_in, kind_of, mixed_settings
from fedjax_async.results.runs import write_comparison
from fedjax_async.results.sweep_report import write_tables
from fedjax_async.results.sweep_table import TableOptions
from fedjax_async.results.sweeps import collect
from fedjax_async.results.tables import Row
from fedjax_async.results.worlds import listed_in
from fedjax_async.types import Run

MOST_ROWS = 1_000  # of a table
MOST_COMMANDS = 10  # the last ones of a folder
TIMES = (
    "Times are to the accuracy in the column target (%). By default it is 95 % of the lowest final accuracy among "
    "these methods, so with others it may differ; --target fixes it."
)
DEPTH = 4  # folders inside each other that are searched for results

Content = dict[str, Any]  # JSON


class ShownRun(NamedTuple):
    """A finished run, without its parameters and updates."""

    name: str
    folder: Path
    run: Run
    row: Row  # in the table of runs


class FolderContent(NamedTuple):
    """The content of a folder."""

    path: Path
    kind: str  # "run", "comparison" or "sweep"
    groups: dict[str, list[ShownRun]]  # runs that differ only in their seed, in the order of drawing
    tables: list[Content]
    notes: list[str]


# --- folders ----------------------------------------------------------------------------------------


def results_in(folder: str | Path, depth: int = DEPTH) -> list[Path]:
    """The folders with finished results: ``folder`` itself, or else those in it, down to ``depth`` folders below.

    Raises ``ValueError`` if there are none.
    """
    path = Path(folder)
    found = [path] if kind_of(path) else _below(path, depth)
    if not found:
        raise ValueError(
            f"folder = {str(folder)!r}: must hold a finished run, comparison or sweep, or folders with some"
        )
    return found


def _below(path: Path, depth: int) -> list[Path]:
    children = sorted(child for child in path.iterdir() if child.is_dir() and not child.is_symlink()) if depth else []
    return [
        found
        for child in children
        for found in ([child] if kind_of(child) and any(child.rglob(store.MANIFEST)) else _below(child, depth - 1))
    ]


def read(folder: str | Path) -> FolderContent:
    """Read the finished runs of a folder; ``ValueError`` if it holds none, or if a file of a run is damaged."""
    path = Path(folder)
    found = _read(path)
    commands = command_in(path).splitlines()
    return found._replace(notes=[*found.notes, *(f"Command: {line}" for line in commands[-MOST_COMMANDS:])])


def _read(path: Path) -> FolderContent:
    kind = kind_of(path)
    if kind == "sweep":
        return _sweep(path)
    if kind == "run":
        shown = _shown(path, store.load(path), "run")
        return FolderContent(path, kind, {str(shown.run.settings.get("method", "run")): [shown]}, [], [])
    return _comparison(path)


def _shown(folder: Path, run: Run, name: str = "") -> ShownRun:
    """A saved run; its row is that of a sweep of this run alone."""
    point = GridPoint(name, {}, Settings(updates=1, seed=int(run.settings.get("seed", 0))))
    swept_run = sweep_table.swept_run(point, run)
    (row,) = sweep_table.run_rows([swept_run])
    shown = {column: value for column, value in row.items() if column != "run"}
    return ShownRun(name or f"{folder.parent.name}/{folder.name}", folder, swept_run.run, shown)


def _sweep(path: Path) -> FolderContent:
    sweep, missing = collect(path)
    if not sweep.points:
        raise ValueError(f"folder = {str(path)!r}: must hold at least one finished run")
    options = TableOptions(roles=sweep.roles)
    found = sweep_table.swept_runs(sweep)
    ranked = tuning.rank(found, options.final, options.roles)
    notes = [f"Curves and runs: chosen settings first, by their mean {ranked.metric.removesuffix(' (%)')}."]
    if missing:
        notes.append(f"{len(missing)} of {len(missing) + len(sweep.points)} runs are not finished and left out.")
    compared = ("run", "mean_accuracy", "virtual_time", "bytes_up")
    write = partial(write_tables, found, options=options)
    texts, same = _written(path, write, "runs.csv", lambda texts: compared)
    if not same:
        notes.append("The tables in the folder are missing or of other runs: these are new, of the finished runs.")
    notes += texts["best.md"].partition("\n\n")[0].splitlines()
    rows: dict[str, Row] = {row["run"]: row for row in _rows(texts["runs.csv"])}
    groups = {
        name: [
            ShownRun(one.point.name, sweep_folder.run_folder(path, one.point), one.run, rows[one.point.name])
            for one in members
        ]
        for name, members in sweep_table.by_setting(found).items()
    }
    names = list(groups)
    in_order = {names[index]: groups[names[index]] for index in ranked.order}
    shown = _tables(texts, {"Best settings": "best.csv", "Settings": "settings.csv"} | OF_BOTH)
    return FolderContent(path, "sweep", in_order, shown, notes)


def _comparison(path: Path) -> FolderContent:
    groups = grouped_in(path, _shown)
    listed = listed_in(path, groups)
    runs = {name: [member.run for member in groups[name]] for name in listed or groups}
    shown, notes = _methods(path, runs)
    if listed and len(listed) < len(groups):
        others = [name for name in groups if name not in listed]
        notes.append("comparison.csv does not list these finished runs: " + ", ".join(others) + ".")
    return FolderContent(path, "comparison", groups, shown, notes)


def _methods(path: Path, runs: Mapping[str, Sequence[Run]]) -> tuple[list[Content], list[str]]:
    """The table of the methods, and notes on it: ``comparison.csv``, or a new table if the file is of other runs."""
    seeds = {str([run.settings.get("seed") for run in group]) for group in runs.values()}
    if len(seeds) > 1:
        return [], ["The methods have different finished seeds, so no table compares them."]
    if mixed := mixed_settings(runs):
        return [], [f"Runs of a method differ in more than their seed, so no table compares them: {mixed}."]

    def compared(texts: Sequence[str]) -> list[str]:
        """The columns that both tables have, without those that depend on options of the command."""
        common = [name for name in _header(texts[0]) if name in _header(texts[1])]
        chosen = ("time to ", "relative to ", "target", "95%")
        return [name for name in common if not name.startswith(chosen) and "interval" not in name]

    texts, same = _written(path, partial(write_comparison, runs, plots=False), "comparison.csv", compared)
    notes = [] if same else ["comparison.csv is missing or of other runs: this table is new."]
    methods, *others = _tables(texts, {"Methods": "comparison.csv"} | OF_BOTH)
    if "target (%)" in _header(texts["comparison.csv"]):
        methods["note"] = " ".join(filter(None, [methods["note"], TIMES]))
    return [methods, *others], notes


# --- tables -----------------------------------------------------------------------------------------

WRITTEN = ("runs.csv", "settings.csv", "best.csv", "best.md", "comparison.csv", "clients.csv", "pairs.csv")
OF_BOTH = {"Clients": "clients.csv", "Paired tests": "pairs.csv"}  # if clients were evaluated; from three seeds on


def _written(
    path: Path, write: Callable[[Path], object], key: str, compared: Callable[[Sequence[str]], Sequence[str]]
) -> tuple[dict[str, str], bool]:
    """The texts of the tables in a folder, and whether they are of its finished runs; else of new ones.

    ``write`` writes new ones. The tables are of the same runs if the file ``key`` has the same rows in the columns
    ``compared([new, saved])``.
    """
    with tempfile.TemporaryDirectory() as scratch:
        write(Path(scratch))
        fresh, saved = ({name: _text(Path(folder) / name) for name in WRITTEN} for folder in (scratch, path))
    same = _agree(saved[key], fresh[key], compared([fresh[key], saved[key]]))
    whole = all(saved[name] for name in WRITTEN if fresh[name] and name not in OF_BOTH.values())
    return saved if same and whole else fresh, same


def _tables(texts: Mapping[str, str], titles: Mapping[str, str]) -> list[Content]:
    return [table(title, texts[name]) for title, name in titles.items() if texts[name]]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8-sig") if path.is_file() else ""


def _header(text: str) -> list[str]:
    return next(csv.reader(io.StringIO(text)), [])


def _rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def _agree(saved: str, fresh: str, names: Sequence[str]) -> bool:
    """Whether two tables have the same rows in these columns, and both or neither have deviations over seeds."""
    spreads = [any(name.endswith(" std") for name in _header(text)) for text in (saved, fresh)]
    columns = [[[row.get(name, "nan") for name in names] for row in _rows(text)] for text in (saved, fresh)]
    return bool(saved) and spreads[0] == spreads[1] and columns[0] == columns[1]


ENDINGS = (" std", " reached", " low", " high")  # endings of CSV columns that belong to one column of the page


def _number(text: str) -> int | float | None:
    """The number in a CSV cell; None for NaN and empty cells; ``ValueError`` for other text."""
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        number = float(text)
        return None if math.isnan(number) else number


def _numeric(column: Sequence[str]) -> bool:
    """Whether all cells of a column are numbers or empty."""
    try:
        for text in column:
            _number(text)
    except ValueError:
        return False
    return True


def table(title: str, text: str) -> Content:
    """A CSV file as a table of the page. A column joins the columns ``of`` the file, such as mean and deviation.

    A cell is a list: the text that is shown and, in columns of numbers, the numbers of the file with all digits.
    """
    rows, header = list(csv.reader(io.StringIO(text)))[1:], _header(text)
    joined: dict[str, list[int]] = {}
    for index, name in enumerate(header):
        base = next((name.removesuffix(part) for part in ENDINGS if name.endswith(part)), name)
        whole = base in header or {f"{base} low", f"{base} high"} <= set(header)
        joined.setdefault(base if whole else name, []).append(index)
    numeric = {name: all(_numeric([row[at] for row in rows]) for at in indices) for name, indices in joined.items()}
    first = [{n: _number(row[indices[0]]) for n, indices in joined.items() if numeric[n]} for row in rows]
    decimals = tables.decimals_of(first)
    cells = [
        [
            _cell([row[at] for at in indices], [header[at] for at in indices], numeric[name], decimals.get(name, 2))
            for name, indices in joined.items()
        ]
        for row in rows[:MOST_ROWS]
    ]
    columns = [{"name": name, "of": [header[at] for at in indices]} for name, indices in joined.items()]
    note = f"The first {MOST_ROWS:,} of {len(rows):,} rows." if len(rows) > MOST_ROWS else ""
    return {"title": title, "columns": columns, "rows": cells, "note": note}


def _cell(texts: Sequence[str], names: Sequence[str], numeric: bool, decimals: int) -> list[object]:
    """A cell of the page, from the cells ``texts`` of the columns ``names`` of the file."""
    if not numeric:
        return [texts[0]]
    numbers = [_number(text) for text in texts]
    fixed = [tables.NOTHING if number is None else f"{number:.{decimals}f}" for number in numbers]
    if len(names) == 1:
        first = numbers[0]
        shown = tables.NOTHING if first is None else f"{first:.6g}" if isinstance(first, float) else texts[0]
        if names[0].startswith("p (") and first is not None:
            shown = str(significance.PValue(first))
    elif names[0].endswith(" low"):
        shown = tables.NOTHING if numbers[0] is None else f"[{fixed[0]}, {fixed[1]}]"
    elif f"{names[0]} reached" in names and numbers[-1] is not None:
        shown = f"{numbers[-1]} reached"
    else:
        shown = fixed[0] if numbers[1] is None else f"{fixed[0]} ± {fixed[1]}"
    return [shown, *numbers]


def table_of(title: str, rows: Sequence[Row]) -> Content:
    """``rows`` as a table of the page."""
    return table(title, tables.table(rows, "csv"))
