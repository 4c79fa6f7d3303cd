"""The tables of a sweep: one row per run, per evaluation and per setting (means over seeds); the ranking."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_async import check, disk
from fedjax_async.config.grid import Point, labels, setting_title, swept
from fedjax_async.config.paths import values_of
from fedjax_async.config.settings import Settings
from fedjax_async.results import comparisons, files, metrics, significance, tables
from fedjax_async.results.metrics import FINAL
from fedjax_async.results.sweeps import Sweep
from fedjax_async.results.tables import NOTHING
from fedjax_async.types import Run

# Counters of the execution, not of the result: they may differ between a run alone and the same run in a sweep.
EXECUTION = frozenset(
    ("waves", "mean_width", "batches", "widths", "slots", "useful_steps", "executed_steps", "programs")
)
TARGETS = {"time": "time_to_target", "update": "updates_to_target", "bytes": "bytes_to_target"}
MOST_PAIRS = 500  # paired tests; more cannot be read, and Holm's correction leaves nothing of them

Columns = dict[str, Any]  # equally long lists or arrays


class Record(NamedTuple):
    """What tables and pictures need of a run; parameters and updates are left out."""

    point: Point
    numbers: dict[str, Any]
    run: Run


class Ranked(NamedTuple):
    """Settings ordered by the final metric."""

    metric: str  # "accuracy, mean of last tenth (%)"
    order: list[int]  # indices of the settings as in ``by_setting``, the best first


def record(point: Point, run: Run, target: float | None = None) -> Record:
    """The numbers of a run's row; time, updates and bytes to ``target`` are NaN if it was never reached."""
    staleness = np.asarray(run.updates["staleness"])
    last = {name: column[-1].item() for name, column in run.evaluations.items()}
    numbers = {
        "mean_accuracy": metrics.area(run),
        "virtual_time": last["time"],
        **({} if target is None else {name: metrics.to_target(run, target, unit) for unit, name in TARGETS.items()}),
        "staleness_mean": float(staleness.mean()) if staleness.size else math.nan,
        "staleness_max": int(staleness.max()) if staleness.size else 0,
        "bytes_up": last["bytes_up"],
        "bytes_down": last["bytes_down"],
        **{name: last[name] for name in ("values_bytes_up",) if name in last},
        **{name: count for name, count in run.counters.items() if name not in EXECUTION and np.ndim(count) == 0},
        **({} if run.stopped is None else {"stopped_by": run.stopped.by}),
    }
    return Record(point, numbers, run._replace(params=(), updates={}, per_client={}, best=None))


def records(sweep: Sweep, target: float | None = None) -> list[Record]:
    """A record for each run, in order; only one run is in memory at a time."""
    if target is not None:
        check.require(isinstance(target, float | int) and 0 < target <= 1, "target", target, "an accuracy in (0, 1]")
    return [record(point, run, target) for point, run in zip(sweep.points, sweep.runs, strict=True)]


def columns_of(found: Sequence[Record]) -> dict[str, str]:
    """Swept path (except the seed) -> the name of its column, which no measured column has."""
    short = labels(swept(each.point for each in found))
    finals = {f"{way}_{column}" for way in metrics.FINALS for column in ("accuracy", "loss")}
    measured = {"run", "seed", *finals, *(name for each in found for name in (*each.numbers, *each.run.evaluations))}
    longer = {path: path if "." in path else f"setting.{path}" for path in short}
    return {path: longer[path] if name in measured else name for path, name in short.items() if path != "seed"}


def _identity(each: Record, columns: Mapping[str, str]) -> dict[str, Any]:
    settings = each.point.settings
    chosen = {columns[path]: value for path, value in values_of(settings, columns).items()}
    return {"run": each.point.name, **chosen, "seed": settings.seed}


def run_rows(found: Sequence[Record], final: str = FINAL) -> list[dict[str, Any]]:
    """The tidy table, one row per run: name, swept values, seed and results.

    Its three final accuracies and losses are ``last``, ``best`` and ``tail``, the one that ``final`` names first;
    ``tail`` is that of ``final`` if it is ``tail:K``.
    """
    columns = columns_of(found)
    finals = {
        f"{way.partition(':')[0]}_{column}": (column, way)
        for column in ("accuracy", "loss")
        for way in metrics.all_finals(final)
    }
    return [
        _identity(each, columns)
        | {name: metrics.final_value(each.run, column, way) for name, (column, way) in finals.items()}
        | each.numbers
        for each in found
    ]


def evaluation_columns(found: Sequence[Record]) -> Columns:
    """The long table, one row per evaluation: name, swept values, seed and scores."""
    columns = columns_of(found)
    counts = [len(each.run.evaluations["time"]) for each in found]
    identities = [_identity(each, columns) for each in found]
    repeated: Columns = {
        name: [identity[name] for identity, count in zip(identities, counts) for _ in range(count)]
        for name in identities[0]
    }
    for name in dict.fromkeys(name for each in found for name in each.run.evaluations):
        # only compressed runs have values_bytes_up; the others send nothing but values
        columns_of_runs = [each.run.evaluations.get(name, each.run.evaluations["bytes_up"]) for each in found]
        repeated[name] = np.concatenate(columns_of_runs)
    return repeated


def by_setting(found: Sequence[Record]) -> dict[str, list[Record]]:
    """Setting -> the runs that differ only in their seed; settings in order of first use."""
    short = labels(swept(each.point for each in found))
    names: dict[Settings, str] = {}
    grouped: dict[str, list[Record]] = {}
    for each in found:
        key = dataclasses.replace(each.point.settings, seed=0)
        name = names.setdefault(key, setting_title(each.point.values, short))
        grouped.setdefault(name, []).append(each)
    return grouped


def spread_of(group: Sequence[Record], metric: str, final: str = FINAL) -> metrics.Spread:
    """The final ``accuracy`` (in percent) or ``loss`` of one setting, as mean and deviation over its seeds."""
    return metrics.spread(_values(group)(metric, final))


def _values(group: Sequence[Record]) -> comparisons.Values:
    return comparisons.seed_values([each.run for each in group])


def _metric(found: Iterable[Record]) -> str:
    return "accuracy" if metrics.has_accuracy(each.run for each in found) else "loss"


def setting_rows(
    found: Sequence[Record],
    target: float | None = None,
    final: str = FINAL,
    interval: str = "t",
    *,
    further: bool = False,
) -> list[dict[str, Any]]:
    """One row per setting: mean, sample standard deviation and interval over its seeds.

    ``final`` and ``interval`` as in :func:`fedjax_async.results.comparisons.comparison`; ``further``: add the other two
    final values.
    """
    columns = columns_of(found)
    reached = "" if target is None else f"to {100 * target:g} %"
    wanted: dict[str, tuple[str, float]] = {
        **({f"time {reached} (s)": (TARGETS["time"], 1.0)} if reached else {}),
        **({f"updates {reached}": (TARGETS["update"], 1.0)} if reached else {}),
        **({f"MB {reached}": (TARGETS["bytes"], 1e-6)} if reached else {}),
        "staleness": ("staleness_mean", 1.0),
    }
    counted = ("rejected", "lost", "late", "duplicates")
    wanted |= {name: (name, 1.0) for name in counted if any(each.numbers.get(name) for each in found)}
    metric = _metric(found)
    shown = ("accuracy", "loss") if metric == "accuracy" else ("loss",)
    rows = []
    for group in by_setting(found).values():
        values = values_of(group[0].point.settings, columns).items()
        row: dict[str, Any] = {columns[path]: NOTHING if value is None else str(value) for path, value in values}
        row["seeds"] = len(group)
        row |= comparisons.final_cells(_values(group), metric, final, interval)
        if metric == "accuracy":
            row[metrics.final_title("loss", final)] = spread_of(group, "loss", final)
        for title, (name, factor) in wanted.items():
            spread = tables.spread_or_count if name in TARGETS.values() else tables.spread
            row[title] = spread([factor * each.numbers[name] for each in group])
        if any(each.run.stopped is not None for each in found):
            row["stopped early"] = comparisons.stopped_early([each.run for each in group])
        if further:
            for column in shown:
                row |= comparisons.further_finals(_values(group), column, final, interval)
        rows.append(row)
    return rows


def rank(found: Sequence[Record], final: str = FINAL) -> Ranked:
    """The settings from best to worst by the mean of the final metric; the smaller deviation breaks ties.

    The metric is the final test accuracy, or the final test loss if no run has class labels. Settings without a
    finite mean come last.
    """
    metric = _metric(found)
    sign = -1.0 if metric == "accuracy" else 1.0
    spreads = [spread_of(group, metric, final) for group in by_setting(found).values()]

    def key(index: int) -> tuple[bool, float, float]:
        mean, std = spreads[index].mean, spreads[index].std
        finite = math.isfinite(mean)
        return not finite, sign * mean if finite else 0.0, 0.0 if math.isnan(std) else std

    return Ranked(metrics.final_title(metric, final), sorted(range(len(spreads)), key=key))


def pair_rows(found: Sequence[Record], final: str = FINAL, interval: str = "t") -> list[dict[str, Any]]:
    """Paired tests as in :func:`fedjax_async.results.significance.pairs` between settings that differ in their method.

    Method and timing count as the method, with their options. Settings that differ in anything else are not compared:
    their clients may have met other data and delays. Empty if there are more than ``MOST_PAIRS`` pairs.
    """
    metric = _metric(found)
    columns = columns_of(found)
    own = [path for path in columns if path.partition(".")[0] in ("method", "timing")]
    worlds: dict[str, dict[str, dict[int, float]]] = {}
    for name, group in by_setting(found).items():
        values = values_of(group[0].point.settings, columns)
        where = setting_title({path: value for path, value in values.items() if path not in own}, columns)
        method = setting_title({path: values[path] for path in own if values[path] is not None}, columns)
        methods = worlds.setdefault(where, {})
        seeds = [each.point.settings.seed for each in group]
        methods[name if method in methods else method] = dict(zip(seeds, _values(group)(metric, final), strict=True))
    if sum(math.comb(len(methods), 2) for methods in worlds.values()) > MOST_PAIRS:
        return []
    return significance.pairs(worlds, interval, larger_is_better=metric == "accuracy")


# --- files ------------------------------------------------------------------------------------------


def as_columns(rows: Sequence[tables.Row]) -> Columns:
    """Rows as columns; None where a row lacks the cell."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _arrow(column: Any) -> Any:
    """A list with one type, as Parquet needs: mixed integers and floats become floats, other mixtures texts."""
    kinds = {type(value) for value in column if value is not None} if isinstance(column, list) else set()
    if len(kinds) > 1:
        convert: Callable[[Any], Any] = float if kinds == {int, float} else str
        return [None if value is None else convert(value) for value in column]
    return column


def parquet_writer() -> Callable[[Columns], bytes] | None:
    """A function: columns -> the bytes of a Parquet file; None if pyarrow (extra ``sweep``) is not installed."""
    try:
        import pyarrow  # noqa: PLC0415
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError:
        return None

    def content(columns: Columns) -> bytes:
        stream = io.BytesIO()
        arrays = {name: pyarrow.array(_arrow(column)) for name, column in columns.items()}
        parquet.write_table(pyarrow.table(arrays), stream)
        return stream.getvalue()

    return content


def write_tables(
    found: Sequence[Record], folder: Path, target: float | None = None, final: str = FINAL, interval: str = "t"
) -> list[str]:
    """Write ``runs`` and ``evaluations`` as CSV and Parquet, ``settings`` and ``pairs`` as CSV and Markdown.

    Returns the names of the files.
    """
    rows, long = run_rows(found, final), evaluation_columns(found)
    summary = setting_rows(found, target, final, interval)
    folder.mkdir(parents=True, exist_ok=True)
    tables.write(rows, folder / "runs.csv")
    disk.write(folder / "evaluations.csv", files.csv_bytes(long))
    tables.write(setting_rows(found, target, final, interval, further=True), folder / "settings.csv")
    tables.write(summary, folder / "settings.md", decimals=tables.decimals_of(summary))
    written = ["runs.csv", "evaluations.csv", "settings.csv", "settings.md"]
    pairs = comparisons.write_pairs(
        pair_rows(found, final, interval), folder, metrics.final_title(_metric(found), final)
    )
    written += ["pairs.csv", "pairs.md"] if pairs else []
    parquet = parquet_writer()
    for name, columns in (("runs.parquet", as_columns(rows)), ("evaluations.parquet", long)):
        if parquet is None:
            (folder / name).unlink(missing_ok=True)  # an earlier call's file may hold other runs
        else:
            disk.write(folder / name, parquet(columns))
            written.append(name)
    return written
