"""Operations of PyTorch in JAX: what ``torch_modules.py`` finds in the exported graph of a ``torch.nn.Module``.

``OPS`` maps the name of an operation to a function of the arguments that PyTorch's schema lists, with arrays for
tensors: ``"add"`` for all overloads of ``aten.add``, ``"max.dim"`` for one of them. Operations without an entry are
refused by name, so a new one is a line here. Gradients are JAX's; where a function has a corner, the gradient there is
PyTorch's. Layers, which need a layout, a mask or a key, are in ``torch_layers.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_async.base import check
from fedjax_async.types import Array

Shape = Sequence[int]
Dims = int | Shape | None  # None: all
Operand = Array | float
Size = int | Shape
Vec = Array | None  # [C]; None: a layer without it


def promoted(*operands: object) -> list[Any]:
    """Operands in one dtype and with one number of axes, as PyTorch broadcasts them; numbers of Python stay."""
    arrays = [one for one in operands if isinstance(one, jax.Array)]
    kinds = {one.dtype for one in arrays}
    floats = [kind for kind in kinds if jnp.issubdtype(kind, jnp.floating)]
    whole = [kind for kind in kinds if kind != jnp.bool_]
    dtype = max(floats or whole or kinds, key=lambda kind: kind.itemsize)
    if not floats and any(isinstance(one, float) for one in operands):
        dtype = jnp.result_type(float)
    if dtype == jnp.bool_ and any(type(one) is int for one in operands):
        dtype = jnp.result_type(int)
    rank = max(one.ndim for one in arrays)
    return [
        one.astype(dtype).reshape(*(1,) * (rank - one.ndim), *one.shape) if isinstance(one, jax.Array) else one
        for one in operands
    ]


def _binary(function: Callable[..., Array]) -> Callable[..., Array]:
    """Of two operands, tensors or numbers; numbers alone are sizes."""

    def run(a: Operand, b: Operand) -> Array:
        plain = not isinstance(a, jax.Array) and not isinstance(b, jax.Array)
        return function(a, b) if plain else function(*promoted(a, b))

    return run


def _float(x: Array) -> Array:
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.result_type(float))


def _add(a: Operand, b: Operand, alpha: float = 1) -> Array:
    return _binary(jnp.add)(a, b if alpha == 1 else b * alpha)


def _sub(a: Operand, b: Operand, alpha: float = 1) -> Array:
    return _binary(jnp.subtract)(a, b if alpha == 1 else b * alpha)


def _div(a: Operand, b: Operand, rounding_mode: str | None = None) -> Array:
    if rounding_mode is None:
        return _binary(jnp.true_divide)(a, b)
    check.require(rounding_mode == "floor", "rounding_mode", rounding_mode, "left out, or floor")
    return _binary(jnp.floor_divide)(a, b)


def _clamp(x: Array, low: float | None = None, high: float | None = None) -> Array:
    """The gradient is 1 at the limits, as in PyTorch."""
    x = x if low is None else jnp.where(x < low, jnp.asarray(low, x.dtype), x)
    return x if high is None else jnp.where(x > high, jnp.asarray(high, x.dtype), x)


def _hardtanh(x: Array, low: float = -1.0, high: float = 1.0) -> Array:
    """The gradient is 0 at the limits, as in PyTorch."""
    x = jnp.where(x <= low, jnp.asarray(low, x.dtype), x)
    return jnp.where(x >= high, jnp.asarray(high, x.dtype), x)


def _elu(x: Array, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Array:
    return scale * jnp.where(x > 0, x, alpha * jnp.expm1(input_scale * jnp.where(x > 0, 0, x)))


def _softplus(x: Array, beta: float = 1.0, threshold: float = 20.0) -> Array:
    return jnp.where(beta * x > threshold, x, jax.nn.softplus(beta * x) / beta)


def _where(chosen: Array, a: Operand, b: Operand) -> Array:
    if not isinstance(a, jax.Array) and not isinstance(b, jax.Array):
        a, b = (jnp.asarray(one, jnp.result_type(type(one))) for one in (a, b))
    a, b = promoted(a, b)
    rank = max(np.ndim(one) for one in (chosen, a, b))
    chosen, a, b = (jnp.reshape(one, (1,) * (rank - np.ndim(one)) + np.shape(one)) for one in (chosen, a, b))
    return jnp.where(chosen, a, b)


def _masked_fill(x: Array, mask: Array, value: Operand) -> Array:
    return _where(mask, jnp.asarray(value, x.dtype) if not isinstance(value, jax.Array) else value, x)


# Each entry of the output depends on one entry of each tensor: any layout will do.
ELEMENTWISE: dict[str, Callable[..., object]] = {
    "add": _add, "sub": _sub, "mul": _binary(jnp.multiply), "div": _div, "true_divide": _div,
    "rsub": lambda a, b, alpha=1: _sub(b, a, alpha), "floor_divide": _binary(jnp.floor_divide),
    "pow": _binary(jnp.power), "maximum": _binary(jnp.maximum), "minimum": _binary(jnp.minimum),
    "max.other": _binary(jnp.maximum), "min.other": _binary(jnp.minimum),
    "eq": _binary(jnp.equal), "ne": _binary(jnp.not_equal), "lt": _binary(jnp.less), "le": _binary(jnp.less_equal),
    "gt": _binary(jnp.greater), "ge": _binary(jnp.greater_equal),
    "logical_and": lambda a, b: jnp.logical_and(*promoted(a, b)), "logical_not": jnp.logical_not,
    "logical_or": lambda a, b: jnp.logical_or(*promoted(a, b)), "bitwise_not": jnp.bitwise_not,
    "where": _where, "masked_fill": _masked_fill, "clamp": _clamp, "clamp_min": _clamp,
    "clamp_max": lambda x, high: _clamp(x, None, high),
    "relu": jax.nn.relu, "relu6": partial(_hardtanh, low=0.0, high=6.0), "hardtanh": _hardtanh, "elu": _elu,
    "leaky_relu": lambda x, slope=0.01: jnp.where(x > 0, x, slope * x),
    "gelu": lambda x, approximate="none": jax.nn.gelu(x, approximate=approximate == "tanh"),
    "silu": jax.nn.silu, "mish": jax.nn.mish, "sigmoid": jax.nn.sigmoid, "tanh": jnp.tanh, "softplus": _softplus,
    "selu": lambda x: _elu(x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946),
    "celu": lambda x, alpha=1.0: _elu(x, alpha, 1.0, 1 / alpha), "log_sigmoid": jax.nn.log_sigmoid,
    "hardsigmoid": lambda x: _hardtanh(x + 3, 0.0, 6.0) / 6, "hardswish": lambda x: x * _hardtanh(x + 3, 0.0, 6.0) / 6,
    "exp": jnp.exp, "expm1": jnp.expm1, "log": jnp.log, "log1p": jnp.log1p, "log2": jnp.log2, "sqrt": jnp.sqrt,
    "rsqrt": lax.rsqrt, "square": jnp.square, "abs": jnp.abs, "neg": jnp.negative, "sign": jnp.sign, "sin": jnp.sin,
    "cos": jnp.cos, "erf": lax.erf, "reciprocal": lambda x: 1 / x, "floor": jnp.floor, "ceil": jnp.ceil,
    "round": jnp.round, "detach": lax.stop_gradient, "clone": lambda x, memory_format=None: x,
    "contiguous": lambda x, memory_format=None: x, "alias": lambda x: x, "lift_fresh_copy": lambda x: x,
}  # fmt: skip


# --- shapes -----------------------------------------------------------------------------------------


def _flatten(x: Array, start: int = 0, end: int = -1) -> Array:
    start, end = start % max(x.ndim, 1), end % max(x.ndim, 1)
    return x.reshape(*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :])


def _unflatten(x: Array, dim: int, sizes: Shape) -> Array:
    dim %= x.ndim
    return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])


def _slice(x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)]


def _select(x: Array, dim: int, index: int) -> Array:
    return x[(slice(None),) * (dim % x.ndim) + (index,)]


def _squeeze(x: Array, dims: int | Shape) -> Array:
    chosen = [dims] if isinstance(dims, int) else dims
    return jnp.squeeze(x, axis=tuple(dim for dim in chosen if x.shape[dim] == 1))


def _expand(x: Array, sizes: Shape, implicit: bool = False) -> Array:
    x = x.reshape(*(1,) * (len(sizes) - x.ndim), *x.shape)
    return jnp.broadcast_to(x, [have if size == -1 else size for have, size in zip(x.shape, sizes)])


def _split(x: Array, size: int | Shape, dim: int = 0) -> tuple[Array, ...]:
    bounds = range(size, x.shape[dim], size) if isinstance(size, int) else np.cumsum(size)[:-1].tolist()
    return tuple(jnp.split(x, list(bounds), axis=dim))


def _chunk(x: Array, chunks: int, dim: int = 0) -> tuple[Array, ...]:
    return _split(x, -(-x.shape[dim] // chunks), dim)


def _pad(x: Array, pads: Shape, mode: str = "constant", value: float | None = None) -> Array:
    """``pads``: before and after the last axis, then the last but one, ..."""
    check.require(mode == "constant", "mode of pad", mode, "constant")
    pairs = [(0, 0)] * (x.ndim - len(pads) // 2) + list(zip(pads[-2::-2], pads[-1::-2]))
    return lax.pad(x, jnp.asarray(value or 0, x.dtype), [(low, high, 0) for low, high in pairs])


def _index(x: Array, indices: Sequence[Array | None]) -> Array:
    return x[tuple(slice(None) if index is None else index for index in indices)]


def _gather(x: Array, dim: int, index: Array) -> Array:
    """Of the shape of ``index``, which may be shorter than ``x`` along any axis."""
    axis = dim % x.ndim
    near = tuple(slice(None) if i == axis else slice(size) for i, size in enumerate(index.shape))
    return jnp.take_along_axis(x[near], index, axis=axis)


def _embedding(table: Array, index: Array, padding: int = -1, scaled: bool = False, sparse: bool = False) -> Array:
    """Row ``padding`` gets no gradient. A row that is not there is NaN: PyTorch raises, indexing would take another."""
    check.require(not scaled, "scale_grad_by_freq", scaled, "false")
    rows = table.at[index].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    return rows if padding < 0 else jnp.where((index == padding)[..., None], lax.stop_gradient(rows), rows)


SHAPES: dict[str, Callable[..., object]] = {
    "view": lambda x, shape: x.reshape(tuple(shape)), "reshape": lambda x, shape: x.reshape(tuple(shape)),
    "_unsafe_view": lambda x, shape: x.reshape(tuple(shape)), "view_as": lambda x, like: x.reshape(like.shape),
    "flatten": _flatten, "unflatten": _unflatten, "permute": lambda x, dims: jnp.permute_dims(x, tuple(dims)),
    "transpose": jnp.swapaxes, "t": jnp.transpose, "numpy_T": jnp.transpose, "mT": jnp.matrix_transpose,
    "movedim": jnp.moveaxis, "swapaxes": jnp.swapaxes,
    "slice": _slice, "select": _select, "narrow": lambda x, dim, start, size: _slice(x, dim, start, start + size),
    "unsqueeze": jnp.expand_dims, "squeeze": lambda x, dims=None: _squeeze(x, range(x.ndim) if dims is None else dims),
    "expand": _expand, "expand_as": lambda x, like: _expand(x, like.shape),
    "repeat": lambda x, times: jnp.tile(x, tuple(times)), "flip": lambda x, dims: jnp.flip(x, tuple(dims)),
    "roll": lambda x, shifts, dims=(): jnp.roll(x, tuple(shifts), tuple(dims) or None),
    "cat": lambda parts, dim=0: jnp.concatenate(promoted(*parts), axis=dim),
    "stack": lambda parts, dim=0: jnp.stack(promoted(*parts), axis=dim),
    "split": _split, "split_with_sizes": _split, "chunk": _chunk,
    "unbind": lambda x, dim=0: tuple(jnp.moveaxis(x, dim, 0)), "pad": _pad,
    "constant_pad_nd": lambda x, pads, value=0: _pad(x, pads, "constant", value),
    "index": _index, "index_select": lambda x, dim, index: jnp.take(x, index, axis=dim),
    "gather": _gather, "embedding": _embedding,
    "tril": jnp.tril, "triu": jnp.triu, "sym_size": lambda x, dim: x.shape[dim], "sym_numel": lambda x: x.size,
}  # fmt: skip


# --- sums and products ------------------------------------------------------------------------------


def _reduced(function: Callable[..., Array]) -> Callable[..., Array]:
    """Over some axes, or over all of them."""

    def run(x: Array, dims: Dims = None, keepdim: bool = False, dtype: object = None) -> Array:
        if isinstance(dims, bool):
            keepdim, dims = dims, None
        axes = None if dims is None or (not isinstance(dims, int) and not len(dims)) else dims
        return function(x, axis=tuple(axes) if isinstance(axes, Sequence) else axes, keepdims=keepdim)

    return run


def _sum(x: Array, axis: int | tuple[int, ...] | None, keepdims: bool) -> Array:
    return jnp.sum(x.astype(jnp.result_type(int)) if x.dtype == jnp.bool_ else x, axis=axis, keepdims=keepdims)


def _chosen(choose: Callable[..., Array], x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """The largest (smallest) entries and where they are; the gradient goes to these alone."""
    where = choose(x, axis=dim, keepdims=True)
    found = jnp.take_along_axis(x, where, axis=dim)
    return (found, where) if keepdim else (jnp.squeeze(found, dim), jnp.squeeze(where, dim))


def _variance(x: Array, dims: Dims = None, correction: float | None = 1, keepdim: bool = False) -> Array:
    axes = tuple(range(x.ndim)) if dims is None else (dims,) if isinstance(dims, int) else tuple(dims)
    mean = x.mean(axis=axes, keepdims=True)
    count = math.prod(x.shape[axis] for axis in axes)
    return jnp.square(x - mean).sum(axis=axes, keepdims=keepdim) / (count - (1 if correction is None else correction))


def _root(square: Array) -> Array:
    """The square root; the gradient is 0 where it is 0, as in PyTorch for deviations and norms."""
    zero = square == 0
    return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, square)))


def _norm(x: Array, order: float = 2, dims: Dims = None, keepdim: bool = False, dtype: object = None) -> Array:
    """Euclidean."""
    check.require(order == 2, "order of a norm", order, "2")
    return _root(_reduced(jnp.sum)(jnp.square(x), dims, keepdim))


def _matmul(a: Array, b: Array) -> Array:
    if min(a.ndim, b.ndim) > 1 and a.ndim != b.ndim:
        a, b = promoted(a, b)
    return jnp.matmul(a, b)


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """``x W^T + b``, ``weight`` [out, in]."""
    out = lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
    return out if bias is None else _add(out, bias)


def _addmm(start: Array, a: Array, b: Array, beta: float = 1, alpha: float = 1) -> Array:
    return _add(start if beta == 1 else beta * start, _matmul(a, b) if alpha == 1 else alpha * _matmul(a, b))


def _softmax(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda x, dim, dtype=None: function(_float(x), axis=dim)


def _layer_norm(
    x: Array, shape: Shape, scale: Array | None = None, bias: Array | None = None, eps: float = 1e-5, *cudnn: bool
) -> Array:
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    x = x - x.mean(axis=axes, keepdims=True)
    x = x * lax.rsqrt(jnp.square(x).mean(axis=axes, keepdims=True) + eps)
    x = x if scale is None else _binary(jnp.multiply)(x, scale)
    return x if bias is None else _add(x, bias)


def _rms_norm(x: Array, shape: Shape, scale: Array | None = None, eps: float | None = None) -> Array:
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    eps = float(jnp.finfo(x.dtype).eps) if eps is None else eps
    x = x * lax.rsqrt(jnp.square(x).mean(axis=axes, keepdims=True) + eps)
    return x if scale is None else _binary(jnp.multiply)(x, scale)


SUMS: dict[str, Callable[..., object]] = {
    "sum": _reduced(_sum), "mean": _reduced(jnp.mean), "amax": _reduced(jnp.max), "amin": _reduced(jnp.min),
    "max.default": jnp.max, "min.default": jnp.min, "max.dim": partial(_chosen, jnp.argmax),
    "min.dim": partial(_chosen, jnp.argmin), "argmax": lambda x, dim=None, keepdim=False: jnp.argmax(
        x, axis=dim, keepdims=keepdim),
    "logsumexp": _reduced(jax.scipy.special.logsumexp), "cumsum": lambda x, dim, dtype=None: jnp.cumsum(x, axis=dim),
    "var.correction": _variance, "std.correction": lambda *args, **named: _root(_variance(*args, **named)),
    "var.dim": lambda x, dims, unbiased=True, keepdim=False: _variance(x, dims, int(unbiased), keepdim),
    "std.dim": lambda x, dims, unbiased=True, keepdim=False: _root(_variance(x, dims, int(unbiased), keepdim)),
    "var.default": lambda x, unbiased=True: _variance(x, None, int(unbiased)),
    "std.default": lambda x, unbiased=True: _root(_variance(x, None, int(unbiased))),
    "linalg_vector_norm": _norm, "norm.ScalarOpt_dim": _norm, "norm.Scalar": _norm,
    "linear": linear, "matmul": _matmul, "mm": _matmul, "bmm": _matmul, "mv": _matmul, "dot": _matmul,
    "addmm": _addmm, "baddbmm": _addmm, "einsum": lambda text, operands: jnp.einsum(text, *operands),
    "softmax": _softmax(jax.nn.softmax), "_softmax": lambda x, dim, half: jax.nn.softmax(x, axis=dim),
    "log_softmax": _softmax(jax.nn.log_softmax), "_log_softmax": lambda x, dim, half: jax.nn.log_softmax(x, axis=dim),
    "layer_norm": _layer_norm, "rms_norm": _rms_norm,
}  # fmt: skip

OPS: dict[str, Callable[..., object]] = ELEMENTWISE | SHAPES | SUMS
