"""Algorithms with memory, personal messages and client state; rejected uploads; compiled programs."""

from __future__ import annotations

from itertools import product

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async import tree
from fedjax_async.clock import Limits, trained_in_vain
from fedjax_async.engine import run_reference, run_waves
from fedjax_async.server import fedasync, fedbuff
from fedjax_async.types import ClientAlgorithm, Info, Message, ServerAlgorithm
from tests.engine.problem import case, client, close, data

TIMINGS = ["every", "buffer:size=3", "cohort:size=2,over_selection=2"]  # the last has jobs that never arrive
MORE_TIMINGS = ["every:concurrency=3", "cohort:size=4", "window:length=0.7"]
WAYS = [(1, "vmap"), (2, "loop"), (2, "vmap"), (None, "loop"), (None, "vmap")]  # each compiles its own programs


def remembering() -> ServerAlgorithm:
    """A server with a row of memory about each client (its last upload) and personal messages."""

    def init(params):
        return {"x": params, "count": jnp.int32(0)}, jax.tree.map(jnp.zeros_like, params)

    def receive(state, memory, arrival):
        x = jax.tree.map(lambda x, d, h: x + 0.3 * (d - 0.5 * h), state["x"], arrival.upload, memory)
        kept = tree.where(arrival.weight > 0, arrival.upload, memory)
        return {"x": x, "count": state["count"] + 1}, kept, Info(arrival.weight, {"count": state["count"]})

    def dispatch(state, memory, request):
        sent = jax.tree.map(lambda x, h: x + 0.25 * h, state["x"], memory)
        return Message(sent, extra=tree.norm(memory)), jax.tree.map(lambda h: 0.9 * h, memory)

    return ServerAlgorithm(init, receive, dispatch, lambda state: state["x"])


def carrying(base: ClientAlgorithm) -> ClientAlgorithm:
    """A client with state between jobs: it adds half of its last upload to the next one, and counts its jobs."""

    def init(params):
        return jax.tree.map(jnp.zeros_like, params), jnp.int32(0)

    def begin(key, message, state, data):
        return base.begin(key, message, (), data)

    def finish(work, message, state):
        upload, _ = base.finish(work, message, ())
        upload = jax.tree.map(lambda u, e: u + 0.5 * e, upload, state[0])
        return upload, (upload, state[1] + 1)

    return ClientAlgorithm(init, begin, base.step, finish)


def ways_of_timings():
    """Each way of ``WAYS`` with one timing; the other combinations are marked slow."""
    for (i, timing), (k, way) in product(enumerate(TIMINGS + MORE_TIMINGS), enumerate(WAYS)):
        yield pytest.param(timing, *way, marks=[] if k % len(TIMINGS) == i else [pytest.mark.slow])


@pytest.mark.slow_cases(
    "buffer:size=3-None-vmap", "every-None-loop", "cohort:size=2,over_selection=2-2-vmap", "every-1-vmap"
)
@pytest.mark.float64
@pytest.mark.parametrize(("timing", "width", "batching"), list(ways_of_timings()))
def test_memory_personal_messages_and_client_state_equal_the_oracle(timing, width, batching):
    given = case(remembering(), timing, "exponential:mean=1")
    given = given._replace(components=given.components._replace(client=carrying(client())))
    want = run_reference(*given)
    have = run_waves(*given, max_width=width, batching=batching)
    close(have.params, want.params, 1e-10)
    np.testing.assert_array_equal(have.records["count"], want.records["count"])


LATE = {"faults": "late:probability=0.3,factor=4", "limits": Limits(timeout=2.0, late="drop")}
LOST = [("every", {"faults": "drop:probability=0.3"}), ("every", LATE)]
LOST += [("cohort:size=3,over_selection=1", {"faults": "drop:probability=0.3"})]
# Corrupt uploads; the server drops some of them unseen. The state of a client must not depend on that.
LOST += [("every", LATE | {"faults": LATE["faults"] + "+corrupt:probability=0.4"})]


def ways_of_losses():
    """Each loss but the first with one batching; the other combinations are marked slow."""
    for (i, loss), (k, batching) in product(enumerate(LOST), enumerate(["vmap", "loop"])):
        yield pytest.param(*loss, batching, marks=[] if i and i % 2 == k else [pytest.mark.slow])


@pytest.mark.slow_cases("every-conditions7-loop", "every-conditions3-loop")
@pytest.mark.float64
@pytest.mark.parametrize(("timing", "conditions", "batching"), list(ways_of_losses()))
def test_the_state_of_clients_whose_uploads_are_lost_equals_the_oracle(timing, conditions, batching):
    given = case(remembering(), timing, "exponential:mean=1", **conditions)
    given = given._replace(components=given.components._replace(client=carrying(client())))
    want = run_reference(*given)
    close(run_waves(*given, max_width=4, batching=batching).params, want.params, 1e-10)
    assert trained_in_vain(given.schedule).any()
    # a client that forgot the job of a lost upload would continue from a different state
    forgetful = given.components.client._replace(unsent=lambda before, after: before)
    other = run_reference(*given._replace(components=given.components._replace(client=forgetful)))
    gaps = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(), other.params, want.params)
    assert max(jax.tree.leaves(gaps)) > 1e-4


def poisoned(who, bad):
    """The data with NaN inputs for the clients ``bad``."""
    x = who.x.copy()
    for i in bad:
        x[who.order[who.offset[i] : who.offset[i] + who.size[i]]] = np.nan
    return who._replace(x=x)


@pytest.mark.parametrize("run", [run_waves, run_reference])
@pytest.mark.parametrize(
    ("rule", "timing"), [("fedasync", "every"), ("fedbuff", "buffer:size=3"), ("fedadam", "cohort:size=4")]
)
def test_diverged_clients_are_rejected_and_the_run_goes_on(run, rule, timing):
    given = case(rule, timing)
    given = given._replace(components=given.components._replace(data=poisoned(data(), [1, 2])))
    out = run(*given)
    from_bad = np.isin(given.schedule.client[given.schedule.job], [1, 2])
    assert from_bad.any()
    np.testing.assert_array_equal(out.records["accepted"], ~from_bad)
    np.testing.assert_array_equal(out.records["weight"] > 0, ~from_bad)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(out.params))
    assert np.isfinite(out.scores["loss"]).all()
    with pytest.raises(ValueError, match="rejected so far"):
        run(*given, on_bad="raise")


def test_a_run_of_rejected_uploads_only_changes_nothing():
    given = case("fedbuff", "buffer:size=3")
    given = given._replace(components=given.components._replace(data=poisoned(data(), range(5))))
    close(run_waves(*given).params, given.params, 0)


@pytest.mark.float64
def test_rejected_clients_keep_their_state():
    given = case(remembering(), "every")
    components = given.components._replace(client=carrying(client()), data=poisoned(data(), [0]))
    given = given._replace(components=components)
    close(run_waves(*given).params, run_reference(*given).params, 1e-10)


@pytest.fixture
def compilations():
    """Names of the programs that JAX reports as compiled since the start of the test."""
    seen: list[str] = []

    def listen(event: str, seconds: float, **details) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(str(details.get("fun_name", event)))

    jax.clear_caches()  # else the run may begin by clearing the caches, its own programs included
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow_cases("fedbuff-buffer:size=3-lognormal:sigma=1-vmap")
@pytest.mark.parametrize(("rule", "timing", "delay", "batching"), [
    (fedasync, "every", "exponential", "loop"),
    (fedbuff, "buffer:size=3", "lognormal:sigma=1", "vmap"),
    pytest.param(fedasync, "every", "exponential", "vmap", marks=pytest.mark.slow),
    pytest.param(fedbuff, "buffer:size=3", "lognormal:sigma=1", "loop", marks=pytest.mark.slow),
    pytest.param(fedbuff, "cohort:size=5", "constant", "vmap", marks=pytest.mark.slow),
    pytest.param(fedbuff, "cohort:size=5", "constant", "loop", marks=pytest.mark.slow),
])  # fmt: skip
def test_few_programs_and_none_for_a_second_run(compilations, rule, timing, delay, batching):
    given = case(rule(), timing, delay, updates=60, sizes=tuple(range(1, 41, 2)))
    given = given._replace(components=given.components._replace(client=carrying(client())))
    jax.block_until_ready(given.params)
    compilations.clear()
    out = run_waves(*given, batching=batching)
    assert 0 < len(compilations) <= 12, compilations
    assert out.counters["programs"] <= (12 if batching == "vmap" else 5)
    compilations.clear()
    again = run_waves(*given, batching=batching)
    assert compilations == []
    for a, b in zip(jax.tree.leaves(out.params), jax.tree.leaves(again.params)):
        np.testing.assert_array_equal(a, b)
