"""A stack: runs that advance side by side, laid out, moved to the device and compiled. One run is a stack of one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedjax_async import check, tree
from fedjax_async.clock import check_schedule
from fedjax_async.engine.components import Components, facts_of, shapes_of_client, shapes_of_server
from fedjax_async.engine.devices import bytes_of, device_memory, everywhere, temporary_bytes, to_devices
from fedjax_async.engine.evaluation import EvaluationPoints, differs, own_tests, owners, validation_part
from fedjax_async.engine.flat import flattened
from fedjax_async.engine.layout import Layout, make_layout
from fedjax_async.engine.measures import NOTHING, Inputs, Measures, inputs_of, require_measurable
from fedjax_async.engine.probes import NO_PROBES, Probes, resolved_probes
from fedjax_async.engine.programs import Programs, compile_programs, shapes_of
from fedjax_async.engine.scoring import Measuring
from fedjax_async.engine.sending import StackFacts
from fedjax_async.engine.streaming import Feed, make_feed
from fedjax_async.engine.tables import DeviceTables, StackShape, group_ends, make_tables, padded_length
from fedjax_async.engine.unsent import all_training
from fedjax_async.engine.widths import ladder
from fedjax_async.types import Array, Key, Model, Params, Schedule

# The least number of slots, so that small runs of different methods share programs.
LEAST_SLOTS = 12


AT_ONCE = 4  # arrivals in a pass of a loop on an accelerator


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


def stack_facts(members: Sequence[Member], layout: Layout, shape: StackShape) -> StackFacts:
    """What the compiled programs of a stack depend on."""
    off_the_cpu = jax.default_backend() != "cpu"
    in_turn = (off_the_cpu or _by_ranks(layout, shape)) and sends_twice(layout)
    facts = StackFacts(
        members[0].schedule.num_clients,
        all(bool(np.all(m.schedule.closes[m.applied])) for m in members),
        all(bool(np.all(m.applied)) for m in members),
        tuple((name, probe.function) for name, probe in members[0].probes.items()),
        most_messages(layout, shape) if off_the_cpu and not in_turn else None,
        in_turn,
    )
    if facts.messages is None or shape.runs > 1:
        return facts
    grouped = has_long_groups(members, layout)
    several = facts.all_applied and not facts.probes and (grouped or facts.every_closes)
    return facts._replace(grouped=grouped, at_once=AT_ONCE if several else 1)


def has_long_groups(members: Sequence[Member], layout: Layout) -> bool:
    """Whether an arrival in two, or fewer, closes a step or is followed by messages."""
    return 2 * len(group_ends(layout, [m.applied for m in members])) <= len(layout.run)


def _by_ranks(layout: Layout, shape: StackShape) -> bool:
    """Whether the arrivals of a rank are applied at once."""
    return shape.runs > 1 and layout.batching == "vmap"


def most_messages(layout: Layout, shape: StackShape) -> int:
    """The most messages due after an arrival, in a stack after the arrivals of a rank; rounded up to a power of two."""
    after = layout.ranks if _by_ranks(layout, shape) else np.arange(len(layout.run) + 1)
    due = np.diff(layout.slots.write_bounds[after + 1])
    return 1 << max(int(due.max(initial=1)) - 1, 0).bit_length()


def sends_twice(layout: Layout) -> bool:
    """Whether a client is sent two messages of its own after the same arrival: the job of the first has failed."""
    slots, clients = layout.slots, layout.schedules[0].num_clients
    after = np.repeat(np.arange(len(slots.write_bounds) - 1), np.diff(slots.write_bounds))
    owners = slots.write_run.astype(np.int64) * clients + slots.write_client
    keys = np.sort(after * clients * len(layout.schedules) + owners)
    return bool((keys[1:] == keys[:-1]).any())


class Stack(NamedTuple):
    """Runs that advance side by side, laid out, moved to the device and compiled."""

    members: Sequence[Member]
    layout: Layout
    shape: StackShape
    tables: DeviceTables
    params: Params  # [R, ...]; without the axis where R = 1
    tests: list[Any]  # per member: test inputs, targets, owners, OwnTests, validation part
    programs: Programs
    num_bytes: int  # on the device while it runs: tables, carry, buffers and temporary memory of training
    feed: Feed | None = None
    sharding: Any = None  # of what every device holds
    inputs: Sequence[Inputs | None] = ()  # per member: for what is measured besides loss and accuracy
    every_test: Any = None  # the tests of all runs together, if a program evaluates all of them at once


def default_batching() -> str:
    """How a compiled call trains its jobs: one after the other on a CPU, all at once elsewhere.

    One client keeps a core with matrix instructions busy, and the matrices of a second one only spill its caches. With
    two lanes, looping was 1.0 (logistic regression) to 1.25 (an MLP) times as fast as ``vmap``.
    """
    return "loop" if jax.default_backend() == "cpu" else "vmap"


def default_width(params: Params) -> int:
    """The longest batch that pays on this backend.

    On a CPU 16 jobs hide the cost of a call; an accelerator needs wide batches, here up to 1024. Memory bounds both:
    about 64 MiB of uploads on a CPU, a quarter of the device's memory for all of a batch's buffers elsewhere.
    """
    size = max(tree.num_bytes(params), 1)
    if jax.default_backend() == "cpu":
        return max(1, min(16, 2**26 // size))
    return max(1, min(1024, device_memory() // 4 // (8 * size)))


def default_lanes() -> int:
    """How many batches are trained at the same time: on a CPU one per core, at most 8, and one on an accelerator.

    XLA runs the programs of one host thread one after the other, and a client's matrices are too small to keep several
    cores busy. Independent batches keep them busy if each has a thread of its own.
    """
    if jax.default_backend() != "cpu":
        return 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, usable)


# What a wave costs on an H100, fitted to seven models (``experiments/benchmarks/results/h100``): a local step takes
# STEP_OF_A_LEAF for each leaf of the model, as each is some launches, and JOB_OF_A_BYTE for each job and byte that a
# gradient keeps of EXAMPLES examples; CALL is for training and receiving a batch. Only widths depend on it. Seconds.
STEP_OF_A_LEAF, JOB_OF_A_BYTE, CALL, COMPILING, EXAMPLES = 23e-6, 2.6e-12, 200e-6, 2.5, 32


def width_costs(model: Model, params: Params, x: Array) -> dict[str, float]:
    """What :func:`~fedjax_async.engine.widths.fewest_widths` weighs on an accelerator; {} on a CPU.

    On an accelerator a step of a small model takes as long for a hundred jobs as for one, so one width will do. The
    costs depend on the model alone, neither on the device nor on a measurement, so that widths and bits do not either.
    """
    if jax.default_backend() == "cpu":
        return {}
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    leaves, structure = jax.tree.flatten(shapes)
    job = JOB_OF_A_BYTE * _kept_by_a_gradient(model, tuple(leaves), structure, x.shape[1:], x.dtype)
    return {"overhead": STEP_OF_A_LEAF * len(leaves) / job, "call": CALL / job, "compiling": COMPILING / job}


@lru_cache(maxsize=64)
def _kept_by_a_gradient(
    model: Model, leaves: tuple[Any, ...], structure: Any, shape: tuple[int, ...], dtype: Any
) -> int:
    """Bytes; tracing a large model takes a second."""
    rows = jax.ShapeDtypeStruct((EXAMPLES, *shape), dtype)
    params = jax.tree.unflatten(structure, leaves)
    kept = jax.eval_shape(lambda params, x: jax.vjp(lambda params: model.apply(params, x), params), params, rows)
    return max(tree.num_bytes(kept), 1)


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


class TooLarge(Exception):
    """A run needs more device memory than it may use; ``needed``: bytes, as far as they are known by then."""

    def __init__(self, needed: int) -> None:
        super().__init__(f"{needed} bytes")
        self.needed = needed


def held_out(members: Sequence[Member], *, per_client: bool, own: bool, sharding: Any) -> list[Any]:
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


def tests_together(tests: Sequence[Any], runs: int) -> Any:
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
    inputs: list[Any] = [None] * len(members)
    if measures[0].wants_anything():
        found = inputs_of(data, [m.schedule for m in members], measures, per_client)
        inputs = to_devices(found, everywhere(mesh))
    every_test = tests_together(tests, shape.runs) if jax.default_backend() != "cpu" else None
    facts = stack_facts(members, layout, shape)
    shapes = shapes_of(components.server, components.client, layout, shape, tables, params, facts, mesh)
    fixed = bytes_of((tables._replace(key=()), tests[0], inputs[0])) + bytes_of(shapes.carry)
    needed = fixed + layout.lanes * bytes_of(shapes.buffers)
    if memory_limit is not None and needed > memory_limit:
        raise TooLarge(needed)
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
        raise TooLarge(needed)
    sharding = everywhere(mesh)
    return Stack(members, layout, shape, tables, params, tests, programs, needed, feed, sharding, inputs, every_test)
