"""Winograd's algorithm for 5 x 5 kernels on tiles of 2 x 2 outputs, batch index innermost.

Input and result have the layout of ``tiles.tiled_product``. So a tile is also one window of 2 x 2 pooling, and layers
in this layout follow each other without a transpose. A tile reads a patch of 6 x 6 inputs and takes 36 multiplications
for each pair of channels instead of 100 (144 in ``tiles.py``). The data transform is the six-point one of
``winograd.py``. With ``A``, ``B``, ``G`` as there and N tiles in the batch of images:

    V [36, C_in, N]  = kron(B^T, B^T) @ patches
    U [36, C_in, C_out] = kron(G, G) @ kernel
    M [36, C_out, N] = U^T @ V, one product for each of the 36 frequencies
    Z [4, C_out, N]  = kron(A^T, A^T) @ M

The gradient is the adjoint of each step, written by hand. Reverse mode only.

Rounding, tested in float32 with normal inputs and 128 channels: outputs and gradients differ by at most 2e-5 of the
largest entry.

Source: Lavin and Gray (2016), Fast algorithms for convolutional neural networks; points 0, 1, -1, 2, -2 and infinity.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_async.models.tiles import fold
from fedjax_async.models.winograd import TRANSFORMS, Transforms, applied
from fedjax_async.types import Array

SIDE, PATCH = 5, 6  # sides of a kernel and of a patch

FIVE = Transforms(
    TRANSFORMS[4].data,
    np.array([
        [6, 0, 0, 0, 0],
        [-4, -4, -4, -4, -4],
        [-4, 4, -4, 4, -4],
        [1, 2, 4, 8, 16],
        [1, -2, 4, -8, 16],
        [0, 0, 0, 0, 24],
    ]) / 24,
    np.array([[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 1]]),
)  # fmt: skip


def fits(x: Array, kernel: Array) -> bool:
    """Whether this module computes a convolution: 5 x 5 kernels in float32 or better, as the transforms lose digits."""
    return kernel.shape[:2] == (SIDE, SIDE) and x.dtype.itemsize >= 4


def _patches(x: Array) -> Array:
    """``[C, H, W, B] -> [36, C, tiles * B]``: the inputs of every tile, position within the patch first."""
    rows, columns = x.shape[1] - PATCH + 1, x.shape[2] - PATCH + 1
    taps = [x[:, i : i + rows : 2, j : j + columns : 2] for i in range(PATCH) for j in range(PATCH)]
    return jnp.stack(taps).reshape(PATCH**2, x.shape[0], -1)


def _products(left: Array, right: Array, axes: tuple[int, int]) -> Array:
    """One matrix product for each frequency (axis 0), contracting axis ``axes[0]`` with axis ``axes[1]``."""
    return lax.dot_general(left, right, (((axes[0],), (axes[1],)), ((0,), (0,))))


@jax.custom_vjp
def winograd_tiled_product(x: Array, kernel: Array) -> Array:
    """``x [C_in, H, W, B]`` (padded, H and W even) convolved with ``kernel [5, 5, C_in, C_out]``.

    Returns: ``[4 * C_out, tiles * B]``: rows (output within the tile, C_out), columns (tile, B).
    """
    return _forward(x, kernel)[0]


def _forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, ...]]:
    v = applied(FIVE.data, _patches(x))
    u = applied(FIVE.kernel, kernel.reshape(SIDE**2, *kernel.shape[2:]))
    z = applied(FIVE.output, _products(u, v, (1, 1)))
    return z.reshape(-1, v.shape[2]), (x, v, u)


def _backward(saved: tuple[Array, ...], dz: Array) -> tuple[Array, Array]:
    x, v, u = saved
    dm = applied(FIVE.output.T, dz.reshape(4, -1, v.shape[2]))
    du = _products(dm, v, (2, 2)).transpose(0, 2, 1)  # measured faster than the product the other way round
    dkernel = applied(FIVE.kernel.T, du).reshape(SIDE, SIDE, *du.shape[1:])
    # XLA removes this as dead code where no gradient with respect to x is asked for (the first layer)
    channels, height, width, batch = x.shape
    tiles = ((height - PATCH) // 2 + 1, (width - PATCH) // 2 + 1)
    patches = applied(FIVE.data.T, _products(u, dm, (2, 1))).reshape(PATCH, PATCH, channels, *tiles, batch)
    return fold(patches.transpose(2, 0, 1, 3, 4, 5), height, width, (2, 2)), dkernel


winograd_tiled_product.defvjp(_forward, _backward)
