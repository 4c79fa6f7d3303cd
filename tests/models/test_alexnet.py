"""AlexNet: its size by hand, its shapes, and training several clients at once."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async import tree
from fedjax_async.data import Dataset, decode, federate
from fedjax_async.local import local_training, run_job
from fedjax_async.models import make
from fedjax_async.types import ClientData, Message

FIRST = {1: 11 * 11 * 1 * 64 + 64, 3: 11 * 11 * 3 * 64 + 64}
REST = 25 * 64 * 192 + 192 + 9 * 192 * 384 + 384 + 9 * 384 * 256 + 256 + 9 * 256 * 256 + 256


def dense(*widths):
    return sum((a + 1) * b for a, b in itertools.pairwise(widths))


SIZES = {
    ("alexnet", (32, 32, 3), 10): (FIRST[3] + REST + dense(256, 10), 2_472_266),
    ("alexnet", (28, 28, 1), 10): (FIRST[1] + REST + dense(256, 10), 2_456_778),
    ("alexnet:variant=full", (32, 32, 3), 10): (FIRST[3] + REST + dense(256, 4096, 4096, 10), 20_344_650),
    # torchvision's
    ("alexnet:variant=full", (224, 224, 3), 1000): (FIRST[3] + REST + dense(256 * 36, 4096, 4096, 1000), 61_100_840),
}


@pytest.mark.parametrize("case", SIZES)
def test_number_of_parameters_and_shape_of_outputs(case):
    spec, shape, classes = case
    model = make(spec, input_shape=shape, num_classes=classes)
    params = jax.eval_shape(model.init, jax.random.key(0))
    by_hand, published = SIZES[case]
    assert tree.num_scalars(params) == by_hand == published
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    x = jax.ShapeDtypeStruct((2, *shape), jnp.float32)
    for key in (None, jax.random.key(1)):
        assert jax.eval_shape(lambda p, x, key=key: model.apply(p, x, key), params, x).shape == (2, classes)


def narrow(shape, **options):
    spec = ",".join(["alexnet:width=0.0625", *(f"{name}={value}" for name, value in options.items())])
    return make(spec, num_classes=3, input_shape=shape)


@pytest.mark.slow_cases("shape1")
@pytest.mark.parametrize("shape", [(32, 32, 3), (28, 28, 1)])
def test_one_local_step_vmapped_over_clients_equals_one_at_a_time(shape):
    model, rng = narrow(shape, lowering="lax"), np.random.default_rng(0)  # the quickest to compile
    x = rng.normal(size=(12, *shape)).astype(np.float32)
    y = rng.integers(0, 3, 12).astype(np.int32)
    data = federate(Dataset("images", x, y, x, y, decode.as_is, num_classes=3), "iid", 3)
    algorithm = local_training(model, optimizer=optax.sgd(0.1), batch_size=4)
    params = jax.jit(model.init)(jax.random.key(1))

    def job(key, offset, size):
        pool = (jnp.asarray(data.x), jnp.asarray(data.y), jnp.asarray(data.order))
        return run_job(algorithm, key, Message(params), (), ClientData(*pool, offset, size), 1)[0]

    keys, offset, size = jax.random.split(jax.random.key(2), 3), jnp.asarray(data.offset), jnp.asarray(data.size)
    together = jax.tree.map(np.asarray, jax.jit(jax.vmap(job))(keys, offset, size))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(together))
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(together))  # every layer learns
    alone = jax.jit(job)(keys[1], offset[1], size[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[1], b, rtol=1e-3, atol=1e-6), together, alone)


def test_usual_lowerings_give_the_same_network():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(2, 32, 32, 3)), jnp.float32)
    usual, plain = narrow((32, 32, 3)), narrow((32, 32, 3), lowering="lax")
    params = jax.jit(plain.init)(jax.random.key(3))
    np.testing.assert_allclose(jax.jit(usual.apply)(params, x), jax.jit(plain.apply)(params, x), rtol=1e-4, atol=1e-5)


def test_only_the_full_network_has_dropout():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 12, 12, 1)), jnp.float32)
    for variant, changes in {"small": False, "full": True}.items():
        model = narrow((12, 12, 1), variant=variant, lowering="lax")
        params, apply = jax.jit(model.init)(jax.random.key(0)), jax.jit(model.apply)
        one, other = (apply(params, x, jax.random.key(n)) for n in (1, 2))
        assert (not np.array_equal(one, other)) == changes


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("alexnet:variant=wide", "variant = 'wide'"),
        ("alexnet:width=0", "width = 0"),
        ("alexnet:lowering=fft", "lowering = 'fft'"),
        ("alexnet:num_classes=1", "num_classes = 1"),
        ("alexnet:variant=full,input_shape=4", "input_shape"),
    ],
)
def test_bad_options_are_named(spec, named):
    with pytest.raises(ValueError, match=named):
        make(spec)


def test_images_too_small_for_the_full_network_are_refused():
    with pytest.raises(ValueError, match=r"input_shape = \(6, 6, 1\): must be at least 7 x 7"):
        make("alexnet:variant=full", input_shape=(6, 6, 1))
