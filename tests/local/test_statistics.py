"""Training with running statistics in the params, and with private params."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from fedjax_async import data, simulate
from fedjax_async.base import tree
from fedjax_async.base.notices import RunWarning
from fedjax_async.local import local_training, run_job
from fedjax_async.models import BatchNorm
from fedjax_async.models.norm import is_statistic
from fedjax_async.types import Message, Model
from tests.local import textbook
from tests.local.made_up import CLASSES, FEATURES, MODEL, client_data, groups, pool, start_arrays, start_params

KEY, BATCH = jax.random.key(3), 8


def centred_regression(private=None):
    """Softmax regression on inputs minus their batch's mean, with a running mean of momentum 0.9."""

    def init(key):
        return {"params": start_params(), "batch_stats": {"mean": jnp.full(FEATURES, 0.25)}}

    def apply(params, x, key=None):
        return MODEL.apply(params["params"], x - params["batch_stats"]["mean"][None, :])

    def train(params, x, key, mask):
        share = mask.astype(x.dtype)
        mean = (x * share[:, None]).sum(axis=0) / share.sum()
        moved = {"mean": 0.9 * params["batch_stats"]["mean"] + 0.1 * mean}
        return MODEL.apply(params["params"], x - mean[None, :]), {**params, "batch_stats": moved}

    return Model(init, apply, MODEL.loss, train, private)


def expected_of(steps, *, lr, decay, momentum, mu, mean):
    """(w, b, running mean) in NumPy: momentum and decay touch w and b only."""
    (w, b), (x, y, _) = start_arrays(), pool()
    start, velocity = (w, b), [0.0, 0.0]
    for rows in groups(KEY, 0, BATCH, steps):
        centre = x[rows].mean(axis=0)
        mean = 0.9 * mean + 0.1 * centre
        gradient = textbook.gradient(w, b, x[rows] - centre, y[rows])
        for i, g in enumerate(gradient):
            pull = mu * ((w, b)[i] - start[i])
            velocity[i] = momentum * velocity[i] + g + pull + decay * (w, b)[i]
        w, b = w - lr * velocity[0], b - lr * velocity[1]
    return w, b, mean


def algorithm(private=None):
    local = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.3, momentum=0.8))
    return local_training(centred_regression(private), optimizer=local, batch_size=BATCH, proximal=0.4)


def sent(mean=0.25):
    return Message({"params": start_params(), "batch_stats": {"mean": jnp.full(FEATURES, mean)}}, version=jnp.int32(0))


OPTIONS = {"lr": 0.3, "decay": 0.1, "momentum": 0.8, "mu": 0.4}


@pytest.mark.float64
def test_statistics_move_and_the_optimiser_never_touches_them():
    """Seven steps in batches of 8, 8, 7: decay, momentum and the proximal term act on the weights alone."""
    upload, state = run_job(algorithm(), KEY, sent(), (), client_data(), 7)
    w, b, mean = expected_of(7, **OPTIONS, mean=np.full(FEATURES, 0.25))
    (w0, b0) = start_arrays()
    assert state == ()
    np.testing.assert_allclose(upload["params"]["w"], w - w0, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(upload["params"]["b"], b - b0, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(upload["batch_stats"]["mean"], mean - 0.25, rtol=1e-9, atol=1e-12)


@pytest.mark.float64
def test_private_statistics_stay_with_the_client():
    """The second job continues from the first's statistics, not from the message's; zeros are uploaded."""
    client, mean = algorithm(is_statistic), np.full(FEATURES, 0.25)
    state = client.init(sent().params)
    for message in (sent(99.0), sent(-5.0)):
        upload, state = run_job(client, KEY, message, state, client_data(), 4)
        w, _, mean = expected_of(4, **OPTIONS, mean=mean)
        np.testing.assert_array_equal(upload["batch_stats"]["mean"], 0.0)
        np.testing.assert_allclose(state[1]["batch_stats"]["mean"], mean, rtol=1e-12)
        np.testing.assert_allclose(upload["params"]["w"], w - start_arrays()[0], rtol=1e-9, atol=1e-12)


@pytest.mark.float64
def test_a_private_head_is_trained_and_kept():
    """In a model without statistics: the bias is private, trained, and starts where the client's last job ended."""
    model = MODEL._replace(private=lambda path: path == ("b",))
    client = local_training(model, optimizer=optax.sgd(0.3), batch_size=BATCH, proximal=0.5)
    message = Message(start_params(), version=jnp.int32(0))
    (w, b), (x, y, _) = start_arrays(), pool()
    state = client.init(message.params)
    for _ in range(2):
        elsewhere = message._replace(params={**message.params, "b": jnp.full(CLASSES, 7.0)})
        upload, state = run_job(client, KEY, elsewhere, state, client_data(), 5)
        new_w, b = textbook.train(w, b, x, y, groups(KEY, 0, BATCH, 5), lr=0.3, proximal=0.5)
        np.testing.assert_allclose(upload["w"] + w, new_w, rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(upload["b"], 0.0)
        np.testing.assert_allclose(state[1]["b"], b, rtol=1e-9)


def test_clients_vmapped_equal_one_by_one():
    client, data = algorithm(is_statistic), client_data()
    keys, starts = jax.random.split(KEY, 3), jnp.array([0.1, 0.2, 0.3])
    each = [client_data(i) for i in range(3)]
    offsets, sizes = jnp.stack([d.offset for d in each]), jnp.stack([d.size for d in each])

    def one(key, mean, offset, size):
        message = sent()
        own = {"batch_stats": {"mean": jnp.full(FEATURES, mean)}, "params": dict.fromkeys(start_params())}
        state = ((), own)
        return run_job(client, key, message, state, data._replace(offset=offset, size=size), 4)

    together, alone = jax.jit(jax.vmap(one))(keys, starts, offsets, sizes), jax.jit(one)
    for i in range(3):
        expected = alone(keys[i], starts[i], offsets[i], sizes[i])
        have = tree.gather(together, i)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), have, expected)


@pytest.mark.float64
@pytest.mark.parametrize(("size", "batches"), [(1, []), (2, [2]), (BATCH + 1, [BATCH]), (BATCH + 2, [BATCH, 2])])
def test_a_batch_of_one_example_leaves_the_statistics_alone(size, batches):
    """Two steps of one epoch: a client with a single example, and last batches of one and of two examples."""
    upload, _ = run_job(algorithm(), KEY, sent(), (), client_data(size=size), -(-size // BATCH))
    moving = [rows for rows in groups(KEY, 0, BATCH, -(-size // BATCH), size) if len(rows) > 1]
    mean, (x, _, _) = np.full(FEATURES, 0.25), pool()
    for rows in moving:
        mean = 0.9 * mean + 0.1 * x[rows].mean(axis=0)
    assert [len(rows) for rows in moving] == batches
    np.testing.assert_allclose(upload["batch_stats"]["mean"], mean - 0.25, rtol=1e-9, atol=1e-12)
    if not batches:
        np.testing.assert_array_equal(upload["batch_stats"]["mean"], 0.0)
    assert np.abs(upload["params"]["b"]).max() > 0  # the weights are trained all the same


class Normalised(nn.Module):
    """``layer``: the package's BatchNorm, or flax's own with a mask."""

    own: bool

    @nn.compact
    def __call__(self, x, train=False, mask=None):
        x = nn.Dense(3)(x)
        if self.own:
            return BatchNorm()(x, train=train, mask=mask)
        rows = None if mask is None else mask[:, None]
        return nn.BatchNorm(use_running_average=not train, momentum=0.9)(x, mask=rows)


def statistics_after(own, alone=True, **settings):
    """The running statistics at the end of a run; ``alone``: of clients with one example each."""
    x, y = np.random.default_rng(0).normal(size=(12, 4)), np.arange(12) % 3
    ends = [1, 2, 3] if alone else [3, 6, 9]
    clients = list(zip(np.split(x, ends)[:3], np.split(y, ends)[:3], strict=True))
    given = data.from_arrays(clients=clients, test=(x[9:], y[9:]))
    world = {"delay": "constant:mean=1", "updates": 6, "lr": 0.1, "data": given, "model": Normalised(own)}
    run = simulate(**world, **settings)
    return jax.tree.leaves(jax.tree.map(np.asarray, run.params["batch_stats"]))


WAYS = {
    "vmap": {"method": "asgd", "batching": "vmap", "max_width": 1}, "curves": {"method": "asynccurve:correction=asgd"},
    "simplices": {"method": "floco"}, "nodes": {"method": "independent"},
    "policy": {"method": "asgd", "policy": "power_of_choice:d=2", "timing": "every:concurrency=2"},
}  # fmt: skip


@pytest.mark.slow_cases("curves", "simplices", "policy")
@pytest.mark.parametrize("way", WAYS)
def test_no_running_variance_decays_where_every_client_has_one_example(way):
    """Mean 0 and variance 1 to the last bit, for every kind of run; each says it before it starts."""
    with pytest.warns(RunWarning, match="^clients with a single training example: .* leaves the running statistics"):
        mean, var = statistics_after(own=way != "vmap", **WAYS[way])
    np.testing.assert_array_equal(mean, np.zeros_like(mean))
    np.testing.assert_array_equal(var, np.ones_like(var))


def test_only_runs_with_batches_of_one_example_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mean, var = statistics_after(own=True, alone=False, method="asgd", engine="reference")
    assert np.all(mean != 0)
    assert np.all(var != 1)
    with pytest.warns(RunWarning, match="^batch_size = 1: a batch of fewer than two examples .* a larger batch_size"):
        mean, var = statistics_after(own=True, alone=False, method="asgd", batch_size=1, engine="reference")
    np.testing.assert_array_equal(var, np.ones_like(var))
