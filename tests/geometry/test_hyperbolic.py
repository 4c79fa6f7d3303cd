"""The Lorentz model against exact decimals and finite for every finite float32 input; exponential maps and descent."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async import geometry
from fedjax_async.geometry import MANIFOLDS, Manifold, euclidean, lorentz, lorentz_distance, lorentz_penalty
from tests.geometry import textbook
from tests.geometry.made_up import close, flat, scaled, trees
from tests.refusals import refusals

seeds = st.integers(0, 2**32 - 1)
sizes = st.sampled_from([1e-30, 1e-6, 1e-2, 1.0, 10.0, 1e3, 1e8])
# compiled once; without ``jit``, their branches would be compiled at every call
distance = jax.jit(jax.value_and_grad(lorentz_distance, (0, 1)))
penalty = jax.jit(jax.value_and_grad(lorentz_penalty, (0, 1)))
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)
extremes = st.sampled_from([0.0, -0.0, 1e-45, 1e-38, 1e-19, 1.0, 1e19, 1e30, 3.4e38, -3.4e38, -1e30, -1e-45])
vectors = st.lists(st.one_of(numbers, extremes), min_size=5, max_size=5)


def longer(x):
    """With zeros up to 20 numbers, the length that most tests share."""
    return np.pad(np.array(x, np.float32), (0, 20 - len(x)))


@pytest.mark.float64
@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_projection_and_product(beta):
    x, y = trees(0, 2)
    p, q = geometry.lorentz_project(x, beta=beta), geometry.lorentz_project(y, beta=beta)
    lifted = [textbook.lift(flat(each), beta) for each in (x, y)]
    close(geometry.lorentz_inner(p, p), -beta)
    close(geometry.lorentz_inner(p, q), textbook.lorentz_product(*lifted))
    close(geometry.lorentz_inner(p, q), -beta * np.cosh(lorentz_distance(x, y, beta=beta) / beta**0.5))
    close(p.time, lifted[0][0])
    assert jax.tree.structure(p.space) == jax.tree.structure(x)


@pytest.mark.float64
@settings(max_examples=100)
@given(seed=seeds, x_size=sizes, apart=st.sampled_from([1e-6, 1e-2, 1.0, 1e3]), beta=st.sampled_from([0.5, 1.0, 3.0]))
def test_distance_and_gradient_equal_the_exact_ones_in_float64(seed, x_size, apart, beta):
    x, way = trees(seed, 2, x_size)
    y = jax.tree.map(lambda a, b: a + apart * b, x, way)
    have, slopes = distance(x, y, beta=beta)
    want, slope = textbook.exact_lorentz(flat(x), flat(y), beta)
    close(have, want, rtol=1e-9)
    close(flat(slopes[0]), slope, atol=1e-7 * np.linalg.norm(slope))
    _, slope = textbook.exact_lorentz(flat(y), flat(x), beta)
    close(flat(slopes[1]), slope, atol=1e-7 * np.linalg.norm(slope))


def exact_to(tolerance, x, y, tiny=1):
    """Compare with the exact distance and gradients; ``tolerance`` is that of the gradients, as a share of each.

    Gradients below ``tiny`` times the smallest normal number may be flushed to zero.
    """
    have, slopes = distance(x, y)
    for slope, (one, other) in zip(slopes, ((x, y), (y, x))):
        want, exact = textbook.exact_lorentz(one, other)
        np.testing.assert_allclose(have, want, rtol=5e-7)
        least = tiny * np.finfo(np.float32).tiny
        np.testing.assert_allclose(slope, exact, atol=tolerance * np.linalg.norm(exact) + least)


@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 30.0, 1e4, 1e20, 1e37])
def test_float32_loses_nothing_but_rounding(size):
    rng = np.random.default_rng(1)
    x, way = (rng.normal(size=(2, 20)) * size).astype(np.float32)
    for y in (x + np.float32(1e-3) * way, x + way, np.float32(-1.5) * x):
        exact_to(2e-5, x, y, tiny=20)


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e3, 1e10, 1e30, 1e36])
def test_float32_is_accurate_far_out_on_one_ray_and_for_neighbours(size):
    """At 1e8 an error of 1e-7 in the angle is a distance of 2, so the angle must be exact."""
    x = (np.random.default_rng(2).integers(-99, 99, 20) * size).astype(np.float32)
    across = 2 * x
    across[3] = np.nextafter(across[3], np.float32(np.inf))
    for y in (np.nextafter(x, np.float32(np.inf)), across):
        exact_to(1e-6, x, y)
    few = np.ldexp(np.round(np.ldexp(x, -(e := np.frexp(np.abs(x).max())[1] - 8))), e)  # so that the products are exact
    for apart in np.float32([2.0, 1.5, 1 + 2**-10, -2.0]):
        exact_to(1e-6, few, apart * few)


def test_distances_of_stacked_points_are_the_exact_ones():
    x = jnp.stack([jnp.full(20, 1e10), jnp.arange(20.0)])
    y = 1.5 * x
    want = [textbook.exact_lorentz(a, b)[0] for a, b in zip(x, y)]
    np.testing.assert_allclose(jax.jit(jax.vmap(lorentz_distance))(x, y), want, rtol=5e-7)


@settings(max_examples=400)
@given(x=vectors, y=st.one_of(vectors, st.none()))
def test_everything_is_finite_for_every_finite_float32_and_equal_points_have_gradient_zero(x, y):
    x, equal = longer(x), y is None
    y = x if equal else longer(y)
    value, slopes = distance(x, y)
    assert value == 0 if equal else np.isfinite(value) and 0 <= value < 200
    assert all(np.isfinite(s).all() and np.linalg.norm(np.asarray(s, np.float64)) < 1 + 1e-5 for s in slopes)
    cost, pulls = penalty(x, y)
    assert 1 <= cost <= np.exp(30.0) * (1 + 1e-5)
    assert cost == 1 or not equal or np.linalg.norm(np.float64(x)) > 1e19  # whose square overflows
    assert all(np.isfinite(s).all() for s in pulls)
    assert not equal or not np.any([slopes, pulls])


EXTREMES = [0.0, 1e-30, 1.0, 1e19, 1e30, 3.4e38]


@pytest.mark.parametrize(("x_size", "y_size"), list(itertools.product(EXTREMES, EXTREMES)))
def test_extreme_sizes_in_opposite_and_orthogonal_directions(x_size, y_size):
    x = longer([x_size, 0.0])
    for y in (longer([-y_size, 0.0]), longer([0.0, y_size])):
        value, (slope, _) = distance(x, y)
        want, exact = textbook.exact_lorentz(x, y)
        np.testing.assert_allclose(value, want, rtol=1e-6)
        np.testing.assert_allclose(slope, exact, atol=1e-6)


def test_a_million_huge_parameters():
    x = np.full(1_000_000, 3.4e38, np.float32)
    for y in (x, -x, np.zeros_like(x)):
        for function in (distance, penalty):
            value, slopes = function(x, y)
            assert np.isfinite(value) and all(np.isfinite(s).all() for s in slopes)


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


def test_beta_may_be_traced_and_is_not_differentiated():
    x, y = jnp.ones(3), jnp.arange(3.0)
    of_beta = jax.jit(lambda beta: lorentz_distance(x, y, beta=beta))
    curve = jax.vmap(of_beta)(jnp.array([0.5, 1.0, 2.0]))
    close(curve, [of_beta(b) for b in (0.5, 1.0, 2.0)], rtol=1e-6)
    assert float(jax.grad(of_beta)(1.0)) == 0.0


# compiled once; without ``jit``, their branches would be compiled at every call
ALL = {name: Manifold(*map(jax.jit, make())) for name, make in MANIFOLDS.items()}
ALL["lorentz of curvature -1/3"] = Manifold(*map(jax.jit, lorentz(beta=3.0)))


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
        here = geometry.geodesic(manifold, x, y, s)
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
    ours, theirs = geometry.riemannian_sgd(0.1, manifold), optax.sgd(0.1)
    close(ours.update(v, ours.init(x), x)[0], theirs.update(v, theirs.init(x), x)[0], rtol=1e-4, atol=1e-6)


@pytest.mark.float64
def test_hyperbolic_descent_moves_along_the_geodesic_by_the_rate_times_the_slope():
    manifold = lorentz()
    x, y = trees(6, 2, 0.5)
    descent = geometry.riemannian_sgd(0.1, manifold)

    @jax.jit
    def step(x):
        partials = jax.grad(lambda x: 0.5 * manifold.distance(x, y) ** 2)(x)
        updates, _ = descent.update(partials, descent.init(x), x)
        return optax.apply_updates(x, updates)

    before = manifold.distance(x, y)
    close(manifold.distance(step(x), y), 0.9 * before, rtol=1e-9)  # d <- d - 0.1 d, at any distance
    for _ in range(200):
        x = step(x)
    close(x, y, atol=1e-6, rtol=1e-5)


X = np.ones(2, np.float32)
test_input_is_checked = refusals(
    (lambda: lorentz_distance(X, X, beta=0), "beta = 0: must be a finite number > 0"),
    (lambda: lorentz_distance(X, jnp.ones(3)), r"y\.shape = \(3,\): must be that of x, \(2,\)"),
    (lambda: lorentz_penalty(jnp.arange(2), X), r"x = ShapeDtypeStruct\(.*int32\): must be an array of floats"),
    (lambda: lorentz_penalty(X, X, sigma=-1), r"sigma = -1: must be a finite number > 0"),
    (lambda: lorentz_penalty(X, X, limit=90), r"limit = 90: must be between 0\.0 and 80\.0"),
    (lambda: geometry.lorentz_project(X, beta=-1), "beta = -1: must be a finite number > 0"),
    (lambda: geometry.riemannian_sgd(0, euclidean()), "lr = 0: must be a finite number > 0"),
    (lambda: geometry.riemannian_sgd(0.1, euclidean()).update(jnp.ones(2), ()), "params = None: must be given"),
    (lambda: lorentz(beta=-1), "beta = -1: must be a finite number > 0"),
)
