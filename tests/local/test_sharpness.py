"""SAM, ASAM and proximal metrics against their formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async.geometry import lorentz_penalty
from fedjax_async.local import OPTIMIZERS, PROXIMAL_METRICS, hyperbolic, local_training, run_job
from tests.local.made_up import MODEL, client_data, flat, groups, message, slope, start_vector
from tests.refusals import refusals

KEY, LR, MU, STEPS = jax.random.key(3), 0.2, 0.3, 5


def trained(optimizer, **options):
    client = local_training(MODEL, optimizer=optimizer, batch_size=8, **options)
    return flat(run_job(client, KEY, message(), (), client_data(), STEPS)[0])


def sharp(climb, proximal=0.0):
    """SGD along the gradient at ``w + climb(g, w)``, the same minibatch twice; the change, as [b, w]."""
    start = now = start_vector()

    def gradient(at, rows):
        return slope(at, rows) + proximal * (at - start)

    for rows in groups(KEY, 0, 8, STEPS):
        now = now - LR * gradient(now + climb(gradient(now, rows), now), rows)
    return now - start


def sam(g, w):
    return 0.4 * g / np.linalg.norm(g)


def asam(g, w):
    t = np.abs(w) + 0.01
    return 0.4 * t * t * g / np.linalg.norm(t * g)


@pytest.mark.float64
@pytest.mark.parametrize(("name", "climb"), [("sam", sam), ("asam", asam)])
def test_local_training_takes_sharpness_aware_steps(name, climb):
    have = trained(OPTIMIZERS[name](LR, rho=0.4), proximal=MU)
    plain = trained(optax.sgd(LR), proximal=MU)
    np.testing.assert_allclose(have, sharp(climb, MU), rtol=1e-9, atol=1e-12)
    assert np.abs(have - plain).max() > 1e-3


@pytest.mark.float64
def test_sam_with_a_tiny_radius_is_its_base():
    near = trained(OPTIMIZERS["sam"](LR, rho=1e-12, base="adam"))
    np.testing.assert_allclose(near, trained(optax.adam(LR)), rtol=1e-6)


@pytest.mark.parametrize("name", ["sam", "asam"])
def test_a_zero_gradient_moves_nothing(name):
    still = OPTIMIZERS[name](LR)
    weights = {"w": jnp.ones(3)}
    zero = jax.tree.map(jnp.zeros_like, weights)
    updates, _ = still.update(zero, still.init(weights), weights, grad_fn=lambda w, _: zero)
    np.testing.assert_array_equal(updates["w"], 0.0)


WRONG = [({"rho": 0.0}, "^rho = 0.0"), ({"rho": -1.0}, "^rho = -1.0"), ({"base": "sam"}, "^base = 'sam': unknown")]
test_bad_options_are_refused = refusals(
    *((name, *case) for name in ("sam", "asam") for case in WRONG),
    by=lambda name, options: OPTIMIZERS[name](LR, **options),
)


# --- proximal metrics -------------------------------------------------------------------------


@pytest.mark.float64
def test_the_euclidean_metric_is_the_proximal_term_of_fedprox():
    for metric in (PROXIMAL_METRICS["euclidean"](), "euclidean"):
        given, usual = (trained(optax.sgd(LR), proximal=MU, metric=m) for m in (metric, None))
        np.testing.assert_allclose(given, usual, rtol=1e-12)


def test_a_metric_of_no_such_name_is_refused():
    for metric, allowed in {"taxi": "metric = 'taxi': unknown", 3: "metric = 3: must be a function"}.items():
        with pytest.raises(ValueError, match=allowed):
            trained(optax.sgd(LR), proximal=MU, metric=metric)


def test_a_metric_may_be_any_function():
    def quartic(w, w0):
        return sum(jnp.sum((a - b) ** 4) for a, b in zip(jax.tree.leaves(w), jax.tree.leaves(w0)))

    start = now = start_vector()
    for rows in groups(KEY, 0, 8, STEPS):
        now = now - LR * (slope(now, rows) + MU / 2 * 4 * (now - start) ** 3)
    with jax.enable_x64(True):
        have = trained(optax.sgd(LR), proximal=MU, metric=quartic)
    np.testing.assert_allclose(have, now - start, rtol=1e-9, atol=1e-12)


def test_the_hyperbolic_metric_is_eq_24_near_and_finite_far_away():
    chance = np.random.default_rng(0)
    x, y = chance.normal(size=(2, 6))
    lifted = [np.append(np.sqrt(2.0 + p @ p), p) for p in (x, y)]
    gap = lifted[0] - lifted[1]
    with jax.enable_x64(True):
        want = np.exp((gap[1:] @ gap[1:] - gap[0] ** 2) / 1.5)
        metric = hyperbolic(sigma=1.5, beta=2.0)
        np.testing.assert_allclose(metric(jnp.asarray(x), jnp.asarray(y)), want, rtol=1e-10)
        assert metric(jnp.asarray(x), jnp.asarray(y)) == lorentz_penalty(
            jnp.asarray(x), jnp.asarray(y), sigma=1.5, beta=2.0
        )
    far = jax.jit(jax.value_and_grad(hyperbolic()))
    for size in (1e-30, 1.0, 1e30):
        value, slope = far(jnp.float32(size) * jnp.ones(4), jnp.zeros(4))
        assert np.isfinite(value) and np.all(np.isfinite(slope))
