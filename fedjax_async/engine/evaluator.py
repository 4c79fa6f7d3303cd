"""The evaluations of a stack while it runs: one call per run, or one for all runs where that is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpy.typing import DTypeLike

from fedjax_async.engine.evaluation import now_of
from fedjax_async.engine.kernels import Carry
from fedjax_async.engine.scoring import evaluated
from fedjax_async.engine.watching import Watcher, is_ready
from fedjax_async.types import Params

if TYPE_CHECKING:
    from fedjax_async.engine.stack import Stack


class OneOf:
    """The score of one run, of those that one call computed for several runs; fetched when it is read."""

    def __init__(self, values: jax.Array, index: int) -> None:
        self._values, self._index = values, index

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        """The score on the host."""
        return np.array(np.asarray(self._values)[self._index], dtype, copy=copy)

    def is_ready(self) -> bool:
        """Whether it is computed."""
        return is_ready(self._values)


class Evaluator:
    """``evaluator(carry, [(run, its arrivals so far)]) -> scores of each``, by name; also handed to the observers."""

    def __init__(self, stack: Stack, watcher: Watcher) -> None:
        self._stack, self._watcher = stack, watcher
        self._real = stack.tables.time.dtype

    def __call__(self, carry: Carry, due: list[tuple[int, int]]) -> list[dict[str, Any]]:
        """Evaluate the runs that are due; all of the stack, if more than half of them are."""
        stack, found = self._stack, []
        with jax.enable_x64(self._real == np.float64):  # each thread has its own setting
            whole = stack.programs.evaluate_runs if 2 * len(due) > stack.shape.runs else None
            scores = self._together(whole, carry, due) if whole else [self._one(carry, *moment) for moment in due]
            for moment, own in zip(due, scores):
                found.append(own | measured(stack, carry, moment[0], self._now(*moment)))
                self._watcher.add(moment, found[-1], self._model(carry, moment[0]))
        return found

    def _now(self, run: int, local: int) -> tuple[np.ndarray, np.ndarray]:
        member = self._stack.members[run]
        return now_of(member.points, member.schedule, local, self._real)

    def _one(self, carry: Carry, run: int, local: int) -> dict[str, Any]:
        stack, tests = self._stack, self._stack.tests[run]
        seen = evaluated(carry, tests[3] is not None)
        found: dict[str, Any] = stack.programs.evaluate(
            stack.tables, seen, np.int32(run), self._now(run, local), *tests
        )
        return found

    def _together(self, whole: Callable[..., Any], carry: Carry, due: list[tuple[int, int]]) -> list[dict[str, Any]]:
        stack = self._stack
        runs = np.arange(stack.shape.runs, dtype=np.int32)
        time, steps = np.zeros(len(runs), self._real), np.zeros(len(runs), np.int32)
        for run, local in due:
            time[run], steps[run] = self._now(run, local)
        seen = evaluated(carry, stack.tests[0][3] is not None)
        scores = whole(stack.tables, seen, runs, (time, steps), *(stack.every_test or ()))
        return [{name: OneOf(values, run) for name, values in scores.items()} for run, _ in due]

    def _model(self, carry: Carry, run: int) -> Params | None:
        """A copy of the run's model, if an observer may ask for it."""
        copying = self._stack.programs.model if self._watcher.wants_model(run) else None
        return None if copying is None else copying(self._stack.tables, carry.server, np.int32(run))


def measured(stack: Stack, carry: Carry, run: int, now: tuple[np.ndarray, np.ndarray]) -> dict[str, Any]:
    """What a run measures besides loss and accuracy, by name."""
    programs, (x, y, owner, *_) = stack.programs, stack.tests[run]
    if programs.measure is None:
        return {}
    seen = evaluated(carry, programs.reads_clients)
    found: dict[str, Any] = programs.measure(stack.tables, seen, np.int32(run), now, x, y, owner, stack.inputs[run])
    return found
