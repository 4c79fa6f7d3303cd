"""Winograd's convolution for 5 x 5 kernels in the layout of ``tiled``: exact, with small errors, fused with pooling."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.models.lowerings import FUSED, LOWERINGS
from fedjax_async.models.winograd_tiles import FIVE

NONE = ((0, 0), (0, 0))


def test_the_matrices_filter_one_dimension():
    """``A^T [(G g) * (B^T d)]`` is the correlation of d with g, for every unit vector d and g, exactly."""
    for d in np.eye(6):
        for g in np.eye(5):
            found = FIVE.output @ ((FIVE.kernel @ g) * (FIVE.data @ d))
            np.testing.assert_allclose(found, np.correlate(d, g, "valid"), atol=1e-14)


def results(way, *arrays):
    """Outputs, and gradients of their sum of squares, by ``way(x, kernel)``."""

    def run(x, kernel):
        out, back = jax.vjp(way, x, kernel)
        return out, *back(2 * out)

    return jax.jit(run)(*arrays)


def drawn(size, channels, batch=2):
    rng = np.random.default_rng(1)
    return rng.normal(size=(batch, *size, channels[0])), rng.normal(size=(5, 5, *channels))


@pytest.mark.float64
def test_equals_lax_in_double_precision():
    padding = ((1, 2), (0, 1))
    given = [jnp.asarray(a) for a in drawn((7, 9), (2, 3))]
    ways = [results(lambda x, k, n=n: LOWERINGS[n](x, k, (1, 1), padding), *given) for n in ("winograd_tiled", "lax")]
    for got, expected in zip(*ways, strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-10)


def test_error_in_single_precision_with_pooling_in_the_same_pass():
    """The error relative to the largest entry, for normal data and 128 channels; also with an odd last row."""
    given = drawn((15, 14), (128, 16), batch=4)
    single = results(
        lambda x, k: FUSED["winograd_tiled"](x, k, None, "avg"), *(jnp.asarray(a, jnp.float32) for a in given)
    )
    with jax.enable_x64(True):
        exact = results(lambda x, k: FUSED["tiled"](x, k, None, "avg"), *map(jnp.asarray, given))
        exact = jax.tree.map(np.asarray, exact)
    for got, expected in zip(single, exact, strict=True):
        assert got.dtype == jnp.float32
        assert 0 < np.abs(np.asarray(got, np.float64) - expected).max() / np.abs(expected).max() < 1e-5


@pytest.mark.slow_cases("3-8-strides0-float32")
@pytest.mark.parametrize(
    ("side", "size", "strides", "dtype"),
    [(3, 8, (1, 1), "float32"), (5, 9, (2, 2), "float32"), (5, 7, (1, 1), "float32"), (5, 8, (1, 1), "bfloat16")],
)
def test_other_convolutions_are_tiled(side, size, strides, dtype):
    rng = np.random.default_rng(2)
    x, k = (jnp.asarray(rng.normal(size=s), dtype) for s in ((2, size, size, 3), (side, side, 3, 4)))
    outs = [LOWERINGS[how](x, k, strides, NONE) for how in ("winograd_tiled", "tiled")]
    np.testing.assert_array_equal(*outs)
    if strides == (1, 1) and size == 8:
        np.testing.assert_array_equal(*(FUSED[how](x, k, None, "max") for how in ("winograd_tiled", "tiled")))
