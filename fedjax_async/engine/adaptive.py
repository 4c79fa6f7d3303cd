"""What the planner of an adaptive run calls: the fast engine, for one run or for several side by side.

A planner is a plain function that calls its :class:`WavesExecutor` at every look of the policy, and waits until the
plan so far is executed (``growing_runs.py``). Several planners have a thread each, of which one works at a time. Once
all of them wait, their extensions are executed together. So results do not depend on the timing of threads.
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.clock import Ended, Record
from fedjax_async.engine.execution import Execution
from fedjax_async.engine.growing_runs import Asked, GrowingRuns
from fedjax_async.engine.outset import Outset
from fedjax_async.engine.record import EngineResult
from fedjax_async.engine.tables import StackShape
from fedjax_async.engine.watching import Observer
from fedjax_async.types import Schedule

Returned = TypeVar("Returned")


class WavesExecutor:
    """Trains an adaptive run in waves; the methods of ``clock.Executor``.

    ``ask(asked)`` returns once the extension is executed; ``ask(None)`` once those of other runs are.
    """

    def __init__(self, runs: GrowingRuns, run: int, ask: Callable[[Asked | None], None]) -> None:
        self._runs, self._run, self._ask = runs, run, ask
        self._told = runs.told(run)

    @property
    def seconds(self) -> float:
        """Real time that the host spent on extensions; see :class:`GrowingRuns`."""
        return self._runs.seconds

    def _extend(self, request: Asked) -> None:
        self._ask(request)
        if self._runs.ended(self._run):
            raise Ended

    def advance(self, record: Record) -> dict[str, np.ndarray]:
        """Train and apply all arrivals of ``record``; returns the recorded columns of those not returned before."""
        self._extend(Asked(record))
        return self._told.new_rows()

    def finished(self, record: Record, job: int) -> tuple[float, int]:
        """Train a job that is under way; returns norm and bits of its upload."""
        self._extend(Asked(record, job))
        past = self._told.again("finished")
        norm, bits = self._told.tell("finished", [self._runs.finished(self._run, job)] if past is None else past)[0]
        return float(norm), int(bits)

    def losses(self, clients: np.ndarray) -> np.ndarray:
        """The mean loss of the current model on each client's examples; float64, one for each of ``clients``."""
        past = self._told.again("losses", len(clients))
        found = self._runs.losses(self._run, clients) if past is None else past
        return np.asarray(self._told.tell("losses", found))

    def scores(self) -> Mapping[str, object]:
        """The newest evaluation, empty if there is none."""
        return self._runs.scores(self._run)

    def finish(self, record: Record, schedule: Schedule, spent: bool) -> EngineResult:
        """Execute the rest of a complete plan; ``schedule``: the whole plan; ``spent``: see ``GrowingPoints.end``."""
        if self._runs.ended(self._run):
            self._runs.stop(self._run)
        else:
            with contextlib.suppress(Ended):
                self._extend(Asked(record, spent=spent))
        while self._runs.repeats:  # the run ended before the checkpoint, the device holds its model after it
            self._ask(None)
        return self._runs.result(self._run, schedule)


def alone(outset: Outset, **execution: Any) -> WavesExecutor:
    """The executor of one run; ``execution``: the options of :class:`~fedjax_async.engine.execution.Execution`."""
    how = Execution(**execution)
    return _only(GrowingRuns([outset], how, [how.observer]))


def _only(runs: GrowingRuns) -> WavesExecutor:
    def ask(asked: Asked | None) -> None:
        if asked is not None:
            runs.extend({0: asked})

    return WavesExecutor(runs, 0, ask)


def side_by_side(
    outsets: Sequence[Outset],
    plans: Sequence[Callable[[WavesExecutor], Returned]],
    observers: Sequence[Observer | None],
    how: Execution,
    least: StackShape | None = None,
) -> list[Returned]:
    """Plan and train runs side by side; returns what ``plans[r](executor)`` returns for each run r.

    ``how``, ``observers`` and ``least``: see :class:`GrowingRuns`.
    """
    runs = GrowingRuns(outsets, how, observers, least)
    if len(plans) == 1:
        return [plans[0](_only(runs))]
    planners = [_Planner(runs, r, plan) for r, plan in enumerate(plans)]
    try:
        while not all(planner.has_returned for planner in planners):
            asked = {r: planner.go_on() for r, planner in enumerate(planners) if not planner.has_returned}
            runs.extend({r: one for r, one in asked.items() if one is not None})
    finally:
        for planner in planners:
            planner.leave()
        runs.close()
    return [planner.result for planner in planners]


class _Left(BaseException):
    """The runs have failed; raised in planners that wait."""


class _Planner:
    """The planner of one of several runs, in a thread that works only during :meth:`go_on`."""

    def __init__(self, runs: GrowingRuns, run: int, plan: Callable[[WavesExecutor], Any]) -> None:
        self._executor, self._plan = WavesExecutor(runs, run, self._ask), plan
        self._x64 = bool(jnp.result_type(float) == jnp.float64)  # each thread has its own setting
        self._asked, self._answers = queue.SimpleQueue[Asked | None](), queue.SimpleQueue[_Left | None]()
        self._error: BaseException | None = None
        self.has_returned = False
        self.result: Any = None  # what the planner returns
        run_here = contextvars.copy_context().run
        self._thread = threading.Thread(target=run_here, args=(self._work,), daemon=True)
        self._thread.start()

    def go_on(self) -> Asked | None:
        """Let the planner work until it asks for something; None if it waits or returns. Raises what it raises."""
        self._answers.put(None)
        asked = self._asked.get()
        if self._error is not None:
            raise self._error
        return asked

    def leave(self) -> None:
        """End the thread."""
        self._answers.put(_Left())
        self._thread.join()

    def _wait(self) -> None:
        if (left := self._answers.get()) is not None:
            raise left

    def _ask(self, asked: Asked | None) -> None:
        self._asked.put(asked)
        self._wait()

    def _work(self) -> None:
        try:
            with jax.enable_x64(self._x64):
                self._wait()
                self.result = self._plan(self._executor)
        except _Left:
            return
        except BaseException as error:
            self._error = error
        self.has_returned = True
        self._asked.put(None)
