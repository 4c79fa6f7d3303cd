"""Eleven asynchronous methods on three data sets, and an ablation of AsyncCurve; beyond the paper.

    python experiments/asynccurve/table_methods.py --scale laptop

For each row, two local rates times two server rates are tried on seed 0, and the best on the validation part of the
training data is run with all seeds: the same effort for each method. The ablations use the rates of the whole
AsyncCurve with Adam; with ``--curves`` they also have rows with other curves. ``table_methods.csv`` is rewritten after
each data set. ``table_methods_seeds.csv`` and ``table_ablation_seeds.csv`` have a row for each run.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from study import (
    ABLATIONS,
    CURVES,
    FINAL,
    METHODS,
    SEEDS,
    TASKS,
    WHOLE,
    missing,
    options,
    report,
    rows_of,
    rows_of_seeds,
    runs_of,
    shared,
    tuned,
    without,
)

from fedjax_async.results.curves import accuracy_curve
from fedjax_async.results.figure import save_figure
from fedjax_async.types import Run

Rows = list[dict[str, Any]]


def methods(task: str, given: argparse.Namespace) -> tuple[Rows, Rows]:
    """The rows of all methods, and those of all their runs; also draws the picture."""
    chosen, tried = tuned(task, METHODS, given)
    runs = runs_of(task, chosen, given, tried)
    draw(task, runs, given)
    return rows_of(task, runs, chosen, TASKS[task].target), rows_of_seeds(task, runs, TASKS[task].target)


def draw(task: str, runs: dict[str, list[Run]], given: argparse.Namespace) -> None:
    """Draw the accuracy of all methods against updates."""
    figure = accuracy_curve({METHODS[name].title: seeds for name, seeds in runs.items()}, "update", final=FINAL)
    figure.axes[0].set_title(TASKS[task].title, fontsize=10)
    save_figure(figure, given.out / f"table_methods_{task}.png")


def ablation(task: str, given: argparse.Namespace) -> tuple[Rows, Rows]:
    """AsyncCurve as a whole, and with one part removed at a time, all at the rates of the whole; rows as above."""
    whole, tried = tuned(task, METHODS, given)
    chosen = {WHOLE: whole[WHOLE]}
    changes = ABLATIONS | (CURVES if given.curves else {})
    chosen |= {name: without(whole[WHOLE], option) for name, option in changes.items()}
    runs = runs_of(task, chosen, given, tried)
    return rows_of(task, runs, chosen, TASKS[task].target), rows_of_seeds(task, runs, TASKS[task].target)


def write(name: str, rows: Rows, seeds: Rows, given: argparse.Namespace) -> None:
    """Write ``NAME.csv`` and ``NAME_seeds.csv``, and both as Markdown."""
    for table, ending in ((rows, ""), (seeds, "_seeds")):
        if table:
            report(table, argparse.Namespace(**{**vars(given), "name": f"{name}{ending}"}), decimals={"local rate": 3})


def main() -> None:
    """Run data set after data set, then the ablations; write the tables after each."""
    parser = options(__doc__, "table_methods")
    names = [t for t in TASKS if t != "smoke"]
    parser.add_argument("--ablate", nargs="*", choices=names, default=None, help="of --tasks [mnist har]")
    parser.add_argument("--curves", action="store_true", help="cubic curves and chains too, in the ablation")
    given = shared.parse_tasks(parser, TASKS, names, SEEDS)
    ablated = [t for t in ("smoke", "mnist", "har") if t in given.tasks] if given.ablate is None else given.ablate
    if not {*ablated} <= {*given.tasks}:
        parser.error(f"argument --ablate: must be among the tasks that are run: {', '.join(given.tasks)}")
    if given.curves and not ablated:
        parser.error("argument --curves: must be given with an ablation, which has rows of other curves")
    rows: Rows = []
    seeds: Rows = []
    for task in given.tasks:
        if (why := missing(task, given.scale)) is None:
            found = methods(task, given)
            rows, seeds = rows + found[0], seeds + found[1]
        else:
            print(f"{task}: not run: {why}", file=sys.stderr)
            rows = [*rows, {"task": task, "variant": "not run"}]
        write(given.name, rows, seeds, given)
    rows, seeds = [], []
    for task in ablated:
        if missing(task, given.scale) is None:
            found = ablation(task, given)
            rows, seeds = rows + found[0], seeds + found[1]
            write("table_ablation", rows, seeds, given)


if __name__ == "__main__":
    main()
