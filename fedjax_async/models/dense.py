"""Dense models: linear and logistic regression, and the multilayer perceptron."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedjax_async import check
from fedjax_async.models.wrap import check_shape, from_flax
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


he_normal = nn.initializers.he_normal()


class Dense(nn.Module):
    """``hidden`` ReLU layers and an output layer."""

    hidden: tuple[int, ...]
    num_classes: int
    output_init: nn.initializers.Initializer

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = x.reshape(x.shape[0], -1)
        for n, width in enumerate(self.hidden, start=1):
            x = nn.relu(nn.Dense(width, kernel_init=he_normal, name=f"fc{n}")(x))
        return nn.Dense(self.num_classes, kernel_init=self.output_init, name="output")(x)


def logistic(*, num_classes: int = 10, input_shape: tuple[int, ...] = (28, 28, 1)) -> Model:
    """Multinomial logistic regression (784 x 10 + 10 = 7,850 parameters on 28 x 28), starting at zero."""
    check.whole("num_classes", num_classes, 2)
    check_shape(input_shape)
    return from_flax(Dense((), num_classes, nn.initializers.zeros_init()), input_shape=input_shape)


def mlp(
    *,
    hidden: int | str | tuple[int, ...] = 64,
    layers: int = 1,
    num_classes: int = 10,
    input_shape: tuple[int, ...] = (28, 28, 1),
) -> Model:
    """Multilayer perceptron with ReLU (hidden=64, layers=1; or hidden=200x100 for unequal widths).

    ``hidden`` is one width used for every one of ``layers`` layers, or all widths: ``(200, 100)`` or ``"200x100"``.
    Initial weights: He normal, the output layer LeCun normal; biases zero.
    """
    check.whole("num_classes", num_classes, 2)
    check.whole("layers", layers)
    check_shape(input_shape)
    widths = _widths(hidden, layers)
    return from_flax(Dense(widths, num_classes, nn.initializers.lecun_normal()), input_shape=input_shape)


def _widths(hidden: int | str | tuple[int, ...], layers: int) -> tuple[int, ...]:
    """One width for each hidden layer."""
    if isinstance(hidden, int):
        check.whole("hidden", hidden)
        return (hidden,) * layers
    parts = hidden.split("x") if isinstance(hidden, str) else list(hidden) if isinstance(hidden, (tuple, list)) else []
    ok = len(parts) > 0 and all(str(p).isdigit() and int(p) > 0 for p in parts)
    check.require(ok, "hidden", hidden, "a width, or widths joined by x, such as 200x100")
    check.require(layers in (1, len(parts)), "layers", layers, f"{len(parts)}, the number of widths in hidden")
    return tuple(int(p) for p in parts)
