"""One method in one block: its points on validation examples, then the best one with fresh seeds on test examples."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import spaces
from kept import Kept, Refused, Results, Tried, rounded
from scenes import SCALES, TUNING_SEED, Block, Scale

from fedjax_async import Settings
from fedjax_async.base import notices
from fedjax_async.config import prepare, sweeping
from fedjax_async.config.problem import data_of
from fedjax_async.config.resolving import model_for, resolved
from fedjax_async.engine.client_scores import client_columns
from fedjax_async.results.metrics import final_value
from fedjax_async.results.timeline import staleness_of
from fedjax_async.types import FederatedData, Run

# Logarithms of loss gaps are cut off here; a run that diverged has the upper end throughout.
GAPS = (-7.0, 3.0)
# Too slow for a scale: method -> (scale, most clients, why).
SLOW = {"orthofl_pairwise": ("small", 50, "it projects every arrival on the changes of all other clients, 0.3 s each")}
PREDICTED = 500  # test rows at a time


def refusal(method: str, block: Block) -> str:
    """Why a scale leaves a method out; empty if it does not."""
    scale, most, why = SLOW.get(method, ("", 0, ""))
    clients = block.settings()["clients"]
    return (
        f"left out of {scale} with more than {most} clients: {why}" if scale == block.scale and clients > most else ""
    )


def run(method: str, block: Block, search: Mapping[str, spaces.Range] | None = None) -> Results:
    """Tune a method in a block and run the chosen point with fresh seeds; or why it is refused."""
    place = (block.world, block.task, method)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", notices.RunWarning)  # points of a search may end badly
        try:
            base = block.settings()
            if why := refusal(method, block):
                raise ValueError(why)
            scale = SCALES[block.scale]
            found = tuned(method, block, base, _points(method, scale, base, search), scale.seeds)
        except ValueError as error:
            return Results([], [], [Refused(*place, " ".join(str(error).split()))])
    jax.clear_caches()  # a process runs many methods, which share no programs
    return found


def _points(
    method: str, scale: Scale, base: Mapping[str, Any], search: Mapping[str, spaces.Range] | None
) -> list[spaces.Point]:
    """The points of a method that can run; ``ValueError`` if its default cannot."""

    def fits(point: spaces.Point) -> bool:
        """Whether the point can run: a method may refuse a value, such as a buffer that is too small."""
        try:
            prepare(Settings(**_settings(base, point, TUNING_SEED)))
        except ValueError:
            return False
        return True

    sizes = {"count": scale.points, "most_knobs": scale.knobs}
    points = spaces.points(method, base["lr"], base["clients"], **sizes, search=search, fits=fits)
    if not fits(points[0]):
        prepare(Settings(**_settings(base, points[0], TUNING_SEED)))  # raises what is wrong with the default
    return points


def tuned(name: str, block: Block, base: Mapping[str, Any], points: Sequence[spaces.Point], seeds: int) -> Results:
    """Try the points with the tuning seed, run the best by validation examples with the seeds 0 to ``seeds`` - 1.

    ``base``: the settings of all runs; ``name``: of the rows. ``ValueError`` if a point cannot run.
    """
    tried = dict.fromkeys(points, float("nan"))
    column = "validation_loss" if block.gap else "validation_accuracy"
    distinct = list(tried)
    tuning = [_settings(base, point, TUNING_SEED) for point in distinct]
    fresh = [_settings(base, points[0], seed) for seed in range(seeds)]
    for point, one in zip(distinct, trained(tuning, fresh), strict=True):
        tried[point] = final_value(one, column)
    best = max(distinct, key=lambda point: _merit(tried[point], block.gap))  # of equal ones the first
    fresh = [_settings(base, best, seed) for seed in range(seeds)]
    runs = trained(fresh, tuning)
    worst = worst_tenths(runs, fresh)
    rows = [
        Tried(block.world, block.task, name, *point, float(f"{value:.6g}"), "yes" if point == best else "")
        for point, value in tried.items()
    ]
    kept = [_kept(one, block, name, best, seed, worst[seed]) for seed, one in enumerate(runs)]
    return Results(kept, rows, [])


def _settings(base: Mapping[str, Any], point: spaces.Point, seed: int) -> dict[str, Any]:
    return {**base, "method": point.spec, "lr": point.lr, "seed": seed}


def _merit(value: float, gap: bool) -> float:
    """The larger, the better; no finite score is the worst."""
    return -np.inf if not np.isfinite(value) else -value if gap else value


def trained(now: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> list[Run]:
    """The runs of the settings ``now``. Tables are as long as for ``others`` too, so that both share programs.

    One lane, so that sums do not depend on the number of cores.
    """
    settings = [resolved(Settings(**one)) for one in (*now, *others)]
    stacks = sweeping.plan_groups(settings[: len(now)], lanes=1)
    ended = sweeping.plan_groups(settings[len(now) :], lanes=1) if others else []
    found: dict[int, Run] = {}
    for group in sweeping.plan_groups(settings, lanes=1):
        mine = next((one for one in stacks if one.members[0] in group.members), None)
        if mine is None:
            continue
        beside = [one for one in ended if one.members[0] + len(now) in group.members]
        done = tuple(tuple(i + len(now) for i in stack) for one in beside for stack in one.stacks)
        sweeping.execute_group(settings, mine._replace(done=done), on_finished=found.__setitem__)
    return [found[i] for i in range(len(now))]


def _kept(run: Run, block: Block, method: str, point: spaces.Point, seed: int, worst: float) -> Kept:
    """What is kept of a run."""
    evaluations, count = run.evaluations, SCALES[block.scale].evaluations
    at = np.arange(count + 1) * (block.time / count)
    row = np.maximum(np.searchsorted(evaluations["time"], at * (1 + 1e-9), side="right") - 1, 0)
    scores = log_gap(evaluations["loss"], block.minimum(seed)) if block.gap else evaluations["accuracy"]
    sent = (evaluations["bytes_up"] + evaluations["bytes_down"]) / 1e6
    staleness = staleness_of(run)
    return Kept(
        *(block.world, block.task, method, seed, point.spec, point.lr, block.time),
        int(run.counters["updates"]),
        int(run.counters["server_steps"]),
        float(f"{staleness.mean() if staleness.size else 0.0:.6g}"),
        int(staleness.max(initial=0)),
        float(f"{worst:.6g}"),
        rounded(np.asarray(scores, np.float64)[row]),
        rounded(np.asarray(sent, np.float64)[row]),
    )


def log_gap(loss: np.ndarray, minimum: float) -> np.ndarray:
    """The decimal logarithm of loss minus minimum, within ``GAPS``; a loss that is not finite has the upper end."""
    gap = np.nan_to_num(np.asarray(loss, np.float64) - minimum, nan=np.inf)
    return np.clip(np.log10(np.clip(gap, 1e-30, 1e30)), *GAPS)


def worst_tenths(runs: Sequence[Run], settings: Sequence[dict[str, Any]]) -> list[float]:
    """Of each run, the mean accuracy of the final model over the worst tenth of clients.

    A client's accuracy is that of each class on the test set, weighted by the client's own share of the class among
    its training labels. So it has no noise of small test parts, and is exact where P(x | class) is that of all clients.
    """
    predict, found = None, []
    for run, one in zip(runs, settings, strict=True):
        given = resolved(Settings(**one))
        data = data_of(given)
        if predict is None:
            model, _ = model_for(given, data)
            predict = jax.jit(lambda params, x, apply=model.apply: apply(params, x).argmax(-1))
        parts = [predict(run.params, data.test_x[a : a + PREDICTED]) for a in range(0, len(data.test_x), PREDICTED)]
        found.append(worst_of(np.concatenate([np.asarray(part) for part in parts]), data))
    return found


def worst_of(predicted: np.ndarray, data: FederatedData) -> float:
    """The mean accuracy over the worst tenth of clients, from the classes predicted for the test rows."""
    labels = np.asarray(data.test_y)
    classes = data.num_classes or 1 + int(labels.max())
    shown = np.bincount(labels.ravel(), minlength=classes)
    right = np.bincount(labels.ravel(), weights=(predicted == labels).ravel(), minlength=classes)
    of_class = np.divide(right, shown, out=np.zeros(classes), where=shown > 0)
    counts = np.stack([
        np.bincount(np.asarray(data.y[data.order[low : low + size]]).ravel(), minlength=classes) * (shown > 0)
        for low, size in zip(data.offset, data.size, strict=True)
    ])  # fmt: skip
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return float(client_columns({"accuracy": (shares @ of_class)[None]})["client_accuracy_worst"][0])
