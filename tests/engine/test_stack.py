"""Runs side by side: each gets exactly what it gets alone."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from fedjax_async.clock import Until, plan
from fedjax_async.engine import Components, run_waves
from fedjax_async.engine.layout import merge, merge_slots, rank_bounds
from fedjax_async.engine.run import run_stack
from fedjax_async.engine.stack import layout_of, make_member, make_stack, shape_of
from fedjax_async.server import fedasync
from tests.engine.problem import case, client, close
from tests.engine.test_contract import carrying, remembering

TIMINGS = ["every", "buffer:size=2", "cohort:size=3", "window:length=0.7"]


def family(hyper):
    return fedasync(mixing=hyper["mixing"], exponent=hyper["exponent"])


def member(timing, seed, mixing, updates, components=None):
    one = case("fedasync", timing, "exponential:mean=1", seed=seed, updates=updates)
    components = components or one.components._replace(
        server=family, hyper={"mixing": mixing, "exponent": 0.3 + mixing}
    )
    return make_member(components, one.schedule, one.params, jax.random.key(seed), one.points)


def together(members, batching, **options):
    made = layout_of(members, batching=batching, **options)
    return run_stack(make_stack(members, made, shape_of(made)))


def ways():
    """Every timing in both batchings; one of the two is slow."""
    for (i, timing), (k, batching) in itertools.product(enumerate(TIMINGS), enumerate(["loop", "vmap"])):
        yield pytest.param(timing, batching, marks=[] if i % 2 == k else [pytest.mark.slow])


@pytest.mark.slow_cases(
    "window:length=0.7-vmap", "every-vmap", "every-loop", "cohort:size=3-loop", "buffer:size=2-vmap"
)
@pytest.mark.float64
@pytest.mark.parametrize(("timing", "batching"), list(ways()))
def test_a_stack_equals_its_runs_alone(timing, batching):
    members = [member(timing, seed, mixing, updates) for seed, mixing, updates in
               [(3, 0.2, 24), (4, 0.9, 17), (5, 0.6, 31)]]  # fmt: skip
    outcomes = together(members, batching, max_width=5)
    for one, have in zip(members, outcomes, strict=True):
        want = run_waves(*one[:5])
        close(have.params, want.params, 1e-12)
        for name, values in want.scores.items():
            np.testing.assert_allclose(have.scores[name], values, rtol=1e-11, atol=1e-13)
        for name, values in want.records.items():
            np.testing.assert_allclose(have.records[name], values, rtol=1e-11, atol=1e-13, err_msg=name)
        assert have.counters["waves"] == want.counters["waves"]
    kernels = [outcome.params["output"]["kernel"] for outcome in outcomes]
    assert np.abs(kernels[0] - kernels[1]).max() > 1e-3, "the runs must differ, or the comparison shows nothing"


@pytest.mark.slow_cases("vmap")
@pytest.mark.float64
@pytest.mark.parametrize("batching", ["vmap", pytest.param("loop", marks=pytest.mark.slow)])
def test_memory_and_client_state_are_kept_apart(batching):
    rule, who = remembering(), carrying(client())
    base = case("fedasync")
    components = Components(rule, who, base.components.model, base.components.data)
    members = [member("cohort:size=3", seed, 0.5, 20, components) for seed in (1, 2, 3)]
    for one, have in zip(members, together(members, batching), strict=True):
        want = run_waves(*one[:5])
        close(have.params, want.params, 1e-12)
        np.testing.assert_array_equal(have.records["count"], want.records["count"])


def schedules():
    common = {"num_clients": 5, "local_steps": np.array([3, 1, 4, 1, 5])}
    return [
        plan(timing, "exponential", seed=seed, until=Until(updates=updates), **common)
        for timing, seed, updates in [("every", 1, 40), ("buffer:size=2", 2, 23), ("cohort:size=3", 3, 31)]
    ]


@pytest.mark.parametrize("by_ranks", [False, True])
def test_a_merged_order_keeps_every_run_in_order_and_waves_aligned(by_ranks):
    runs = schedules()
    merged = merge(runs, by_ranks)
    assert sorted(merged.source) == list(range(sum(len(s.job) for s in runs)))
    for r, (s, place) in enumerate(zip(runs, merged.positions)):
        assert (np.diff(place) > 0).all() and (merged.run[place] == r).all()
        # a job starts from a model written in an earlier wave of its own run
        wave = np.searchsorted(merged.waves, place, side="right")
        written = s.dispatched_after[s.job]
        earlier = np.where(written > 0, wave[np.maximum(written - 1, 0)], -1)
        assert (earlier < wave).all()
    rounds = rank_bounds(merged.run, merged.waves)
    for low, high in itertools.pairwise(rounds):
        if by_ranks:
            assert len(set(merged.run[low:high])) == high - low
    assert set(merged.waves) <= set(rounds)
    if by_ranks:
        widest = max(np.diff(merged.waves))
        assert len(rounds) - 1 < len(merged.run), "rounds must put runs together"
        assert widest > 1


@pytest.mark.parametrize("by_ranks", [False, True])
@pytest.mark.parametrize("personal", [False, True])
def test_no_job_of_a_stack_reads_another_message_than_its_own(by_ranks, personal):
    """Replay all writes and reads: a job finds the message of its run, version and (if personal) client in its slot."""
    runs = schedules()
    merged = merge(runs, by_ranks)
    slots = merge_slots(runs, merged, merged.waves, personal)
    table: dict[int, tuple] = {}
    versions = [np.concatenate([[0], np.cumsum(s.closes)]) for s in runs]
    applied = [0] * len(runs)

    def write(position):
        for w in range(slots.write_bounds[position], slots.write_bounds[position + 1]):
            r = int(slots.write_run[w])
            table[int(slots.write_slot[w])] = (r, int(versions[r][applied[r]]), int(slots.write_client[w]))

    write(0)
    for low, high in itertools.pairwise(merged.waves):
        for p in range(low, high):  # a wave reads all its messages first
            r = int(merged.run[p])
            s = runs[r]
            job = s.job[np.searchsorted(merged.positions[r], p)]
            run, version, who = table[int(slots.start_slot[p])]
            assert (run, version) == (r, int(s.version[job]))
            assert not personal or who == s.client[job]
        for p in range(low, high):
            applied[int(merged.run[p])] += 1
            write(p + 1)
