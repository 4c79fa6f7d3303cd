"""Numbers that summarise a run (accuracy, time, updates, bytes), and their means over seeds for tables and curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import NamedTuple

import numpy as np

from fedjax_async.base import check
from fedjax_async.engine.client_scores import smaller_is_better
from fedjax_async.results.compared import specs_in, target_method, target_number
from fedjax_async.results.measured import column_title, shown_unit
from fedjax_async.types import Run

# Scores of nodes (runs without a server) on the global test set; some evaluations do not have them.
OF_NODES = tuple(f"{start}_{name}" for start in ("global", "average") for name in ("loss", "accuracy"))

UNITS: dict[str, Callable[[dict[str, np.ndarray]], np.ndarray]] = {
    "time": lambda evaluations: evaluations["time"],
    "update": lambda evaluations: evaluations["update"],
    "step": lambda evaluations: evaluations["step"],
    "bytes": lambda evaluations: evaluations["bytes_up"] + evaluations["bytes_down"],
    "bytes_up": lambda evaluations: evaluations["bytes_up"],
    "energy": lambda evaluations: evaluations["energy"],
    "values_bytes_up": lambda evaluations: evaluations.get("values_bytes_up", evaluations["bytes_up"]),
}

OF_METHODS = "a dict, method -> list of its runs, as compare returns: {'mine': [run]}"


def require_run(run: object) -> None:
    """``ValueError`` unless ``run`` is a ``Run``."""
    check.kind("run", run, Run, "a Run, as simulate returns")


def require_runs(runs: Mapping[str, Sequence[Run]]) -> None:
    """``ValueError`` unless ``runs`` is a dict, method -> list of its runs, with at least one run each."""
    check.kind("runs", runs, Mapping, OF_METHODS)
    check.require(len(runs) > 0, "runs", dict(runs), "at least one method")
    for name, seeds in runs.items():
        listed = isinstance(seeds, Sequence) and not isinstance(seeds, Run)  # a run is a tuple, too
        good = listed and len(seeds) > 0 and all(isinstance(run, Run) for run in seeds)
        check.require(good, f"runs[{name!r}]", f"a {type(seeds).__name__}", "a list of its runs, one per seed: [run]")


def progress_in(run: Run, unit: str) -> np.ndarray:
    """Virtual seconds, updates, server steps (nodes: events), bytes or joules at each evaluation; float64[rows].

    ``unit``: ``time``, ``update``, ``step``, ``bytes`` (in both directions; between nodes, each message once),
    ``bytes_up``, ``values_bytes_up`` (without indices, scales, headers: AsynFLC's Table III) or ``energy``.
    """
    require_run(run)
    check.one_of("unit", unit, UNITS)
    known = unit != "energy" or "energy" in run.evaluations
    check.require(known, "unit", unit, "another: the run has no energy (set the setting energy)")
    between = shown_unit(unit, [run]) == "bytes_between"
    return np.asarray(UNITS["bytes_up" if between else unit](run.evaluations), np.float64)


def to_target(run: Run, target: float, unit: str = "time") -> float:
    """The amount of ``unit`` at the first evaluation with an accuracy of ``target`` or more; NaN if there is none.

    ``unit`` as in :func:`progress_in`. It is not interpolated between evaluations, so it is an upper bound.
    """
    require_run(run)
    check.kind("target", target, Real, "a number, such as 0.7")  # NaN, where there are no class labels, is not reached
    # a float, so that NumPy compares in the precision of the accuracies: 0.9 in float32 is below 0.9 in float64
    reached = np.flatnonzero(np.asarray(run.evaluations["accuracy"]) >= float(target))
    amounts = progress_in(run, unit)
    return float(amounts[reached[0]]) if reached.size else math.nan


FINALS = {"tail": "mean of last tenth", "last": "last", "best": "best"}
FINAL = "tail"  # the default of tables and pictures
WAYS = "last, best, tail (the mean of the last tenth of the evaluations) or tail:K (of the last K)"


def require_final(final: str) -> None:
    """``ValueError`` unless ``final`` is ``last``, ``best``, ``tail`` or ``tail:K``."""
    name, _, count = str(final).partition(":")
    check.require(final in FINALS or (name == "tail" and count.isdecimal() and int(count) > 0), "final", final, WAYS)


def window(final: str, rows: int) -> int:
    """How many of the last evaluations out of ``rows`` a final value averages.

    A tenth for ``tail``, rounded down, at least one; K for ``tail:K``; one for ``last`` and ``best``.
    """
    require_final(final)
    if final == "tail":
        return max(1, rows // 10)
    return min(int(final.removeprefix("tail:")), max(rows, 1)) if final.startswith("tail:") else 1


def final_title(column: str = "accuracy", final: str = FINAL) -> str:
    """The name of a final value in tables.

    >>> final_title(), final_title("loss", "last"), final_title("validation_accuracy", "tail:5")
    ('accuracy, mean of last tenth (%)', 'loss, last', 'validation accuracy, mean of last 5 (%)')
    """
    return f"{column_title(column)}, {way_of(final)}" + (" (%)" if percent(column) > 1 else "")


def way_of(final: str) -> str:
    """What a final value is of the evaluations, in words: ``mean of last tenth``."""
    require_final(final)
    return FINALS.get(final, f"mean of last {final.removeprefix('tail:')}")


def percent(column: str) -> float:
    """The factor of a column in tables and pictures: 100 for accuracies, else 1."""
    return 100.0 if "accuracy" in column else 1.0


def limits(column: str) -> tuple[float, float]:
    """The range of a column times :func:`percent`; intervals, bands and bars of deviations are cut off there."""
    score = column.removesuffix("_std").removesuffix("_worst")
    return (0.0, 100.0) if score.endswith("accuracy") else (-math.inf, math.inf)


def band(mean: np.ndarray | float, std: np.ndarray | float, column: str) -> np.ndarray:
    """One standard deviation on either side of the mean, within :func:`limits`; float64[2, ...]."""
    return np.clip([mean - std, mean + std], *limits(column))


def axis_title(column: str) -> str:
    """The name of a column at an axis.

    >>> axis_title("accuracy"), axis_title("loss"), axis_title("validation_accuracy")
    ('test accuracy (%)', 'test loss', 'validation accuracy (%)')
    """
    test = "test " if column in ("accuracy", "loss") else ""
    return test + column_title(column) + (" (%)" if percent(column) > 1 else "")


def all_finals(final: str = FINAL) -> list[str]:
    """The three final values, ``final`` first; ``tail:K`` replaces ``tail``."""
    require_final(final)
    return [final, *(each for each in FINALS if each != final.partition(":")[0])]


def final_value(run: Run, column: str = "accuracy", final: str = FINAL) -> float:
    """One number for a column of the evaluations: accuracies in [0, 1], losses unchanged.

    ``final``: ``last`` is the last evaluation; ``tail`` the mean of the last tenth of the evaluations (see
    :func:`window`), ``tail:K`` of the last K; ``best`` the highest value of any evaluation, or the lowest of a loss, an
    error or a deviation between clients, NaN if all are NaN. No mean includes evaluations of the initial model, unless
    there are no others. For scores of nodes on the global test set, evaluations without them are skipped.
    """
    values, untrained = _scores(run, column), _untrained(run)
    if column in OF_NODES and not np.isnan(values).all():
        known = ~np.isnan(values)
        values, untrained = values[known], untrained[known]
    if final == "best":
        known = values[~np.isnan(values)]
        low = smaller_is_better(column.removesuffix("_worst")) or column.endswith("_std")
        return float(known.min() if low else known.max()) if known.size else math.nan
    trained = np.count_nonzero(~untrained) or values.size
    return float(np.mean(values[-min(window(final, values.size), trained) :]))


def _untrained(run: Run) -> np.ndarray:
    """Which evaluations are of the initial model, as no upload had changed it; bool[rows], true at first only."""
    if not {"update", "step", "loss"} <= set(run.evaluations):
        return np.zeros(len(next(iter(run.evaluations.values()), [])), np.bool_)  # nothing says so
    update, step, loss = (np.asarray(run.evaluations[name]) for name in ("update", "step", "loss"))
    waiting = (step == 0) & (loss == loss[:1])  # uploads that wait for their server step change nothing
    return np.logical_and.accumulate((update == 0) | waiting)


def _scores(run: Run, column: str = "accuracy") -> np.ndarray:
    require_run(run)
    check.one_of("column", column, run.evaluations)
    scores = np.asarray(run.evaluations[column], np.float64)
    check.require(scores.size > 0, "run.evaluations", {}, "a table with at least one evaluation")
    return scores


def final_accuracy(run: Run, final: str = "last") -> float:
    """Accuracy of the last evaluation, in [0, 1]; or another ``final`` as in :func:`final_value`."""
    return final_value(run, "accuracy", final)


def has_accuracy(runs: Iterable[Run]) -> bool:
    """Whether any run has class labels at its last evaluation; otherwise runs are compared by the loss."""
    return any(not math.isnan(final_value(run, "accuracy", "last")) for run in runs)


def main_metric(runs: Iterable[Run]) -> str:
    """``accuracy``, or ``loss`` if no run has class labels."""
    return "accuracy" if has_accuracy(runs) else "loss"


def running_mean(values: np.ndarray, length: int, start: int = 0) -> np.ndarray:
    """The mean of each value and the ``length`` - 1 before it, or fewer at the start; float64[rows].

    No mean joins the first ``start`` values with later ones.

    >>> running_mean(np.array([1.0, 1.0, 5.0, 7.0]), 3, start=2).tolist()
    [1.0, 1.0, 5.0, 6.0]
    """
    ends = range(1, len(values) + 1)
    return np.array([np.mean(values[max(start if end > start else 0, end - length) : end]) for end in ends])


def area(run: Run, unit: str = "time") -> float:
    """Mean accuracy over the run: the area under the curve against ``unit``, divided by its width.

    The curve is a step function: an accuracy holds until the next evaluation. If there is only one evaluation, the
    result is its accuracy.
    """
    accuracy, at = _scores(run), progress_in(run, unit)
    width = at[-1] - at[0]
    return float(np.diff(at) @ accuracy[:-1] / width) if width > 0 else float(accuracy[-1])


class Relative(NamedTuple):
    """Times to a common target, one entry per seed."""

    target: np.ndarray  # float64[seeds]  accuracy to reach
    time: dict[str, np.ndarray]  # method -> float64[seeds], in the chosen unit
    ratio: dict[str, np.ndarray]  # method -> float64[seeds], time divided by the baseline's


TARGET = "95%"  # the default target: this share of the lowest final accuracy


def target_accuracy(
    final: Mapping[str, np.ndarray], target: str | float = TARGET, specs: Mapping[str, str] | None = None
) -> np.ndarray:
    """The accuracy that the methods have to reach, one entry per seed; float64[seeds].

    ``final``: method -> final accuracies, float[seeds]. ``target``: an accuracy in (0, 1]; a share such as ``"95%"``,
    of the lowest final accuracy of all; or a method (as in :func:`fedjax_async.results.compared.method_in`), for its
    final accuracy. ``specs``: method -> its spec, where methods have labels.
    """
    if (method := target_method(target, list(final) if specs is None else specs)) is not None:
        return np.asarray(final[method], np.float64)
    number = target_number(target)
    allowed = "an accuracy in (0, 1], a share such as 95%, or one of " + ", ".join(final)
    check.require(0 < number <= 1, "target", target, allowed)
    lowest = np.min(list(final.values()), axis=0)
    return number * lowest if str(target).endswith("%") else np.full(lowest.shape, number)


def _final_accuracies(runs: Mapping[str, Sequence[Run]], final: str = FINAL) -> dict[str, np.ndarray]:
    """Method -> the final accuracy of each seed, float64[seeds]; ``final`` as in :func:`final_value`."""
    return {name: np.array([final_accuracy(run, final) for run in seeds]) for name, seeds in runs.items()}


def relative_time(
    runs: Mapping[str, Sequence[Run]],
    baseline: str,
    *,
    target: str | float = TARGET,
    unit: str = "time",
    final: str = FINAL,
) -> Relative:
    """How long each method takes to reach a common accuracy, relative to ``baseline``.

    ``target`` as in :func:`target_accuracy`, from final accuracies with ``final`` as in :func:`final_value`. A ratio
    below 1 is faster than the baseline. It is NaN if one of the two does not reach the target, or if the baseline
    starts at or above it. ``runs`` maps each method to its runs, one per seed, with the seeds in the same order.

    Source: Zhang et al., "Orthogonal Calibration for Asynchronous Federated Learning", 2025, Table 1 (relative time).
    """
    check.kind("runs", runs, Mapping, OF_METHODS)
    check.one_of("baseline", baseline, runs)
    counts = {name: len(seeds) for name, seeds in runs.items()}
    check.require(len(set(counts.values())) == 1 and min(counts.values()) > 0, "runs", counts, "equally many seeds")
    orders = {name: [str(run.settings.get("seed")) for run in seeds] for name, seeds in runs.items()}
    wanted = orders[baseline]
    for name, order in orders.items():  # a seed that both have is at the same place
        alike = all(order.index(seed) == wanted.index(seed) for seed in {*order} & {*wanted})
        check.require(alike, f"seeds of runs[{name!r}]", order, f"in the order of {baseline}'s: {wanted}")
    goals = target_accuracy(_final_accuracies(runs, final), target, specs_in(runs))
    time = {
        name: np.array([to_target(run, goal, unit) for run, goal in zip(seeds, goals, strict=True)])
        for name, seeds in runs.items()
    }
    below = np.where(time[baseline] > 0, time[baseline], np.nan)
    return Relative(goals, time, {name: amount / below for name, amount in time.items()})


# --- over seeds ---------------------------------------------------------------------------------------


class Spread(NamedTuple):
    """Mean and sample standard deviation over ``seeds`` runs."""

    mean: float
    std: float
    seeds: int


class SeedCurve(NamedTuple):
    """Mean and sample standard deviation over seeds of one column of the evaluations."""

    at: np.ndarray  # float64[P]  virtual seconds, updates, server steps or bytes
    mean: np.ndarray  # float64[P]
    std: np.ndarray  # float64[P]  NaN for a single seed
    steps: bool  # whether a value holds until the next point; if not, lines may join the points


def mean_and_std(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sample standard deviation (divisor n - 1; NaN for n = 1) over the last axis, the seeds.

    All tables and pictures use this function, so that they show the same numbers. The deviation of a diverged loss is
    NaN where a seed has an infinite one, and infinite where squares are above the largest float.
    """
    values = np.ascontiguousarray(values, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = np.mean(values, axis=-1)
        return mean, np.std(values, axis=-1, ddof=1) if values.shape[-1] > 1 else np.full_like(mean, math.nan)


def numbers_in(field: str, values: object, least: int = 1) -> np.ndarray:
    """The numbers of a list, float64[n]; ``ValueError`` for fewer than ``least`` or for anything but numbers."""
    allowed = ("a list of numbers", "a list of at least one number", "a list of at least two numbers")[least]
    try:
        array = np.asarray(values)
        array = array.astype(np.float64) if array.dtype.kind in "biufO" or not array.size else np.zeros(())
    except (TypeError, ValueError):
        array = np.zeros(())
    check.require(array.ndim == 1 and array.size >= least, field, values, allowed)
    return array


def spread(values: Sequence[float] | np.ndarray) -> Spread:
    """Mean and sample standard deviation (divisor n - 1; NaN for one value) of one value per seed.

    >>> spread([1.0, 2.0, 3.0])
    Spread(mean=2.0, std=1.0, seeds=3)
    """
    array = numbers_in("values", values)
    mean, std = mean_and_std(array)
    return Spread(float(mean), float(std), array.size)


def mean_curve(
    runs: Sequence[Run], unit: str = "time", column: str = "accuracy", factor: float = 1.0, final: str = "last"
) -> SeedCurve:
    """``factor`` times a column of the evaluations against ``unit``, averaged over runs that differ in their seed.

    Each seed's values are replaced by their running mean over as many evaluations as ``final`` averages (see
    :func:`window`), which is only one for ``last`` and ``best``; no mean joins evaluations of the initial model with
    later ones.

    If the evaluations of all seeds match, the k-th point averages the k-th evaluations, at their mean amount of
    ``unit``. They match if all seeds have equally many, and the k-th evaluations are after the same number of updates,
    or of server steps, or at the same time.

    Otherwise each seed is a step function: it keeps its last value, also after its end. The points are then where seeds
    are evaluated. Evaluations of different seeds within half an interval share one point, at the last of them, so that
    a seed that is evaluated slightly later does not widen the band in between.

    In both cases the last point is ``spread`` of ``final_value(run, column, final)`` over the seeds, except for
    ``best``. ``ValueError`` for no runs.
    """
    check.require(len(runs) > 0, "runs", list(runs), "at least one run")
    at = [progress_in(run, unit) for run in runs]
    scores = [np.asarray(run.evaluations[column], np.float64) for run in runs]
    values = [
        factor * running_mean(each, window(final, each.size), int(_untrained(run).sum()))
        for each, run in zip(scores, runs, strict=True)
    ]
    matching = _match(runs)
    if matching:
        grid, _ = mean_and_std(np.stack(at, axis=-1))
    else:
        grid = _common_grid(at)
        values = [y[np.searchsorted(x, grid, side="right") - 1] for x, y in zip(at, values, strict=True)]
    return SeedCurve(grid, *mean_and_std(np.stack(values, axis=-1)), steps=not matching)


def _match(runs: Sequence[Run]) -> bool:
    """Whether the k-th evaluations of all runs follow as many updates, as many server steps, or as much time."""
    first, *others = (run.evaluations for run in runs)
    return any(all(np.array_equal(first[unit], other[unit]) for other in others) for unit in ("update", "step", "time"))


def _common_grid(at: Sequence[np.ndarray]) -> np.ndarray:
    """The increasing points for the mean over seeds, from where all have begun; ``at``: each seed's sorted amounts."""
    intervals = np.concatenate([np.diff(x) for x in at])
    near = np.median(intervals[intervals > 0]) / 2 if np.any(intervals > 0) else 0.0
    grid: list[float] = []
    together: set[int] = set()  # the seeds whose evaluations share the last point
    for amount, seed in sorted((float(amount), seed) for seed, x in enumerate(at) for amount in x):
        if grid and (amount == grid[-1] or (amount - grid[-1] <= near and seed not in together)):
            grid[-1] = amount
        else:
            grid.append(amount)
            together = set()
        together.add(seed)
    return np.array([amount for amount in grid if amount >= max(x[0] for x in at)])
