"""The oracle of adaptive runs: the plain event loop of ``reference.py``, up to each look of the policy."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

from fedjax_async.clock import Ended, Record
from fedjax_async.engine.evaluation import EvaluationPoints
from fedjax_async.engine.outset import OBSERVED, Outset
from fedjax_async.engine.record import EngineResult, Progress
from fedjax_async.engine.reference import Walk
from fedjax_async.engine.reference_scores import scores_of_examples
from fedjax_async.engine.watching import Observer
from fedjax_async.types import Schedule


class ReferenceExecutor:
    """Trains an adaptive run one event at a time; the methods of ``clock.Executor``."""

    seconds = 0.0  # its time outside training is negligible

    def __init__(
        self, outset: Outset, *, on_bad: str = "reject", progress: Progress | None = None,
        observer: Observer | None = None,
    ) -> None:  # fmt: skip
        self._o, o = outset, outset
        none = np.zeros(0, np.int64)
        self._walk = Walk(
            o.components, o.nominal, o.params, o.key, EvaluationPoints(none, np.zeros(0)),
            per_client=o.per_client, on_bad=on_bad, norm_limit=o.norm_limit, probes=o.probes, measures=o.measures,
            progress=progress, observer=observer, facts=o.facts,
        )  # fmt: skip
        self._arrivals = self._told = 0

    def advance(self, record: Record) -> dict[str, np.ndarray]:
        """Train and apply all arrivals of ``record``; returns the recorded columns of those not returned before."""
        self._go_on(record.schedule())
        if self._walk.is_over:
            raise Ended
        rows = self._walk.records[self._told :]
        names = [name for name in rows[0] if name != "values_bits"] if rows else []
        found = {name: np.array([np.asarray(row[name]) for row in rows]) for name in names}
        if rows:
            found["accepted"] = found["accepted"] & (found["weight"] != 0)
        if OBSERVED in self._walk.probing.seen:
            seen = self._walk.probing.seen[OBSERVED][self._told :]
            found |= {name: np.array([row[name] for row in seen]) for name in (seen[0] if seen else {})}
        self._told += len(rows)
        return found

    def finished(self, record: Record, job: int) -> tuple[float, int]:
        """Train a job that is under way; returns norm and bits of its upload."""
        self._go_on(record.schedule())
        left = self._walk.run.early[job] = self._walk.run.trained(job)
        return float(left[2]), int(left[4].get("bits", 0))

    def losses(self, clients: np.ndarray) -> np.ndarray:
        """The mean loss of the current model on each client's examples; float64, one for each of ``clients``."""
        run, data = self._walk.run, self._o.components.data
        measure = scores_of_examples(self._o.components.model, bool(np.issubdtype(data.y.dtype, np.integer)))

        def one(who: int) -> float:
            rows = np.asarray(data.order)[data.offset[who] : data.offset[who] + data.size[who]]
            loss, _ = measure(run.params(), data.x[rows], data.y[rows])
            return float(np.mean(np.asarray(loss), dtype=np.float64))

        return np.array([one(int(who)) for who in clients])

    def scores(self) -> Mapping[str, object]:
        """The newest evaluation, empty if there is none."""
        return jax.device_get(self._walk.scores[-1]) if self._walk.scores else {}

    def finish(self, record: Record, schedule: Schedule, spent: bool) -> EngineResult:
        """Execute the rest of a complete plan; see ``WavesExecutor.finish``."""
        if self._walk.is_over:
            self._o.evaluations.stop()
        else:
            self._go_on(schedule, spent)
        self._walk.follow(schedule, self._o.evaluations.points)
        return self._walk.result()

    def _go_on(self, schedule: Schedule, spent: bool | None = None) -> None:
        walk, evaluations, first = self._walk, self._o.evaluations, self._arrivals
        evaluations.add(schedule.time[first:], schedule.closes[first:])
        if spent is not None:
            evaluations.end(spent)
        walk.follow(schedule, evaluations.points)
        for e in range(first, len(schedule.job)):
            walk.run.send(e)
            walk.evaluate(e)
            if walk.is_over:
                return
            walk.arrive(e, max(len(schedule.job), len(self._o.nominal.job)))
            self._arrivals = e + 1
        walk.run.send(len(schedule.job))
        if evaluations.complete:
            walk.evaluate(len(schedule.job))
