"""Runs side by side: each gets exactly what it gets alone."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from fedjax_async.clock import Until, plan
from fedjax_async.engine import run_reference, run_waves
from fedjax_async.engine.layout import merge, merge_slots, rank_bounds
from fedjax_async.engine.measures import Measures, Sample
from fedjax_async.engine.run import run_stack
from fedjax_async.engine.tables import padded_length
from fedjax_async.server import fedasync
from tests.engine.problem import case, changed, client, close, data, near, personal, stack_of
from tests.engine.test_probes import PROBES, validated
from tests.engine.test_scores import with_test_rows


def family(hyper):
    return fedasync(mixing=hyper["mixing"], exponent=hyper["exponent"])


def member(timing, seed, mixing, updates):
    one = case("fedasync", timing, "exponential:mean=1", seed=seed, updates=updates)
    one = changed(one, rule=family, hyper={"mixing": mixing, "exponent": 0.3 + mixing})
    return one._replace(key=jax.random.key(seed))


@pytest.mark.slow
@pytest.mark.float64
def test_a_stack_equals_its_runs_alone():
    """Worlds have the other timings, where a run is the second of a sweep of two."""
    members = [member("buffer:size=2", *run) for run in [(3, 0.2, 24), (4, 0.9, 17), (5, 0.6, 31)]]
    outcomes = run_stack(stack_of(*members, batching="loop", max_width=5))
    for one, have in zip(members, outcomes, strict=True):
        want = run_waves(*one)
        close(have.params, want.params, 1e-12)
        near(have.scores, want.scores, 1e-11, 1e-13)
        near(have.records, want.records, 1e-11, 1e-13)
        assert have.counters["waves"] == want.counters["waves"]
    kernels = [outcome.params["output"]["kernel"] for outcome in outcomes]
    assert np.abs(kernels[0] - kernels[1]).max() > 1e-3, "the runs must differ, or the comparison shows nothing"


def watched(seed, updates, rows, first, sample):
    """A run whose clients keep state, with a validation part, and what is measured in it."""
    given = personal("buffer:size=2", seed=seed, updates=updates, faults="drop:probability=0.3")
    who = with_test_rows(validated(data(), first), rows)
    asked = {"probes": PROBES, "measures": Measures(training=Sample(20, seed=sample), fine_tune=3, tuner=client())}
    return changed(given, data=who)._replace(key=jax.random.key(seed)), asked


@pytest.mark.slow
@pytest.mark.float64
def test_all_that_runs_keep_and_measure_is_their_own():
    """Memory, client state, probes, test and validation parts, samples of the training loss, fine-tuned models."""
    cases, asked = zip(watched(3, 24, [4, 3, 4, 0, 4], 0, 5), watched(4, 17, [2, 0, 5, 3, 1], 5, 6))
    rule, who = cases[0].components.rule, cases[0].components.client
    cases = [changed(one, rule=rule, client=who) for one in cases]
    stack = stack_of(*cases, facts=asked, of_stack={"per_client": True}, batching="vmap")
    for have, one, its in zip(run_stack(stack), cases, asked, strict=True):
        want = run_reference(*one, per_client=True, **its)
        close(have.params, want.params, 1e-9)
        np.testing.assert_array_equal(have.records["count"], want.records["count"])
        near(have.scores, want.scores)
        for name, table in want.probes.items():
            near(have.probes[name], table)
    assert {"validation_loss", "client_own_loss", "client_tuned_loss", "train_loss"} <= have.scores.keys()


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
    slots = merge_slots(runs, merged, merged.waves, merged.waves, personal)
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


def test_lengths_of_tables_are_powers_of_two():
    assert [padded_length(n, least=4) for n in (0, 4, 5, 8, 9)] == [4, 4, 8, 8, 16]
