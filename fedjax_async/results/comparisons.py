"""The table that compares methods: final values with intervals, times to a target; paired tests between methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_async.base import disk
from fedjax_async.base.notices import ENDED_EARLY, all_rejected
from fedjax_async.results import metrics, significance, tables
from fedjax_async.results.compared import baseline_of, specs_in
from fedjax_async.results.measured import COSTS, measured, validation
from fedjax_async.results.metrics import FINAL, spread
from fedjax_async.results.tables import Cell, spread_or_count
from fedjax_async.results.timeline import staleness_of
from fedjax_async.types import Run

MOST_PAIRS = 10  # printed
ALL_REJECTED = "runs with all rejected"  # a column if there are any

CellsOf = Callable[[Sequence[Run]], dict[str, Cell]]  # the runs of a row, one per seed -> some of its cells


def finals_of(seeds: Sequence[Run], column: str, final: str = FINAL) -> list[float]:
    """The final value of each run, in percent for accuracies."""
    return [metrics.percent(column) * metrics.final_value(run, column, final) for run in seeds]


def final_cells(seeds: Sequence[Run], column: str, final: str) -> dict[str, Cell]:
    """Mean and deviation of a final value over the seeds, and the 95 % interval if there are several."""
    found = finals_of(seeds, column, final)
    return {metrics.final_title(column, final): spread(found)} | (
        {significance.INTERVAL: significance.interval(found, metrics.limits(column))} if len(found) > 1 else {}
    )


def further_finals(seeds: Sequence[Run], column: str, final: str) -> dict[str, Cell]:
    """The other two final values with their intervals, for the CSV."""
    cells: dict[str, Cell] = {}
    for other in metrics.all_finals(final)[1:]:
        (title, mean), *rest = final_cells(seeds, column, other).items()
        cells |= {title: mean, **{f"{title} {name}": ends for name, ends in rest}}
    return cells


def spreads_of(seeds: Sequence[Run], columns: Sequence[str], final: str) -> dict[str, Cell]:
    """The final value of each of ``columns``, such as the training loss, as mean and deviation over the seeds."""
    return {metrics.final_title(column, final): spread(finals_of(seeds, column, final)) for column in columns}


def _count_of(holds: Iterable[bool]) -> str:
    """For how many of the runs it holds: ``2 of 3``."""
    holds = list(holds)
    return f"{sum(holds)} of {len(holds)}"


def parts_of(every: Sequence[Run], final: str, counters: Sequence[str]) -> dict[str, CellsOf]:
    """What the rows of a table of methods and of a table of settings have in common, by name.

    ``every``: the runs of the whole table. Counters, costs and early ends that no run has get no column.
    """
    column, others = metrics.main_metric(every), measured(every)
    counted = [name for name in counters if any(run.counters.get(name) for run in every)]
    costs = {title: cost for title, cost in COSTS.items() if all(cost[0] in run.evaluations for run in every)}
    ends: dict[str, Callable[[Run], bool]] = {
        "stopped early": lambda run: run.stopped is not None,
        "ended before budget": lambda run: ENDED_EARLY in run.counters,
    }
    ends = {title: holds for title, holds in ends.items() if any(map(holds, every))}
    lost = any(all_rejected(run.counters) for run in every)
    return {
        "final": lambda seeds: final_cells(seeds, column, final),
        "measured": lambda seeds: spreads_of(seeds, others, final),
        "counted": lambda seeds: {name: spread([run.counters.get(name, 0) for run in seeds]) for name in counted},
        "costs": lambda seeds: {
            title: spread([factor * run.evaluations[cost][-1] for run in seeds])
            for title, (cost, factor) in costs.items()
        },
        "sent": lambda seeds: {"sent (MB)": spread([metrics.progress_in(run, "bytes")[-1] / 1e6 for run in seeds])},
        "rejected": lambda seeds: {ALL_REJECTED: sum(all_rejected(run.counters) for run in seeds)} if lost else {},
        "ends": lambda seeds: {title: _count_of(map(holds, seeds)) for title, holds in ends.items()},
    }


def comparison(
    runs: Mapping[str, Sequence[Run]],
    baseline: str | None = None,
    target: str | float = metrics.TARGET,
    final: str = FINAL,
    *,
    further: bool = False,
) -> list[dict[str, Cell]]:
    """One row per method: final accuracy, time to the common target relative to ``baseline``, updates, bytes.

    If no run has class labels, the final loss replaces accuracy and times.

    ``runs`` maps each method to its runs, one per seed, with the seeds in the same order. ``baseline`` is
    ``fedavg`` (also with options, parts or a timing) if it is among them, else the first. ``target`` as in
    :func:`fedjax_async.results.metrics.target_accuracy`, ``final`` as in
    :func:`fedjax_async.results.metrics.final_value`. Cells are spreads over the seeds. Bytes are those of the whole
    run, in both directions. After the times come the validation scores, the training loss and the metrics that all runs
    have. ``unused`` and ``rejected`` uploads have a column if there are any. So have runs in which every upload was
    rejected, runs that ended before their budget, attackers, and ``malicious`` uploads. If the numbers of gradients and
    local steps (of all arrivals) differ, both have a column. ``further``: add the other two final values, the
    target and the mean staleness of applied updates, as in ``comparison.csv``.
    """
    metrics.require_runs(runs)
    baseline = baseline_of(specs_in(runs), baseline)
    every_run = [run for seeds in runs.values() for run in seeds]
    column = metrics.main_metric(every_run)
    labelled = column == "accuracy"
    relative = metrics.relative_time(runs, baseline, target=target, final=final)
    names = ["unused", "rejected", "dropped_stale", "attackers", "malicious"]
    if any(run.counters.get("gradients") != run.counters.get("local_steps") for run in every_run):
        names = ["local_steps", "gradients", *names]
    parts = parts_of(every_run, final, names)
    rows: list[dict[str, Cell]] = []
    for name, seeds in runs.items():
        row: dict[str, Cell] = {"method": name, **parts["final"](seeds)}
        if labelled:
            row["time to target (s)"] = spread_or_count(relative.time[name])
            begins_there = bool((relative.time[baseline] == 0).any())  # a ratio to no time says nothing
            row[f"relative to {baseline}"] = None if begins_there else spread_or_count(relative.ratio[name])
        row |= spreads_of(seeds, validation(every_run, column), final) | parts["measured"](seeds)
        row["updates"] = spread([metrics.progress_in(run, "update")[-1] for run in seeds])
        for part in ("counted", "rejected", "sent", "costs", "ends"):
            row |= parts[part](seeds)
        if further:
            row |= further_finals(seeds, column, final)
            row |= {"target (%)": spread(100 * relative.target)} if labelled else {}
            if all("staleness" in run.updates for run in every_run):
                stale = [staleness_of(run) for run in seeds]
                row["staleness"] = spread([float(tau.mean()) if tau.size else math.nan for tau in stale])
        rows.append(row)
    return rows


def method_pairs(runs: Mapping[str, Sequence[Run]], final: str = FINAL) -> list[dict[str, object]]:
    """Paired tests between methods as in :func:`fedjax_async.results.significance.pairs`; seeds by their settings.

    Runs with the same seed have the same partition, minibatches and delays. Accuracies are compared in percent, or
    losses if no run has class labels.
    """
    column = metrics.main_metric(run for seeds in runs.values() for run in seeds)
    values = {
        name: dict(zip((int(run.settings["seed"]) for run in seeds), finals_of(seeds, column, final), strict=True))
        for name, seeds in runs.items()
    }
    better = column == "accuracy"
    return significance.pairs({"": values}, larger_is_better=better, limits=metrics.limits(column))


def write_pairs(rows: Sequence[Mapping[str, Any]], folder: Path, title: str) -> str:
    """Write ``pairs.csv`` and ``pairs.md``; returns the text to print, with the 10 smallest p values.

    ``title``: the name of the compared number. Without rows the files are removed, and the text is empty.
    """
    if not rows:
        for name in ("pairs.csv", "pairs.md"):
            (folder / name).unlink(missing_ok=True)  # an earlier call's files may hold other runs
        return ""
    sizes = [max((abs(row["first - second"]) for row in rows if math.isfinite(row["first - second"])), default=1.0)]
    digits = tables.two_digits(sizes, 4, tables.MOST_OF_LOSS) if title.startswith("loss") else 2
    decimals = dict.fromkeys(rows[0], digits)
    explained = significance.explained(rows, title)

    def text(shown: Sequence[tables.Row]) -> str:
        return f"{explained}\n\n{tables.table(shown, 'markdown', decimals=decimals)}"

    tables.write(rows, folder / "pairs.csv")
    disk.write(folder / "pairs.md", text(rows).encode())
    if len(rows) <= MOST_PAIRS:
        return text(rows)
    least = sorted(rows, key=lambda row: (math.isnan(row["p (t)"]), row["p (t)"]))[:MOST_PAIRS]
    return f"{text(least)}and {len(rows) - MOST_PAIRS} pairs with larger p, in pairs.md\n"
