"""Layers of PyTorch in JAX that need more than their arguments: a layout, a mask of rows, a key.

PyTorch's images are [B, C, H, W]; our convolutions, pools and BatchNorm take [B, H, W, C]. ``ChannelsLast`` holds an
array whose channels are stored last, so that a chain of such layers moves them once, at its ends. Functions in
``LAYERS`` take and return either form, functions in ``GIVEN`` have the ``Context`` of the batch as first argument.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from fedjax_async.base import check
from fedjax_async.models.conv import Padding, avg_pool, conv_general_dilated, conv_pool, convolved, max_pool
from fedjax_async.models.norm import batch_normalised, precise, standardised
from fedjax_async.models.torch_ops import Shape, Size, Vec
from fedjax_async.types import Array, Key


class ChannelsLast:
    """A tensor [B, C, ...] of PyTorch, held as ``data`` [B, ..., C]."""

    def __init__(self, data: Array) -> None:
        self.data = data

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.data.shape[0], self.data.shape[-1], *self.data.shape[1:-1])

    @property
    def size(self) -> int:
        return int(self.data.size)

    def first(self) -> Array:
        return jnp.moveaxis(self.data, -1, 1)


class Convolved(ChannelsLast):
    """A convolution [B, H, W, C] that waits for the ReLU and the 2 x 2 maximum behind it, to do all in one pass.

    ``relu`` and ``pooled``: which of them are there already; their order does not matter. Without both, ``data``
    computes one after the other.
    """

    def __init__(self, x: Array, kernel: Array, bias: Array | None, padding: Padding, relu: bool, pooled: bool) -> None:
        self.given, self.relu, self.pooled = (x, kernel, bias, padding), relu, pooled

    def then(self, *, relu: bool = False, pooled: bool = False) -> Convolved:
        return Convolved(*self.given, self.relu or relu, self.pooled or pooled)

    @functools.cached_property
    def data(self) -> Array:  # type: ignore[override]
        if self.relu and self.pooled:
            return conv_pool(*self.given, "max")
        x, kernel, bias, padding = self.given
        out = convolved(x, kernel, (1, 1), padding)
        out = out if bias is None else out + bias.reshape(1, 1, 1, -1)
        return jax.nn.relu(out) if self.relu else max_pool(out) if self.pooled else out


Tensor = Array | ChannelsLast


def _relu(x: Tensor) -> Tensor:
    if isinstance(x, Convolved):
        return x.then(relu=True)
    return ChannelsLast(jax.nn.relu(x.data)) if isinstance(x, ChannelsLast) else jax.nn.relu(x)


def channels_last(x: Tensor) -> Array:
    """``[B, ..., C]``."""
    return x.data if isinstance(x, ChannelsLast) else jnp.moveaxis(x, 1, -1)


class Context:
    """What the layers of one forward pass share.

    Attributes:
      statistics: the running statistics by name; replaced in training.
      names: of the running mean and variance of the present layer, if it has any.
      layer: the present layer, for messages.
    """

    def __init__(self, key: Key | None, mask: Array | None, dtype: DTypeLike, statistics: dict[str, Array]) -> None:
        self.key, self.mask, self.dtype, self.statistics = key, mask, dtype, dict(statistics)
        self.names: tuple[str, ...] = ()
        self.layer, self._drawn = "", 0

    def next_key(self) -> Key:
        """A key for the next layer that draws random numbers."""
        self._drawn += 1
        check.require(self.key is not None, f"dropout of {self.layer}", "active in evaluation", "off without a key")
        found: Key = jax.random.fold_in(self.key, self._drawn)  # type: ignore[arg-type]
        return found

    def dtype_of(self, kind: object) -> DTypeLike:
        """JAX's dtype for one of PyTorch's: floats of 32 and 64 bits are those of the parameters."""
        name = str(kind).removeprefix("torch.")
        if kind is None or name in ("float32", "float64"):
            return self.dtype
        return jnp.result_type(int) if name in ("int64", "int32") else jnp.dtype(name)


# --- convolutions and pools -------------------------------------------------------------------------


def _per_axis(value: Size, axes: int) -> tuple[int, ...]:
    sizes = (value,) if isinstance(value, int) else tuple(value)
    return sizes * axes if len(sizes) == 1 else sizes


def _prelu(x: Tensor, slope: Array) -> Tensor:
    """``slope`` [C] or [1], of the second axis."""
    data = channels_last(x)
    out = jnp.where(data > 0, data, slope.reshape(*(1,) * (data.ndim - 1), -1) * data)
    return ChannelsLast(out) if data.ndim > 2 else out


def _conv(
    axes: int,
    x: Tensor,
    weight: Array,
    bias: Array | None = None,
    stride: Size = 1,
    padding: int | str | Shape = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> ChannelsLast:
    """``weight`` [out, in / groups, *window]."""
    kernel = jnp.permute_dims(weight, (*range(2, axes + 2), 1, 0))
    strides, steps = _per_axis(stride, axes), _per_axis(dilation, axes)
    sizes = [step * (n - 1) for n, step in zip(kernel.shape, steps)]
    if isinstance(padding, str):
        pairs = tuple((n // 2, n - n // 2) if padding == "same" else (0, 0) for n in sizes)
    else:
        pairs = tuple((n, n) for n in _per_axis(padding, axes))
    data = channels_last(x).astype(kernel.dtype)
    if axes == 2 and groups == 1 and {*strides, *steps} == {1}:
        return Convolved(data, kernel, bias, pairs, relu=False, pooled=False)
    letters = "HW"[:axes]
    numbers = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
    options = (None, steps, numbers, groups) if any(step > 1 for step in steps) else (None, None, numbers, groups)
    out = conv_general_dilated(data, kernel, strides, pairs, *options)
    return ChannelsLast(out if bias is None else out + bias.reshape(*(1,) * (axes + 1), -1))


def _windows(
    x: Array, window: Size, stride: Size | None, padding: Size, ceil: bool
) -> tuple[tuple[int, ...], tuple[int, ...], str | tuple[tuple[int, int], ...]]:
    """Window, strides and pairs of padding for every axis of ``x`` [B, ..., C]."""
    axes = x.ndim - 2
    size = _per_axis(window, axes)
    strides = size if stride is None or stride == [] else _per_axis(stride, axes)
    pairs = []
    for n, k, s, p in zip(x.shape[1:-1], size, strides, _per_axis(padding, axes)):
        over = (n + 2 * p - k) % s
        more = s - over if ceil and over and (n + 2 * p - k) // s * s + s < n + p else 0
        pairs.append((p, p + more))
    return size, strides, tuple(pairs) if any(map(sum, pairs)) else "VALID"


def _max_pool(
    x: Tensor, window: Size, stride: Size | None = None, padding: Size = 0, dilation: Size = 1, ceil: bool = False
) -> ChannelsLast:
    check.require(set(_per_axis(dilation, 1)) == {1}, "dilation of max_pool", dilation, "1")
    halves = all(set(_per_axis(one, 1)) == {2} for one in (window, stride or window))
    if isinstance(x, Convolved) and not x.pooled and halves and set(_per_axis(padding, 1)) == {0} and not ceil:
        return x.then(pooled=True)
    data = channels_last(x)
    return ChannelsLast(max_pool(data, *_windows(data, window, stride, padding, ceil)))  # type: ignore[arg-type]


def _avg_pool(
    x: Tensor,
    window: Size,
    stride: Size | None = None,
    padding: Size = 0,
    ceil: bool = False,
    with_padding: bool = True,
    divisor: int | None = None,
) -> ChannelsLast:
    check.require(not ceil and divisor is None, "avg_pool", "ceil_mode or divisor_override", "without them")
    data = channels_last(x)
    size, strides, pairs = _windows(data, window, stride, padding, ceil)
    if len(size) == 1:  # a sequence is an image one pixel wide
        data, size, strides = data[:, :, None], (*size, 1), (*strides, 1)
        pairs = pairs if pairs == "VALID" else (*pairs, (0, 0))
    out = avg_pool(data, size, strides, pairs)  # type: ignore[arg-type]
    if pairs != "VALID" and not with_padding:
        out = out / avg_pool(jnp.ones_like(data[:1]), size, strides, pairs)  # type: ignore[arg-type]
    return ChannelsLast(out if len(x.shape) > 3 else out[:, :, 0])


def _bins(size: int, bins: int) -> np.ndarray:
    """The weights [bins, size] of means over bins that begin at ``floor(i size / bins)`` and may overlap."""
    weights = np.zeros((bins, size), np.float32)
    for i in range(bins):
        low, high = i * size // bins, -(-(i + 1) * size // bins)
        weights[i, low:high] = 1 / (high - low)
    return weights


def _adaptive_avg_pool(x: Tensor, sizes: Size) -> ChannelsLast:
    data = channels_last(x)
    wanted = _per_axis(sizes, data.ndim - 2)
    for axis, given in enumerate(wanted, start=1):
        size = data.shape[axis]
        bins = size if given is None else given
        if size % bins == 0:
            data = data.reshape(*data.shape[:axis], bins, size // bins, *data.shape[axis + 1 :]).mean(axis=axis + 1)
        else:
            means = jnp.asarray(_bins(size, bins), data.dtype)
            data = jnp.moveaxis(jnp.tensordot(data, means, ((axis,), (1,))), -1, axis)
    return ChannelsLast(data)


def _adaptive_max_pool(x: Tensor, sizes: Size) -> tuple[ChannelsLast, None]:
    """As one pool, where the sizes divide those of the input; the first of equal entries gets the gradient."""
    data = channels_last(x)
    wanted = _per_axis(sizes, data.ndim - 2)
    fits = all(size % bins == 0 for size, bins in zip(data.shape[1:-1], wanted))
    check.require(fits, "output of adaptive_max_pool", wanted, f"divisors of {data.shape[1:-1]}")
    return (_max_pool(x, [size // bins for size, bins in zip(data.shape[1:-1], wanted)]), None)  # and no indices


# --- normalisation ----------------------------------------------------------------------------------


def _batch_norm(
    context: Context,
    x: Tensor,
    scale: Array | None,
    bias: Array | None,
    mean: Array | None,
    var: Array | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool = False,
) -> Tensor:
    """In float32 or better. Training: moments of used rows; ``running = (1 - momentum) running + momentum batch``."""
    spatial = len(x.shape) > 2
    data = channels_last(x) if spatial or isinstance(x, ChannelsLast) else x
    given, data = data.dtype, precise(data)
    affine = (1 if scale is None else scale, 0 if bias is None else bias)
    scale, bias = (jnp.full(data.shape[-1], one, data.dtype) for one in affine)
    if training:
        mask = None if context.mask is None else context.mask.astype(data.dtype)
        if mask is not None:
            allowed = f"{len(mask)}, the examples of the batch: layers before it must keep the batch as the first axis"
            check.require(len(data) == len(mask), "first axis of BatchNorm's input", len(data), allowed)
        out, (centre, spread, count) = batch_normalised(eps, data, mask, scale, bias)
        batch = (centre, spread * (count / jnp.maximum(count - 1, 1)))
        for name, new in zip(context.names, batch):
            old = context.statistics[name]
            context.statistics[name] = (1 - momentum) * old + momentum * lax.stop_gradient(new).astype(old.dtype)
    else:
        moments = jnp.asarray(mean, data.dtype), jnp.maximum(jnp.asarray(var, data.dtype), 0)
        out = standardised(data, *moments, scale, bias, eps)
    return ChannelsLast(out.astype(given)) if spatial else out.astype(given)


def _group_norm(
    x: Tensor,
    groups: int,
    scale: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    cudnn: bool = False,
) -> ChannelsLast:
    data = channels_last(x)
    shape, channels = data.shape, data.shape[-1]
    data = data.reshape(shape[0], -1, groups, channels // groups)
    data = data - data.mean(axis=(1, 3), keepdims=True)
    data = data * lax.rsqrt(jnp.square(data).mean(axis=(1, 3), keepdims=True) + eps)
    data, expanded = data.reshape(shape), (*(1,) * (len(shape) - 1), -1)
    data = data if scale is None else data * scale.reshape(expanded)
    return ChannelsLast(data if bias is None else data + bias.reshape(expanded))


def _instance_norm(
    x: Tensor, scale: Vec, bias: Vec, mean: Vec, var: Vec, own: bool, momentum: float, eps: float, cudnn: bool = False
) -> ChannelsLast:
    none = mean is None and own
    check.require(none, "running statistics of InstanceNorm", "kept", "none (track_running_stats=False)")
    return _group_norm(x, x.shape[1], scale, bias, eps)


# --- dropout and attention --------------------------------------------------------------------------


def _dropped(context: Context, x: Array, rate: float, shape: Sequence[int]) -> Array:
    keep = jax.random.bernoulli(context.next_key(), 1 - rate, tuple(shape))
    return jnp.where(keep, x / (1 - rate), 0) if rate < 1 else jnp.zeros_like(x)


def _dropout(context: Context, x: Tensor, rate: float, training: bool) -> Tensor:
    if not training or rate == 0:
        return x
    if isinstance(x, ChannelsLast):
        return ChannelsLast(_dropped(context, x.data, rate, x.data.shape))
    return _dropped(context, x, rate, x.shape)


def _feature_dropout(context: Context, x: Tensor, rate: float, training: bool) -> Tensor:
    """Whole channels."""
    if not training or rate == 0:
        return x
    data = channels_last(x)
    return ChannelsLast(_dropped(context, data, rate, (len(data), *(1,) * (data.ndim - 2), data.shape[-1])))


def _attention(
    context: Context,
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    rate: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Array:
    """``softmax(q k^T scale + mask) v``; a mask of booleans is true where a position is seen."""
    check.require(not enable_gqa, "enable_gqa", enable_gqa, "false")
    scores = jnp.matmul(q, jnp.swapaxes(k, -1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool)) if causal else mask
    if mask is not None:
        mask = mask.reshape(*(1,) * (scores.ndim - mask.ndim), *mask.shape)
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == jnp.bool_ else scores + mask
        blind = jnp.max(scores, axis=-1, keepdims=True) == -jnp.inf  # a position that sees none: PyTorch gives 0
        scores = jnp.where(blind, 0, scores)
    weights = jax.nn.softmax(scores, axis=-1)
    weights = weights if mask is None else jnp.where(blind, 0, weights)
    return jnp.matmul(weights if not rate else _dropped(context, weights, rate, weights.shape), v)


def _to(context: Context, x: Array, *given: object, **named: object) -> Array:
    """A dtype, or another tensor, among the arguments of ``x.to``; devices and layouts do not count."""
    for one in (*given, named.get("dtype")):
        if type(one).__name__ == "dtype":
            return x.astype(context.dtype_of(one))
        if isinstance(one, jax.Array):
            return x.astype(one.dtype)
    return x


def _filled(
    value: float | None, context: Context, shape: Shape, *given: float, dtype: object = None, **_: object
) -> Array:
    value = given[0] if value is None else value
    # full(shape, 3) is of whole numbers, full(shape, True) not
    plain = type(value) if dtype is None and given else float
    kind = jnp.result_type(plain) if plain in (int, bool) else context.dtype_of(dtype)
    return jnp.full(tuple(shape), value, kind)


def _new(value: float, context: Context, x: Array, shape: Shape, *, dtype: object = None, **_: object) -> Array:
    return jnp.full(tuple(shape), value, x.dtype if dtype is None else context.dtype_of(dtype))


def _alike(value: float | None, context: Context, x: Array, *given: float, dtype: object = None, **_: object) -> Array:
    value = given[0] if value is None else value
    return jnp.full(x.shape, value, x.dtype if dtype is None else context.dtype_of(dtype))


def _arange(context: Context, *bounds: float, dtype: object = None, **_: object) -> Array:
    whole = all(isinstance(one, int) for one in bounds)
    start, end, step = bounds if len(bounds) == 3 else (*bounds, 1) if len(bounds) == 2 else (0, *bounds, 1)
    kind = jnp.result_type(int) if whole and dtype is None else context.dtype_of(dtype)
    return jnp.arange(start, end, step, dtype=kind)


# Take and return tensors in either layout.
LAYERS: dict[str, Callable[..., object]] = {
    "relu": _relu, "prelu": _prelu, "conv1d": partial(_conv, 1), "conv2d": partial(_conv, 2), "max_pool1d": _max_pool,
    "max_pool2d": _max_pool, "avg_pool1d": _avg_pool, "avg_pool2d": _avg_pool,
    "adaptive_avg_pool1d": _adaptive_avg_pool, "adaptive_avg_pool2d": _adaptive_avg_pool,
    "adaptive_max_pool2d": _adaptive_max_pool, "group_norm": _group_norm, "instance_norm": _instance_norm,
    "sym_size": lambda x, dim: x.shape[dim], "sym_numel": lambda x: x.size,
}  # fmt: skip
# Take the Context too, and tensors in either layout.
GIVEN: dict[str, Callable[..., object]] = {
    "batch_norm": _batch_norm, "dropout": _dropout, "feature_dropout": _feature_dropout,
}  # fmt: skip
# Take the Context and plain arrays.
GIVEN_ARRAYS: dict[str, Callable[..., object]] = {
    "scaled_dot_product_attention": _attention, "to": _to, "_to_copy": _to, "type_as": _to,
    "zeros": partial(_filled, 0), "ones": partial(_filled, 1), "full": partial(_filled, None),
    "zeros_like": partial(_alike, 0), "ones_like": partial(_alike, 1), "full_like": partial(_alike, None),
    "new_zeros": partial(_new, 0), "new_ones": partial(_new, 1), "arange": _arange,
    "one_hot": lambda context, x, classes: jax.nn.one_hot(x, classes, dtype=jnp.result_type(int)),
}  # fmt: skip
