"""Small trees of several layers, also as flat vectors."""

import jax
import jax.numpy as jnp
import numpy as np

SHAPES = {"conv": {"kernel": (3, 2), "bias": (2,)}, "dense": {"kernel": ()}}
GROUPS = {"layer": [[0, 1], [2]], "tensor": [[0], [1], [2]], "whole": [[0, 1, 2]]}  # leaves that are one vector


def random_tree(rng, rows=()):
    is_shape = {"is_leaf": lambda leaf: isinstance(leaf, tuple)}
    return jax.tree.map(lambda shape: jnp.asarray(rng.normal(size=(*rows, *shape))), SHAPES, **is_shape)


def trees(seed, count, size=1.0):
    rng = np.random.default_rng(seed)
    return [scaled(random_tree(rng), size) for _ in range(count)]


def scaled(tree, factor):
    return jax.tree.map(lambda leaf: leaf * jnp.asarray(factor, leaf.dtype), tree)


def vector(tree, group, rows=False):
    leaves = [np.asarray(jax.tree.leaves(tree)[number]) for number in group]
    return np.concatenate([leaf.reshape((len(leaf), -1) if rows else -1) for leaf in leaves], axis=-1)


def flat(tree):
    """All leaves as one float64 vector, in their order in the tree."""
    return np.concatenate([np.asarray(leaf, np.float64).reshape(-1) for leaf in jax.tree.leaves(tree)])


def like(values, tree):
    """The inverse of :func:`flat`."""
    pieces, low = [], 0
    for leaf in jax.tree.leaves(tree):
        pieces.append(jnp.asarray(np.reshape(values[low : low + leaf.size], leaf.shape), leaf.dtype))
        low += leaf.size
    return jax.tree.unflatten(jax.tree.structure(tree), pieces)


def close(have, want, rtol=1e-9, atol=1e-12):
    """Two trees, or two arrays, agree to rounding in float64."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), have, want)
