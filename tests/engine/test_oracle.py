"""Engine equals oracle: every rule under every timing and three delay models, in float64."""

from __future__ import annotations

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async import Method, simulate
from fedjax_async.clock import AVAILABILITY, FAULTS, NETWORKS, TIMINGS, Limits
from fedjax_async.engine import run_reference, run_waves
from fedjax_async.server import SERVERS
from fedjax_async.types import Info, Message, ServerAlgorithm
from tests.engine.problem import case, close

# one or two specs for each policy; the lengths of windows and rounds fit delays of mean 1
POLICIES = {
    "every": ["every", "every:concurrency=3"],
    "buffer": ["buffer:size=3", "buffer:size=2,concurrency=4,sampling=round_robin"],
    "window": ["window:length=0.7"],
    "cohort": ["cohort:size=4", "cohort:size=3,over_selection=1,deadline=2"],
    "participation": ["participation:length=1"],
}
# how batches are trained; each compiles its own programs
WAYS = {
    "vmap": {"max_width": 4, "batching": "vmap"},
    "loop": {"max_width": None, "batching": "loop"},
    "alone": {"max_width": 1, "batching": "vmap"},
}
# These rules run under one policy only, the others are marked slow: their clients take long to compile.
ONCE = {"asynccurve": "buffer", "floco": "window", "fedmrur": "cohort"}
DELAYS = ["constant:mean=1", "lognormal:mean=1,heterogeneity=0.5", "exponential:mean=1"]


def test_policies_are_all_there():
    assert set(POLICIES) == set(TIMINGS)


def matrix():
    """Every rule under ``every`` and one other policy, with one spec, delay and way each; the others are marked slow.

    ``tests/test_worlds.py`` draws from all of them. Programs differ by way and by whether every arrival closes a step:
    a rule is vmapped under ``every`` and looped under the other policy, and the next rule vice versa. Every eighth rule
    also trains one client at a time.
    """
    for (i, rule), (j, policy), (k, delay) in product(enumerate(SERVERS), enumerate(POLICIES), enumerate(DELAYS)):
        specs = POLICIES[policy]
        for (m, timing), way in product(enumerate(specs), WAYS):
            usual = (i + j) % len(DELAYS) == k and (i + j) // len(DELAYS) % len(specs) == m
            usual &= ONCE[rule] == policy if rule in ONCE else j in (0, 1 + i % (len(POLICIES) - 1))
            usual &= way == ("vmap", "loop")[(i + (policy != "every")) % 2] or (way == "alone" and j == i % 8 == 0)
            yield pytest.param(
                rule, timing, delay, way, marks=[] if usual else [pytest.mark.slow], id=f"{rule}-{timing}-{delay}-{way}"
            )


def test_every_rule_meets_two_policies_and_both_batchings_and_all_are_met():
    usual = [param.values for param in matrix() if not param.marks]
    for rule in SERVERS.keys() - ONCE.keys():
        timings = {timing for r, timing, *_ in usual if r == rule}
        assert len({timing.partition(":")[0] for timing in timings} & set(POLICIES)) == 2, rule
        assert {way for r, *_, way in usual if r == rule} >= {"vmap", "loop"}, rule
    assert {timing.partition(":")[0] for _, timing, *_ in usual} == set(POLICIES)
    assert {rule for rule, *_ in usual} == set(SERVERS)
    assert {way for *_, way in usual} == set(WAYS)


@pytest.mark.parametrize(("rule", "timing", "delay", "way"), list(matrix()))
def test_engine_equals_oracle(rule, timing, delay, way):
    with jax.enable_x64(True):
        given = case(rule, timing, delay)
        want = run_reference(*given)
        have = run_waves(*given, **WAYS[way])
        close(have.params, want.params, 1e-9)
        assert have.params["hidden"]["kernel"].dtype == np.float64
        for name, values in want.scores.items():
            np.testing.assert_allclose(have.scores[name], values, rtol=1e-9, atol=1e-12)
        for name, values in want.records.items():
            np.testing.assert_allclose(have.records[name], values, rtol=1e-9, atol=1e-12, err_msg=name)
    before, after = (np.asarray(p["output"]["kernel"]) for p in (given.params, want.params))
    moved = np.abs(after - before).max()
    assert moved > 1e-4, "the run must change the model, or the comparison shows nothing"


def scaled(count: int) -> ServerAlgorithm:
    """A rule with functions that all depend on the number of clients: its state is the model times that number."""

    def given(facts):
        return scaled(facts.num_clients)

    def init(params):
        return (jax.tree.map(lambda leaf: count * leaf, params), jnp.zeros(count)), ()

    def receive(state, memory, arrival):
        model = jax.tree.map(lambda w, u: w + count * u, state[0], arrival.upload)
        return (model, state[1].at[arrival.client].add(1)), memory, Info(arrival.weight)

    def params(state):
        return jax.tree.map(lambda leaf: leaf / count, state[0])

    return ServerAlgorithm(
        init, receive, lambda state, memory, _: (Message(params(state)), memory), params, given=given
    )


def test_a_rule_is_given_the_facts_of_the_run_wherever_it_is_used():
    with jax.enable_x64(True):
        problem = case(scaled(1))
        waves, oracle = run_waves(*problem), run_reference(*problem)
    close(waves.params, oracle.params, 1e-12)
    settings = {"dataset": "quadratic", "model": "linear", "partition": "natural", "steps": 1, "updates": 4}
    found, usual = simulate(method=Method(scaled(1)), **settings), simulate(method="asgd", **settings)
    close(found.params, usual.params, 1e-5)


def test_proximal_client_equals_oracle():
    with jax.enable_x64(True):
        given = case("fedasync", proximal=0.5)
        close(run_waves(*given).params, run_reference(*given).params, 1e-9)
        plain = case("fedasync")
        gap = np.abs(run_waves(*given).params["output"]["kernel"] - run_waves(*plain).params["output"]["kernel"])
        assert gap.max() > 1e-4


# every model of availability and faults, and the server's limits; the last mixes several
CONDITIONS = {
    "joins and leaves": {"availability": "joins:share=0.4,by=3+leaves:share=0.4,by=6"},
    "periodic": {"availability": "periodic:on=3,off=2"},
    "sessions, paused": {"availability": "sessions:on=3,off=2,leaving=pause"},
    "sessions, lost": {"availability": "sessions:on=3,off=2,leaving=lose"},
    "drop": {"faults": "drop:probability=0.3"},
    "duplicate": {"faults": "duplicate:probability=0.3"},
    "crash": {"faults": "crash:probability=0.3,restart=2"},
    "late": {"faults": "late:probability=0.3,factor=4", "limits": Limits(timeout=2.0)},
    "late, dropped": {"faults": "late:probability=0.3,factor=4", "limits": Limits(timeout=2.0, late="drop")},
    "corrupt": {"faults": "corrupt:probability=0.3"},
    "groups": {"faults": "groups:count=2,up=4,down=2"},
    "network": {"network": "link:down=1e3,up=5e2,latency=0.1,jitter=0.3,heterogeneity=0.5"},
    "stale": {"limits": Limits(max_staleness=2)},
    "mixture": {
        "availability": "joins:share=0.1,by=5",
        "faults": "drop:probability=0.1+duplicate:probability=0.05+corrupt:probability=0.05",
    },
}


def mishaps():
    """Every condition under four policies, two vmapped and two looped; the other batching is marked slow."""
    timings = ["every", "buffer:size=2,concurrency=4", "cohort:size=4", "window:length=1.5"]
    for (i, condition), (j, timing), (k, batching) in product(
        enumerate(CONDITIONS), enumerate(timings), enumerate(["vmap", "loop"])
    ):
        marks = [] if (i + j) % 2 == k else [pytest.mark.slow]
        yield pytest.param(CONDITIONS[condition], timing, batching, marks=marks, id=f"{condition}-{timing}-{batching}")


@pytest.mark.parametrize(("conditions", "timing", "batching"), list(mishaps()))
def test_engine_equals_oracle_whatever_goes_wrong(conditions, timing, batching):
    with jax.enable_x64(True):
        rule = "fedavg" if timing.startswith("cohort") else "fedbuff"
        given = case(rule, timing, "exponential:mean=1", **conditions)
        want = run_reference(*given)
        have = run_waves(*given, max_width=4, batching=batching)
        close(have.params, want.params, 1e-9)
        for name, values in want.records.items():
            np.testing.assert_allclose(have.records[name], values, rtol=1e-9, atol=1e-12, err_msg=name)
        spoiled = given.schedule.corrupt[given.schedule.job]
        np.testing.assert_array_equal(want.records["accepted"], ~spoiled)


def test_every_model_of_what_goes_wrong_is_there():
    text = " ".join(str(one) for one in CONDITIONS.values())
    for name in {*AVAILABILITY, *FAULTS, *NETWORKS} - {"always", "csv", "edges"}:
        assert f"{name}:" in text, name
