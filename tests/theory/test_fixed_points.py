"""FedAvg's fixed point and the minimiser of the mean loss: found by iteration, solved by NumPy, and to first order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.theory.closed_forms import glm_loss, quadratic_fixed_point
from fedjax_async.theory.fedavg_dynamics import server_field
from fedjax_async.theory.fixed_points import fixed_point, fixed_point_shift, minimiser

pytestmark = pytest.mark.float64


def quadratics(seed, equal=False, clients=3, dim=4):
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
    found = jax.jit(lambda x: fixed_point(server_field(losses, 0.1, 6), x, tol=1e-12))(jnp.zeros(4))
    closed = quadratic_fixed_point(jnp.asarray(curvature), jnp.asarray(optima), 0.1, 6)
    np.testing.assert_allclose(found.point, closed, atol=1e-10)
    assert np.linalg.norm(found.point - expected) > 0.02
    assert found.residual <= 1e-12 and lowest.residual <= 1e-11 and found.steps < 10_000 and lowest.steps < 100


def test_too_few_steps_show_in_the_residual():
    curvature, optima = quadratics(1)
    found = fixed_point(server_field(losses_of(curvature, optima), 0.1, 2), {"x": jnp.ones(4)}["x"], steps=3)
    assert found.steps == 3 and found.residual > 1e-3


def test_the_first_order_of_the_distance():
    """On logistic losses with weight decay: the error of the first order falls with the square of gamma."""
    rng = np.random.default_rng(2)
    logistic = [glm_loss(lambda t: jax.nn.softplus(-t), jnp.asarray(rng.standard_normal((6, 3)))) for _ in range(3)]
    losses = [lambda w, f=f: f(w["w"]) / 6 + 0.05 * jnp.sum(w["w"] ** 2) for f in logistic]
    start = {"w": jnp.zeros(3)}
    lowest = jax.jit(lambda x: minimiser(mean_of(losses), x, tol=1e-11))(start).point

    def both(gamma):
        found = fixed_point(server_field(losses, gamma, 5), start, tol=1e-12, steps=20_000).point
        return found["w"] - lowest["w"], fixed_point_shift(losses, gamma, 5, lowest)["w"]

    true, first = jax.jit(jax.vmap(both))(jnp.array([0.04, 0.02, 0.01]))
    errors = np.linalg.norm(true - first, axis=1)
    np.testing.assert_allclose(errors[:-1] / errors[1:], 4, rtol=0.15)
    assert errors[-1] < 0.05 * np.linalg.norm(true[-1])


def test_with_equal_curvatures_or_one_step_the_first_order_vanishes():
    for equal, k in ((True, 5), (False, 1)):
        curvature, optima = quadratics(3, equal)
        losses = losses_of(curvature, optima)
        lowest = jnp.asarray(np.linalg.solve(curvature.sum(axis=0), np.einsum("cij,cj->i", curvature, optima)))
        assert np.linalg.norm(fixed_point_shift(losses, 0.1, k, lowest)) < 1e-12
        found = jax.jit(lambda x, f=losses, k=k: fixed_point(server_field(f, 0.1, k), x, tol=1e-12))(lowest)
        np.testing.assert_allclose(found.point, lowest, atol=1e-10)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fixed_point(jnp.sin, jnp.ones(2), lr=0), "lr = 0"),
        (lambda: fixed_point(jnp.sin, jnp.ones(2), tol=0.0), "tol = 0"),
        (lambda: fixed_point(jnp.sin, jnp.ones(2), steps=0), "steps = 0"),
        (lambda: minimiser(jnp.sum, jnp.ones(2), tol=-1.0), "tol = -1"),
        (lambda: minimiser(jnp.sum, jnp.ones(2), steps=0), "steps = 0"),
        (lambda: fixed_point_shift([], 0.1, 2, jnp.ones(2)), "number of clients = 0"),
        (lambda: fixed_point_shift([jnp.sum], 0.0, 2, jnp.ones(2)), "gamma = 0"),
        (lambda: fixed_point_shift([jnp.sum], 0.1, 0, jnp.ones(2)), "k = 0"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
