"""Convolution as one matrix product over tiles of outputs, batch index innermost.

Layout: a batch of images is ``[C, H, W, B]``, so that every copy below moves runs of at least ``B`` contiguous numbers.
A *tile* is ``th x tw`` neighbouring outputs; it reads a patch of ``PH x PW`` inputs, ``PH = (th - 1) * stride + kh``.
With all patches as columns, the convolution is

    z [th * tw * C_out, tiles * B] = K [th * tw * C_out, C_in * PH * PW] @ patches [C_in * PH * PW, tiles * B]

where ``K`` holds one shifted, zero-padded copy of the kernel for each output of the tile. A 2 x 2 tile is also one
window of 2 x 2 pooling: the pool is then an elementwise maximum of the four row blocks of ``z``
(``conv_relu_pool``).

Gradients are written by hand: automatic differentiation would turn each strided slice into a dilated pad, and would
transpose the gradient of the patches. Only reverse mode works (reverse over reverse too); for forward mode choose
another lowering.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_async.models.long_sums import summed_over_positions
from fedjax_async.types import Array

Pair = tuple[int, int]


def to_batch_minor(x: Array) -> Array:
    """``[B, H, W, C] -> [C, H, W, B]``; XLA cancels a transpose to this layout that follows one from it."""
    return x.transpose(3, 1, 2, 0)


from_batch_minor = to_batch_minor


def tile_of(outputs: int) -> int:
    """Tile side for an axis with this number of outputs: 2, or 1 if it is odd."""
    return 1 + (outputs % 2 == 0)


def tile_kernel(kernel: Array, tile: Pair, strides: Pair) -> Array:
    """``[kh, kw, C_in, C_out] -> [th * tw, C_out, C_in, PH, PW]``, one shifted copy for each output of the tile."""
    k = kernel.transpose(3, 2, 0, 1)
    (th, tw), (sh, sw) = tile, strides

    def shifted(i: int, j: int) -> Array:
        return jnp.pad(k, ((0, 0), (0, 0), (i * sh, (th - 1 - i) * sh), (j * sw, (tw - 1 - j) * sw)))

    return jnp.stack([shifted(i, j) for i in range(th) for j in range(tw)])


def untile_kernel(big: Array, shape: tuple[int, ...], tile: Pair, strides: Pair) -> Array:
    """Adjoint of ``tile_kernel``: shift the gradients of the copies back and add them."""
    kh, kw = shape[:2]
    (th, tw), (sh, sw) = tile, strides
    outputs = [(i, j) for i in range(th) for j in range(tw)]
    parts = [big[n, :, :, i * sh : i * sh + kh, j * sw : j * sw + kw] for n, (i, j) in enumerate(outputs)]
    return sum(parts[1:], parts[0]).transpose(2, 3, 1, 0)


def _counts(size: int, kernel: int, tile: int, stride: int) -> tuple[int, int, int]:
    """Along one axis: number of tiles, length of a patch, and distance between two patches, both in inputs."""
    outputs = (size - kernel) // stride + 1
    return outputs // tile, (tile - 1) * stride + kernel, tile * stride


def unfold(x: Array, shape: tuple[int, ...], tile: Pair, strides: Pair) -> Array:
    """``[C, H, W, B] -> [C, PH, PW, nh, nw, B]``: the patch of every tile."""
    nh, ph, step_h = _counts(x.shape[1], shape[0], tile[0], strides[0])
    nw, pw, step_w = _counts(x.shape[2], shape[1], tile[1], strides[1])
    rows = jnp.stack([x[:, i : i + step_h * (nh - 1) + 1 : step_h] for i in range(ph)], axis=1)
    return jnp.stack([rows[:, :, :, j : j + step_w * (nw - 1) + 1 : step_w] for j in range(pw)], axis=2)


def _overlap_add(parts: list[Array], axis: int) -> Array:
    """Sum of ``parts[a]`` shifted by ``a`` along ``axis``: ``[..., n, ...] -> [..., n + len(parts) - 1, ...]``.

    The two ends, where fewer parts overlap, and the middle are summed separately and concatenated: in a sum of padded
    arrays, XLA's loops on a CPU would test the bounds of every element.
    """
    shifts, n = len(parts), parts[0].shape[axis]

    def total(low: int, high: int) -> Array:
        inside = [a for a in range(shifts) if a <= low and high <= a + n]
        terms = [lax.slice_in_dim(parts[a], low - a, high - a, axis=axis) for a in inside]
        return sum(terms[1:], terms[0])

    length = n + shifts - 1
    inner = (shifts - 1, n) if n >= shifts else (0, 0)
    ranges = [(m, m + 1) for m in range(length) if not inner[0] <= m < inner[1]]
    if inner[1] > inner[0]:
        ranges.append(inner)
    return jnp.concatenate([total(*r) for r in sorted(ranges)], axis=axis)


def _resize(x: Array, axis: int, size: int) -> Array:
    """Cut or zero-pad the end of ``axis`` to ``size``."""
    have = x.shape[axis]
    if have >= size:
        return x if have == size else lax.slice_in_dim(x, 0, size, axis=axis)
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - have)
    return jnp.pad(x, widths)


def fold(patches: Array, height: int, width: int, step: Pair) -> Array:
    """Adjoint of ``unfold``: add the patches back to their inputs, ``[C, PH, PW, nh, nw, B] -> [C, H, W, B]``."""
    channels, ph, pw, nh, nw, batch = patches.shape
    step_h, step_w = step
    over_h, over_w = -(-ph // step_h), -(-pw // step_w)
    d = _resize(_resize(patches, 1, over_h * step_h), 2, over_w * step_w)
    d = d.reshape(channels, over_h * step_h, over_w, step_w, nh, nw, batch)
    d = _overlap_add([d[:, :, a] for a in range(over_w)], axis=4)  # [C, PH, step_w, nh, W / step_w, B]
    d = d.reshape(channels, over_h, step_h, step_w, nh, nw + over_w - 1, batch)
    d = _overlap_add([d[:, a] for a in range(over_h)], axis=3)  # [C, step_h, step_w, H / step_h, W / step_w, B]
    rows, columns = nh + over_h - 1, nw + over_w - 1
    d = d.transpose(0, 3, 1, 4, 2, 5).reshape(channels, rows * step_h, columns * step_w, batch)
    return _resize(_resize(d, 1, height), 2, width)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def tiled_product(tile: Pair, strides: Pair, x: Array, kernel: Array) -> Array:
    """``x [C, H, W, B]`` (padded) convolved with ``kernel``; rows (output within the tile, C_out), columns (tile, B).

    Returns:
        ``[th * tw * C_out, nh * nw * B]``.
    """
    return _product_forward(tile, strides, x, kernel)[0]


def _product_forward(tile: Pair, strides: Pair, x: Array, kernel: Array) -> tuple[Array, tuple[Array, ...]]:
    patches = unfold(x, kernel.shape, tile, strides)
    big = tile_kernel(kernel, tile, strides)
    flat = patches.reshape(-1, patches.shape[3] * patches.shape[4] * patches.shape[5])
    z = big.reshape(-1, flat.shape[0]) @ flat
    return z, (x, kernel, patches, big)


def _product_backward(tile: Pair, strides: Pair, saved: tuple[Array, ...], dz: Array) -> tuple[Array, Array]:
    x, kernel, patches, big = saved
    rows = patches.shape[0] * patches.shape[1] * patches.shape[2]
    flat, matrix = patches.reshape(rows, -1), big.reshape(-1, rows)
    dbig = summed_over_positions(dz, flat)
    dkernel = untile_kernel(dbig.reshape(big.shape), kernel.shape, tile, strides)
    dflat = lax.dot_general(matrix, dz, (((0,), (0,)), ((), ())))
    step = (tile[0] * strides[0], tile[1] * strides[1])
    # XLA removes this as dead code where no gradient with respect to x is asked for (the first layer)
    return fold(dflat.reshape(patches.shape), x.shape[1], x.shape[2], step), dkernel


tiled_product.defvjp(_product_forward, _product_backward)


def _largest(z: Array) -> tuple[Array, Array]:
    """Maximum over the leading axis of 4, and the index of its first occurrence (int8)."""
    m = jnp.maximum(jnp.maximum(z[0], z[1]), jnp.maximum(z[2], z[3]))
    # Not ``z[i] == m``: XLA may compute z a second time with other rounding, and then no entry equals the maximum.
    first, second = z[0] >= z[1], z[2] >= z[3]
    before = jnp.maximum(z[0], z[1]) >= jnp.maximum(z[2], z[3])
    index = jnp.where(before, jnp.where(first, 0, 1), jnp.where(second, 2, 3))
    return m, index.astype(jnp.int8)


@jax.custom_jvp
def max_of_four(z: Array) -> Array:
    """Maximum over the leading axis ``[4, ...]``; the gradient goes to the first of equal entries."""
    return _largest(z)[0]


@max_of_four.defjvp
def _max_of_four_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    m, index = _largest(primals[0])
    indices = jnp.arange(4, dtype=jnp.int8).reshape(4, *(1,) * index.ndim)
    chosen = jnp.where(index[None] == indices, tangents[0], jnp.zeros((), tangents[0].dtype))
    return m, chosen.sum(axis=0)


def _tiled_by_two(x: Array, kernel: Array) -> Array:
    return tiled_product((2, 2), (1, 1), x, kernel)


def conv_relu_pool(
    x: Array, kernel: Array, bias: Array | None, pool: str, product: Callable[[Array, Array], Array] = _tiled_by_two
) -> Array:
    """``pool(relu(conv(x) + bias))`` with stride 1 and 2 x 2 pooling in one pass; ``x [B, H, W, C_in]`` already padded.

    ``product``: computes the convolution over tiles of 2 x 2 outputs, as ``tiled_product`` does. Returns
    ``[B, H_out // 2, W_out // 2, C_out]``: a last odd row or column of outputs is dropped, as in pooling without
    padding.

    ReLU and adding a bias are monotone, so for ``pool="max"`` both follow the maximum, on a quarter of the numbers.
    Values and gradients are bitwise the same (a window with a maximum <= 0 has no gradient in either order).
    """
    kh, kw, _, c_out = kernel.shape
    x = to_batch_minor(x)
    oh, ow = (x.shape[1] - kh + 1) // 2 * 2, (x.shape[2] - kw + 1) // 2 * 2
    x = x[:, : oh + kh - 1, : ow + kw - 1]
    z = product(x, kernel).reshape(4, c_out, -1)
    shift = None if bias is None else bias.reshape(1, c_out, 1)
    if pool == "max":
        z = max_of_four(z)[None]
    z = jax.nn.relu(z if shift is None else z + shift)
    y = z[0] if pool == "max" else ((z[0] + z[1]) + (z[2] + z[3])) * jnp.asarray(0.25, z.dtype)
    return from_batch_minor(y.reshape(c_out, oh // 2, ow // 2, x.shape[3]))
