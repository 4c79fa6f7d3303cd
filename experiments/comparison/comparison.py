"""All methods with a server in the same worlds and tasks, tuned with equal budgets.

    python experiments/comparison/comparison.py --scale small                 # 15 minutes to an hour of two cores
    python experiments/comparison/comparison.py --scale small --add mine.py   # the row of your own method, minutes
    python experiments/comparison/comparison.py --scale small --new --keep    # methods that the package has since
    python experiments/comparison/comparison.py --scale full                  # on a GPU

Every method gets the same number of tuning runs in every block (a world with a task), is scored on validation
examples, and runs its best point with fresh seeds on test examples. Finished parts are kept under ``OUT/parts``; the
same command continues from there. The page ``README.md`` beside this file says what is measured and how.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "common"))

import kept
import page
import parts
import report
import spaces
import summary
import variants
from scenes import SCALES, blocks

from fedjax_async.results import tables

RESULTS = Path(__file__).resolve().parent / "results"


def options() -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=list(SCALES), default="small", help="what is run [small]")
    parser.add_argument("--add", default="", metavar="FILE.py", help="run only the methods that this file registers")
    parser.add_argument("--new", action="store_true", help="run only methods of the package that --known does not have")
    parser.add_argument("--known", type=Path, default=None, metavar="DIR", help="results beside these [committed]")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="run only these [all with a server]")
    parser.add_argument("--processes", type=int, default=None, metavar="N", help="at a time [one per core]")
    parser.add_argument("--out", type=Path, default=None, metavar="DIR", help="results [runs/comparison/SCALE]")
    parser.add_argument("--html", type=Path, default=None, metavar="FILE", help="also write a page to explore")
    parser.add_argument("--keep", action="store_true", help="write the committed results and the tables of the page")
    parser.add_argument("--quiet", action="store_true", help="do not print what is finished")
    given = parser.parse_args()
    if given.add and not Path(given.add).is_file():
        parser.error(f"argument --add: must be a Python file, not {given.add!r}")
    if given.processes is not None and given.processes < 1:
        parser.error(f"argument --processes: must be a whole number >= 1, not {given.processes}")
    for name in given.methods or ():
        if name not in spaces.methods():
            parser.error(f"argument --methods: must be methods with a server, not {name!r}")
    if given.keep and (given.add or given.methods):
        parser.error("argument --keep: must be given without --add and --methods")
    if bool(given.add) + bool(given.methods) + given.new > 1:
        parser.error("argument --new: must be given without --add and --methods, and these without each other")
    if given.known is not None and not (given.add or given.new):
        parser.error("argument --known: must be given with --add or --new, which run methods beside known results")
    given.known = given.known or RESULTS
    if given.processes is None:
        given.processes = parts.usual_processes()
    given.name = "comparison"
    return given


def trained(given: argparse.Namespace, methods: Collection[str]) -> kept.Results:
    """The results of these methods in all blocks of the scale, read or trained."""
    parts.begin(given.out, parts.definition(given.scale, given.add))
    asked = [parts.Asked(method, block, given.out, given.add) for block in blocks(given.scale) for method in methods]
    return parts.train_all(asked, given.processes, quiet=given.quiet)


def main() -> None:
    """Run the comparison, or add methods to it, and write the tables; a wrong file or folder is said in one line."""
    given = options()
    try:
        compare(given)
    except ValueError as error:
        sys.exit(f"comparison.py: {error}")


def compare(given: argparse.Namespace) -> None:
    """What the options ask for; ``ValueError`` for a plugin, a folder or results that do not fit."""
    if given.html is not None:
        report.require(given.html)  # before hours of training
    methods = given.methods or list(SCALES[given.scale].methods or spaces.methods())
    mine = list(parts.added(given.add)) if given.add else []
    stem = f"{given.scale}-{Path(given.add).stem}-{parts.digest(given.add)}" if given.add else given.scale
    given.out = given.out or Path("runs/comparison") / stem
    known = kept.Results([], [], [])
    if given.add or given.new:
        known = kept.read(given.known, given.scale)
        have = {row.method for rows in (known.runs, known.refused) for row in rows}
        methods = mine or [name for name in methods if name not in have]
    new = trained(given, methods)
    if given.add:
        require_runs(new, mine)
    found = kept.joined([kept.without(known, methods), new])
    found = ordered(found, given.scale)
    kept.write(given.out, given.scale, found)
    write_tables(found, given)
    if given.add or given.new:
        say(found, methods)
    if given.html is not None:
        report.write(found, given.html, f"{len(found.runs)} runs, scale {given.scale}")
    if given.keep:
        page.keep(found, given.scale, given.out / f"{given.name}.csv", RESULTS)


def require_runs(found: kept.Results, methods: Collection[str]) -> None:
    """``ValueError`` with the reasons if one of these methods has run nowhere."""
    for method in methods:
        if not any(row.method == method for row in found.runs):
            reasons = dict.fromkeys(row.why for row in found.refused if row.method == method)
            raise ValueError(f"{method} runs in no block: {'; '.join(reasons)}")


def ordered(found: kept.Results, scale: str) -> kept.Results:
    """The rows by block, then by method as the package lists them; runs of a method by seed."""
    places = {(block.world, block.task): place for place, block in enumerate(blocks(scale))}
    methods = {name: place for place, name in enumerate(spaces.methods())}
    last = (len(places), len(methods))

    def key(row: Any) -> tuple[int, int]:
        return places.get((row.world, row.task), last[0]), methods.get(row.method, last[1])

    return kept.Results(*(sorted(rows, key=key) for rows in found))


def write_tables(found: kept.Results, given: argparse.Namespace) -> None:
    """Write ``comparison.csv`` (every method in every block), ``ranks.csv`` and ``tests.csv``; print them.

    Beside known results only the ranks and tests are printed: :func:`say` prints what is new.
    """
    if not found.runs:
        sys.exit("\n".join(f"{row.world}, {row.task}, {row.method}: {row.why}" for row in found.refused))
    decimals, beside = {"score": 2, "area": 2, "fluctuation": 2}, bool(given.add or given.new)
    variants.report(summary.method_rows(found), given, decimals=decimals, shown=not beside)
    for row in () if beside else found.refused:
        print(f"{row.world}, {row.task}, {row.method}: not run: {row.why}", file=sys.stderr)
    rows, numbers = summary.rank_rows(found)
    if rows:
        tables.write(rows, given.out / "ranks.csv")
        tables.write([numbers], given.out / "tests.csv")
        print("\nMean ranks over worlds, tasks and seeds, the best first (ranks.csv):\n")
        print(tables.table(rows, "markdown", decimals={"mean rank": 1}))
        print("Tests of these ranks (tests.csv):\n")
        print(tables.table([numbers], "markdown"))


def say(found: kept.Results, methods: Collection[str]) -> None:
    """Print the rows of the added methods, and why one of them was not run."""
    rows: list[dict[str, Any]] = [row for row in summary.method_rows(found) if row["method"] in methods]
    places = {row["method"]: place for place, row in enumerate(summary.rank_rows(found)[0], 1)}
    if rows:
        print("What was added, in each block (all methods: comparison.md):\n")
        print(tables.table(rows, "markdown"))
    for method in methods:
        place = f"place {places[method]} of {len(places)} by mean rank" if method in places else "no rank: see above"
        print(f"{method}: {place}")
    for row in found.refused:
        if row.method in methods:
            print(f"{row.method} is not run in {row.world}, {row.task}: {row.why}")


if __name__ == "__main__":
    main()
