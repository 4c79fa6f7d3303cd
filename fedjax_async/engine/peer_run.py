"""Execute the plan of a decentralised run in waves: the fast engine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled

from fedjax_async.base import check
from fedjax_async.engine.checkpoint import Keeper
from fedjax_async.engine.components import PeerComponents
from fedjax_async.engine.devices import bytes_of, everywhere, make_mesh, temporary_bytes, to_devices
from fedjax_async.engine.evaluation import EvaluationPoints, Scores
from fedjax_async.engine.loop import Calls, advance, restored
from fedjax_async.engine.peer_evaluation import scoring_of
from fedjax_async.engine.peer_kernels import Algorithms, PeerBuffers, PeerCarry
from fedjax_async.engine.peer_layout import ORDERS, PeerLayout, make_peer_layout, peer_digest
from fedjax_async.engine.peer_probes import (
    NodesProbes,
    event_table,
    nodes_tables,
    split_probes,
    without_probes,
)
from fedjax_async.engine.peer_programs import PeerPrograms, compile_peer_programs, peer_shapes
from fedjax_async.engine.peer_result import GLOBAL_TESTS, PeerResult, checked_points, online
from fedjax_async.engine.peer_tables import PeerTables, make_peer_tables, peer_shape
from fedjax_async.engine.probes import Probes, described, numbers_of
from fedjax_async.engine.record import Progress
from fedjax_async.engine.stack import TooLarge, default_batching, default_lanes, default_width, width_costs
from fedjax_async.engine.streaming import Feed, feed_of
from fedjax_async.engine.trainers import Trainers
from fedjax_async.engine.watching import Observer, Watcher
from fedjax_async.peers.schedule import PeerSchedule
from fedjax_async.types import Array, Key, Params


class PeerMember(NamedTuple):
    """Everything that defines a run before it is laid out; :func:`make_peer_member` makes one."""

    components: PeerComponents
    schedule: PeerSchedule
    params: Params
    key: Key
    times: np.ndarray  # float64[V], of the evaluations
    norm_limit: float
    probes: Probes
    nodes_probes: NodesProbes
    global_tests: str


class PeerRun(NamedTuple):
    """A run that is laid out, moved to the device and compiled."""

    member: PeerMember
    layout: PeerLayout
    tables: PeerTables
    params: Params
    node_blocks: list[np.ndarray]  # the numbers of the nodes that each call of an evaluation scores
    programs: PeerPrograms
    num_bytes: int  # on the device while it runs: tables, carry, buffers and temporary memory of training
    feed: Feed | None
    mesh: Mesh | None


def make_peer_run(
    member: PeerMember, layout: PeerLayout, *, mesh: Mesh | None = None, memory_limit: int | None = None
) -> PeerRun:
    """Move a run to the device and compile its programs; ``TooLarge`` if it needs more than ``memory_limit`` bytes."""
    components, schedule = member.components, member.schedule
    data, shape, sharding = components.data, peer_shape(layout), everywhere(mesh)
    client = schedule.client[layout.order]
    feed = feed_of(client, layout.dealt, data, sharding) if data.streamed else None
    given = (member.key, components.hyper, member.norm_limit, member.probes)
    tables = make_peer_tables(layout, shape, data, *given, feed=feed, sharding=sharding)
    longest = int(np.diff(layout.inbox_bounds).max(initial=1))
    functions = tuple((name, probe.function) for name, probe in member.probes.items())
    what = Algorithms(components.peer, components.client, functions, longest if functions else 1)
    params = to_devices(member.params, sharding)
    shapes = peer_shapes(what, shape, layout.batching, tables, params, mesh)
    fixed = bytes_of(tables._replace(key=())) + bytes_of(shapes.carry)
    needed = fixed + layout.dealt.lanes * bytes_of(shapes.buffers)
    if memory_limit is not None and needed > memory_limit:
        raise TooLarge(needed)
    vmapped = layout.batching == "vmap"
    node_blocks = _node_blocks(shape.nodes, layout.dealt.lanes, 1 if mesh is None else mesh.size)
    programs = compile_peer_programs(
        what,
        components.model,
        shape,
        layout.widths,
        layout.batching,
        tables,
        params,
        shapes,
        scoring=scoring_of(data, layout.capacity if vmapped else 1, member.global_tests != "never"),
        node_blocks=node_blocks,
        probes=tuple(member.nodes_probes.items()),
        mesh=mesh,
    )
    needed += layout.dealt.lanes * max(temporary_bytes(program) for program in programs.train.values())
    if memory_limit is not None and needed > memory_limit:
        raise TooLarge(needed)
    return PeerRun(member, layout, tables, params, node_blocks, programs, needed, feed, mesh)


def _node_blocks(nodes: int, lanes: int, devices: int) -> list[np.ndarray]:
    """The numbers of all nodes in equal parts, one per lane; the last node is repeated to fill the last parts."""
    lanes = min(lanes, nodes)
    size = devices * -(-nodes // (lanes * devices))
    each = np.minimum(np.arange(lanes * size, dtype=np.int32), nodes - 1)
    return list(each.reshape(lanes, size))


def run_peer_waves(
    components: PeerComponents,
    schedule: PeerSchedule,
    params: Params,
    key: Key,
    points: np.ndarray,
    *,
    max_width: int | None = None,
    lanes: int | None = None,
    batching: str | None = None,
    devices: int | None = None,
    memory_limit: int | None = None,
    order: str | None = None,
    on_bad: str = "reject",
    norm_limit: float = float("inf"),
    global_tests: str = "all",
    probes: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    keeper: Keeper | None = None,
    observer: Observer | None = None,
) -> PeerResult:
    """Execute every event of a plan, batched in waves; the same result as one event at a time.

    ``points``: virtual times of the evaluations, float64[V]; the first is 0, the last ends the run. An evaluation sees
    the model of each node after its last event that has ended by then. ``global_tests``: one of ``GLOBAL_TESTS``.
    ``order``: one of ``ORDERS``; by default ``waves``, or ``moments`` if waves need more than ``memory_limit`` bytes.
    The other options are those of :func:`~fedjax_async.engine.run_waves`.
    """
    check.one_of("global_tests", global_tests, GLOBAL_TESTS)
    member = make_peer_member(
        components,
        schedule,
        params,
        key,
        points,
        norm_limit=norm_limit,
        global_tests=global_tests,
        probes=probes,
    )
    mesh = make_mesh(devices)
    shared = 1 if mesh is None else mesh.size
    lanes = (default_lanes() if mesh is None else 1) if lanes is None else lanes
    width = shared * default_width(params) if max_width is None else max_width
    check.whole("max_width", width)
    check.whole("lanes", lanes)
    orders = list(ORDERS) if order is None else [order]
    while True:
        layout = make_peer_layout(
            schedule,
            member.times,
            max_width=width,
            lanes=lanes,
            devices=shared,
            batching=batching or default_batching(),
            order=orders[0],
            fill=memory_limit is None and not components.data.streamed,
            costs=width_costs(components.model, member.params, components.data.x),
        )
        try:
            run = make_peer_run(member, layout, mesh=mesh, memory_limit=memory_limit)
            break
        except TooLarge as error:  # first the order that keeps fewer messages, then shorter batches, then one lane
            needed = error.needed
        if len(orders) > 1:
            orders.pop(0)
            continue
        wide = layout.capacity > shared
        check.require(wide or lanes > 1, "memory_limit", memory_limit, f"at least {needed} bytes for this run")
        lanes = lanes if wide else 1
        width = max(shared, layout.capacity // 2)
    return run_peers(run, on_bad=on_bad, progress=progress, keeper=keeper, observer=observer)


def make_peer_member(
    components: PeerComponents,
    schedule: PeerSchedule,
    params: Params,
    key: Key,
    points: np.ndarray,
    *,
    norm_limit: float = float("inf"),
    global_tests: str = "all",
    probes: Mapping[str, Any] | None = None,
) -> PeerMember:
    """Collect and check what a run consists of; ``ValueError`` for parts that do not fit together."""
    nodes = len(components.data.size)
    check.require(schedule.num_clients == nodes, "schedule.num_clients", schedule.num_clients, f"{nodes}, as the data")
    of_events, of_nodes = split_probes(probes, components.data, len(schedule.client))
    times = checked_points(points)
    known = (norm_limit, of_events, of_nodes, global_tests)
    return PeerMember(components, schedule, params, key, times, *known)


def run_peers(
    run: PeerRun,
    *,
    on_bad: str = "reject",
    progress: Progress | None = None,
    keeper: Keeper | None = None,
    observer: Observer | None = None,
) -> PeerResult:
    """Execute every event, or those after the newest checkpoint of ``keeper``; traces nothing."""
    member, layout, tables, programs = run.member, run.layout, run.tables, run.programs
    x64 = tables.norm_limit.dtype == np.float64
    rows = np.arange(len(member.times))
    points = [EvaluationPoints(rows, member.times)]  # an evaluation's position is its row
    scores, watcher = Scores(points, [layout.stops[1:] - 1]), Watcher(points, [observer])
    seen = online(member.schedule, member.times)

    def apply(carry: PeerCarry, buffers: PeerBuffers, low: int, high: int) -> tuple[PeerCarry, Array]:
        applied: tuple[PeerCarry, Array] = programs.write(tables, carry, buffers, np.array([low, high], np.int32))
        return applied

    def train(width: int, tables: PeerTables, carry: PeerCarry, buffers: PeerBuffers, span: np.ndarray) -> PeerBuffers:
        return programs.train[width](tables, carry.slots, carry.nodes, buffers, span)

    carry = programs.start(tables, run.params)
    with Trainers(layout.dealt, tables, train, lambda: programs.buffers(tables, run.params), run.feed) as trainers:

        def evaluate(carry: PeerCarry, due: list[tuple[int, int]]) -> list[dict[str, Any]]:
            return [scored(carry, row) for _, row in due]

        def scored(carry: PeerCarry, row: int) -> dict[str, Any]:
            now = member.global_tests == "all" or row in (0, len(rows) - 1)
            whole = programs.whole if now else None
            with jax.enable_x64(x64):  # each thread has its own setting
                parts = _parts(run, trainers, carry, whole)
                found: dict[str, Any] = programs.together(tables, carry.nodes.row, seen[row], parts, np.array(now))
                model = programs.models(tables, carry.nodes.row) if watcher.wants_model(0) else None
            watcher.add((0, row), without_probes(found), model)
            return found

        if keeper is not None:
            keeper.identify("batches (cores, lanes, max_width)", peer_digest(layout))
            keeper.identify("probes", [described(member.probes), sorted(member.nodes_probes)])
        carry, turns = restored(keeper, carry, scores, watcher, run.params, everywhere(run.mesh))
        if not scores.at:
            scores.evaluate(0, partial(evaluate, carry))
        if turns:
            trainers.train_again(layout.dealt.unreceived(turns, layout.capacity), carry)
        calls = Calls(
            apply=apply,
            evaluate=evaluate,
            rejected=lambda carry, high: _rejected(run, carry, watcher, high),
            enough=lambda carry: int(layout.stops[watcher.ends[0][0]]),
            status=partial(_status, layout),
        )
        options: dict[str, Any] = {"turns": turns, "on_bad": on_bad, "progress": progress, "keeper": keeper}
        carry = advance(calls, layout.dealt, carry, trainers, scores, watcher, **options)
        watcher.hand_over(wait=True)
    return _result(run, carry, scores, watcher)


def _parts(
    run: PeerRun, trainers: Trainers[PeerTables, PeerCarry, PeerBuffers], carry: PeerCarry, whole: Compiled | None
) -> list[dict[str, Any]]:
    """The scores of all nodes, one part per lane; ``whole``: the program for the global test set, None: NaN instead."""

    def one(program: Compiled, nodes: np.ndarray) -> dict[str, Any]:
        found: dict[str, Any] = program(run.tables, carry.nodes.row, nodes)
        return found

    parts = trainers.each([partial(one, run.programs.own, nodes) for nodes in run.node_blocks])
    if run.programs.whole is None:
        return parts
    if whole is not None:
        more = trainers.each([partial(one, whole, nodes) for nodes in run.node_blocks])
    else:
        made = run.programs.whole.out_info  # its dtypes: in 64-bit mode a float32 model is still scored in float32
        nothing = {name: np.full(score.shape, np.nan, score.dtype) for name, score in made.items()}
        more = [nothing for _ in run.node_blocks]
    return [part | one for part, one in zip(parts, more)]


def _status(layout: PeerLayout, low: int, high: int) -> dict[str, float]:
    """Virtual time, and the mean age in virtual seconds of the messages mixed at positions ``low .. high-1``."""
    schedule, entries = layout.schedule, layout.inbox[layout.inbox_bounds[low] : layout.inbox_bounds[high]]
    events = np.repeat(layout.order[low:high], np.diff(layout.inbox_bounds[low : high + 1]))
    age = schedule.mixed_at[events] - schedule.end[schedule.source[entries]]
    time = float(schedule.end[layout.order[low:high]].max(initial=0.0))
    return {"time": time, "staleness": float(age.mean()) if len(age) else 0.0}


def _until(run: PeerRun, watcher: Watcher) -> tuple[int, int]:
    """How many evaluations and how many positions belong to the result."""
    if 0 not in watcher.ends:
        return len(run.member.times), len(run.layout.order)
    row = watcher.ends[0][0]
    return row + 1, int(run.layout.stops[row])


def _rejected(run: PeerRun, carry: PeerCarry, watcher: Watcher, high: int) -> int:
    """Rejected uploads among the first ``high`` positions, without those after a stop; waits for the device."""
    watcher.hand_over(wait=True)
    if not watcher.all_ended:
        return int(carry.rejected)
    accepted = np.asarray(jax.device_get(carry.records["accepted"]))
    return int(np.sum(~accepted[: min(high, _until(run, watcher)[1])]))


def _result(run: PeerRun, carry: PeerCarry, scores: Scores, watcher: Watcher) -> PeerResult:
    member, layout, schedule = run.member, run.layout, run.member.schedule
    rows, until = _until(run, watcher)
    columns = scores.columns(0, rows)
    sorting = np.argsort(layout.order[:until])
    events = layout.order[:until][sorting]
    records = {name: np.asarray(column)[sorting] for name, column in jax.device_get(carry.records).items()}
    tables = {}
    for name, probe in member.probes.items():
        chosen = np.isin(events, numbers_of(probe, len(schedule.client)))
        values = {c: np.asarray(v)[sorting][chosen] for c, v in jax.device_get(carry.probes[name]).items()}
        tables[name] = event_table(schedule, events[chosen], values)
    with jax.enable_x64(run.tables.norm_limit.dtype == np.float64):
        last = watcher.ends[0][1] if watcher.ends else jax.device_get(run.programs.models(run.tables, carry.nodes.row))
    widths = np.diff(layout.dealt.bounds)
    return PeerResult(
        params=last,
        scores=without_probes(columns),
        records=records,
        counters={
            "waves": layout.waves,
            "mean_width": len(layout.order) / layout.waves if layout.waves else 0.0,
            "batches": sum(map(len, layout.dealt.turns)),
            "widest": int(widths.max(initial=0)),
            "widths": list(layout.widths),
            "slots": layout.slot_count,
            "useful_steps": layout.useful_steps,
            "executed_steps": layout.executed_steps,
            "refused_messages": int(records["refused_messages"].sum()),
            "programs": run.programs.number(),
            "num_bytes": run.num_bytes,
        },
        events=events,
        probes=tables | nodes_tables(member.nodes_probes, columns, member.times[:rows]),
        rows=rows,
        kept=watcher.kept.get(0),
    )
