"""2 x 2 pooling without ``reduce_window``, whose CPU loops take ten times longer; other windows go to flax."""

from __future__ import annotations

from flax import linen as nn
from jax import lax

from fedjax_async.models.tiles import max_of_four
from fedjax_async.types import Array

Pair = tuple[int, int]


def _four(x: Array) -> Array:
    """``[B, H, W, C] -> [4, B, H // 2, W // 2, C]``: the members of each 2 x 2 window in row-major order."""
    batch, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2]
    x = x.reshape(batch, height // 2, 2, width // 2, 2, channels)
    return x.transpose(2, 4, 0, 1, 3, 5).reshape(4, batch, height // 2, width // 2, channels)


def _is_two(window: Pair, strides: Pair | None, padding: str) -> bool:
    return tuple(window) == (2, 2) and tuple(strides or window) == (2, 2) and padding == "VALID"


def max_pool(x: Array, window: Pair = (2, 2), strides: Pair | None = None, padding: str = "VALID") -> Array:
    """Maximum over windows of ``[B, H, W, C]``; equal to ``flax.linen.max_pool`` in values and gradients.

    Ties: the whole gradient goes to the first of the equal entries in row-major order. ``strides=None`` means
    non-overlapping windows (flax's own default is 1).
    """
    if _is_two(window, strides, padding):
        return max_of_four(_four(x))
    return nn.max_pool(x, window, strides or window, padding)


def avg_pool(x: Array, window: Pair = (2, 2), strides: Pair | None = None, padding: str = "VALID") -> Array:
    """Mean over windows of ``[B, H, W, C]``; equal to ``flax.linen.avg_pool``. ``strides=None``: non-overlapping."""
    if _is_two(window, strides, padding):
        four = _four(x)
        return ((four[0] + four[1]) + (four[2] + four[3])) / 4
    # not nn.avg_pool, which divides by a NumPy integer: an error under strict dtype promotion
    total = nn.pooling.pool(x, 0.0, lax.add, window, strides or window, padding)
    return total / (window[0] * window[1])


POOLS = {"max": max_pool, "avg": avg_pool}
