"""Looking at the evaluations of a run: stopping rules, the best model, callbacks.

Each run has one :class:`Watch`: ``execute`` and ``execute_group`` give its observer to the engine. It passes each
evaluation to streams, stopping rules and callbacks, in this order. It adds to the finished run why it stopped and its
best model.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_async.base import check
from fedjax_async.config.prepared import Experiment
from fedjax_async.config.settings import Settings
from fedjax_async.engine.client_scores import without_accuracies
from fedjax_async.engine.record import EngineResult
from fedjax_async.engine.watching import Observer, Verdict
from fedjax_async.types import Best, Evaluation, FederatedData, Run, Stop, Stopped

Callback = Callable[[Evaluation], Stop | None]

_one_at_a_time = threading.RLock()  # stacks run in threads of their own; a callback is never called twice at a time


def name_of(callback: object) -> str:
    """The name of a callback in messages."""
    return str(getattr(callback, "__qualname__", type(callback).__qualname__))


def asked(callback: Callback, evaluation: Evaluation) -> Stop | None:
    """What a callback returns for an evaluation; ``ValueError`` naming it if it raises or returns anything else."""
    try:
        with _one_at_a_time:
            found = callback(evaluation)
    except Exception as error:
        raise ValueError(
            f"callback {name_of(callback)}, evaluation {evaluation.number} of {evaluation.run}: "
            f"{type(error).__name__}: {error}"
        ) from error
    allowed = 'None, or Stop("why") to end the run'
    check.require(found is None or isinstance(found, Stop), f"return of callback {name_of(callback)}", found, allowed)
    said = found is None or (isinstance(found.why, str) and bool(found.why.strip()))
    check.require(said, f"return of callback {name_of(callback)}", found, allowed)
    return found


class Judge:
    """Compares evaluations by validation accuracy if clients have a validation part, else by test accuracy.

    If targets are not class labels, by the loss.
    """

    def __init__(self, data: FederatedData) -> None:
        self.labelled = bool(np.issubdtype(np.asarray(data.test_y).dtype, np.integer))
        self._metric = "accuracy" if self.labelled else "loss"

    def column(self, scores: Mapping[str, object]) -> str:
        """The column that is compared."""
        held_out = f"validation_{self._metric}"
        return held_out if held_out in scores else self._metric

    def name(self, scores: Mapping[str, object]) -> str:
        """The compared score in words: ``test accuracy``."""
        part = "validation" if self.column(scores).startswith("validation_") else "test"
        return f"{part} {self._metric}"

    def is_better(self, value: float | np.ndarray, than: float | np.ndarray | None) -> bool:
        """Whether a value is better than another; NaN never is, and any number is better than None."""
        if math.isnan(value):
            return False
        return than is None or bool(value > than if self.labelled else value < than)

    def reaches(self, value: float | np.ndarray, target: float) -> bool:
        """Whether a value is the target or better."""
        return bool(value >= target if self.labelled else value <= target)


class _Improvement:
    """The best value so far, and the number of evaluations since then.

    Several evaluations of one model, with no server step (nodes: no event) in between, count once.
    """

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self.best: Any = None
        self.since, self._step = 0, -1

    def __call__(self, value: float | np.ndarray, step: int) -> bool:
        better = self._judge.is_better(value, self.best)
        self.best, self.since = (value, 0) if better else (self.best, self.since + (step != self._step))
        self._step = step
        return better


class Watch:
    """Looks at the evaluations of one run; ``name``: the run's name in evaluations and messages.

    ``callbacks`` and ``streams`` are called at each evaluation. A callback may stop the run; a stream cannot, and has a
    method ``close(complete)``. ``keep_best``: keep the best model.
    """

    def __init__(
        self,
        e: Experiment,
        *,
        name: str | None = None,
        callbacks: Sequence[Callback] = (),
        streams: Sequence[Any] = (),
        keep_best: bool = False,
    ) -> None:
        self._e, self._described = e, e.described
        self._name = str(e.settings.method) if name is None else name
        self._callbacks, self._streams, self._keep_best = tuple(callbacks), tuple(streams), keep_best
        self._judge = Judge(e.components.data)
        self._improved = _Improvement(self._judge)
        self._planned = e.kind.evaluations(e)
        self._stopped: Stopped | None = None
        self._judged_by = ""
        require_target(e.settings, self._judge.labelled)

    @property
    def observer(self) -> Observer | None:
        """What the engine calls at evaluations; None if nothing looks at them."""
        s = self._e.settings
        models = bool(self._callbacks) or self._keep_best or s.stop_at is not None or s.patience is not None
        return Observer(self._observe, models) if models or self._streams else None

    def _observe(self, row: int, scores: dict[str, np.ndarray], again: bool) -> Verdict:
        if not self._planned.complete or row >= len(self._planned.time):  # the plan may have grown
            self._planned = self._e.kind.evaluations(self._e)
        times, updates, steps, complete = self._planned
        last = complete and row == len(times) - 1
        values = {name: value[()] for name, value in self._e.kind.columns(self._e, row, scores).items()}
        evaluation = Evaluation(
            self._name, row, float(times[row]), int(updates[row]), int(steps[row]), values,
            self._described, last, again,
        )  # fmt: skip
        written = evaluation
        if not self._judge.labelled:
            written = evaluation._replace(scores=without_accuracies(values))
        for stream in self._streams:
            asked(stream, written)
        self._judged_by = self._judge.name(values)
        better = self._improved(values[self._judge.column(values)], int(steps[row]))
        found = self._rules(values)
        for callback in self._callbacks:
            said = asked(callback, evaluation)
            found = found or (None if said is None else (f"callback {name_of(callback)}", said.why))
        if found is not None and not last:
            self._stopped = Stopped(*found, row)
        return Verdict(keep=self._keep_best and better, stop=found is not None and not last)

    def _rules(self, scores: Mapping[str, Any]) -> tuple[str, str] | None:
        """Which of the settings' rules stops the run, and why."""
        s, value = self._e.settings, scores[self._judge.column(scores)]
        if s.stop_at is not None and self._judge.reaches(value, s.stop_at):
            return "stop_at", f"{self._judge.name(scores)} {value:.4f} reached {s.stop_at:g}"
        if s.patience is not None and self._improved.since >= s.patience:
            best = math.nan if self._improved.best is None else self._improved.best
            return "patience", f"{self._judge.name(scores)} not above {best:.4f} for {s.patience} evaluations".replace(
                "above", "above" if self._judge.labelled else "below"
            )
        return None

    def finish(self, run: Run, result: EngineResult) -> Run:
        """Add to the run why it stopped and its best model, and close the streams as complete."""
        self.close(complete=True)
        if result.kept is not None:
            row, params = result.kept
            best = Best(params, row, self._judged_by, float(self._improved.best))
            run = run._replace(best=best)
        return run._replace(stopped=self._stopped)

    def close(self, complete: bool = False) -> None:
        """Close the streams, once."""
        streams, self._streams = self._streams, ()
        for stream in streams:
            stream.close(complete)


def require_target(s: Settings, labelled: bool) -> None:
    """``ValueError`` for a target that no run can reach: an accuracy above 1."""
    reachable = s.stop_at is None or not labelled or s.stop_at <= 1
    check.require(reachable, "stop_at", s.stop_at, "an accuracy in (0, 1]")
