"""From runs to a stack: laid out, moved to the device and compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from fedjax_async.base import check, tree
from fedjax_async.engine.batches import Cutting
from fedjax_async.engine.components import Components, facts_of, first_states
from fedjax_async.engine.defaults import default_batching, default_width, width_costs
from fedjax_async.engine.devices import TooLarge, everywhere, temporary_bytes, to_devices
from fedjax_async.engine.evaluation import (
    EvaluationPoints,
    Inputs,
    RunTests,
    differs,
    own_tests,
    owners,
    validation_part,
)
from fedjax_async.engine.flat import flattened
from fedjax_async.engine.layout import Layout, MergedSlots, make_layout
from fedjax_async.engine.measures import NOTHING, Measures, inputs_of, require_measurable
from fedjax_async.engine.members import Member
from fedjax_async.engine.probes import NO_PROBES, resolved_probes
from fedjax_async.engine.programs import compile_programs, shapes_of
from fedjax_async.engine.stack import Stack
from fedjax_async.engine.stack_facts import StackFacts, stack_facts
from fedjax_async.engine.streaming import make_feed
from fedjax_async.engine.tables import DeviceTables, StackShape, event_columns, lasting_tables, padded_length
from fedjax_async.engine.unsent import all_training
from fedjax_async.engine.widths import ladder
from fedjax_async.types import Key, Params, Schedule

# The least number of slots, so that small runs of different methods share programs.
LEAST_SLOTS = 12


def make_member(
    components: Components,
    schedule: Schedule,
    params: Params,
    key: Key,
    points: EvaluationPoints,
    norm_limit: float = float("inf"),
    probes: Mapping[str, object] | None = None,
    measures: Measures = NOTHING,
) -> Member:
    """The run of a schedule, with the jobs that are trained in vain; ``ValueError`` for invalid arguments.

    The schedule is taken as it is: ``clock.plan`` makes consistent ones, others go through ``clock.check_schedule``.
    """
    facts, steps = facts_of(schedule), np.concatenate([[0], np.cumsum(schedule.closes)])[points.position]
    if measures != NOTHING:
        require_measurable(components.data, measures)
    chosen = NO_PROBES
    if probes is not None and probes is not NO_PROBES:
        chosen = resolved_probes(probes, components.data, len(schedule.job))
    applied, points = np.ones(len(schedule.job), np.bool_), points._replace(steps=steps)
    _, _, kept = first_states(components, params, facts)
    if jax.tree.leaves(kept):
        schedule, applied, position = all_training(schedule)
        points = points._replace(position=position[points.position])
    return Member(components, schedule, params, key, points, norm_limit, applied, facts, chosen, measures)


def cutting_of(
    components: Components,
    params: Params,
    *,
    max_width: int | None = None,
    lanes: int = 1,
    batching: str | None = None,
    devices: int = 1,
    fill: bool = True,
) -> Cutting:
    """How the jobs of runs with these components are cut into batches; None: what their model and the backend suggest.

    ``ValueError`` for invalid options, see :class:`~fedjax_async.engine.batches.Cutting`.
    """
    top = devices * default_width(params) if max_width is None else max_width
    check.whole("max_width", top)
    check.whole("lanes", lanes)
    costs = width_costs(components.model, params, components.data.x)
    return Cutting(top, lanes, devices, batching or default_batching(), fill and not components.data.streamed, costs)


def layout_of(members: Sequence[Member], **options: Any) -> Layout:
    """The layout of a stack. Its components decide how wide a batch may be and whether messages are personal.

    The options are those of :func:`cutting_of`.
    """
    first = members[0]
    _, memory, _ = first_states(first.components, first.params, first.facts)
    cut = cutting_of(first.components, first.params, **options)
    return make_layout([m.schedule for m in members], cut, personal=bool(jax.tree.leaves(memory)))


def shape_of(layout: Layout) -> StackShape:
    """The sizes that the layout's tables need, rounded up so that similar stacks share programs."""
    slots, served = layout.slots, isinstance(layout.slots, MergedSlots)
    spare = served and jax.default_backend() != "cpu"  # the last slot, for a message that is sent in vain
    needed = max(LEAST_SLOTS, slots.count + spare)
    shape = StackShape(
        runs=len(layout.schedules),
        num_clients=layout.schedules[0].num_clients,
        capacity=layout.capacity,
        positions=padded_length(len(layout.run) + layout.capacity),
        slot_count=next(s for s in ladder(2 * needed) if s >= needed),
    )
    if served:
        return shape._replace(writes=padded_length(len(slots.write_slot)))
    return shape._replace(entries=padded_length(len(slots.entry) + 1), fragments=layout.schedules[0].fragments)


def held_out(
    members: Sequence[Member], *, per_client: bool, own: bool, sharding: NamedSharding | None
) -> list[RunTests]:
    """Per member, on the device: test inputs, targets, the test examples of each client, own tests and validation part.

    ``own``: whether clients have models of their own, which are evaluated on their own tests; without, those are None.
    So are the examples of each client without ``per_client``.
    """
    data = [m.components.data for m in members]
    shared = to_devices({id(d.test_x): (d.test_x, d.test_y) for d in data}, sharding)
    held_back = max(0 if (part := validation_part(d)) is None else len(part.order) for d in data)
    split = []
    for d, m in zip(data, members):
        part = validation_part(d, padded_length(held_back, 512))  # equally long for runs that share a program
        inputs = Inputs(own_tests(d, m.schedule) if own else None, {} if part is None else {"validation_": part})
        split.append((owners(d) if per_client else None, inputs))
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


def params_of(members: Sequence[Member], shape: StackShape, sharding: NamedSharding | None) -> Params:
    """The first models of all runs on the device, [R, ...]; without the axis where R = 1."""
    every = [m.params for m in members] + [members[0].params] * (shape.runs - len(members))
    params = every[0] if shape.runs == 1 else jax.tree.map(lambda *leaves: np.stack(leaves), *every)
    return to_devices(params, sharding)


def placed(
    members: Sequence[Member],
    layout: Layout,
    shape: StackShape,
    facts: StackFacts,
    *,
    per_client: bool = False,
    mesh: Mesh | None = None,
    tables: Any = None,
) -> Stack:
    """A stack on the device, without its programs. Its members have flat components.

    ``tables``: by default those of the layout.
    """
    components = members[0].components
    data, sharding = [m.components.data for m in members], everywhere(mesh)
    feed = None
    if data[0].streamed:
        feed = make_feed([m.schedule.client[m.schedule.job] for m in members], layout, data[0], sharding)
    if tables is None:
        lasting, begins = lasting_tables(shape, members, feed)
        columns = event_columns(layout, shape, members, begins, feed)
        tables = DeviceTables(**to_devices(lasting | columns, sharding))
    params = params_of(members, shape, sharding)
    own = per_client and differs(components, members[0].params)
    tests = held_out(members, per_client=per_client, own=own, sharding=sharding)
    measures = [m.measures for m in members]
    inputs: list[Inputs | None] = [None] * len(members)
    if measures[0] != NOTHING:
        inputs = to_devices(inputs_of(data, [m.schedule for m in members], measures, per_client), sharding)
    every_test = tests_together(tests, shape.runs) if jax.default_backend() != "cpu" else None
    parts = (members, layout, shape, facts, tables, params, tests, None)
    return Stack(*parts, feed=feed, sharding=sharding, inputs=inputs, every_test=every_test)


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
    if jax.default_backend() != "cpu":
        members = [m._replace(components=flattened(m.components)) for m in members]
    stack = placed(members, layout, shape, stack_facts(members, layout, shape), per_client=per_client, mesh=mesh)
    shapes = shapes_of(stack, mesh)
    fixed = tree.num_bytes((stack.tables._asdict() | {"key": ()}, stack.tests[0], stack.inputs[0], shapes.carry))
    needed = fixed + layout.dealt.lanes * tree.num_bytes(shapes.buffers)
    if memory_limit is not None and needed > memory_limit:
        raise TooLarge(needed, layout.capacity)
    programs = compile_programs(stack, shapes, mesh=mesh, models=models)
    needed += layout.dealt.lanes * max(map(temporary_bytes, programs.train.values()))
    if memory_limit is not None and needed > memory_limit:
        raise TooLarge(needed, layout.capacity)
    return stack._replace(programs=programs, num_bytes=needed)
