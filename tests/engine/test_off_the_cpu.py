"""The engine as it is compiled for other backends than a CPU, run on a CPU: it equals the oracle, too."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.engine import run_reference, serving
from fedjax_async.engine.run import run_stack
from fedjax_async.engine.stack_facts import sends_twice, stack_facts
from fedjax_async.server import SERVERS
from tests.engine.problem import case, close, near, remembering, stack_of

LAYOUT = {"max_width": 4, "batching": "vmap"}
RANDOM, EQUAL = "exponential:mean=1", "constant:mean=1"
# (rule, timing, delay, the most messages after an arrival, rounded up to a power of two, whether arrivals come in
# groups, between which the server closes and sends); a rule with a memory sends each client of a cohort its own
RUNS = [
    ("fedadam", "buffer:size=3", RANDOM, 1, True),
    ("ca2fl", "buffer:size=3", RANDOM, 1, False),
    ("fedasync", "every", EQUAL, 1, True),
    ("fedasync", "every", RANDOM, 1, False),
    ("orthofl", "window:length=1.5", RANDOM, 8, True),
    (remembering, "cohort:size=4", RANDOM, 4, True),
]


@pytest.fixture
def off_the_cpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def fresh(rule, timing, delay=RANDOM, seed=3, **conditions):
    """A case whose rule has no programs yet: their keys do not say for which backend they were made."""
    made = SERVERS[rule]() if isinstance(rule, str) else rule()
    return case(made, timing, delay, seed=seed, **conditions)


@pytest.mark.float64
@pytest.mark.usefixtures("off_the_cpu")
@pytest.mark.parametrize(("rule", "timing", "delay", "most", "grouped"), RUNS)
def test_without_loops_of_unknown_length_a_run_equals_the_oracle(rule, timing, delay, most, grouped):
    given = fresh(rule, timing, delay)
    stack = stack_of(given, **LAYOUT)
    sent = np.diff(stack.layout.slots.write_bounds)[1:]
    facts = stack_facts(stack.members, stack.layout, stack.shape)
    assert (sent.max() <= most == facts.messages) and facts.grouped == grouped
    (have,) = run_stack(stack)
    want = run_reference(*given)
    close(have.params, want.params, 1e-9)
    near(have.records, want.records)


def equal_to_the_oracle(stack, cases, **options):
    for have, one in zip(run_stack(stack), cases, strict=True):
        want = run_reference(*one, **options)
        close(have.params, want.params, 1e-9)
        near(have.scores, want.scores)


@pytest.mark.float64
@pytest.mark.usefixtures("off_the_cpu")
@pytest.mark.parametrize(("delay", "options"), [(EQUAL, {}), (EQUAL, {"per_client": True}), (RANDOM, {})])
def test_without_loops_of_unknown_length_runs_side_by_side_equal_the_oracle(delay, options):
    rule = SERVERS["fedasync"]()
    cases = [fresh(lambda: rule, "every", delay, seed=seed) for seed in (3, 4, 5)]
    equal_to_the_oracle(stack_of(*cases, of_stack=options, **LAYOUT), cases, **options)


@pytest.mark.usefixtures("off_the_cpu")
def test_runs_that_are_due_at_the_same_time_are_evaluated_in_one_call():
    rule, calls = SERVERS["fedasync"](), []
    stack = stack_of(*(fresh(lambda: rule, "every", EQUAL, seed=seed) for seed in (3, 4, 5)), **LAYOUT)

    def counting(name):
        program = getattr(stack.programs, name)
        return lambda *given: calls.append(name) or program(*given)

    counted = {name: counting(name) for name in ("evaluate", "evaluate_runs")}
    run_stack(stack._replace(programs=stack.programs._replace(**counted)))
    assert calls == ["evaluate_runs"] * len(stack.members[0].points.time)


@pytest.mark.float64
@pytest.mark.parametrize(("backend", "runs"), [("gpu", 1), ("cpu", 2)])
def test_a_second_message_to_a_client_depends_on_the_first_though_no_upload_came_between(monkeypatch, backend, runs):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    rule = remembering()  # each message changes what the server remembers of the client
    cases = [fresh(lambda: rule, "every", seed=seed, faults="drop:probability=0.5") for seed in (3, 4)[:runs]]
    stack = stack_of(*cases, **LAYOUT)
    assert sends_twice(stack.layout)
    equal_to_the_oracle(stack, cases)


def loops_of_receive(rule, timing, delay):
    """How many loops a GPU's program has that applies arrivals; compiled for none."""
    stack = stack_of(fresh(rule, timing, delay), **LAYOUT)
    carry = stack.programs.start(stack.tables, stack.params)
    buffers = stack.buffers(carry)
    facts = stack_facts(stack.members, stack.layout, stack.shape)
    receive = jax.jit(serving.make_receive(stack.members[0].components.rule, facts))
    lowered = receive.trace(stack.tables, carry, buffers, np.zeros(2, np.int32)).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count("stablehlo.while")


@pytest.mark.parametrize("run", RUNS[:2])
def test_off_the_cpu_groups_and_arrivals_are_the_only_loops_of_what_the_server_does(monkeypatch, run):
    *given, _, grouped = run
    assert loops_of_receive(*given) > 2
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert loops_of_receive(*given) == 1 + grouped


@pytest.mark.float64
@pytest.mark.parametrize("backend", ["gpu", "cpu"])
def test_models_of_a_sweep_in_another_thread_have_all_their_digits(monkeypatch, backend):
    """Each thread has its own setting of 64 bits, and these models are computed from the server's state."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    made = SERVERS["fedasync"]()
    rule = made._replace(params=lambda state: jax.tree.map(jnp.negative, state.params))
    stack = stack_of(*(case(rule, "every", seed=seed, updates=8) for seed in (3, 4)), **LAYOUT)
    with ThreadPoolExecutor(1) as another:
        there = another.submit(run_stack, stack).result()
    for have, want in zip(there, run_stack(stack), strict=True):
        jax.tree.map(np.testing.assert_array_equal, have.params, want.params)
