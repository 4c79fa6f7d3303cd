"""What the HTML report shows of a folder: its finished runs in groups, and its tables.

The tables of methods and settings in the folder are shown if they belong to its finished runs, because they were
written with the options of their command. Otherwise new ones are made with the default options.
"""

from __future__ import annotations

import csv
import io
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_async.config.grid import GridPoint
from fedjax_async.config.settings import Settings
from fedjax_async.results import significance, store, sweep_files, sweep_folder, sweep_table, tables, tuning
from fedjax_async.results.beside import command_in, labels_in
from fedjax_async.results.metrics import TARGET
from fedjax_async.results.reading import IN_COMPARISON, kind_of, listed_in
from fedjax_async.results.runs import write_comparison
from fedjax_async.results.sweep_table import USUAL, SweptRun, TableOptions
from fedjax_async.results.sweeps import collect
from fedjax_async.results.tables import Row
from fedjax_async.types import Run

MOST_ROWS = 1_000  # of a table
MOST_COMMANDS = 10  # the last ones of a folder
TIMES = (
    "Times are to the accuracy in the column target (%). By default it is 95 % of the lowest final accuracy among "
    "these methods, so with others it may differ; --target fixes it."
)
DEPTH = 4  # folders inside each other that are searched for results

Content = dict[str, Any]  # JSON


class Seeds(NamedTuple):
    """Runs that differ only in their seed."""

    name: str
    members: list[SweptRun]


class FolderContent(NamedTuple):
    """The content of a folder."""

    path: Path
    kind: str  # "run", "comparison" or "sweep"
    groups: list[Seeds]  # in the order of drawing
    folders: dict[str, Path]  # name of a run -> its folder
    rows: dict[str, Row]  # name of a run -> its row in the table of runs
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


def read(folder: str | Path, options: TableOptions | None = None) -> FolderContent:
    """Read the finished runs of a folder; ``ValueError`` if it holds none, or if a file of a run is damaged.

    ``options``: make new tables with these; None: show those in the folder, or new ones with the defaults.
    """
    path = Path(folder)
    found = _read(path, options)
    commands = command_in(path).splitlines()
    return found._replace(notes=[*found.notes, *(f"Command: {line}" for line in commands[-MOST_COMMANDS:])])


def _read(path: Path, options: TableOptions | None) -> FolderContent:
    kind = kind_of(path)
    if kind == "sweep":
        return _sweep(path, options)
    if kind == "run":
        swept_run = _swept_run(path, "run")
        group = Seeds(str(swept_run.run.settings.get("method", "run")), [swept_run])
        return FolderContent(path, "run", [group], {"run": path}, {"run": _row(swept_run, options)}, [], [])
    found = sorted(path.glob(IN_COMPARISON))
    if not found:
        raise ValueError(f"folder = {str(path)!r}: must hold a finished run, comparison or sweep")
    return _comparison(path, [manifest.parent for manifest in found], options)


def _swept_run(folder: Path, name: str) -> SweptRun:
    """The numbers of a saved run, as in a sweep of one run; only the name and the seed of its point are used."""
    run = store.load(folder)
    return sweep_table.swept_run(GridPoint(name, {}, Settings(updates=1, seed=int(run.settings.get("seed", 0)))), run)


def _row(swept_run: SweptRun, options: TableOptions | None) -> Row:
    """The row of a run in the table of runs."""
    (row,) = sweep_table.run_rows([swept_run], (options or USUAL).final)
    return {name: value for name, value in row.items() if name != "run"}


def _sweep(path: Path, given: TableOptions | None) -> FolderContent:
    sweep, missing = collect(path)
    if not sweep.points:
        raise ValueError(f"folder = {str(path)!r}: must hold at least one finished run")
    options = (given or USUAL)._replace(roles=sweep.roles)
    found = sweep_table.swept_runs(sweep, options.target)
    grouped = list(sweep_table.by_setting(found).items())
    ranked = tuning.rank(found, options.final, options.roles)
    notes = [f"Curves and runs: chosen settings first, by their mean {ranked.metric.removesuffix(' (%)')}."]
    if missing:
        notes.append(f"{len(missing)} of {len(missing) + len(sweep.points)} runs are not finished and left out.")
    with tempfile.TemporaryDirectory() as scratch:
        sweep_files.write_tables(found, Path(scratch), options)
        names = ("runs.csv", "settings.csv", "best.csv", "best.md")
        fresh, saved = ([_text(Path(folder) / name) for name in names] for folder in (scratch, path))
        new_pairs = _pairs(Path(scratch))
    same = _agree(saved[0], fresh[0], ("run", "mean_accuracy", "virtual_time", "bytes_up"))
    if not same and given is None:
        notes.append("The tables in the folder are missing or of other runs: these are new, of the finished runs.")
    kept = same and all(saved) and given is None
    (runs, settings, best, how), pairs = (saved, _pairs(path)) if kept else (fresh, new_pairs)
    notes += how.partition("\n\n")[0].splitlines()
    rows: dict[str, Row] = {row["run"]: row for row in _rows(runs)}
    groups = [Seeds(*grouped[index]) for index in ranked.order]
    folders = {point.name: sweep_folder.run_folder(path, point) for point in sweep.points}
    shown = [table("Best settings", best), table("Settings", settings), *pairs]
    return FolderContent(path, "sweep", groups, folders, rows, shown, notes)


def _pairs(path: Path) -> list[Content]:
    """The tables of clients (if they were evaluated) and of paired tests (from three seeds on)."""
    files = {"Clients": "clients.csv", "Paired tests": "pairs.csv"}
    return [table(title, text) for title, name in files.items() if (text := _text(path / name))]


def _comparison(path: Path, folders: Sequence[Path], options: TableOptions | None) -> FolderContent:
    grouped: dict[str, list[SweptRun]] = {}
    by_name: dict[str, Path] = {}
    labels = labels_in(path)
    for folder in folders:
        swept_run = _swept_run(folder, f"{folder.parent.name}/{folder.name}")
        by_name[swept_run.point.name] = folder
        method = str(swept_run.run.settings.get("method", folder.parent.name))
        grouped.setdefault(labels.get(folder.parent.name, method), []).append(swept_run)
    for members in grouped.values():
        members.sort(key=lambda member: member.point.settings.seed)
    saved = _text(path / "comparison.csv")
    listed = listed_in(path, grouped)
    order = [*listed, *(name for name in grouped if name not in listed)]
    runs = {name: [member.run for member in grouped[name]] for name in listed or order}
    shown, notes = _methods(path, saved, runs, options)
    if listed and len(listed) < len(order):
        notes.append("comparison.csv does not list these finished runs: " + ", ".join(order[len(listed) :]) + ".")
    groups = [Seeds(name, grouped[name]) for name in order]
    rows = {member.point.name: _row(member, options) for group in groups for member in group.members}
    return FolderContent(path, "comparison", groups, by_name, rows, shown, notes)


def _methods(
    path: Path, saved: str, runs: Mapping[str, Sequence[Run]], options: TableOptions | None
) -> tuple[list[Content], list[str]]:
    """The table of the methods, and notes on it: ``comparison.csv``, or a new table if the file is of other runs."""
    seeds = {str([run.settings.get("seed") for run in group]) for group in runs.values()}
    if len(seeds) > 1:
        return [], ["The methods have different finished seeds, so no table compares them."]
    with tempfile.TemporaryDirectory() as scratch:
        target, final, interval, *_ = options or USUAL
        target = TARGET if target is None else target
        write_comparison(runs, scratch, plots=False, target=target, final=final, interval=interval)
        fresh, new_pairs = _text(Path(scratch) / "comparison.csv"), _pairs(Path(scratch))
    if options is not None:
        return [_compared(fresh), *new_pairs], []
    common = [name for name in _header(fresh) if name in _header(saved)]
    chosen = ("time to ", "relative to ", "target", "95%")  # columns that depend on options of the command
    if _agree(saved, fresh, [name for name in common if not name.startswith(chosen) and "interval" not in name]):
        return [_compared(saved), *_pairs(path)], []
    return [_compared(fresh), *new_pairs], ["comparison.csv is missing or of other runs: this table is new."]


def _compared(text: str) -> Content:
    """The table of the methods, with a note on the target of its times."""
    shown = table("Methods", text)
    return shown | {"note": " ".join(filter(None, [shown["note"], TIMES]))} if "target (%)" in _header(text) else shown


# --- tables -----------------------------------------------------------------------------------------


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
    cells = [
        [
            _cell([row[at] for at in indices], [header[at] for at in indices], numeric[name])
            for name, indices in joined.items()
        ]
        for row in rows[:MOST_ROWS]
    ]
    columns = [{"name": name, "of": [header[at] for at in indices]} for name, indices in joined.items()]
    note = f"The first {MOST_ROWS:,} of {len(rows):,} rows." if len(rows) > MOST_ROWS else ""
    return {"title": title, "columns": columns, "rows": cells, "note": note}


def _cell(texts: Sequence[str], names: Sequence[str], numeric: bool) -> list[Any]:
    """A cell of the page, from the cells ``texts`` of the columns ``names`` of the file."""
    if not numeric:
        return [texts[0]]
    numbers = [_number(text) for text in texts]
    decimals = 4 if "loss" in names[0] else 2
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
