"""Convolutions in every lowering, alone and with a client axis, and pools equal those of ``flax.linen``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedjax_async.models import LOWERINGS, Conv, ConvPool, avg_pool, max_pool
from tests.refusals import refusals


def value_and_gradients(apply, params, x):
    """Outputs, and the gradients of an unequally weighted sum of them with respect to parameters and input."""

    def total(params, x):
        out = apply({"params": params}, x)
        return (out * jnp.sin(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)).sum(), out

    gradients, out = jax.grad(total, argnums=(0, 1), has_aux=True)(params, x)
    return out, gradients


compiled = jax.jit(value_and_gradients, static_argnums=0)


def drawn_as(module, rng, x):
    """Random parameters for a module of flax."""
    shapes = jax.eval_shape(module.init, jax.random.key(0), x)["params"]
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape)), shapes)


def aborts_xla(size, kernel, strides, padding):
    """Whether XLA's own gradient with respect to the inputs ends the process, in JAX 0.10: a failed check of its
    algebraic simplifier, where an axis has a kernel of 2 at stride 2, padding (1, 1) and an even size."""
    pairs = ((padding, padding),) * len(kernel) if isinstance(padding, int) else padding
    each = zip(size, kernel, strides, () if isinstance(padding, str) else pairs)
    return any(n % 2 == 0 and (k, s, tuple(pads)) == (2, 2, (1, 1)) for n, k, s, pads in each)


def agree(a, b, tolerance=1e-10):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


sizes, steps = st.integers(1, 5), st.integers(1, 3)
PADDINGS = {2: ["SAME", "VALID", 1, ((0, 2), (1, 0))], 1: ["SAME", "VALID", 2, ((3, 0),)]}
OF_SEQUENCES = [name for name in LOWERINGS if "winograd" not in name]  # Winograd's would use ``im2col``
KINDS = {  # axes, lowerings, groups, and channels if they are not drawn
    "dense": (2, LOWERINGS, 1, None),
    "grouped": (2, ["lax"], 3, (6, 9)),
    "depthwise": (2, ["taps"], 3, (3, 3)),
    "sequences": (1, OF_SEQUENCES, 1, None),
    "depthwise sequences": (1, ["lax", "taps"], 3, (3, 3)),
}


@pytest.mark.float64
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=3)
@given(
    kernel=st.tuples(sizes, sizes),
    extra=st.tuples(sizes, sizes),
    strides=st.tuples(steps, steps),
    channels=st.tuples(steps, steps),
    padding=st.integers(0, 3),
    use_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_equals_flax_in_values_and_gradients(kind, kernel, extra, strides, channels, padding, use_bias, seed):
    axes, names, groups, given = KINDS[kind]
    (inputs, features), rng = given or channels, np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(2, *(k + more - 1 for k, more in zip(kernel[:axes], extra)), inputs)))
    assume(not aborts_xla(x.shape[1:-1], kernel[:axes], strides[:axes], PADDINGS[axes][padding]))
    options = {"padding": PADDINGS[axes][padding], "use_bias": use_bias, "feature_group_count": groups}
    theirs = nn.Conv(features, kernel[:axes], strides[:axes], param_dtype=jnp.float64, **options)
    params = drawn_as(theirs, rng, x)
    expected = compiled(theirs.apply, params, x)
    for name in names:
        ours = Conv(features, kernel[:axes], strides[:axes], lowering=name, **options)
        mine = jax.eval_shape(ours.init, jax.random.key(0), x)["params"]
        assert jax.tree.map(jnp.shape, mine) == jax.tree.map(jnp.shape, params)
        agree(compiled(ours.apply, params, x), expected)


@pytest.mark.float64
@pytest.mark.parametrize("lowering", [*LOWERINGS, "depthwise"])
def test_clients_with_their_own_kernels(lowering):
    """vmap over parameters and data = one client after the other.

    Winograd's convolutions are of kernels of 3 x 3, or of 5 x 5 in tiles.
    """
    k = 3 if lowering in ("winograd", "winograd_small", "depthwise") else 5
    shape, options, how = (2, 2, 8, 8, 2), {}, {"lowering": lowering}
    if lowering == "depthwise":
        shape, options, how = (2, 2, 6, 5, 4), {"strides": 2, "padding": 1, "feature_group_count": 4}, {}
    ours, theirs = Conv(4, k, **options, **how), nn.Conv(4, (k, k), param_dtype=jnp.float64, **options)
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.normal(size=shape))
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(drawn_as(theirs, rng, x[0]) for _ in range(2)))
    together = jax.jit(jax.vmap(lambda p, x: value_and_gradients(ours.apply, p, x)))(params, x)
    for i in range(2):
        row, have = jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i], ((params, x), together))
        agree(have, compiled(theirs.apply, *row))


@pytest.mark.float64
@settings(max_examples=2)
@given(
    size=st.tuples(st.integers(6, 11), st.integers(6, 11)),
    kernel=st.tuples(sizes, sizes),
    pool=st.sampled_from(["max", "avg"]),
    padding=st.sampled_from(["SAME", "VALID"]),
    use_bias=st.booleans(),
    blank=st.booleans(),
    seed=st.integers(0, 99),
)
def test_conv_pool_equals_conv_then_relu_then_pool(size, kernel, pool, padding, use_bias, blank, seed):
    """Also on images with blank regions, where all entries of a pooling window are equal.

    Winograd's sums for four outputs are rounded, so it is compared on images without equal entries.
    """
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2, *size, 2))
    x[:, : size[0] // 2] = 0.5 if blank else x[:, : size[0] // 2]
    # multiples of 1/64: sums are then exact, so that equal windows are equal in every other lowering
    x, draw = jnp.asarray(np.round(x * 8) / 8), lambda p: jnp.asarray(np.round(rng.normal(size=p.shape) * 8) / 8)
    conv = nn.Conv(3, kernel, padding=padding, use_bias=use_bias, param_dtype=jnp.float64)
    flax_pool = {"max": nn.max_pool, "avg": nn.avg_pool}[pool]
    params = jax.tree.map(draw, jax.eval_shape(conv.init, jax.random.key(0), x)["params"])

    def plain(variables, x):
        return flax_pool(nn.relu(conv.apply(variables, x)), (2, 2), (2, 2))

    images = {False: x, True: x + rng.normal(size=x.shape)}
    with jax.numpy_dtype_promotion("standard"):  # flax's avg_pool divides by a NumPy integer
        expected = {rounded: compiled(plain, params, x) for rounded, x in images.items()}
    for name in LOWERINGS:
        ours, rounded = ConvPool(3, kernel, padding, pool, use_bias, name), name == "winograd"
        agree(compiled(ours.apply, params, images[rounded]), expected[rounded])


def test_same_start_as_flax():
    """The same initialiser and key give the same parameters."""
    x = jnp.zeros((1, 8, 8, 3))
    ours, theirs = (jax.jit(one.init)(jax.random.key(5), x) for one in (Conv(4, 3), nn.Conv(4, (3, 3))))
    agree(ours, theirs, 0.0)


@pytest.mark.float64
def test_second_derivatives_reverse_over_reverse():
    rng = np.random.default_rng(6)
    x, v = jnp.asarray(rng.normal(size=(2, 6, 6, 1))), jnp.asarray(rng.normal(size=(3, 3, 1, 2)))
    k = jnp.asarray(rng.normal(size=(3, 3, 1, 2)))

    def product(lowering):
        def f(k):
            return (LOWERINGS[lowering](x, k, (1, 1), ((1, 1), (1, 1))) ** 3).sum()

        return jax.jit(jax.grad(lambda k: (jax.grad(f)(k) * v).sum()))(k)

    np.testing.assert_allclose(product("tiled"), product("lax"), rtol=1e-10)


test_bad_settings_are_named = refusals(
    (Conv(4, 3, lowering="im2coll"), "did you mean 'im2col'"),
    (Conv(4, 3, padding="FULL"), "padding = 'FULL'"),
    (Conv(4, 9, padding="VALID"), "input size"),
    (Conv(4, 3, feature_group_count=3), "feature_group_count = 3"),
    (Conv(4, 3, feature_group_count=2, lowering="tiled"), "lowering of groups = 'tiled'"),
    (Conv(4, 3, feature_group_count=2, lowering="taps"), "feature_group_count = 2"),
    (Conv(4, (3,)), "kernel_size or strides"),
    (ConvPool(4, 3, pool="median"), "pool = 'median'"),
    (ConvPool(4, 6, "VALID"), "input size"),
    by=lambda module: module.init(jax.random.key(0), jnp.zeros((1, 6, 6, 2))),
)


PAIRS = {"max": (max_pool, nn.max_pool), "avg": (avg_pool, nn.avg_pool)}


@pytest.mark.slow_cases("avg")
@pytest.mark.float64
@settings(max_examples=5)
@given(
    size=st.tuples(st.integers(3, 9), st.integers(3, 9)),
    window=st.sampled_from([(2, 2), (3, 3), (2, 3)]),
    strides=st.sampled_from([None, (2, 2), (1, 2)]),
    padding=st.sampled_from(["VALID", "SAME"]),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize("name", PAIRS)
def test_pools_equal_flax(name, size, window, strides, padding, seed):
    """Whole numbers 0, 1, 2: most windows have ties."""
    ours, theirs = PAIRS[name]
    x = jnp.asarray(np.random.default_rng(seed).integers(0, 3, (2, *size, 3)).astype(np.float64))
    out, (_, gradient) = compiled(lambda _, x: ours(x, window, strides, padding), {}, x)
    with jax.numpy_dtype_promotion("standard"):  # flax's avg_pool divides by a NumPy integer
        want, (_, slope) = compiled(lambda _, x: theirs(x, window, strides or window, padding), {}, x)
    np.testing.assert_allclose(out, want, rtol=1e-14)
    np.testing.assert_allclose(gradient, slope, rtol=1e-12, atol=1e-14)


@pytest.mark.float64
def test_ties_forward_mode_and_nans_of_a_pool():
    """A tie's gradient goes to the first entry, forward mode agrees with reverse mode, a NaN is not lost."""
    ones = jnp.ones((1, 2, 2, 1))
    np.testing.assert_array_equal(jax.grad(lambda x: max_pool(x).sum())(ones)[0, :, :, 0], [[1, 0], [0, 0]])
    nan = ones.at[0, 1, 0, 0].set(jnp.nan)
    assert jnp.isnan(max_pool(nan)).all() and jnp.isnan(avg_pool(nan)).all()
    x, v = jnp.asarray(np.random.default_rng(0).normal(size=(2, 1, 4, 4, 2)))
    _, along = jax.jit(lambda x, v: jax.jvp(lambda x: (max_pool(x) ** 2).sum(), (x,), (v,)))(x, v)
    back = jax.jit(jax.grad(lambda x: (max_pool(x) ** 2).sum()))(x)
    np.testing.assert_allclose(along, np.vdot(back, v), rtol=1e-12)
