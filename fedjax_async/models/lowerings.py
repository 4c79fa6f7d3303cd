"""Ways to compute the same 2-D convolution; ``choice.py`` selects one.

All take ``x [B, H, W, C_in]``, ``kernel [kh, kw, C_in / groups, C_out]``, ``strides`` and explicit ``padding`` pairs,
and return ``[B, H_out, W_out, C_out]``. Under ``vmap`` over clients the kernel has a leading axis too: ``lax.conv``
then becomes a grouped convolution, slow on a CPU, while the others become batched matrix products.

* ``lax``     ``lax.conv_general_dilated``.
* ``im2col``  the window of every output position is copied (``kh * kw`` copies of the input), then one product.
* ``tiled``   windows of 2 x 2 outputs are copied (``(kh + 1)(kw + 1) / 4`` copies), batch index innermost, and the
  kernel becomes ``[4 * C_out, C_in * (kh + 1) * (kw + 1)]``. For 5 x 5 kernels that is 1.44 times the multiplications
  of ``im2col`` at a third of its memory traffic. See ``tiles.py``.
* ``winograd``  Winograd's algorithm on tiles of 4 x 4 outputs: a quarter of ``im2col``'s multiplications and 2.25
  copies of the input instead of 9. It needs 3 x 3 kernels at stride 1 in float32 or float64; otherwise ``im2col`` is
  used.
* ``winograd_small``  the same on tiles of 2 x 2 outputs, for images of a few pixels. See ``winograd.py``.
* ``winograd_tiled``  the same for 5 x 5 kernels in the layout of ``tiled``, with a quarter of its multiplications. It
  needs stride 1 and even numbers of outputs; otherwise ``tiled`` is used. See ``winograd_tiles.py``.

Grouped convolutions: ``lax`` for any number of groups; ``taps`` for depthwise ones: the sum over all kernel positions
of the shifted input times one number per channel. The backward pass of ``taps`` took the same time written by hand,
by automatic differentiation, and example by example.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import lax

from fedjax_async.base import check
from fedjax_async.models import winograd_tiles
from fedjax_async.models.long_sums import product
from fedjax_async.models.tiles import conv_relu_pool, from_batch_minor, tile_of, tiled_product, to_batch_minor
from fedjax_async.models.winograd import fits, grid_of, winograd_product
from fedjax_async.types import Array

Pair = tuple[int, int]
Padding = tuple[Pair, Pair]


def out_size(size: int, kernel: int, stride: int) -> int:
    """Output positions along one (already padded) axis."""
    return (size - kernel) // stride + 1


def pad_spatial(x: Array, padding: Padding) -> Array:
    """Zero-pad the two middle axes of ``[B, H, W, C]``; without padding, ``x`` itself."""
    return x if padding == ((0, 0), (0, 0)) else jnp.pad(x, ((0, 0), *padding, (0, 0)))


def lax_conv(x: Array, kernel: Array, strides: Pair, padding: Padding, groups: int = 1) -> Array:
    """XLA's own convolution; the only lowering for any number of groups."""
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=numbers, feature_group_count=groups)


def taps_of(x: Array, size: Pair, strides: Pair, padding: Padding) -> list[tuple[Pair, Array]]:
    """Each kernel index ``(i, j)``, row by row, with the inputs that it multiplies, ``[B, H_out, W_out, C]``."""
    x = pad_spatial(x, padding)
    ends = [s * (out_size(n, k, s) - 1) + 1 for n, k, s in zip(x.shape[1:3], size, strides)]
    indices = [(i, j) for i in range(size[0]) for j in range(size[1])]
    return [((i, j), x[:, i : i + ends[0] : strides[0], j : j + ends[1] : strides[1]]) for i, j in indices]


def im2col_conv(x: Array, kernel: Array, strides: Pair, padding: Padding) -> Array:
    """Unfold rows and columns, then ``[B * H_out * W_out, kh * kw * C_in] @ [kh * kw * C_in, C_out]``."""
    kh, kw, c_in, c_out = kernel.shape
    columns = jnp.concatenate([tap for _, tap in taps_of(x, (kh, kw), strides, padding)], axis=-1)
    out = product(columns.reshape(-1, kh * kw * c_in), kernel.reshape(kh * kw * c_in, c_out))
    return out.reshape(*columns.shape[:3], c_out)


def tiled_conv(x: Array, kernel: Array, strides: Pair, padding: Padding) -> Array:
    """Tiles of 2 x 2 outputs (1 along an axis with an odd number of outputs), batch innermost, one matrix product."""
    kh, kw, _, c_out = kernel.shape
    x = to_batch_minor(pad_spatial(x, padding))
    _, height, width, batch = x.shape
    oh, ow = out_size(height, kh, strides[0]), out_size(width, kw, strides[1])
    tile = (tile_of(oh), tile_of(ow))
    z = tiled_product(tile, strides, x, kernel).reshape(*tile, c_out, oh // tile[0], ow // tile[1], batch)
    return from_batch_minor(z.transpose(2, 3, 0, 4, 1, 5).reshape(c_out, oh, ow, batch))


def winograd_tiled_conv(x: Array, kernel: Array, strides: Pair, padding: Padding) -> Array:
    """Winograd's algorithm for 5 x 5 kernels where it applies and both numbers of outputs are even, else ``tiled``."""
    padded = pad_spatial(x, padding)
    oh, ow = (out_size(size, k, 1) for size, k in zip(padded.shape[1:3], kernel.shape[:2]))
    if not winograd_tiles.fits(x, kernel) or tuple(strides) != (1, 1) or oh % 2 or ow % 2:
        return tiled_conv(x, kernel, strides, padding)
    z = winograd_tiles.winograd_tiled_product(to_batch_minor(padded), kernel)
    z = z.reshape(2, 2, kernel.shape[3], oh // 2, ow // 2, x.shape[0])
    return from_batch_minor(z.transpose(2, 3, 0, 4, 1, 5).reshape(kernel.shape[3], oh, ow, x.shape[0]))


def _winograd_relu_pool(x: Array, kernel: Array, bias: Array | None, pool: str) -> Array:
    if not winograd_tiles.fits(x, kernel):
        return conv_relu_pool(x, kernel, bias, pool)
    return conv_relu_pool(x, kernel, bias, pool, winograd_tiles.winograd_tiled_product)


def winograd_conv(x: Array, kernel: Array, strides: Pair, padding: Padding, tile: int = 4) -> Array:
    """Winograd's algorithm on tiles of ``tile x tile`` outputs where it applies, else ``im2col``."""
    if not fits(x, kernel, strides):
        return im2col_conv(x, kernel, strides, padding)
    return winograd_product(grid_of(tile, (x.shape[1], x.shape[2]), padding), x, kernel)


def depthwise_taps(x: Array, kernel: Array, strides: Pair, padding: Padding, groups: int) -> Array:
    """Every channel has its own kernel, ``[kh, kw, 1, C]``: ``kh * kw`` elementwise products, no matrix products."""
    kh, kw, _, channels = kernel.shape
    check.require(
        groups == x.shape[-1] == channels, "feature_group_count", groups, "the channels, in and out, for taps"
    )
    terms = [tap * kernel[i, j].reshape(1, 1, 1, -1) for (i, j), tap in taps_of(x, (kh, kw), strides, padding)]
    # without the barrier XLA computes the sum again in every pass of the next normalisation (1.6 times slower)
    return lax.optimization_barrier(sum(terms[1:], terms[0]))


LOWERINGS: dict[str, Callable[..., Array]] = {
    "lax": lax_conv,
    "im2col": im2col_conv,
    "tiled": tiled_conv,
    "winograd": winograd_conv,
    "winograd_small": partial(winograd_conv, tile=2),
    "winograd_tiled": winograd_tiled_conv,
}

# lowerings that do ReLU and 2 x 2 pooling in the same pass: (padded x, kernel, bias, pool)
FUSED: dict[str, Callable[..., Array]] = {"tiled": conv_relu_pool, "winograd_tiled": _winograd_relu_pool}

GROUPED: dict[str, Callable[..., Array]] = {"lax": lax_conv, "taps": depthwise_taps}
