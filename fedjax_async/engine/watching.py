"""Observers of evaluations: the engine hands evaluations over while it runs, and keeps the models that they ask for.

An evaluation is handed over once it is computed. The host waits for one only if more than ``UNDER_WAY`` evaluations
are under way. An observer sees each run's evaluations in order, so its decisions do not depend on timing. A run that is
stopped may have been trained further by then, but its results end at the evaluation that stopped it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from fedjax_async.engine.evaluation import EvaluationPoints
from fedjax_async.engine.scores import Moment
from fedjax_async.types import Params

UNDER_WAY = 4  # evaluations, each with its model, that may be under way on the device

Scored = Mapping[str, object]  # an evaluation: its scores by name


class Verdict(NamedTuple):
    """What an observer decides after an evaluation."""

    keep: bool = False  # keep its model, and drop the one kept before
    stop: bool = False  # the run ends here


class Observer(NamedTuple):
    """``observe(row, scores, again) -> Verdict`` for each row of a run's evaluations, in order.

    ``scores``: copies on the host. ``again``: the evaluation comes from a checkpoint.
    """

    observe: Callable[[int, dict[str, np.ndarray], bool], Verdict]
    models: bool  # whether it may ask to keep a model or to stop the run


class Watcher:
    """Hands the evaluations of a stack to the observers of its runs."""

    def __init__(self, points: Sequence[EvaluationPoints], observers: Sequence[Observer | None]) -> None:
        self._points, self._observers = points, observers
        self._waiting: deque[tuple[Moment, Scored, Params | None]] = deque()
        self.kept: dict[int, tuple[int, Params]] = {}  # run -> row and model, on the host
        self.ends: dict[int, tuple[int, Params]] = {}  # run -> row and model of the evaluation that stopped it

    def follow(self, points: Sequence[EvaluationPoints]) -> None:
        """Replace the points of the runs by those known now."""
        self._points = points

    def wants_model(self, run: int) -> bool:
        """Whether the model of a run's next evaluation may be needed."""
        observer = self._observers[run]
        return observer is not None and observer.models and run not in self.ends

    def add(self, moment: Moment, scores: Scored, model: Params | None) -> None:
        """Add an evaluation that the device has begun, and hand over those that are computed."""
        if self._observers[moment[0]] is not None:
            self._waiting.append((moment, scores, model))
            self.hand_over()

    def hand_over(self, wait: bool = False) -> None:
        """Hand over what is computed, the oldest first; with ``wait`` all of it."""
        while self._waiting:
            moment, scores, model = self._waiting[0]
            if not (wait or len(self._waiting) > UNDER_WAY or all(map(is_ready, scores.values()))):
                return
            self._waiting.popleft()
            self._observe(moment, scores, model, False)

    def restore(self, scores: Mapping[Moment, Scored], models: Mapping[Moment, Params]) -> None:
        """Hand over the evaluations of a checkpoint again; ``models``: those that it holds.

        ``ValueError`` if an observer wants a model that the checkpoint does not hold.
        """
        for moment in sorted(scores):
            if self._observers[moment[0]] is not None:
                self._observe(moment, scores[moment], models.get(moment), True)
        for row, model in (*self.kept.values(), *self.ends.values()):
            if model is None:
                raise ValueError(
                    f"checkpoint: must hold the model of evaluation {row}, which keep_best or a callback asks for; "
                    "continue with the callbacks that the run began with, or train it from the start (again=True)"
                )

    @property
    def models(self) -> dict[Moment, Params]:
        """The models that a checkpoint must hold."""
        found = [*self.kept.items(), *self.ends.items()]
        return {(run, int(self._points[run].position[row])): model for run, (row, model) in found}

    @property
    def all_ended(self) -> bool:
        """Whether every run was stopped."""
        return len(self.ends) == len(self._points)

    def _observe(self, moment: Moment, scores: Scored, model: Params | None, again: bool) -> None:
        (run, arrivals), observer = moment, self._observers[moment[0]]
        if run in self.ends or observer is None:
            return
        position = self._points[run].position
        rows = np.searchsorted(position, arrivals, side="left"), np.searchsorted(position, arrivals, side="right")
        fetched = jax.device_get(dict(scores))
        for row in range(*map(int, rows)):
            verdict = observer.observe(row, {name: np.array(value) for name, value in fetched.items()}, again)
            if verdict.keep or verdict.stop:
                model = jax.device_get(model)
            if verdict.keep:
                self.kept[run] = row, model
            if verdict.stop:
                self.ends[run] = row, model
                return


def is_ready(value: object) -> bool:
    """Whether an array is computed; true for what is on the host."""
    return bool(getattr(value, "is_ready", lambda: True)())
