"""The tables of a sweep: one row per run, per evaluation and per setting (means over seeds)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_async.base import check
from fedjax_async.base.notices import all_rejected
from fedjax_async.config.grid import GridPoint, labels, swept
from fedjax_async.config.own import Named
from fedjax_async.config.settings import Settings
from fedjax_async.engine.record import REAL_TIMES
from fedjax_async.results import comparisons, files, metrics, tables
from fedjax_async.results.compared import target_number
from fedjax_async.results.measured import shared_columns
from fedjax_async.results.metrics import FINAL
from fedjax_async.results.sweeps import Sweep
from fedjax_async.results.tables import NOTHING, Cell
from fedjax_async.results.timeline import staleness_of
from fedjax_async.types import Run

# Counters of the execution, not of the result: they may differ between a single run and the same run in a sweep.
EXECUTION = REAL_TIMES | {
    "waves", "mean_width", "batches", "widths", "slots", "useful_steps", "executed_steps", "programs",
    "widest", "device_memory_bytes",
}  # fmt: skip
TARGETS = {"time": "time_to_target", "update": "updates_to_target", "bytes": "bytes_to_target"}

# Columns of tables of runs and settings that are neither swept nor have the name of a number of a run.
OF_TABLES = ("run", "seed", "seeds", "staleness", "rank", "chosen on", "trials", "runs")

TableColumns = dict[str, Any]  # equally long lists or arrays


class TableOptions(NamedTuple):
    """How the tables and pictures of a sweep are made."""

    target: str | float | None = None  # an accuracy in (0, 1]: adds the cost of reaching it
    final: str = FINAL  # as in :func:`fedjax_async.results.metrics.final_value`
    roles: Mapping[str, str] = {}  # path -> role, where it is not the default: ``config/roles.py``
    columns: Sequence[str] | None = None  # of ``settings.tex``, by their short names: ``latex.py``; None: all


USUAL = TableOptions()


class SweptRun(NamedTuple):
    """The data of a run that tables and pictures need; parameters and updates are left out."""

    point: GridPoint
    numbers: dict[str, Any]
    run: Run


def swept_run(point: GridPoint, run: Run, target: float | None = None) -> SweptRun:
    """The numbers in the table row of a run; time, updates and bytes to ``target`` are NaN if it was never reached."""
    staleness = staleness_of(run)
    last = {name: column[-1].item() for name, column in run.evaluations.items()}
    numbers: dict[str, Any] = {
        "mean_accuracy": metrics.area(run),
        "virtual_time": last["time"],
        **({} if target is None else {name: metrics.to_target(run, target, unit) for unit, name in TARGETS.items()}),
        "staleness_mean": float(staleness.mean()) if staleness.size else math.nan,
        "staleness_max": staleness.max().item() if staleness.size else 0,  # of nodes means over messages, no integer
        "bytes_up": last["bytes_up"],
        "bytes_down": last["bytes_down"],
        **{name: last[name] for name in ("values_bytes_up", "energy", "carbon") if name in last},
        **{name: count for name, count in run.counters.items() if name not in EXECUTION and np.ndim(count) == 0},
        "all_rejected": int(all_rejected(run.counters)),
        **({} if run.stopped is None else {"stopped_by": run.stopped.by}),
    }
    return SweptRun(point, numbers, run._replace(params=(), updates={}, per_client={}, best=None))


def swept_runs(sweep: Sweep, target: str | float | None = None) -> list[SweptRun]:
    """What tables and pictures need of each run, in order; only one whole run is in memory at a time.

    ``target``: an accuracy in (0, 1]; its costs are measured too.
    """
    if target is not None:
        fits = not str(target).endswith("%") and 0 < target_number(target) <= 1
        check.require(fits, "target", target, "an accuracy in (0, 1] for a sweep")
        target = float(target)
    return [swept_run(point, run, target) for point, run in zip(sweep.points, sweep.runs, strict=True)]


def columns_of(found: Sequence[SweptRun]) -> dict[str, str]:
    """Swept path (except the seed) -> the name of its column, which differs from those of measured columns."""
    short = labels(swept(each.point for each in found))
    finals = {f"{way}_{column}" for way in metrics.FINALS for column in _final_columns(found)}
    taken = {*OF_TABLES, *finals, *(name for each in found for name in (*each.numbers, *each.run.evaluations))}
    longer = {path: path if "." in path else f"setting.{path}" for path in short}
    return {path: longer[path] if name in taken else name for path, name in short.items() if path != "seed"}


def _final_columns(found: Sequence[SweptRun]) -> list[str]:
    """Accuracy and loss, also those of a validation part if all runs have one, and other columns that all runs have."""
    validation = ["validation_accuracy", "validation_loss"] if has_validation(found) else []
    return ["accuracy", "loss", *validation, *shared_columns(each.run for each in found)]


def _identity(each: SweptRun, columns: Mapping[str, str]) -> dict[str, object]:
    shown = each.point.shown(columns).items()
    chosen = {columns[path]: str(value) if isinstance(value, Named) else value for path, value in shown}
    return {"run": each.point.name, **chosen, "seed": each.point.settings.seed}


def run_rows(found: Sequence[SweptRun], final: str = FINAL) -> list[dict[str, object]]:
    """The tidy table, one row per run: name, swept values, seed and results.

    Accuracy, loss, validation scores and other measured columns that all runs have get three final values each:
    ``last``, ``best`` and ``tail``; ``final`` comes first. With ``tail:K`` as ``final``, ``tail`` is the mean of the
    last K evaluations.
    """
    columns = columns_of(found)
    finals = {
        f"{way.partition(':')[0]}_{column}": (column, way)
        for column in _final_columns(found)
        for way in metrics.all_finals(final)
    }
    rows = [
        _identity(each, columns)
        | {name: metrics.final_value(each.run, column, way) for name, (column, way) in finals.items()}
        | each.numbers
        for each in found
    ]
    score = {name: column for name, (column, _) in finals.items()} | {"mean_accuracy": "accuracy"}
    absent = [name for name, column in score.items() if not files.applicable({column: [row[name] for row in rows]})]
    return [{name: value for name, value in row.items() if name not in absent} for row in rows]


def evaluation_columns(found: Sequence[SweptRun]) -> TableColumns:
    """The long table, one row per evaluation: name, swept values, seed and scores."""
    columns = columns_of(found)
    counts = [len(each.run.evaluations["time"]) for each in found]
    identities = [_identity(each, columns) for each in found]
    repeated: TableColumns = {
        name: [identity[name] for identity, count in zip(identities, counts) for _ in range(count)]
        for name in identities[0]
    }
    for name in dict.fromkeys(name for each in found for name in each.run.evaluations):
        repeated[name] = np.concatenate([_evaluations(each.run, name) for each in found])
    return files.applicable(repeated)


def _evaluations(run: Run, name: str) -> np.ndarray:
    """A column of the evaluations, with NaN or bytes_up if the run lacks it."""
    if name in run.evaluations:
        return run.evaluations[name]
    if name == "values_bytes_up":  # only compressed runs have it; other uploads are values only
        return run.evaluations["bytes_up"]
    return np.full(len(run.evaluations["time"]), math.nan)  # such as validation scores


def by_setting(found: Sequence[SweptRun]) -> dict[str, list[SweptRun]]:
    """Setting -> the runs that differ only in their seed; settings in order of first use, with different titles."""
    short = labels(swept(each.point for each in found))
    others = [field.name for field in dataclasses.fields(Settings) if field.name != "seed"]
    names: dict[tuple[object, ...], str] = {}
    grouped: dict[str, list[SweptRun]] = {}
    for each in found:
        key = tuple(getattr(each.point.settings, name) for name in others)
        if key not in names:
            title = each.point.title(short)  # a label may be the title of another setting
            names[key] = f"{title} ({each.point.name})" if title in grouped else title
        grouped.setdefault(names[key], []).append(each)
    return grouped


def spread_of(group: Sequence[SweptRun], metric: str, final: str = FINAL) -> metrics.Spread:
    """The final ``accuracy`` (in percent) or ``loss`` of one setting, as mean and deviation over its seeds."""
    return metrics.spread(comparisons.finals_of(runs_of(group), metric, final))


def runs_of(group: Iterable[SweptRun]) -> list[Run]:
    """The runs themselves."""
    return [each.run for each in group]


def metric_of(found: Iterable[SweptRun]) -> str:
    """``accuracy``, or ``loss`` if no run has class labels."""
    return metrics.main_metric(each.run for each in found)


def has_validation(group: Iterable[SweptRun]) -> bool:
    """Whether all runs were evaluated on a validation part."""
    return all("validation_loss" in each.run.evaluations for each in group)


def setting_rows(
    found: Sequence[SweptRun], options: TableOptions = USUAL, *, further: bool = False
) -> list[dict[str, Cell]]:
    """One row per setting: mean, sample standard deviation and interval over its seeds.

    ``further``: add the other two final values. Without class labels no costs of a target are known.
    """
    columns = columns_of(found)
    target, final, *_ = options
    metric = metric_of(found)
    reached = "" if target is None or metric == "loss" else f"to {100 * float(target):g} %"
    wanted: dict[str, tuple[str, float]] = {
        **({f"time {reached} (s)": (TARGETS["time"], 1.0)} if reached else {}),
        **({f"updates {reached}": (TARGETS["update"], 1.0)} if reached else {}),
        **({f"MB {reached}": (TARGETS["bytes"], 1e-6)} if reached else {}),
        "staleness": ("staleness_mean", 1.0),
    }
    counters = ("unused", "rejected", "dropped_stale", "attackers", "malicious", "lost", "late", "duplicates")
    parts = comparisons.parts_of(runs_of(found), final, counters)
    rows = []
    for group in by_setting(found).values():
        values, seeds = group[0].point.shown(columns).items(), runs_of(group)
        row: dict[str, Cell] = {columns[path]: NOTHING if value is None else str(value) for path, value in values}
        row["seeds"] = len(group)
        if has_validation(group):
            row |= comparisons.spreads_of(seeds, [f"validation_{metric}"], final)
        row |= parts["final"](seeds)
        if metric == "accuracy":
            row |= comparisons.spreads_of(seeds, ["loss"], final)
        row |= parts["measured"](seeds)
        for title, (name, factor) in wanted.items():
            spread = tables.spread_or_count if name in TARGETS.values() else tables.spread
            row[title] = spread([factor * each.numbers.get(name, 0) for each in group])
        for part in ("costs", "counted", "sent", "rejected", "ends"):
            row |= parts[part](seeds)
        for column in (("accuracy", "loss") if metric == "accuracy" else ("loss",)) if further else ():
            row |= comparisons.further_finals(seeds, column, final)
        rows.append(row)
    return rows
