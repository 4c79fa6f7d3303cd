"""A small classification task, as a pool that several clients share, and softmax regression without flax."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.local.batches import seed_of
from fedjax_async.models import cross_entropy
from fedjax_async.types import ClientData, Message, Model
from tests.local import textbook

CLASSES, FEATURES, ROWS = 3, 4, 60
SIZES, OFFSETS = [23, 5, 32], [0, 23, 28]


def pool(seed=0):
    """``x [M, F]``, ``y [M]`` and ``order [M]`` in NumPy, float64."""
    chance = np.random.default_rng(seed)
    x = chance.normal(size=(ROWS, FEATURES))
    y = np.argmax(x[:, :CLASSES] + 0.5 * chance.normal(size=(ROWS, CLASSES)), axis=1).astype(np.int32)
    return x, y, chance.permutation(ROWS).astype(np.int32)


def client_data(client=0, *, size=None, seed=0):
    """The data of client 0, 1 or 2, in JAX's default float type."""
    x, y, order = pool(seed)
    own = jnp.int32(OFFSETS[client]), jnp.int32(SIZES[client] if size is None else size)
    return ClientData(jnp.asarray(x, float), jnp.asarray(y), jnp.asarray(order), *own)


def rows_of(client=0, size=None):
    """Pool rows of a client, in the order in which it numbers its examples."""
    _, _, order = pool()
    return order[OFFSETS[client] :][: SIZES[client] if size is None else size]


def start_arrays(seed=5):
    chance = np.random.default_rng(seed)
    return chance.normal(size=(FEATURES, CLASSES)), chance.normal(size=CLASSES)


def start_params(dtype=None):
    w, b = start_arrays()
    return {"w": jnp.asarray(w, dtype or float), "b": jnp.asarray(b, dtype or float)}


MODEL = Model(
    lambda key: start_params(), lambda params, x, key=None: x @ params["w"] + params["b"][None], cross_entropy
)


def message(version=0, dtype=None):
    return Message(start_params(dtype), version=jnp.int32(version))


def flat(params):
    """All leaves as one vector; of ``start_params()``, b and then w."""
    return np.concatenate([np.zeros(0), *(np.asarray(leaf).ravel() for leaf in jax.tree.leaves(params))])


def start_vector():
    w, b = start_arrays()
    return np.concatenate([b, w.ravel()])


def slope(vector, rows, centre=0.0):
    """The gradient of the mean cross-entropy of these pool rows minus ``centre``, at and as a vector of b and w."""
    x, y, _ = pool()
    weights = vector[CLASSES:].reshape(FEATURES, CLASSES), vector[:CLASSES]
    w, b = textbook.gradient(*weights, x[rows] - centre, y[rows])
    return np.concatenate([b, w.ravel()])


def slopes(key, client, batch_size, steps):
    """The gradient in each local step of a job, as a function of the weights."""
    return [partial(slope, rows=rows) for rows in groups(key, client, batch_size, steps)]


def groups(key, client, batch_size, steps, size=None):
    """Pool rows of each minibatch of a job."""
    rows = rows_of(client, size)
    seed = tuple(int(word) for word in seed_of(key))
    return [rows[positions] for positions in textbook.batches(seed, len(rows), batch_size, steps)]
