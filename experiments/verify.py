"""Recompute the papers' tables from the committed curves, and look up every number of their pages.

    python experiments/verify.py [--only TEXT]

For every row of ``plan_rows.py`` whose curves and table are committed, the script makes the table again without
training. Each number must agree with the committed CSV file to the digits that stand there. Then every number in a
table of a page must be in its CSV file. Tables whose curves were not kept are listed: they cannot be recomputed. The
exit code is 0 if everything agrees, else 1.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

import pages
from plan import chosen, options_of
from plan_rows import Row
from scripts import HERE, call

OF_THE_MACHINE = ("hardware", "jax")
SAME = 1e-9  # relative: sums in another order
NOT_TABLES = ("_curves.csv", "_clients.csv")


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


def tables_of(papers: Iterable[str]) -> list[Path]:
    """The committed tables of the papers."""
    found = [path for paper in papers for path in sorted((HERE / paper / "results").glob("*.csv"))]
    return [path for path in found if not path.name.endswith(NOT_TABLES)]


def main() -> None:
    """Recompute, compare, list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows with these words, as plan.py has it [all]")
    given = parser.parse_args()
    checked, wrong = [], 0
    for row in chosen(given.only):
        table = row.results / row.table
        if not (row.table and table.is_file() and row.known):
            continue
        found = recomputed(row)
        if found is None:
            continue
        checked.append(table)
        wrong += len(found)
        print(f"{'differs' if found else 'as committed'}: {table.relative_to(HERE).as_posix()}", flush=True)
        for line in found:
            print(f"  {line}")
    for paper in (*pages.PAGES, pages.RENAMED):
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
