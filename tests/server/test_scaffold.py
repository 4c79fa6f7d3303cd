"""SCAFFOLD, server and clients: against float64 NumPy written from the paper, and identities from its equations."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async import local, simulate
from fedjax_async.server import fedavg, scaffold, scaffold_client
from fedjax_async.server.scaffold import Change
from fedjax_async.types import Message
from tests.server.textbook_drift import (
    LR,
    MODEL,
    SIZES,
    START,
    STEPS,
    TIMETABLES,
    D,
    Job,
    N,
    check_a_rejected_upload,
    data_of,
    descend,
    flat,
    gradient,
    job_of,
    plain_client,
    play,
    scaffold_by_hand,
    unflat,
)

SMALL = {"model": "logistic", "clients": 6, "steps": 2, "updates": 12}


@cache
def client():
    return scaffold_client(MODEL, lr=LR, batch_size=max(SIZES))


@cache
def played(name):
    return play(scaffold(server_lr=0.7), client(), TIMETABLES[name], server=lambda state: state.control)


@pytest.mark.parametrize("name", TIMETABLES)
def test_params_and_every_control_variate_equal_numpy(name):
    want, have = scaffold_by_hand(TIMETABLES[name], 0.7), played(name)
    for ours, theirs in zip(have, want, strict=True):
        assert ours.shape == theirs.shape and np.abs(theirs).max() > 0.05
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


def test_the_timetables_are_what_they_are_for():
    late = [t - job.version for t, (job,) in enumerate(TIMETABLES["one at a time"])]
    assert max(late) > 5 and min(late) == 0
    accepted = [sum(job.accepted for job in step) for step in TIMETABLES["rejected"]]
    assert set(accepted) == {0, 1, 2}
    assert all(sum(map(len, timetable)) >= 50 for timetable in TIMETABLES.values())


@pytest.mark.parametrize("name", ["everyone", "some", "one at a time"])
def test_the_server_keeps_the_mean_of_the_clients_control_variates(name):
    """Both sum the same changes for any set of clients; the test with ``rejected`` below shows the exception."""
    run = played(name)
    np.testing.assert_allclose(run.server, run.own.mean(axis=1), rtol=0, atol=1e-12)


def test_a_client_keeps_what_the_server_rejected():
    run = played("rejected")
    assert np.abs(run.server - run.own.mean(axis=1))[-1].max() > 1e-2
    before = np.concatenate([np.zeros((1, N, D)), run.own[:-1]])
    for step, old, new in zip(TIMETABLES["rejected"], before, run.own):
        for job in step:
            assert np.abs(new - old)[job.client].max() > 0


@pytest.mark.float64
@pytest.mark.parametrize("every_closes", [True, False])
def test_a_rejected_upload_leaves_the_server_as_it_was(every_closes):
    check_a_rejected_upload(scaffold(), client(), lambda state: state.control, every_closes)


@pytest.mark.float64
def test_a_first_job_is_plain_sgd():
    """To the last bit, with the same minibatches: there is no correction while c and c_i are zero."""
    start = unflat(START)
    one = scaffold_client(MODEL, lr=LR, batch_size=2)
    plain = local.local_training(MODEL, optimizer=optax.sgd(LR), batch_size=2)
    key, message = jax.random.key(3), Message(start, jax.tree.map(jnp.zeros_like, start))
    change, _ = local.run_job(one, key, message, one.init(start), data_of(2), 7)
    delta, _ = local.run_job(plain, key, Message(start), (), data_of(2), 7)
    np.testing.assert_array_equal(flat(change.params), flat(delta))
    assert np.abs(flat(delta)).max() > 1e-2


def controls(steps, decay=None):
    """c, c_i, the upload, and c_i+ after one job of client 2 with random control variates."""
    chance = np.random.default_rng(12)
    c, own = chance.normal(size=(2, D))
    with jax.enable_x64(True):
        one = client() if decay is None else scaffold_client(MODEL, lr=LR, batch_size=max(SIZES), scale=decay)
        message = Message(unflat(START), unflat(c), jnp.int32(3))
        change, (_, new) = job_of(one)(message, ((), unflat(own)), jnp.int32(2), jnp.int32(steps))
        assert isinstance(change, Change)
        return c, own, flat(change.params), flat(change.control), flat(new)


def test_option_two_is_the_formula_of_the_paper():
    c, own, delta, change, new = controls(4)
    want = descend(START, 2, 4, lambda w: c - own) - START
    np.testing.assert_allclose(delta, want, rtol=0, atol=1e-12)
    np.testing.assert_allclose(new, own - c - want / (4 * LR), rtol=0, atol=1e-12)
    np.testing.assert_allclose(change, new - own, rtol=0, atol=1e-12)


@pytest.mark.parametrize("decay", [None, lambda version: 1.0 / (1.0 + version.astype(float))])
def test_after_one_step_a_control_variate_is_the_gradient(decay):
    """Option II then equals option I, for any c and c_i and any decay of the learning rate."""
    *_, new = controls(1, decay)
    np.testing.assert_allclose(new, gradient(START, 2), rtol=0, atol=1e-12)


def test_a_rate_that_changes_within_a_job_weights_the_gradients():
    """c_i+ is the mean of the gradients along the path, weighted by the rates of their steps."""
    c, own, delta, _, new = controls(5, local.DECAYS["linear"](floor=0.2))
    weights, gradients, factors = np.array(START), [], 1 - 0.8 * np.arange(5) / 5
    for factor in factors:
        gradients.append(gradient(weights, 2))
        weights = weights - LR * factor * (gradients[-1] - own + c)
    np.testing.assert_allclose(delta, weights - START, rtol=0, atol=1e-12)
    np.testing.assert_allclose(new, np.average(gradients, axis=0, weights=factors), rtol=0, atol=1e-12)
    assert np.abs(new - np.mean(gradients, axis=0)).max() > 1e-3  # the plain mean differs


def test_at_a_rate_of_zero_a_client_learns_nothing():
    """A cosine decay ends at a rate of zero. A division by zero would make the server reject the upload."""
    _, own, delta, change, new = controls(3, lambda version: 0.0 * version.astype(float))
    np.testing.assert_array_equal([delta, change, new - own], 0.0)


def test_one_client_alone_is_sgd():
    """Its c_i equals c, so the corrections cancel, though neither is zero."""
    timetable = [[Job(0, t)] for t in range(20)]
    run = play(scaffold(), client(), timetable, server=lambda state: state.control, num_clients=1)
    plain = play(fedavg(), plain_client(), timetable, num_clients=1)
    w, path = START, []
    for _ in timetable:
        w = descend(w, 0, STEPS[0])
        path.append(w)
    np.testing.assert_allclose(run.params, path, rtol=0, atol=1e-12)
    np.testing.assert_allclose(run.params, plain.params, rtol=0, atol=1e-12)
    np.testing.assert_allclose(run.server, run.own[:, 0], rtol=0, atol=1e-12)
    assert np.abs(run.server).max() > 1e-2


@cache
def simulated(method):
    return simulate(**SMALL, method=method)


@pytest.mark.slow_cases("cohort:size=3")
@pytest.mark.parametrize("timing", ["every", "cohort:size=3"])
def test_bytes_are_twice_those_of_fedavg_both_ways(timing):
    twice, once = (simulated(f"{name}@{timing}") for name in ("scaffold", "fedavg"))
    for column in ("bytes_up", "bytes_down"):
        assert once.evaluations[column][-1] > 0
        np.testing.assert_array_equal(twice.evaluations[column], 2 * once.evaluations[column])


@pytest.mark.slow
def test_compressed_uploads_are_the_same_in_both_engines():
    given = SMALL | {"method": "scaffold@every"}
    fast, slow = (simulate(**given, compress="topk:ratio=0.1", engine=engine) for engine in ("waves", "reference"))
    full = simulated(given["method"])
    for a, b, c in zip(*(jax.tree.leaves(run.params) for run in (fast, slow, full))):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
        assert np.abs(a - c).max() > 1e-4  # compression was not skipped in both
    for column in ("upload_bytes", "accepted"):
        np.testing.assert_array_equal(fast.updates[column], slow.updates[column])
    assert (fast.updates["upload_bytes"] < 0.5 * full.evaluations["bytes_up"][-1] / 12).all()


@pytest.fixture
def compiled():
    """Names of the programs compiled during the test, as JAX reports them."""
    seen: list[str] = []

    def listen(event: str, seconds: float, **details) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(str(details.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("method", ["scaffold", "fednova"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd:momentum=0.9", "sgd:weight_decay=0.1"])
def test_what_is_made_for_plain_sgd_refuses_other_optimisers_before_it_compiles(compiled, method, optimizer):
    with pytest.raises(ValueError, match=r"^optimizer = '.*': must be sgd") as error:
        simulate(**SMALL, method=method, optimizer=optimizer)
    assert optimizer in str(error.value) and "\n" not in str(error.value)
    assert compiled == []


def test_the_listener_hears_of_programs(compiled):
    """Without this, the test above could not fail."""
    jax.jit(lambda x: x * 1.2345 + len(compiled))(jnp.ones(7))
    assert compiled


def test_deltas_and_control_variates_are_compressed_apart():
    """The control variates are 1/(K lr) times as large: top-k of both together would send no delta at all."""
    given = SMALL | {"method": "scaffold@every", "compress": "topk:ratio=0.1", "feedback": "off", "updates": 1}
    run, start = simulate(**given), simulate(**given, lr=1e-30)  # the second gives the model at the start
    moved = np.concatenate([np.ravel(a - b) for a, b in zip(*map(jax.tree.leaves, (run.params, start.params)))])
    assert np.sum(np.abs(moved) > 1e-20) == -(-len(moved) // 10)
