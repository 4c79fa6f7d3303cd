"""Synthetic problems: the optimum, the constants and the heterogeneity are those of the options."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.data import client_rows, federate, quadratic_problem, synthetic
from fedjax_async.data.datasets import load
from fedjax_async.models import linear


@settings(max_examples=30)
@given(
    clients=st.integers(2, 6),
    dim=st.integers(1, 5),
    zeta=st.floats(0, 50),
    noise=st.sampled_from([0.0, 0.3]),
    same=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_stated_optimum_and_heterogeneity_are_exact(clients, dim, zeta, noise, same, seed):
    p = quadratic_problem(
        clients=clients, dim=dim, examples=8, heterogeneity=zeta, noise=noise, same_curvature=same, seed=seed
    )
    gradients = np.stack([p.gradient(i, p.optimum) for i in range(clients)])
    np.testing.assert_allclose(gradients.mean(axis=0), 0, atol=1e-9 * max(zeta, 1))
    assert np.mean(np.sum(gradients**2, axis=1)) == pytest.approx(zeta**2, rel=1e-6, abs=1e-12)
    for i in range(clients):
        np.testing.assert_allclose(np.linalg.eigvalsh(p.curvature[i]), np.geomspace(0.1, 1.0, dim), rtol=1e-9)


@pytest.mark.float64
def test_the_examples_carry_the_quadratics():
    """A client's mean loss is 1/2 (w - b)^T A (w - b) + noise^2 / 2, and its gradient is the gradient of this."""
    p = quadratic_problem(clients=3, dim=4, examples=12, heterogeneity=2.0, noise=0.5, seed=1)
    data = federate(p.dataset, "natural")
    model = linear(input_shape=(4,))
    assert model.init(jax.random.key(0))["w"].tolist() == [0] * 4

    @jax.jit
    @jax.value_and_grad
    def mean_loss(params, x, y):
        return jnp.mean(model.loss(model.apply(params, x), y))

    w = np.random.default_rng(0).standard_normal(4)
    for i in range(3):
        rows = client_rows(data, i)
        loss, gradient = mean_loss({"w": w}, data.x[rows], data.y[rows])
        away = w - p.local_optima[i]
        assert float(loss) == pytest.approx(0.5 * away @ p.curvature[i] @ away + 0.125, rel=1e-12)
        np.testing.assert_allclose(gradient["w"], p.gradient(i, w), rtol=1e-10)
    best, slope = mean_loss({"w": p.optimum}, data.x, data.y)
    assert float(best) == pytest.approx(p.minimum, rel=1e-12)
    np.testing.assert_allclose(slope["w"], 0, atol=1e-12)


def test_noise_is_felt_at_the_clients_optimum_only_by_minibatches():
    p = quadratic_problem(clients=2, dim=3, examples=9, noise=0.7)
    x, y = p.dataset.x[:9], p.dataset.y[:9]
    residual = x @ p.local_optima[0] - y
    assert np.mean(residual**2) == pytest.approx(0.49)
    np.testing.assert_allclose(x.T @ residual, 0, atol=1e-10)
    assert np.abs(x * residual[:, None]).max() > 0.01


@pytest.mark.float64
def test_the_model_survives_float32_parameters_under_x64():
    model = linear(input_shape=(2,))

    def losses(w, x, y):
        return model.loss(model.apply({"w": w}, x), y)

    assert jax.eval_shape(losses, jnp.ones(2, jnp.float32), jnp.ones((3, 2)), jnp.ones(3)).dtype == jnp.float32


def test_synthetic_shapes_sizes_and_owners():
    data = synthetic(clients=20, seed=1)
    sizes = np.bincount(data.groups)
    assert len(sizes) == 20
    assert data.x.shape == (sizes.sum(), 60)
    assert (data.x.dtype, data.y.dtype) == (np.float32, np.int32)
    assert abs(len(data.test_x) - sizes.sum() / 9) < 20
    np.testing.assert_array_equal(data.x, synthetic(clients=20, seed=1).x)


def test_synthetic_sizes_are_lognormal():
    sizes = np.bincount(synthetic(clients=300, features=2, mean_log_size=5.0, std_log_size=0.8).groups)
    logs = np.log(sizes - 50 + 0.5)
    assert sizes.min() >= 50
    assert logs.mean() == pytest.approx(5.0, abs=0.15)
    assert logs.std() == pytest.approx(0.8, abs=0.1)


def test_synthetic_inputs_have_the_stated_covariance():
    data = synthetic(clients=1, least_size=20_000, std_log_size=0.0, features=10)
    np.testing.assert_allclose(data.x.var(axis=0), np.arange(1, 11) ** -1.2, rtol=0.06)


def test_synthetic_beta_moves_the_inputs_apart():
    def spread(beta):
        data = synthetic(clients=200, beta=beta, std_log_size=0.0, features=20)
        means = np.stack([data.x[data.groups == k].mean() for k in range(200)])
        return means.var()

    # a client's mean input is B_k + the mean of 20 unit normals: variance beta + 1/20, and a little sampling noise
    assert spread(0.0) == pytest.approx(0.05, rel=0.5)
    assert spread(4.0) == pytest.approx(4.05, rel=0.3)


def test_synthetic_alpha_shifts_all_scores_alike():
    """u_k adds u_k (sum_j x_j + 1) to the score of every class: no label depends on alpha, as published."""
    plain, apart = synthetic(alpha=0.0, clients=3, seed=2), synthetic(alpha=4.0, clients=3, seed=2)
    np.testing.assert_array_equal(plain.y, apart.y)


def test_synthetic_clients_share_a_model_only_when_asked():
    """With one model for all clients, one linear map explains the labels of all clients."""

    def fitted_by_first(same_model):
        data = synthetic(clients=2, classes=2, features=3, least_size=3000, beta=0.0, same_model=same_model, seed=6)
        x, sign = np.c_[data.x, np.ones(len(data.x))].astype(np.float64), 2.0 * data.y - 1
        first = data.groups == 0
        w = np.linalg.lstsq(x[first], sign[first], rcond=None)[0]
        return np.mean(np.sign(x[~first] @ w) == sign[~first])

    assert fitted_by_first(True) > 0.8
    assert fitted_by_first(False) < 0.7


def test_each_synthetic_client_is_a_linear_problem():
    """Its labels are the argmax of linear scores, so a perceptron separates every pair of its classes."""
    data = synthetic(clients=1, classes=2, features=5, seed=3)
    x, sign = np.c_[data.x, np.ones(len(data.x))].astype(np.float64), 2.0 * data.y - 1
    w = np.zeros(6)
    for _ in range(20_000):
        wrong = np.flatnonzero(sign * (x @ w) <= 0)
        if len(wrong) == 0:
            break
        w += sign[wrong] @ x[wrong] / len(wrong)
    assert np.all(sign * (x @ w) > 0)


@pytest.mark.parametrize(
    "spec",
    [
        *(f"quadratic:{wrong}" for wrong in ("clients=0", "clients=1", "examples=9", "noise=1.0,examples=10")),
        *(f"quadratic:{wrong}" for wrong in ("smallest=0.0", "largest=0.05", "heterogeneity=-1.0", "noise=inf")),
        *(f"synthetic:{wrong}" for wrong in ("alpha=-1", "beta=-0.5", "clients=0", "classes=1")),
    ],
)
def test_impossible_problems_are_refused_by_the_name_of_the_last_option(spec):
    option = spec.replace(":", ",").rpartition(",")[2].partition("=")[0]
    with pytest.raises(ValueError, match=f"^dataset = .*: {option} = "):
        load(spec)
