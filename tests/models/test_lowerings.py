"""Lowerings of convolutions: their choice, Winograd's error, and weight gradients summed in parts on an accelerator."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.models import LOWERINGS, MODELS, choice, default_lowering
from fedjax_async.models.choice import ConvShape, MeasuredShape, distance
from fedjax_async.models.long_sums import POSITIONS, RESULTS, parts_of, product, summed_over_positions
from fedjax_async.models.lowerings import FUSED
from tests.models.test_conv import compiled


def test_the_table_names_lowerings_that_were_candidates():
    rows = choice.table()
    assert {row.backend for row in rows} >= {"cpu"} and len({row[:2] for row in rows}) == len(rows)
    for backend, shape, lowering in rows:
        kernel, options = (*shape.kernel, *shape.channels), {"strides": shape.strides, "outputs": shape.outputs}
        assert lowering in LOWERINGS and default_lowering(kernel, backend=backend, **options) == lowering


def test_the_nearest_measured_shape_decides(monkeypatch):
    near, far = (ConvShape((3, 3), (1, 1), (size, size), (2, 3)) for size in (8, 64))
    rows = [("cpu", far, "im2col"), ("cpu", near, "lax"), ("gpu", far, "winograd")]
    rows += [("cpu", near._replace(strides=(2, 2)), "tiled")]
    monkeypatch.setattr(choice, "table", lambda: tuple(MeasuredShape(*row) for row in rows))

    def chosen(size, strides=(1, 1), backend="cpu", kernel=(3, 3)):
        return default_lowering((*kernel, 2, 3), outputs=(size, size), strides=strides, backend=backend)

    assert [chosen(size) for size in (4, 16, 30, 100)] == ["lax", "lax", "im2col", "im2col"]
    assert chosen(4, strides=(2, 2)) == "tiled" and chosen(4, backend="gpu") == "winograd"
    # nothing measured: the rule
    assert chosen(4, backend="tpu") == "im2col" and chosen(4, kernel=(5, 5)) == "tiled"
    for known in ("winograd", None):
        choice.check_lowering(known)
    with pytest.raises(ValueError, match="lowering = 'winogrd': unknown"):
        choice.check_lowering("winogrd")
    assert distance(near, near) == 0 and distance(near, far) == pytest.approx(2 * np.log(8))


@pytest.mark.parametrize(
    ("kernel", "options", "lowering"),
    [
        # results of LeNet-5 stay bitwise as before; only the second layer of the wide one has another lowering
        *(((5, 5, 1, 6), {"outputs": (size, size), "backend": "cpu"}, "tiled") for size in (28, 24)),
        *(((5, 5, 6, 16), {"outputs": (size, size), "backend": "cpu"}, "tiled") for size in (10, 8)),
        *(((5, 5, 3, features), {"outputs": (28, 28), "backend": "cpu"}, "tiled") for features in (6, 32)),
        ((5, 5, 32, 64), {"outputs": (10, 10), "backend": "cpu"}, "winograd_tiled"),
        # where the outputs are not known, or the kernels are of groups
        ((5, 5, 32, 64), {"backend": "cpu"}, "tiled"),
        ((3, 3, 32, 64), {"backend": "cpu"}, "im2col"),
        ((5, 5, 1, 6), {"groups": 2}, "lax"),
        ((3, 3, 1, 6), {"groups": 6, "depthwise": True}, "taps"),
    ],
)
def test_the_lowering_of_a_kernel(kernel, options, lowering):
    assert default_lowering(kernel, **options) == lowering
    assert default_lowering((5, 5, 1, 6), backend="gpu") in LOWERINGS


# --- Winograd's convolutions, of 3 x 3 kernels and of 5 x 5 kernels in tiles: exact, and their error --

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
        ("winograd", (6, 3), 3, "uneven"),
        ("winograd", (2, 1), 3, "SAME"),
        ("winograd_small", (6, 3), 3, "uneven"),
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


def dots(function, *given):
    """Shapes of the results of all matrix products of a function."""
    eqns = jax.make_jaxpr(function)(*given).jaxpr.eqns
    return [eqn.outvars[0].aval.shape for eqn in eqns if eqn.primitive.name == "dot_general"]


@pytest.mark.parametrize(
    ("backend", "positions", "results", "parts"),
    [
        ("gpu", 8 * POSITIONS, 25 * 6, 8),
        ("gpu", POSITIONS - 1, 6, 1),
        ("gpu", 3 * POSITIONS + 1, 6, 1),
        ("gpu", 8 * POSITIONS, RESULTS + 1, 1),
        ("cpu", 100 * POSITIONS, 6, 1),
    ],
)
def test_a_long_sum_with_few_results_has_equal_parts_but_on_a_cpu(monkeypatch, backend, positions, results, parts):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert parts_of(positions, results) == parts


@pytest.mark.float64
def test_in_parts_a_product_and_both_gradients_are_the_same(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    rng = np.random.default_rng(0)
    rows, kernel = jnp.asarray(rng.normal(size=(4 * POSITIONS, 5))), jnp.asarray(rng.normal(size=(5, 3)))

    def loss(product):
        return jax.value_and_grad(lambda rows, kernel: jnp.sum(jnp.sin(product(rows, kernel))), argnums=(0, 1))

    parts, whole = loss(product)(rows, kernel), loss(jnp.matmul)(rows, kernel)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10), parts, whole)
    assert any(shape[0] == 4 for shape in dots(loss(product), rows, kernel))
    np.testing.assert_allclose(summed_over_positions(rows.T, rows.T), rows.T @ rows, rtol=1e-10, atol=1e-9)


@pytest.mark.float64
@pytest.mark.parametrize("lowering", ["im2col", "tiled"])
def test_a_convolution_s_weight_gradient_is_summed_in_parts(monkeypatch, lowering):
    rng = np.random.default_rng(0)
    x, kernel = jnp.asarray(rng.normal(size=(16, 36, 36, 1))), jnp.asarray(rng.normal(size=(5, 5, 1, 2)))

    def loss(kernel):
        return jnp.sum(jnp.sin(LOWERINGS[lowering](x, kernel, (1, 1), ((0, 0), (0, 0)))))

    whole = jax.grad(loss)(kernel)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr("fedjax_async.models.long_sums.POSITIONS", 256)
    np.testing.assert_allclose(jax.grad(loss)(kernel), whole, rtol=1e-9, atol=1e-9)
    assert any(len(shape) == 3 for shape in dots(jax.grad(loss), kernel))


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
