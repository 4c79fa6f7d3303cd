"""The engine as it is compiled for other backends than a CPU, run on a CPU: it equals the oracle, too."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.engine import run_reference, serving
from fedjax_async.engine.flat import flattened
from fedjax_async.engine.programs import shapes_of
from fedjax_async.engine.run import run_stack
from fedjax_async.engine.stack_facts import sends_twice, stack_facts
from fedjax_async.engine.stacking import layout_of, make_member, placed, shape_of
from tests.engine.problem import case, close, near, on_an_accelerator, remembering, server, stack_of

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


def uncompiled(rule, timing, delay):
    """``(layout, facts, stack)`` of a run, without programs."""
    members = [make_member(*case(rule, timing, delay))]
    members = [m._replace(components=flattened(m.components)) for m in members]
    layout = layout_of(members, **LAYOUT)
    facts = stack_facts(members, layout, shape_of(layout))
    return layout, facts, placed(members, layout, shape_of(layout), facts)


@pytest.mark.usefixtures("off_the_cpu")
@pytest.mark.parametrize(("rule", "timing", "delay", "most", "grouped"), RUNS)
def test_programs_know_what_may_follow_an_arrival(rule, timing, delay, most, grouped):
    layout, facts, _ = uncompiled(rule, timing, delay)
    sent = np.diff(layout.slots.write_bounds)[1:]
    assert (sent.max() <= most == facts.messages) and facts.grouped == grouped


def equal_to_the_oracle(stack, cases, **options):
    for have, one in zip(run_stack(stack), cases, strict=True):
        want = run_reference(*one, **options)
        close(have.params, want.params, 1e-9)
        near(have.records, want.records)
        near(have.scores, want.scores)


@pytest.mark.usefixtures("off_the_cpu")
@pytest.mark.parametrize(("rule", "timing", "delay"), [run[:3] for run in RUNS[:-1]])
def test_without_loops_of_unknown_length_a_run_equals_the_oracle(rule, timing, delay):
    given = case(rule, timing, delay)
    equal_to_the_oracle(stack_of(given, **LAYOUT), [given])


def seeds(rule, delay, **conditions):
    return [case(rule, "every", delay, seed=seed, **conditions) for seed in (3, 4)]


@pytest.mark.usefixtures("off_the_cpu")
@pytest.mark.parametrize(("delay", "options"), [(EQUAL, {}), (EQUAL, {"per_client": True}), (RANDOM, {})])
def test_without_loops_of_unknown_length_runs_side_by_side_equal_the_oracle(delay, options):
    cases = seeds("fedasync", delay)
    equal_to_the_oracle(stack_of(*cases, of_stack=options, **LAYOUT), cases, **options)


@pytest.mark.usefixtures("off_the_cpu")
def test_runs_that_are_due_at_the_same_time_are_evaluated_in_one_call():
    stack, calls = stack_of(*seeds("fedasync", EQUAL), **LAYOUT), []

    def counting(name, program):
        return lambda *given: calls.append(name) or program(*given)

    ((what, one),), runs = stack.programs.scores, stack.programs.evaluate_runs
    counted = {"scores": [(what, counting("evaluate", one))], "evaluate_runs": counting("evaluate_runs", runs)}
    run_stack(stack._replace(programs=stack.programs._replace(**counted)))
    assert calls == ["evaluate_runs"] * len(stack.members[0].points.time)


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
    _, facts, stack = uncompiled(rule, timing, delay)
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
