"""From raw rows to model inputs: pure functions that run inside the compiled step.

Each is a function at module level: the same object in every call, so that compiled programs are reused. Images
come as uint8 ``[B, H, W]`` or ``[B, H, W, C]`` and become float32 ``[B, H, W, C]``. The decoder of a data set scales
them to [0, 1] and standardises them with the mean and standard deviation of its training pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from fedjax_async.types import Array

MNIST_MEAN, MNIST_STD = 0.1307, 0.3081
FASHION_MNIST_MEAN, FASHION_MNIST_STD = 0.2860, 0.3530
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
CIFAR100_MEAN, CIFAR100_STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
TINY_IMAGENET_MEAN, TINY_IMAGENET_STD = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)
DIGITS_MEAN, DIGITS_STD = 0.3058, 0.3764


def as_is(x: Array) -> Array:
    """Return ``x`` unchanged: inputs that need no decoding."""
    return x


def unit_images(x: Array) -> Array:
    """uint8 images scaled to [0, 1] and not standardised; grey images get a channel axis."""
    grey = x[..., None] if x.ndim == 3 else x
    return grey.astype(jnp.float32) / 255.0


def usual(rows: np.ndarray) -> Callable[[Array], Array]:
    """The default decoder: ``unit_images`` for uint8 rows with two or three axes, else ``as_is``."""
    return unit_images if rows.dtype == np.uint8 and rows.ndim in (3, 4) else as_is


def mnist(x: Array) -> Array:
    """uint8 [B, 28, 28] -> float32 [B, 28, 28, 1]."""
    return (unit_images(x) - MNIST_MEAN) / MNIST_STD


def fashion_mnist(x: Array) -> Array:
    """uint8 [B, 28, 28] -> float32 [B, 28, 28, 1]."""
    return (unit_images(x) - FASHION_MNIST_MEAN) / FASHION_MNIST_STD


def cifar10(x: Array) -> Array:
    """uint8 [B, 32, 32, 3] -> float32 [B, 32, 32, 3], standardised channel by channel."""
    return _standardised(unit_images(x), CIFAR10_MEAN, CIFAR10_STD)


def cifar100(x: Array) -> Array:
    """uint8 [B, 32, 32, 3] -> float32 [B, 32, 32, 3], standardised channel by channel."""
    return _standardised(unit_images(x), CIFAR100_MEAN, CIFAR100_STD)


def tiny_imagenet(x: Array) -> Array:
    """uint8 [B, 64, 64, 3] -> float32 [B, 64, 64, 3], standardised channel by channel."""
    return _standardised(unit_images(x), TINY_IMAGENET_MEAN, TINY_IMAGENET_STD)


def _standardised(x: Array, mean: Sequence[float], std: Sequence[float]) -> Array:
    """(x - mean) / std of each channel of float32 [B, H, W, C]."""
    centre, spread = (jnp.array(values, jnp.float32).reshape(1, 1, 1, -1) for values in (mean, std))
    return (x - centre) / spread


def unit_digits(x: Array) -> Array:
    """uint8 [B, 8, 8] with values 0..16 -> float32 [B, 8, 8, 1], scaled to [0, 1] and not standardised."""
    return x[..., None].astype(jnp.float32) / 16.0


def digits(x: Array) -> Array:
    """uint8 [B, 8, 8] with values 0..16 -> float32 [B, 8, 8, 1]."""
    return (unit_digits(x) - DIGITS_MEAN) / DIGITS_STD


DECODERS: dict[str, Callable[[Array], Array]] = {
    f.__name__: f
    for f in (as_is, unit_images, unit_digits, mnist, fashion_mnist, cifar10, cifar100, tiny_imagenet, digits)
}
