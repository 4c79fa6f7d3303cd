"""The plane through three models, against Gram-Schmidt in NumPy."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fedjax_async.geometry import line, plane, plane_coordinates, plane_point
from tests.geometry.made_up import close, flat, random_tree


@pytest.mark.float64
@pytest.mark.parametrize("seed", range(3))
def test_coordinates_are_those_of_gram_schmidt(seed):
    rng = np.random.default_rng(seed)
    models = [random_tree(rng) for _ in range(3)]
    found = plane(*models)
    a, b, c, other = (*map(flat, models), rng.normal(size=flat(models[0]).size))
    basis, _ = np.linalg.qr(np.stack([b - a, c - a], axis=1))
    basis = basis * np.sign([basis[:, 0] @ (b - a), basis[:, 1] @ (c - a)])
    close(flat(found.first), basis[:, 0])
    close(flat(found.second), basis[:, 1])
    for model, vector in zip(models, (a, b, c), strict=True):
        at = plane_coordinates(found, model)
        close(at, basis.T @ (vector - a), atol=1e-12)
        close(flat(plane_point(found, at)), vector)
    nearest = a + basis @ (basis.T @ (other - a))
    sizes = np.cumsum([leaf.size for leaf in jax.tree.leaves(models[0])])[:-1]
    pieces = [part.reshape(leaf.shape) for part, leaf in zip(np.split(other, sizes), jax.tree.leaves(models[0]))]
    tree = jax.tree.unflatten(jax.tree.structure(models[0]), pieces)
    close(flat(plane_point(found, plane_coordinates(found, tree))), nearest)


def test_three_models_on_a_line_have_no_plane():
    rng = np.random.default_rng(0)
    one, two = random_tree(rng), random_tree(rng)
    for three in (one, two, line(one, two, 0.3), line(one, two, -2.0)):
        with pytest.raises(ValueError, match="not on one line"):
            plane(one, two, three)
    with pytest.raises(ValueError, match="first two are equal"):
        plane(one, one, two)
