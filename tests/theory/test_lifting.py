"""Corollary 8, Lemma 9 and what lifts to FedAvg's surrogate loss (section 7), by functions in closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.theory import (
    EXAMPLES,
    curl,
    displacement,
    drifting_loss,
    glm_iterate,
    gradient_map,
    iterate,
    surrogate_pl_constant,
)
from tests.refusals import refusals

pytestmark = pytest.mark.float64

LINE = np.linspace(-8, 8, 4001)


def slopes_of(slope, gamma, k, x=LINE):
    """``x - T^k(x)`` of gradient descent on a line, in NumPy."""
    moved = x
    for _ in range(k):
        moved = moved - gamma * slope(moved)
    return x - moved


def integral(slopes, x=LINE):
    """Trapezoids from the first point on."""
    return np.concatenate([[0], np.cumsum((slopes[1:] + slopes[:-1]) / 2 * np.diff(x))])


def minima(slopes):
    """Where the slope rises through 0 on the line."""
    return np.flatnonzero((slopes[1:] > 0) & (slopes[:-1] <= 0))


CONVEX = {
    # sigma of a model with orthogonal features, smallest and largest second derivative
    "strongly_convex": (lambda t: jax.nn.softplus(t) + 0.2 * t**2, 0.4, 0.65),
    "strictly_convex": (jax.nn.softplus, 0.0, 0.25),
    "convex": (lambda t: jax.nn.relu(t) ** 3 / (1 + jnp.abs(t)) ** 2 / 6, 0.0, np.inf),
}


@pytest.mark.parametrize("name", CONVEX)
def test_corollary_8_iterated_gradients_of_convex_losses_are_gradients_of_convex_losses(name):
    """Of ``(grad f)^k``: the Jacobian is symmetric, its eigenvalues are above low^k, at all points."""
    sigma, low, high = CONVEX[name]
    basis = jnp.asarray(np.linalg.qr(np.random.default_rng(1).standard_normal((3, 3)))[0])
    points = jnp.asarray(np.random.default_rng(2).uniform(-4, 4, (200, 3)))
    for k in (1, 2, 4):
        jacobians = np.asarray(jax.jit(jax.vmap(jax.jacfwd(glm_iterate(sigma, basis, k).field)))(points))
        np.testing.assert_allclose(jacobians, jacobians.transpose(0, 2, 1), atol=1e-12)
        values = np.linalg.eigvalsh(jacobians)
        assert values.min() >= low**k - 1e-12 and values.max() <= high**k + 1e-12
        assert values.min() > 0 or name == "convex"


def test_corollary_8_needs_conservatism_of_all_orders_and_one_field():
    """``e^x + e^(x + y)`` is convex, but its gradient taken twice is no gradient; so are those of two quadratics."""
    example, x = EXAMPLES["exponential_sum"], jnp.array([0.3, 0.5])
    assert curl(example.field, x) < 1e-12 and curl(iterate(example.field, 2), x) > 1e-3
    first, second = np.array([[2.0, 1.0], [1.0, 1.0]]), np.diag([1.0, 3.0])
    assert not np.allclose(first @ second, (first @ second).T)


def test_lemma_9_at_two_over_beta_all_points_are_critical():
    np.testing.assert_allclose(displacement(gradient_map(lambda x: jnp.sum(x**2) / 2, 2.0), 2)(jnp.asarray(LINE)), 0)


# --- Section 7 ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("gamma", "k"), [(0.1, 1), (0.1, 2), (0.1, 5), (0.2, 2)])
def test_the_surrogate_of_a_bounded_loss_falls_without_end(gamma, k):
    """The mean of its slope over a period is that of gamma^3, and 0 for one step."""
    x = np.linspace(0, 2 * np.pi, 4096, endpoint=False)
    field = displacement(gradient_map(drifting_loss, gamma), k)
    found = np.asarray(jax.vmap(field)(jnp.asarray(x)[:, None]))[:, 0]
    np.testing.assert_allclose(found, slopes_of(lambda x: np.cos(2 * x) - np.sin(x), gamma, k, x), atol=1e-14)
    if k == 1:
        assert abs(found.mean()) < 1e-15
    elif k == 2:
        np.testing.assert_allclose(found.mean(), 0.75 * gamma**3, rtol=1.5 * gamma)
    else:
        assert found.mean() > 0.75 * gamma**3


def wavy(x):
    """Slope of ``x^2 + 3 sin^2 x``: not convex, but the Polyak-Lojasiewicz condition holds with mu = 1/32; beta = 8."""
    return 2 * x + 3 * np.sin(2 * x)


@pytest.mark.parametrize(("gamma", "k"), [(0.125, 1), (0.125, 3), (0.05, 10)])
def test_the_polyak_lojasiewicz_condition_lifts_to_each_client(gamma, k):
    assert (2 + 6 * np.cos(2 * LINE)).min() < -3
    slopes = slopes_of(wavy, gamma, k)
    heights = integral(slopes)
    gaps = heights - heights.min()
    assert abs(LINE[heights.argmin()]) < 1e-12
    measured = (slopes**2 / 2)[gaps > 1e-6] / gaps[gaps > 1e-6]
    assert measured.min() >= surrogate_pl_constant(1 / 32, 8.0, gamma, k) > 0


def test_the_polyak_lojasiewicz_constant_on_quadratics():
    """For ``mu x^2 / 2`` the true constant is ``1 - (1 - gamma mu)^k``; ours is below it."""
    for mu, k in ((1.0, 1), (0.1, 1), (0.1, 20)):
        assert 0 < surrogate_pl_constant(mu, 1.0, 1.0, k) <= 1 - (1 - mu) ** k
    np.testing.assert_allclose(surrogate_pl_constant(1.0, 1.0, 1.0, 3), (np.sqrt(2) - 1) ** 2)


@pytest.mark.parametrize("k", [1, 3])
def test_the_polyak_lojasiewicz_condition_does_not_lift_to_the_mean_of_clients(k):
    """With a parabola as the second client there are two minima of different heights; each client alone has one."""
    own, other = slopes_of(wavy, 0.125, k), slopes_of(lambda x: x - 4.4, 0.125, k)
    assert len(minima(own)) == len(minima(other)) == 1
    places = minima((own + other) / 2)
    heights = integral((own + other) / 2)[places]
    assert len(places) == 2 and abs(heights[1] - heights[0]) > 0.02


test_bad_input = refusals(
    (lambda: surrogate_pl_constant(0, 1, 1, 1), "^mu = "),
    (lambda: surrogate_pl_constant(2, 1, 1, 1), "^mu = "),
    (lambda: surrogate_pl_constant(1, 1, 1.1, 1), "^gamma = "),
    (lambda: surrogate_pl_constant(1, 1, 1, 0), "^k = "),
    (lambda: surrogate_pl_constant(1, 0, 1, 1), "^beta = "),
)
