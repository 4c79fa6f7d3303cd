"""DP-SGD: the gradient of a minibatch against float64 NumPy, example by example."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async.local import local_training, run_job, sharpness_aware
from fedjax_async.local.dp_sgd import DPSGDOptions, noised_gradient, uses_of_an_example
from tests.local.made_up import MODEL, client_data, flat, message, rows_of, slope, start_vector

pytestmark = pytest.mark.float64

CLIP, B = 0.8, 8


def clipped_mean(rows, divisor):
    """Sum of the clipped gradients of single examples over the divisor, in NumPy."""
    slopes = np.array([slope(start_vector(), [row]) for row in rows])
    norms = np.linalg.norm(slopes, axis=1, keepdims=True)
    assert 0 < np.sum(norms > CLIP) < len(rows), "gradients on both sides of the clip"
    return np.sum(slopes * np.minimum(1, CLIP / norms), axis=0) / divisor


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


def test_noise_is_of_the_job_and_the_step_and_scales_with_the_clip():
    own, start = client_data(2), message().params

    def noise(key, k, noise, clip=CLIP):
        rows = own.x[:B], own.y[:B], jnp.ones(B), own.size, key, k
        one, quiet = (noised_gradient(MODEL, DPSGDOptions(clip, z), *rows)(start) for z in (noise, 0.0))
        return jax.flatten_util.ravel_pytree(jax.tree.map(jnp.subtract, one, quiet))[0]

    many = jax.jit(jax.vmap(lambda k: noise(jax.random.key(1), k, 2.0)))(jnp.arange(400))
    assert abs(float(many.std()) / (2.0 * CLIP / B) - 1) < 0.05 and abs(float(many.mean())) < 0.02
    assert float(jnp.abs(many[0] - many[1]).max()) > 1e-3


def test_local_training_takes_private_steps():
    make = {"optimizer": optax.sgd(0.1), "batch_size": 32}
    private = local_training(MODEL, **make, per_example=DPSGDOptions(1e6, 0.0))
    usual = local_training(MODEL, **make)
    job = (jax.random.key(0), message(), (), client_data(2), 3)
    uploads = [run_job(one, *job)[0] for one in (private, usual)]
    for one, other in zip(*map(jax.tree.leaves, uploads)):
        np.testing.assert_allclose(one, other, rtol=1e-9)


def test_weights_of_examples_count_for_targets_of_several_numbers_too():
    own = client_data(2)
    given = own._replace(y=jnp.stack([own.x.sum(1), own.x[:, 0]], axis=1), weight=jnp.linspace(0.5, 2.0, len(own.y)))
    model = MODEL._replace(loss=lambda outputs, y: jnp.sum(jnp.square(outputs[:, :2] - y), axis=1))
    make = {"optimizer": optax.sgd(0.1), "batch_size": 32}
    uploads = [
        run_job(local_training(model, **make, per_example=how), jax.random.key(0), message(), (), given, 2)[0]
        for how in (DPSGDOptions(1e6, 0.0), None)
    ]
    for one, other in zip(*map(jax.tree.leaves, uploads)):
        np.testing.assert_allclose(one, other, rtol=1e-9)


def test_what_would_not_protect_an_example_is_refused():
    sam = sharpness_aware(optax.sgd(0.1), lambda gradient, weights: gradient)
    with pytest.raises(ValueError, match="optimizer = 'one with 2 gradients a step': must be one that computes one"):
        local_training(MODEL, optimizer=sam, per_example=DPSGDOptions(1.0, 1.0))
    within = local_training(
        MODEL, optimizer=optax.chain(sam), per_example=DPSGDOptions(1.0, 1.0)
    )  # not seen from outside
    with pytest.raises(ValueError, match="optimizer = 'one with several gradients a step': must be one that computes"):
        run_job(within, jax.random.key(0), message(), (), client_data(), 1)
    batch_norm = MODEL._replace(train=lambda params, x, key, mask: (x, params))
    with pytest.raises(ValueError, match="privacy = 'dp_sgd': must be left out: the model has running statistics"):
        local_training(batch_norm, optimizer=optax.sgd(0.1), per_example=DPSGDOptions(1.0, 1.0))


def test_an_example_is_used_once_an_epoch():
    """Jobs of 5 steps: 32 examples are 4 steps of 8, so a second epoch begins; 5 examples are used in every step."""
    assert uses_of_an_example(np.array([5, 5, 4, 1]), np.array([32, 5, 32, 40]), 8).tolist() == [2, 5, 1, 1]
