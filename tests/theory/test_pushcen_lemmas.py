"""Lemmas C.3 and C.5 of PushCen-ADFL and eq. 21: against the package's own clients and plans, and each erratum."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async.clock import Until
from fedjax_async.local import anchored_training
from fedjax_async.local.anchored import Dictionary
from fedjax_async.models.wrap import cross_entropy
from fedjax_async.peers import contraction, plan_peers
from fedjax_async.peers.statistics import corrupt_entries
from fedjax_async.theory import (
    anchor_distances,
    anchor_sum_bound,
    consensus_constants,
    training_over_clustering,
)
from fedjax_async.types import ClientData, Message, Model
from tests.refusals import refusals

LR, WEIGHT, STEPS = 0.2, 0.7, 12


@pytest.mark.float64
@pytest.mark.parametrize("mask", [True, False])
def test_lemma_c5_bounds_the_distance_to_the_anchor_along_real_local_training(mask):
    """Of the package's anchored training of a softmax regression: every step, and the sum over the steps."""
    key = jax.random.key(0)
    start = {"kernel": 2 * jax.random.normal(key, (5, 3))}
    model = Model(lambda _: start, lambda params, x, key=None: x @ params["kernel"], cross_entropy)
    client = anchored_training(model, optimizer=optax.sgd(LR), batch_size=20, anchor=WEIGHT, mask=mask)
    x = jax.random.normal(jax.random.key(1), (20, 5))
    data = ClientData(x, jnp.arange(20) % 3, jnp.arange(20), jnp.int32(0), jnp.int32(20))
    tables = Dictionary({"kernel": jnp.array([0.0, -1.0, 1.0, 2.0])}, jnp.bool_(True))
    message = Message(start, tables)._replace(version=jnp.int32(0), local_steps=jnp.int32(STEPS))
    work = jax.jit(client.begin)(key, message, client.init(start), data)
    anchor, kept = work.anchor.weights["kernel"], work.anchor.mask["kernel"]
    step, slope = jax.jit(client.step), jax.jit(jax.grad(lambda w: model.loss(x @ w, data.y).mean()))
    distances, squares = [], []
    for k in range(STEPS):
        weights = work.inner.params["kernel"]
        now = (
            jnp.where(kept, weights, 0) if mask else weights
        )  # one batch is an epoch, and each epoch begins with the mask
        squares.append(float(jnp.sum(slope(now) ** 2)))
        distances.append(float(jnp.sum((now - anchor) ** 2)))
        work = step(work, jnp.int32(k), message, data)
    distances.append(float(jnp.sum((work.inner.params["kernel"] - anchor) ** 2)))
    bounds = anchor_distances(distances[0], squares, LR, WEIGHT)
    assert bounds.shape == (STEPS + 1,) and bounds[0] == distances[0]
    assert np.all(np.array(distances) <= bounds * (1 + 1e-12)) and bounds[-1] < 20 * distances[-1]
    assert sum(distances[:-1]) <= bounds[:-1].sum() <= anchor_sum_bound(distances[0], squares, LR, WEIGHT)


def test_erratum_eq_95_as_printed_fails_for_a_constant_gradient():
    """The steps rest where the pull balances the gradient, ``||u|| = g / (2 lambda)``."""
    lr, weight, gradient, steps = 0.01, 0.5, 3.0, 1000
    u, total = gradient / (2 * weight), 0.0
    for _ in range(steps):
        total += u**2
        u = abs((1 - 2 * lr * weight) * u + lr * gradient)
    squares = np.full(steps, gradient**2)
    start = (gradient / (2 * weight)) ** 2
    assert total > 4 * anchor_sum_bound(start, squares, lr, weight, printed=True)
    assert total <= anchor_sum_bound(start, squares, lr, weight)


def test_eq_92_holds_with_smaller_terms_for_all_vectors():
    rng = np.random.default_rng(0)
    for _ in range(500):
        lr, u, g = rng.uniform(0.01, 3), rng.standard_normal(4), rng.standard_normal(4) * rng.uniform(0, 5)
        a = rng.uniform(0.001, 0.5)
        weight = a / lr
        new = np.sum(((1 - 2 * a) * u - lr * g) ** 2)
        closer = (1 - a) * (1 - 2 * a) * np.sum(u**2) + (1 - a) * lr / weight * np.sum(g**2)
        assert new <= closer + 1e-12
        assert closer <= anchor_distances(np.sum(u**2), [np.sum(g**2)], lr, weight)[1] + 1e-12


def test_constants_of_lemma_c3_are_those_of_its_steps():
    """Eqs. 72 to 74 at one event, for random models, in which every inequality of the proof is taken."""
    rng, nodes, late = np.random.default_rng(1), 5, 3
    for _ in range(200):
        w, mean = rng.standard_normal((nodes, 2)), rng.standard_normal(2)
        old = w[:late] + 0.3 * rng.standard_normal((late, 2))  # models that messages still carry
        errors, drift, move = 0.1 * rng.standard_normal((late, 2)), rng.standard_normal(2), 0.05
        part = rng.dirichlet(np.ones(late + 1))
        mixed = part[0] * w[-1] + part[1:] @ (old + errors)
        after = np.concatenate([w[:-1], [mixed + drift]])
        consensus = np.mean(np.sum((after - mean - move * np.array([1.0, 0.0])) ** 2, axis=1))
        error = max(np.linalg.norm(errors, axis=1).max(), move)  # w_bar moves by at most c eps_c, here c = 1
        gone = np.sum((w[:late] - old) ** 2, axis=1).max()  # at most tau times the sum of squared drifts
        c = consensus_constants(nodes, 1.0)
        before = np.mean(np.sum((w - mean) ** 2, axis=1))
        assert consensus <= 18 * before + c.of_drift * drift @ drift + c.of_stale_drift * gone + c.of_error * error**2
    assert consensus_constants(4, 0.5) == (1.0, 4.0, 2.5)


def planned(exchange, topology, nodes=5):
    return plan_peers(
        exchange, "lognormal:heterogeneity=0.7", num_clients=nodes, local_steps=1, until=Until(updates=120),
        topology=topology, seed=3,
    )  # fmt: skip


@pytest.mark.parametrize("exchange", ["push_sum", "mean:capacity=3", "swift"])
def test_the_coefficient_bounds_how_far_apart_models_are_after_each_window(exchange):
    """Random numbers as models, mixed by the plan without training; messages in between carry old ones."""
    plan = planned(exchange, "ring" if exchange == "swift" else "gossip:receivers=2")
    found = contraction(plan, 20)
    assert found.begin.tolist() == [0, 20, 40, 60, 80, 100]
    assert 0 < found.coefficient.min() < 0.8 and found.coefficient.max() <= 1  # 1: a slow node has no event
    assert found.rate == pytest.approx(found.coefficient.max() ** (1 / 20))
    rng = np.random.default_rng(2)
    models, sent, apart = rng.standard_normal(5), {}, []
    for event, node in enumerate(plan.client):
        if event % 20 == 0:
            inbox = plan.source[plan.inbox_bounds[event] : plan.inbox_bounds[event + 20]]
            known = [*models, *(sent[old] for old in inbox if old < event)]
            apart.append(max(known) - min(known))
        own = models[node]
        for entry in range(plan.inbox_bounds[event], plan.inbox_bounds[event + 1]):
            models[node] += plan.weight[entry] * (sent[plan.source[entry]] - own)
        sent[event] = models[node]
        if event % 20 == 19:
            assert np.ptp(models) <= found.coefficient[event // 20] * apart[-1] + 1e-12


def test_corrupt_messages_do_not_contract():
    """Their receivers mix their own models in their place."""
    plan = planned("mean", "ring")
    half = plan._replace(corrupt=np.arange(len(plan.corrupt)) % 2 == 0)
    assert contraction(plan._replace(corrupt=np.ones_like(plan.corrupt)), 30).rate == 1
    marked = corrupt_entries(half)
    assert 0 < marked.sum() < len(marked)
    expected = contraction(plan._replace(weight=np.where(marked, 0.0, plan.weight)), 30).coefficient
    np.testing.assert_array_equal(contraction(half, 30).coefficient, expected)


def test_nodes_that_hear_nobody_do_not_contract_and_a_complete_mean_does_at_once():
    assert contraction(planned("alone", "ring"), 30).rate == 1
    rounds = contraction(planned("dpsgd", "complete", nodes=3), 6)
    np.testing.assert_allclose(rounds.coefficient[1:], 0, atol=1e-12)  # every round all nodes take the common mean


def test_eq_21_at_the_papers_settings():
    assert training_over_clustering(400, 1, 3, 32) == pytest.approx(400 / 96)
    assert training_over_clustering(1600, 2, 5, 16) == 40


test_bad_input = refusals(
    (lambda: anchor_distances(-1, [1], 0.1, 1), "^start = "),
    (lambda: anchor_distances(1, [1], 0.6, 1), "^lr = 0.6: must be at most 0.5"),
    (lambda: anchor_distances(1, [-1], 0.1, 1), "^squared_gradients = "),
    (lambda: anchor_sum_bound(1, [1], 0.1, 0), "^weight = "),
    (lambda: consensus_constants(0, 0.5), "^clients = "),
    (lambda: consensus_constants(3, 1.5), "^sent = "),
    (lambda: training_over_clustering(0, 1, 1, 2), "^samples = "),
    (lambda: training_over_clustering(1, 1, 1, 0), "^k = "),
    (lambda: contraction(planned("mean", "ring"), 121), "^window = 121: must be at most 120"),
    (lambda: contraction(planned("divshare", "gossip"), 10), "^schedule = "),
)
