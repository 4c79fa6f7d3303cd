"""SCAFFOLD and FedDyn with their clients against float64 NumPy; ``test_rules.py`` has what their servers average."""

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async import Settings, local, simulate
from fedjax_async.config import prepare
from fedjax_async.server import closed, feddyn, feddyn_client, scaffold, scaffold_client
from fedjax_async.server.scaffold import Change
from fedjax_async.types import Facts, Message, Request
from tests.local.made_up import MODEL, SIZES, client_data, flat, rows_of, slope, start_params, start_vector
from tests.refusals import refusals
from tests.server.made_up import arrival

STEPS = (3, 1, 4)  # K of each client's jobs; every local step sees all examples of its client
N, LR, START = len(SIZES), 0.2, start_vector()
D = len(START)


class Job(NamedTuple):
    """A job whose upload arrives; the server may reject it."""

    client: int
    version: int  # server steps closed when it was sent
    accepted: bool = True


def timetables():
    """Server steps as lists of jobs, by name; about fifty arrivals each."""
    chance = np.random.default_rng(8)
    everyone = [[Job(i, t) for i in range(N)] for t in range(17)]
    some = [[Job(int(i), t) for i in chance.permutation(N)[:2]] for t in range(25)]
    held, single = [0] * N, []
    for t in range(50):
        i = int(chance.choice(N, p=[0.6, 0.3, 0.1]))
        single.append([Job(i, held[i])])
        held[i] = t + 1
    lossy = [[job._replace(accepted=bool(chance.random() < 0.6)) for job in step] for step in some]
    return {"everyone": everyone, "one at a time": single, "rejected": lossy}


def gradient(w, i):
    """The gradient of the mean cross-entropy of client i."""
    return slope(w, rows_of(i))


def unflat(vector):
    return jax.flatten_util.ravel_pytree(start_params())[1](jnp.asarray(vector))


@cache
def job_of(client):
    """``(message, client_state, data, steps) -> (upload, client_state)``, compiled once for each client algorithm."""
    return jax.jit(lambda *given: local.run_job(client, jax.random.key(0), *given))


def play(rule, client, timetable, *, server):
    """The package's rule and clients in a timetable; ``server`` picks the correction of the drift, c or h, of a state.

    Returns params [T, D], the server's correction [T, D] and the clients' own [T, N, D] after each of T server steps.
    """
    facts = Facts(N, every_closes=all(len(step) == 1 for step in timetable))
    receive, close = jax.jit(rule.receive), jax.jit(lambda state, memory: closed(rule, state, memory))
    start = unflat(START)
    state, memory = rule.init(start, facts)
    own = [client.init(start)] * N
    messages, path = [rule.dispatch(state, memory, Request())[0]], []
    for t, step in enumerate(timetable):
        for i, version, accepted in step:
            message = messages[version]
            upload, own[i] = job_of(client)(message, own[i], client_data(i), jnp.int32(STEPS[i]))
            told = {"weight": float(SIZES[i]) * accepted, "local_steps": jnp.int32(STEPS[i]), "extra": message.extra}
            state, memory, _ = receive(state, memory, arrival(upload, message.params, t - version, i, **told))
        state, memory = close(state, memory)
        messages.append(rule.dispatch(state, memory, Request())[0])
        path.append((flat(rule.params(state)), flat(server(state)), np.array([flat(one) for one in own])))
    return [np.array(column) for column in zip(*path)]


def descend(w, i, steps, correction=lambda w: 0.0):
    """Full-batch SGD of client i along its gradient plus a correction."""
    for _ in range(steps):
        w = w - LR * (gradient(w, i) + correction(w))
    return w


SERVER_LR, ALPHA = 0.7, 0.3


def by_hand(timetable, job, close):
    """``job(start, c, c_i, i) -> (end, c_i)``, ``close(x, c, ends, deltas, changes of c_i) -> (x, c)``."""
    x, c, own = START, np.zeros(D), np.zeros((N, D))
    sent, path = [(x, c)], []
    for step in timetable:
        arrived = []
        for i, version, accepted in step:
            start, control = sent[version]
            end, new = job(start, control, own[i], i)
            if accepted:
                arrived.append((end, end - start, new - own[i]))
            own[i] = new
        if arrived:
            x, c = close(x, c, *(np.array(column) for column in zip(*arrived)))
        sent.append((x, c))
        path.append((x, c, own.copy()))
    return [np.array(column) for column in zip(*path)]


def scaffold_job(start, c, own, i):
    """Karimireddy et al. (2020), Algorithm 1 with option II; in asynchronous runs S is one client."""
    end = descend(start, i, STEPS[i], lambda w: c - own)
    return end, own - c + (start - end) / (STEPS[i] * LR)


def scaffold_close(x, c, ends, deltas, changes):
    return x + SERVER_LR * deltas.mean(axis=0), c + len(deltas) / N * changes.mean(axis=0)


def feddyn_job(start, h, own, i):
    """Acar et al. (2021), Algorithm 1, with SGD steps for its inner minimisation."""
    end = descend(start, i, STEPS[i], lambda w: ALPHA * (w - start) - own)
    return end, own - ALPHA * (end - start)


def feddyn_close(x, h, ends, deltas, changes):
    h = h - ALPHA / N * deltas.sum(axis=0)
    return ends.mean(axis=0) - h / ALPHA, h


SMALL = {"model": "logistic", "clients": 6, "steps": 2, "updates": 12}


@cache
def client():
    return scaffold_client(MODEL, lr=LR, batch_size=max(SIZES))


@cache
def feddyn_clients():
    return feddyn_client(MODEL, optimizer=optax.sgd(LR), batch_size=max(SIZES), alpha=ALPHA)


METHODS = {
    "scaffold": (scaffold(server_lr=SERVER_LR), client, lambda state: state.control, scaffold_job, scaffold_close),
    "feddyn": (feddyn(alpha=ALPHA), feddyn_clients, lambda state: state.shift, feddyn_job, feddyn_close),
}


@pytest.mark.float64
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("name", "timetable"), timetables().items())
def test_params_and_every_correction_of_the_drift_equal_numpy(method, name, timetable):
    """Without rejected uploads the server's h of FedDyn is the mean of the clients' h_i."""
    rule, clients, server, *book = METHODS[method]
    have = play(rule, clients(), timetable, server=server)
    for ours, theirs in zip(have, by_hand(timetable, *book), strict=True):
        assert ours.shape == theirs.shape and np.abs(theirs).max() > (0.05 if method == "scaffold" else 0.005)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
    if method == "feddyn":
        apart = np.abs(have[1] - have[2].mean(axis=1)).max()
        assert apart > 1e-2 if name == "rejected" else apart < 1e-12


@pytest.mark.float64
def test_a_first_job_is_plain_sgd():
    """To the last bit, with the same minibatches: there is no correction while c and c_i are zero."""
    start = unflat(START)
    one = scaffold_client(MODEL, lr=LR, batch_size=2)
    plain = local.local_training(MODEL, optimizer=optax.sgd(LR), batch_size=2)
    key, message = jax.random.key(3), Message(start, jax.tree.map(jnp.zeros_like, start))
    change, _ = local.run_job(one, key, message, one.init(start), client_data(2), 7)
    delta, _ = local.run_job(plain, key, Message(start), (), client_data(2), 7)
    np.testing.assert_array_equal(flat(change.params), flat(delta))
    assert np.abs(flat(delta)).max() > 1e-2


def controls(steps, decay):
    """c, c_i, the upload, and c_i+ after one job of client 2 with random control variates."""
    c, own = np.random.default_rng(12).normal(size=(2, D))
    one = client() if decay is None else scaffold_client(MODEL, lr=LR, batch_size=max(SIZES), scale=decay)
    message = Message(unflat(START), unflat(c), jnp.int32(3))
    change, (_, new) = job_of(one)(message, ((), unflat(own)), client_data(2), jnp.int32(steps))
    assert isinstance(change, Change)
    return c, own, flat(change.params), flat(change.control), flat(new)


DECAYED = {  # the rates of each local step of a job of version 3
    "constant": (None, [1.0]),
    "by version": (lambda version: 1.0 / (1.0 + version.astype(float)), [0.25]),
    "linear": (local.DECAYS["linear"](floor=0.2), 1 - 0.8 * np.arange(5) / 5),
}


@pytest.mark.float64
@pytest.mark.parametrize(("decay", "factors"), DECAYED.values(), ids=DECAYED)
def test_a_control_variate_becomes_the_mean_gradient_weighted_by_the_rates(decay, factors):
    """After one step it is the gradient: option II then equals option I, for any c and c_i."""
    c, own, delta, _, new = controls(len(factors), decay)
    weights, gradients = np.array(START), []
    for factor in factors:
        gradients.append(gradient(weights, 2))
        weights = weights - LR * factor * (gradients[-1] - own + c)
    np.testing.assert_allclose(delta, weights - START, rtol=0, atol=1e-12)
    np.testing.assert_allclose(new, np.average(gradients, axis=0, weights=factors), rtol=0, atol=1e-12)


@pytest.mark.float64
def test_at_a_rate_of_zero_a_client_learns_nothing():
    """A cosine decay ends at a rate of zero. A division by zero would make the server reject the upload."""
    _, own, delta, change, new = controls(3, lambda version: 0.0 * version.astype(float))
    np.testing.assert_array_equal([delta, change, new - own], 0.0)


test_what_is_made_for_plain_sgd_refuses_other_optimisers = refusals(
    ("scaffold", "adam", "^optimizer = 'adam.*': must be sgd"),
    ("scaffold", "sgd:momentum=0.9", "^optimizer = 'sgd:momentum=0.9.*': must be sgd"),
    ("fednova", "sgd:weight_decay=0.1", "^optimizer = 'sgd:weight_decay=0.1.*': must be sgd"),
    by=lambda method, optimizer: prepare(Settings(**SMALL, method=method, optimizer=optimizer)),
)


def test_deltas_and_control_variates_are_compressed_apart():
    """The control variates are 1/(K lr) times as large: top-k of both together would send no delta at all."""
    given = SMALL | {"method": "scaffold@every", "feedback": "off", "updates": 1, "engine": "reference"}
    given |= {"compress": "topk:ratio=0.1"}
    run, start = simulate(**given), prepare(Settings(**given))
    moved = np.concatenate([np.ravel(a - b) for a, b in zip(*map(jax.tree.leaves, (run.params, start.params)))])
    assert np.sum(np.abs(moved) > 1e-20) == -(-len(moved) // 10)


def test_alpha_of_the_method_reaches_the_clients():
    """Alpha cancels at the server, so the difference comes from local training."""
    given = {"model": "logistic", "clients": 6, "steps": 8, "updates": 6, "lr": 0.2, "engine": "reference"}
    one, other = (simulate(**given, method=f"feddyn:alpha={alpha}").params for alpha in (0.1, 0.01))
    assert np.abs(one["output"]["kernel"] - other["output"]["kernel"]).max() > 1e-2
