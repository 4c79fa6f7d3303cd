"""Estimators against problems with known constants, and eq. 11 with these against measured runs."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from fedjax_async import Method, Settings, simulate
from fedjax_async.clock import delay_statistics
from fedjax_async.config.experiment import prepare
from fedjax_async.data import federate, from_arrays, quadratic_problem
from fedjax_async.local import batch
from fedjax_async.models import BatchNorm, from_flax, linear
from fedjax_async.server.aggregate import mean
from fedjax_async.server.rule import rule
from fedjax_async.theory import (
    Constants,
    asynfl_bound,
    client_gradients,
    estimate,
    gradient_variance,
    largest_lr_asynfl,
    smoothness,
    smoothness_between,
)
from tests.engine import problem
from tests.refusals import refusals

pytestmark = pytest.mark.float64

KEY = jax.random.key(5)


def quadratic(**options):
    known = quadratic_problem(dim=4, clients=3, examples=11, noise=0.3, seed=2, **options)
    return known, federate(known.dataset, "natural"), linear(input_shape=(4,))


def test_exact_on_quadratics():
    known, data, model = quadratic(smallest=0.2, largest=3.0)
    w = np.array([0.3, -1.0, 2.0, 0.5])
    found = estimate(KEY, model, {"w": jnp.asarray(w)}, data, batch_size=4, chunk=3, width=2)
    gradients = np.array([known.gradient(i, w) for i in range(3)])
    away = w - known.optimum
    loss = known.minimum + 0.5 * away @ known.curvature.mean(axis=0) @ away
    np.testing.assert_allclose(found.loss, loss, rtol=1e-9)
    np.testing.assert_allclose(found.squared_gradient, np.sum(gradients.mean(axis=0) ** 2), rtol=1e-9)
    np.testing.assert_allclose(found.heterogeneity, np.trace(np.cov(gradients.T, bias=True)), rtol=1e-9)
    np.testing.assert_allclose(found.smoothness, 3.0, rtol=1e-9)


def test_variance_is_that_of_the_minibatches_that_clients_draw():
    """Against every batch of many epochs of ``local.batch``; clients of 4, 6 and 13 rows, batches of 4."""
    params = problem.MODEL.init(KEY)
    who = problem.data()
    chosen = [1, 3, 2]
    got = gradient_variance(problem.MODEL, params, who, batch_size=4, clients=chosen, chunk=5)
    gradient = jax.jit(jax.grad(lambda p, x, y: problem.MODEL.loss(problem.MODEL.apply(p, x), y).sum()))

    @jax.jit
    def batches(size):
        """Of 1,200 steps, which are whole epochs of one, two or four."""
        seed = jnp.array([3, 4], jnp.uint32)
        return jax.vmap(lambda k: batch(seed, k, size, 4))(jnp.arange(1200, dtype=jnp.int32))

    def flat(x, y):
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gradient(params, x, y))])

    for value, client in zip(got, chosen):
        rows = who.order[who.offset[client] :][: who.size[client]]
        single = np.array([flat(who.x[[row]], who.y[[row]]) for row in rows])
        position, mask = batches(jnp.int32(len(rows)))
        share = np.asarray(mask, float)
        drawn = np.einsum("sb,sbd->sd", share, single[position]) / share.sum(axis=1, keepdims=True)
        sampled = np.sum((drawn - single.mean(axis=0)) ** 2, axis=1).mean()
        np.testing.assert_allclose(value, sampled, rtol=0.1, atol=1e-12)
    assert got[0] < 1e-20 < got[1]  # four rows: one batch is all of them


def test_smoothness_counts_negative_curvature_and_never_overestimates():
    """A small network, whose Hessian has eigenvalues of either sign."""
    who, model = problem.data(), problem.MODEL
    params = jax.tree.map(lambda leaf: 3 * leaf, model.init(KEY))
    flat, back = jax.flatten_util.ravel_pytree(params)
    got = [smoothness(KEY, model, params, who, iterations=n, clients=[0, 2], chunk=4) for n in (3, 1000)]
    for early, late, client in zip(*got, (0, 2)):
        rows = who.order[who.offset[client] :][: who.size[client]]
        hessian = jax.jit(jax.hessian(lambda w, r=rows: model.loss(model.apply(back(w), who.x[r]), who.y[r]).mean()))
        eigenvalues = np.linalg.eigvalsh(hessian(flat))
        assert eigenvalues[0] < -1e-3
        np.testing.assert_allclose(late, np.abs(eigenvalues).max(), rtol=1e-6)
        assert early < late <= np.abs(eigenvalues).max() * (1 + 1e-12)


def test_gradient_differences_bound_the_smoothness_from_below():
    known, data, model = quadratic(smallest=0.2, largest=3.0)
    step, along = np.arange(4.0), np.linalg.eigh(known.curvature[1])[1][:, -1]
    here, there, top = ({"w": jnp.asarray(known.optimum + each)} for each in (0 * step, step, 0.1 * along))
    expected = [np.linalg.norm(a @ step) / np.linalg.norm(step) for a in known.curvature]
    np.testing.assert_allclose(smoothness_between(model, here, there, data), expected, rtol=1e-9)
    np.testing.assert_allclose(smoothness_between(model, here, top, data, clients=[1]), 3.0, rtol=1e-9)
    with pytest.raises(ValueError, match="other"):
        smoothness_between(model, here, here, data)


def test_grouping_of_clients_and_rows_changes_nothing():
    params, who = problem.MODEL.init(KEY), problem.data()
    losses, gradients = client_gradients(problem.MODEL, params, who)
    again = client_gradients(problem.MODEL, params, who, width=2, chunk=5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12), again, (losses, gradients))
    assert losses.shape == (5,) and jax.tree.leaves(gradients)[0].shape[0] == 5


def test_running_statistics_are_no_weights():
    """A network with BatchNorm is measured as in evaluation; its gradients are those of the weights alone."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool = False, mask=None):
            return nn.Dense(3)(nn.relu(BatchNorm()(nn.Dense(4)(x), train, mask)))

    model, who = from_flax(Net(), input_shape=(5,)), problem.data()
    params = jax.jit(model.init)(KEY)
    _, gradients = client_gradients(model, params, who)
    assert jax.tree.structure(gradients) == jax.tree.structure(params["params"])
    variance = gradient_variance(model, params, who, batch_size=4, clients=[0, 1])
    assert variance[0] > 1e-3 and abs(variance[1]) < 1e-9  # client 1 has a single batch


def test_a_model_that_normalises_by_its_batch_sees_the_rows_of_the_client():
    def centred(params, x, key=None):
        return (x - x.mean(axis=0, keepdims=True)) @ params["w"]

    model = linear(input_shape=(2,))._replace(apply=centred)
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(n, 2)), rng.normal(size=n)) for n in (3, 6)]
    who = from_arrays(clients, test=clients[0])
    params = {"w": jnp.ones(2)}
    alone, _ = client_gradients(model, params, who, clients=[0])
    both, _ = client_gradients(model, params, who)  # six rows at a time: those of client 0 are there twice
    np.testing.assert_allclose(both[0], alone[0], rtol=1e-9)


test_bad_options_and_data_are_named = refusals(
    ({"batch_size": 0}, {}, "batch_size = 0"),
    ({"iterations": 0}, {}, "iterations = 0"),
    ({"width": 0}, {}, "width = 0"),
    ({"chunk": 1.5}, {}, r"chunk = 1\.5"),
    ({"clients": []}, {}, r"clients = \[\]"),
    ({"clients": [5]}, {}, "clients = 5"),
    ({}, {"streamed": True}, "streamed = True"),
    ({}, {"size": np.array([9, 4, 13, 6, 0], np.int32)}, "examples of client 4 = 0"),
    by=lambda options, change: estimate(
        KEY, problem.MODEL, problem.MODEL.init(KEY), problem.data()._replace(**change), **{"batch_size": 4} | options
    ),
)


# --- Theorem 1 against a run ------------------------------------------------------------------------


def measured(found, gap, lr, delays):
    """Theorem 1's constants for four clients: each is the largest value found along a run."""
    return Constants(
        gap=gap,
        smoothness=max(one.smoothness.max() for one in found),
        variance=max(one.variance.max() for one in found),
        heterogeneity=max(one.heterogeneity for one in found),
        clients=4, local_steps=2, lr=lr, server_lr=1.0, delays=delays,
    )  # fmt: skip


@pytest.mark.slow
def test_theorem_1_bounds_what_a_network_measures():
    """A tanh network of 66 parameters, cross-entropy: the constants are the largest found along the run itself.

    The smallest loss is unknown, but no cross-entropy is negative, so the gap is at most the first loss.
    """
    data, model, steps = problem.data((12, 9, 13, 8)), problem.MODEL, 6000
    # Algorithm 1: AsynFL with random participation among four clients
    method = Method(rule(optimizer=optax.sgd(1.0), aggregate=mean(divisor=4)), "participation:probability=0.99")
    settings = Settings(batch_size=4, steps=2, server_steps=steps, seed=0)
    start = prepare(settings, method=method, model=model, data=data)
    delays = delay_statistics(start.schedule, fresh=1)
    assert delays.tau_max == 2  # uploads are late; otherwise this would be FedAvg

    taken = np.array([0, 1, 4, 8]) * steps // 8
    found = [estimate(KEY, model, start.params, data, batch_size=4)]
    lr = 0.9 * float(largest_lr_asynfl(measured(found, found[0].loss, 1.0, delays)))  # L may grow during the run
    for step in taken[1:].tolist():
        shorter = dataclasses.replace(settings, server_steps=step, lr=lr)
        reached = simulate(shorter, method=method, model=model, data=data)
        found.append(estimate(KEY, model, reached.params, data, batch_size=4))
    c = measured(found, found[0].loss, lr, delays)
    assert lr <= largest_lr_asynfl(c)
    gradient = np.array([one.squared_gradient for one in found])
    average = np.diff(taken) @ gradient[:-1] / steps  # an upper bound, because the gradient falls
    bound = asynfl_bound(c).total
    assert (np.diff(gradient) < 0).all()
    assert gradient[-1] < average < bound
    assert bound < 0.9 * gradient[0]  # or the start alone would do
