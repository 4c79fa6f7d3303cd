"""Runs side by side whose plans grow while they execute: what the host knows of them, and their extensions.

What the plan of a run has gained since the last look is an extension (``extension.py``). The extensions of all runs
that ask are laid out together (``growing_layout.py``), their tables go to the device (``growing_stack.py``), and the
loop of planned runs executes them. What was recorded is kept for the planners (``told.py``).

A checkpoint also holds all that the planners were told. Resumed runs are planned again from the start. Their planners
are told the same results again, up to the checkpoint; from then on the device trains.
"""

from __future__ import annotations

import time as clock_time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from fedjax_async.base import check
from fedjax_async.clock import Record
from fedjax_async.engine.checkpoint import Snapshot
from fedjax_async.engine.components import first_states
from fedjax_async.engine.defaults import default_batching, default_lanes, default_width
from fedjax_async.engine.evaluation import EvaluationPoints
from fedjax_async.engine.execution import Execution
from fedjax_async.engine.extension import ExtensionWork, Growing
from fedjax_async.engine.flat import flattened, said_of
from fedjax_async.engine.growing_layout import Room, growing_layout
from fedjax_async.engine.growing_stack import GrowingStack, Held
from fedjax_async.engine.layout import Layout
from fedjax_async.engine.loop import go_on, snapshot_of
from fedjax_async.engine.members import Member
from fedjax_async.engine.outset import Outset
from fedjax_async.engine.probes import described
from fedjax_async.engine.record import EngineResult
from fedjax_async.engine.scores import Moment, Scores
from fedjax_async.engine.stack_facts import StackFacts, first_facts, stack_facts
from fedjax_async.engine.stacking import layout_of, make_member, shape_of
from fedjax_async.engine.tables import StackShape
from fedjax_async.engine.told import Told
from fedjax_async.engine.watching import Observer, Watcher
from fedjax_async.types import Schedule

WAVES_AHEAD = 3  # full waves of trained uploads that may wait in the stores until they arrive


class Asked(NamedTuple):
    """What a planner asks for: execute what is new in ``record``.

    ``wanted``: a job under way to train now. ``spent``: the plan is complete, see ``GrowingPoints.end``.
    """

    record: Record
    wanted: int | None = None
    spent: bool | None = None


class _Run:
    """What the host knows of a run: its plan, dealt to slots, lanes and rows, its evaluations, and what it was told."""

    def __init__(self, outset: Outset, width: int, lanes: int) -> None:
        o = self.outset = outset
        start = EvaluationPoints(np.zeros(1, np.int64), np.zeros(1))
        given = (o.params, o.key, start, o.norm_limit, o.probes, o.measures)
        self.nominal = make_member(o.components, o.nominal, *given)._replace(facts=o.facts)
        _, memory, kept = first_states(o.components, o.params, o.facts)
        stateful = bool(jax.tree.leaves(kept))
        self.all_applied = o.all_arrive or not stateful
        ahead = o.in_flight if o.asks else min(o.in_flight, WAVES_AHEAD * width * lanes)
        self.rows = width + -(-ahead // lanes)
        self.growing = Growing(
            o.local_steps,
            personal=bool(jax.tree.leaves(memory)),
            stateful=stateful,
            max_width=width,
            lanes=lanes,
            rows=self.rows,
        )
        self.told = Told(self.nominal.probes)
        self.work = self.growing.nothing()
        self.due: list[int] = []  # how many arrivals come before each evaluation of the newest extension
        self.evaluated = -1  # arrivals applied before the newest evaluation, -1 if there is none
        self.asked = self.applied = 0  # extensions, and arrivals

    def gain(self, request: Asked | None) -> ExtensionWork:
        """The work for what the plan has gained; nothing without a request."""
        if request is None:
            self.work, self.due = self.growing.nothing(), []
            return self.work
        record, evaluations = request.record, self.outset.evaluations
        work = self.growing.extend(record, request.wanted)
        work = self.work = work._replace(seen=self.told.seen_of(work))
        evaluations.add(work.time, work.closes)
        if request.spent is not None:
            evaluations.end(request.spent)
        self.due = evaluations.due(work.first)
        self.evaluated = self.due[-1] if self.due else self.evaluated
        self.told.decided(record.client, evaluations)
        self.asked, self.applied = self.asked + 1, record.applied
        return work

    @property
    def member(self) -> Member:
        """The run as a member of the stack of the newest extension."""
        return self.nominal._replace(
            points=self.outset.evaluations.points, applied=np.array(self.work.applied, np.bool_)
        )


class GrowingRuns:
    """Runs side by side whose plans grow.

    ``how``: all but ``devices``, ``memory_limit`` and ``observer``. ``observers``: one a run. ``least``: the least
    sizes of the tables. ``seconds``: real time that the host spent on extensions, without training, evaluation and
    compilation.
    """

    def __init__(
        self,
        outsets: Sequence[Outset],
        how: Execution,
        observers: Sequence[Observer | None],
        least: StackShape | None = None,
    ) -> None:
        for name in ("devices", "memory_limit"):
            check.require(getattr(how, name) is None, name, getattr(how, name), "left out in a run with a policy")
        outsets = [o._replace(components=flattened(o.components)) for o in outsets]
        first, self._how = outsets[0], how
        batching, lanes = how.batching or default_batching(), default_lanes() if how.lanes is None else how.lanes
        width = default_width(first.params) if how.max_width is None else how.max_width
        several = len(outsets) > 1  # then a run fills only a part of a batch, and rows cost memory
        self._runs = [_Run(o, min(width, o.in_flight) if several else width, lanes) for o in outsets]
        room = self._room = Room(batching, lanes, width, len(outsets) * max(run.rows for run in self._runs))
        members = [run.nominal for run in self._runs]
        given = (_facts(self._runs, room), room, sum(o.in_flight for o in outsets), least or StackShape(0, 0, 0, 0, 0))
        models = any(one is not None and one.models for one in observers)
        self._device = GrowingStack(*given, per_client=first.per_client, models=models)
        self._watcher, self._scores = Watcher([m.points for m in members], observers), Scores([], {})
        self._extensions, self._executed, self.seconds = 0, np.zeros(2, np.int64), 0.0
        self._finished = set[int]()
        self._snapshot: Snapshot | None = None  # if there is a checkpoint
        self._held: Held | None = None  # the state in it
        self._past = np.zeros(len(outsets), np.int64)  # extensions of each run in it
        if how.keeper is not None:
            how.keeper.identify("batches (cores, lanes, max_width)", [batching, lanes, width])
            how.keeper.identify("probes", described(members[0].probes))
            how.keeper.identify("content", sorted(self._runs[0].told.content()))
            for name, value in said_of(first.components).items():
                how.keeper.identify(name, value)
            self._snapshot = how.keeper.restore()

    @property
    def repeats(self) -> bool:
        """Whether a checkpoint has more extensions."""
        return self._snapshot is not None and self._extensions < self._snapshot.turns

    def ended(self, run: int) -> bool:
        """Whether an observer has stopped a run; if its uploads differ in size, all train, to count their bytes."""
        one = self._runs[run]
        if self.repeats:
            return one.asked == self._past[run] and not one.outset.evaluations.complete
        return run in self._watcher.ends and not one.told.sizes_differ

    # --- an extension -----------------------------------------------------------------------------

    def extend(self, requests: Mapping[int, Asked]) -> None:
        """Execute an extension of each run that asks for it."""
        if not requests:
            return
        begin = clock_time.perf_counter()
        works = [run.gain(requests.get(r)) for r, run in enumerate(self._runs)]
        layout = growing_layout(works, max(run.growing.slots for run in self._runs), self._room)
        self._executed += sum(map(len, layout.dealt.turns)), layout.executed_steps
        members = [run.member for run in self._runs]
        points = [m.points for m in members]
        self._watcher.follow(points)
        self._scores.follow(points, self._due(layout))
        self.seconds += clock_time.perf_counter() - begin
        self._extensions += 1
        if self._extensions == 1:
            self._device.begin(layout, members)
            self._read_past()
        if self._snapshot is not None and self._extensions <= self._snapshot.turns:
            self._repeat(requests, layout, members)
            return
        begin = clock_time.perf_counter()
        if self._extensions > 1:
            self._device.fit(layout, members)
        self.seconds += clock_time.perf_counter() - begin
        recorded = self._device.execute(self._scores, self._watcher, self._how.on_bad, sends=self._extensions > 1)
        begin = clock_time.perf_counter()
        self._note(requests, layout, *recorded)
        self.seconds += clock_time.perf_counter() - begin
        self._look_around()

    def _due(self, layout: Layout) -> dict[int, list[Moment]]:
        """The evaluations of the extension, by the number of its positions after which they are due."""
        due: dict[int, list[Moment]] = {}
        received, ranks = int(layout.dealt.bounds[-1]), layout.slots.ranks
        for r, run in enumerate(self._runs):
            for count in run.due:
                own = run.work.at[count - run.work.first]  # the run is evaluated before it receives this one
                stop = received
                if own < run.work.received:
                    at = layout.positions[r][own] if own else 0
                    stop = int(ranks[np.searchsorted(ranks, at, side="right") - 1])
                due.setdefault(stop, []).append((r, count))
        return due

    def _note(
        self,
        requests: Mapping[int, Asked],
        layout: Layout,
        recorded: Mapping[str, np.ndarray],
        probed: Mapping[str, dict[str, np.ndarray]],
    ) -> None:
        """Keep what was recorded."""
        info = self._device.held.stores[0].info
        for r in requests:
            work, told = self._runs[r].work, self._runs[r].told
            position, applied = layout.positions[r][: work.received], work.applied[: work.received]
            rows = {name: column[position] for name, column in recorded.items()}
            if not all(applied):  # for jobs trained in vain, only the client's columns are written
                rows |= {name: np.where(applied, rows[name], rows[name].dtype.type(0)) for name in rows.keys() - info}
            seen = {name: {key: column[position] for key, column in one.items()} for name, one in probed.items()}
            told.note(work, rows, seen)

    def _look_around(self) -> None:
        """What does not concern learning: checkpoints, the progress bar, observers."""
        position, keeper, progress = sum(run.applied for run in self._runs), self._how.keeper, self._how.progress
        complete = all(run.outset.evaluations.complete for run in self._runs)
        if keeper is not None and keeper.due(position) and not complete:
            contents = [run.told.content() for run in self._runs]
            asked = [np.array([run.asked for run in self._runs])] if len(self._runs) > 1 else []
            state = (self._device.held, contents, asked)
            keeper.save(position, snapshot_of(self._extensions, state, self._scores, self._watcher))
        came = [run.work for run in self._runs if run.work.time]
        if progress is not None and came:
            total = sum(max(run.applied, len(run.outset.nominal.job)) for run in self._runs)
            staleness = float(np.mean([value for work in came for value in work.staleness]))
            time = max(work.time[-1] for work in came)
            given = {"time": float(time), "staleness": staleness, "accuracy": self._scores.latest()}
            progress(position, total, **given)
        self._watcher.hand_over(wait=True)

    # --- checkpoints ------------------------------------------------------------------------------

    def _read_past(self) -> None:
        """Read from the checkpoint what the planners were told before it was taken."""
        if self._how.keeper is None or self._snapshot is None:
            return
        carry = self._device.held.carry
        told = [run.told.structure(carry.records, carry.probes) for run in self._runs]
        several = len(self._runs) > 1
        count = sum(one.num_leaves for one in told) + several
        self._held = self._how.keeper.fitted(self._snapshot.leaves, self._device.held, count)
        leaves = self._snapshot.leaves[-count:]
        for run, structure in zip(self._runs, told):
            run.told.read(structure, leaves[: structure.num_leaves])
            leaves = leaves[structure.num_leaves :]
        self._past = leaves[0] if several else np.array([self._snapshot.turns])
        self._scores.at = dict(self._snapshot.scores)

    def _repeat(self, requests: Mapping[int, Asked], layout: Layout, members: Sequence[Member]) -> None:
        """Tell the results of an extension again; after the last one in the checkpoint the device takes over."""
        for r in requests:
            self._runs[r].told.repeat(self._runs[r].work)
        if self.repeats:
            self._device.measure_up(layout)
        elif self._snapshot is not None:
            self._device.fit(layout, members, self._held)
            go_on(self._snapshot, self._scores, self._watcher, self._runs[0].outset.params)

    # --- what planners are told -------------------------------------------------------------------

    def finished(self, run: int, job: int) -> tuple[float, int]:
        """Norm and bits of the upload of a job that is trained and under way."""
        lane, row = self._runs[run].growing.where(job)
        store, row = self._device.held.stores[lane], row * len(self._runs) + run
        norm, bits = jax.device_get((store.norm[row], store.info["bits"][row] if "bits" in store.info else 0))
        return float(norm), int(bits)

    def scores(self, run: int) -> Mapping[str, object]:
        """The newest evaluation of a run, empty if there is none; on the device until it is read."""
        newest = self._runs[run].evaluated
        return self._scores.at[run, newest] if newest >= 0 else {}

    def told(self, run: int) -> Told:
        """What the planner of a run was told."""
        return self._runs[run].told

    def losses(self, run: int, clients: np.ndarray) -> np.ndarray:
        """The mean loss of a run's model on each client's examples; float64, one for each of ``clients``."""
        return self._device.losses(run, clients)

    # --- the end ----------------------------------------------------------------------------------

    def result(self, run: int, schedule: Schedule) -> EngineResult:
        """The result of a run that is executed to its end; ``schedule``: its whole plan."""
        one, ends, room = self._runs[run], self._watcher.ends, self._room
        points = one.outset.evaluations.points
        rows = ends[run][0] + 1 if run in ends else len(points.time)
        batches, executed = self._executed.tolist()
        counters = {
            "waves": one.growing.waves,
            "mean_width": one.applied / max(one.growing.waves, 1),
            "batches": batches,
            "widths": list(room.widths),
            "slots": len(self._runs) * max(other.growing.slots for other in self._runs),
            "useful_steps": sum(other.growing.useful_steps for other in self._runs),
            "executed_steps": executed,
        }
        recorded = one.told.recorded(schedule, int(points.position[rows - 1]))
        stack, carry = self._device.stack, self._device.held.carry
        found: EngineResult = stack.result_of(carry, self._scores, self._watcher, run, recorded, counters)
        self._finished.add(run)
        if len(self._finished) == len(self._runs):
            self.close()
        return found

    def stop(self, run: int) -> None:
        """The run ends where its observer stopped it."""
        self._runs[run].outset.evaluations.stop()

    def close(self) -> None:
        """End the host threads."""
        self._device.close()


def _facts(runs: Sequence[_Run], room: Room) -> StackFacts:
    """What programs depend on, as far as it is known or, off a CPU, expected from the nominal plans."""
    members, all_applied = [run.nominal for run in runs], all(run.all_applied for run in runs)
    if jax.default_backend() == "cpu":
        return first_facts(members, all_applied)
    layout = layout_of(members, max_width=room.max_width, lanes=room.lanes, batching=room.batching)
    return stack_facts(members, layout, shape_of(layout), all_applied)
