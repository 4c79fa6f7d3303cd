"""SAM, ASAM, proximal metrics and DP-SGD against their formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async.geometry import lorentz_penalty
from fedjax_async.local import OPTIMIZERS, PROXIMAL_METRICS, hyperbolic, local_training, run_job, sharpness_aware
from fedjax_async.local.dp_sgd import DPSGDOptions, noised_gradient, uses_of_an_example
from tests.local.made_up import MODEL, client_data, flat, groups, message, rows_of, slope, start_vector
from tests.local.textbook import sgd
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
    *((OPTIMIZERS[name], *case) for name in ("sam", "asam") for case in WRONG),
    (trained, {"proximal": MU, "metric": "taxi"}, "metric = 'taxi': unknown"),
    (trained, {"proximal": MU, "metric": 3}, "metric = 3: must be a function"),
    by=lambda make, options: make(optax.sgd(LR) if make is trained else LR, **options),
)


# --- proximal metrics -------------------------------------------------------------------------


def quartic(w, w0):
    return sum(jnp.sum((a - b) ** 4) for a, b in zip(jax.tree.leaves(w), jax.tree.leaves(w0)))


METRICS = {  # and half of their gradients
    "name": ("euclidean", lambda gap: gap),
    "function": (PROXIMAL_METRICS["euclidean"](), lambda gap: gap),
    "own": (quartic, lambda gap: 2 * gap**3),
}


@pytest.mark.float64
@pytest.mark.parametrize(("metric", "pull"), METRICS.values(), ids=METRICS)
def test_a_metric_is_a_name_or_any_function(metric, pull):
    """The Euclidean one is the proximal term of FedProx."""
    start = start_vector()
    steps = [lambda now, rows=rows: slope(now, rows) + MU * pull(now - start) for rows in groups(KEY, 0, 8, STEPS)]
    have = trained(optax.sgd(LR), proximal=MU, metric=metric)
    np.testing.assert_allclose(have, sgd(start, steps, lr=LR) - start, rtol=1e-9, atol=1e-12)


def test_the_hyperbolic_metric_is_eq_24_near_and_finite_far_away():
    points, options = np.random.default_rng(0).normal(size=(2, 6)), {"sigma": 1.5, "beta": 2.0}
    one, other = (np.append(np.sqrt(2.0 + p @ p), p) for p in points)
    gap = one - other
    with jax.enable_x64(True):
        given = jnp.asarray(points)
        found = hyperbolic(**options)(*given)
        np.testing.assert_allclose(found, np.exp((gap[1:] @ gap[1:] - gap[0] ** 2) / 1.5), rtol=1e-10)
        assert found == lorentz_penalty(*given, **options)
    far = jax.jit(jax.value_and_grad(hyperbolic()))
    for size in (1e-30, 1.0, 1e30):
        value, slope = far(jnp.float32(size) * jnp.ones(4), jnp.zeros(4))
        assert np.isfinite(value) and np.all(np.isfinite(slope))


# --- DP-SGD: the gradient of a minibatch, example by example -----------------------------------

CLIP, B = 0.8, 8
SAM = sharpness_aware(optax.sgd(0.1), lambda gradient, weights: gradient)


def clipped_mean(rows, divisor):
    """Sum of the clipped gradients of single examples over the divisor, in NumPy."""
    slopes = np.array([slope(start_vector(), [row]) for row in rows])
    norms = np.linalg.norm(slopes, axis=1, keepdims=True)
    assert 0 < np.sum(norms > CLIP) < len(rows), "gradients on both sides of the clip"
    return np.sum(slopes * np.minimum(1, CLIP / norms), axis=0) / divisor


@pytest.mark.float64
@pytest.mark.parametrize("client", [1, 2])  # of 5 examples, fewer than B, and of 32
def test_the_gradient_of_a_minibatch_is_the_mean_of_clipped_ones(client):
    own = client_data(client)
    rows = rows_of(client)[:B]
    mask = np.arange(B) < len(rows)
    padded = np.append(rows, [rows[0]] * (B - len(rows))).astype(int)
    given = (own.x[padded], own.y[padded], jnp.asarray(mask, float), own.size, jax.random.key(0), jnp.int32(3))
    start = message().params
    quiet = jax.jit(noised_gradient(MODEL, DPSGDOptions(CLIP, 0.0), *given))(start)
    np.testing.assert_allclose(flat(quiet), clipped_mean(rows, min(B, len(rows_of(client)))), rtol=1e-9)


@pytest.mark.float64
def test_noise_is_of_the_job_and_the_step_and_scales_with_the_clip():
    own, start = client_data(2), message().params

    def noise(key, k):
        rows = own.x[:B], own.y[:B], jnp.ones(B), own.size, key, k
        one, quiet = (noised_gradient(MODEL, DPSGDOptions(CLIP, z), *rows)(start) for z in (2.0, 0.0))
        return jax.flatten_util.ravel_pytree(jax.tree.map(jnp.subtract, one, quiet))[0]

    keys = jax.random.split(jax.random.key(1), 200)[jnp.arange(400) // 2]
    many = jax.jit(jax.vmap(noise))(keys, jnp.arange(400) % 2)  # two steps of each job
    assert abs(float(many.std()) / (2.0 * CLIP / B) - 1) < 0.05 and abs(float(many.mean())) < 0.02
    assert float(jnp.abs(many[0] - many[1]).max()) > 1e-3 < float(jnp.abs(many[0] - many[2]).max())


def several(own):
    """The data with weights and with targets of two numbers."""
    return own._replace(y=jnp.stack([own.x.sum(1), own.x[:, 0]], axis=1), weight=jnp.linspace(0.5, 2.0, len(own.y)))


SQUARES = MODEL._replace(loss=lambda outputs, y: jnp.sum(jnp.square(outputs[:, :2] - y), axis=1))


@pytest.mark.float64
@pytest.mark.parametrize(("model", "given"), [(MODEL, lambda own: own), (SQUARES, several)])
def test_without_clipping_and_noise_local_training_takes_the_usual_steps(model, given):
    """Also with weights of examples, for targets of several numbers."""
    job, make = (jax.random.key(0), message(), (), given(client_data(2)), 3), {"optimizer": optax.sgd(0.1)}
    hows = DPSGDOptions(1e6, 0.0), None
    private, usual = (flat(run_job(local_training(model, **make, per_example=how), *job)[0]) for how in hows)
    np.testing.assert_allclose(private, usual, rtol=1e-9)


test_what_would_not_protect_an_example_is_refused = refusals(
    (MODEL, SAM, "optimizer = 'one with 2 gradients a step': must be one that computes one"),
    # not seen from outside
    (MODEL, optax.chain(SAM), "optimizer = 'one with several gradients a step': must be one that computes"),
    (
        MODEL._replace(train=lambda params, x, key, mask: (x, params)),
        optax.sgd(0.1),
        "privacy = 'dp_sgd': must be left out: the model has running statistics",
    ),
    by=lambda model, optimizer: run_job(
        local_training(model, optimizer=optimizer, per_example=DPSGDOptions(1.0, 1.0)),
        jax.random.key(0), message(), (), client_data(), 1,
    ),
)  # fmt: skip


def test_an_example_is_used_once_an_epoch():
    """Jobs of 5 steps: 32 examples are 4 steps of 8, so a second epoch begins; 5 examples are used in every step."""
    assert uses_of_an_example(np.array([5, 5, 4, 1]), np.array([32, 5, 32, 40]), 8).tolist() == [2, 5, 1, 1]
    assert uses_of_an_example(np.array([5, 5, 4]), np.array([39, 5, 39]), 8, whole_batches=True).tolist() == [2, 5, 1]
