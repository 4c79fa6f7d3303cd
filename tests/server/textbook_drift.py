"""A softmax problem of four unequal clients, played by hand: rule and clients, and NumPy written from the papers."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_async import local
from fedjax_async.server import closed, known
from fedjax_async.types import Arrival, ClientData, Facts, Model, Request

FEATURES, CLASSES = 3, 3
D = CLASSES + FEATURES * CLASSES  # the bias, then the kernel
SIZES = (7, 5, 9, 4)  # examples of each client; every local step sees all of them
STEPS = (3, 1, 4, 2)  # K of each client's jobs
N, LR = len(SIZES), 0.2
OFFSETS = np.concatenate([[0], np.cumsum(SIZES)])
ROWS = np.random.default_rng(5).normal(size=(sum(SIZES), FEATURES))
LABELS = np.random.default_rng(6).integers(0, CLASSES, size=sum(SIZES))
START = 0.5 * np.random.default_rng(7).normal(size=D)


def _cross_entropy(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]


MODEL = Model(
    init=lambda key: unflat(START),
    apply=lambda params, x, key=None: x @ params["kernel"] + params["bias"][None],
    loss=_cross_entropy,
)


class Job(NamedTuple):
    """A job whose upload arrives; the server may reject it."""

    client: int
    version: int  # server steps closed when it was sent
    accepted: bool = True


class Played(NamedTuple):
    """State after each of T server steps."""

    params: np.ndarray  # [T, D]
    server: np.ndarray  # [T, D] the server's correction of the drift, c or h; [T, 0] if it has none
    own: np.ndarray  # [T, N, D] states of the clients; [T, N, 0] if they have none


def timetables():
    """Server steps as lists of jobs, by name; about fifty arrivals each."""
    chance = np.random.default_rng(8)
    everyone = [[Job(i, t) for i in range(N)] for t in range(13)]
    some = [[Job(int(i), t) for i in chance.permutation(N)[:2]] for t in range(25)]
    held, single = [0] * N, []
    for t in range(50):
        i = int(chance.choice(N, p=[0.5, 0.3, 0.15, 0.05]))
        single.append([Job(i, held[i])])
        held[i] = t + 1
    lossy = [[job._replace(accepted=bool(chance.random() < 0.6)) for job in step] for step in some]
    return {"everyone": everyone, "some": some, "one at a time": single, "rejected": lossy}


TIMETABLES = timetables()


def gradient(w, i):
    """The gradient of the mean cross-entropy of client i."""
    x, y = ROWS[OFFSETS[i] : OFFSETS[i + 1]], LABELS[OFFSETS[i] : OFFSETS[i + 1]]
    logits = x @ w[CLASSES:].reshape(FEATURES, CLASSES) + w[:CLASSES]
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    off = (chances - np.eye(CLASSES)[y]) / len(y)
    return np.concatenate([off.sum(axis=0), (x.T @ off).ravel()])


def unflat(w):
    return {"bias": jnp.asarray(w[:CLASSES]), "kernel": jnp.asarray(w[CLASSES:]).reshape(FEATURES, CLASSES)}


def flat(tree):
    return np.concatenate([np.zeros(0), *(np.asarray(leaf).ravel() for leaf in jax.tree.leaves(tree))])


def data_of(i):
    order = jnp.arange(len(ROWS), dtype=jnp.int32)
    low, size = (jnp.asarray(numbers, jnp.int32)[i] for numbers in (OFFSETS[:-1], SIZES))
    return ClientData(jnp.asarray(ROWS), jnp.asarray(LABELS, jnp.int32), order, low, size)


@cache
def plain_client():
    return local.local_training(MODEL, optimizer=optax.sgd(LR), batch_size=max(SIZES))


@cache
def job_of(client):
    """``(message, client_state, i, steps) -> (upload, client_state)``, compiled once for each client algorithm."""

    @jax.jit
    def job(message, state, i, steps):
        return local.run_job(client, jax.random.key(0), message, state, data_of(i), steps)

    return job


def arrival_of(message, upload, job, *, steps, late=0):
    """The arrival of a job; a rejected one comes with zeros and weight 0."""
    if not job.accepted:
        upload = jax.tree.map(jnp.zeros_like, upload)
    weight = jnp.asarray(float(SIZES[job.client]) * job.accepted)
    return Arrival(
        upload, message.params, jnp.int32(late), weight, jnp.int32(job.client), jnp.asarray(0.0), jnp.bool_(True),
        jnp.int32(steps), message.extra,
    )  # fmt: skip


def play(rule, client, timetable, *, server=lambda state: (), num_clients=N, steps=STEPS):
    """Drive the package's rule and clients through a timetable, in float64; ``server`` picks c or h of the state."""
    with jax.enable_x64(True):
        rule = known(rule, Facts(num_clients, every_closes=all(len(step) == 1 for step in timetable)))
        receive, close = jax.jit(rule.receive), jax.jit(lambda state, memory: closed(rule, state, memory))
        start = unflat(START)
        state, memory = rule.init(start)
        own = [client.init(start)] * num_clients
        messages, path = [rule.dispatch(state, memory, Request())[0]], []
        for t, step in enumerate(timetable):
            for job in step:
                i, message = job.client, messages[job.version]
                upload, own[i] = job_of(client)(message, own[i], jnp.int32(i), jnp.int32(steps[i]))
                arrival = arrival_of(message, upload, job, steps=steps[i], late=t - job.version)
                state, memory, _ = receive(state, memory, arrival)
            state, memory = close(state, memory)
            messages.append(rule.dispatch(state, memory, Request())[0])
            kept = np.array([flat(one) for one in own])
            path.append((flat(rule.params(state)), flat(server(state)), kept))
        return Played(*(np.array(column) for column in zip(*path)))


def descend(w, i, steps, correction=lambda w: 0.0):
    """Full-batch SGD of client i along its gradient plus a correction."""
    for _ in range(steps):
        w = w - LR * (gradient(w, i) + correction(w))
    return w


def scaffold_by_hand(timetable, server_lr):
    """Karimireddy et al. (2020), Algorithm 1 with option II; in asynchronous runs S is one client."""
    x, c, own = START, np.zeros(D), np.zeros((N, D))
    sent, path = [(x, c)], []
    for step in timetable:
        deltas, changes = [], []
        for i, version, accepted in step:
            start, control = sent[version]
            end = descend(start, i, STEPS[i], lambda w, drift=control - own[i]: drift)
            new = own[i] - control + (start - end) / (STEPS[i] * LR)
            if accepted:
                deltas.append(end - start)
                changes.append(new - own[i])
            own[i] = new
        if deltas:
            x = x + server_lr * np.mean(deltas, axis=0)
            c = c + len(deltas) / N * np.mean(changes, axis=0)
        sent.append((x, c))
        path.append((x, c, own.copy()))
    return Played(*(np.array(column) for column in zip(*path)))


def feddyn_by_hand(timetable, alpha):
    """Acar et al. (2021), Algorithm 1, with SGD steps for its inner minimisation."""
    x, h, own = START, np.zeros(D), np.zeros((N, D))
    sent, path = [x], []
    for step in timetable:
        models, deltas = [], []
        for i, version, accepted in step:
            start = sent[version]
            end = descend(start, i, STEPS[i], lambda w, x0=start, h_i=own[i]: alpha * (w - x0) - h_i)
            own[i] = own[i] - alpha * (end - start)
            if accepted:
                models.append(end)
                deltas.append(end - start)
        if models:
            h = h - alpha / N * np.sum(deltas, axis=0)
            x = np.mean(models, axis=0) - h / alpha
        sent.append(x)
        path.append((x, h, own.copy()))
    return Played(*(np.array(column) for column in zip(*path)))


def fednova_by_hand(timetable, server_lr, weighting):
    """Wang et al. (2020), eq. 6, for plain SGD."""
    x = START
    sent, path = [x], []
    for step in timetable:
        jobs = [(i, descend(sent[version], i, STEPS[i]) - sent[version]) for i, version, ok in step if ok]
        if jobs:
            share = np.array([SIZES[i] if weighting == "examples" else 1.0 for i, _ in jobs])
            share = share / share.sum()
            effective = sum(p * STEPS[i] for p, (i, _) in zip(share, jobs))
            x = x + server_lr * effective * sum(p * delta / STEPS[i] for p, (i, delta) in zip(share, jobs))
        sent.append(x)
        path.append((x, np.zeros(0), np.zeros((N, 0))))
    return Played(*(np.array(column) for column in zip(*path)))


def check_a_rejected_upload(rule, client, drift, every_closes):
    """Assert that an upload of weight 0 leaves the server as it was; ``drift`` picks c or h of the state.

    The rule must look at the weight, not at the zeros of the upload.
    """
    rule = known(rule, Facts(N, every_closes))
    state, memory = rule.init(unflat(START))
    message, memory = rule.dispatch(state, memory, Request())
    upload, _ = job_of(client)(message, client.init(message.params), jnp.int32(0), jnp.int32(3))
    arrival = arrival_of(message, upload, Job(0, 0), steps=3)
    state, memory, _ = rule.receive(state, memory, arrival)
    state, memory = closed(rule, state, memory)
    assert np.abs(flat(drift(state))).max() > 1e-3  # otherwise the test could not fail
    lost, memory, info = rule.receive(state, memory, arrival._replace(weight=jnp.asarray(0.0)))
    assert float(info.weight) == 0.0
    if every_closes:
        lost, memory = closed(rule, lost, memory)
        np.testing.assert_array_equal(flat(rule.params(lost)), flat(rule.params(state)))
        np.testing.assert_array_equal(flat(drift(lost)), flat(drift(state)))
    ends = []
    for before in (state, lost):  # it must not count with the next accepted upload either
        after, memory, _ = rule.receive(before, memory, arrival)
        ends.append(closed(rule, after, memory)[0])
    np.testing.assert_array_equal(flat(rule.params(ends[0])), flat(rule.params(ends[1])))
    np.testing.assert_array_equal(flat(drift(ends[0])), flat(drift(ends[1])))
