"""A stack: runs that advance side by side, laid out, moved to the device and compiled. One run is a stack of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import DTypeLike

from fedjax_async.clock.record import SLACK
from fedjax_async.engine.components import bound
from fedjax_async.engine.evaluation import Inputs, RunTests
from fedjax_async.engine.flat import said_of
from fedjax_async.engine.kernels import Carry, JobBuffers
from fedjax_async.engine.layout import Layout, digest
from fedjax_async.engine.members import Member
from fedjax_async.engine.probes import described, numbers_of, probe_table
from fedjax_async.engine.record import EngineResult
from fedjax_async.engine.scores import Evaluate, Moment, Scores, moments_due
from fedjax_async.engine.stack_facts import StackFacts
from fedjax_async.engine.streaming import Feed
from fedjax_async.engine.tables import DeviceTables, StackShape
from fedjax_async.engine.watching import Watcher, is_ready
from fedjax_async.types import Array, Params, ServerAlgorithm, State

# Besides those that train, one per width, and those that score: start, buffers, receive.
OTHER_PROGRAMS = 3


class Recorded(NamedTuple):
    """What a run has recorded of the jobs that were received, those trained in vain too, in order."""

    columns: dict[str, np.ndarray]
    job: np.ndarray  # int64[E]
    applied: np.ndarray  # bool[E]
    probes: dict[str, dict[str, np.ndarray]]  # one table each, of the arrivals that belong to the result


class Stack(NamedTuple):
    """Runs with a server that advance side by side, laid out, moved to the device and compiled: ``loop.SideBySide``."""

    members: Sequence[Member]
    layout: Layout
    shape: StackShape
    facts: StackFacts
    tables: DeviceTables
    params: Params  # [R, ...]; without the axis where R = 1
    tests: list[RunTests]  # per member
    programs: Any  # Programs, once they are compiled
    num_bytes: int = 0  # on the device while it runs: tables, carry, buffers and temporary memory of training
    feed: Feed | None = None
    sharding: NamedSharding | None = None  # of what every device holds
    inputs: Sequence[Inputs | None] = ()  # per member: of what is measured besides loss and accuracy
    every_test: RunTests | None = None  # the tests of all runs together, if a program evaluates all of them at once
    grows: bool = False  # whether the layout is that of an extension of the runs' plans

    @property
    def ranks(self) -> np.ndarray | None:
        """The bounds of the ranks, if whole ranks are applied at once."""
        return self.layout.slots.ranks if self.programs.by_ranks else None

    def apply(self, carry: Carry, buffers: JobBuffers, low: int, high: int) -> tuple[Carry, Array]:
        """The server receives the positions ``low .. high-1``."""
        span = np.array([low, high] if self.ranks is None else np.searchsorted(self.ranks, [low, high]), np.int32)
        applied: tuple[Carry, Array] = self.programs.receive(self.tables, carry, buffers, span)
        return applied

    def scores(self) -> Scores:
        """When each run is evaluated: after some of its arrivals."""
        points = [m.points for m in self.members]
        return Scores(points, moments_due(points, self.layout.positions, self.ranks))

    def evaluator(self, watcher: Watcher, trainers: object) -> Evaluate:
        """The evaluation of runs; it needs no ``trainers``."""
        del trainers
        return Evaluator(self, watcher).evaluate

    def identity(self) -> dict[str, object]:
        """Batches, probes, and whether states are flat."""
        found: dict[str, object] = {
            "batches (cores, lanes, max_width)": digest(self.layout),
            "probes": described(self.members[0].probes),
        }
        return found | said_of(self.members[0].components)

    def until(self, carry: Carry, watcher: Watcher, run: int) -> tuple[int, int]:
        """How many arrivals of a run belong to its result, and how many must be received until it is complete.

        The second number is larger for a stopped run whose uploads differ in size. Then all uploads that reached the
        server before the stop must be trained, as only training tells their sizes. Of an extension everything is
        received, and counts.
        """
        member = self.members[run]
        if run not in watcher.ends or self.grows:
            return (len(self.layout.positions[run]),) * 2
        row = watcher.ends[run][0]
        arrivals = int(member.points.position[row])
        if "bits" not in carry.records:
            return arrivals, arrivals
        came = np.flatnonzero(member.schedule.upload_time[member.schedule.job] <= member.points.time[row] * SLACK)
        return arrivals, max(arrivals, int(came.max(initial=-1)) + 1)

    def status(self, low: int, high: int) -> dict[str, float]:
        """Of the run of the last position: its virtual time, and the mean staleness of its arrivals."""
        run = int(self.layout.run[high - 1])
        first, last = np.searchsorted(self.layout.positions[run], [low, high])
        schedule = self.layout.schedules[run]
        staleness = schedule.step[first:last] - schedule.version[schedule.job[first:last]]
        return {"time": float(schedule.time[last - 1]), "staleness": float(np.mean(staleness))}

    def result(self, carry: Carry, scores: Scores, watcher: Watcher, run: int) -> EngineResult:
        """The result of a run."""
        member, layout = self.members[run], self.layout
        until, known = self.until(carry, watcher, run)
        position = layout.positions[run][:known]
        own = np.unique(np.searchsorted(layout.waves, position[:until], side="right"))
        columns = {name: np.asarray(column)[position] for name, column in jax.device_get(carry.records).items()}
        applied, seen = np.flatnonzero(member.applied), {}
        for name, probe in member.probes.items():
            numbers = numbers_of(probe, len(applied))
            numbers = numbers[applied[numbers] < until]
            probed = jax.device_get(carry.probes[name])
            values = {c: np.asarray(v)[position][applied[numbers]] for c, v in probed.items()}
            seen[name] = probe_table(member.schedule, applied[numbers], numbers, values)
        recorded = Recorded(columns, member.schedule.job[:known], member.applied[:known], seen)
        mean_width = until / len(own) if len(own) else 0.0
        counters = {"waves": len(own), "mean_width": mean_width, **layout.counters()}
        return self.result_of(carry, scores, watcher, run, recorded, counters)

    def result_of(
        self,
        carry: Carry,
        scores: Scores,
        watcher: Watcher,
        run: int,
        recorded: Recorded,
        counters: dict[str, object],
    ) -> EngineResult:
        """The result of a run that has recorded this."""
        member, columns, sent = self.members[run], recorded.columns, recorded.applied
        states = carry.server
        state = states if self.shape.runs == 1 else jax.tree.map(lambda leaf: leaf[run], jax.device_get(states))
        rule = bound(member.components.rule, member.components.hyper)
        rows = watcher.ends[run][0] + 1 if run in watcher.ends else len(member.points.time)
        programs = len(self.programs.train) + OTHER_PROGRAMS + len(self.programs.scores)
        return EngineResult(
            params=watcher.ends[run][1] if run in watcher.ends else _model(rule, state, self.tables.norm_limit.dtype),
            scores=scores.columns(run, rows),
            records={name: column[sent] for name, column in columns.items()},
            in_vain=recorded.job[~sent],
            in_vain_records={name: column[~sent] for name, column in columns.items()},
            counters=counters | {"programs": programs},
            probes=recorded.probes,
            rows=rows,
            kept=watcher.kept.get(run),
        )


def _model(rule: ServerAlgorithm, state: State, real: np.dtype) -> Params:
    """The model of a server state, on the host; each thread has its own setting of 64 bits."""
    with jax.enable_x64(real == np.float64):
        params: Params = jax.device_get(rule.params(state))
    return params


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


class Evaluator(NamedTuple):
    """The evaluation of the runs of a stack."""

    stack: Stack
    watcher: Watcher

    def evaluate(self, carry: Carry, due: list[Moment]) -> list[dict[str, object]]:
        """The scores of the runs that are due, by name; they are also handed to the observers.

        ``due``: of each, its number and its arrivals so far. All runs of the stack are evaluated if more than half are.
        """
        stack, programs, found = self.stack, self.stack.programs, []
        with jax.enable_x64(stack.tables.norm_limit.dtype == np.float64):  # each thread has its own setting
            whole = programs.evaluate_runs if 2 * len(due) > stack.shape.runs else None
            scores = self._together(whole, carry, due) if whole else [self._one(0, carry, *moment) for moment in due]
            for moment, own in zip(due, scores):
                found.append(own if len(programs.scores) == 1 else own | self._one(1, carry, *moment))
                model = None  # a copy of the run's model, if an observer may ask for it
                if programs.model is not None and self.watcher.wants_model(moment[0]):
                    model = programs.model(stack.tables, carry.server, np.int32(moment[0]))
                self.watcher.add(moment, found[-1], model)
        return found

    def _now(self, run: int, local: int) -> tuple[np.ndarray, np.ndarray]:
        """Virtual time, and server steps closed, at the evaluation of a run after ``local`` arrivals."""
        points = self.stack.members[run].points
        row = np.searchsorted(points.position, local)
        return np.asarray(points.time[row], self.stack.tables.norm_limit.dtype), np.asarray(points.steps[row], np.int32)

    def _one(self, k: int, carry: Carry, run: int, local: int) -> dict[str, object]:
        """What program ``k`` of those that score computes for a run, by name."""
        stack, (what, program) = self.stack, self.stack.programs.scores[k]
        *test, inputs = stack.tests[run]
        given = what.reads(carry), np.int32(run), self._now(run, local), *test
        found: dict[str, object] = program(stack.tables, *given, stack.inputs[run] if k else inputs)
        return found

    def _together(
        self, whole: Callable[..., dict[str, Array]], carry: Carry, due: list[Moment]
    ) -> list[dict[str, object]]:
        stack = self.stack
        runs = np.arange(stack.shape.runs, dtype=np.int32)
        time, steps = np.zeros(len(runs), self.stack.tables.norm_limit.dtype), np.zeros(len(runs), np.int32)
        for run, local in due:
            time[run], steps[run] = self._now(run, local)
        seen = stack.programs.scores[0][0].reads(carry)
        scores = whole(stack.tables, seen, runs, (time, steps), *(stack.every_test or ()))
        return [{name: OneOf(values, run) for name, values in scores.items()} for run, _ in due]
