"""``Conv`` and ``ConvPool``: flax modules that use the fastest lowering for backend and shape; pooling.

``conv_general_dilated`` gives the lowerings to flax's own ``Conv`` in modules of the user's own.

A lowering is a way to compute a convolution (``lowerings.py``). 2 x 2 pooling avoids ``reduce_window``, which takes ten
times as long on a CPU; other windows use flax's pooling.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from fedjax_async.base import check, registry
from fedjax_async.base.notices import RunWarning
from fedjax_async.models.choice import default_lowering
from fedjax_async.models.lowerings import FUSED, GROUPED, LOWERINGS, out_size, pad_spatial
from fedjax_async.models.tiles import max_of_four
from fedjax_async.types import Array

Pair = tuple[int, int]
PerAxis = int | tuple[int, ...]
Padding = tuple[Pair, ...]


def _two_by_two(x: Array) -> Array:
    """``[B, H, W, C] -> [4, B, H // 2, W // 2, C]``: the members of each 2 x 2 window in row-major order."""
    batch, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2]
    x = x.reshape(batch, height // 2, 2, width // 2, 2, channels)
    return x.transpose(2, 4, 0, 1, 3, 5).reshape(4, batch, height // 2, width // 2, channels)


def _is_two_by_two(window: Pair, strides: Pair | None, padding: str) -> bool:
    return tuple(window) == (2, 2) and tuple(strides or window) == (2, 2) and padding == "VALID"


def max_pool(x: Array, window: Pair = (2, 2), strides: Pair | None = None, padding: str = "VALID") -> Array:
    """Maximum over windows of ``[B, H, W, C]``; equal to ``flax.linen.max_pool`` in values and gradients.

    With ties, the whole gradient goes to the first of the equal entries in row-major order. ``strides=None``:
    non-overlapping windows (flax's default is stride 1).
    """
    if _is_two_by_two(window, strides, padding):
        return max_of_four(_two_by_two(x))
    return nn.max_pool(x, window, strides or window, padding)


def avg_pool(x: Array, window: Pair = (2, 2), strides: Pair | None = None, padding: str = "VALID") -> Array:
    """Mean over windows of ``[B, H, W, C]``; equal to ``flax.linen.avg_pool``. ``strides=None``: non-overlapping."""
    if _is_two_by_two(window, strides, padding):
        members = _two_by_two(x)
        return ((members[0] + members[1]) + (members[2] + members[3])) / 4
    # not nn.avg_pool, which divides by a NumPy integer: an error under strict dtype promotion
    total = nn.pooling.pool(x, 0.0, lax.add, window, strides or window, padding)
    return total / (window[0] * window[1])


POOLS = {"max": max_pool, "avg": avg_pool}
he_normal = nn.initializers.he_normal()


class Conv(nn.Module):
    """Convolution of ``[B, H, W, C_in]`` or ``[B, L, C_in]``, equal to ``flax.linen.Conv`` in values and gradients.

    The parameters are those of flax: ``kernel [kh, kw, C_in / groups, C_out]``, for sequences
    ``[k, C_in / groups, C_out]``, and ``bias [C_out]``. ``lowering`` is a key of ``LOWERINGS`` (of ``GROUPED`` if
    ``feature_group_count > 1``), or ``None`` for ``default_lowering``.
    ``kernel_size`` and ``strides`` may be one integer for all axes. Computes in the parameters' dtype. Raises
    ``ValueError`` for an input smaller than the kernel.
    """

    features: int
    kernel_size: PerAxis = 3
    strides: PerAxis = 1
    padding: str | int | Padding = "SAME"
    use_bias: bool = True
    feature_group_count: int = 1
    lowering: str | None = None
    kernel_init: Callable[..., Array] = nn.initializers.lecun_normal()
    bias_init: Callable[..., Array] = nn.initializers.zeros_init()

    @nn.compact
    def __call__(self, x: Array) -> Array:
        axes = x.ndim - 2
        size, strides = _sizes(self.kernel_size, axes), _sizes(self.strides, axes)
        channels, groups = x.shape[-1], self.feature_group_count
        check.require(channels % groups == 0, "feature_group_count", groups, f"a divisor of {channels}")
        kernel = self.param("kernel", self.kernel_init, (*size, channels // groups, self.features), jnp.float32)
        x = x.astype(kernel.dtype)
        out = convolved(x, kernel, strides, self.padding, groups, self.lowering)
        if not self.use_bias:
            return out
        bias = self.param("bias", self.bias_init, (self.features,), jnp.float32)
        return out + bias.reshape(*(1,) * (axes + 1), -1)


def convolved(
    x: Array,
    kernel: Array,
    strides: tuple[int, ...],
    padding: str | int | Padding,
    groups: int = 1,
    lowering: str | None = None,
) -> Array:
    """The convolution of :class:`Conv`, without the bias."""
    axes, size = x.ndim - 2, kernel.shape[:-2]
    pairs = _padding_pairs(padding, x.shape[1:-1], size, strides)
    _check_size(x.shape[1:-1], pairs, size)
    if axes == 1:  # a sequence is an image one pixel wide
        wide = x[:, :, None], kernel[:, None], (*strides, 1), (*pairs, (0, 0))
        return _run(*wide, groups, lowering)[:, :, 0]
    return _run(x, kernel, strides, pairs, groups, lowering)


def _run(
    x: Array, kernel: Array, strides: tuple[int, ...], padding: Padding, groups: int, lowering: str | None
) -> Array:
    if groups == 1:
        outputs = _outputs(x, kernel, strides, padding)
        name = lowering or default_lowering(kernel.shape, strides=strides, outputs=outputs)
        return registry.find("lowering", LOWERINGS, name)(x, kernel, strides, padding)
    depthwise = groups == x.shape[-1] == kernel.shape[-1]
    name = lowering or default_lowering(kernel.shape, groups=groups, depthwise=depthwise)
    return registry.find("lowering of groups", GROUPED, name)(x, kernel, strides, padding, groups)


def conv_general_dilated(
    lhs: Array,
    rhs: Array,
    window_strides: tuple[int, ...],
    padding: str | Padding,
    lhs_dilation: tuple[int, ...] | None = None,
    rhs_dilation: tuple[int, ...] | None = None,
    dimension_numbers: tuple[str, str, str] | lax.ConvDimensionNumbers | None = None,
    feature_group_count: int = 1,
    **options: Any,
) -> Array:
    """``jax.lax.conv_general_dilated`` as flax's ``Conv`` calls it, by the fastest lowering.

    XLA's own is used, and on a CPU a warning says that it is slow there, for dilated or three-dimensional kernels and
    padding other than ``"SAME"``, ``"VALID"`` or pairs.
    """
    dilated = any(step != 1 for steps in (lhs_dilation, rhs_dilation) for step in steps or ())
    if not dilated and lhs.ndim in (3, 4) and not (isinstance(padding, str) and padding not in ("SAME", "VALID")):
        return convolved(lhs, rhs, tuple(window_strides), padding, feature_group_count)
    if jax.default_backend() == "cpu":
        warnings.warn(
            "model: a dilated or three-dimensional convolution goes through XLA's own, slow in a loop on a CPU",
            RunWarning,
            stacklevel=2,
        )
    return lax.conv_general_dilated(
        lhs, rhs, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count, **options
    )


class ConvPool(nn.Module):
    """``pool(relu(Conv(x)))`` with stride 1 and 2 x 2 pooling (``"max"`` or ``"avg"``), fused if the lowering can.

    It has the parameters of ``Conv``. A lowering in ``lowerings.FUSED`` does all three in one pass; any other runs
    convolution, ReLU and pool one after the other.
    """

    features: int
    kernel_size: int | Pair = 5
    padding: str | int | Padding = "VALID"
    pool: str = "max"
    use_bias: bool = True
    lowering: str | None = None
    kernel_init: Callable[..., Array] = he_normal
    bias_init: Callable[..., Array] = nn.initializers.zeros_init()

    @nn.compact
    def __call__(self, x: Array) -> Array:
        size = _sizes(self.kernel_size, 2)
        registry.find("pool", POOLS, self.pool)
        kernel = self.param("kernel", self.kernel_init, (*size, x.shape[-1], self.features), jnp.float32)
        bias = self.param("bias", self.bias_init, (self.features,), jnp.float32) if self.use_bias else None
        return conv_pool(x.astype(kernel.dtype), kernel, bias, self.padding, self.pool, self.lowering)


def conv_pool(
    x: Array, kernel: Array, bias: Array | None, padding: str | int | Padding, pool: str, lowering: str | None = None
) -> Array:
    """The outputs of :class:`ConvPool`."""
    size = kernel.shape[:2]
    top, left = _padding_pairs(padding, x.shape[1:3], size, (1, 1))
    pairs = (top, left)
    _check_size(x.shape[1:3], pairs, (size[0] + 1, size[1] + 1))
    name = lowering or default_lowering(kernel.shape, outputs=_outputs(x, kernel, (1, 1), pairs))
    lower = registry.find("lowering", LOWERINGS, name)
    if name in FUSED:
        return FUSED[name](pad_spatial(x, pairs), kernel, bias, pool)
    out = lower(x, kernel, (1, 1), pairs)
    return POOLS[pool](nn.relu(out if bias is None else out + bias.reshape(1, 1, 1, -1)))


def _outputs(x: Array, kernel: Array, strides: tuple[int, ...], padding: Padding) -> Pair:
    """Rows and columns of a convolution's outputs."""
    sizes = zip(x.shape[1:3], kernel.shape[:2], strides, padding)
    rows, columns = (out_size(n + sum(pads), k, s) for n, k, s, pads in sizes)
    return rows, columns


def _sizes(value: PerAxis, axes: int) -> tuple[int, ...]:
    """One whole number for each axis."""
    if isinstance(value, int):
        return (value,) * axes
    check.require(len(value) == axes, "kernel_size or strides", value, f"one number, or {axes} for this input")
    return tuple(int(n) for n in value)


def _padding_pairs(
    padding: str | int | Padding, size: tuple[int, ...], kernel: tuple[int, ...], strides: tuple[int, ...]
) -> Padding:
    """Convert padding (``"SAME"``, ``"VALID"``, an integer or pairs) to ``((top, bottom), (left, right))``."""
    if isinstance(padding, str):
        check.one_of("padding", padding, ("SAME", "VALID"))
        return tuple(lax.padtype_to_pads(size, kernel, strides, padding))
    pairs = ((padding, padding),) * len(size) if isinstance(padding, int) else padding
    return tuple((int(low), int(high)) for low, high in pairs)


def _check_size(size: tuple[int, ...], padding: Padding, needed: tuple[int, ...]) -> None:
    """Raise ``ValueError`` for an input below the ``needed`` size: the result would be empty."""
    have = tuple(n + sum(p) for n, p in zip(size, padding))
    enough = all(n >= least for n, least in zip(have, needed))
    check.require(enough, "input size", tuple(size), f"at least {needed} after padding {padding}")
