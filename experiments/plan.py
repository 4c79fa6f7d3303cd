"""One plan of runs: every table and figure of the papers, what of it is kept, what is missing, and what that costs.

    python experiments/plan.py                                       # counts all rows; a few minutes
    python experiments/plan.py --only "pushcen table 1"              # rows with these words
    python experiments/plan.py --next --minutes 60 [--only TEXT]     # trains what fits, most worth first, and keeps it
    python experiments/plan.py --keep DIR --only TEXT                # merges curves that a script wrote into DIR
    python experiments/plan.py --write                               # writes the table of experiments/README.md

The rows are those of ``plan_rows.py``, in order of worth. The numbers of runs come from the scripts: each is called
with ``--minutes 0`` and the committed curves. ``--next`` trains run after run, begins none that would not end in time
according to its cost, and merges the curves into the paper's ``results``. The package and its requirements suffice;
without matplotlib there are no pictures. ``--data FOLDER`` puts data sets together from ``parcels.py`` first.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import parcels
from plan_rows import CURVES, ROWS, Row
from scripts import HERE, call

sys.path.insert(0, str(HERE / "common"))
import known_runs

PAGE = HERE / "README.md"
BEGIN, END = "<!-- written by plan.py --write -->", "<!-- end of what plan.py writes -->"
TITLES = {"orthofl": "OrthoFL", "asynfl": "AsynFLC", "asynccurve": "AsyncCurve", "pushcen": "PushCen-ADFL"}
TITLES |= {"comparison": "Comparison"}


class Counted(NamedTuple):
    """A row with its numbers of runs; of a script without ``--known`` its table counts as one run."""

    row: Row
    known: int
    runs: int
    unavailable: str = ""  # why it cannot be run here

    @property
    def missing(self) -> int:
        """The number of runs that are left to train."""
        return self.runs - self.known


def options_of(row: Row, out: Path, minutes: float) -> list[str]:
    """The options of a row's script; ``--minutes`` and ``--known`` where it has them."""
    given = ["--scale", row.scale, *shlex.split(row.options), "--quiet", "--out", str(out)]
    if row.curves:
        given += ["--seeds", str(row.seeds), "--minutes", f"{minutes:g}"]
        given += ["--known", *map(str, row.known)] if row.known else []
    return given


def count(row: Row) -> Counted:
    """Ask the row's script for its numbers of runs; nothing is trained."""
    if not row.curves:
        return Counted(row, int((row.results / row.table).is_file()), 1)
    with tempfile.TemporaryDirectory() as out, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ended = call(HERE / row.paper / row.script, [*options_of(row, Path(out), 0), "--no-pictures"])
    if ended.code not in (0, known_runs.TIME_IS_UP) or not (ended.unavailable or ended.counted[1]):
        raise RuntimeError(f"{row.command}: exit code {ended.code}\n{ended.stderr}")
    return Counted(row, *ended.counted, ended.unavailable)


def keep(row: Row, out: Path) -> int:
    """Merge the curves that a script wrote into ``out`` with those of the row; returns how many are new.

    Of a script without ``--known`` the table is copied, if it has all tasks.
    """
    if not row.curves:
        made = out / f"{Path(row.script).stem}.csv"
        if whole := made.is_file() and "not run" not in made.read_text(encoding="utf-8"):
            (row.results / row.table).write_bytes(made.read_bytes())
        return int(whole)
    path = row.results / row.curves
    before = known_runs.read([path] if path.is_file() else [])
    there = known_runs.read(row.known)
    found = known_runs.read(sorted(out.glob(f"*{CURVES}")))
    # a run that is there without what the table needs of clients is trained again, with them
    new = {
        key: known
        for key, known in found.items()
        if key not in there or (known.run.per_client and not there[key].run.per_client)
    }
    if new:
        known_runs.write(path, before | new)
    return len(new)


def train(counted: Counted, minutes: float, out: Path) -> int:
    """Train the runs of a row that fit, in a process of their own; returns the number of kept runs."""
    row = counted.row
    told = hashlib.sha256(row.command.encode()).hexdigest()[:8]  # a row keeps its folder if others are added
    folder = out / f"{row.paper}-{Path(row.script).stem}-{row.scale}-{told}"
    last = max(minutes - cost(row), 0)  # when the last run may begin
    command = [sys.executable, str(HERE / row.paper / row.script), *options_of(row, folder, last)]
    print(f"{row.command}\n  {counted.missing} of {counted.runs} runs are missing", flush=True)
    try:
        code = subprocess.run(command, check=False, timeout=None if row.curves else 60 * minutes).returncode
    except subprocess.TimeoutExpired:
        print(f"  time is up; the same command with --out {folder} continues")
        return 0
    new = keep(row, folder) if row.curves or not code else 0  # a script that fails may leave a part of its table
    print(f"  exit code {code}, {new} runs kept" + (f", the table is in {folder}" if code == 0 else ""), flush=True)
    return new


def cost(row: Row) -> float:
    """Estimated minutes of a run on this machine."""
    return row.minutes if jax.default_backend() == "cpu" else row.gpu_minutes


def train_next(rows: Iterable[Row], minutes: float, out: Path) -> int:
    """Train what fits into the time, most worth first; returns the number of kept runs."""
    until, kept, long = time.monotonic() + 60 * minutes, 0, 0
    for row in rows:
        if cost(row) > (until - time.monotonic()) / 60:
            long += 1
            continue
        counted = count(row)
        left = (until - time.monotonic()) / 60
        if counted.unavailable:
            print(f"{row.command}: cannot be run here: {counted.unavailable}")
        elif counted.missing and cost(row) < left:
            kept += train(counted, left, out)
    if long:
        print(f"{long} rows were not begun: by its estimate, a run of theirs takes longer than was left")
    return kept


def table(found: Sequence[Counted]) -> list[str]:
    """The plan as lines of Markdown."""
    lines = ["| | paper | table or figure | scale | seeds | runs | CPU min. | GPU min. | command |"]
    lines.append("| ---: | --- | --- | --- | ---: | ---: | ---: | ---: | --- |")
    for place, each in enumerate(found, 1):
        row = each.row
        runs = f"{each.known} of {each.runs}" if row.curves else "there" if each.known else "missing"
        kept = row.results / (row.curves or row.table)
        runs = f"[{runs}]({kept.relative_to(HERE).as_posix()})" if kept.is_file() else runs
        runs = f"not here: {each.unavailable}" if each.unavailable else runs
        left = ["-" if not each.missing else f"{each.missing * m:,.3g}" for m in (row.minutes, row.gpu_minutes)]
        left = [text if "e" not in text else f"{float(text.replace(',', '')):,.0f}" for text in left]
        cells = [
            str(place),
            f"[{TITLES[row.paper]}]({row.paper}/README.md)",
            row.title,
            row.scale,
            str(row.seeds or "-"),
        ]
        lines.append("| " + " | ".join([*cells, runs, *left, f"`{row.command.split('experiments/')[1]}`"]) + " |")
    return lines


def write(lines: Sequence[str], page: Path = PAGE) -> None:
    """Put the table between the two marks of the page."""
    text = page.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    page.write_text(head + "\n".join([BEGIN, "", *lines, "", END]) + tail, encoding="utf-8")


def chosen(text: str) -> list[Row]:
    """The rows whose paper, title, scale or command has every word of ``text``, in any case; numbers as a whole."""
    words = [re.escape(word) for word in text.lower().split()]
    patterns = [rf"(?<![\w.]){word}(?![\w.])" if word[0].isdigit() else word for word in words]
    about = [f"{TITLES[row.paper]} {row.title} {row.scale} {row.command}".lower() for row in ROWS]
    return [row for row, known in zip(ROWS, about, strict=True) if all(re.search(word, known) for word in patterns)]


def main() -> None:
    """Count, train or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows with these words [all]")
    parser.add_argument("--next", action="store_true", help="train what is missing, most worth first")
    parser.add_argument("--minutes", type=known_runs.minutes, default=60.0, metavar="M", help="for --next [60]")
    parser.add_argument("--out", type=Path, default=Path("runs/plan"), metavar="DIR", help="of --next [runs/plan]")
    parser.add_argument("--keep", type=Path, default=None, metavar="DIR", help="merge the curves of a script's --out")
    parser.add_argument("--write", action="store_true", help="write the table of experiments/README.md")
    parser.add_argument("--data", type=Path, default=None, metavar="DIR", help="put data sets together from parcels")
    given = parser.parse_args()
    if sum((given.next, given.write, given.keep is not None)) > 1:
        parser.error("--next, --keep and --write: must be given one at a time")
    if given.keep is not None and not given.keep.is_dir():
        parser.error(f"--keep: must be the folder of a script's --out, not {str(given.keep)!r}")
    if given.write and given.only:
        parser.error("--write: writes all rows, not those of --only")
    rows = chosen(given.only)
    if not rows:
        parser.error(f"--only {given.only!r}: must be words of a paper's name, a title, a scale or a command")
    if given.keep is not None:
        if len({(row.paper, row.script, row.curves) for row in rows}) != 1 or not rows[0].curves:
            parser.error("--keep: --only must choose rows of one file of curves")
        print(f"{keep(rows[0], given.keep)} runs are new in {rows[0].results / rows[0].curves}")
        return
    if given.data is not None:
        parcels.join(given.data)
    if given.next:
        print(f"{train_next(rows, given.minutes, given.out)} runs are new")
        return
    found = []
    for row in rows:
        found.append(count(row))
        print(
            table(found)[-1] if given.write else f"{found[-1].known:4} of {found[-1].runs:3}  {row.command}", flush=True
        )
    if given.write:
        write(table(found))


if __name__ == "__main__":
    main()
