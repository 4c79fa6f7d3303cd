"""Linear least squares, for problems whose targets are numbers."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from fedjax_async import check
from fedjax_async.models.wrap import check_shape
from fedjax_async.types import Array, Key, Model, Params


def linear(*, num_classes: int | None = None, input_shape: tuple[int, ...] = (10,)) -> Model:
    """Linear least squares without intercept, starting at zero: for number targets, such as those of quadratic.

    Params ``{"w": [D]}``, outputs ``x . w`` [B], loss ``(output - y)^2 / 2``.
    """
    check.require(num_classes is None, "num_classes", num_classes, "None: linear is for targets that are numbers")
    check_shape(input_shape)

    def init(key: Key) -> Params:
        return {"w": jnp.zeros(math.prod(input_shape))}

    def apply(params: Params, x: Array, key: Key | None = None) -> Array:
        w = params["w"]
        return jnp.matmul(x.reshape(len(x), -1).astype(w.dtype), w, precision=jax.lax.Precision.HIGHEST)

    def loss(outputs: Array, y: Array) -> Array:
        return 0.5 * jnp.square(outputs - y.astype(outputs.dtype))

    return Model(init, apply, loss)
