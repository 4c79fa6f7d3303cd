"""Engine equals oracle and textbook for what the registries do not name; ``tests/test_worlds.py`` draws from them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.clock import Limits, trained_in_vain
from fedjax_async.engine import Every, run_reference, run_waves
from fedjax_async.local import job_key, run_job
from fedjax_async.types import ClientData, Info, Message, ServerAlgorithm
from tests.engine.problem import SIZES, carrying, case, changed, client, close, data, personal

pytestmark = pytest.mark.float64


# Lost uploads of clients with state, jobs that never arrive, and corrupt uploads of which the server drops some unseen.
LATE = {"faults": "late:probability=0.3,factor=4+corrupt:probability=0.4", "limits": Limits(timeout=2.0, late="drop")}
LOST = {"faults": "drop:probability=0.3"}


@functools.cache
def forgetful():
    """The client of ``personal`` that forgets the job of a lost upload."""
    return carrying(client())._replace(unsent=lambda before, after: before)


@pytest.mark.parametrize(
    ("timing", "conditions", "options"),
    [("every", LATE, {"batching": "vmap", "max_width": 2}), ("cohort:size=3,over_selection=1", LOST, {})],
    ids=["late", "over_selection"],
)
def test_memory_personal_messages_and_the_state_of_clients_equal_the_oracle(timing, conditions, options):
    given = personal(timing, **conditions)
    want, have = run_reference(*given), run_waves(*given, **options)
    close(have.params, want.params, 1e-10)
    np.testing.assert_array_equal(have.records["count"], want.records["count"])
    assert trained_in_vain(given.schedule).any()
    other = run_reference(*changed(given, client=forgetful()))
    gaps = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(), other.params, want.params)
    assert max(jax.tree.leaves(gaps)) > 1e-4


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
    np.testing.assert_array_equal(out.records["accepted"], ~from_bad)
    np.testing.assert_array_equal(out.records["weight"] > 0, ~from_bad)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(out.params))
    assert np.isfinite(out.scores["loss"]).all()
    with pytest.raises(ValueError, match="rejected so far"):
        run(*given, on_bad="raise")


def test_rejected_clients_keep_their_state_as_in_the_oracle():
    given = changed(personal(), data=poisoned(data(), [0]))
    close(run_waves(*given).params, run_reference(*given).params, 1e-10)


def own(who, i):
    return ClientData(*(jnp.asarray(a) for a in (who.x, who.y, who.order)), who.offset[i], who.size[i])


@jax.jit
def train(params, key, part, i, number, steps):
    """One job alone, without the engine."""
    return run_job(client(), job_key(key, i, number), Message(params, (), 0), (), part, steps)[0]


def test_fedavg_by_schedule_is_a_textbook_loop():
    given = case("fedavg", "cohort:size=3", updates=12)
    schedule, key, who = given.schedule, given.key, given.components.data
    x = given.params
    for first in range(0, 12, 3):
        round_jobs = schedule.job[first : first + 3]
        deltas = [
            train(x, key, own(who, schedule.client[j]), schedule.client[j], schedule.number[j], schedule.local_steps[j])
            for j in round_jobs
        ]
        p = np.array([who.size[schedule.client[j]] for j in round_jobs], float)
        p /= p.sum()
        for share, delta in zip(p, deltas, strict=True):
            x = jax.tree.map(lambda w, d, share=share: w + share * np.asarray(d), x, delta)
    close(run_waves(*given).params, x, 1e-12)


def test_more_evaluations_only_add_rows():
    few = run_waves(*case("fedasync", every=Every(updates=8)))
    many = run_waves(*case("fedasync", every=Every(updates=4)))
    np.testing.assert_allclose(many.scores["loss"][::2], few.scores["loss"], rtol=1e-6)
    close(many.params, few.params, 1e-6)


def test_compared_methods_see_the_same_minibatches():
    """A client's first job starts from the same model under every method, so its upload is the same."""
    norms = []
    for rule, timing in (("fedasync", "every"), ("fedbuff", "buffer:size=3"), ("fedavg", "cohort:size=5")):
        given = case(rule, timing)
        records = run_waves(*given).records
        first = {int(given.schedule.client[j]): e for e, j in reversed(list(enumerate(given.schedule.job)))
                 if given.schedule.number[j] == 0 and given.schedule.version[j] == 0}  # fmt: skip
        norms.append([records["upload_norm"][first[i]] for i in range(len(SIZES))])
    np.testing.assert_allclose(norms[1], norms[0], rtol=1e-12)
    np.testing.assert_allclose(norms[2], norms[0], rtol=1e-12)
