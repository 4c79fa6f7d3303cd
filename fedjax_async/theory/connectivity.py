"""Mode connectivity: the control point of a quadratic Bezier curve of low loss between two trained models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_async.base import check, tree
from fedjax_async.geometry import bezier, line
from fedjax_async.types import Array, Key, Model, Params

BatchLoss = Callable[..., Array]  # loss(params, key, *data) -> float[], of examples drawn with the key


@lru_cache(maxsize=32)
def batch_loss(model: Model, batch_size: int = 100) -> BatchLoss:
    """``loss(params, key, x, y)``: the mean loss of ``batch_size`` rows drawn with replacement.

    A model with running statistics (BatchNorm) computes as in training: it normalises by the rows drawn, so the loss
    does not depend on its statistics. Other models compute as in evaluations, without dropout. The same arguments give
    the same function, so programs compiled for it are used again.
    """
    check.whole("batch_size", batch_size)

    def loss(params: Params, key: Key, x: Array, y: Array) -> Array:
        of_rows, of_dropout = jax.random.split(key)
        row = jax.random.randint(of_rows, (batch_size,), 0, len(y))
        if model.train is None:
            outputs = model.apply(params, x[row])
        else:
            outputs, _ = model.train(params, x[row], of_dropout, jnp.ones(batch_size, jnp.result_type(float)))
        return jnp.mean(model.loss(outputs, y[row]))

    return loss


def learned_control_point(
    loss: BatchLoss,
    start: Params,
    end: Params,
    key: Key,
    data: Sequence[object] = (),
    *,
    steps: int = 1000,
    lr: float = 1e-3,
) -> tuple[Params, np.ndarray]:
    """The control point phi of ``B(s) = (1 - s)^2 A + 2 s (1 - s) phi + s^2 E`` with low loss along the curve.

    phi begins at the midpoint of both ends, where the curve is the line. Each step draws ``s ~ U[0, 1]`` and takes a
    step of Adam on ``loss(B(s))`` with respect to phi. The ends stay where they are.

    Args:
      loss: ``loss(params, key, *data) -> float[]``, see :func:`batch_loss`.
      start, end: A and E, pytrees of the same structure and shapes.
      key: for s and for the examples.
      data: further arguments of ``loss``.
      steps: of Adam; with 0 steps phi is the midpoint.
      lr: Adam's learning rate.

    Returns: phi, and the loss drawn in each step, float[steps].

    Source: Garipov et al. (2018), section 3.3, with Adam in place of SGD as in AsyncManifold (2025), section 4.2.
    """
    check.whole("steps", steps, 0)
    check.real_positive("lr", lr)
    middle = line(start, end, 0.5)
    if steps == 0:
        return middle, np.zeros(0)
    control, losses = _learned(loss, (start, middle, end), jax.random.split(key, steps), tuple(data), lr)
    return control, np.asarray(losses)


@partial(jax.jit, static_argnames=("loss",))
def _learned(
    loss: BatchLoss, points: tuple[Params, ...], keys: Key, data: tuple[object, ...], lr: float
) -> tuple[Params, Array]:
    start, middle, end = points
    adam = optax.adam(lr)

    def step(carry: tuple[Params, optax.OptState], key: Key) -> tuple[tuple[Params, optax.OptState], Array]:
        control, state = carry
        of_position, of_batch = jax.random.split(key)
        s = jax.random.uniform(of_position)
        value, slope = jax.value_and_grad(lambda phi: loss(bezier((start, phi, end), s), of_batch, *data))(control)
        return tree.optimize(adam, slope, state, control), value

    (control, _), losses = jax.lax.scan(step, (middle, adam.init(middle)), keys)
    return control, losses
