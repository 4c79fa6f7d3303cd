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
from fedjax_async.engine.devices import bytes_of, device_memory, everywhere, make_mesh, place, temporary_bytes
from fedjax_async.engine.evaluation import Points, Scores, owners
from fedjax_async.engine.kernels import Live
from fedjax_async.engine.own import differs, now_of, own_tests
from fedjax_async.engine.plan import Plan, digest, ladder, make_plan
from fedjax_async.engine.probes import NO_PROBES, Probes, described, numbers_of, probe_table, resolved_probes
from fedjax_async.engine.programs import Programs, compile_programs, evaluated
from fedjax_async.engine.record import EngineOutcome, Progress, refuse
from fedjax_async.engine.serving import Known
from fedjax_async.engine.streaming import Feed, make_feed
from fedjax_async.engine.trainers import Trainers
from fedjax_async.engine.unsent import all_training
from fedjax_async.engine.world import Shape, World, make_world, padded_length
from fedjax_async.types import Key, Params, Schedule

# How many groups of batches the host may be ahead of the device: bounds memory, and keeps the progress bar honest.
AHEAD = 8

# Fewer slots than this are rounded up, so that small runs of different methods share programs.
LEAST_SLOTS = 12

# Besides one training program a width: start, rows, receive, evaluate.
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


def known_of(members: Sequence[Member]) -> Known:
    """What the compiled programs of a stack are told."""
    return Known(
        members[0].schedule.num_clients,
        all(bool(np.all(m.schedule.closes[m.applied])) for m in members),
        all(bool(np.all(m.applied)) for m in members),
        tuple((name, probe.function) for name, probe in members[0].probes.items()),
    )


class Stack(NamedTuple):
    """Runs that advance side by side: planned, on the device, compiled."""

    members: Sequence[Member]
    plan: Plan
    shape: Shape
    world: World
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


def plan_stack(
    members: Sequence[Member],
    *,
    max_width: int | None = None,
    lanes: int = 1,
    batching: str | None = None,
    devices: int = 1,
) -> Plan:
    """The plan of a stack: its components say how wide a batch may be and whether messages are personal."""
    first = members[0]
    top = devices * default_width(first.params) if max_width is None else max_width
    check.whole("max_width", top)
    check.whole("lanes", lanes)
    memory = jax.eval_shape(lambda p: bound(first.components.server, first.components.hyper).init(p)[1], first.params)
    return make_plan(
        [m.schedule for m in members],
        max_width=top,
        lanes=lanes,
        devices=devices,
        batching=batching or default_batching(),
        personal=bool(jax.tree.leaves(memory)),
    )


def shape_of(plan: Plan) -> Shape:
    """The sizes that the plan's tables need, rounded up so that similar stacks share programs."""
    slots = max(LEAST_SLOTS, plan.slots.count)
    return Shape(
        runs=len(plan.schedules),
        num_clients=plan.schedules[0].num_clients,
        capacity=plan.capacity,
        positions=padded_length(len(plan.run) + plan.capacity),
        writes=padded_length(len(plan.slots.write_slot)),
        slots=next(s for s in ladder(2 * slots) if s >= slots),
    )


def make_stack(
    members: Sequence[Member], plan: Plan, shape: Shape, *, per_client: bool = False, mesh: Mesh | None = None
) -> Stack:
    """Move a stack to the device and compile what it needs."""
    components = members[0].components
    data = [m.components.data for m in members]
    feed = make_feed(plan, data[0], everywhere(mesh)) if data[0].streamed else None
    world = make_world(
        plan,
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
    params = place(params, everywhere(mesh))
    held_out = place({id(d.test_x): (d.test_x, d.test_y) for d in data}, everywhere(mesh))
    own = per_client and differs(components, members[0].params)
    split = [
        (owners(d) if per_client else None, own_tests(d, m.schedule) if own else None) for d, m in zip(data, members)
    ]
    tests = [(*held_out[id(d.test_x)], *place(one, everywhere(mesh))) for d, one in zip(data, split)]
    labels = bool(np.issubdtype(data[0].test_y.dtype, np.integer))
    programs = compile_programs(
        components.server,
        components.client,
        components.model,
        plan,
        shape,
        world,
        params,
        tests[0],
        labels=labels,
        per_client=per_client,
        known=known_of(members),
        mesh=mesh,
    )
    return Stack(members, plan, shape, world, params, tests, programs, feed, everywhere(mesh))


def run_stack(
    stack: Stack, *, on_bad: str = "reject", progress: Progress | None = None, keeper: Keeper | None = None
) -> list[EngineOutcome]:
    """Train every job of the stack; one outcome a member.

    Nothing in the loop waits for the device except to stay at most ``AHEAD`` groups of batches in front
    of it, and to take the checkpoints of ``keeper``, from whose newest it goes on. Traces nothing, so it
    may run in any thread.
    """
    plan, world, programs = stack.plan, stack.world, stack.programs
    live = programs.start(world, stack.params)
    rounds = plan.rounds if programs.by_rounds else None
    scores = Scores([m.points for m in stack.members], plan.place, rounds)

    def evaluate(run: int, local: int) -> dict[str, Any]:
        member, tests, real = stack.members[run], stack.tests[run], world.time.dtype
        seen, now = evaluated(live, tests[3] is not None), now_of(member.points, member.schedule, local, real)
        with jax.enable_x64(real == np.float64):  # a setting of each thread
            return programs.evaluate(world, seen, np.int32(run), now, *tests)

    if keeper is not None:
        keeper.identify("batches (cores, lanes, max_width)", digest(plan))
        keeper.identify("probes", described(stack.members[0].probes))
    snapshot = None if keeper is None else keeper.restore()
    if snapshot is None:
        scores.take(0, evaluate)
    else:
        live = place(jax.tree.unflatten(jax.tree.structure(live), snapshot.leaves), stack.sharding)
        scores.at = dict(snapshot.scores)
    done = 0 if snapshot is None else snapshot.groups
    tokens: deque[Any] = deque()
    status = _status_of(plan)
    with Trainers(plan, world, programs, live, stack.feed) as trainers:
        for g in range(done, len(plan.groups)):
            group = plan.groups[g]
            for b, rows in zip(group, trainers.train(group, live), strict=True):
                for low, high in scores.cuts(int(plan.bounds[b]), int(plan.bounds[b + 1])):
                    span = np.array([low, high] if rounds is None else np.searchsorted(rounds, [low, high]), np.int32)
                    live, rejected = programs.receive(world, live, rows, span)
                    scores.take(high, evaluate)
            tokens.append(rejected)
            if len(tokens) > AHEAD:
                refuse(int(tokens.popleft()), on_bad)
            low, high = int(plan.bounds[group[0]]), int(plan.bounds[group[-1] + 1])
            if keeper is not None and keeper.due(high) and high < len(plan.run):
                keeper.save(high, Snapshot(g + 1, *jax.device_get((jax.tree.leaves(live), scores.at))))
            if progress is not None:
                progress(high, len(plan.run), **status(low, high), accuracy=scores.latest())
    refuse(int(live.rejected), on_bad)
    return [_outcome(stack, live, scores, run) for run in range(len(stack.members))]


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
        plan = plan_stack(members, max_width=width, lanes=lanes, batching=batching, devices=shared)
        return make_stack(members, plan, shape_of(plan), per_client=per_client, mesh=mesh)

    stack = made(max_width, lanes)
    while memory_limit is not None and (needed := memory_needed(stack)) > memory_limit:
        # fewer jobs at a time: first shorter batches, then fewer of them
        width = stack.plan.capacity
        check.require(
            width > shared or lanes > 1, "memory_limit", memory_limit, f"at least {needed} bytes for this run"
        )
        lanes = lanes if width > shared else 1
        stack = made(max(shared, width // 2), lanes)
    return run_stack(stack, on_bad=on_bad, progress=progress, keeper=keeper)[0]


def memory_needed(stack: Stack) -> int:
    """Bytes on the device while the stack runs: its tables, live state and rows, and what training takes besides."""
    programs, lanes = stack.programs, max((len(group) for group in stack.plan.groups), default=1)
    temporary = max(temporary_bytes(program) for program in programs.train.values())
    fixed = bytes_of((stack.world._replace(key=()), stack.tests[0])) + programs.live_bytes
    return fixed + lanes * (programs.rows_bytes + temporary)


def _status_of(plan: Plan) -> Callable[[int, int], dict[str, float]]:
    """``status(low, high)`` of the positions ``low .. high-1``, for the progress bar.

    Virtual time of the run that arrives last, and the mean staleness of its arrivals. O(log E) a call.
    """
    staleness = [schedule.staleness for schedule in plan.schedules]  # computed at every access, from all arrivals

    def status(low: int, high: int) -> dict[str, float]:
        run = int(plan.run[high - 1])
        first, last = np.searchsorted(plan.place[run], [low, high])
        time = plan.schedules[run].time[last - 1]
        return {"time": float(time), "staleness": float(np.mean(staleness[run][first:last]))}

    return status


def _outcome(stack: Stack, live: Live, scores: Scores, run: int) -> EngineOutcome:
    member, plan = stack.members[run], stack.plan
    state = live.server if stack.shape.runs == 1 else jax.tree.map(lambda leaf: leaf[run], jax.device_get(live.server))
    rule = bound(member.components.server, member.components.hyper)
    place = plan.place[run]
    own = np.unique(np.searchsorted(plan.waves, place, side="right"))
    columns = {name: np.asarray(column)[place] for name, column in jax.device_get(live.records).items()}
    applied, seen = np.flatnonzero(member.applied), {}
    for name, probe in member.probes.items():
        numbers = numbers_of(probe, len(applied))
        rows = {c: np.asarray(v)[place][applied[numbers]] for c, v in jax.device_get(live.probes[name]).items()}
        seen[name] = probe_table(member.schedule, applied[numbers], numbers, rows)
    return EngineOutcome(
        params=jax.device_get(rule.params(state)),
        scores=scores.columns(run),
        records={name: column[member.applied] for name, column in columns.items()},
        in_vain=member.schedule.job[~member.applied],
        in_vain_records={name: column[~member.applied] for name, column in columns.items()},
        counters={
            "waves": len(own),
            "mean_width": len(place) / len(own) if len(own) else 0.0,
            "batches": len(plan.segments),
            "widths": list(plan.widths),
            "slots": plan.slots.count,
            "useful_steps": plan.useful_steps,
            "executed_steps": plan.executed_steps,
            "programs": len(plan.widths) + OTHER_PROGRAMS,
        },
        probes=seen,
    )
