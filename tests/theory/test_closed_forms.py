"""Theorems 3 and 4, affine, quadratic and univariate fields against iteration; the printed Theorem 4 fails."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
from fedjax_async.theory.fedavg_dynamics import server_field, server_iterates
from fedjax_async.theory.surrogate import surrogate_loss
from fedjax_async.theory.vector_fields import displacement, gradient_map, is_k_conservative, iterate

SIGMAS = {
    "logistic": lambda t: jax.nn.softplus(-t),
    "square": lambda t: (t - 1) ** 2 / 2,
    "log_cosh": lambda t: jnp.logaddexp(t, -t),
    "cosine": lambda t: 0.3 * jnp.cos(2 * t),  # not convex
    "shifted": lambda t: jnp.logaddexp(t - jnp.arange(3.0), jnp.arange(3.0) - t),  # another sigma for each feature
}
K = (1, 2, 3, 6)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def features_of(seed, rows=3, dim=5):
    rng = np.random.default_rng(seed)
    orthonormal = np.linalg.qr(rng.standard_normal((dim, dim)))[0][:rows]
    return jnp.asarray(orthonormal * rng.uniform(0.5, 1.5, (rows, 1)))


def points_of(seed, count=20, dim=5):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((count, dim)))


def at(points, *functions):
    """The functions' values at points, compiled."""
    return jax.jit(jax.vmap(lambda x: [function(x) for function in functions]))(points)


def assert_closed_form(form, iterated, points, rtol=0.0, atol=1e-13, gradient_atol=1e-9):
    """The field is the iterated one, and the potential's gradient."""
    assert_closed_forms({1: (form, iterated)}, points, rtol, atol, {1: gradient_atol})


def assert_closed_forms(cases, points, rtol, atol, gradient_atol):
    """The same for several ``(form, iterated)``, in one program; a potential without tolerance is not checked."""
    functions = [f for form, iterated in cases.values() for f in (iterated, form.field, jax.grad(form.potential))]
    values = iter(at(points, *functions))
    for k, expected, field, slope in zip(cases, values, values, values, strict=True):
        np.testing.assert_allclose(field, expected, rtol=rtol, atol=atol, err_msg=k)
        if gradient_atol[k] is not None:
            np.testing.assert_allclose(slope, field, atol=gradient_atol[k], err_msg=k)


@pytest.mark.slow_cases("log_cosh", "shifted", "logistic")
@pytest.mark.parametrize("sigma", SIGMAS)
def test_theorem_3(sigma):
    features, slope = features_of(1), jax.grad(glm_loss(SIGMAS[sigma], features_of(1)))
    cases = {k: (glm_iterate(SIGMAS[sigma], features, k), iterate(slope, k)) for k in K}
    # further iterates of a sine oscillate too fast for 64 nodes
    gradient_atol = {k: None if sigma == "cosine" and k > 2 else 1e-9 for k in K}
    assert_closed_forms(cases, points_of(1), 1e-10, 1e-13, gradient_atol)


@pytest.mark.slow_cases("shifted", "cosine")
@pytest.mark.parametrize("sigma", SIGMAS)
def test_theorem_4_corrected(sigma):
    features, gamma = features_of(1), 0.15
    step = gradient_map(glm_loss(SIGMAS[sigma], features), gamma)
    cases = {k: (glm_displacement(SIGMAS[sigma], features, gamma, k), displacement(step, k)) for k in K}
    assert_closed_forms(cases, points_of(1), 1e-7, 1e-13, dict.fromkeys(K, 1e-8))


@pytest.mark.parametrize("k", [2, 3, 6])
def test_theorem_4_as_printed_fails(k):
    """Erratum V1: eq. 7 keeps only the last of the k terms."""
    features, points, gamma = features_of(k), points_of(k), 0.5
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


def test_theorem_4_telescopes():
    """Along each feature gradient descent is a map of one number: <V^k x, z_i> = psi_i^k(<x, z_i>)."""
    features, gamma, k = features_of(9), 0.3, 4
    (x,) = points_of(9, 1)
    t = features @ x
    for _ in range(k):
        t = t - gamma * jnp.sum(features**2, axis=1) * jax.grad(lambda t: jnp.sum(SIGMAS["logistic"](t)))(t)
    moved = x - glm_displacement(SIGMAS["logistic"], features, gamma, k).field(x)
    np.testing.assert_allclose(features @ moved, t, rtol=1e-13)


@pytest.mark.parametrize("orthogonal", [True, False])
def test_orthogonal_features_are_k_conservative_and_others_are_not(orthogonal):
    features = features_of(1) if orthogonal else jnp.asarray(np.random.default_rng(1).standard_normal((3, 5)))
    step = gradient_map(glm_loss(SIGMAS["logistic"], features), 0.5)
    for k in (2, 3, 4):
        found = jax.jit(lambda points, k=k: is_k_conservative(step, k, points, tol=1e-10))(points_of(2))
        assert found.holds == orthogonal
        assert orthogonal or found.largest > 1e-3
    assert is_k_conservative(step, 1, points_of(2), tol=1e-10).holds


def test_the_mean_of_the_potentials_is_the_surrogate_loss():
    """Theorem 11 on clients with orthogonal features: closed form, line integral and field agree."""
    features = [features_of(seed) for seed in range(3)]
    losses = [glm_loss(SIGMAS["log_cosh"], each) for each in features]
    forms = [glm_displacement(SIGMAS["log_cosh"], each, 0.2, 4) for each in features]
    x, x0 = points_of(4, 2)

    def surrogate(x):
        return sum(form.potential(x) for form in forms) / len(forms)

    field = server_field(losses, 0.2, 4)
    integral = jax.jit(lambda: surrogate_loss(field, x, x0))()
    rise, slope, expected = jax.jit(lambda: (surrogate(x) - surrogate(x0), jax.grad(surrogate)(x), field(x)))()
    np.testing.assert_allclose(rise, integral.value, atol=1e-8)
    np.testing.assert_allclose(slope, expected, atol=1e-9)
    assert integral.error < 1e-8


@pytest.mark.parametrize("k", [0, 1, 2, 5])
def test_affine_fields(k):
    rng = np.random.default_rng(k)
    matrix = rng.standard_normal((4, 4))
    matrix = jnp.asarray((matrix + matrix.T) / 3)
    offset, points = jnp.asarray(rng.standard_normal(4)), points_of(k, dim=4)
    form = affine_iterate(matrix, offset, k)
    iterated = iterate(lambda x: matrix @ x + offset, k)
    assert_closed_form(form, iterated, points, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("k", K)
def test_quadratics(k):
    rng = np.random.default_rng(k)
    root = jnp.asarray(rng.standard_normal((4, 4)))
    curvature, optimum, points = root @ root.T / 4, jnp.asarray(rng.standard_normal(4)), points_of(k, dim=4)
    step = gradient_map(lambda x: (x - optimum) @ curvature @ (x - optimum) / 2, 0.2)
    form = quadratic_displacement(curvature, optimum, 0.2, k)
    assert_closed_form(form, displacement(step, k), points, rtol=1e-7, atol=1e-12)
    assert not np.any(form.field(optimum))


def test_the_fixed_point_of_quadratics():
    """FedAvg converges to it; it minimises the mean loss for k = 1 only."""
    rng = np.random.default_rng(5)
    roots, optima = rng.standard_normal((3, 4, 4)), jnp.asarray(rng.standard_normal((3, 4)))
    curvature = jnp.asarray(roots @ roots.transpose(0, 2, 1) / 4 + 0.1 * np.eye(4))
    minimiser = np.linalg.solve(np.asarray(curvature).sum(axis=0), np.einsum("cij,cj->i", curvature, optima))
    for k, away in ((1, 0.0), (10, 0.1)):
        forms = [quadratic_displacement(a, b, 0.1, k) for a, b in zip(curvature, optima)]

        def field(x, forms=forms):
            return sum(form.field(x) for form in forms) / len(forms)

        fixed = quadratic_fixed_point(curvature, optima, 0.1, k)
        end = jax.jit(lambda x, field=field: server_iterates(field, x, optax.sgd(1.0), 3000)[-1])(jnp.zeros(4))
        np.testing.assert_allclose(end, fixed, atol=1e-9)
        distance = np.linalg.norm(fixed - minimiser)
        assert distance < 1e-10 if away == 0 else distance > away


@pytest.mark.parametrize("k", [0, 1, 2, 4])
def test_univariate_fields(k):
    points = points_of(k, dim=3)
    form = elementwise_iterate(lambda t: jnp.sin(t) + 0.3 * t, k)
    iterated = iterate(lambda x: jnp.stack([jnp.sin(t) + 0.3 * t for t in x]), k)
    assert_closed_form(form, iterated, points, rtol=1e-7, atol=1e-14)


@pytest.mark.slow_cases("float32")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dtypes_and_compilation(dtype):
    features, x = features_of(0).astype(dtype), jnp.ones(5, dtype)
    forms = [
        glm_iterate(SIGMAS["logistic"], features, 2),
        glm_displacement(SIGMAS["logistic"], features, 0.1, 2),
        affine_iterate(jnp.eye(5, dtype=dtype), x, 2),
        quadratic_displacement(jnp.eye(5, dtype=dtype), x, 0.1, 2),
        elementwise_iterate(jnp.sin, 2),
    ]
    for form in forms:
        assert jax.jit(form.field)(x).dtype == jax.jit(form.potential)(x).dtype == dtype
    hyper = jax.jit(lambda features, gamma: glm_displacement(SIGMAS["logistic"], features, gamma, 2).field(x))
    np.testing.assert_allclose(hyper(features, 0.1), forms[1].field(x), rtol=1e-5)


def test_bad_input():
    with pytest.raises(ValueError, match=r"features = .*mutually orthogonal rows"):
        glm_iterate(SIGMAS["logistic"], jnp.ones((2, 3)), 2)
    with pytest.raises(ValueError, match=r"matrix = .*a symmetric matrix"):
        affine_iterate(jnp.array([[0.0, 1.0], [0.0, 0.0]]), jnp.zeros(2), 2)
    with pytest.raises(ValueError, match=r"curvature = .*a symmetric matrix"):
        quadratic_displacement(jnp.array([[0.0, 1.0], [0.0, 0.0]]), jnp.zeros(2), 0.1, 2)
    with pytest.raises(ValueError, match="k = 0"):
        glm_displacement(SIGMAS["logistic"], features_of(0), 0.1, 0)
    with pytest.raises(ValueError, match="gamma = 0"):
        glm_displacement(SIGMAS["logistic"], features_of(0), 0, 2)
