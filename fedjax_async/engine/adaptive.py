"""Execute a growing plan in waves: the fast engine of adaptive runs.

The planner calls :class:`WavesExecutor` at every look of the policy. What the plan has gained since the last look is an
extension (``extension.py``). Its tables go to the device, the same programs as for a planned run train its jobs
(``growing_stack.py``), and the planner waits for what they recorded (``told.py``).

A checkpoint also holds all that the planner was told. A resumed run is planned again from the start. The planner is
told the same results again, up to the checkpoint; from then on the device trains.
"""

from __future__ import annotations

import contextlib
import itertools
import time as clock_time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fedjax_async.base import check
from fedjax_async.clock import Ended, Record
from fedjax_async.engine.checkpoint import Snapshot
from fedjax_async.engine.components import bound, shapes_of_client, shapes_of_server
from fedjax_async.engine.defaults import default_batching, default_lanes, default_width
from fedjax_async.engine.evaluation import EvaluationPoints
from fedjax_async.engine.execution import Execution
from fedjax_async.engine.extension import ExtensionWork, Growing
from fedjax_async.engine.flat import flattened, said_of
from fedjax_async.engine.growing_stack import GrowingStack, Held
from fedjax_async.engine.kernels import Carry
from fedjax_async.engine.outset import Outset
from fedjax_async.engine.probes import Probes, described
from fedjax_async.engine.record import EngineResult, refuse
from fedjax_async.engine.stack import OTHER_PROGRAMS
from fedjax_async.engine.stack_facts import StackFacts, expected
from fedjax_async.engine.stacking import layout_of, make_member
from fedjax_async.engine.told import Told
from fedjax_async.engine.watching import Watcher
from fedjax_async.types import Schedule, Structure

WAVES_AHEAD = 3  # full waves of trained uploads that may wait in the stores until they arrive


class WavesExecutor:
    """Trains an adaptive run in waves; the methods of ``clock.Executor``.

    ``execution``: the options of :class:`~fedjax_async.engine.execution.Execution` but ``devices`` and
    ``memory_limit``. ``seconds``: real time that the host spent on extensions, without training, evaluation and
    compilation.
    """

    def __init__(self, outset: Outset, **execution: Any) -> None:
        outset = self._o = outset._replace(components=flattened(outset.components))
        how = Execution(**execution)
        for name in ("devices", "memory_limit"):
            check.require(getattr(how, name) is None, name, getattr(how, name), "left out in a run with a policy")
        self._on_bad, self._progress, self._keeper = how.on_bad, how.progress, how.keeper
        keeper, observer = how.keeper, how.observer
        components, params = outset.components, outset.params
        start = EvaluationPoints(np.zeros(1, np.int64), np.zeros(1))
        batching = how.batching or default_batching()
        width = default_width(params) if how.max_width is None else how.max_width
        lanes = default_lanes() if how.lanes is None else how.lanes
        given = (params, outset.key, start, outset.norm_limit, outset.probes, outset.measures)
        member = make_member(components, outset.nominal, *given)
        _, memory = shapes_of_server(components, params, outset.facts)
        kept = shapes_of_client(components, params)
        stateful = bool(jax.tree.leaves(kept))
        ahead = outset.in_flight if outset.asks else min(outset.in_flight, WAVES_AHEAD * width * lanes)
        self._growing = Growing(
            outset.local_steps,
            personal=bool(jax.tree.leaves(memory)),
            stateful=stateful,
            batching=batching,
            max_width=width,
            lanes=lanes,
            rows=width + -(-ahead // lanes),
        )
        probes = tuple((name, probe.function) for name, probe in member.probes.items())
        facts = StackFacts(
            len(outset.local_steps),
            outset.facts.every_closes,
            probes=probes,
            all_applied=outset.all_arrive or not stateful,
        )
        if jax.default_backend() != "cpu":
            facts = expected(facts, member, layout_of([member], max_width=width, lanes=lanes, batching=batching))
        models = observer is not None and observer.models
        self._device = GrowingStack(outset, member, facts, lanes, self._growing.rows, models)
        self._watcher, self._told = Watcher([start], [observer]), Told(member.probes)
        self._scores: dict[tuple[int, int], dict[str, Any]] = {}
        self._extensions, self.seconds = 0, 0.0
        self._evaluated = -1  # arrivals applied before the newest evaluation, -1 if there is none
        self._snapshot: Snapshot | None = None  # if there is a checkpoint
        if keeper is not None:
            keeper.identify("batches (cores, lanes, max_width)", [batching, lanes, width])
            keeper.identify("probes", described(member.probes))
            keeper.identify("content", sorted(self._told.content()))
            for name, value in said_of(components).items():
                keeper.identify(name, value)
            self._snapshot = keeper.restore()

    # --- what the planner calls -------------------------------------------------------------------

    def advance(self, record: Record) -> dict[str, np.ndarray]:
        """Train and apply all arrivals of ``record``; returns the recorded columns of those not returned before."""
        self._extend(record)
        return self._told.new_rows()

    def finished(self, record: Record, job: int) -> tuple[float, int]:
        """Train a job that is under way; returns norm and bits of its upload."""
        self._extend(record, job)
        found = self._told.past_finished()
        if found is None:
            lane, row = self._growing.where(job)
            store = self._device.held.stores[lane]
            norm, bits = jax.device_get((store.norm[row], store.info["bits"][row] if "bits" in store.info else 0))
            found = float(norm), int(bits)
        return self._told.finished(found)

    def losses(self, clients: np.ndarray) -> np.ndarray:
        """The mean loss of the current model on each client's examples; float64, one for each of ``clients``."""
        past = self._told.past_losses(len(clients))
        return self._told.losses(self._device.losses(clients) if past is None else past)

    def scores(self) -> Mapping[str, Any]:
        """The newest evaluation, empty if there is none."""
        found = jax.device_get(self._scores[0, self._evaluated]) if self._evaluated >= 0 else {}
        return {name: value[()] for name, value in found.items()}

    # --- an extension -----------------------------------------------------------------------------

    def _extend(self, record: Record, wanted: int | None = None, spent: bool | None = None) -> None:
        """Execute what is new in ``record``; ``wanted``: a job under way to train now.

        ``spent``: see ``GrowingPoints.end``.
        """
        begin = clock_time.perf_counter()
        work = self._growing.extend(record, wanted)
        self.seconds += clock_time.perf_counter() - begin
        own, evaluations, device = work.layout.schedules[0], self._o.evaluations, self._device
        came = work.at[:-1]
        evaluations.add(own.time[came], own.closes[came])
        if spent is not None:
            evaluations.end(spent)
        self._watcher.follow(evaluations.points)
        self._extensions += 1
        due = evaluations.due(work.first)
        self._evaluated = due[-1] if due else self._evaluated
        self._told.decided(record.client, evaluations.closes, evaluations.times)
        probes = self._told.local_probes(work)
        if self._extensions == 1:
            device.begin(work, probes)
            self._read_past()
        if self._snapshot is not None and self._extensions <= self._snapshot.turns:
            self._repeat(work, probes)
            return
        begin = clock_time.perf_counter()
        if self._extensions > 1:
            device.fit(work, probes)
        self.seconds += clock_time.perf_counter() - begin
        self._execute(work, due)
        begin = clock_time.perf_counter()
        self._note(work)
        self.seconds += clock_time.perf_counter() - begin
        self._look_around(work, record)

    def _execute(self, work: ExtensionWork, due: list[int]) -> None:
        """Send, train, receive and evaluate; waits for the device."""
        layout, device = work.layout, self._device
        carry, stores = device.held
        if work.sends and self._extensions > 1:
            carry = device.send(work, carry)
        stops = {int(work.at[count - work.first]): count for count in due}
        for g, turn in enumerate(layout.dealt.turns):
            low, high = int(layout.dealt.bounds[g]), int(layout.dealt.bounds[g + 1])
            if turn:
                stores = device.train(layout, turn, carry, stores)
            changes = low + 1 + np.flatnonzero(np.diff(layout.dealt.lane[low:high]))
            cuts = sorted({low, high, *changes.tolist(), *(stop for stop in stops if low <= stop < high)})
            for a, b in itertools.pairwise(cuts):
                if a in stops:
                    self._evaluate(carry, stops.pop(a))
                span, store = np.array([a, b], np.int32), stores[layout.dealt.lane[a]]
                carry, _ = device.stack.programs.receive(device.tables, carry, store, span)
        for stop in sorted(stops):
            self._evaluate(carry, stops[stop])
        device.held = Held(carry, stores)
        jax.block_until_ready((carry.rejected, [store.norm for store in stores]))

    def _evaluate(self, carry: Carry, arrivals: int) -> None:
        """Evaluate after ``arrivals`` arrivals."""
        device = self._device
        found = self._scores[0, arrivals] = device.evaluate(carry, self._o.evaluations.moment(arrivals))
        copying = device.stack.programs.model if self._watcher.wants_model(0) else None
        model = None if copying is None else copying(device.tables, carry.server, np.int32(0))
        self._watcher.add((0, arrivals), found, model)

    def _note(self, work: ExtensionWork) -> None:
        """Fetch and keep what was recorded."""
        carry, stores = self._device.held
        rows, probed = jax.device_get((carry.records, carry.probes))
        applied, received = work.applied[: work.received], work.received
        for name, column in rows.items():
            rows[name] = column[:received]
            if name not in stores[0].info:  # for jobs trained in vain, only the client's columns are written
                rows[name] = np.where(applied, rows[name], column.dtype.type(0))
        self._told.note(work, rows, probed)

    def _look_around(self, work: ExtensionWork, record: Record) -> None:
        """What does not concern learning: bad uploads, checkpoints, the progress bar, observers."""
        refuse(self._told.rejected, self._on_bad)
        if self._keeper is not None and self._keeper.due(record.applied) and not self._o.evaluations.complete:
            self._keeper.save(record.applied, self._taken())
        if self._progress is not None and len(work.at) > 1:
            own = work.layout.schedules[0]
            staleness = float(np.mean(own.staleness[work.at[:-1]]))
            latest = float(self.scores()["accuracy"])  # the start is always evaluated
            total = max(record.applied, len(self._o.nominal.job))
            time = float(own.time[work.at[-2]])
            self._progress(record.applied, total, time=time, staleness=staleness, accuracy=latest)
        self._watcher.hand_over(wait=True)
        self._end_if_stopped()

    def _end_if_stopped(self) -> None:
        if self._watcher.all_ended and not self._told.sizes_differ:  # else all train, to count their bytes
            raise Ended

    # --- checkpoints ------------------------------------------------------------------------------

    def _taken(self) -> Snapshot:
        self._watcher.hand_over(wait=True)
        models = {moment: jax.tree.leaves(model) for moment, model in self._watcher.models.items()}
        kept = jax.tree.leaves(self._device.held) + jax.tree.leaves(self._told.content())
        leaves, scores = jax.device_get((kept, self._scores))
        return Snapshot(self._extensions, leaves, scores, models)

    def _read_past(self) -> None:
        """Read from the checkpoint what the planner was told before it was taken."""
        if self._keeper is not None and self._snapshot is not None:
            carry, held = self._device.held.carry, jax.tree.leaves(self._device.held)
            count, told = len(held), self._told.structure(carry.records, carry.probes)
            self._keeper.require_count(len(self._snapshot.leaves), count + told.num_leaves)
            self._keeper.require_types(self._snapshot.leaves[:count], held)
            self._told.read(told, self._snapshot.leaves[count:])
            self._scores = dict(self._snapshot.scores)

    def _repeat(self, work: ExtensionWork, probes: Probes) -> None:
        """Tell the results of an extension again; after the last one in the checkpoint the device takes over."""
        self._told.repeat(work)
        self._device.measure_up(work)
        if self._snapshot is None or self._extensions < self._snapshot.turns:
            return
        structure: Structure = jax.tree.structure(self._device.held)
        held = jax.tree.unflatten(structure, self._snapshot.leaves[: structure.num_leaves])
        self._device.take_over(held, work, probes)
        of_params = jax.tree.structure(self._o.params)
        models = {moment: jax.tree.unflatten(of_params, found) for moment, found in self._snapshot.models.items()}
        self._watcher.restore(self._scores, models)
        self._end_if_stopped()

    # --- the end ----------------------------------------------------------------------------------

    def finish(self, record: Record, schedule: Schedule, spent: bool) -> EngineResult:
        """Execute the rest of a complete plan; ``schedule``: the whole plan; ``spent``: see ``GrowingPoints.end``."""
        if self._watcher.all_ended and not self._told.sizes_differ:
            self._o.evaluations.stop()
        else:
            with contextlib.suppress(Ended):
                self._extend(record, spent=spent)
        self._device.close()
        o, ends, growing, compiled = self._o, self._watcher.ends, self._growing, self._device.stack.programs
        rows = ends[0][0] + 1 if 0 in ends else len(o.evaluations.points.time)
        scores = jax.device_get([self._scores[0, int(position)] for position in o.evaluations.points.position[:rows]])
        rule = bound(o.components.rule, o.components.hyper)
        records, in_vain, in_vain_records = self._told.records()
        return EngineResult(
            params=ends[0][1] if 0 in ends else jax.device_get(rule.params(self._device.held.carry.server)),
            scores={name: np.stack([one[name] for one in scores]) for name in scores[0]},
            records=records,
            in_vain=in_vain,
            in_vain_records=in_vain_records,
            counters={
                "waves": growing.waves,
                "mean_width": record.applied / max(growing.waves, 1),
                "batches": growing.batches,
                "widths": list(growing.widths),
                "slots": growing.slots,
                "useful_steps": growing.useful_steps,
                "executed_steps": growing.executed_steps,
                "programs": len(compiled.train) + OTHER_PROGRAMS + (compiled.measure is not None),
            },
            probes=self._told.tables(schedule, int(o.evaluations.points.position[rows - 1])),
            rows=rows,
            kept=self._watcher.kept.get(0),
        )
