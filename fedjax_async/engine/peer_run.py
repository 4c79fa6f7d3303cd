"""Decentralised runs side by side, laid out, moved to the device and compiled; the loop of ``run.py`` executes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled

from fedjax_async.base import check, tree
from fedjax_async.engine.components import Components
from fedjax_async.engine.devices import TooLarge, everywhere, temporary_bytes
from fedjax_async.engine.evaluation import EvaluationPoints
from fedjax_async.engine.execution import Execution
from fedjax_async.engine.flat import flattened, said_of
from fedjax_async.engine.kernels import Carry, JobBuffers
from fedjax_async.engine.layout import ORDERS, Layout, digest, make_peer_layout
from fedjax_async.engine.members import Member
from fedjax_async.engine.peer_kernels import NodeJobs
from fedjax_async.engine.peer_points import GLOBAL_TESTS, checked_points, online
from fedjax_async.engine.peer_probes import event_table, nodes_tables, split_probes, without_probes
from fedjax_async.engine.peer_programs import PeerPrograms, compile_peer_programs, peer_shapes
from fedjax_async.engine.probes import described, numbers_of
from fedjax_async.engine.record import EngineResult
from fedjax_async.engine.run import run_alone
from fedjax_async.engine.scores import Evaluate, Scores, moments_due
from fedjax_async.engine.scoring import scoring_of
from fedjax_async.engine.stacking import cutting_of, params_of, shape_of
from fedjax_async.engine.streaming import Feed, make_feed
from fedjax_async.engine.tables import PeerTables, StackShape, make_peer_tables
from fedjax_async.engine.trainers import Trainers
from fedjax_async.engine.watching import Watcher
from fedjax_async.peers.schedule import PeerSchedule
from fedjax_async.types import AnyArray, Array, Facts, Key, Params


class PeerStack(NamedTuple):
    """Decentralised runs that advance side by side, laid out, moved to the device and compiled: ``loop.SideBySide``."""

    members: Sequence[Member]
    layout: Layout
    shape: StackShape
    tables: PeerTables
    params: Params  # [R, ...]; without the axis where R = 1
    node_blocks: list[np.ndarray]  # the nodes of a run that each call of an evaluation scores
    programs: PeerPrograms
    num_bytes: int  # on the device while it runs: tables, carry, buffers and temporary memory of training
    feed: Feed | None = None
    sharding: NamedSharding | None = None  # of what every device holds

    @property
    def x64(self) -> bool:
        """Whether the programs have 64-bit numbers; each thread has its own setting."""
        return bool(self.tables.norm_limit.dtype == np.float64)

    def apply(self, carry: Carry, buffers: JobBuffers, low: int, high: int) -> tuple[Carry, Array]:
        """Write the positions ``low .. high-1`` to the nodes and to the slots."""
        span = np.array([low, high], np.int32)
        applied: tuple[Carry, Array] = self.programs.write(self.tables, carry, buffers, span)
        return applied

    def scores(self) -> Scores:
        """When each run is evaluated: after all its events that the evaluation sees."""
        last = [
            np.concatenate([[0], own + 1])[stops[1:]] - 1
            for own, stops in zip(self.layout.positions, self.layout.slots.stops)
        ]
        points = [m.points for m in self.members]
        return Scores(points, moments_due(points, last))

    def evaluator(self, watcher: Watcher, trainers: Trainers) -> Evaluate:
        """The evaluation of runs; the lanes of ``trainers`` score some of the nodes each."""
        seen = [online(m.schedule, m.points.time) for m in self.members]

        def scored(carry: Carry, run: int, row: int) -> dict[str, Array]:
            member, rows, which = self.members[run], carry.memory, np.int32(run)
            now = member.global_tests == "all" or row in (0, len(member.points.time) - 1)
            with jax.enable_x64(self.x64):
                parts = self._parts(trainers, carry, run, self.programs.whole if now else None)
                given = (self.tables, rows, which, seen[run][row], parts, np.array(now))
                found: dict[str, Array] = self.programs.together(*given)
                model = self.programs.models(self.tables, rows, which) if watcher.wants_model(run) else None
            watcher.add((run, row), without_probes(found), model)
            return found

        return lambda carry, due: [scored(carry, run, row) for run, row in due]

    def _parts(self, trainers: Trainers, carry: Carry, run: int, whole: Compiled | None) -> list[dict[str, AnyArray]]:
        """The scores of a run's nodes, one part a lane; ``whole``: the program for the global test set, None: NaN."""
        blocks = [nodes + np.int32(run * self.shape.num_clients) for nodes in self.node_blocks]

        def one(program: Compiled, nodes: np.ndarray) -> dict[str, AnyArray]:
            found: dict[str, AnyArray] = program(self.tables, carry.memory, nodes)
            return found

        parts = trainers.each([partial(one, self.programs.own, nodes) for nodes in blocks])
        if self.programs.whole is None:
            return parts
        if whole is not None:
            more = trainers.each([partial(one, whole, nodes) for nodes in blocks])
        else:
            made = self.programs.whole.out_info  # its dtypes: in 64-bit mode a float32 model is still scored in float32
            nothing: dict[str, AnyArray] = {
                name: np.full(score.shape, np.nan, score.dtype) for name, score in made.items()
            }
            more = [nothing for _ in blocks]
        return [part | one for part, one in zip(parts, more)]

    def identity(self) -> dict[str, object]:
        """Batches, probes, and whether states are flat."""
        first = self.members[0]
        return {
            "batches (cores, lanes, max_width)": digest(self.layout),
            "probes": [described(first.probes), sorted(first.nodes_probes)],
            **said_of(first.components),
        }

    def until(self, carry: Carry, watcher: Watcher, run: int) -> tuple[int, int]:
        """How many events of a run belong to its result; no more are needed for it."""
        del carry
        stops = self.layout.slots.stops[run]
        row = watcher.ends[run][0] if run in watcher.ends else len(stops) - 1
        return (int(stops[row]),) * 2

    def status(self, low: int, high: int) -> dict[str, float]:
        """Of the run of the last position: its virtual time, and the mean age in seconds of the messages mixed."""
        run = int(self.layout.run[high - 1])
        first, last = np.searchsorted(self.layout.positions[run], [low, high])
        schedule, events = self.layout.schedules[run], self.layout.slots.orders[run][first:last]
        sizes = np.diff(schedule.inbox_bounds)[events]
        entries = np.repeat(schedule.inbox_bounds[events] - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())
        age = np.repeat(schedule.mixed_at[events], sizes) - schedule.end[schedule.source[entries]]
        time = float(schedule.end[events].max(initial=0.0))
        return {"time": time, "staleness": float(age.mean()) if len(age) else 0.0}

    def result(self, carry: Carry, scores: Scores, watcher: Watcher, run: int) -> EngineResult:
        """The result of a run."""
        member, layout = self.members[run], self.layout
        schedule, until = member.schedule, self.until(carry, watcher, run)[0]
        rows = watcher.ends[run][0] + 1 if run in watcher.ends else len(member.points.time)
        columns = scores.columns(run, rows)
        sorting = np.argsort(layout.slots.orders[run][:until])
        events, position = layout.slots.orders[run][:until][sorting], layout.positions[run][:until][sorting]
        records = {name: np.asarray(column)[position] for name, column in jax.device_get(carry.records).items()}
        tables = {}
        for name, probe in member.probes.items():
            chosen = np.isin(events, numbers_of(probe, len(schedule.client)))
            values = {c: np.asarray(v)[position][chosen] for c, v in jax.device_get(carry.probes[name]).items()}
            tables[name] = event_table(schedule, events[chosen], values)
        if run in watcher.ends:
            last = watcher.ends[run][1]
        else:
            with jax.enable_x64(self.x64):
                last = jax.device_get(self.programs.models(self.tables, carry.memory, np.int32(run)))
        own = layout.positions[run]
        waves = len(np.unique(np.searchsorted(layout.waves, own, side="right")))
        return EngineResult(
            params=last,
            scores=without_probes(columns),
            records=records,
            counters={
                "waves": waves,
                "mean_width": len(own) / waves if waves else 0.0,
                "widest": int(np.diff(layout.dealt.bounds).max(initial=0)),
                **layout.counters(),
                "refused_messages": int(records["refused_messages"].sum()),
                "programs": self.programs.number(),
                "device_memory_bytes": self.num_bytes,
            },
            events=events,
            probes=tables | nodes_tables(member.nodes_probes, columns, member.points.time[:rows]),
            rows=rows,
            kept=watcher.kept.get(run),
        )


def peer_layout_of(members: Sequence[Member], *, order: str = "waves", **options: Any) -> Layout:
    """The layout of a stack. ``order``: one of ``ORDERS``; the other options are those of ``stacking.cutting_of``."""
    cut = cutting_of(members[0].components, members[0].params, **options)
    return make_peer_layout([m.schedule for m in members], [m.points.time for m in members], cut, order=order)


def make_peer_stack(
    members: Sequence[Member],
    layout: Layout,
    shape: StackShape,
    *,
    mesh: Mesh | None = None,
    memory_limit: int | None = None,
) -> PeerStack:
    """Move a stack to the device and compile its programs; ``TooLarge`` if it needs more than ``memory_limit``."""
    members = [m._replace(components=flattened(m.components, nodes=True)) for m in members]
    first, data, sharding = members[0], [m.components.data for m in members], everywhere(mesh)
    feed = make_feed([m.schedule.client for m in members], layout, data[0], sharding) if data[0].streamed else None
    tables = make_peer_tables(layout, shape, members, feed, sharding)
    functions = tuple((name, probe.function) for name, probe in first.probes.items())
    what = NodeJobs(first.components.rule, first.components.client, functions, _longest(layout, bool(functions)))
    params = params_of(members, shape, sharding)
    shapes = peer_shapes(what, shape, layout.batching, tables, params, mesh)
    fixed = tree.num_bytes((tables._asdict() | {"key": ()}, shapes.carry))
    needed = fixed + layout.dealt.lanes * tree.num_bytes(shapes.buffers)
    if memory_limit is not None and needed > memory_limit:
        raise TooLarge(needed, layout.capacity)
    node_blocks = _node_blocks(shape.num_clients, layout.dealt.lanes, 1 if mesh is None else mesh.size)
    scoring = scoring_of(what, members, layout.capacity if layout.batching == "vmap" else 1)
    sizes = (shape, layout.widths, layout.batching)
    programs = compile_peer_programs(scoring, *sizes, tables, params, shapes, node_blocks=node_blocks, mesh=mesh)
    training = layout.dealt.lanes * max(temporary_bytes(program) for program in programs.train.values())
    needed += max(training, temporary_bytes(programs.write))
    if memory_limit is not None and needed > memory_limit:
        raise TooLarge(needed, layout.capacity)
    return PeerStack(members, layout, shape, tables, params, node_blocks, programs, needed, feed, sharding)


def _longest(layout: Layout, probed: bool) -> int:
    """``NodeJobs.longest``: exact for probes; off a CPU a power of two, so that few programs are compiled."""
    longest = int(np.diff(layout.slots.bounds).max(initial=1))
    if probed:
        return longest
    return 1 if jax.default_backend() == "cpu" else 1 << (longest - 1).bit_length()


def _node_blocks(nodes: int, lanes: int, devices: int) -> list[np.ndarray]:
    """The numbers of all nodes in equal parts, one per lane; the last node is repeated to fill the last parts."""
    lanes = min(lanes, nodes)
    size = devices * -(-nodes // (lanes * devices))
    each = np.minimum(np.arange(lanes * size, dtype=np.int32), nodes - 1)
    return list(each.reshape(lanes, size))


def run_peer_waves(
    components: Components,
    schedule: PeerSchedule,
    params: Params,
    key: Key,
    points: np.ndarray,
    *,
    order: str | None = None,
    norm_limit: float = float("inf"),
    global_tests: str = "all",
    probes: Mapping[str, object] | None = None,
    **execution: Any,
) -> EngineResult:
    """Execute every event of a plan, batched in waves; the same result as one event at a time.

    ``points``: virtual times of the evaluations, float64[V]; the first is 0, the last ends the run. An evaluation sees
    the model of each node after its last event that has ended by then. ``global_tests``: one of ``GLOBAL_TESTS``.
    ``order``: one of ``ORDERS``; by default ``waves``, or ``moments`` if waves need more than ``memory_limit`` bytes.
    The other options are those of :func:`~fedjax_async.engine.run_waves`.
    """
    check.one_of("global_tests", global_tests, GLOBAL_TESTS)
    how = Execution(**execution)
    members = [
        make_peer_member(
            components, schedule, params, key, points, norm_limit=norm_limit, global_tests=global_tests, probes=probes
        )
    ]
    orders, limit = list(ORDERS) if order is None else [order], how.memory_limit

    def make(mesh: Mesh | None, **options: Any) -> PeerStack:
        options |= {"batching": how.batching, "fill": limit is None}
        while True:
            layout = peer_layout_of(members, order=orders[0], **options)
            try:
                return make_peer_stack(members, layout, shape_of(layout), mesh=mesh, memory_limit=limit)
            except TooLarge:
                if len(orders) == 1:
                    raise
                orders.pop(0)  # the next order keeps fewer messages

    return run_alone(make, how)


def make_peer_member(
    components: Components,
    schedule: PeerSchedule,
    params: Params,
    key: Key,
    points: np.ndarray,
    *,
    norm_limit: float = float("inf"),
    global_tests: str = "all",
    probes: Mapping[str, object] | None = None,
) -> Member:
    """Collect and check what a run consists of; ``ValueError`` for parts that do not fit together."""
    nodes = len(components.data.size)
    check.require(schedule.num_clients == nodes, "schedule.num_clients", schedule.num_clients, f"{nodes}, as the data")
    events = len(schedule.client)
    of_events, of_nodes = split_probes(probes, components.data, events)
    # the position of an evaluation is its row: which nodes are online depends on its time
    times, applied = checked_points(points), np.ones(events, np.bool_)
    rows = EvaluationPoints(np.arange(len(times)), times)
    known = (components, schedule, params, key, rows, norm_limit, applied, Facts(nodes))
    return Member(*known, probes=of_events, nodes_probes=of_nodes, global_tests=global_tests)
