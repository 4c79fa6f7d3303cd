"""Engine equals oracle and textbook for what the registries do not name; ``tests/test_worlds.py`` draws from them."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.clock import Limits, Until, plan, trained_in_vain
from fedjax_async.engine import run_reference, run_waves
from fedjax_async.engine.layout import merge, merge_slots, rank_bounds
from fedjax_async.engine.measures import Measures, Sample
from fedjax_async.engine.run import run_stack
from fedjax_async.engine.tables import padded_length
from fedjax_async.local import job_key, run_job
from fedjax_async.types import ClientData, Info, Message, Schedule, ServerAlgorithm
from tests.engine.problem import SIZES, carrying, case, changed, client, close, data, near, personal, same, stack_of
from tests.engine.test_probes import PROBES, validated
from tests.engine.test_scores import with_test_rows

pytestmark = pytest.mark.float64


def farthest(one, other):
    return max(np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in zip(*map(jax.tree.leaves, (one, other))))


def test_clients_remember_the_jobs_of_lost_uploads():
    """Lost and late uploads of clients with state, and corrupt ones of which the server drops some unseen."""
    faults = "late:probability=0.3,factor=4+corrupt:probability=0.4"
    given = personal(faults=faults, limits=Limits(timeout=2.0, late="drop"))
    want, have = run_reference(*given), run_waves(*given, batching="vmap", max_width=2)
    close(have.params, want.params, 1e-10)
    np.testing.assert_array_equal(have.records["count"], want.records["count"])
    assert trained_in_vain(given.schedule).any()
    forgetful = carrying(client())._replace(unsent=lambda before, after: before)
    assert farthest(run_reference(*changed(given, client=forgetful)).params, want.params) > 1e-4


def moving_at_once(remembers: bool) -> ServerAlgorithm:
    """Every arrival moves the params at once, also where a server step has several; no ``close``."""

    def init(params):
        return {"params": params, "seen": jnp.zeros(())}, jnp.zeros(()) if remembers else ()

    def receive(state, memory, arrival):
        moved = jax.tree.map(lambda x, d: x + 0.3 * d, state["params"], arrival.upload)
        return {"params": moved, "seen": state["seen"] + 1}, memory, Info(arrival.weight)

    def dispatch(state, memory, request):
        return Message(state["params"]), memory

    return ServerAlgorithm(init, receive, dispatch, lambda state: state["params"])


@pytest.mark.parametrize(("remembers", "timing"), [(True, "buffer:size=3"), (False, "every")])
def test_a_rule_whose_every_arrival_moves_the_model_equals_the_oracle(remembers, timing):
    given = case(moving_at_once(remembers), timing, "exponential:mean=1", updates=20)
    close(run_waves(*given).params, run_reference(*given).params, 1e-12)


def test_a_rule_whose_messages_change_within_a_step_needs_a_memory():
    """Rules without memory share messages between jobs."""
    with pytest.raises(ValueError, match=r"state\['params'\].* changes in receive and is read by dispatch.*memory"):
        run_waves(*case(moving_at_once(False), "buffer:size=3"))


def poisoned(who, bad):
    """The data with NaN inputs for the clients ``bad``."""
    x = who.x.copy()
    for i in bad:
        x[who.order[who.offset[i] : who.offset[i] + who.size[i]]] = np.nan
    return who._replace(x=x)


@pytest.mark.parametrize(
    ("run", "rule", "timing"),
    [(run_waves, "fedadam", "cohort:size=4"), (run_reference, "fedasync", "every")],
    ids=["waves", "reference"],
)
def test_diverged_clients_are_rejected_and_the_run_goes_on(run, rule, timing):
    given = changed(case(rule, timing), data=poisoned(data(), [1, 2]))
    out = run(*given)
    from_bad = np.isin(given.schedule.client[given.schedule.job], [1, 2])
    assert from_bad.any()
    for accepted in (out.records["accepted"], out.records["weight"] > 0):
        np.testing.assert_array_equal(accepted, ~from_bad)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(out.params))
    assert np.isfinite(out.scores["loss"]).all()
    with pytest.raises(ValueError, match="rejected so far"):
        run(*given, on_bad="raise")


def test_rejected_clients_keep_their_state_as_in_the_oracle():
    given = changed(personal(), data=poisoned(data(), [0]))
    close(run_waves(*given).params, run_reference(*given).params, 1e-10)


@jax.jit
def train(params, key, part, number, steps):
    """One job alone, without the engine."""
    return run_job(client(), job_key(key, *number), Message(params, (), 0), (), part, steps)[0]


def test_fedavg_by_schedule_is_a_textbook_loop():
    given = case("fedavg", "cohort:size=3", updates=12)
    s, who, x = given.schedule, given.components.data, given.params
    arrays = [jnp.asarray(a) for a in (who.x, who.y, who.order)]
    for jobs in s.job.reshape(4, 3):
        deltas = [
            train(x, given.key, ClientData(*arrays, who.offset[i], who.size[i]), (i, s.number[j]), s.local_steps[j])
            for i, j in zip(s.client[jobs], jobs)
        ]
        shares = who.size[s.client[jobs]] / who.size[s.client[jobs]].sum()
        for share, delta in zip(shares, deltas, strict=True):
            x = jax.tree.map(lambda w, d, share=share: w + share * np.asarray(d), x, delta)
    close(run_waves(*given).params, x, 1e-12)


def test_a_schedule_made_by_hand_has_no_corrupt_jobs():
    given = case("fedasync")
    made = given.schedule._asdict()
    by_hand = Schedule(**{name: made[name] for name in list(made)[:12]})
    same(run_waves(*given._replace(schedule=by_hand)).records, run_waves(*given).records)


def test_compared_methods_see_the_same_minibatches():
    """A client's first job starts from the same model under every method, so its upload is the same."""
    norms = []
    for rule, timing in (("fedasync", "every"), ("fedbuff", "buffer:size=3"), ("fedavg", "cohort:size=5")):
        given = case(rule, timing)
        records = run_waves(*given).records
        first = {int(given.schedule.client[j]): e for e, j in reversed(list(enumerate(given.schedule.job)))
                 if given.schedule.number[j] == 0 and given.schedule.version[j] == 0}  # fmt: skip
        norms.append([records["upload_norm"][first[i]] for i in range(len(SIZES))])
    np.testing.assert_allclose(norms[1:], np.broadcast_to(norms[0], (2, len(SIZES))), rtol=1e-12)


# --- runs side by side --------------------------------------------------------------------------------


def watched(seed, updates, rows, first, sample):
    """A run whose clients keep state, with a validation part, and what is measured in it."""
    given = personal("buffer:size=2", seed=seed, updates=updates, faults="drop:probability=0.3")
    who = with_test_rows(validated(data(), first), rows)
    asked = {"probes": PROBES, "measures": Measures(training=Sample(20, seed=sample), fine_tune=3, tuner=client())}
    return changed(given, data=who)._replace(key=jax.random.key(seed)), asked


@pytest.mark.slow
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
    assert set(merged.waves) <= set(rounds)
    if by_ranks:
        assert all(len(set(merged.run[low:high])) == high - low for low, high in itertools.pairwise(rounds))
        assert len(rounds) - 1 < len(merged.run), "rounds must put runs together"
        assert max(np.diff(merged.waves)) > 1


@pytest.mark.parametrize("by_ranks", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_no_job_of_a_stack_reads_another_message_than_its_own(by_ranks, own):
    """Replay all writes and reads: a job finds the message of its run, version and (if ``own``) client in its slot."""
    runs, table = schedules(), {}
    merged = merge(runs, by_ranks)
    slots = merge_slots(runs, merged, merged.waves, merged.waves, own)
    versions, applied = [np.concatenate([[0], np.cumsum(s.closes)]) for s in runs], [0] * len(runs)

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
            assert not own or who == s.client[job]
        for p in range(low, high):
            applied[int(merged.run[p])] += 1
            write(p + 1)


def test_lengths_of_tables_are_powers_of_two():
    assert [padded_length(n, least=4) for n in (0, 4, 5, 8, 9)] == [4, 4, 8, 8, 16]
