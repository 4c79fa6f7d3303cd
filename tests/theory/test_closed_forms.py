"""Closed forms of fields against iteration, and FedAvg's fixed point beside the minimiser of the mean loss.

Theorems 3 and 4, affine, quadratic and univariate fields; the printed Theorem 4 fails.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.theory.closed_forms import (
    affine_iterate,
    elementwise_iterate,
    glm_displacement,
    glm_iterate,
    glm_loss,
    quadratic_displacement,
    quadratic_fixed_point,
)
from fedjax_async.theory.fedavg_dynamics import server_field
from fedjax_async.theory.fixed_points import fixed_point, fixed_point_shift, minimiser
from fedjax_async.theory.vector_fields import displacement, gradient_map, is_k_conservative, iterate
from tests.refusals import refusals

SIGMAS = {
    "logistic": lambda t: jax.nn.softplus(-t),
    "cosine": lambda t: 0.3 * jnp.cos(2 * t),  # not convex
    "shifted": lambda t: jnp.logaddexp(t - jnp.arange(3.0), jnp.arange(3.0) - t),  # another sigma for each feature
}
K = (1, 4)

pytestmark = pytest.mark.float64


def features_of(seed, rows=3, dim=5):
    rng = np.random.default_rng(seed)
    orthonormal = np.linalg.qr(rng.standard_normal((dim, dim)))[0][:rows]
    return jnp.asarray(orthonormal * rng.uniform(0.5, 1.5, (rows, 1)))


def points_of(seed, count=20, dim=5):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((count, dim)))


def at(points, *functions):
    """The functions' values at points, compiled."""
    return jax.jit(jax.vmap(lambda x: [function(x) for function in functions]))(points)


def assert_closed_forms(cases, points, rtol, atol, gradient_atol):
    """Each field of ``(form, iterated)`` is the iterated one, and its potential's gradient if there is a tolerance.

    In one program.
    """
    functions = [f for form, iterated in cases.values() for f in (iterated, form.field, jax.grad(form.potential))]
    values = iter(at(points, *functions))
    for k, expected, field, slope in zip(cases, values, values, values, strict=True):
        np.testing.assert_allclose(field, expected, rtol=rtol, atol=atol, err_msg=k)
        if gradient_atol[k] is not None:
            np.testing.assert_allclose(slope, field, atol=gradient_atol[k], err_msg=k)


@pytest.mark.parametrize("name", ["cosine", "shifted"])
def test_theorem_3_and_theorem_4_corrected(name):
    sigma, features, gamma = SIGMAS[name], features_of(1), 0.15
    loss = glm_loss(sigma, features)
    cases = {k: (glm_iterate(sigma, features, k), iterate(jax.grad(loss), k)) for k in K}
    # further iterates of a sine oscillate too fast for 64 nodes
    gradient_atol = {k: None if name == "cosine" and k > 2 else 1e-9 for k in K}
    assert_closed_forms(cases, points_of(1), 1e-10, 1e-13, gradient_atol)
    step = gradient_map(loss, gamma)
    cases = {k: (glm_displacement(sigma, features, gamma, k), displacement(step, k)) for k in K}
    assert_closed_forms(cases, points_of(1), 1e-7, 1e-13, dict.fromkeys(K, 1e-8))


def test_theorem_4_as_printed_fails():
    """Erratum V1: eq. 7 keeps only the last of the k terms."""
    k, gamma = 3, 0.5
    features, points = features_of(k), points_of(k)
    slope = jax.vmap(jax.grad(SIGMAS["logistic"]))
    squares = jnp.sum(features**2, axis=1)

    def printed(x):
        t = features @ x
        for _ in range(k - 1):
            t = t - gamma * squares * slope(t)
        return gamma * slope(t) @ features

    iterated = displacement(gradient_map(glm_loss(SIGMAS["logistic"], features), gamma), k)
    truth, corrected, wrong = at(
        points, iterated, glm_displacement(SIGMAS["logistic"], features, gamma, k).field, printed
    )
    assert np.linalg.norm(wrong - truth, axis=1).max() > 0.1
    assert np.linalg.norm(corrected - truth, axis=1).max() < 1e-14


@pytest.mark.parametrize("orthogonal", [True, False])
def test_orthogonal_features_are_k_conservative_and_others_are_not(orthogonal):
    features = features_of(1) if orthogonal else jnp.asarray(np.random.default_rng(1).standard_normal((3, 5)))
    step = gradient_map(glm_loss(SIGMAS["logistic"], features), 0.5)
    found = jax.jit(lambda points: [is_k_conservative(step, k, points, tol=1e-10) for k in (1, 2, 4)])(points_of(2))
    assert [one.holds for one in found] == [True, orthogonal, orthogonal]
    assert orthogonal or min(one.largest for one in found[1:]) > 1e-3


def drawn(seed):
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((4, 4))
    return jnp.asarray((matrix + matrix.T) / 3), jnp.asarray(matrix @ matrix.T / 4), jnp.asarray(rng.standard_normal(4))


def test_affine_quadratic_and_univariate_fields():
    symmetric, curvature, offset = drawn(0)
    points = points_of(1, dim=4)

    def affine(x):
        return symmetric @ x + offset

    def univariate(x):
        return jnp.stack([jnp.sin(t) + 0.3 * t for t in x])

    step = gradient_map(lambda x: (x - offset) @ curvature @ (x - offset) / 2, 0.2)
    down = {k: (quadratic_displacement(curvature, offset, 0.2, k), displacement(step, k)) for k in (1, 5)}
    assert_closed_forms(down, points, 1e-7, 1e-12, dict.fromkeys(down, 1e-9))
    assert not np.any(down[5][0].field(offset))
    cases = {k: (affine_iterate(symmetric, offset, k), iterate(affine, k)) for k in (0, 1, 5)}
    assert_closed_forms(cases, points, 1e-10, 1e-12, dict.fromkeys(cases, 1e-9))
    cases = {k: (elementwise_iterate(lambda t: jnp.sin(t) + 0.3 * t, k), iterate(univariate, k)) for k in (0, 1, 4)}
    assert_closed_forms(cases, points, 1e-7, 1e-14, dict.fromkeys(cases, 1e-9))


def test_dtypes_are_kept_in_programs():
    features, x = features_of(0).astype("float32"), jnp.ones(5, "float32")
    forms = [
        glm_iterate(SIGMAS["logistic"], features, 2),
        glm_displacement(SIGMAS["logistic"], features, 0.1, 2),
        affine_iterate(jnp.eye(5, dtype="float32"), x, 2),
        quadratic_displacement(jnp.eye(5, dtype="float32"), x, 0.1, 2),
        elementwise_iterate(jnp.sin, 2),
    ]
    for form in forms:
        assert jax.eval_shape(form.field, x).dtype == jax.eval_shape(form.potential, x).dtype == "float32"
    hyper = jax.jit(lambda features, gamma: glm_displacement(SIGMAS["logistic"], features, gamma, 2).field(x))
    np.testing.assert_allclose(hyper(features, 0.1), jax.jit(forms[1].field)(x), rtol=1e-5)


# --- fixed points and minimisers --------------------------------------------------------------------


def quadratics(seed, equal=False, clients=2, dim=4):
    rng = np.random.default_rng(seed)
    roots = rng.standard_normal((clients, dim, dim))
    curvature = roots @ roots.transpose(0, 2, 1) / dim + 0.2 * np.eye(dim)
    if equal:
        curvature[:] = curvature[0]
    return curvature, rng.standard_normal((clients, dim))


def losses_of(curvature, optima):
    return [lambda x, a=a, b=b: (x - b) @ a @ (x - b) / 2 for a, b in zip(map(jnp.asarray, curvature), optima)]


def mean_of(losses):
    return lambda x: sum(loss(x) for loss in losses) / len(losses)


def test_both_points_of_quadratics():
    curvature, optima = quadratics(0)
    losses = losses_of(curvature, optima)
    lowest = jax.jit(lambda x: minimiser(mean_of(losses), x, tol=1e-11))(jnp.zeros(4))
    expected = np.linalg.solve(curvature.sum(axis=0), np.einsum("cij,cj->i", curvature, optima))
    np.testing.assert_allclose(lowest.point, expected, atol=1e-10)
    found = jax.jit(lambda x: fixed_point(server_field(losses, 0.1, 3), x, tol=1e-12))(jnp.zeros(4))
    closed = quadratic_fixed_point(jnp.asarray(curvature), jnp.asarray(optima), 0.1, 3)
    np.testing.assert_allclose(found.point, closed, atol=1e-10)
    assert np.linalg.norm(found.point - expected) > 0.02
    assert found.residual <= 1e-12 and lowest.residual <= 1e-11 and found.steps < 10_000 and lowest.steps < 100
    early = fixed_point(server_field(losses, 0.1, 3), jnp.zeros(4), steps=3)
    assert early.steps == 3 and early.residual > 1e-3


def test_the_first_order_of_the_distance():
    """On logistic losses with weight decay: the error of the first order falls with the square of gamma."""
    rng = np.random.default_rng(2)
    logistic = [glm_loss(lambda t: jax.nn.softplus(-t), jnp.asarray(rng.standard_normal((6, 3)))) for _ in range(2)]
    losses = [lambda w, f=f: f(w["w"]) / 6 + 0.05 * jnp.sum(w["w"] ** 2) for f in logistic]
    start = {"w": jnp.zeros(3)}
    lowest = jax.jit(lambda x: minimiser(mean_of(losses), x, tol=1e-11))(start).point

    def both(gamma):
        found = fixed_point(server_field(losses, gamma, 3), start, tol=1e-12, steps=20_000).point
        return found["w"] - lowest["w"], fixed_point_shift(losses, gamma, 3, lowest)["w"]

    true, first = jax.jit(jax.vmap(both))(jnp.array([0.04, 0.02, 0.01]))
    errors = np.linalg.norm(true - first, axis=1)
    np.testing.assert_allclose(errors[:-1] / errors[1:], 4, rtol=0.15)
    assert errors[-1] < 0.05 * np.linalg.norm(true[-1])


def test_with_equal_curvatures_or_one_step_the_first_order_vanishes():
    for equal, k in ((True, 3), (False, 1)):
        curvature, optima = quadratics(3, equal)
        losses = losses_of(curvature, optima)
        lowest = jnp.asarray(np.linalg.solve(curvature.sum(axis=0), np.einsum("cij,cj->i", curvature, optima)))
        assert np.linalg.norm(fixed_point_shift(losses, 0.1, k, lowest)) < 1e-12
        found = jax.jit(lambda x, f=losses, k=k: fixed_point(server_field(f, 0.1, k), x, tol=1e-12))(lowest)
        np.testing.assert_allclose(found.point, lowest, atol=1e-10)


SKEWED = jnp.array([[0.0, 1.0], [0.0, 0.0]])


test_bad_input = refusals(
    (lambda: glm_iterate(jax.nn.softplus, jnp.ones((2, 3)), 2), r"features = .*mutually orthogonal rows"),
    (lambda: affine_iterate(SKEWED, jnp.zeros(2), 2), r"matrix = .*a symmetric matrix"),
    (lambda: quadratic_displacement(SKEWED, jnp.zeros(2), 0.1, 2), r"curvature = .*a symmetric matrix"),
    (lambda: quadratic_fixed_point(SKEWED[None], jnp.ones((1, 2)), 0.1, 2), r"curvature\[0\] = .*a symmetric matrix"),
    (lambda: quadratic_fixed_point(jnp.ones((3, 2, 2)), jnp.ones((3, 2)), 0.1, 2), "= 1: must be 2, that of a mean"),
    (lambda: glm_displacement(jax.nn.softplus, jnp.eye(2), 0.1, 0), "k = 0"),
    (lambda: glm_displacement(jax.nn.softplus, jnp.eye(2), 0, 2), "gamma = 0"),
    (lambda: fixed_point(jnp.sin, jnp.ones(2), lr=0), "lr = 0"),
    (lambda: fixed_point(jnp.sin, jnp.ones(2), tol=0.0), "tol = 0"),
    (lambda: fixed_point(jnp.sin, jnp.ones(2), steps=0), "steps = 0"),
    (lambda: minimiser(jnp.sum, jnp.ones(2), tol=-1.0), "tol = -1"),
    (lambda: minimiser(jnp.sum, jnp.ones(2), steps=0), "steps = 0"),
    (lambda: fixed_point_shift([], 0.1, 2, jnp.ones(2)), "number of clients = 0"),
    (lambda: fixed_point_shift([jnp.sum], 0.0, 2, jnp.ones(2)), "gamma = 0"),
    (lambda: fixed_point_shift([jnp.sum], 0.1, 0, jnp.ones(2)), "k = 0"),
)
