"""Execute a plan that is still being made, in waves: the fast engine of adaptive runs.

The planner calls :class:`WavesExecutor` whenever the server looks. What the plan has gained since then is an extension
(``extension.py``): its tables go to the device, its jobs are trained by the same programs as those of a planned
run, and what was recorded comes back, which is what the look waits for.

A checkpoint also holds all that the planner was told. A run that goes on from it is planned again from the start, and
told the same, until the device takes over.
"""

from __future__ import annotations

import contextlib
import itertools
import time as clock_time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.clock import Ended, Record
from fedjax_async.clock.decisions import Table
from fedjax_async.engine import programs
from fedjax_async.engine.batches import Batch, Lanes
from fedjax_async.engine.checkpoint import Keeper, Snapshot
from fedjax_async.engine.components import bound, rule_of, shapes_of_server
from fedjax_async.engine.devices import to_devices
from fedjax_async.engine.evaluation import Points, differs
from fedjax_async.engine.extension import Growing, Work
from fedjax_async.engine.kernels import Carry, JobBuffers
from fedjax_async.engine.measures import inputs_of
from fedjax_async.engine.outset import OBSERVED, Outset
from fedjax_async.engine.probes import described, numbers_of, probe_table
from fedjax_async.engine.programs import Measuring, evaluated
from fedjax_async.engine.record import EngineOutcome, Progress, refuse
from fedjax_async.engine.run import OTHER_PROGRAMS, measured
from fedjax_async.engine.serving import StackFacts
from fedjax_async.engine.stack import Stack, default_batching, default_lanes, default_width, held_out, make_member
from fedjax_async.engine.tables import Shape, event_columns, make_tables, padded_length
from fedjax_async.engine.trainers import Trainers
from fedjax_async.engine.watching import Observer, Watcher
from fedjax_async.types import Schedule

LEAST = 128  # positions and writes that the tables of an extension hold at least
AHEAD = 3  # full waves of uploads that may wait in the stores
OWN = ("job", "applied", "values_bits")  # columns of the log that the planner is not told


class _Held(NamedTuple):
    """What the device holds between two extensions."""

    carry: Carry
    stores: tuple[JobBuffers, ...]  # of each lane, trained uploads


class WavesExecutor:
    """Trains an adaptive run in waves. The options are those of ``run_waves``, the methods of ``clock.Executor``."""

    def __init__(
        self,
        outset: Outset,
        *,
        on_bad: str = "reject",
        max_width: int | None = None,
        lanes: int | None = None,
        batching: str | None = None,
        progress: Progress | None = None,
        keeper: Keeper | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._o, self._on_bad, self._progress, self._keeper = outset, on_bad, progress, keeper
        components, params, start = outset.components, outset.params, Points(np.zeros(1, np.int64), np.zeros(1))
        batching = batching or default_batching()
        width = default_width(params) if max_width is None else max_width
        lanes = default_lanes() if lanes is None else lanes
        given = (params, outset.key, start, outset.norm_limit, outset.probes, outset.measures)
        member = make_member(components, outset.nominal, *given)
        _, memory = shapes_of_server(components, params, outset.facts)
        kept = jax.eval_shape(lambda p: bound(components.client, components.hyper).init(p), params)
        ahead = outset.in_flight if outset.asks else min(outset.in_flight, AHEAD * width * lanes)
        self._growing = Growing(
            outset.local_steps,
            personal=bool(jax.tree.leaves(memory)),
            stateful=bool(jax.tree.leaves(kept)),
            batching=batching,
            max_width=width,
            lanes=lanes,
            rows=width + -(-ahead // lanes),
        )
        probes = tuple((name, probe.function) for name, probe in member.probes.items())
        all_applied = outset.all_arrive or not jax.tree.leaves(kept)
        self._facts = StackFacts(len(outset.local_steps), outset.facts.every_closes, all_applied, probes)
        self._member, self._watcher = member, Watcher([start], [observer])
        self._models = observer is not None and observer.models
        self._scores: dict[tuple[int, int], dict[str, Any]] = {}
        self._log, self._probed = Table(), {name: Table() for name in member.probes}
        self._losses, self._finished = list[np.ndarray](), list[tuple[float, int]]()
        self._told, self._told_probed = 0, 0
        self._extensions, self._evaluations = 0, list[int]()
        self._held: _Held | None = None
        self._snapshot: Snapshot | None = None
        self._past: dict[str, Any] | None = None  # what a checkpoint tells, until the device takes over
        if keeper is not None:
            keeper.identify("batches (cores, lanes, max_width)", [batching, lanes, width])
            keeper.identify("probes", described(member.probes))
            self._snapshot = keeper.restore()
        self._lanes, self.seconds = lanes, 0.0  # of the host's looks, beside training and evaluating
        self._trainers: Any = None  # Trainers, once programs are compiled

    # --- what the planner calls -------------------------------------------------------------------

    def advance(self, record: Record) -> dict[str, np.ndarray]:
        """Train and apply all arrivals of ``record``; what was recorded of those not returned before."""
        self._extend(record)
        columns = {name: column[self._told :] for name, column in self._log.columns().items()}
        self._told += len(columns["applied"])
        found = {name: column[columns["applied"]] for name, column in columns.items() if name not in OWN}
        found["accepted"] = found["accepted"] & (found["weight"] != 0)
        if OBSERVED in self._probed:
            seen = self._probed[OBSERVED].columns()
            found |= {name: column[self._told_probed :] for name, column in seen.items() if name != "number"}
            self._told_probed += int(columns["applied"].sum())
        return found

    def finished(self, record: Record, job: int) -> tuple[float, int]:
        """Train a job that is under way; norm and bits of its upload."""
        self._extend(record, job)
        if self._past is not None and len(self._finished) < len(self._past["finished"]):
            norm, bits = self._past["finished"][len(self._finished)]
        else:
            assert self._held is not None
            lane, row = self._growing.where(job)
            store = self._held.stores[lane]
            norm, bits = jax.device_get((store.norm[row], store.info["bits"][row] if "bits" in store.info else 0))
        self._finished.append((float(norm), int(bits)))
        return self._finished[-1]

    def losses(self, clients: np.ndarray) -> np.ndarray:
        """The mean loss of the present model on each client's examples, float64."""
        before = sum(map(len, self._losses))
        if self._past is not None and before < len(self._past["losses"]):
            found = self._past["losses"][before : before + len(clients)]
        else:
            assert self._held is not None
            data, o = self._o.components.data, self._o
            padded = np.resize(clients, 1 << (len(clients) - 1).bit_length())  # few lengths, so few programs
            measure = programs.losses(o.components.model, o.components.server, self._facts)
            server = self._held.carry.server
            found = measure(self._tables, server, data.offset[padded], data.size[padded])
            found = np.asarray(found, np.float64)[: len(clients)]
        self._losses.append(found)
        return found

    def scores(self) -> Mapping[str, Any]:
        """The newest evaluation, empty if there is none."""
        if not self._evaluations:
            return {}
        return {name: value[()] for name, value in jax.device_get(self._scores[0, self._evaluations[-1]]).items()}

    # --- an extension -----------------------------------------------------------------------------

    def _extend(self, record: Record, wanted: int | None = None, spent: bool | None = None) -> None:
        """Execute what is new; ``spent``: nothing follows, see ``Plan.end``."""
        begin = clock_time.perf_counter()
        work = self._growing.extend(record, wanted)
        self.seconds += clock_time.perf_counter() - begin
        own, plan = work.layout.schedules[0], self._o.plan
        came = work.at[:-1]
        plan.add(own.time[came], own.closes[came])
        if spent is not None:
            plan.end(spent)
        self._watcher.follow(plan.points)
        self._extensions += 1
        due = [count for count in plan.due(work.first) if count not in self._evaluations]
        self._evaluations += due
        if self._held is None:
            self._begin(work)
        if self._past is not None and self._extensions <= self._past["extensions"]:
            self._note(self._past_rows(work.received), work)
            self._shape = self._needed(work)
            if self._extensions == self._past["extensions"]:
                self._take_over(work)
            return
        self._fit(work)
        begin = clock_time.perf_counter()
        if self._extensions > 1:
            self._place(work)
        self.seconds += clock_time.perf_counter() - begin
        self._execute(work, due)
        begin = clock_time.perf_counter()
        carry = self._held.carry  # type: ignore[union-attr]
        rows, probed = jax.device_get((carry.records, carry.probes))
        applied, sent = work.applied[: work.received], self._held.stores[0].info  # type: ignore[union-attr]
        rows = {name: column[: work.received] for name, column in rows.items()}
        # of jobs trained in vain only what their clients record is new
        rows |= {
            name: np.where(applied, column, column.dtype.type(0)) for name, column in rows.items() if name not in sent
        }
        self._note(rows, work, probed)
        self.seconds += clock_time.perf_counter() - begin
        self._look_around(work, record)

    def _look_around(self, work: Work, record: Record) -> None:
        """What does not concern learning: bad uploads, observers, checkpoints, the progress bar."""
        log, applied = self._log.columns(), record.applied
        begin = len(self._log) - work.received
        refuse(int(np.sum(log["applied"][begin:] & ~log["accepted"][begin:])), self._on_bad)
        if self._keeper is not None and self._keeper.due(applied) and not self._o.plan.complete:
            self._keeper.save(applied, self._taken())
        if self._progress is not None and len(work.at) > 1:
            own = work.layout.schedules[0]
            staleness = float(np.mean(own.staleness[work.at[:-1]]))
            latest = float(np.mean(self.scores().get("accuracy", np.nan)))
            total = max(applied, len(self._o.nominal.job))
            self._progress(applied, total, time=float(own.time[work.at[-2]]), staleness=staleness, accuracy=latest)
        self._watcher.hand_over(wait=True)
        if self._watcher.all_ended and "bits" not in log:  # uploads of unequal size are all trained, to be counted
            raise Ended

    def _execute(self, work: Work, due: list[int]) -> None:
        """Send, train, receive and evaluate."""
        layout, (carry, stores), called = work.layout, self._held, self._programs  # type: ignore[misc]
        if work.sends and self._extensions > 1:
            send = programs.send(self._o.components.server, self._facts)
            carry = send(self._tables, carry)
        stops = {int(work.at[count - work.first]): count for count in due}
        rejected = None
        for g, group in enumerate(layout.groups):
            low, high = int(layout.bounds[g]), int(layout.bounds[g + 1])
            if group:
                stores = self._train(layout, group, carry, stores)
            lanes = layout.lane[low:high]
            changes = low + 1 + np.flatnonzero(np.diff(lanes))
            cuts = sorted({low, high, *changes.tolist(), *(stop for stop in stops if low <= stop < high)})
            for a, b in itertools.pairwise(cuts):
                if a in stops:
                    self._evaluate(carry, stops.pop(a))
                span = np.array([a, b], np.int32)
                carry, rejected = called.receive(self._tables, carry, stores[layout.lane[a]], span)  # type: ignore[misc]
        for stop in sorted(stops):
            self._evaluate(carry, stops[stop])
        self._held = _Held(carry, stores)
        jax.block_until_ready((carry.rejected, rejected, [store.norm for store in stores]))

    def _train(
        self, layout: Any, group: list[Batch], carry: Carry, stores: tuple[JobBuffers, ...]
    ) -> tuple[JobBuffers, ...]:
        if self._growing.batching == "loop":  # the buffers of the lanes are the stores
            return tuple(self._trainers.train(group, carry))
        for width in {segment.width for batch in group for segment in batch.segments}:
            if width not in self._programs.train:
                one = programs.train(self._o.components.client, width, "vmap", None, None)
                span = np.zeros(4, np.int32)
                lowered = one.lower(self._tables, carry.slots, carry.clients, self._trainers.buffers[0], span)
                self._programs.train[width] = lowered.compile()
        buffers, kept = self._trainers.train(group, carry), list(stores)
        for batch in group:
            rows = np.full(layout.capacity, self._growing.rows, np.int32)
            rows[: batch.jobs] = layout.row[layout.train_order[batch.first : batch.first + batch.jobs]]
            kept[batch.lane] = programs.keep()(kept[batch.lane], buffers[batch.lane], rows)
        return tuple(kept)

    def _evaluate(self, carry: Carry, arrivals: int) -> None:
        """Evaluate after so many arrivals."""
        called, stack = self._programs, self._stack
        time, steps = self._o.plan.moment(arrivals)
        real = self._tables.time.dtype
        now = np.asarray(time, real), np.asarray(steps, np.int32)
        seen = evaluated(carry, stack.tests[0][3] is not None)
        found = called.evaluate(self._tables, seen, np.int32(0), now, *stack.tests[0])
        found = found | measured(stack._replace(tables=self._tables), carry, 0, now)
        copying = called.model if self._watcher.wants_model(0) else None
        model = None if copying is None else copying(self._tables, carry.server, np.int32(0))
        self._scores[0, arrivals] = found
        self._watcher.add((0, arrivals), found, model)

    def _note(self, rows: Mapping[str, np.ndarray], work: Work, probed: Any = None) -> None:
        """Keep what was recorded at the positions of an extension."""
        applied = work.applied[: work.received]
        self._log.append({**rows, "job": work.jobs, "applied": applied})
        count = len(work.at) - 1
        for name, probe in self._member.probes.items():
            numbers = numbers_of(probe, work.first + count)
            numbers = numbers[numbers >= work.first]
            if self._past is not None and probed is None:
                held, known = self._past["probes"][name], len(self._probed[name])
                self._probed[name].append({key: column[known : known + len(numbers)] for key, column in held.items()})
                continue
            at = work.at[numbers - work.first]
            self._probed[name].append({key: column[at] for key, column in probed[name].items()} | {"number": numbers})

    # --- tables and programs ----------------------------------------------------------------------

    def _begin(self, work: Work) -> None:
        """Allocate what the device holds, and compile."""
        o = self._o
        self._shape = self._needed(work)
        data, probes = o.components.data, self._local(work)
        self._tables = make_tables(
            work.layout, self._shape, [data], [o.key], [o.components.hyper], [o.norm_limit], [work.applied], [probes]
        )
        totals = np.array([o.facts.updates], np.int32), np.array([o.facts.server_steps], np.int32)
        self._tables = self._tables._replace(**to_devices(dict(zip(("updates", "server_steps"), totals)), None))
        own = o.per_client and differs(o.components, o.params)
        tests = held_out([self._member], per_client=o.per_client, own=own, sharding=None)
        inputs: list[Any] = [None]
        if o.measures.wants_anything():
            inputs = to_devices(inputs_of([data], [o.nominal], [o.measures], o.per_client), None)
        params = to_devices(o.params, None)
        uncompiled: Any = None
        parts = ([self._member], work.layout, self._shape, self._tables, params, tests, uncompiled)
        self._stack = Stack(*parts, num_bytes=0, inputs=inputs)
        self._compile(work)
        carry = self._programs.start(self._tables, params)
        stores = tuple(tree_zeros(self._store) for _ in range(self._lanes))
        self._held = _Held(carry, stores)
        if self._snapshot is not None:
            self._read_past(self._snapshot)

    def _compile(self, work: Work) -> None:
        o, stack, layout = self._o, self._stack, work.layout
        parts = (o.components.server, o.components.client)
        shapes = programs.shapes_of(*parts, layout, self._shape, self._tables, stack.params, self._facts)
        self._scratch = store = shapes.buffers
        if not layout.whole:
            rows = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((self._growing.rows, *leaf.shape[1:]), leaf.dtype), store
            )
            store = rows._replace(before=(), work=())
        self._store = store
        y = o.components.data.test_y
        labels = bool(np.issubdtype(y.dtype, np.integer))
        own = stack.tests[0][3] is not None
        what = Measuring(o.measures._replace(training=None), own, o.per_client, labels, len(y), 1)
        compiled = programs.compile_programs(
            *parts, o.components.model, layout, self._shape, self._tables, stack.params, stack.tests[0],
            stack.inputs[0], shapes._replace(buffers=store), what=what, facts=self._facts, models=self._models,
        )  # fmt: skip
        self._programs = compiled
        self._stack = stack._replace(programs=compiled, shape=self._shape)
        empty = [np.zeros(0, np.int32)] * 3
        every = Lanes(np.zeros(1), [[Batch(lane, 0, 0, []) for lane in range(self._lanes)]], *empty)

        def train(width: int, tables: Any, carry: Carry, buffers: Any, span: np.ndarray) -> Any:
            return self._programs.train[width](tables, carry.slots, carry.clients, buffers, span)

        if self._trainers is not None:
            self._trainers.close()
        self._trainers = Trainers(every, self._tables, train, lambda: tree_zeros(self._scratch))
        if self._held is not None and layout.whole:
            self._trainers.buffers = list(self._held.stores)

    def _needed(self, work: Work) -> Shape:
        layout, floor = work.layout, getattr(self, "_shape", None)
        positions = padded_length(len(layout.run) + layout.capacity, LEAST)
        writes = padded_length(len(layout.slots.write_slot), LEAST)
        slots = padded_length(layout.slots.count, 1 << (self._o.in_flight + 1).bit_length())
        needed = Shape(1, len(self._o.local_steps), layout.capacity, positions, writes, slots)
        return needed if floor is None else Shape(*map(max, zip(needed, floor)))

    def _fit(self, work: Work) -> None:
        """Make room for longer tables and more slots than before; programs are compiled again then."""
        if (needed := self._needed(work)) == self._shape:
            return
        self._shape = needed
        carry, stores = self._held  # type: ignore[misc]
        self._held = _Held(
            carry._replace(
                slots=_longer(carry.slots, needed.slots),
                records=_longer(carry.records, needed.positions),
                probes=_longer(carry.probes, needed.positions),
            ),
            stores,
        )
        self._place(work)
        self._compile(work)

    def _place(self, work: Work) -> None:
        """Move the tables of an extension to the device."""
        data = self._o.components.data
        columns = event_columns(work.layout, self._shape, [data], [work.applied], [self._local(work)], [0])
        if columns["probing"]:
            constant = ("validation_order", "test_x", "test_y", "test_order")
            columns["probing"] = columns["probing"]._replace(**dict.fromkeys(constant, ()))
            moved = to_devices(columns, None)
            held = {name: getattr(self._tables.probing, name) for name in constant}
            moved["probing"] = moved["probing"]._replace(**held)
        else:
            moved = to_devices(columns, None)
        self._tables = self._tables._replace(**moved)
        self._trainers.on(self._tables)

    def _local(self, work: Work) -> dict[str, Any]:
        """The probes with the numbers of their arrivals within an extension."""
        count = len(work.at) - 1

        def numbers(probe: Any) -> tuple[int, ...]:
            found = numbers_of(probe, work.first + count) - work.first
            return tuple(found[(found >= 0) & (found < count)].tolist())

        return {name: probe._replace(every=1, at=numbers(probe)) for name, probe in self._member.probes.items()}

    # --- checkpoints ------------------------------------------------------------------------------

    def _told_so_far(self) -> dict[str, Any]:
        return {
            "records": self._log.columns(),
            "probes": {name: table.columns() for name, table in self._probed.items()},
            "losses": np.concatenate([np.zeros(0), *self._losses]),
            "finished": np.array(self._finished, np.float64).reshape(-1, 2),
        }

    def _taken(self) -> Snapshot:
        self._watcher.hand_over(wait=True)
        models = {place: jax.tree.leaves(model) for place, model in self._watcher.models.items()}
        leaves, scores = jax.device_get((jax.tree.leaves((self._held, self._told_so_far())), self._scores))
        return Snapshot(self._extensions, leaves, scores, models)

    def _read_past(self, snapshot: Snapshot) -> None:
        """What the planner was told before the checkpoint was taken."""
        assert self._held is not None
        held: Any = jax.tree.structure(self._held)
        carry = self._held.carry
        told = self._told_so_far() | {"records": dict.fromkeys([*carry.records, "job", "applied"], 0)}
        told["probes"] = {name: dict.fromkeys([*columns, "number"], 0) for name, columns in carry.probes.items()}
        self._scores = dict(snapshot.scores)
        count = held.num_leaves
        self._past = jax.tree.unflatten(jax.tree.structure(told), snapshot.leaves[count:])
        self._past |= {"extensions": snapshot.groups, "held": jax.tree.unflatten(held, snapshot.leaves[:count])}

    def _past_rows(self, count: int) -> dict[str, np.ndarray]:
        begin = len(self._log)
        past = self._past["records"].items()  # type: ignore[index]
        return {name: column[begin : begin + count] for name, column in past if name not in ("job", "applied")}

    def _take_over(self, work: Work) -> None:
        """The state of the device at the checkpoint, after its last extension."""
        past, snapshot = self._past, self._snapshot
        assert past is not None and snapshot is not None
        self._held = to_devices(past["held"], None)
        self._place(work)
        self._compile(work)
        structure = jax.tree.structure(self._o.params)
        models = {place: jax.tree.unflatten(structure, found) for place, found in snapshot.models.items()}
        self._watcher.restore(self._scores, models)

    # --- the end ----------------------------------------------------------------------------------

    def finish(self, record: Record, schedule: Schedule, spent: bool) -> EngineOutcome:
        """Execute the rest of a plan that is complete; ``schedule``: all of it. See ``Plan.end`` for ``spent``."""
        if self._watcher.all_ended:
            self._o.plan.stop()
        else:
            with contextlib.suppress(Ended):
                self._extend(record, spent=spent)
        self._trainers.close()
        o, ends, held = self._o, self._watcher.ends, self._held
        assert held is not None
        log, points = self._log.columns(), o.plan.points
        applied, columns = log["applied"], {name: column for name, column in log.items() if name not in OWN[:2]}
        rows = ends[0][0] + 1 if 0 in ends else len(points.time)
        fetched = jax.device_get([self._scores[0, int(position)] for position in points.position[:rows]])
        rule = rule_of(o.components.server, o.components.hyper, o.facts)
        probes = {name: table.columns() for name, table in self._probed.items()}
        growing = self._growing
        vain = np.lexsort((log["job"], np.cumsum(applied), applied))[: int(np.sum(~applied))]
        return EngineOutcome(
            params=ends[0][1] if 0 in ends else jax.device_get(rule.params(held.carry.server)),
            scores={name: np.stack([one[name] for one in fetched]) for name in fetched[0]},
            records={name: column[applied] for name, column in columns.items()},
            in_vain=log["job"][vain],
            in_vain_records={name: column[vain] for name, column in columns.items()},
            counters={
                "waves": growing.waves,
                "mean_width": int(applied.sum()) / max(growing.waves, 1),
                "batches": growing.batches,
                "widths": list(growing.widths),
                "slots": growing.slots,
                "useful_steps": growing.useful_steps,
                "executed_steps": growing.executed_steps,
                "programs": len(self._programs.train) + OTHER_PROGRAMS + (self._programs.measure is not None),
            },
            probes={name: _table(schedule, **table) for name, table in probes.items()},
            rows=rows,
            kept=self._watcher.kept.get(0),
        )


def _table(schedule: Schedule, number: np.ndarray, **columns: np.ndarray) -> dict[str, np.ndarray]:
    return probe_table(schedule, number, number, columns)


def tree_zeros(shapes: Any) -> Any:
    """Arrays of zeros of these shapes."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _longer(table: Any, length: int) -> Any:
    """The same rows, followed by zeros up to ``length``."""
    return jax.tree.map(
        lambda leaf: jnp.concatenate([leaf, jnp.zeros((length - len(leaf), *leaf.shape[1:]), leaf.dtype)]), table
    )
