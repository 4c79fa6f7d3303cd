"""Eleven asynchronous methods on three data sets, and what each part of AsyncCurve contributes; beyond the paper.

    python experiments/asynccurve/table_methods.py --scale laptop

For each row, two local rates times two server rates are tried on seed 0, and the best on the validation part of the
training data is run with all seeds: the same effort for each method. The ablations use the rates of the whole
AsyncCurve with Adam. ``table_methods.csv`` is written again after each data set, with those that are finished.
"""

from __future__ import annotations

import argparse
from typing import Any

from study import (
    ABLATIONS,
    BASELINE,
    FINAL,
    METHODS,
    SEEDS,
    TASKS,
    WHOLE,
    missing,
    options,
    report,
    rows_of,
    runs_of,
    shared,
    tuned,
    without,
)

from fedjax_async.results.curves import accuracy_curve
from fedjax_async.results.figure import save_figure


def methods(task: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all methods, and their picture."""
    chosen, tried = tuned(task, METHODS, given)
    runs = runs_of(task, chosen, given, tried)
    figure = accuracy_curve(runs, "update", final=FINAL)
    figure.axes[0].set_title(TASKS[task].title)
    save_figure(figure, given.out / f"table_methods_{task}.png")
    return rows_of(task, runs, chosen, TASKS[task].target, BASELINE)


def ablation(task: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """AsyncCurve as a whole, and with one part removed at a time, all at the rates of the whole."""
    whole, tried = tuned(task, METHODS, given)
    chosen = {WHOLE: whole[WHOLE]}
    chosen |= {name: without(whole[WHOLE], option) for name, option in ABLATIONS.items()}
    runs = runs_of(task, chosen, given, tried)
    return rows_of(task, runs, chosen, TASKS[task].target, WHOLE)


def main() -> None:
    """Run data set after data set, then the ablations; a table after each."""
    parser = options(__doc__, "table_methods")
    parser.add_argument("--ablate", nargs="*", choices=[t for t in TASKS if t != "smoke"], default=["mnist", "har"])
    given = shared.parse_tasks(parser, TASKS, [t for t in TASKS if t != "smoke"], SEEDS)
    rows: list[dict[str, Any]] = []
    for task in given.tasks:
        rows += shared.over_tasks(
            argparse.Namespace(tasks=[task]), lambda name: missing(name, given.scale), lambda name: methods(name, given)
        )
        report(rows, given)
    found: list[dict[str, Any]] = []
    for task in ["smoke"] if given.scale == "smoke" else [t for t in given.ablate if t in given.tasks]:
        if missing(task, given.scale) is None:
            found += ablation(task, given)
            report(found, argparse.Namespace(**{**vars(given), "name": "table_ablation"}))


if __name__ == "__main__":
    main()
