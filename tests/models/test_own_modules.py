"""Modules of the user's own: flax's BatchNorm, dropout and Conv, nnx modules and factories of them."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from fedjax_async.base.notices import RunWarning
from fedjax_async.config import Settings, prepare
from fedjax_async.local import local_training, run_job
from fedjax_async.local.batches import seed_of
from fedjax_async.models import flattened, from_flax, from_nnx, in_dtype, lora, make
from fedjax_async.models.nnx import makes_nnx
from fedjax_async.types import Message
from tests.local import textbook
from tests.local.made_up import FEATURES, client_data, pool, rows_of
from tests.refusals import refusals
from tests.told import warned

KEY, BATCH, LR = jax.random.key(3), 8, 0.1


class Linen(nn.Module):
    """Flax's own BatchNorm, called without a mask."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(3)(x))
        return nn.Dense(3)(x)


class Nnx(nnx.Module):
    """The same in nnx, with dropout (off by default) behind it."""

    def __init__(self, rngs, rate=0.0):
        self.first = nnx.Linear(FEATURES, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.last = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(self.norm(self.first(x))))


@pytest.fixture
def as_usual():
    """JAX's usual promotion: flax's BatchNorm needs it in float64."""
    with jax.numpy_dtype_promotion("standard"):
        yield


MODELS = {"linen": from_flax(Linen(), input_shape=(FEATURES,)), "nnx": from_nnx(Nnx)}


@functools.cache
def started(kind):
    return jax.jit(MODELS[kind].init)(jax.random.key(1))


@functools.cache
def programs(kind):
    """``run_job`` of SGD, and the gradient of the mean loss of a batch with the changed statistics."""
    model = MODELS[kind]
    client = local_training(model, optimizer=optax.sgd(LR), batch_size=BATCH)

    @functools.partial(jax.jit, static_argnums=2)
    def job(params, data, steps):
        return run_job(client, KEY, Message(params), (), data, steps)[0]

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def slope(weights, before, x, y):
        outputs, changed = model.train({**before, "params": weights}, x, KEY, jnp.ones(len(x)))
        return model.loss(outputs, y).mean(), changed

    return job, slope


@pytest.mark.float64
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("size", [BATCH + 1, BATCH + 2])
@pytest.mark.usefixtures("as_usual")
def test_padded_rows_enter_neither_statistics_nor_weights(kind, size):
    """One epoch against a loop over batches of their own size; one example alone has no variance to take."""
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), started(kind))
    (job, slope), steps = programs(kind), -(-size // BATCH)
    upload = job(params, client_data(size=size), steps)
    x, y, _ = pool()
    after = params
    for positions in textbook.batches(tuple(int(word) for word in seed_of(KEY)), size, BATCH, steps):
        rows = rows_of(size=size)[positions]
        gradient, changed = slope(after["params"], after, x[rows], y[rows])
        weights = jax.tree.map(lambda w, g: w - LR * g, after["params"], gradient)
        after = {"params": weights, "batch_stats": (changed if len(rows) > 1 else after)["batch_stats"]}
    want = jax.tree.map(lambda a, b: a - b, after, params)
    jax.tree.map(lambda have, w: np.testing.assert_allclose(have, w, rtol=1e-6, atol=1e-9), upload, want)
    assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(upload["batch_stats"]))


@pytest.mark.parametrize("kind", MODELS)
def test_in_evaluation_the_running_statistics_are_used_and_stay(kind):
    model, params = MODELS[kind], started(kind)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, FEATURES)), jnp.float32)
    whole = model.apply(params, x)
    np.testing.assert_allclose(whole[:2], model.apply(params, x[:2]), rtol=1e-6)
    _, changed = model.train(params, x, KEY, jnp.ones(6))
    assert np.abs(model.apply(changed, x) - whole).max() > 1e-3


class Picture(nnx.Module):
    def __init__(self, rngs):
        self.conv, self.output = nnx.Conv(1, 4, (3, 3), rngs=rngs), nnx.Linear(64, 3, rngs=rngs)

    def __call__(self, x):
        return self.output(self.conv(x).reshape(len(x), -1))


def test_maps_that_nnx_modules_flatten_must_be_given():
    """None was found, so that weights went to PyTorch and came from it in another order."""
    with pytest.raises(ValueError, match=r"^flattened = None: must be \{layer: channels of the map before it\}, since"):
        flattened(from_nnx(Picture), (4, 4, 1))
    assert flattened(MODELS["nnx"], (FEATURES,)) == {}


class Both(nn.Module):
    """Takes both of the arguments that say whether to train."""

    @nn.compact
    def __call__(self, x, train=False, deterministic=True):
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dropout(0.5, deterministic=deterministic)(nn.Dense(64)(x))


@pytest.mark.usefixtures("as_usual")
def test_each_argument_that_says_whether_to_train_is_given():
    model, x = from_flax(Both(), input_shape=(FEATURES,)), jnp.eye(4, FEATURES)
    params = model.init(KEY)
    assert np.count_nonzero(model.apply(params, x)) == 4 * 64
    assert np.count_nonzero(model.train(params, x, KEY, jnp.ones(4))[0]) < 4 * 64


class Shifted(nnx.Module):
    """A constant between two layers."""

    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(FEATURES, 3, rngs=rngs), nnx.Linear(3, 3, rngs=rngs)
        self.shift = nnx.Variable(jnp.ones((1, 3)))

    def __call__(self, x):
        return self.last(self.first(x) + self.shift[...])


PLAIN = make("mlp:hidden=4", num_classes=3, input_shape=(FEATURES,))


@pytest.mark.usefixtures("as_usual")
@pytest.mark.parametrize("model", [*MODELS.values(), from_nnx(Shifted), lora(PLAIN, PLAIN.init(KEY), rank=1)])
def test_half_precision_reaches_every_product(model):
    """Constants in float32, and nnx's BatchNorm, turned everything behind them into float32."""
    low, params, x = in_dtype(model, jnp.bfloat16), model.init(KEY), jnp.ones((4, FEATURES))
    steps = [lambda: low.apply(params, x, KEY)] + [lambda: low.train(params, x, KEY, jnp.ones(4))] * bool(model.train)
    for step in [lambda: low.apply(params, x), *steps]:
        products = re.findall(r":(\w+)\[[\d,]*\] = dot_general", str(jax.make_jaxpr(step)()))
        assert len(products) >= 2 and set(products) == {"bf16"}


def test_an_nnx_module_is_equal_to_itself_outside_and_dropout_follows_the_key():
    model, module = MODELS["nnx"], Nnx(nnx.Rngs(jax.random.key(4)))
    params, x = model.init(jax.random.key(4)), jnp.ones((5, FEATURES)) * jnp.arange(5.0)[:, None]
    outputs, changed = model.train(params, x, KEY, jnp.ones(5))
    module.train()
    np.testing.assert_allclose(outputs, module(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(changed["batch_stats"]["norm"]["mean"], module.norm.mean[...], rtol=1e-6)
    module.eval()
    np.testing.assert_allclose(model.apply(changed, x), module(x), rtol=1e-5, atol=1e-6)
    dropping = from_nnx(functools.partial(Nnx, rate=0.5))
    one, again, other, off = (dropping.apply(params, x, key and jax.random.key(key)) for key in (1, 1, 2, None))
    np.testing.assert_array_equal(one, again)
    assert np.any(one != other)
    np.testing.assert_array_equal(off, model.apply(params, x))


def test_a_class_is_a_factory_and_a_module_says_what_to_give_instead():
    """That seeds start from other weights is tested with the other cautions."""

    class Net(nnx.Module):
        def __init__(self, rngs, width=4):
            self.first, self.last = nnx.Linear(6, width, rngs=rngs), nnx.Linear(width, 10, rngs=rngs)

        def __call__(self, x):
            return self.last(nnx.relu(self.first(x)))

    world = {"method": "asgd", "dataset": "synthetic:features=6", "clients": 3, "updates": 3}
    _, lines = warned(prepare, Settings(model=Net, **world), kind=RunWarning)
    assert lines == []
    with pytest.warns(RunWarning, match=r"give a factory, lambda rngs: Net\(rngs=rngs\)"):
        prepare(Settings(model=Net(nnx.Rngs(0)), **world))


def test_what_makes_nnx_modules_is_told_by_what_it_needs():
    assert all(map(makes_nnx, (Nnx, functools.partial(Nnx, rate=0.1), lambda rngs: Nnx(rngs, rate=0.1))))
    assert not any(map(makes_nnx, (lambda x: x, Nnx(nnx.Rngs(0)), functools.partial(Nnx, nnx.Rngs(0)), nnx.Linear, 3)))


class Embedded(nn.Module):
    """An embedding of flax, which reads whole numbers only."""

    @nn.compact
    def __call__(self, codes):
        return nn.Dense(3, name="output")(nn.Embed(7, 4, name="embed")(codes).reshape(len(codes), -1))


def test_a_linen_module_may_read_codes():
    model, codes = from_flax(Embedded(), input_shape=(2,)), jnp.array([[1, 6], [0, 2]], jnp.uint8)
    params = model.init(KEY)
    by_hand = np.asarray(params["embed"]["embedding"])[codes].reshape(2, 8) @ np.asarray(params["output"]["kernel"])
    np.testing.assert_allclose(model.apply(params, codes), by_hand, rtol=1e-5)
    assert flattened(model, (2,)) == {}
    with pytest.raises(ValueError, match="Input type must be an integer"):
        model.apply(params, codes.astype(float))


class Stacked(nnx.Module):
    """Three equal layers with dropout, made by ``nnx.vmap`` and run by ``nnx.scan``."""

    def __init__(self, rngs):
        made = nnx.vmap(lambda rngs: nnx.Dropout(0.5, rngs=rngs), in_axes=0, out_axes=0)
        self.layers = nnx.split_rngs(splits=3)(made)(rngs)
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return run(x, self.layers) * self.scale


def test_layers_made_by_vmap_draw_dropout_of_their_own():
    model = from_nnx(Stacked)
    out = np.asarray(jax.jit(model.apply)(model.init(KEY), jnp.ones((200, 5)), KEY))
    assert set(np.unique(out)) == {0.0, 8.0}
    assert 0.08 < (out > 0).mean() < 0.17  # an eighth; a half if all layers drew the same


class Counting(nnx.Module):
    """Keeps the mean of its inputs, which would count padded rows."""

    def __init__(self, rngs, kind=nnx.BatchStat):
        self.layer, self.mean = nnx.Linear(4, 3, rngs=rngs), kind(jnp.zeros(4))

    def __call__(self, x):
        self.mean[...] = x.mean(axis=0)
        return self.layer(x)


class Shaped(nn.Module):
    """Merges the batch with another axis before BatchNorm."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train)(x.reshape(-1, 2))
        return nn.Dense(3)(x.reshape(-1, 4))


class Own(nn.Module):
    """Statistics without BatchNorm."""

    @nn.compact
    def __call__(self, x, train=False):
        self.variable("batch_stats", "mean", jnp.zeros, 4)
        return nn.Dense(3)(x)


def counting(kind):
    return functools.partial(Counting, kind=kind)


def applied(model):
    return model.apply(model.init(KEY), jnp.ones((2, 4)))


def trained(model):
    return model.train(model.init(KEY), jnp.ones((3, 4)), KEY, jnp.ones(3))


of_flax = functools.partial(from_flax, input_shape=(4,))
OF_COUNTING = "nnx.BatchStat of = ['Counting']: must be of nnx.BatchNorm"
test_state_that_padded_rows_would_enter_is_refused = refusals(
    (lambda: from_nnx(Counting), OF_COUNTING),
    (lambda: from_nnx(counting(lambda start: nnx.List([nnx.BatchStat(start)]))), OF_COUNTING),
    (
        lambda: applied(from_nnx(counting(nnx.Variable))),
        r"module state = \['Variable'\]: must be nnx.Param, .* training doe",
    ),
    (lambda: of_flax(Own()), "batch_stats of = ['']: must be none, or batch_stats of BatchNorm"),
    (lambda: trained(of_flax(Shaped())), "first axis of BatchNorm's input = 6: must be 3, the examples of the batch"),
    (lambda: of_flax(nn.Sequential([nn.relu])), "module = 'Sequential': must be a module with parameters"),
)


class Convolutions(nn.Module):
    """Convolutions of all kinds that flax's Conv has, dilated ones if ``dilation`` is above 1."""

    dilation: int = 1

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(6, (5, 5), padding="SAME")(x))
        x = nn.relu(nn.Conv(6, (3, 3), strides=2, feature_group_count=6, padding=1)(x))
        x = nn.relu(nn.Conv(4, (3, 3), padding="VALID", kernel_dilation=self.dilation, use_bias=False)(x))
        return nn.Dense(3)(x.reshape(len(x), -1))


def test_convolutions_of_a_module_use_our_lowerings_and_are_equal_in_values_and_gradients():
    model, x = from_flax(Convolutions(), input_shape=(12, 12, 1)), jax.random.normal(KEY, (5, 12, 12, 1))
    params = jax.jit(model.init)(jax.random.key(1))
    ours, flaxs = (
        jax.jit(jax.value_and_grad(lambda params, apply=apply: jnp.square(apply(params, x)).sum())).lower(params)
        for apply in (model.apply, lambda params, x: Convolutions().apply({"params": params}, x))
    )
    assert ours.as_text().count("stablehlo.convolution") < flaxs.as_text().count("stablehlo.convolution")
    (have, got), (want, wanted) = (program.compile()(params) for program in (ours, flaxs))
    np.testing.assert_allclose(have, want, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), got, wanted)


def test_an_nnx_convolution_is_equal_too_and_a_slow_one_is_said():
    model, module = from_nnx(lambda rngs: nnx.Conv(1, 4, (3, 3), rngs=rngs)), nnx.Conv(1, 4, (3, 3), rngs=nnx.Rngs(KEY))
    x = jax.random.normal(KEY, (2, 8, 8, 1))
    np.testing.assert_allclose(model.apply(model.init(KEY), x), module(x), rtol=1e-5, atol=1e-6)
    dilated = from_flax(Convolutions(dilation=2), input_shape=(12, 12, 1))
    with pytest.warns(RunWarning, match="a dilated or three-dimensional convolution goes through XLA's own"):
        dilated.apply(dilated.init(KEY), jnp.ones((1, 12, 12, 1)))
