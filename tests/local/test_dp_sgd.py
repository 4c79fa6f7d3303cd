"""DP-SGD: the gradient of a minibatch against float64 NumPy, example by example."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async.local import local_training, run_job, sharpness_aware
from fedjax_async.local.dp_sgd import DPSGDOptions, noised_gradient, uses_of_an_example
from tests.local.made_up import client_data, message, pool, rows_of, softmax_regression, start_arrays

CLIP, B = 0.8, 8


def clipped_mean(rows, divisor):
    """Sum of the clipped gradients of softmax regression over the divisor, in NumPy."""
    x, y, _ = pool()
    w, b = start_arrays()
    total, clipped = [np.zeros_like(w), np.zeros_like(b)], 0
    for i in rows:
        logits = x[i] @ w + b
        p = np.exp(logits - logits.max())
        p = p / p.sum() - np.eye(3)[y[i]]
        gradient = [np.outer(x[i], p), p]
        norm = np.sqrt(sum(np.sum(g**2) for g in gradient))
        clipped += norm > CLIP
        total = [t + g * min(1, CLIP / norm) for t, g in zip(total, gradient)]
    assert 0 < clipped < len(rows), "gradients on both sides of the clip"
    return [t / divisor for t in total]


@pytest.mark.float64
@pytest.mark.parametrize("client", [1, 2])  # of 5 examples, fewer than B, and of 32
def test_the_gradient_of_a_minibatch_is_the_mean_of_clipped_ones(client):
    own = client_data(client)
    rows = rows_of(client)[:B]
    mask = np.arange(B) < len(rows)
    padded = np.append(rows, [rows[0]] * (B - len(rows))).astype(int)
    given = (own.x[padded], own.y[padded], jnp.asarray(mask, float), own.size, jax.random.key(0), jnp.int32(3))
    model, start = softmax_regression(), message().params
    quiet = jax.jit(noised_gradient(model, DPSGDOptions(CLIP, 0.0), *given))(start)
    want = clipped_mean(rows, min(B, len(rows_of(client))))
    np.testing.assert_allclose(quiet["w"], want[0], rtol=1e-9)
    np.testing.assert_allclose(quiet["b"], want[1], rtol=1e-9)


@pytest.mark.float64
def test_noise_is_of_the_job_and_the_step_and_scales_with_the_clip():
    own, model, start = client_data(2), softmax_regression(), message().params

    def noise(key, k, noise, clip=CLIP):
        rows = own.x[:B], own.y[:B], jnp.ones(B), own.size, key, k
        one, quiet = (noised_gradient(model, DPSGDOptions(clip, z), *rows)(start) for z in (noise, 0.0))
        return jax.flatten_util.ravel_pytree(jax.tree.map(jnp.subtract, one, quiet))[0]

    many = jax.jit(jax.vmap(lambda k: noise(jax.random.key(1), k, 2.0)))(jnp.arange(400))
    assert abs(float(many.std()) / (2.0 * CLIP / B) - 1) < 0.05 and abs(float(many.mean())) < 0.02
    assert float(jnp.abs(many[0] - many[1]).max()) > 1e-3


@pytest.mark.float64
def test_local_training_takes_private_steps():
    make = {"optimizer": optax.sgd(0.1), "batch_size": 32}
    private = local_training(softmax_regression(), **make, per_example=DPSGDOptions(1e6, 0.0))
    usual = local_training(softmax_regression(), **make)
    job = (jax.random.key(0), message(), (), client_data(2), 3)
    uploads = [run_job(one, *job)[0] for one in (private, usual)]
    for one, other in zip(*map(jax.tree.leaves, uploads)):
        np.testing.assert_allclose(one, other, rtol=1e-9)


def test_what_would_not_protect_an_example_is_refused():
    model = softmax_regression()
    sam = sharpness_aware(optax.sgd(0.1), lambda gradient, weights: gradient)
    with pytest.raises(ValueError, match="optimizer = 'one with 2 gradients a step': must be one that computes one"):
        local_training(model, optimizer=sam, per_example=DPSGDOptions(1.0, 1.0))
    batch_norm = model._replace(train=lambda params, x, key, mask: (x, params))
    with pytest.raises(ValueError, match="privacy = 'dp_sgd': must be left out: the model has running statistics"):
        local_training(batch_norm, optimizer=optax.sgd(0.1), per_example=DPSGDOptions(1.0, 1.0))


def test_an_example_is_used_once_an_epoch():
    """Jobs of 5 steps: 32 examples are 4 steps of 8, so a second epoch begins; 5 examples are used in every step."""
    assert uses_of_an_example(np.array([5, 5, 4, 1]), np.array([32, 5, 32, 40]), 8).tolist() == [2, 5, 1, 1]
