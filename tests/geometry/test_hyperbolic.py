"""The Lorentz model: against exact decimals, finite for every finite float32 input, and the axioms of a distance."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.geometry import lorentz_distance, lorentz_inner, lorentz_penalty, lorentz_project
from tests.geometry import textbook
from tests.geometry.made_up import close, flat, random_tree

seeds = st.integers(0, 2**32 - 1)
sizes = st.sampled_from([1e-30, 1e-6, 1e-2, 1.0, 10.0, 1e3, 1e8])
# compiled once; without ``jit``, their branches would be compiled at every call
distance = jax.jit(jax.value_and_grad(lorentz_distance, (0, 1)))
penalty = jax.jit(jax.value_and_grad(lorentz_penalty, (0, 1)))
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)
extremes = st.sampled_from([0.0, -0.0, 1e-45, 1e-38, 1e-19, 1.0, 1e19, 1e30, 3.4e38, -3.4e38, -1e30, -1e-45])
vectors = st.lists(st.one_of(numbers, extremes), min_size=5, max_size=5)


@pytest.mark.slow_cases("7.0")
@pytest.mark.float64
@pytest.mark.parametrize("beta", [0.1, 1.0, 7.0])
def test_projection_and_product(beta):
    rng = np.random.default_rng(0)
    x, y = random_tree(rng), random_tree(rng)
    p, q = lorentz_project(x, beta=beta), lorentz_project(y, beta=beta)
    lifted = [textbook.lift(flat(each), beta) for each in (x, y)]
    close(lorentz_inner(p, p), -beta)
    close(lorentz_inner(p, q), textbook.lorentz_product(*lifted))
    close(lorentz_inner(p, q), -beta * np.cosh(lorentz_distance(x, y, beta=beta) / beta**0.5))
    close(p.time, lifted[0][0])
    assert jax.tree.structure(p.space) == jax.tree.structure(x)


@pytest.mark.float64
@settings(max_examples=100)
@given(seed=seeds, x_size=sizes, apart=st.sampled_from([1e-6, 1e-2, 1.0, 1e3]), beta=st.sampled_from([0.5, 1.0, 3.0]))
def test_distance_and_gradient_equal_the_exact_ones_in_float64(seed, x_size, apart, beta):
    rng = np.random.default_rng(seed)
    x = random_tree(rng)
    y = jax.tree.map(lambda a, b: x_size * (a + apart * b), x, random_tree(rng))
    x = jax.tree.map(lambda a: x_size * a, x)
    have, slopes = distance(x, y, beta=beta)
    want, slope = textbook.exact_lorentz(flat(x), flat(y), beta)
    close(have, want, rtol=1e-9)
    close(flat(slopes[0]), slope, atol=1e-7 * np.linalg.norm(slope))
    _, slope = textbook.exact_lorentz(flat(y), flat(x), beta)
    close(flat(slopes[1]), slope, atol=1e-7 * np.linalg.norm(slope))


@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 30.0, 1e4, 1e20, 1e37])
@pytest.mark.parametrize("apart", [1e-3, 1.0, "opposite"])
def test_float32_loses_nothing_but_rounding(size, apart):
    rng = np.random.default_rng(1)
    x = (rng.normal(size=20) * size).astype(np.float32)
    way = -2.5 * x if apart == "opposite" else apart * size * rng.normal(size=20)
    y = (x + way).astype(np.float32)
    have, (slope, _) = distance(x, y)
    want, exact = textbook.exact_lorentz(x, y)
    np.testing.assert_allclose(have, want, rtol=5e-7)
    tiny = 20 * np.finfo(np.float32).tiny  # smaller gradients are flushed to zero
    np.testing.assert_allclose(slope, exact, atol=2e-5 * np.linalg.norm(exact) + tiny)


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e3, 1e10, 1e30, 1e36])
@pytest.mark.parametrize("apart", [2.0, 1.5, 1 + 2**-10, -2.0, "next", "across"])
def test_float32_is_accurate_far_out_on_one_ray_and_for_neighbours(size, apart):
    """At 1e8 an error of 1e-7 in the angle is a distance of 2, so the angle must be exact."""
    x = (np.random.default_rng(2).integers(-99, 99, 20) * size).astype(np.float32)
    if apart == "next":
        y = np.nextafter(x, np.float32(np.inf))
    elif apart == "across":
        y = 2 * x
        y[3] = np.nextafter(y[3], np.float32(np.inf))
    else:
        x = np.ldexp(np.round(np.ldexp(x, -(e := np.frexp(np.abs(x).max())[1] - 8))), e)  # so that apart * x is exact
        y = np.float32(apart) * x
    have, slopes = distance(x, y)
    want, exact = textbook.exact_lorentz(x, y)
    np.testing.assert_allclose(have, want, rtol=5e-7)
    for slope, wanted in zip(slopes, (exact, textbook.exact_lorentz(y, x)[1])):
        np.testing.assert_allclose(slope, wanted, atol=1e-6 * np.linalg.norm(wanted) + np.finfo(np.float32).tiny)


def test_distances_of_stacked_points_and_compiled_ones_are_equal():
    x = jnp.stack([jnp.full(20, 1e10), jnp.arange(20.0)])
    y = 1.5 * x
    each = [float(lorentz_distance(a, b)) for a, b in zip(x, y)]
    np.testing.assert_allclose(each, [textbook.exact_lorentz(a, b)[0] for a, b in zip(x, y)], rtol=5e-7)
    np.testing.assert_allclose(jax.jit(jax.vmap(lorentz_distance))(x, y), each, rtol=2e-7)


@settings(max_examples=400)
@given(x=vectors, y=st.one_of(vectors, st.none()))
def test_everything_is_finite_for_every_finite_float32(x, y):
    x = np.array(x, np.float32)
    y = x if y is None else np.array(y, np.float32)
    value, slopes = distance(x, y)
    assert np.isfinite(value) and 0 <= value < 200
    assert all(np.isfinite(s).all() and np.linalg.norm(np.asarray(s, np.float64)) < 1 + 1e-5 for s in slopes)
    value, slopes = penalty(x, y)
    assert 1 <= value <= np.exp(30.0) * (1 + 1e-5)
    assert all(np.isfinite(s).all() for s in slopes)


@pytest.mark.parametrize("x_size", [0.0, 1e-30, 1.0, 1e19, 1e30, 3.4e38])
@pytest.mark.parametrize("y_size", [0.0, 1e-30, 1.0, 1e19, 1e30, 3.4e38])
def test_extreme_sizes_in_opposite_and_orthogonal_directions(x_size, y_size):
    x = np.array([x_size, 0.0], np.float32)
    for y in (np.array([-y_size, 0.0], np.float32), np.array([0.0, y_size], np.float32)):
        value, (slope, _) = distance(x, y)
        want, exact = textbook.exact_lorentz(x, y)
        np.testing.assert_allclose(value, want, rtol=1e-6)
        np.testing.assert_allclose(slope, exact, atol=1e-6)


@pytest.mark.slow_cases("1e+30")
@pytest.mark.parametrize("size", [1e30, 3.4e38])
def test_a_million_huge_parameters(size):
    x = np.full(1_000_000, size, np.float32)
    for y in (x, -x, np.zeros_like(x)):
        for function in (distance, penalty):
            value, slopes = function(x, y)
            assert np.isfinite(value) and all(np.isfinite(s).all() for s in slopes)


@pytest.mark.float64
@settings(max_examples=50)
@given(seed=seeds, size=st.sampled_from([1e-3, 1.0, 30.0]), beta=st.sampled_from([0.5, 2.0]))
def test_axioms_of_a_distance(seed, size, beta):
    rng = np.random.default_rng(seed)
    x, y, z = (size * jnp.asarray(rng.normal(size=4)) for _ in range(3))
    pairs = [(x, y), (y, x), (x, z), (z, y)]
    xy, yx, xz, zy = (float(distance(a, b, beta=beta)[0]) for a, b in pairs)
    assert xy > 0 and float(distance(x, x, beta=beta)[0]) == 0.0
    close(xy, yx, rtol=1e-12)
    assert xy <= (xz + zy) * (1 + 1e-12)
    origin = jnp.zeros(4)
    close(distance(origin, x, beta=beta)[0], beta**0.5 * np.arcsinh(np.linalg.norm(x) / beta**0.5))


def test_equal_points_have_gradient_zero():
    x = random_tree(np.random.default_rng(0))
    value, slopes = distance(x, x)
    assert float(value) == 0.0 and all(not leaf.any() for leaf in jax.tree.leaves(slopes))
    value, slopes = penalty(x, x)
    assert float(value) == 1.0 and all(not leaf.any() for leaf in jax.tree.leaves(slopes))


@pytest.mark.float64
@pytest.mark.parametrize("sigma", [0.5, 4.0])
@pytest.mark.parametrize("beta", [1.0, 3.0])
def test_the_penalty_is_that_of_eq_24_up_to_its_limit(sigma, beta):
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.normal(size=6))
    for apart in (1e-5, 0.1, 1.0):
        y = x + apart * jnp.asarray(rng.normal(size=6))
        square = textbook.exact_square(x, y, beta)
        value, (slope, _) = penalty(x, y, sigma=sigma, beta=beta)
        close(value, np.exp(square / sigma))
        x_time, y_time = (np.sqrt(beta + float(a @ a)) for a in (x, y))
        by_hand = np.exp(square / sigma) / sigma * 2 * ((y_time / x_time) * x - y)
        close(slope, by_hand, rtol=1e-7, atol=1e-12)
    far = x + 1e4 * y
    for limit in (10.0, 30.0, 80.0):
        value, (slope, _) = penalty(x, far, sigma=sigma, beta=beta, limit=limit)
        close(value, np.exp(limit))
        assert not np.asarray(slope).any()


@pytest.mark.float64
def test_near_zero_space_is_euclidean():
    rng = np.random.default_rng(2)
    x, y = (1e-4 * jnp.asarray(rng.normal(size=5)) for _ in range(2))
    close(lorentz_distance(x, y), np.linalg.norm(x - y), rtol=1e-6)


def test_beta_may_be_traced_and_is_not_differentiated():
    x, y = jnp.ones(3), jnp.arange(3.0)
    of_beta = jax.jit(lambda beta: lorentz_distance(x, y, beta=beta))
    curve = jax.vmap(of_beta)(jnp.array([0.5, 1.0, 2.0]))
    close(curve, [of_beta(b) for b in (0.5, 1.0, 2.0)], rtol=1e-6)
    assert float(jax.grad(of_beta)(1.0)) == 0.0


def test_input_is_checked():
    x = jnp.ones(2)
    with pytest.raises(ValueError, match="beta = 0: must be a finite number > 0"):
        lorentz_distance(x, x, beta=0)
    with pytest.raises(ValueError, match=r"y\.shape = \(3,\): must be that of x, \(2,\)"):
        lorentz_distance(x, jnp.ones(3))
    with pytest.raises(ValueError, match=r"x = ShapeDtypeStruct\(.*int32\): must be an array of floats"):
        lorentz_penalty(jnp.arange(2), x)
    with pytest.raises(ValueError, match=r"sigma = -1: must be a finite number > 0"):
        lorentz_penalty(x, x, sigma=-1)
    with pytest.raises(ValueError, match=r"limit = 90: must be between 0\.0 and 80\.0"):
        lorentz_penalty(x, x, limit=90)
    with pytest.raises(ValueError, match="beta = -1: must be a finite number > 0"):
        lorentz_project(x, beta=-1)
