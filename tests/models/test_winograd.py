"""Winograd's convolution: its matrices, its tiles, and its error in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.models import LOWERINGS, MODELS
from fedjax_async.models.winograd import TRANSFORMS, grid_of, outputs_of, patches_added, patches_of, tiles_of

PADDING = {"SAME": ((1, 1), (1, 1)), "VALID": ((0, 0), (0, 0)), "uneven": ((0, 2), (3, 1))}
TILES = {"winograd": 4, "winograd_small": 2}


@pytest.mark.parametrize("m", TRANSFORMS)
def test_the_matrices_filter_one_dimension(m):
    """``A^T [(G g) * (B^T d)]`` is the correlation of d with g, for every unit vector d and g, exactly."""
    t = TRANSFORMS[m]
    for i in range(m + 2):
        for j in range(3):
            d, g = np.eye(m + 2)[i], np.eye(3)[j]
            expected = np.correlate(d, g, "valid")
            np.testing.assert_allclose(t.output @ ((t.kernel @ g) * (t.data @ d)), expected, atol=1e-14)


@pytest.mark.parametrize("m", TRANSFORMS)
@pytest.mark.parametrize("padding", PADDING.values(), ids=PADDING)
def test_patches_and_tiles_have_their_adjoints(m, padding):
    """<patches(x), p> = <x, added(p)> and <outputs(t), y> = <t, tiles(y)>; integers in float32, so exactly."""
    rng, grid = np.random.default_rng(0), grid_of(m, (7, 10), padding)

    def draw(*shape):
        return jnp.asarray(rng.integers(-8, 9, shape), jnp.float32)

    x, count = draw(3, 7, 10, 2), 3 * grid.tiles[0] * grid.tiles[1]
    p, t = draw((m + 2) ** 2, count, 2), draw(m * m, count, 2)
    y = draw(3, *grid.outputs, 2)

    @jax.jit
    def products(x, p, t, y):
        pairs = (patches_of(x, grid), p), (x, patches_added(p, grid)), (outputs_of(t, grid), y), (t, tiles_of(y, grid))
        return [jnp.vdot(*pair) for pair in pairs]

    patches, added, outputs, tiles = products(x, p, t, y)
    assert patches == added and outputs == tiles


def value_and_gradients(name, padding, strides=(1, 1)):
    """A function of x, kernel and weights: outputs and both gradients of their weighted sum."""

    def run(x, kernel, weights):
        out, back = jax.vjp(lambda x, k: LOWERINGS[name](x, k, strides, padding), x, kernel)
        return out, *back(weights)

    return jax.jit(run)


def arrays(size, channels, padding, batch=2, clients=()):
    rng = np.random.default_rng(1)
    outputs = [n + sum(pads) - 2 for n, pads in zip(size, padding)]
    shapes = ((batch, *size, channels[0]), (3, 3, *channels), (batch, *outputs, channels[1]))
    return [rng.normal(size=(*clients, *shape)) for shape in shapes]


@pytest.mark.float64
@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize(
    ("size", "padding"), [((8, 8), "SAME"), ((5, 11), "VALID"), ((6, 3), "uneven"), ((2, 1), "SAME")]
)
def test_equals_lax_in_double_precision(name, size, padding):
    """Also where H and W are not multiples of the tile."""
    pads = PADDING[padding]
    given = [jnp.asarray(a) for a in arrays(size, (3, 4), pads)]
    results = [value_and_gradients(how, pads)(*given) for how in (name, "lax")]
    for got, expected in zip(*results):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-10)


@pytest.mark.float64
@pytest.mark.parametrize("name", TILES)
def test_clients_in_a_loop_have_their_own_kernels(name):
    """``vmap`` over clients of two steps in a ``fori_loop`` = lax, one client at a time, step by step."""
    pads = PADDING["SAME"]

    def stepped(how):
        def job(x, kernel, weights):
            return jax.lax.fori_loop(
                0, 2, lambda _, k: k - 0.1 * value_and_gradients(how, pads)(x, k, weights)[2], kernel
            )

        return job

    given = [jnp.asarray(a) for a in arrays((6, 5), (2, 3), pads, clients=(3,))]
    together = jax.jit(jax.vmap(stepped(name)))(*given)
    plain = jax.jit(lambda *a: jax.lax.map(lambda row: stepped("lax")(*row), a))(*given)
    np.testing.assert_allclose(together, plain, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("name", "bound"), [("winograd", 1e-5), ("winograd_small", 2e-6)])
def test_error_in_single_precision(name, bound):
    """Largest error of outputs and gradients, relative to the largest entry, for normal data and 128 channels."""
    pads = PADDING["SAME"]
    given = arrays((12, 12), (128, 64), pads, batch=4)
    single = value_and_gradients(name, pads)(*[jnp.asarray(a, jnp.float32) for a in given])
    with jax.enable_x64(True):
        exact = jax.tree.map(np.asarray, value_and_gradients("im2col", pads)(*map(jnp.asarray, given)))
    for got, expected in zip(single, exact):
        assert got.dtype == jnp.float32
        error = np.abs(np.asarray(got, np.float64) - expected).max() / np.abs(expected).max()
        assert 0 < error < bound


def test_other_convolutions_are_im2col():
    """Strides, other kernels and low precision give the same program, so bitwise the same results."""
    rng = np.random.default_rng(2)
    for size, strides, dtype in (
        ((3, 3), (2, 2), "float32"),
        ((1, 1), (1, 1), "float32"),
        ((3, 3), (1, 1), "bfloat16"),
    ):
        x, k = jnp.asarray(rng.normal(size=(2, 6, 6, 3)), dtype), jnp.asarray(rng.normal(size=(*size, 3, 4)), dtype)
        outs = [LOWERINGS[how](x, k, strides, ((0, 0), (0, 0))) for how in ("winograd", "im2col")]
        assert outs[0].dtype == dtype
        np.testing.assert_array_equal(*outs)


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
    distance = {name: np.linalg.norm(trained(name) - base) for name in ("lax", None, *TILES)}
    print({name: float(d) for name, d in distance.items()}, "of", float(np.linalg.norm(base)))
    assert all(0 < distance[name] <= 2 * distance["lax"] for name in (None, *TILES))
