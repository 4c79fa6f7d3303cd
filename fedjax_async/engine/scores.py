"""When the runs of a stack are evaluated, and the scores, which stay on the device: the loop does not wait for them."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from fedjax_async.engine.evaluation import EvaluationPoints

if TYPE_CHECKING:
    from fedjax_async.engine.kernels import Carry

Moment = tuple[int, int]  # a run of the stack, and the number of its arrivals before an evaluation
Evaluate = Callable[["Carry", list[Moment]], Sequence[Mapping[str, object]]]  # (carry, moments) -> scores of each


def moments_due(
    points: Sequence[EvaluationPoints], positions: Sequence[np.ndarray], ranks: np.ndarray | None = None
) -> dict[int, list[Moment]]:
    """The evaluations of planned runs, by the number of positions of the stack after which they are due.

    ``positions``: per run, the positions of its arrivals. ``ranks``: bounds of the ranks, if the program that receives
    uploads applies whole ranks. A run is then evaluated at the end of a rank; the rank has no other arrival of the run.
    """
    due: dict[int, list[Moment]] = {}
    for run, (own, arrivals) in enumerate(zip(points, positions)):
        for local in np.unique(own.position).tolist():
            stop = int(arrivals[local - 1]) + 1 if local else 0
            if ranks is not None:
                stop = int(ranks[np.searchsorted(ranks, stop)])
            due.setdefault(stop, []).append((run, local))
    return due


class Scores:
    """When each run of a stack is evaluated, and the results.

    ``due``: the evaluations after each number of positions of the stack.
    """

    def __init__(self, points: Sequence[EvaluationPoints], due: Mapping[int, list[Moment]]) -> None:
        self.at: dict[Moment, Mapping[str, object]] = {}
        self.follow(points, due)

    def follow(self, points: Sequence[EvaluationPoints], due: Mapping[int, list[Moment]]) -> None:
        """Go on with other positions: plans have grown."""
        self._points, self._due, self.stops = points, due, sorted(due)

    def cuts(self, *bounds: int) -> list[tuple[int, int]]:
        """The ranges ``(low, high)`` between consecutive ``bounds``, in order, split at every evaluation inside."""
        first, last = bisect_right(self.stops, bounds[0]), bisect_left(self.stops, bounds[-1])
        inner = self.stops[first:last]
        return list(itertools.pairwise(sorted({*bounds, *inner}) if inner else bounds))

    def evaluate(self, position: int, evaluate: Callable[[list[Moment]], Sequence[Mapping[str, object]]]) -> None:
        """Evaluate all runs that are due after the first ``position`` arrivals: ``evaluate([(run, its arrivals)])``."""
        due = self._due.get(position, [])
        self.at |= zip(due, evaluate(due) if due else [])

    def latest(self) -> float:
        """The newest accuracy that is already computed, NaN if there is none. Never waits for the device."""
        for scores in reversed(self.at.values()):
            if getattr(scores["accuracy"], "is_ready", lambda: True)():
                found = np.asarray(scores["accuracy"])
                tested = found[~np.isnan(found)]  # without a server: the mean of the nodes that have test rows
                return float(tested.mean()) if len(tested) else float("nan")
        return float("nan")

    def columns(self, run: int, rows: int) -> dict[str, np.ndarray]:
        """The first ``rows`` evaluations of a run, by name of the score: arrays [rows] and, per client, [rows, N]."""
        fetched = {local: jax.device_get(scores) for (r, local), scores in self.at.items() if r == run}
        names = next(iter(fetched.values()))
        return {name: np.stack([fetched[int(p)][name] for p in self._points[run].position[:rows]]) for name in names}
