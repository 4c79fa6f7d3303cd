"""Convolution with 3 x 3 kernels at stride 1 by Winograd's minimal filtering, as three matrix products.

A *tile* is ``m x m`` neighbouring outputs, m = 4 or 2, and reads ``n x n`` inputs, ``n = m + 2``.
With ``d`` the patch of a tile, ``g`` a kernel and three constant matrices ``A``, ``B``, ``G``, the outputs are

    Y = A^T [(G g G^T) * (B^T d B)] A            (elementwise product, summed over input channels)

A tile thus takes ``n^2`` multiplications for each pair of channels instead of ``9 m^2``: a quarter of them for
m = 4, four ninths for m = 2. Over all tiles, with ``T`` tiles in the batch and row-major ``vec``:

    V [n^2, T * C_in]   = kron(B^T, B^T) @ patches
    U [n^2, C_in, C_out] = kron(G, G) @ kernel
    M [n^2, T, C_out]   = V @ U, one product for each of the n^2 frequencies
    Y [m^2, T * C_out]  = kron(A^T, A^T) @ M

The gradient is the adjoint of each of these steps, written by hand: automatic differentiation would sum ``n^2`` padded
arrays to add the patches back. Reverse mode only (reverse over reverse works), as in ``tiles.py``.

Rounding: the entries of the transforms for m = 4 reach 8, so errors are larger than those of other lowerings. In tests
in float32 with normal inputs and 128 channels, outputs and both gradients differ by at most 2e-5 of the largest entry
for m = 4 and 2e-6 for m = 2; in float64 they are within 1e-10 of ``lax``.

Source: Lavin and Gray (2016), Fast algorithms for convolutional neural networks, section 4.1 (m = 2) and 4.3 (m = 4).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_async.types import Array

Pair = tuple[int, int]
Padding = tuple[Pair, Pair]


class Transforms(NamedTuple):
    """The matrices of the one-dimensional algorithm: ``data [n, n]``, ``kernel [n, 3]``, ``output [m, n]``."""

    data: np.ndarray
    kernel: np.ndarray
    output: np.ndarray


TRANSFORMS = {
    2: Transforms(
        np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]]),
        np.array([[2, 0, 0], [1, 1, 1], [1, -1, 1], [0, 0, 2]]) / 2,
        np.array([[1, 1, 1, 0], [0, 1, -1, -1]]),
    ),
    4: Transforms(
        np.array([
            [4, 0, -5, 0, 1, 0],
            [0, -4, -4, 1, 1, 0],
            [0, 4, -4, -1, 1, 0],
            [0, -2, -1, 2, 1, 0],
            [0, 2, -1, -2, 1, 0],
            [0, 4, 0, -5, 0, 1],
        ]),
        np.array([[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]]) / 24,
        np.array([[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]]),
    ),
}  # fmt: skip


class Grid(NamedTuple):
    """Sizes of one convolution: tile side, inputs and outputs (rows, columns), padding before, tiles along each axis.

    The last tiles may reach beyond the outputs; their results there are dropped.
    """

    tile: int
    inputs: Pair
    outputs: Pair
    before: Pair
    tiles: Pair


def grid_of(tile: int, inputs: Pair, padding: Padding) -> Grid:
    """The grid of a 3 x 3 convolution of images of this size."""
    rows, columns = (size + sum(pads) - 2 for size, pads in zip(inputs, padding))
    tiles = (-(-rows // tile), -(-columns // tile))
    return Grid(tile, inputs, (rows, columns), (padding[0][0], padding[1][0]), tiles)


def applied(matrix: np.ndarray, x: Array) -> Array:
    """``kron(matrix, matrix) @ x`` along the leading axis: ``[a^2, ...] -> [b^2, ...]``, matrix ``[b, a]``."""
    both = jnp.asarray(np.kron(matrix, matrix), x.dtype)
    return (both @ x.reshape(x.shape[0], -1)).reshape(-1, *x.shape[1:])


def patches_of(x: Array, grid: Grid) -> Array:
    """``[B, H, W, C] -> [n^2, B * tiles, C]``: the inputs of every tile, position within the patch first."""
    m, n = grid.tile, grid.tile + 2
    pads = [(a, m * count + 2 - a - size) for count, a, size in zip(grid.tiles, grid.before, grid.inputs)]
    x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
    last = [m * (count - 1) + 1 for count in grid.tiles]
    taps = [x[:, i : i + last[0] : m, j : j + last[1] : m] for i in range(n) for j in range(n)]
    return jnp.stack(taps).reshape(n * n, -1, x.shape[3])


def _overlapped(x: Array, position: int, tile: int) -> Array:
    """Add the last two positions within the patches to the first two of the next tile: axis of n to m, of t to t + 1.

    ``position`` and ``tile`` are the axes of the position within a patch and of the tiles.
    """
    m = x.shape[position] - 2
    none = [(0, 0)] * x.ndim
    own, over = list(none), list(none)
    own[tile], over[tile], over[position] = (0, 1), (1, 0), (0, m - 2)
    first = jnp.pad(lax.slice_in_dim(x, 0, m, axis=position), own)
    return first + jnp.pad(lax.slice_in_dim(x, m, m + 2, axis=position), over)


def patches_added(patches: Array, grid: Grid) -> Array:
    """Adjoint of ``patches_of``: ``[n^2, B * tiles, C] -> [B, H, W, C]``."""
    (m, inputs, _, before, tiles), n = grid, grid.tile + 2
    x = patches.reshape(n, n, -1, *tiles, patches.shape[2])
    x = _overlapped(_overlapped(x, 1, 4), 0, 3)  # [m, m, B, rows + 1, columns + 1, C]
    x = x.transpose(2, 3, 0, 4, 1, 5).reshape(x.shape[2], m * (tiles[0] + 1), m * (tiles[1] + 1), -1)
    return x[:, before[0] : before[0] + inputs[0], before[1] : before[1] + inputs[1]]


def outputs_of(tiles: Array, grid: Grid) -> Array:
    """``[m^2, B * tiles, C] -> [B, rows, columns, C]``."""
    m, (rows, columns) = grid.tile, grid.tiles
    y = tiles.reshape(m, m, -1, rows, columns, tiles.shape[2]).transpose(2, 3, 0, 4, 1, 5)
    return y.reshape(y.shape[0], m * rows, m * columns, -1)[:, : grid.outputs[0], : grid.outputs[1]]


def tiles_of(y: Array, grid: Grid) -> Array:
    """Adjoint of ``outputs_of``, with zeros beyond the outputs: ``[B, rows, columns, C] -> [m^2, B * tiles, C]``."""
    m, (rows, columns) = grid.tile, grid.tiles
    y = jnp.pad(y, ((0, 0), (0, m * rows - grid.outputs[0]), (0, m * columns - grid.outputs[1]), (0, 0)))
    y = y.reshape(-1, rows, m, columns, m, y.shape[3]).transpose(2, 4, 0, 1, 3, 5)
    return y.reshape(m * m, -1, y.shape[5])


def _product(left: Array, right: Array, axes: Pair) -> Array:
    """One matrix product for each frequency (axis 0), contracting axis ``axes[0]`` with axis ``axes[1]``."""
    return lax.dot_general(left, right, (((axes[0],), (axes[1],)), ((0,), (0,))))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def winograd_product(grid: Grid, x: Array, kernel: Array) -> Array:
    """``x [B, H, W, C_in]`` convolved with ``kernel [3, 3, C_in, C_out]``: ``[B, H_out, W_out, C_out]``."""
    return _product_forward(grid, x, kernel)[0]


def _product_forward(grid: Grid, x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    transforms = TRANSFORMS[grid.tile]
    v = applied(transforms.data, patches_of(x, grid))
    u = applied(transforms.kernel, kernel.reshape(9, *kernel.shape[2:]))
    return outputs_of(applied(transforms.output, _product(v, u, (2, 1))), grid), (v, u)


def _product_backward(grid: Grid, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    (v, u), transforms = saved, TRANSFORMS[grid.tile]
    # without the barrier XLA computes dy inside the transposition, element by element: five times as long with pooling
    dm = applied(transforms.output.T, tiles_of(lax.optimization_barrier(dy), grid))
    du = _product(v, dm, (1, 1))
    dkernel = applied(transforms.kernel.T, du).reshape(3, 3, *du.shape[1:])
    # XLA removes this as dead code where no gradient with respect to x is asked for (the first layer)
    dx = patches_added(applied(transforms.data.T, _product(dm, u, (2, 2))), grid)
    return dx, dkernel


winograd_product.defvjp(_product_forward, _product_backward)


def fits(x: Array, kernel: Array, strides: Pair) -> bool:
    """Whether this module computes a convolution: 3 x 3 at stride 1, in float32 or better.

    The transforms would lose all of bfloat16's digits.
    """
    return kernel.shape[:2] == (3, 3) and tuple(strides) == (1, 1) and x.dtype.itemsize >= 4
