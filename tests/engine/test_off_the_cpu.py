"""The engine as for other backends, run on a CPU; states as vectors (``engine/flat.py``), as an accelerator has them.

``tests/test_worlds.py`` has it against the oracle.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from fedjax_async.base import tree
from fedjax_async.engine import run_reference, serving
from fedjax_async.engine.flat import Flat, flat, flattened, opened
from fedjax_async.engine.programs import shapes_of
from fedjax_async.engine.run import run_stack
from fedjax_async.engine.stack_facts import sends_twice, stack_facts
from fedjax_async.engine.stacking import layout_of, make_member, placed, shape_of
from fedjax_async.models import STATISTICS
from fedjax_async.server.running_statistics import weights_and_statistics
from tests.engine.problem import case, close, near, on_an_accelerator, remembering, same, server, stack_of

pytestmark = pytest.mark.float64
LAYOUT = {"max_width": 2, "batching": "vmap"}
RANDOM, EQUAL = "exponential:mean=1", "constant:mean=1"
REMEMBERING = remembering()  # with a memory, the server sends each client of a cohort its own message
BACKENDS = {"gpu": (on_an_accelerator, LAYOUT), "cpu": (nullcontext, LAYOUT | {"max_width": 1})}
# (rule, timing, delay, the most messages after an arrival, rounded up to a power of two, whether arrivals come in
# groups, between which the server closes and sends)
RUNS = [
    ("fedadam", "buffer:size=3", RANDOM, 1, True),
    ("ca2fl", "buffer:size=3", RANDOM, 1, False),
    ("fedasync", "every", EQUAL, 1, True),
    ("fedasync", "every", RANDOM, 1, False),
    (REMEMBERING, "cohort:size=4", RANDOM, 4, True),
    ("orthofl", "window:length=1.5", RANDOM, 8, True),
]


@pytest.fixture
def off_the_cpu():
    with on_an_accelerator():
        yield


def uncompiled(given):
    """``(layout, facts, stack)`` of a run, without programs."""
    member = make_member(*given)
    members = [member._replace(components=flattened(member.components))]
    layout = layout_of(members, **LAYOUT)
    facts = stack_facts(members, layout, shape_of(layout))
    return layout, facts, placed(members, layout, shape_of(layout), facts)


@pytest.mark.usefixtures("off_the_cpu")
@pytest.mark.parametrize(("rule", "timing", "delay", "most", "grouped"), RUNS)
def test_programs_know_what_may_follow_an_arrival(rule, timing, delay, most, grouped):
    layout, facts, _ = uncompiled(case(rule, timing, delay))
    sent = np.diff(layout.slots.write_bounds)[1:]
    assert (sent.max() <= most == facts.messages) and facts.grouped == grouped


def equal_to_the_oracle(stack, cases, **options):
    for have, one in zip(run_stack(stack), cases, strict=True):
        want = run_reference(*one, **options)
        close(have.params, want.params, 1e-9)
        near(have.records, want.records)
        near(have.scores, want.scores)


def seeds(rule, delay, **conditions):
    return [case(rule, "every", delay, seed=seed, **conditions) for seed in (3, 4)]


@pytest.mark.usefixtures("off_the_cpu")
@pytest.mark.parametrize(("delay", "options"), [(EQUAL, {}), (EQUAL, {"per_client": True}), (RANDOM, {})])
def test_runs_side_by_side_equal_the_oracle_and_are_evaluated_in_one_call_where_they_are_due_together(delay, options):
    cases = seeds("fedasync", delay)
    stack, calls = stack_of(*cases, of_stack=options, **LAYOUT), []

    def counting(name, program):
        return lambda *given: calls.append(name) or program(*given)

    scores = [(what, counting("evaluate", one)) for what, one in stack.programs.scores]
    counted = {"scores": scores, "evaluate_runs": counting("evaluate_runs", stack.programs.evaluate_runs)}
    equal_to_the_oracle(stack._replace(programs=stack.programs._replace(**counted)), cases, **options)
    if not options:
        assert (calls == ["evaluate_runs"] * len(stack.members[0].points.time)) == (delay == EQUAL)


@pytest.mark.parametrize(("backend", "runs"), [("gpu", 1), ("cpu", 2)])
def test_a_second_message_to_a_client_depends_on_the_first_though_no_upload_came_between(backend, runs):
    cases = seeds(REMEMBERING, RANDOM, faults="drop:probability=0.5")[:runs]  # each message changes what it remembers
    backend, layout = BACKENDS[backend]
    with backend():
        stack = stack_of(*cases, **layout)
        assert sends_twice(stack.layout)
        equal_to_the_oracle(stack, cases)


def loops_of_receive(rule, timing, delay):
    """How many loops a GPU's program has that applies arrivals; compiled for none."""
    _, facts, stack = uncompiled(case(rule, timing, delay))
    given = stack.tables, *shapes_of(stack)[:2], np.zeros(2, np.int32)
    receive = jax.jit(serving.Receiver(stack.members[0].components.rule, facts).receive)
    return receive.trace(*given).lower(lowering_platforms=("cuda",)).as_text().count("stablehlo.while")


@pytest.mark.parametrize(("rule", "grouped"), [("fedadam", True), ("ca2fl", False)])
def test_off_the_cpu_groups_and_arrivals_are_the_only_loops_of_what_the_server_does(rule, grouped):
    given = server(rule), "buffer:size=3", RANDOM
    assert loops_of_receive(*given) > 2
    with on_an_accelerator():
        assert loops_of_receive(*given) == 1 + grouped


@pytest.mark.parametrize("backend", BACKENDS)
def test_models_of_a_sweep_in_another_thread_have_all_their_digits(backend):
    """Each thread has its own setting of 64 bits, and these models are computed from the server's state."""
    rule = REMEMBERING._replace(params=lambda state: jax.tree.map(jnp.negative, state["x"]))
    backend, layout = BACKENDS[backend]
    with backend():
        stack = stack_of(*seeds(rule, RANDOM, faults="drop:probability=0.5"), **layout)
        with ThreadPoolExecutor(1) as another:
            there = another.submit(run_stack, stack).result()
        for have, want in zip(there, run_stack(stack), strict=True):
            jax.tree.map(np.testing.assert_array_equal, have.params, want.params)


# --- states as vectors --------------------------------------------------------------------------------

SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
DTYPES = st.sampled_from([jnp.float32, jnp.bfloat16, jnp.int32, jnp.bool_, jnp.uint32])
LEAVES = st.builds(lambda shape, dtype, one: jnp.full(shape, one, dtype), SHAPES, DTYPES, st.integers(0, 9))
TREES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.sampled_from("ab"), inner)
)


def alike(one, other):
    assert [leaf.dtype for leaf in jax.tree.leaves(one)] == [leaf.dtype for leaf in jax.tree.leaves(other)]
    same(one, other)


@settings(max_examples=30)  # each shape compiles
@for_all(TREES)
def test_a_pytree_has_one_vector_for_each_dtype_and_is_the_same_when_it_is_opened(value):
    made = flat(value)
    alike(opened((made, jnp.int32(1))), (value, jnp.int32(1)))
    vectors = jax.tree.leaves(made)
    assert len(vectors) == len({leaf.dtype for leaf in jax.tree.leaves(value)})
    assert all(vector.ndim == 1 for vector in vectors)


def test_rows_of_a_table_of_flat_states_are_opened_as_rows():
    rows = [{"w": jnp.full((2, 3), float(k)), "b": jnp.full(2, -float(k)), "n": jnp.int32(k)} for k in range(4)]
    table = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(flat, rows))
    alike(opened(table), jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows))
    alike(opened(tree.gather(table, 2)), rows[2])


def test_keys_running_statistics_and_empty_states_are_still_told_apart():
    state = {"key": jax.random.key(3), "w": jnp.ones(2)}
    assert jnp.array_equal(*(jax.random.key_data(one["key"]) for one in (opened(flat(state)), state)))
    upload = {"dense": jnp.array([3.0, 4.0]), STATISTICS: {"mean": jnp.array([100.0])}}
    weights, statistics = weights_and_statistics(flat(upload))
    assert tree.norm(weights) == 5.0 and jax.tree.leaves(statistics) == [100.0]
    assert flat(()) == () and not isinstance(flat({}), Flat)


def test_only_off_the_cpu_states_messages_and_uploads_are_vectors():
    given = case("scaffold", steps=2, updates=5)
    assert flattened(given.components) is given.components
    with on_an_accelerator():
        _, _, stack = uncompiled(given)
        carry, buffers, _ = shapes_of(stack)
    for held in (carry.server, carry.clients, carry.slots.params, carry.slots.extra, buffers.left, buffers.after):
        leaves = jax.tree.leaves(held)
        assert isinstance(held, Flat) and len(leaves) == len({leaf.dtype for leaf in leaves})
