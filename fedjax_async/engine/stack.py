"""A stack: runs that advance side by side, laid out, moved to the device and compiled. One run is a stack of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from fedjax_async.base import check
from fedjax_async.clock import check_schedule
from fedjax_async.clock.record import SLACK
from fedjax_async.engine.components import Components, bound, facts_of, shapes_of_client, shapes_of_server
from fedjax_async.engine.defaults import default_batching, default_width, width_costs
from fedjax_async.engine.devices import TooLarge, bytes_of, everywhere, temporary_bytes, to_devices
from fedjax_async.engine.evaluation import (
    EvaluationPoints,
    RunTests,
    Scores,
    differs,
    own_tests,
    owners,
    validation_part,
)
from fedjax_async.engine.evaluator import Evaluator
from fedjax_async.engine.flat import Flat, flattened
from fedjax_async.engine.kernels import Carry, JobBuffers
from fedjax_async.engine.layout import Layout, digest, make_layout
from fedjax_async.engine.measures import NOTHING, Inputs, Measures, inputs_of, require_measurable
from fedjax_async.engine.probes import NO_PROBES, Probes, described, numbers_of, probe_table, resolved_probes
from fedjax_async.engine.programs import Programs, compile_programs, shapes_of
from fedjax_async.engine.record import EngineResult
from fedjax_async.engine.scoring import Measuring
from fedjax_async.engine.stack_facts import stack_facts
from fedjax_async.engine.streaming import Feed, make_feed
from fedjax_async.engine.tables import DeviceTables, StackShape, make_tables, padded_length
from fedjax_async.engine.unsent import all_training
from fedjax_async.engine.watching import Watcher
from fedjax_async.engine.widths import ladder
from fedjax_async.types import Array, Key, Params, Schedule, ServerAlgorithm, State

# Besides one training program per width: start, buffers, receive, evaluate.
OTHER_PROGRAMS = 4
# The least number of slots, so that small runs of different methods share programs.
LEAST_SLOTS = 12


class Member(NamedTuple):
    """One run of a stack, before it is laid out; :func:`make_member` makes one."""

    components: Components
    schedule: Schedule  # its arrivals include the jobs that are trained in vain
    params: Params
    key: Key
    points: EvaluationPoints  # positions count arrivals of ``schedule``
    norm_limit: float
    applied: np.ndarray  # bool[E], which of its arrivals the server applies; the others are trained in vain
    probes: Probes = NO_PROBES
    measures: Measures = NOTHING


def make_member(
    components: Components,
    schedule: Schedule,
    params: Params,
    key: Key,
    points: EvaluationPoints,
    norm_limit: float = float("inf"),
    probes: Mapping[str, Any] | None = None,
    measures: Measures = NOTHING,
) -> Member:
    """The run of a schedule, with the jobs that are trained in vain; ``ValueError`` for invalid arguments."""
    schedule = check_schedule(schedule)
    require_measurable(components.data, measures)
    chosen = resolved_probes(probes, components.data, len(schedule.job))
    kept = shapes_of_client(components, params)
    training = all_training(schedule, stateful=bool(jax.tree.leaves(kept)))
    points = points._replace(position=training.position[points.position])
    return Member(components, training.schedule, params, key, points, norm_limit, training.applied, chosen, measures)


class Stack(NamedTuple):
    """Runs with a server that advance side by side, laid out, moved to the device and compiled: ``loop.Runs``."""

    members: Sequence[Member]
    layout: Layout
    shape: StackShape
    tables: DeviceTables
    params: Params  # [R, ...]; without the axis where R = 1
    tests: list[RunTests]  # per member
    programs: Programs
    num_bytes: int  # on the device while it runs: tables, carry, buffers and temporary memory of training
    feed: Feed | None = None
    sharding: NamedSharding | None = None  # of what every device holds
    inputs: Sequence[Inputs | None] = ()  # per member: for what is measured besides loss and accuracy
    every_test: RunTests | None = None  # the tests of all runs together, if a program evaluates all of them at once

    @property
    def ranks(self) -> np.ndarray | None:
        """The bounds of the ranks, if whole ranks are applied at once."""
        return self.layout.ranks if self.programs.by_ranks else None

    def start(self) -> Carry:
        """The carry at the start: the first messages are sent."""
        carry: Carry = self.programs.start(self.tables, self.params)
        return carry

    def buffers(self, carry: Carry) -> JobBuffers:
        """Empty buffers of a lane."""
        empty: JobBuffers = self.programs.buffers(self.tables, carry)
        return empty

    def train(
        self, width: int, tables: DeviceTables, carry: Carry, buffers: JobBuffers, span: np.ndarray
    ) -> JobBuffers:
        """Train a batch."""
        trained: JobBuffers = self.programs.train[width](tables, carry.slots, carry.clients, buffers, span)
        return trained

    def apply(self, carry: Carry, buffers: JobBuffers, low: int, high: int) -> tuple[Carry, Array]:
        """The server receives the positions ``low .. high-1``."""
        span = np.array([low, high] if self.ranks is None else np.searchsorted(self.ranks, [low, high]), np.int32)
        applied: tuple[Carry, Array] = self.programs.receive(self.tables, carry, buffers, span)
        return applied

    def scores(self) -> Scores:
        """When each run is evaluated: after some of its arrivals."""
        return Scores([m.points for m in self.members], self.layout.positions, self.ranks)

    def evaluator(self, watcher: Watcher, trainers: Any) -> Evaluator:
        """The evaluation of runs; it needs no ``trainers``."""
        del trainers
        return Evaluator(self, watcher)

    def identity(self, carry: Carry) -> dict[str, object]:
        """Batches, probes, and whether states are flat."""
        found: dict[str, object] = {
            "batches (cores, lanes, max_width)": digest(self.layout),
            "probes": described(self.members[0].probes),
        }
        return found | ({"arrays": "flat states"} if isinstance(carry.server, Flat) else {})

    def until(self, carry: Carry, watcher: Watcher, run: int) -> tuple[int, int]:
        """How many arrivals of a run belong to its result, and how many must be received until it is complete.

        The second number is larger for a stopped run whose uploads differ in size. Then all uploads that reached the
        server before the stop must be trained, as only training tells their sizes.
        """
        member = self.members[run]
        if run not in watcher.ends:
            return (len(member.schedule.job),) * 2
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
        state = (
            carry.server if self.shape.runs == 1 else jax.tree.map(lambda leaf: leaf[run], jax.device_get(carry.server))
        )
        rule = bound(member.components.server, member.components.hyper)
        until, known = self.until(carry, watcher, run)
        rows = watcher.ends[run][0] + 1 if run in watcher.ends else len(member.points.time)
        position, sent = layout.positions[run][:known], member.applied[:known]
        own = np.unique(np.searchsorted(layout.waves, position[:until], side="right"))
        columns = {name: np.asarray(column)[position] for name, column in jax.device_get(carry.records).items()}
        applied, seen = np.flatnonzero(member.applied), {}
        for name, probe in member.probes.items():
            numbers = numbers_of(probe, len(applied))
            numbers = numbers[applied[numbers] < until]
            probed = jax.device_get(carry.probes[name])
            values = {c: np.asarray(v)[position][applied[numbers]] for c, v in probed.items()}
            seen[name] = probe_table(member.schedule, applied[numbers], numbers, values)
        return EngineResult(
            params=watcher.ends[run][1] if run in watcher.ends else _model(rule, state, self.tables.time.dtype),
            scores=scores.columns(run, rows),
            records={name: column[sent] for name, column in columns.items()},
            in_vain=member.schedule.job[:known][~sent],
            in_vain_records={name: column[~sent] for name, column in columns.items()},
            counters={
                "waves": len(own),
                "mean_width": until / len(own) if len(own) else 0.0,
                "batches": sum(map(len, layout.turns)),
                "widths": list(layout.widths),
                "slots": layout.slots.count,
                "useful_steps": layout.useful_steps,
                "executed_steps": layout.executed_steps,
                "programs": len(self.programs.train) + OTHER_PROGRAMS + (self.programs.measure is not None),
            },
            probes=seen,
            rows=rows,
            kept=watcher.kept.get(run),
        )


def _model(rule: ServerAlgorithm, state: State, real: np.dtype) -> Params:
    """The model of a server state, on the host; each thread has its own setting of 64 bits."""
    with jax.enable_x64(real == np.float64):
        params: Params = jax.device_get(rule.params(state))
    return params


def layout_of(
    members: Sequence[Member],
    *,
    max_width: int | None = None,
    lanes: int = 1,
    batching: str | None = None,
    devices: int = 1,
    fill: bool = True,
) -> Layout:
    """The layout of a stack. Its components decide how wide a batch may be and whether messages are personal.

    The options are those of :func:`~fedjax_async.engine.run_waves` and :func:`~fedjax_async.engine.make_layout`.
    ``ValueError`` for invalid ones.
    """
    first = members[0]
    top = devices * default_width(first.params) if max_width is None else max_width
    check.whole("max_width", top)
    check.whole("lanes", lanes)
    _, memory = shapes_of_server(first.components, first.params, facts_of(first.schedule))
    return make_layout(
        [m.schedule for m in members],
        max_width=top,
        lanes=lanes,
        devices=devices,
        batching=batching or default_batching(),
        personal=bool(jax.tree.leaves(memory)),
        fill=fill and not first.components.data.streamed,
        costs=width_costs(first.components.model, first.params, first.components.data.x),
    )


def shape_of(layout: Layout) -> StackShape:
    """The sizes that the layout's tables need, rounded up so that similar stacks share programs."""
    spare = jax.default_backend() != "cpu"  # the last slot, for a message that is sent in vain
    slots = max(LEAST_SLOTS, layout.slots.count + spare)
    return StackShape(
        runs=len(layout.schedules),
        num_clients=layout.schedules[0].num_clients,
        capacity=layout.capacity,
        positions=padded_length(len(layout.run) + layout.capacity),
        writes=padded_length(len(layout.slots.write_slot)),
        slot_count=next(s for s in ladder(2 * slots) if s >= slots),
    )


def held_out(
    members: Sequence[Member], *, per_client: bool, own: bool, sharding: NamedSharding | None
) -> list[RunTests]:
    """Per member, on the device: test inputs, targets, the owner of each test example, own tests, validation part.

    ``own``: whether clients have models of their own, which are evaluated on their own tests; without, those are None.
    So are the owners without ``per_client``.
    """
    data = [m.components.data for m in members]
    shared = to_devices({id(d.test_x): (d.test_x, d.test_y) for d in data}, sharding)
    held_back = max(0 if (part := validation_part(d)) is None else len(part.order) for d in data)
    split = [
        (
            owners(d) if per_client else None,
            own_tests(d, m.schedule) if own else None,
            validation_part(d, padded_length(held_back, 512)),  # equally long for runs that share a program
        )
        for d, m in zip(data, members)
    ]
    return [(*shared[id(d.test_x)], *to_devices(one, sharding)) for d, one in zip(data, split)]


def tests_together(tests: Sequence[RunTests], runs: int) -> RunTests | None:
    """What :func:`held_out` made, with an axis of ``runs`` behind the test set, which must be one; None if it is not.

    Rows beyond the members repeat the first one.
    """
    x, y, *_ = tests[0]
    if runs == 1 or any(one[0] is not x or one[1] is not y for one in tests):
        return None
    every = [one[2:] for one in tests] + [tests[0][2:]] * (runs - len(tests))
    return x, y, *jax.tree.map(lambda *leaves: jnp.stack(leaves), *every)


def make_stack(
    members: Sequence[Member],
    layout: Layout,
    shape: StackShape,
    *,
    per_client: bool = False,
    mesh: Mesh | None = None,
    memory_limit: int | None = None,
    models: bool = False,
) -> Stack:
    """Move a stack to the device and compile its programs; ``models``: also the program that copies a model.

    Raises ``TooLarge`` if it needs more than ``memory_limit`` bytes, before it compiles if that is known by then.
    """
    members = [m._replace(components=flattened(m.components)) for m in members]
    components = members[0].components
    data = [m.components.data for m in members]
    feed = make_feed(layout, data[0], everywhere(mesh)) if data[0].streamed else None
    tables = make_tables(
        layout,
        shape,
        data,
        [m.key for m in members],
        [m.components.hyper for m in members],
        [m.norm_limit for m in members],
        [m.applied for m in members],
        [m.probes for m in members],
        feed=feed,
        sharding=everywhere(mesh),
    )
    every = [m.params for m in members] + [members[0].params] * (shape.runs - len(members))
    params = every[0] if shape.runs == 1 else jax.tree.map(lambda *leaves: np.stack(leaves), *every)
    params = to_devices(params, everywhere(mesh))
    own = per_client and differs(components, members[0].params)
    tests = held_out(members, per_client=per_client, own=own, sharding=everywhere(mesh))
    measures = [m.measures for m in members]
    inputs: list[Inputs | None] = [None] * len(members)
    if measures[0].wants_anything():
        found = inputs_of(data, [m.schedule for m in members], measures, per_client)
        inputs = to_devices(found, everywhere(mesh))
    every_test = tests_together(tests, shape.runs) if jax.default_backend() != "cpu" else None
    facts = stack_facts(members, layout, shape)
    shapes = shapes_of(components.server, components.client, layout, shape, tables, params, facts, mesh)
    fixed = bytes_of((tables._replace(key=()), tests[0], inputs[0])) + bytes_of(shapes.carry)
    needed = fixed + layout.lanes * bytes_of(shapes.buffers)
    if memory_limit is not None and needed > memory_limit:
        raise TooLarge(needed, layout.capacity)
    programs = compile_programs(
        components.server,
        components.client,
        components.model,
        layout,
        shape,
        tables,
        params,
        tests[0],
        inputs[0],
        shapes,
        what=Measuring(
            measures[0]._replace(training=None),  # its rows are among the inputs
            own_models=own,
            per_client=per_client,
            labels=bool(np.issubdtype(data[0].test_y.dtype, np.integer)),
            total=len(data[0].test_y),
            width=layout.capacity if layout.batching == "vmap" else 1,
        ),
        facts=facts,
        mesh=mesh,
        models=models,
        every_test=every_test,
    )
    needed += layout.lanes * max(map(temporary_bytes, programs.train.values()))
    if memory_limit is not None and needed > memory_limit:
        raise TooLarge(needed, layout.capacity)
    sharding = everywhere(mesh)
    return Stack(members, layout, shape, tables, params, tests, programs, needed, feed, sharding, inputs, every_test)
