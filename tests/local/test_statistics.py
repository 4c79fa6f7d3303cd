"""Training with running statistics in the params, and with private params."""

from __future__ import annotations

import warnings
from functools import partial

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
from tests.local import made_up, textbook
from tests.local.made_up import CLASSES, FEATURES, MODEL, client_data, flat, groups, start_params, start_vector

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


def expected_of(steps, mean):
    """(the change of w and b, running mean) in NumPy: momentum, decay and the proximal term touch w and b only."""
    batches = groups(KEY, 0, BATCH, steps)
    means = [made_up.pool()[0][rows].mean(axis=0) for rows in batches]
    for centre in means:
        mean = 0.9 * mean + 0.1 * centre
    gradients = [partial(made_up.slope, rows=rows, centre=centre) for rows, centre in zip(batches, means)]
    options = {"lr": 0.3, "weight_decay": 0.1, "momentum": 0.8, "proximal": 0.4}
    return textbook.sgd(start_vector(), gradients, **options) - start_vector(), mean


def algorithm(private=None):
    local = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.3, momentum=0.8))
    return local_training(centred_regression(private), optimizer=local, batch_size=BATCH, proximal=0.4)


def sent(mean=0.25):
    return Message({"params": start_params(), "batch_stats": {"mean": jnp.full(FEATURES, mean)}}, version=jnp.int32(0))


@pytest.mark.float64
def test_statistics_move_and_the_optimiser_never_touches_them():
    """Seven steps in batches of 8, 8, 7: decay, momentum and the proximal term act on the weights alone."""
    upload, state = run_job(algorithm(), KEY, sent(), (), client_data(), 7)
    change, mean = expected_of(7, 0.25)
    assert state == ()
    np.testing.assert_allclose(flat(upload["params"]), change, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(upload["batch_stats"]["mean"], mean - 0.25, rtol=1e-9, atol=1e-12)


@pytest.mark.float64
def test_private_statistics_stay_with_the_client():
    """The second job continues from the first's statistics, not from the message's; zeros are uploaded."""
    client, mean = algorithm(is_statistic), 0.25
    state = client.init(sent().params)
    for message in (sent(99.0), sent(-5.0)):
        upload, state = run_job(client, KEY, message, state, client_data(), 4)
        change, mean = expected_of(4, mean)
        np.testing.assert_array_equal(upload["batch_stats"]["mean"], 0.0)
        np.testing.assert_allclose(state[1]["batch_stats"]["mean"], mean, rtol=1e-12)
        np.testing.assert_allclose(flat(upload["params"]), change, rtol=1e-9, atol=1e-12)


@pytest.mark.float64
def test_a_private_head_is_trained_and_kept():
    """In a model without statistics: the bias is private, trained, and starts where the client's last job ended."""
    model = MODEL._replace(private=lambda path: path == ("b",))
    client = local_training(model, optimizer=optax.sgd(0.3), batch_size=BATCH, proximal=0.5)
    start, kept = start_vector(), start_vector()[:CLASSES]
    state = client.init(start_params())
    for _ in range(2):
        elsewhere = Message({**start_params(), "b": jnp.full(CLASSES, 7.0)}, version=jnp.int32(0))
        upload, state = run_job(client, KEY, elsewhere, state, client_data(), 5)
        begun = np.append(kept, start[CLASSES:])
        trained = textbook.sgd(begun, made_up.slopes(KEY, 0, BATCH, 5), lr=0.3, proximal=0.5)
        kept = trained[:CLASSES]
        want = np.append(np.zeros(CLASSES), (trained - begun)[CLASSES:])
        np.testing.assert_allclose(flat(upload), want, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(state[1]["b"], kept, rtol=1e-9)


def test_clients_vmapped_equal_one_by_one():
    client, data = algorithm(is_statistic), client_data()
    offsets, sizes = (jnp.array(each, jnp.int32) for each in (made_up.OFFSETS, made_up.SIZES))
    given = jax.random.split(KEY, 3), jnp.array([0.1, 0.2, 0.3]), offsets, sizes

    def one(key, mean, offset, size):
        own = {"batch_stats": {"mean": jnp.full(FEATURES, mean)}, "params": dict.fromkeys(start_params())}
        return run_job(client, key, sent(), ((), own), data._replace(offset=offset, size=size), 4)

    together, alone = jax.jit(jax.vmap(one))(*given), jax.jit(one)
    for i in range(3):
        have, expected = tree.gather(together, i), alone(*tree.gather(given, i))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), have, expected)


@pytest.mark.float64
@pytest.mark.parametrize(("size", "batches"), [(1, []), (2, [2]), (BATCH + 1, [BATCH]), (BATCH + 2, [BATCH, 2])])
def test_a_batch_of_one_example_leaves_the_statistics_alone(size, batches):
    """Two steps of one epoch: a client with a single example, and last batches of one and of two examples."""
    upload, _ = run_job(algorithm(), KEY, sent(), (), client_data(size=size), -(-size // BATCH))
    moving = [rows for rows in groups(KEY, 0, BATCH, -(-size // BATCH), size) if len(rows) > 1]
    mean, (x, _, _) = np.full(FEATURES, 0.25), made_up.pool()
    for rows in moving:
        mean = 0.9 * mean + 0.1 * x[rows].mean(axis=0)
    assert [len(rows) for rows in moving] == batches
    np.testing.assert_allclose(upload["batch_stats"]["mean"], mean - 0.25, rtol=1e-9, atol=1e-12)
    assert batches or not upload["batch_stats"]["mean"].any()
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


def statistics_after(own, each=1, **settings):
    """The running statistics, mean and variance, at the end of a run of three clients with ``each`` examples."""
    x, y = np.random.default_rng(0).normal(size=(12, 4)), np.arange(12) % 3
    clients = [(x[low : low + each], y[low : low + each]) for low in range(0, 3 * each, each)]
    given = data.from_arrays(clients=clients, test=(x[9:], y[9:]))
    world = {"delay": "constant:mean=1", "updates": 6, "lr": 0.1, "data": given, "model": Normalised(own)}
    return jax.tree.leaves(jax.tree.map(np.asarray, simulate(**world, **settings).params["batch_stats"]))


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
    given = {"own": True, "each": 3, "method": "asgd", "engine": "reference"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mean, var = statistics_after(**given)
    assert np.all(mean != 0) and np.all(var != 1)
    with pytest.warns(RunWarning, match="^batch_size = 1: a batch of fewer than two examples .* a larger batch_size"):
        mean, var = statistics_after(**given, batch_size=1)
    np.testing.assert_array_equal(var, np.ones_like(var))
