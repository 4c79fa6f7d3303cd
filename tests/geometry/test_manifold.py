"""Manifolds: exponential and logarithm are inverse, geodesics are shortest, Riemannian SGD goes downhill along them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.geometry import MANIFOLDS, Manifold, euclidean, geodesic, lorentz, riemannian_sgd
from tests.geometry import textbook
from tests.geometry.made_up import close, flat, random_tree

seeds = st.integers(0, 2**32 - 1)
# compiled once; without ``jit``, their branches would be compiled at every call
ALL = {name: Manifold(*map(jax.jit, make())) for name, make in MANIFOLDS.items()}
ALL["lorentz of curvature -1/3"] = Manifold(*map(jax.jit, lorentz(beta=3.0)))


def trees(seed, count, size=1.0):
    rng = np.random.default_rng(seed)
    return [jax.tree.map(lambda leaf: size * leaf, random_tree(rng)) for _ in range(count)]


def scaled(tree, factor):
    return jax.tree.map(lambda leaf: leaf * factor, tree)


@pytest.mark.slow_cases("lorentz")
@pytest.mark.float64
@pytest.mark.parametrize("name", ALL)
@settings(max_examples=20)
@given(seed=seeds, size=st.sampled_from([1e-6, 0.3, 1.0]))
def test_exp_and_log_are_inverse_and_log_is_as_long_as_the_way(name, seed, size):
    manifold = ALL[name]
    x, y, v = trees(seed, 3, size)
    close(manifold.exp(x, manifold.log(x, y)), y, rtol=1e-7, atol=1e-8 * size)
    close(manifold.log(x, manifold.exp(x, v)), v, rtol=1e-6, atol=1e-7 * size)
    way = manifold.log(x, y)
    length = manifold.inner(x, way, way) ** 0.5
    close(length, manifold.distance(x, y), rtol=1e-7)
    step = manifold.exp(x, v)
    close(manifold.distance(x, step), manifold.inner(x, v, v) ** 0.5, rtol=1e-6)
    nothing = scaled(v, 0.0)
    close(manifold.exp(x, nothing), x)
    close(manifold.log(x, x), nothing)


@pytest.mark.float64
@pytest.mark.parametrize("beta", [1.0, 3.0])
def test_the_lorentz_maps_are_those_of_the_ambient_space(beta):
    manifold = lorentz(beta=beta)
    x, v, u = trees(3, 3)
    close(flat(manifold.exp(x, v)), textbook.lorentz_exp(flat(x), flat(v), beta), rtol=1e-8)
    lifted = [np.concatenate([[flat(x) @ flat(t) / np.sqrt(beta + flat(x) @ flat(x))], flat(t)]) for t in (u, v)]
    close(manifold.inner(x, u, v), textbook.lorentz_product(*lifted))
    # the gradient g represents the differential in the metric
    close(manifold.inner(x, manifold.gradient(x, u), v), flat(u) @ flat(v))


@pytest.mark.float64
@pytest.mark.parametrize("name", ALL)
def test_geodesics_run_at_constant_speed_and_are_shortest(name):
    manifold = ALL[name]
    x, y = trees(4, 2, 0.5)
    whole = manifold.distance(x, y)
    for s in (0.0, 0.25, 0.7, 1.0):
        here = geodesic(manifold, x, y, s)
        close(manifold.distance(x, here), s * whole, rtol=1e-7, atol=1e-7)
        close(manifold.distance(here, y), (1 - s) * whole, rtol=1e-7, atol=1e-7)
    # the gradient of the distance to y at x has length 1 and points away from y
    slope = manifold.gradient(x, jax.grad(manifold.distance)(x, y))
    close(manifold.inner(x, slope, slope), 1.0, rtol=1e-9)
    close(scaled(slope, -whole), manifold.log(x, y), rtol=1e-7, atol=1e-9)


def test_the_euclidean_maps_are_sums_and_its_descent_is_sgd():
    x, y, v = trees(5, 3)
    manifold = euclidean()
    close(manifold.exp(x, v), jax.tree.map(jnp.add, x, v))
    close(manifold.log(x, y), jax.tree.map(jnp.subtract, y, x))
    ours, theirs = riemannian_sgd(0.1, manifold), optax.sgd(0.1)
    close(ours.update(v, ours.init(x), x)[0], theirs.update(v, theirs.init(x), x)[0], rtol=1e-4, atol=1e-6)


@pytest.mark.slow_cases("False")
@pytest.mark.parametrize("x64", [False, True])
def test_hyperbolic_descent_moves_along_the_geodesic_by_the_rate_times_the_slope(x64):
    with jax.enable_x64(x64):
        manifold = lorentz()
        x, y = trees(6, 2, 0.5)
        descent = riemannian_sgd(0.1, manifold)

        @jax.jit
        def step(x):
            partials = jax.grad(lambda x: 0.5 * manifold.distance(x, y) ** 2)(x)
            updates, _ = descent.update(partials, descent.init(x), x)
            return optax.apply_updates(x, updates)

        before = manifold.distance(x, y)
        close(
            manifold.distance(step(x), y), 0.9 * before, rtol=1e-9 if x64 else 1e-5
        )  # d <- d - 0.1 d, at any distance
        for _ in range(200):
            x = step(x)
        close(x, y, atol=1e-6, rtol=1e-5)


def test_a_step_needs_a_rate_and_a_place():
    with pytest.raises(ValueError, match="lr = 0: must be a finite number > 0"):
        riemannian_sgd(0, euclidean())
    descent = riemannian_sgd(0.1, euclidean())
    with pytest.raises(ValueError, match="params = None: must be given"):
        descent.update(jnp.ones(2), descent.init(jnp.ones(2)))
    with pytest.raises(ValueError, match="beta = -1: must be a finite number > 0"):
        lorentz(beta=-1)
