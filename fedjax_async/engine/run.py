"""Execute schedules in waves: the fast engine, for one run or for a stack of runs side by side."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedjax_async import check, tree
from fedjax_async.clock import check_schedule
from fedjax_async.engine.checkpoint import Keeper, Snapshot
from fedjax_async.engine.components import Components, bound
from fedjax_async.engine.devices import bytes_of, device_memory, everywhere, make_mesh, temporary_bytes, to_devices
from fedjax_async.engine.evaluation import Points, Scores, owners
from fedjax_async.engine.kernels import Carry
from fedjax_async.engine.layout import Layout, digest, ladder, make_layout
from fedjax_async.engine.own import differs, now_of, own_tests
from fedjax_async.engine.probes import NO_PROBES, Probes, described, numbers_of, probe_table, resolved_probes
from fedjax_async.engine.programs import Programs, compile_programs, evaluated
from fedjax_async.engine.record import EngineOutcome, Progress, refuse
from fedjax_async.engine.serving import StackFacts
from fedjax_async.engine.streaming import Feed, make_feed
from fedjax_async.engine.tables import DeviceTables, Shape, make_tables, padded_length
from fedjax_async.engine.trainers import Trainers
from fedjax_async.engine.unsent import all_training
from fedjax_async.types import Key, Params, Schedule

# How many groups of batches the host may be ahead of the device: bounds memory, and keeps the progress bar honest.
AHEAD = 8

# Fewer slots than this are rounded up, so that small runs of different methods share programs.
LEAST_SLOTS = 12

# Besides one training program a width: start, buffers, receive, evaluate.
OTHER_PROGRAMS = 4


class Member(NamedTuple):
    """One run of a stack: everything that is decided before it starts; :func:`make_member` makes one."""

    components: Components
    schedule: Schedule  # of all that is trained
    params: Params
    key: Key
    points: Points  # in arrivals of ``schedule``
    norm_limit: float
    applied: np.ndarray  # bool[E], which of its arrivals the server applies; the others are trained in vain
    probes: Probes = NO_PROBES


def make_member(
    components: Components,
    schedule: Schedule,
    params: Params,
    key: Key,
    points: Points,
    norm_limit: float = float("inf"),
    probes: Mapping[str, Any] | None = None,
) -> Member:
    """The run of a schedule, which is checked, with the jobs that are trained in vain."""
    schedule = check_schedule(schedule)
    chosen = resolved_probes(probes, components.data, len(schedule.job))
    kept = jax.eval_shape(lambda p: bound(components.client, components.hyper).init(p), params)
    training = all_training(schedule, stateful=bool(jax.tree.leaves(kept)))
    points = points._replace(position=training.position[points.position])
    return Member(components, training.schedule, params, key, points, norm_limit, training.applied, chosen)


def stack_facts(members: Sequence[Member]) -> StackFacts:
    """What the compiled programs of a stack are told."""
    return StackFacts(
        members[0].schedule.num_clients,
        all(bool(np.all(m.schedule.closes[m.applied])) for m in members),
        all(bool(np.all(m.applied)) for m in members),
        tuple((name, probe.function) for name, probe in members[0].probes.items()),
    )


class Stack(NamedTuple):
    """Runs that advance side by side: planned, on the device, compiled."""

    members: Sequence[Member]
    layout: Layout
    shape: Shape
    tables: DeviceTables
    params: Params  # [R, ...]; without the axis where R = 1
    tests: list[Any]  # per member: test inputs, targets, owners, OwnTests
    programs: Programs
    feed: Feed | None = None
    sharding: Any = None  # of what every device holds


def default_batching() -> str:
    """How a compiled call trains its jobs: one after the other on a CPU, all at once elsewhere.

    A core with matrix instructions is busy with a single client, and another client's matrices only
    spill its caches: with two lanes, looping beat ``vmap`` by 1.0 (logistic regression) to 1.25 (an MLP).
    """
    return "loop" if jax.default_backend() == "cpu" else "vmap"


def default_width(params: Params) -> int:
    """The longest batch that pays on this backend.

    On a CPU 16 jobs hide the cost of a call; on an accelerator width is what fills it. Bounded by memory:
    about 64 MiB of uploads on a CPU, a quarter of the device's memory for all of a batch's buffers elsewhere.
    """
    size = max(tree.num_bytes(params), 1)
    if jax.default_backend() == "cpu":
        return max(1, min(16, 2**26 // size))
    return max(1, min(1024, device_memory() // 4 // (8 * size)))


def default_lanes() -> int:
    """How many batches are trained at the same time: one a core on a CPU, one on an accelerator.

    XLA runs the programs that one host thread starts one after the other, and a client's matrices are
    too small to keep several cores busy; independent batches, started by threads of their own, are not.
    """
    if jax.default_backend() != "cpu":
        return 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, usable)


def layout_of(
    members: Sequence[Member],
    *,
    max_width: int | None = None,
    lanes: int = 1,
    batching: str | None = None,
    devices: int = 1,
) -> Layout:
    """The layout of a stack: its components say how wide a batch may be and whether messages are personal."""
    first = members[0]
    top = devices * default_width(first.params) if max_width is None else max_width
    check.whole("max_width", top)
    check.whole("lanes", lanes)
    memory = jax.eval_shape(lambda p: bound(first.components.server, first.components.hyper).init(p)[1], first.params)
    return make_layout(
        [m.schedule for m in members],
        max_width=top,
        lanes=lanes,
        devices=devices,
        batching=batching or default_batching(),
        personal=bool(jax.tree.leaves(memory)),
        fill=not first.components.data.streamed,
    )


def shape_of(layout: Layout) -> Shape:
    """The sizes that the layout's tables need, rounded up so that similar stacks share programs."""
    slots = max(LEAST_SLOTS, layout.slots.count)
    return Shape(
        runs=len(layout.schedules),
        num_clients=layout.schedules[0].num_clients,
        capacity=layout.capacity,
        positions=padded_length(len(layout.run) + layout.capacity),
        writes=padded_length(len(layout.slots.write_slot)),
        slots=next(s for s in ladder(2 * slots) if s >= slots),
    )


def make_stack(
    members: Sequence[Member], layout: Layout, shape: Shape, *, per_client: bool = False, mesh: Mesh | None = None
) -> Stack:
    """Move a stack to the device and compile what it needs."""
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
    params = every[0] if shape.runs == 1 else jax.tree.map(lambda *leaves: jnp.stack(leaves), *every)
    params = to_devices(params, everywhere(mesh))
    held_out = to_devices({id(d.test_x): (d.test_x, d.test_y) for d in data}, everywhere(mesh))
    own = per_client and differs(components, members[0].params)
    split = [
        (owners(d) if per_client else None, own_tests(d, m.schedule) if own else None) for d, m in zip(data, members)
    ]
    tests = [(*held_out[id(d.test_x)], *to_devices(one, everywhere(mesh))) for d, one in zip(data, split)]
    labels = bool(np.issubdtype(data[0].test_y.dtype, np.integer))
    programs = compile_programs(
        components.server,
        components.client,
        components.model,
        layout,
        shape,
        tables,
        params,
        tests[0],
        labels=labels,
        per_client=per_client,
        facts=stack_facts(members),
        mesh=mesh,
    )
    return Stack(members, layout, shape, tables, params, tests, programs, feed, everywhere(mesh))


def run_stack(
    stack: Stack, *, on_bad: str = "reject", progress: Progress | None = None, keeper: Keeper | None = None
) -> list[EngineOutcome]:
    """Train every job of the stack; one outcome a member.

    Nothing in the loop waits for the device except to stay at most ``AHEAD`` groups of batches in front
    of it, and to take the checkpoints of ``keeper``, from whose newest it goes on. Traces nothing, so it
    may run in any thread.
    """
    layout, tables, programs = stack.layout, stack.tables, stack.programs
    carry = programs.start(tables, stack.params)
    ranks = layout.ranks if programs.by_ranks else None
    scores = Scores([m.points for m in stack.members], layout.positions, ranks)

    def evaluate(run: int, local: int) -> dict[str, Any]:
        member, tests, real = stack.members[run], stack.tests[run], tables.time.dtype
        seen, now = evaluated(carry, tests[3] is not None), now_of(member.points, member.schedule, local, real)
        with jax.enable_x64(real == np.float64):  # a setting of each thread
            return programs.evaluate(tables, seen, np.int32(run), now, *tests)

    if keeper is not None:
        keeper.identify("batches (cores, lanes, max_width)", digest(layout))
        keeper.identify("probes", described(stack.members[0].probes))
    snapshot = None if keeper is None else keeper.restore()
    if snapshot is None:
        scores.take(0, evaluate)
    else:
        carry = to_devices(jax.tree.unflatten(jax.tree.structure(carry), snapshot.leaves), stack.sharding)
        scores.at = dict(snapshot.scores)
    done = 0 if snapshot is None else snapshot.groups
    tokens: deque[Any] = deque()
    status = _status_of(layout)
    stretches, lane_of = layout.stretches.tolist(), layout.lane.tolist()
    edge = np.searchsorted(layout.stretches, layout.bounds).tolist()
    with Trainers(layout, tables, programs, carry, stack.feed) as trainers:
        if done:
            trainers.train_again(layout.unreceived(done), carry)
        for g in range(done, len(layout.groups)):
            buffers = trainers.train(layout.groups[g], carry)
            for low, high in scores.cuts(*stretches[edge[g] : edge[g + 1] + 1]):
                span = np.array([low, high] if ranks is None else np.searchsorted(ranks, [low, high]), np.int32)
                carry, rejected = programs.receive(tables, carry, buffers[lane_of[low]], span)
                scores.take(high, evaluate)
            tokens.append(rejected)
            if len(tokens) > AHEAD:
                refuse(int(tokens.popleft()), on_bad)
            low, high = int(layout.bounds[g]), int(layout.bounds[g + 1])
            if keeper is not None and keeper.due(high) and high < len(layout.run):
                keeper.save(high, Snapshot(g + 1, *jax.device_get((jax.tree.leaves(carry), scores.at))))
            if progress is not None:
                progress(high, len(layout.run), **status(low, high), accuracy=scores.latest())
    refuse(int(carry.rejected), on_bad)
    return [_outcome(stack, carry, scores, run) for run in range(len(stack.members))]


def run_waves(
    components: Components,
    schedule: Schedule,
    params: Params,
    key: Key,
    points: Points,
    *,
    max_width: int | None = None,
    lanes: int | None = None,
    batching: str | None = None,
    per_client: bool = False,
    on_bad: str = "reject",
    norm_limit: float = float("inf"),
    probes: Mapping[str, Any] | None = None,
    devices: int | None = None,
    memory_limit: int | None = None,
    progress: Progress | None = None,
    keeper: Keeper | None = None,
) -> EngineOutcome:
    """Train every job of one schedule, batched in waves; the same result as one event at a time."""
    members = [make_member(components, schedule, params, key, points, norm_limit, probes)]
    mesh = make_mesh(devices)
    lanes = (default_lanes() if mesh is None else 1) if lanes is None else lanes
    shared = 1 if mesh is None else mesh.size

    def made(width: int | None, lanes: int) -> Stack:
        layout = layout_of(members, max_width=width, lanes=lanes, batching=batching, devices=shared)
        return make_stack(members, layout, shape_of(layout), per_client=per_client, mesh=mesh)

    stack = made(max_width, lanes)
    while memory_limit is not None and (needed := memory_needed(stack)) > memory_limit:
        # fewer jobs at a time: first shorter batches, then fewer of them
        width = stack.layout.capacity
        check.require(
            width > shared or lanes > 1, "memory_limit", memory_limit, f"at least {needed} bytes for this run"
        )
        lanes = lanes if width > shared else 1
        stack = made(max(shared, width // 2), lanes)
    return run_stack(stack, on_bad=on_bad, progress=progress, keeper=keeper)[0]


def memory_needed(stack: Stack) -> int:
    """Bytes on the device while the stack runs: its tables, carry and buffers, and what training takes besides."""
    programs, lanes = stack.programs, stack.layout.lanes
    temporary = max(temporary_bytes(program) for program in programs.train.values())
    fixed = bytes_of((stack.tables._replace(key=()), stack.tests[0])) + programs.carry_bytes
    return fixed + lanes * (programs.buffers_bytes + temporary)


def _status_of(layout: Layout) -> Callable[[int, int], dict[str, float]]:
    """``status(low, high)`` of the positions ``low .. high-1``, for the progress bar.

    Virtual time of the run that arrives last, and the mean staleness of its arrivals. O(log E) a call.
    """
    staleness = [schedule.staleness for schedule in layout.schedules]  # computed at every access, from all arrivals

    def status(low: int, high: int) -> dict[str, float]:
        run = int(layout.run[high - 1])
        first, last = np.searchsorted(layout.positions[run], [low, high])
        time = layout.schedules[run].time[last - 1]
        return {"time": float(time), "staleness": float(np.mean(staleness[run][first:last]))}

    return status


def _outcome(stack: Stack, carry: Carry, scores: Scores, run: int) -> EngineOutcome:
    member, layout = stack.members[run], stack.layout
    state = (
        carry.server if stack.shape.runs == 1 else jax.tree.map(lambda leaf: leaf[run], jax.device_get(carry.server))
    )
    rule = bound(member.components.server, member.components.hyper)
    position = layout.positions[run]
    own = np.unique(np.searchsorted(layout.waves, position, side="right"))
    columns = {name: np.asarray(column)[position] for name, column in jax.device_get(carry.records).items()}
    applied, seen = np.flatnonzero(member.applied), {}
    for name, probe in member.probes.items():
        numbers = numbers_of(probe, len(applied))
        rows = {c: np.asarray(v)[position][applied[numbers]] for c, v in jax.device_get(carry.probes[name]).items()}
        seen[name] = probe_table(member.schedule, applied[numbers], numbers, rows)
    return EngineOutcome(
        params=jax.device_get(rule.params(state)),
        scores=scores.columns(run),
        records={name: column[member.applied] for name, column in columns.items()},
        in_vain=member.schedule.job[~member.applied],
        in_vain_records={name: column[~member.applied] for name, column in columns.items()},
        counters={
            "waves": len(own),
            "mean_width": len(position) / len(own) if len(own) else 0.0,
            "batches": sum(map(len, layout.groups)),
            "widths": list(layout.widths),
            "slots": layout.slots.count,
            "useful_steps": layout.useful_steps,
            "executed_steps": layout.executed_steps,
            "programs": len(layout.widths) + OTHER_PROGRAMS,
        },
        probes=seen,
    )
