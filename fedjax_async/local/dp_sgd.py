"""DP-SGD: the gradient of each example is clipped, and the sum of a minibatch gets noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from fedjax_async.base import check
from fedjax_async.local.job import gradients_a_step, noise_key
from fedjax_async.types import Array, Key, Model, Number, Params


class DPSGDOptions(NamedTuple):
    """Options of DP-SGD."""

    clip: Number  # C > 0, bound of the norm of an example's gradient
    noise: Number  # z >= 0, standard deviation of the noise of a minibatch's sum, as a multiple of C


def require_usable(model: Model, optimizer: optax.GradientTransformation) -> None:
    """Raise ``ValueError`` if with this model or optimiser the noise would not protect an example."""
    allowed = "left out: the model has running statistics (BatchNorm), which mix the examples of a batch"
    check.require(model.train is None, "privacy", "dp_sgd", allowed)
    require_one_gradient(gradients_a_step(optimizer))


def require_one_gradient(count: int | str) -> None:
    """Raise ``ValueError`` unless an optimiser computes one gradient a step."""
    allowed = "one that computes one gradient a step, with dp_sgd: the noise is drawn once"
    check.require(count == 1, "optimizer", f"one with {count} gradients a step", allowed)


def noised_gradient(
    model: Model, per_example: DPSGDOptions, x: Array, y: Array, factor: Array, size: Array, job_key: Key, k: Array
) -> Callable[[Params], Params]:
    """``gradient(weights)``: ``(sum_i clip_C(g_i) + z C N(0, I)) / min(B, n)`` of the B rows of a minibatch.

    Args:
      factor: multiplies each row's loss, 0 for rows that are padding; float[B].
      size: n, the examples of the client; int32[]. A short last batch has the same divisor as the others.

    Source: Abadi et al. (2016), Algorithm 1, by ``optax.contrib.differentially_private_aggregate``.
    """
    count = len(factor)

    def loss(weights: Params, x: Array, y: Array, factor: Array, key: Key) -> Array:
        found = model.loss(model.apply(weights, x[None], key), y[None])[0]
        return found * factor.astype(found.dtype)

    def gradient(weights: Params) -> Params:
        keys = jax.random.split(jax.random.fold_in(job_key, k), count)
        each = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0, 0, 0))(weights, x, y, factor, keys)
        real = jnp.result_type(*jax.tree.leaves(each))
        aggregate = contrib.differentially_private_aggregate(
            jnp.asarray(per_example.clip, real), jnp.asarray(per_example.noise, real), key=noise_key(job_key, k)
        )
        with jax.numpy_dtype_promotion("standard"):
            mean, _ = aggregate.update(each, aggregate.init(weights))
        share = count / jnp.minimum(size, count).astype(real)
        return jax.tree.map(lambda leaf, w: (leaf * share.astype(leaf.dtype)).astype(w.dtype), mean, weights)

    return gradient


def uses_of_an_example(
    steps: np.ndarray, examples: np.ndarray, batch_size: int, whole_batches: bool = False
) -> np.ndarray:
    """How often a job computes the gradient of an example, at most: once an epoch; arguments and result int64[J].

    ``whole_batches``: whether the last partial batch of an epoch is left out.
    """
    of_client = np.asarray(examples, np.int64)
    per_epoch = np.maximum(1, of_client // batch_size) if whole_batches else -(-of_client // batch_size)
    return -(-np.asarray(steps, np.int64) // per_epoch)
