"""SCAFFOLD and FedDyn, server and clients, against float64 NumPy written from the papers; identities of FedNova."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async import Settings, local, simulate
from fedjax_async.engine import prepare
from fedjax_async.server import feddyn, feddyn_client, fednova, scaffold, scaffold_client
from fedjax_async.types import Arrival, ClientData, Facts, Message, Model, Request

N, D, M, K, LR, ALPHA = 4, 3, 5, 3, 0.05, 0.3  # clients, parameters, examples a client, local steps
chance = np.random.default_rng(5)
A, B = chance.normal(size=(N, M, D)), chance.normal(size=(N, M))

MODEL = Model(
    init=lambda key: jnp.zeros(D),
    apply=lambda params, x, key=None: x @ params,
    loss=lambda outputs, y: 0.5 * jnp.square(outputs - y),
)


def gradient(w: np.ndarray, i: int) -> np.ndarray:
    return A[i].T @ (A[i] @ w - B[i]) / M


def sequences(synchronous: bool) -> list[list[tuple[int, int]]]:
    """Server steps: lists of (client, server step whose model it started from)."""
    if synchronous:
        return [[(i, t) for i in sorted(chance.permutation(N)[: 4 if t % 2 else 2])] for t in range(17)]
    held, steps = dict.fromkeys(range(N), 0), []
    for t in range(50):
        i = int(chance.choice(N, p=[0.5, 0.3, 0.15, 0.05]))
        steps.append([(i, held[i])])
        held[i] = t + 1
    return steps


def ours(rule, client, steps):
    """Server params after each step, the extras of its messages, and the clients' own states at the end."""
    rule = rule.given(Facts(N, every_closes=all(len(step) == 1 for step in steps)))
    x, y = jnp.asarray(A.reshape(-1, D)), jnp.asarray(B.reshape(-1))
    order = jnp.arange(N * M, dtype=jnp.int32)

    @jax.jit
    def job(message, state, i):
        data = ClientData(x, y, order, i * M, jnp.int32(M))
        return local.run_job(client, jax.random.key(0), message, state, data, K)

    state, memory = rule.init(jnp.zeros(D))
    own = [client.init(jnp.zeros(D))] * N
    messages, path, extras = [rule.dispatch(state, memory, Request())[0]], [], []
    for step in steps:
        for i, version in step:
            upload, own[i] = job(messages[version], own[i], jnp.int32(i))
            arrival = Arrival(
                upload, messages[version].params, jnp.int32(0), jnp.asarray(float(M)), jnp.int32(i), jnp.asarray(0.0),
                jnp.bool_(True), jnp.int32(K), messages[version].extra,
            )  # fmt: skip
            state, memory, _ = rule.receive(state, memory, arrival)
        state, memory = rule.close(state, memory)
        messages.append(rule.dispatch(state, memory, Request())[0])
        path.append(np.asarray(rule.params(state)))
        extras.append(jax.tree.map(np.asarray, messages[-1].extra))
    return np.array(path), extras, [np.asarray(one[1]) for one in own]


@pytest.mark.parametrize("synchronous", [True, False])
def test_scaffold_equals_its_numpy_loop(synchronous):
    steps = sequences(synchronous)
    x, c, own = np.zeros(D), np.zeros(D), np.zeros((N, D))
    sent, path, controls = [(x, c)], [], []
    for step in steps:
        deltas, changes = [], []
        for i, version in step:
            start, server = sent[version]
            w = start.copy()
            for _ in range(K):
                w = w - LR * (gradient(w, i) - own[i] + server)
            new = own[i] - server + (start - w) / (K * LR)
            deltas.append(w - start)
            changes.append(new - own[i])
            own[i] = new
        x = x + 0.7 * np.mean(deltas, axis=0)
        c = c + len(step) / N * np.mean(changes, axis=0)
        sent.append((x, c))
        path.append(x)
        controls.append(c)
    with jax.enable_x64(True):
        have, extras, kept = ours(scaffold(server_lr=0.7), scaffold_client(MODEL, lr=LR, batch_size=M), steps)
    np.testing.assert_allclose(have, path, rtol=0, atol=1e-12)
    np.testing.assert_allclose(extras, controls, rtol=0, atol=1e-12)
    np.testing.assert_allclose(kept, own, rtol=0, atol=1e-12)
    np.testing.assert_allclose(c, own.mean(axis=0), atol=1e-12)  # what the control variates are for
    assert np.abs(own).max() > 0.05 and np.abs(path).max() > 0.05


@pytest.mark.parametrize("synchronous", [True, False])
def test_feddyn_equals_its_numpy_loop(synchronous):
    steps = sequences(synchronous)
    x, h, own = np.zeros(D), np.zeros(D), np.zeros((N, D))
    sent, path = [x], []
    for step in steps:
        models, deltas = [], []
        for i, version in step:
            start = sent[version]
            w = start.copy()
            for _ in range(K):
                w = w - LR * (gradient(w, i) - own[i] + ALPHA * (w - start))
            own[i] = own[i] - ALPHA * (w - start)
            models.append(w)
            deltas.append(w - start)
        h = h - ALPHA / N * np.sum(deltas, axis=0)
        x = np.mean(models, axis=0) - h / ALPHA
        sent.append(x)
        path.append(x)
    with jax.enable_x64(True):
        client = feddyn_client(MODEL, optimizer=optax.sgd(LR), batch_size=M, alpha=ALPHA)
        have, _, kept = ours(feddyn(alpha=ALPHA), client, steps)
    scale = np.abs(path).max()
    np.testing.assert_allclose(have / scale, np.array(path) / scale, rtol=0, atol=1e-12)
    np.testing.assert_allclose(kept, own, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(h, own.mean(axis=0), rtol=1e-9, atol=1e-12)  # both count the same deltas
    assert scale > 0.05


def test_a_first_job_of_scaffold_is_plain_sgd():
    with jax.enable_x64(True):
        message = Message(jnp.ones(D), jnp.zeros(D))
        data = ClientData(
            jnp.asarray(A[0]), jnp.asarray(B[0]), jnp.arange(M, dtype=jnp.int32), jnp.int32(0), jnp.int32(M)
        )
        one, plain = (
            scaffold_client(MODEL, lr=LR, batch_size=2),
            local.sgd(MODEL, optimizer=optax.sgd(LR), batch_size=2),
        )
        change, _ = local.run_job(one, jax.random.key(3), message, one.init(message.params), data, K)
        delta, _ = local.run_job(plain, jax.random.key(3), message, (), data, K)
        np.testing.assert_array_equal(change.params, delta)
        np.testing.assert_allclose(change.control, -delta / (K * LR), rtol=1e-12)


def test_fednova_of_equal_steps_or_of_one_client_is_fedavg():
    small = {"clients": 6, "model": "logistic", "updates": 12, "batch_size": 16}
    for setting in ({"steps": 4, "method": "{}@cohort:size=3"}, {"epochs": 1, "method": "{}@every"}):
        given = small | setting
        nova, average = (
            simulate(**(given | {"method": given["method"].format(name)})) for name in ("fednova", "fedavg")
        )
        for a, b in zip(jax.tree.leaves(nova.params), jax.tree.leaves(average.params)):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    uneven = small | {"epochs": 1}
    nova, average = (simulate(**uneven, method=f"{name}@cohort:size=3") for name in ("fednova", "fedavg"))
    assert np.abs(nova.params["output"]["kernel"] - average.params["output"]["kernel"]).max() > 1e-4
    assert fednova().close is not None


def test_scaffold_sends_twice_as_many_bytes_both_ways():
    given = {"clients": 5, "model": "logistic", "steps": 2, "updates": 10}
    for timing in ("cohort:size=5", "every"):
        twice, once = (simulate(**given, method=f"{name}@{timing}") for name in ("scaffold", "fedavg"))
        for column in ("bytes_up", "bytes_down"):
            np.testing.assert_array_equal(twice.evaluations[column], 2 * once.evaluations[column])


def test_a_compressed_upload_of_two_trees_equals_the_oracle():
    given = {"clients": 5, "model": "logistic", "steps": 2, "updates": 10, "method": "scaffold@every"}
    fast, slow = (simulate(**given, compress="topk:ratio=0.1", engine=engine) for engine in ("waves", "reference"))
    for a, b in zip(jax.tree.leaves(fast.params), jax.tree.leaves(slow.params)):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(fast.updates["upload_bytes"], slow.updates["upload_bytes"])


@pytest.mark.parametrize("method", ["scaffold", "fednova"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd:momentum=0.9", "sgd:weight_decay=0.1"])
def test_methods_for_plain_sgd_refuse_others(method, optimizer):
    with pytest.raises(ValueError, match=f"^optimizer = '{optimizer}': must be sgd without options"):
        prepare(Settings(method=method, optimizer=optimizer, updates=10))


def test_alpha_of_feddyn_reaches_the_clients():
    given = {"clients": 5, "model": "logistic", "steps": 3, "updates": 15}
    ends = [simulate(**given, method=f"feddyn:alpha={alpha}").params["output"]["kernel"] for alpha in (0.01, 0.5)]
    assert np.abs(ends[0] - ends[1]).max() > 1e-4
