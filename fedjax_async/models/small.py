"""Small models: linear and logistic regression, the multilayer perceptron, and small convolutional networks.

Initial weights, unless stated otherwise: He normal before a ReLU, LeCun normal in the output layer, biases zero.
``lowering`` forces one of ``lowerings.LOWERINGS`` for every convolution; ``None`` chooses by backend and shape
(``choice.py``).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedjax_async.base import check
from fedjax_async.models.choice import check_lowering
from fedjax_async.models.conv import Conv, ConvPool, he_normal
from fedjax_async.models.wrap import check_shape, from_flax
from fedjax_async.types import Array, Key, Model, Params


def linear(*, num_classes: int | None = None, input_shape: tuple[int, ...] = (10,)) -> Model:
    """Linear least squares without intercept, starting at zero: for targets that are numbers, such as quadratic's.

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
        allowed = "one number an example, [B]; for others give a Model of models.from_flax(net, loss=...)"
        check.require(y.ndim == 1, "targets of linear", f"shape {list(y.shape)}", allowed)
        return 0.5 * jnp.square(outputs - y.astype(outputs.dtype))

    return Model(init, apply, loss)


class Dense(nn.Module):
    """ReLU layers of the widths ``hidden``, then an output layer: ``[B, ...] -> [B, num_classes]``."""

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

    ``hidden`` is one width for all ``layers`` layers, or the width of each: ``(200, 100)`` or ``"200x100"``.
    """
    check.whole("num_classes", num_classes, 2)
    check.whole("layers", layers)
    check_shape(input_shape)
    widths = _widths(hidden, layers)
    return from_flax(Dense(widths, num_classes, nn.initializers.lecun_normal()), input_shape=input_shape)


def _widths(hidden: int | str | tuple[int, ...], layers: int) -> tuple[int, ...]:
    """The width of each hidden layer."""
    if isinstance(hidden, int):
        check.whole("hidden", hidden)
        return (hidden,) * layers
    parts = hidden.split("x") if isinstance(hidden, str) else list(hidden) if isinstance(hidden, (tuple, list)) else []
    ok = len(parts) > 0 and all(str(p).isdecimal() and int(p) > 0 for p in parts)
    check.require(ok, "hidden", hidden, "a width, or widths joined by x, such as 200x100")
    check.require(layers in (1, len(parts)), "layers", layers, f"{len(parts)}, the number of widths in hidden")
    return tuple(int(p) for p in parts)


ImageShape = tuple[int, int, int]


class LeNet(nn.Module):
    """Two 5 x 5 convolutions, each with ReLU and 2 x 2 pooling, then dense layers 120, 84, ``num_classes``."""

    num_classes: int
    channels: tuple[int, int] = (6, 16)
    paddings: tuple[str, str] = ("VALID", "VALID")
    pool: str = "max"
    use_bias: bool = True
    lowering: str | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for n, (features, padding) in enumerate(zip(self.channels, self.paddings), start=1):
            block = ConvPool(features, 5, padding, self.pool, self.use_bias, self.lowering, name=f"conv{n}")
            x = block(x)
        x = x.reshape(x.shape[0], -1)
        for n, width in enumerate((120, 84), start=1):
            x = nn.relu(nn.Dense(width, self.use_bias, kernel_init=he_normal, name=f"fc{n}")(x))
        return nn.Dense(self.num_classes, self.use_bias, name="output")(x)


class CNN(nn.Module):
    """Two 3 x 3 convolutions, one pool, one dense layer; dropout after the pool and after the dense layer."""

    num_classes: int
    lowering: str | None = None

    @nn.compact
    def __call__(self, x: Array, train: bool = False) -> Array:
        first = Conv(32, 3, padding="VALID", lowering=self.lowering, kernel_init=he_normal, name="conv1")
        x = ConvPool(64, 3, "VALID", lowering=self.lowering, name="conv2")(nn.relu(first(x)))
        x = nn.Dropout(0.25, deterministic=not train)(x)
        x = nn.relu(nn.Dense(128, kernel_init=he_normal, name="fc1")(x.reshape(x.shape[0], -1)))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(self.num_classes, name="output")(x)


def _checked(
    module: nn.Module, input_shape: ImageShape, num_classes: int, lowering: str | None, smallest: int
) -> Model:
    """Check the options, which would otherwise fail while flax traces the module; return its model."""
    check.whole("num_classes", num_classes, 2)
    check_shape(input_shape, rank=3)
    big_enough = min(input_shape[:2]) >= smallest
    check.require(big_enough, "input_shape", input_shape, f"at least {smallest} x {smallest} pixels")
    check_lowering(lowering)
    return from_flax(module, input_shape=input_shape)


def lenet5(*, num_classes: int = 10, input_shape: ImageShape = (28, 28, 1), lowering: str | None = None) -> Model:
    """LeNet-5 with ReLU and max-pooling: 61,706 parameters on 28 x 28 (LeCun et al., 1998).

    conv 5x5x6 (padded by 2), pool, conv 5x5x16, pool, dense 120, 84, classes. Deviation: the original has sigmoid
    units, learned subsampling and partial connections between feature maps.
    """
    net = LeNet(num_classes, paddings=("SAME", "VALID"), lowering=lowering)
    return _checked(net, input_shape, num_classes, lowering, 12)


def lenet5_orthofl(
    *, num_classes: int = 10, input_shape: ImageShape = (28, 28, 1), lowering: str | None = None
) -> Model:
    """OrthoFL's LeNet-5: no biases, no padding, average-pooling: 44,190 parameters on 28 x 28.

    5*5*6 + 5*5*6*16 + 256*120 + 120*84 + 84*10 = 150 + 2,400 + 30,720 + 10,080 + 840.
    """
    net = LeNet(num_classes, pool="avg", use_bias=False, lowering=lowering)
    return _checked(net, input_shape, num_classes, lowering, 16)


def lenet5_cifar(*, num_classes: int = 10, input_shape: ImageShape = (32, 32, 3), lowering: str | None = None) -> Model:
    """PushCen-ADFL's wide LeNet for CIFAR-10: conv 32 and 64 channels, 256,830 parameters on 32 x 32 x 3."""
    net = LeNet(num_classes, channels=(32, 64), lowering=lowering)
    return _checked(net, input_shape, num_classes, lowering, 16)


def cnn(*, num_classes: int = 10, input_shape: ImageShape = (32, 32, 3), lowering: str | None = None) -> Model:
    """CNN with conv 3x3x32, 3x3x64, max-pool, dense 128, dropout .25/.5: 1,626,442 parameters on 32 x 32 x 3.

    896 + 18,496 + (14*14*64)*128 + 128 + 1,290; on 28 x 28 x 1 it has 1,199,882.
    """
    return _checked(CNN(num_classes, lowering), input_shape, num_classes, lowering, 6)
