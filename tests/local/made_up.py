"""A small classification task, as a pool that several clients share, and softmax regression without flax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.types import ClientData, Message, Model

CLASSES, FEATURES, ROWS = 3, 4, 60
SIZES = [23, 5, 32]
OFFSETS = [0, 23, 28]


def pool(seed=0):
    """``x [M, F]``, ``y [M]`` and ``order [M]`` in NumPy, float64."""
    chance = np.random.default_rng(seed)
    x = chance.normal(size=(ROWS, FEATURES))
    y = np.argmax(x[:, :CLASSES] + 0.5 * chance.normal(size=(ROWS, CLASSES)), axis=1).astype(np.int32)
    return x, y, chance.permutation(ROWS).astype(np.int32)


def client_data(client=0, *, size=None, seed=0):
    """The data of client 0, 1 or 2, in JAX's default float type."""
    x, y, order = pool(seed)
    return ClientData(
        jnp.asarray(x, float),
        jnp.asarray(y),
        jnp.asarray(order),
        jnp.int32(OFFSETS[client]),
        jnp.int32(SIZES[client] if size is None else size),
    )


def rows_of(client=0, size=None):
    """Pool rows of a client, in the order in which it numbers its examples."""
    _, _, order = pool()
    return order[OFFSETS[client] :][: SIZES[client] if size is None else size]


def softmax_regression():
    def apply(params, x, key=None):
        return x @ params["w"] + params["b"][None, :]

    def loss(outputs, y):
        return -jnp.take_along_axis(jax.nn.log_softmax(outputs), y[:, None], axis=1)[:, 0]

    return Model(lambda key: start_params(), apply, loss)


def start_arrays(seed=5):
    chance = np.random.default_rng(seed)
    return chance.normal(size=(FEATURES, CLASSES)), chance.normal(size=CLASSES)


def start_params(dtype=None):
    w, b = start_arrays()
    return {"w": jnp.asarray(w, dtype or float), "b": jnp.asarray(b, dtype or float)}


def message(version=0, dtype=None):
    return Message(start_params(dtype), version=jnp.int32(version))
