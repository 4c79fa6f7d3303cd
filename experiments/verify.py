"""Recompute the papers' tables from the committed curves, and look up every number of their pages.

    python experiments/verify.py [--only TEXT]

For every row of ``plan_rows.py`` whose curves and table are committed, the script makes the table again without
training; so do the scripts of ``AGAIN``, which train nothing. Each number must agree with the committed CSV file to the
digits that stand there. Then every number in a table of a page must be in its CSV file. Tables whose curves were not
kept are listed: they cannot be recomputed. The exit code is 0 if everything agrees, else 1.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

import pages
from plan import chosen, options_of
from plan_rows import Row
from scripts import HERE, call

OF_THE_MACHINE = ("hardware", "jax", "trained on")
SAME = 1e-9  # relative: sums in another order
NOT_TABLES = ("_curves.csv", "_clients.csv", "_runs.csv", "_tuning.csv", "_refused.csv", "_bound.csv")  # what is kept
OF_RUNS = ("comparison/small", "comparison/small_ranks", "comparison/small_tests")
OF_RUNS += tuple(f"lessons/small_{name}" for name in ("ablation", "pairs", "configurations", "learned", "unseen"))
OF_RUNS += ("lessons/small_families", "lessons/small_distances")
# Scripts that make tables in seconds, without training: options, and file of --out -> committed file of results.
AGAIN: dict[str, tuple[str, dict[str, str]]] = {
    "orthofl/abstract.py": ("", {"abstract": "orthofl/abstract"}),
    "orthofl/figure_3.py": ("--scale paper", {"figure_3": "orthofl/figure_3_paper"}),
    "asynfl/table_2.py": ("--scale paper", {"table_2": "asynfl/table_2_paper"}),
    "from_runs.py": ("", {name: name for name in OF_RUNS}),
}


def cells(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file without the columns about the machine."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: cell for name, cell in row.items() if name not in OF_THE_MACHINE} for row in rows]


def agrees(committed: str, made: str | None) -> bool:
    """Whether a cell is the same text, or a number that rounds to the committed digits."""
    if committed == made:
        return True
    try:
        first, second = float(committed), float(made or "")
    except ValueError:
        return False
    digits = len(committed.partition(".")[2]) if "e" not in committed else 17
    return math.isclose(first, second, rel_tol=SAME, abs_tol=max(0.5 * 10.0**-digits, SAME))


def differences(committed: Path, made: Path) -> list[str]:
    """Where two CSV files differ; columns that only the new one has do not count."""
    old, new = cells(committed), cells(made)
    if len(old) != len(new):
        return [f"{len(new)} rows instead of {len(old)}"]
    return [
        f"row {place}, {column}: {new_row.get(column)} instead of {cell}"
        for place, (row, new_row) in enumerate(zip(old, new, strict=True), 1)
        for column, cell in row.items()
        if not agrees(cell, new_row.get(column))
    ]


def recomputed(row: Row) -> list[str] | None:
    """Where the row's table differs from the committed one; None if not all of its curves are kept."""
    with tempfile.TemporaryDirectory() as out, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ended = call(HERE / row.paper / row.script, [*options_of(row, Path(out), 0), "--no-pictures"])
        if ended.unavailable:
            return [f"its data are not here: {ended.unavailable}"]
        if ended.counted[0] < ended.counted[1]:
            return None
        made = Path(out) / f"{Path(row.script).stem}.csv"
        return differences(row.results / row.table, made) if made.is_file() else [f"no table: {ended.stderr[-500:]}"]


def again(script: str) -> dict[Path, list[str]]:
    """Committed table -> where the one that a script of ``AGAIN`` makes differs."""
    options, files = AGAIN[script]
    with tempfile.TemporaryDirectory() as out:
        ended = call(HERE / script, [*options.split(), "--out", out])
        found = {}
        for made, committed in files.items():
            paper, _, name = committed.partition("/")
            table, file = HERE / paper / "results" / f"{name}.csv", Path(out) / f"{made}.csv"
            found[table] = differences(table, file) if file.is_file() else [f"no table: {ended.stderr[-500:]}"]
    return found


def of_seeds(table: Path) -> list[str]:
    """Where the accuracies of a table are not means and deviations of those in the table of its single runs."""
    by_seed: dict[tuple[str, str], list[float]] = {}
    for row in cells(table.with_name(table.name.replace("_laptop", "_seeds_laptop"))):
        by_seed.setdefault((row["task"], row["variant"]), []).append(float(row["accuracy (%)"]))
    wrong = []
    for row in cells(table):
        each, place = by_seed[row["task"], row["variant"]], f"{row['task']}, {row['variant']}"
        made = {"accuracy (%)": statistics.mean(each), "accuracy (%) std": statistics.stdev(each)}
        wrong += [f"{place}, {k}: {v} instead of {row[k]}" for k, v in made.items() if not agrees(row[k], str(v))]
    return wrong


def tables_of(papers: Iterable[str]) -> list[Path]:
    """The committed tables of the papers."""
    found = [path for paper in papers for path in sorted((HERE / paper / "results").glob("*.csv"))]
    return [path for path in found if not path.name.endswith(NOT_TABLES)]


def say(table: Path, found: list[str]) -> int:
    """Print where a table differs; returns at how many places."""
    print(f"{'differs' if found else 'as committed'}: {table.relative_to(HERE).as_posix()}", flush=True)
    for line in found:
        print(f"  {line}")
    return len(found)


def main() -> None:
    """Recompute, compare, list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows with these words, as plan.py has it [all]")
    given = parser.parse_args()
    rows = chosen(given.only)
    scripts = [script for script in AGAIN if all(word in script for word in given.only.lower().split())]
    if not rows and not scripts:
        parser.error(f"--only {given.only!r}: must be words of a paper's name, a title, a scale or a command")
    checked, wrong = [], 0
    for row in rows:
        table = row.results / row.table
        if not (row.table and table.is_file() and row.known):
            continue
        found = recomputed(row)
        if found is None:
            continue
        checked.append(table)
        wrong += say(table, found)
    for script in scripts:
        for table, found in again(script).items():
            checked.append(table)
            wrong += say(table, found)
    for table in (HERE / f"asynccurve/results/table_{name}_laptop.csv" for name in ("methods", "ablation")):
        found = of_seeds(table)
        wrong += len(found)
        print(f"{'differs from' if found else 'means and deviations of'} its single runs: {table.relative_to(HERE)}")
        for line in found:
            print(f"  {line}")
    for paper in (*pages.PAGES, pages.RENAMED, *pages.LOOSE):
        found = pages.wrong(paper)
        wrong += len(found)
        print(f"{'wrong' if found else 'every number is in its CSV file'}: {paper}/README.md")
        for line in found:
            print(f"  {line}")
    print("Without curves, so not recomputed:")
    for table in tables_of((*pages.PAGES, pages.RENAMED, "vector_fields")):
        if table not in checked:
            print(f"  {table.relative_to(HERE).as_posix()}")
    print(f"{len(checked)} tables recomputed, {wrong} differences")
    sys.exit(int(wrong > 0))


if __name__ == "__main__":
    main()
