"""What an adaptive run knows when it begins, and the evaluations of its growing plan."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedjax_async.clock.decisions import GrowingTable
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

    def add(self, time: np.ndarray, closes: np.ndarray) -> None:
        """Add new arrivals; ``time``: when they are applied, ``closes``: whether they close their server step."""
        self._events.append({"time": time, "closes": closes})
        known = self._all(self._horizon)
        decided = known.position < len(self.closes)  # the next arrival may come at the same time as the last
        self.points = EvaluationPoints(*(column[decided] for column in known))

    def end(self, spent: bool) -> None:
        """The plan is complete; ``spent``: the run ends with its last arrival, not at its horizon."""
        self.points, self.complete = self._all(None if spent else self._horizon), True

    def stop(self) -> None:
        """The run is stopped: end the points at the last arrival executed, with a point that is not evaluated."""
        if not self.complete and len(self.closes):
            end = len(self.closes), self.times[-1], np.count_nonzero(self.closes)
            self.points = EvaluationPoints(*(np.append(column, last) for column, last in zip(self.points, end)))

    def _all(self, horizon: float | None) -> EvaluationPoints:
        return points_among(self._events.columns()["time"], self.closes, self._every, horizon)

    @property
    def times(self) -> np.ndarray:
        """When each arrival is applied."""
        return self._events.columns()["time"]

    @property
    def closes(self) -> np.ndarray:
        """Which arrivals complete their server step; bool[E]."""
        return self._events.columns()["closes"]

    def due(self, first: int) -> list[int]:
        """The numbers of arrivals, ``first`` or more, after which there is a decided evaluation.

        ``first``: how many arrivals there were before the last :meth:`add`. So each evaluation is due only once.
        """
        position = self.points.position
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
