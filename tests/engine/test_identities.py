"""Exact identities: textbook FedAvg, equal methods, and independence of batching and evaluation."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.engine import Every, run_waves
from fedjax_async.local import job_key, run_job
from fedjax_async.server import fedasync, fedavg, fedbuff
from fedjax_async.types import ClientData, Message
from tests.engine.problem import SIZES, case, client, close, data

EQUAL = (6, 6, 6, 6, 6)


def own(who, i):
    return ClientData(*(jnp.asarray(a) for a in (who.x, who.y, who.order)), who.offset[i], who.size[i])


@cache
def job(proximal):
    def upload(params, key, i, number, part, steps):
        return run_job(client(proximal), job_key(key, i, number), Message(params, (), 0), (), part, steps)[0]

    return jax.jit(upload)


def train(params, key, who, i, number, steps, proximal=0.0):
    """One job alone, without the engine."""
    return jax.tree.map(np.asarray, job(proximal)(params, key, np.int32(i), np.int32(number), own(who, i), steps))


@pytest.mark.float64
def test_fedavg_by_schedule_is_a_textbook_loop():
    given = case("fedavg", "cohort:size=3", updates=12)
    schedule, key, who = given.schedule, given.key, given.components.data
    x = given.params
    for first in range(0, 12, 3):
        round_jobs = schedule.job[first : first + 3]
        deltas = [
            train(x, key, who, int(schedule.client[j]), int(schedule.number[j]), int(schedule.local_steps[j]))
            for j in round_jobs
        ]
        p = np.array([who.size[schedule.client[j]] for j in round_jobs], float)
        p /= p.sum()
        for share, delta in zip(p, deltas, strict=True):
            x = jax.tree.map(lambda w, d, share=share: w + share * d, x, delta)
    close(run_waves(*given).params, x, 1e-12)


@pytest.mark.float64
def test_fedasync_with_one_client_and_full_mixing_is_sequential_sgd():
    rule = fedasync(mixing=1.0, staleness="constant")
    given = case(rule, sizes=(7,), updates=5)
    x = given.params
    for number in range(5):
        upload = train(x, given.key, given.components.data, 0, number, int(given.schedule.local_steps[0]))
        x = jax.tree.map(np.add, x, upload)
    close(run_waves(*given).params, x, 1e-12)


@pytest.mark.float64
def test_fedbuff_with_a_full_buffer_and_equal_delays_is_fedavg():
    buffered = case(fedbuff(staleness="constant", server_lr=1.0), "buffer:size=5", "constant", updates=20, sizes=EQUAL)
    rounds = case(fedavg(weighting="uniform"), "cohort:size=5", "constant", updates=20, sizes=EQUAL)
    close(run_waves(*buffered).params, run_waves(*rounds).params, 1e-12)


@pytest.mark.float64
def test_a_window_longer_than_every_delay_is_fedavg():
    windows = case(fedavg(weighting="uniform"), "window:length=50", "exponential", updates=20)
    rounds = case(fedavg(weighting="uniform"), "cohort:size=5", "exponential", updates=20)
    close(run_waves(*windows).params, run_waves(*rounds).params, 1e-12)


@pytest.mark.float64
def test_proximal_zero_is_plain_and_large_stays_near_the_start():
    given, key, who = case("asgd"), jax.random.key(2), data()
    plain = train(given.params, key, who, 0, 0, 4)
    pulled = train(given.params, key, who, 0, 0, 4, proximal=5.0)
    norms = [float(np.sqrt(sum((np.asarray(leaf) ** 2).sum() for leaf in jax.tree.leaves(u)))) for u in (plain, pulled)]
    assert norms[1] < 0.9 * norms[0]


@pytest.mark.slow_cases("buffer:size=2", "every", "cohort:size=4")
@pytest.mark.float64
@pytest.mark.parametrize("timing", ["every", "buffer:size=2", "cohort:size=4", "window:length=0.7"])
def test_evaluation_and_wave_cap_do_not_change_the_run(timing):
    base = run_waves(*case("fedadam", timing, every=Every(updates=24)))
    for every, width, batching in (
        (Every(updates=1), None, "loop"), (Every(time=0.3), None, "vmap"),
        (Every(updates=24), 2, "loop"), (Every(updates=24), 2, "vmap"),
    ):  # fmt: skip
        other = run_waves(*case("fedadam", timing, every=every), max_width=width, batching=batching)
        close(other.params, base.params, 1e-12)
        np.testing.assert_allclose(other.records["upload_norm"], base.records["upload_norm"], rtol=1e-10)


def test_more_evaluations_only_add_rows():
    few = run_waves(*case("fedasync", every=Every(updates=8)))
    many = run_waves(*case("fedasync", every=Every(updates=4)))
    np.testing.assert_allclose(many.scores["loss"][::2], few.scores["loss"], rtol=1e-6)


@pytest.mark.float64
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
