"""Simplices: mixtures, the centroid, and uniform points."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.geometry import centroid, sample_simplex, sample_weights, simplex, simplex_point
from tests.geometry.made_up import close, flat, random_tree


def corners(count):
    rng = np.random.default_rng(count)
    return [random_tree(rng) for _ in range(count)]


@pytest.mark.float64
@pytest.mark.parametrize("count", [1, 2, 5])
def test_mixtures_of_vertices(count):
    each = corners(count)
    vertices = simplex(each)
    rows = np.stack(list(map(flat, each)))
    weights = np.random.default_rng(0).dirichlet(np.ones(count))
    close(flat(simplex_point(vertices, jnp.asarray(weights))), weights @ rows)
    for k in range(count):
        close(simplex_point(vertices, jnp.eye(count)[k]), each[k])
    close(flat(centroid(vertices)), rows.mean(axis=0))


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_sampled_weights_are_uniform_in_the_simplex(count):
    """Means 1 / V, variances (V - 1) / (V^2 (V + 1)), covariances -1 / (V^2 (V + 1)); a weight is Beta(1, V - 1)."""
    draws = np.asarray(jax.vmap(lambda key: sample_weights(key, count))(jax.random.split(jax.random.key(0), 20_000)))
    assert (draws >= 0).all()
    np.testing.assert_allclose(draws.sum(axis=1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(draws.mean(axis=0), 1 / count, atol=0.01)
    exact = (np.eye(count) * count - 1) / (count**2 * (count + 1))
    np.testing.assert_allclose(np.cov(draws.T).reshape(count, count), exact, atol=0.003)
    if count > 1:
        at = np.array([0.1, 0.3, 0.6])
        np.testing.assert_allclose((draws[:, :1] <= at).mean(axis=0), 1 - (1 - at) ** (count - 1), atol=0.015)


def test_a_sampled_point_lies_in_the_simplex():
    each = corners(3)
    key = jax.random.key(1)
    point = sample_simplex(key, simplex(each))
    want = np.asarray(sample_weights(key, 3), np.float64) @ np.stack(list(map(flat, each)))
    np.testing.assert_allclose(flat(point), want, atol=1e-6)


def test_input_is_checked():
    with pytest.raises(ValueError, match=r"vertices = \[\]: must be at least one vertex"):
        simplex([])
    with pytest.raises(ValueError, match="count = 0: must be a whole number >= 1"):
        sample_weights(jax.random.key(0), 0)
