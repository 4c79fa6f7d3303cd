"""Numbers that summarise a run: its accuracy, and the time, updates and bytes that it took."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_async import check
from fedjax_async.types import Run

UNITS: dict[str, Callable[[dict[str, np.ndarray]], np.ndarray]] = {
    "time": lambda evaluations: evaluations["time"],
    "update": lambda evaluations: evaluations["update"],
    "step": lambda evaluations: evaluations["step"],
    "bytes": lambda evaluations: evaluations["bytes_up"] + evaluations["bytes_down"],
    "bytes_up": lambda evaluations: evaluations["bytes_up"],
    "values_bytes_up": lambda evaluations: evaluations.get("values_bytes_up", evaluations["bytes_up"]),
}


def progress_in(run: Run, unit: str) -> np.ndarray:
    """Virtual seconds, updates, server steps or bytes at each evaluation; float64[rows].

    ``bytes`` counts both directions, ``bytes_up`` what the clients sent, ``values_bytes_up`` the same without the
    indices, scales and headers of compressed uploads, as in AsynFLC's Table III.
    """
    check.one_of("unit", unit, UNITS)
    return np.asarray(UNITS[unit](run.evaluations), np.float64)


def to_target(run: Run, target: float, unit: str = "time") -> float:
    """The amount of ``unit`` at the first evaluation with an accuracy of ``target`` or more; NaN if there is none.

    ``unit``: ``time`` (virtual seconds), ``update``, ``step``, ``bytes`` (both directions), ``bytes_up`` or
    ``values_bytes_up`` (see :func:`progress_in`). It is not interpolated between evaluations, so it is an upper bound.
    """
    reached = np.flatnonzero(np.asarray(run.evaluations["accuracy"]) >= target)
    amounts = progress_in(run, unit)
    return float(amounts[reached[0]]) if reached.size else math.nan


def _accuracy(run: Run) -> np.ndarray:
    accuracy = np.asarray(run.evaluations["accuracy"], np.float64)
    check.require(accuracy.size > 0, "run.evaluations", {}, "a table with at least one evaluation")
    return accuracy


def final_accuracy(run: Run) -> float:
    """Accuracy of the last evaluation, in [0, 1]."""
    return float(_accuracy(run)[-1])


def best_accuracy(run: Run) -> float:
    """The highest accuracy of any evaluation, in [0, 1]; NaN if all are NaN."""
    accuracy = _accuracy(run)
    finite = accuracy[~np.isnan(accuracy)]
    return float(finite.max()) if finite.size else math.nan


def area(run: Run, unit: str = "time") -> float:
    """Mean accuracy over the run: the area under the curve against ``unit``, divided by its width.

    The curve is a step function: an accuracy holds until the next evaluation. If there is only one evaluation, the
    result is its accuracy.
    """
    accuracy, at = _accuracy(run), progress_in(run, unit)
    width = at[-1] - at[0]
    return float(np.diff(at) @ accuracy[:-1] / width) if width > 0 else float(accuracy[-1])


class Relative(NamedTuple):
    """Times to a common target, one entry per seed."""

    target: np.ndarray  # float64[seeds]  accuracy to reach
    time: dict[str, np.ndarray]  # method -> float64[seeds], in the unit asked for
    ratio: dict[str, np.ndarray]  # method -> float64[seeds], time divided by the baseline's


def relative_time(
    runs: Mapping[str, Sequence[Run]], baseline: str, *, share: float = 0.95, unit: str = "time"
) -> Relative:
    """How long each method takes to reach a common accuracy, relative to ``baseline``.

    For each seed the target is ``share`` times the lowest final accuracy among the methods, so every method reaches
    it. A ratio below 1 is faster than the baseline; it is NaN if the baseline starts at or above the target. ``runs``
    maps each method to its runs, one per seed, with the seeds in the same order.

    Source: Zhang et al., "Orthogonal Calibration for Asynchronous Federated Learning", 2025, Table 1 (relative time).
    """
    check.in_range("share", share, 0.0, 1.0)
    check.one_of("baseline", baseline, runs)
    counts = {name: len(seeds) for name, seeds in runs.items()}
    check.require(len(set(counts.values())) == 1 and min(counts.values()) > 0, "runs", counts, "equally many seeds")
    target = share * np.min([[final_accuracy(run) for run in seeds] for seeds in runs.values()], axis=0)
    time = {
        name: np.array([to_target(run, goal, unit) for run, goal in zip(seeds, target, strict=True)])
        for name, seeds in runs.items()
    }
    below = np.where(time[baseline] > 0, time[baseline], np.nan)
    return Relative(target, time, {name: amount / below for name, amount in time.items()})
