"""Winograd's convolutions, of 3 x 3 kernels and of 5 x 5 kernels in tiles: exact, and their error in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.models import LOWERINGS, MODELS
from fedjax_async.models.lowerings import FUSED
from tests.models.test_conv import compiled

PADDING = {"SAME": ((1, 1), (1, 1)), "VALID": ((0, 0), (0, 0)), "uneven": ((0, 2), (3, 1))}
SQUARE = ("winograd", "winograd_small")  # of 3 x 3 kernels


def plain(name, padding):
    return lambda variables, x: LOWERINGS[name](x, variables["params"], (1, 1), padding)


def pooled(name):
    return lambda variables, x: FUSED[name](x, variables["params"], None, "avg")


def arrays(size, channels, batch=2, side=3):
    """Kernels and inputs."""
    rng = np.random.default_rng(1)
    return [rng.normal(size=shape) for shape in ((side, side, *channels), (batch, *size, channels[0]))]


@pytest.mark.float64
@pytest.mark.parametrize(
    ("name", "size", "side", "padding"),
    [
        ("winograd", (8, 8), 3, "SAME"),
        ("winograd", (5, 11), 3, "VALID"),
        ("winograd", (6, 3), 3, "uneven"),
        ("winograd", (2, 1), 3, "SAME"),
        ("winograd_small", (6, 3), 3, "uneven"),
        ("winograd_small", (5, 4), 3, "SAME"),
        ("winograd_tiled", (7, 9), 5, "uneven"),
    ],
)
def test_equals_lax_in_double_precision(name, size, side, padding):
    """Also where H and W are not multiples of the tile."""
    pads = PADDING[padding]
    kernel, x = map(jnp.asarray, arrays(size, (3, 4), side=side))
    have, want = (compiled(plain(way, pads), kernel, x) for way in (name, "lax"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-10), have, want)


WIDE, SAME = arrays((12, 12), (128, 64), batch=4), PADDING["SAME"]


@pytest.mark.parametrize(
    ("way", "usual", "given", "bound"),
    [
        (plain("winograd", SAME), plain("im2col", SAME), WIDE, 2e-5),
        (plain("winograd_small", SAME), plain("im2col", SAME), WIDE, 2e-6),
        # pooled in the same pass, with an odd last row
        (pooled("winograd_tiled"), pooled("tiled"), arrays((15, 14), (128, 16), batch=4, side=5), 2e-5),
    ],
    ids=["winograd", "winograd_small", "winograd_tiled"],
)
def test_error_in_single_precision(way, usual, given, bound):
    """The largest error of outputs and of both gradients, relative to the largest entry; normal data, 128 channels."""
    single = jax.tree.leaves(compiled(way, *(jnp.asarray(a, jnp.float32) for a in given)))
    assert {each.dtype for each in single} == {jnp.dtype("float32")}
    with jax.enable_x64(True):
        exact = [np.asarray(leaf) for leaf in jax.tree.leaves(compiled(usual, *map(jnp.asarray, given)))]
    found = [np.abs(np.asarray(a, np.float64) - b).max() / np.abs(b).max() for a, b in zip(single, exact, strict=True)]
    assert 0 < min(found) <= max(found) < bound


@pytest.mark.parametrize(
    ("name", "usual", "side", "size", "strides", "dtype"),
    [
        ("winograd", "im2col", 3, 6, (2, 2), "float32"),
        ("winograd", "im2col", 1, 6, (1, 1), "float32"),
        ("winograd", "im2col", 3, 6, (1, 1), "bfloat16"),
        ("winograd_tiled", "tiled", 3, 8, (1, 1), "float32"),
        ("winograd_tiled", "tiled", 5, 9, (2, 2), "float32"),
        ("winograd_tiled", "tiled", 5, 7, (1, 1), "float32"),
        ("winograd_tiled", "tiled", 5, 8, (1, 1), "bfloat16"),
    ],
)
def test_other_convolutions_have_the_usual_lowering(name, usual, side, size, strides, dtype):
    """Strides, other kernels and low precision give the same program."""
    x, k = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((2, size, size, 3), (side, side, 3, 4)))

    def program(function, *options):
        return str(jax.make_jaxpr(lambda x, k: function(x, k, *options))(x, k))

    plain = [program(LOWERINGS[how], strides, PADDING["VALID"]) for how in (name, usual)]
    assert plain[0] == plain[1]
    if name in FUSED and strides == (1, 1) and size == 8:
        assert program(FUSED[name], None, "max") == program(FUSED[usual], None, "max")


@pytest.mark.slow
def test_fifty_steps_of_vgg11_stay_as_close_to_im2col_as_with_lax():
    """Rounding errors grow over the steps in every lowering; Winograd's differs at most twice as much as ``lax``.

    The same holds for the lowerings that the table chooses (``None``).
    """
    rng = np.random.default_rng(3)
    x, y = jnp.asarray(rng.normal(size=(50, 16, 32, 32, 3)), jnp.float32), jnp.asarray(rng.integers(0, 10, (50, 16)))
    mask, key = jnp.ones(16, bool), jax.random.key(0)

    def trained(lowering):
        model = MODELS["vgg11"](lowering=lowering)
        params = model.init(jax.random.key(1))

        @jax.jit
        def step(params, x, y):
            def loss(weights):
                out, updated = model.train({**params, "params": weights}, x, key, mask)
                return model.loss(out, y).mean(), updated

            gradients, updated = jax.grad(loss, has_aux=True)(params["params"])
            return {**updated, "params": jax.tree.map(lambda w, g: w - 0.01 * g, params["params"], gradients)}

        for k in range(50):
            params = step(params, x[k], y[k])
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params["params"])])

    base = trained("im2col")
    distance = {name: np.linalg.norm(trained(name) - base) for name in ("lax", None, *SQUARE)}
    print({name: float(d) for name, d in distance.items()}, "of", float(np.linalg.norm(base)))
    assert all(0 < distance[name] <= 2 * distance["lax"] for name in (None, *SQUARE))
