"""From finished runs to tables: a row for each method in each block, ranks over all blocks, the budgets of tuning."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import ranks
from kept import Kept, Results
from scenes import TARGETS, TASKS

from fedjax_async.results import tables
from fedjax_async.results.metrics import spread, window
from fedjax_async.results.significance import PValue

Rows = list[dict[str, Any]]
CONTROL = "fedbuff"  # the method that all others are tested against
FALLBACK = "fedavg"


def final(scores: np.ndarray) -> float:
    """The mean of the last tenth of the evaluations."""
    return float(np.mean(scores[-window("tail", len(scores)) :]))


def area(scores: np.ndarray) -> float:
    """The mean score over the run: the area under the curve, a step function of time, divided by the time."""
    return float(np.mean(scores[:-1]))


def fluctuation(scores: np.ndarray) -> float:
    """The standard deviation of the score over the last third of the evaluations."""
    return float(np.std(scores[-max(len(scores) // 3, 2) :]))


def first_at(scores: np.ndarray, target: float, *, smaller: bool) -> int | None:
    """The first evaluation that reaches the target, or None."""
    reached = np.flatnonzero(scores <= target if smaller else scores >= target)
    return int(reached[0]) if reached.size else None


def cost(run: Kept) -> tuple[float, float]:
    """Virtual seconds and megabytes sent until the target of the run's task is reached; NaN if it is not."""
    at = first_at(run.scores, TARGETS[run.task], smaller=TASKS[run.task].gap)
    return (math.nan, math.nan) if at is None else (run.time * at / (len(run.scores) - 1), float(run.sent[at]))


def grouped(runs: Iterable[Kept]) -> dict[tuple[str, str, str], list[Kept]]:
    """World, task and method -> its runs by seed; worlds and tasks in order of first use."""
    found: dict[tuple[str, str, str], list[Kept]] = {}
    for run in runs:
        found.setdefault((run.world, run.task, run.method), []).append(run)
    return {key: sorted(each, key=lambda run: run.seed) for key, each in found.items()}


def method_rows(found: Results) -> Rows:
    """A row for each method in each block, the best first."""
    rows = []
    for (world, task, method), runs in grouped(found.runs).items():
        factor, costs = (1.0 if TASKS[task].gap else 100.0), [cost(run) for run in runs]
        values = {
            "score": [factor * final(run.scores) for run in runs],
            "area": [factor * area(run.scores) for run in runs],
            "fluctuation": [factor * fluctuation(run.scores) for run in runs],
            "worst tenth (%)": [100 * run.worst for run in runs],
        }
        of_costs = zip(("time to target (s)", "sent to target (MB)"), zip(*costs, strict=True), strict=True)
        rows.append({
            **{"world": world, "task": task, "method": method, "point": shown(runs[0])},
            **{name: spread(each) for name, each in values.items()},
            **{name: tables.spread_or_count(each) for name, each in of_costs},
            "staleness": spread([run.staleness for run in runs]),
            "largest staleness": max(run.longest for run in runs),
            "updates": spread([float(run.updates) for run in runs]),
            "server steps": spread([float(run.steps) for run in runs]),
            "seeds": len(runs),
        })  # fmt: skip
    places = list(dict.fromkeys((row["world"], row["task"]) for row in rows))
    return sorted(rows, key=lambda row: (places.index((row["world"], row["task"])), _worse(row)))


def _worse(row: dict[str, Any]) -> float:
    mean = row["score"].mean if TASKS[row["task"]].gap else -row["score"].mean
    return math.inf if math.isnan(mean) else float(mean)


def shown(run: Kept) -> str:
    """The chosen point: the spec, and the local rate."""
    return f"{run.point}, lr={run.lr:g}"


def table_of_scores(runs: Sequence[Kept]) -> tuple[np.ndarray, list[str], list[tuple[str, str, int]], list[str]]:
    """Scores [blocks, methods] of which larger ones are better, methods, blocks, and methods that miss a block.

    A block here is a world, a task and a seed. Methods that miss one have no rank.
    """
    scores = {(run.world, run.task, run.seed, run.method): run for run in runs}
    blocks = list(dict.fromkeys((run.world, run.task, run.seed) for run in runs))
    every = list(dict.fromkeys(run.method for run in runs))
    whole = [method for method in every if all((*block, method) in scores for block in blocks)]
    signs = [-1.0 if TASKS[task].gap else 1.0 for _, task, _ in blocks]
    table = [
        [sign * final(scores[*block, method].scores) for method in whole]
        for sign, block in zip(signs, blocks, strict=True)
    ]
    return np.array(table), whole, blocks, [method for method in every if method not in whole]


def rank_rows(found: Results) -> tuple[Rows, dict[str, float]]:
    """A row for each method with its mean rank, the best first; and the numbers of the tests.

    Both are empty if fewer than two methods have run in all blocks.
    """
    table, methods, blocks, _ = table_of_scores(found.runs)
    if len(methods) < 2:
        return [], {}
    order = ranks.ranked(table)
    means = order.mean(axis=0)
    groups = np.array([f"{world}, {task}" for world, task, _ in blocks])
    control = methods.index(CONTROL if CONTROL in methods else FALLBACK if FALLBACK in methods else methods[0])
    tests = ranks.friedman(order)
    difference = ranks.critical_difference(len(methods), len(blocks))
    compared = (
        ranks.against(table, groups, control)
        if len(blocks) > 1
        else [ranks.Against(0, math.nan, math.nan)] * len(methods)
    )
    finals = {(row["world"], row["task"], row["method"]): row["score"] for row in method_rows(found)}
    rows = [
        {
            "method": method,
            "mean rank": float(means[k]),
            "not told from the best": "yes" if means[k] - means.min() <= difference else "no",
            **{
                f"{world}, {task}": finals[world, task, method]
                for world, task in dict.fromkeys((world, task) for world, task, _ in blocks)
            },
            f"against {methods[control]}": compared[k].difference,
            "p (Holm)": PValue(compared[k].corrected),
        }
        for k, method in enumerate(methods)
    ]
    numbers = {
        "methods": len(methods),
        "blocks": len(blocks),
        "Friedman chi2": tests.chi_square,
        "Iman-Davenport F": tests.f,
        "p": str(PValue(tests.p)),
        "critical difference": difference,
    }
    return sorted(rows, key=lambda row: row["mean rank"]), numbers
