"""A small problem in JAX's default float type: a softmax MLP on Gaussian blobs, clients of unequal sizes."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_async import registry
from fedjax_async.clock import Until, plan
from fedjax_async.engine import Components, Every, evaluation_points
from fedjax_async.local import OPTIMIZERS, local_steps, local_training
from fedjax_async.models.wrap import augmented, cross_entropy
from fedjax_async.server import METHODS, SERVERS
from fedjax_async.types import FederatedData, Model

FEATURES, HIDDEN, CLASSES = 5, 7, 3
SIZES = (9, 4, 13, 6, 1)


def identity(x):
    return x


@functools.cache
def data(sizes: tuple[int, ...] = SIZES) -> FederatedData:
    rng = np.random.default_rng(7)
    size = np.array(sizes, np.int32)
    total = int(size.sum())
    y = rng.integers(0, CLASSES, total + 20).astype(np.int32)
    x = rng.normal(size=(total + 20, FEATURES)) + 1.5 * np.eye(CLASSES, FEATURES)[y]
    order = rng.permutation(total).astype(np.int32)
    offset = np.concatenate([[0], np.cumsum(size)[:-1]]).astype(np.int32)
    return FederatedData(
        "blobs", x[:total], y[:total], order, offset, size, x[total:], y[total:], identity, CLASSES,
        np.arange(20, dtype=np.int32), np.arange(len(size), dtype=np.int32) * (20 // len(size)),
        np.full(len(size), 20 // len(size), np.int32),
    )  # fmt: skip


@jax.jit
def _init(key):
    """Two layers with three tensors in total: more leaves would make every program larger."""
    a, b = jax.random.split(key)
    return {
        "hidden": {"kernel": 0.5 * jax.random.normal(a, (FEATURES, HIDDEN))},
        "output": {"kernel": 0.5 * jax.random.normal(b, (HIDDEN, CLASSES)), "bias": jnp.zeros(CLASSES)},
    }


def _apply(params, x, key=None):
    x = x.astype(params["hidden"]["kernel"].dtype)
    h = jnp.tanh(x @ params["hidden"]["kernel"])
    return h @ params["output"]["kernel"] + params["output"]["bias"][None]


MODEL = Model(_init, _apply, cross_entropy)


@functools.cache
def server(name: str, **options):
    return SERVERS[name](**options)


@functools.cache
def client(proximal: float = 0.0, batch_size: int = 4, lr: float = 0.1):
    return local_training(MODEL, optimizer=optax.sgd(lr, momentum=0.5), batch_size=batch_size, proximal=proximal)


@functools.cache
def noisy_client():
    """``client()`` with augmented inputs: random noise is added in every local step."""
    model = augmented(MODEL, lambda key, x: x + 0.3 * jax.random.normal(key, x.shape, x.dtype))
    return local_training(model, optimizer=optax.sgd(0.1, momentum=0.5), batch_size=4)


@functools.cache
def client_of(rule: str):
    """The local training that belongs to a rule."""
    made = METHODS[rule].client if rule in METHODS else local_training
    if made is local_training:
        return client()
    optimizer = OPTIMIZERS[METHODS[rule].optimizer](0.1)
    options = {"lr": 0.1, "optimizer": optimizer, "alpha": 0.5, "batch_size": 4, "proximal": METHODS[rule].proximal}
    options["control_lr"] = 0.05
    return made(MODEL, **{key: options[key] for key in options if key in registry.options_of(made)})


class Case(NamedTuple):
    """The arguments of both engines, in order."""

    components: Components
    schedule: object
    params: object
    key: object
    points: object


def case(
    rule, timing="every", delay="exponential", *, proximal=0.0, updates=24, seed=3, every=None, epochs=2.0, steps=None,
    sizes=SIZES, **conditions,
) -> Case:  # fmt: skip
    """The arguments of one run; call it inside ``jax.enable_x64`` for float64."""
    who = data(sizes)
    trainer = client(proximal) if proximal or not isinstance(rule, str) else client_of(rule)
    rule = server(rule) if isinstance(rule, str) else rule
    schedule = plan(
        timing,
        delay,
        num_clients=len(who.size),
        local_steps=local_steps(who.size, batch_size=4, epochs=None if steps else epochs, steps=steps),
        until=Until(updates=updates),
        seed=seed,
        bytes_down=1000,
        bytes_up=1000,
        **conditions,
    )
    points = evaluation_points(schedule, every or Every(updates=5))
    params = MODEL.init(jax.random.key(1))
    return Case(Components(rule, trainer, MODEL, who), schedule, params, jax.random.key(2), points)


def close(a, b, rtol):
    """Assert that two trees are equal up to ``rtol`` relative to the largest entry of each leaf of ``b``."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=0, atol=rtol * max(np.abs(y).max(), 1e-3))
