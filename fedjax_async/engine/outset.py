"""What an adaptive run knows when it begins, and the evaluations of its growing plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedjax_async.clock.decisions import GrowingTable
from fedjax_async.clock.record import SLACK
from fedjax_async.engine.components import Components
from fedjax_async.engine.evaluation import EvaluationPoints, Every, points_among
from fedjax_async.engine.measures import NOTHING, Measures
from fedjax_async.engine.probes import NO_PROBES, Probes
from fedjax_async.types import Facts, Key, Params, Schedule

OBSERVED = "observed"  # the probe of policies that read losses


class GrowingPoints:
    """The evaluations of a run whose plan grows. Those before the last known arrival are decided: ``points``."""

    def __init__(self, every: Every, horizon: float | None) -> None:
        self._every, self._horizon = every, horizon
        self._events = GrowingTable()
        self._events.append({"time": np.zeros(0), "closes": np.zeros(0, np.bool_)})
        self.points = EvaluationPoints(np.zeros(0, np.int64), np.zeros(0))
        self.complete = False
        self._steps = 0  # closed by all known arrivals
        self._next: float = 0.0  # virtual time of the first evaluation that is not decided

    def add(self, time: Sequence[float] | np.ndarray, closes: Sequence[bool] | np.ndarray) -> None:
        """Add new arrivals; ``time``: when they are applied, ``closes``: whether they close their server step."""
        if not len(time):
            return
        self._events.append({"time": time, "closes": closes})
        self._steps += sum(closes)
        if self._decides(time[-1], self._steps - bool(closes[-1])):
            known = self._all(self._horizon)
            decided = int(np.searchsorted(known.position, len(self._events)))
            self.points = EvaluationPoints(*(column[:decided] for column in known))
            self._next = self._after(decided, known.time)

    def _decides(self, time: float, steps: int) -> bool:
        """Whether the last arrival, at ``time`` and after so many steps, decides an evaluation.

        One after all arrivals is not decided: the next arrival may come at the same time.
        """
        every, decided = self._every, len(self.points.time)
        if every.updates is not None:
            return len(self._events) > decided * every.updates
        if every.steps is not None:
            return steps >= decided * every.steps
        return not decided or time > self._next * SLACK

    def _after(self, decided: int, times: np.ndarray) -> float:
        """The time of the evaluation after so many; 0 if it changes with the end of the run."""
        if self._horizon is not None or not decided:
            return float(times[decided])
        if self._every.time is not None:
            return decided * self._every.time
        moments = [moment for moment in sorted(self._every.at or ()) if moment > 0]
        return 0.0 if self._every.at is None else [*moments, math.inf][decided - 1]

    def end(self, spent: bool) -> None:
        """The plan is complete; ``spent``: the run ends with its last arrival, not at its horizon."""
        self.points, self.complete = self._all(None if spent else self._horizon), True

    def stop(self) -> None:
        """The run is stopped: end the points at the last arrival executed, with a point that is not evaluated."""
        if not self.complete and len(self.closes):
            end = len(self.closes), self.times[-1], np.count_nonzero(self.closes)
            self.points = EvaluationPoints(*(np.append(column, last) for column, last in zip(self.points, end)))

    def _all(self, horizon: float | None) -> EvaluationPoints:
        return points_among(self._events.column("time"), self.closes, self._every, horizon)

    @property
    def times(self) -> np.ndarray:
        """When each arrival is applied."""
        return self._events.column("time")

    @property
    def closes(self) -> np.ndarray:
        """Which arrivals complete their server step; bool[E]."""
        return self._events.column("closes")

    def due(self, first: int) -> list[int]:
        """The numbers of arrivals, ``first`` or more, after which there is a decided evaluation.

        ``first``: how many arrivals there were before the last :meth:`add`. So each evaluation is due only once.
        """
        position = self.points.position
        if not len(position) or position[-1] < first:
            return []
        return np.unique(position[np.searchsorted(position, first) :]).tolist()


class Outset(NamedTuple):
    """What an adaptive run knows when it begins.

    ``nominal``: the plan without any decision of the policy. ``facts``: what is known about the run for any decisions.
    """

    components: Components
    nominal: Schedule
    facts: Facts
    local_steps: np.ndarray  # int64[N]
    params: Params
    key: Key
    evaluations: GrowingPoints
    in_flight: int  # the most jobs under way at a time in the nominal plan
    asks: bool = False  # whether the policy decides about uploads, so that jobs are trained before they arrive
    all_arrive: bool = True  # whether every job arrives
    probes: Probes = NO_PROBES
    measures: Measures = NOTHING
    per_client: bool = False
    norm_limit: float = float("inf")
