"""Proposition 5, Lemmas 9 and 10, Theorems 12 to 14 against runs, and each erratum by an example."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async.theory.closed_forms import (
    glm_displacement,
    glm_loss,
    quadratic_displacement,
    quadratic_fixed_point,
)
from fedjax_async.theory.fedavg_dynamics import server_field, server_iterates
from fedjax_async.theory.field_rates import (
    fedavg_client_lr,
    fedavg_distance_bound,
    fedavg_gap_bound,
    fedavg_hardest_threshold,
    fedavg_quadratic_gap_bound,
    fedavg_sharp_gap_bound,
    fedavgm_distance_bound,
    fedavgm_parameters,
    iterate_spectrum,
    surrogate_constants,
)
from fedjax_async.theory.vector_fields import displacement, gradient_map
from tests.refusals import refusals

ALPHA, BETA, ROUNDS = 0.2, 3.0, 12
TIMES = np.arange(ROUNDS + 1)

pytestmark = pytest.mark.float64


def quadratics(seed, clients=4, dim=5):
    """Curvatures with eigenvalues in [ALPHA, BETA], the ends included, and optima."""
    rng = np.random.default_rng(seed)
    bases = np.linalg.qr(rng.standard_normal((clients, dim, dim)))[0]
    eigenvalues = rng.uniform(ALPHA, BETA, (clients, dim))
    eigenvalues[:, 0], eigenvalues[:, 1] = ALPHA, BETA
    curvature = np.einsum("cij,cj,ckj->cik", bases, eigenvalues, bases)
    return jnp.asarray((curvature + curvature.transpose(0, 2, 1)) / 2), jnp.asarray(rng.standard_normal((clients, dim)))


def losses_of(curvature, optima):
    return [lambda x, a=a, b=b: (x - b) @ a @ (x - b) / 2 for a, b in zip(curvature, optima)]


@partial(jax.jit, static_argnames="k")
def path_on_quadratics(curvature, optima, start, lr, momentum, k):
    """The iterates of FedAvg with server momentum on the quadratics themselves; a program for each k."""
    field = server_field(losses_of(curvature, optima), fedavg_client_lr(ALPHA, BETA), k)
    return server_iterates(field, start, optax.sgd(lr, momentum), ROUNDS)


def path(field, start, optimizer=None, rounds=ROUNDS):
    """The server's iterates, compiled."""
    return jax.jit(lambda x: server_iterates(field, x, optimizer or optax.sgd(1.0), rounds))(start)


def distances(points, fixed):
    return np.linalg.norm(np.asarray(points) - np.asarray(fixed), axis=1)


def hessian_range(potential, points):
    """The smallest and largest eigenvalue of a potential's Hessian over points."""
    values = jnp.linalg.eigvalsh(jax.jit(jax.vmap(jax.hessian(potential)))(points))
    return float(values.min()), float(values.max())


# --- Proposition 5, Lemmas 9 and 10 -------------------------------------------------------------


def test_proposition_5_is_met_by_quadratics_with_the_exponent_j():
    """Erratum: for f = x^2 / 4, j = 1, k = 3 the slope of grad f is above the printed beta^k."""
    for j in (1, 2, 3):
        assert iterate_spectrum(0.5, 2.0, j) == (0.5**j, 2.0**j)
        assert iterate_spectrum(-3.0, 2.0, j) == (-(3.0**j), 3.0**j)
    slope = float(jax.jit(jax.hessian(lambda x: x**2 / 4))(1.0))
    assert slope == iterate_spectrum(0.5, 0.5, 1).high > iterate_spectrum(0.5, 0.5, 3).high


def test_lemma_9_critical_points_stay():
    """Maxima, saddles and minima of a cosine are critical points of h_k, and for small gamma there are no others."""
    form = glm_displacement(lambda t: jnp.cos(2 * t), jnp.eye(2), 0.1, k=5)
    for x in (jnp.zeros(2), jnp.array([np.pi / 2, 0.0]), jnp.array([np.pi / 2, np.pi])):
        np.testing.assert_allclose(form.field(x), 0, atol=1e-14)
    assert np.abs(form.field(jnp.array([0.4, 1.0]))).min() > 0.01


LEMMA_10 = {
    # sigma, alpha, beta; sigma'' takes values near both ends
    "strongly_convex": (lambda t: jax.nn.softplus(t) * 4 + 0.1 * t**2, 0.2, 1.2),
    "convex": (lambda t: 4 * jax.nn.softplus(t), 0.0, 1.0),
    "weakly_convex": (lambda t: 0.5 * jnp.cos(t) + 0.25 * t**2, 0.0, 1.0),
    "not_convex": (lambda t: -jnp.sin(t) + 0.1 * t**2, -0.8, 1.2),
}


@pytest.mark.parametrize("name", LEMMA_10)
def test_lemma_10(name):
    """The Hessian of h_k stays within the bounds, at learning rates up to the largest."""
    k, (sigma, alpha, beta) = 6, LEMMA_10[name]
    points = jnp.asarray(np.random.default_rng(k).uniform(-6, 6, (400, 2)))
    largest = 2 / (beta + max(alpha, 0))

    @jax.jit
    def jacobians(gamma):
        return jax.vmap(jax.jacfwd(displacement(gradient_map(glm_loss(sigma, jnp.eye(2)), gamma), k)))(points)

    for gamma in (0.2 / beta, 1 / beta, largest):
        bound = surrogate_constants(alpha, beta, gamma, k)
        values = np.linalg.eigvalsh(jacobians(gamma))
        assert bound.low - 1e-12 <= values.min() <= values.max() <= bound.high + 1e-12


def test_lemma_10_is_met_by_quadratics_and_needs_its_learning_rate():
    """Item 1 at gamma = 2 / (alpha + beta) with odd k; above 2 / beta a convex f has an h_k that is not convex."""
    diagonal, gamma = jnp.diag(jnp.array([ALPHA, BETA])), fedavg_client_lr(ALPHA, BETA)
    for k in (1, 3):
        found = hessian_range(quadratic_displacement(diagonal, jnp.zeros(2), gamma, k).potential, jnp.zeros((1, 2)))
        np.testing.assert_allclose(found, surrogate_constants(ALPHA, BETA, gamma, k))
    form = quadratic_displacement(jnp.eye(1), jnp.zeros(1), 2.1, 2)
    assert hessian_range(form.potential, jnp.zeros((1, 1)))[0] < 0
    with pytest.raises(ValueError, match=r"gamma = 2\.1"):
        surrogate_constants(0.0, 1.0, 2.1, 2)


# --- Theorem 12 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [False, True], ids=["theorem_12", "theorem_14_corrected"])
@pytest.mark.parametrize(("seed", "k"), [(0, 1), (1, 2), (2, 5)])
def test_random_quadratics_are_within_the_bound(seed, k, momentum):
    """For FedAvg and FedAvgM on the losses themselves."""
    curvature, optima = quadratics(seed)
    fixed = quadratic_fixed_point(curvature, optima, fedavg_client_lr(ALPHA, BETA), k)
    ball = fedavgm_parameters(ALPHA, BETA, k)
    steps, bound = (1.0, 0.0), fedavg_distance_bound
    if momentum:
        steps, bound = (ball.lr, ball.momentum), fedavgm_distance_bound
    found = distances(path_on_quadratics(curvature, optima, jnp.zeros(5), *steps, k=k), fixed)
    most = bound(ALPHA, BETA, k, TIMES, found[0])
    assert np.all(found <= most * (1 + 1e-9) + 1e-13) and found[1] > 0.01 * most[1]


@pytest.mark.parametrize(("k", "end"), [(1, 0), (2, 1), (5, 0)])
def test_theorem_12_is_met_with_equality(k, end):
    """Equal curvatures, start on the eigenvector of alpha (end 0) or beta (end 1)."""
    curvature, optima = quadratics(7)
    curvature = jnp.broadcast_to(curvature[:1], curvature.shape)
    fixed = quadratic_fixed_point(curvature, optima, fedavg_client_lr(ALPHA, BETA), k)
    vector = jnp.linalg.eigh(curvature[0])[1][:, -end]
    found = distances(path_on_quadratics(curvature, optima, fixed + vector, 1.0, 0.0, k=k), fixed)
    np.testing.assert_allclose(found, fedavg_distance_bound(ALPHA, BETA, k, TIMES, 1.0), rtol=1e-6, atol=1e-13)


# --- Theorem 13 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3])
def test_theorem_13_with_the_best_constant_is_attained_for_every_k(k):
    """Equal Huber clients; the surrogate is the Huber loss of k times the threshold."""
    for t in (1, 2, 7):
        threshold = fedavg_hardest_threshold(k, t, 2.0)
        loss = partial(lambda x, delta: jnp.sum(optax.losses.huber_loss(x, delta=delta)), delta=threshold)
        field = server_field([loss, loss], 1.0, k)
        points = jnp.linspace(-2, 2, 401)[:, None]
        moved = jax.jit(jax.vmap(field))(points)
        np.testing.assert_allclose(moved, np.clip(points, -k * threshold, k * threshold), atol=1e-14)
        end = float(path(field, jnp.array([2.0]), rounds=t)[-1, 0])
        gap = k * threshold * end - (k * threshold) ** 2 / 2
        np.testing.assert_allclose(gap, fedavg_sharp_gap_bound(t, 2.0), rtol=1e-12)
        np.testing.assert_allclose(gap / fedavg_gap_bound(t, 2.0), t / (2 * t + 1), rtol=1e-12)


@pytest.mark.parametrize("k", [1, 4])
def test_theorem_13_on_quadratics_is_attained_at_one_eigenvalue(k):
    times = np.array([1, 5, 40])
    hardest = 1 - (1 - 1 / (2 * times + 1)) ** (1 / k)  # k steps then have the eigenvalue 1 / (2 t + 1)

    @jax.jit
    @jax.vmap
    def gaps(curvature):
        form = quadratic_displacement(curvature[None, None], jnp.zeros(1), 1.0, k)
        return jax.vmap(form.potential)(server_iterates(form.field, jnp.ones(1), optax.sgd(1.0), 40)[times])

    found = np.asarray(gaps(jnp.asarray([*np.linspace(0.01, 1, 40), *hardest])))
    bound = fedavg_quadratic_gap_bound(times, 1.0)
    assert np.all(found <= bound * (1 + 1e-12))
    np.testing.assert_allclose(np.diag(found[-3:]), bound, rtol=1e-10)
    np.testing.assert_allclose(fedavg_quadratic_gap_bound(1e6, 1.0) / fedavg_gap_bound(1e6, 1.0), 0.5 / np.e, rtol=1e-5)


def test_erratum_theorem_13_needs_a_minimiser_of_the_mean():
    """(sqrt(x^2 + y^2) - y)^2 / 2 and (x - 1)^2 / 2: each has minimisers, the mean has none."""
    flat, square = lambda p: (jnp.linalg.norm(p) - p[1]) ** 2 / 2, lambda p: (p[0] - 1) ** 2 / 2
    points = jnp.asarray(np.random.default_rng(0).uniform(-5, 5, (1000, 2)))
    values = np.linalg.eigvalsh(jax.jit(jax.vmap(jax.hessian(flat)))(points))
    assert values.min() > -1e-12 and values.max() < 5  # convex, Lipschitz gradient
    assert flat(jnp.array([0.0, 2.0])) == square(jnp.array([1.0, 7.0])) == 0
    field = server_field([flat, square], 0.2, 1)
    iterates = np.asarray(path(field, jnp.ones(2), rounds=30_000))
    assert np.all(np.diff(iterates[::1000, 1]) > 0.01) and iterates[-1, 1] > 5  # y grows without end
    heights = [float(flat(p) + square(p)) for p in jnp.array([[1.0, 1.0], [1.0, 10.0], [1.0, 1e3], [1.0, 1e5]])]
    assert heights == sorted(heights, reverse=True) and 0 < heights[-1] < 1e-10


# --- Theorem 14 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3])
def test_theorem_14_at_the_ends_of_the_spectrum(k):
    """The parameters of appendix B.1, and at which ends eq. 14 fails.

    Erratum V3 and its other half: (1 + (1 - q) t) q^t for the smallest, (1 + (1 + q) t) q^t for the largest.
    """
    power = ((BETA - ALPHA) / (BETA + ALPHA)) ** k
    kappa = (1 + power) / (1 - power)
    found = fedavgm_parameters(ALPHA, BETA, k)
    q, optimizer = found.rate, optax.sgd(found.lr, found.momentum)
    np.testing.assert_allclose(q, (np.sqrt(kappa) - 1) / (np.sqrt(kappa) + 1))
    ends = [abs(1 - np.sqrt(found.lr * (1 - power))), abs(1 - np.sqrt(found.lr * (1 + power)))]
    np.testing.assert_allclose(found.momentum, max(ends) ** 2)
    assert q < power  # faster than eq. 11
    form = quadratic_displacement(jnp.diag(jnp.array([ALPHA, BETA])), jnp.zeros(2), fedavg_client_lr(ALPHA, BETA), k)
    low, high = (distances(path(form.field, jnp.eye(2)[i], optimizer), jnp.zeros(2)) for i in (0, 1))
    np.testing.assert_allclose(low, (1 + (1 - q) * TIMES) * q**TIMES, rtol=1e-6)
    np.testing.assert_allclose(high, (1 + (1 + q) * TIMES) * q**TIMES, rtol=1e-6)
    np.testing.assert_allclose(high, fedavgm_distance_bound(ALPHA, BETA, k, TIMES, 1.0), rtol=1e-6)
    assert low[1] > q and high[1] > q  # eq. 14 as printed fails at t = 1


def test_erratum_theorem_14_fails_for_losses_that_are_not_quadratic():
    """One client, one dimension, k = 1, alpha = 1, beta = 25 (Lessard, Recht and Packard): a cycle of period 3."""

    def loss(x):
        """Slopes 25 x, x + 24 from 1 on, 25 x - 24 from 2 on."""
        middle, above = jnp.maximum(x - 1, 0.0), jnp.maximum(x - 2, 0.0)
        return jnp.sum(12.5 * x**2 - 12 * middle**2 + 12 * above**2)

    field = server_field([loss], fedavg_client_lr(1, 25), 1)
    found = fedavgm_parameters(1, 25, 1)
    np.testing.assert_allclose(found.rate, 2 / 3)
    points = path(field, jnp.array([3.3]), optax.sgd(found.lr, found.momentum), 200)[:, 0]
    np.testing.assert_allclose(points[-3:], points[-6:-3], rtol=1e-6)
    assert np.abs(points[-10:]).min() > 0.5
    assert min(np.abs(points[-10:] - kink).min() for kink in (1, 2)) > 0.1  # so smoothing the kinks changes nothing
    assert np.all(np.abs(points[100:]) > fedavgm_distance_bound(1, 25, 1, np.arange(100, 201), 3.3))
    plain = path(field, jnp.array([3.3]), rounds=400)[:, 0]
    assert np.all(np.abs(plain) <= fedavg_distance_bound(1, 25, 1, np.arange(401), 3.3) + 1e-12)  # Theorem 12 holds


test_bad_input = refusals(
    (lambda: fedavg_client_lr(0, 1), "^alpha = "),
    (lambda: fedavg_client_lr(2, 1), "^beta = "),
    (lambda: fedavg_client_lr(1, np.inf), "^beta = inf"),
    (lambda: fedavg_quadratic_gap_bound(np.inf, 1.0), "^t = inf"),
    (lambda: fedavg_distance_bound(1, 2, 0, 1, 1.0), "^k = "),
    (lambda: fedavg_distance_bound(1, 2, 1, -1, 1.0), "^t = "),
    (lambda: fedavg_gap_bound(0, 1.0), "^t = "),
    (lambda: fedavg_gap_bound(np.array([2, 0]), 1.0), r"^t\[1\] = 0"),
    (lambda: fedavg_gap_bound(0.5, 1.0), "^t = 0.5"),
    (lambda: fedavg_distance_bound(1, 2, 1, 1, -1.0), "^distance = "),
    (lambda: fedavg_sharp_gap_bound(-1, 1.0), "^t = "),
    (lambda: fedavg_quadratic_gap_bound(0, 1.0), "^t = "),
    (lambda: fedavg_hardest_threshold(0, 1, 1.0), "^k = "),
    (lambda: fedavg_hardest_threshold(1, 1, 0.0), "^distance = "),
    (lambda: fedavgm_distance_bound(1, 2, 1, -1, 1.0), "^t = "),
    (lambda: iterate_spectrum(2, 1, 1), "^high = "),
    (lambda: iterate_spectrum(0, 1, 0), "^j = "),
    (lambda: surrogate_constants(0, 0, 1, 1), "^beta = "),
    (lambda: surrogate_constants(-2, 1, 1, 1), "^alpha = "),
    (lambda: surrogate_constants(1, 1, 1.01, 1), "^gamma = "),
    (lambda: surrogate_constants(0, 1, 1, 0), "^k = "),
)
