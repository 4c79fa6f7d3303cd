"""Files of weights, and params under PyTorch's names: round trips, and networks in PyTorch's conventions."""

from __future__ import annotations

import functools
import importlib.util
from collections import OrderedDict

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import linen as nn

from fedjax_async import models
from fedjax_async.base.tree import path_of
from fedjax_async.models import arrays_of, flattened, from_torch, to_torch
from fedjax_async.models.safetensors import safetensors_bytes
from fedjax_async.models.state_dicts import has_torch_names
from fedjax_async.models.weights import filled, read_arrays, write_arrays
from tests.refusals import refusals

BATCH = 3
INSTALL = "needs torch: pip install torch"


class Sequences(nn.Module):
    """A convolution of sequences, flattened."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(3, (2,), name="conv")(x)
        return nn.Dense(5, name="output")(x.reshape(len(x), -1))


class Tokens(nn.Module):
    """Embedded codes through a dense layer, then all positions at once."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(6, name="fc1")(nn.Embed(7, 4, name="embed")(x.astype(int)))
        return nn.Dense(3, name="head")(x.reshape(len(x), -1))


class Pooled(nn.Module):
    """The mean and the maximum of a map, side by side; with ``whole``, also the map."""

    whole: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(4, (2, 2), name="conv")(x))
        parts = [x.mean((1, 2)), x.max((1, 2)), *([x.reshape(len(x), -1)] if self.whole else [])]
        return nn.Dense(3, name="head")(jnp.concatenate(parts, axis=1))


class Images(nn.Module):
    """A normalised convolution, its channels weighted by a gate; with ``late``, also a layer that PyTorch lacks."""

    late: nn.Module | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm(name="norm")(nn.Conv(4, (2, 2), name="conv")(x))
        x = Gate(name="gate")(x)
        x = x if self.late is None else self.late(x)
        return nn.Dense(3, name="head")(x.reshape(len(x), -1))


class Gate(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x * nn.Dense(x.shape[-1], name="fc")(x.mean(axis=(1, 2)))[:, None, None]


@functools.cache
def drawn(spec, shape, classes=5):
    """A model, params of random numbers, and inputs."""
    if spec == "sequences":
        model = models.from_flax(Sequences(), input_shape=shape)
    else:
        model = models.make(spec, num_classes=classes, input_shape=shape)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0))

    def number(path, leaf):
        variance = path_of(path)[-1] == "var"
        values = rng.uniform(0.5, 2, leaf.shape) if variance else rng.normal(size=leaf.shape) / leaf.shape[0] ** 0.5
        return values.astype(np.float32)

    params = jax.tree_util.tree_map_with_path(number, shapes)
    return model, params, rng.normal(size=(BATCH, *shape)).astype(np.float32)


def conv2d(x, state, name, padding=0):
    """As a layer of PyTorch, like the two below: images [B, C, H, W], weights [out, in, ...]."""
    weight = state[f"{name}.weight"].astype(np.float64)
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    windows = np.lib.stride_tricks.sliding_window_view(x, weight.shape[2:], axis=(2, 3))  # [B, in, H, W, kh, kw]
    return np.einsum("bihwkl,oikl->bohw", windows, weight) + state[f"{name}.bias"][:, None, None]


def max_pool2d(x):
    b, c, h, w = x.shape
    return x[:, :, : h // 2 * 2, : w // 2 * 2].reshape(b, c, h // 2, 2, w // 2, 2).max(axis=(3, 5))


def linear(x, state, name):
    return x @ state[f"{name}.weight"].astype(np.float64).T + state[f"{name}.bias"]


def lenet5(x, state):
    x = max_pool2d(np.maximum(conv2d(x, state, "conv1", padding=2), 0))
    x = max_pool2d(np.maximum(conv2d(x, state, "conv2"), 0))
    x = x.reshape(len(x), -1)  # channels first
    for name in ("fc1", "fc2"):
        x = np.maximum(linear(x, state, name), 0)
    return linear(x, state, "output")


def test_lenet5_in_pytorchs_conventions_has_the_same_outputs():
    model, params, x = drawn("lenet5", (16, 16, 2))
    given = flattened(model, (16, 16, 2))
    assert given == {"fc1": 16}
    state = to_torch(params, flattened=given)
    assert state["conv2.weight"].shape == (16, 6, 5, 5) and state["fc1.weight"].shape == (120, 64)
    want = np.asarray(jax.jit(model.apply)(params, x))
    np.testing.assert_allclose(lenet5(x.transpose(0, 3, 1, 2), state), want, rtol=1e-4, atol=1e-4)
    unordered = lenet5(x.transpose(0, 3, 1, 2), to_torch(params))
    assert np.abs(unordered - want).max() > 0.1 * np.abs(want).max(), "the order of the flattened map must matter"


def test_dense_layers_of_images_see_channels_first():
    model, params, x = drawn("mlp:hidden=4", (3, 2, 3))
    state = to_torch(params, flattened=flattened(model, (3, 2, 3)), modules={"fc1": "net.0", "output": "net.2"})
    assert sorted(state) == ["net.0.bias", "net.0.weight", "net.2.bias", "net.2.weight"]
    hidden = np.maximum(linear(x.transpose(0, 3, 1, 2).reshape(BATCH, -1), state, "net.0"), 0)
    np.testing.assert_allclose(linear(hidden, state, "net.2"), model.apply(params, x), rtol=1e-5)


def order_of(module, *shape):
    return flattened(models.from_flax(module, input_shape=shape), shape)


def test_maps_of_convolutions_are_not_in_pytorchs_order_and_positions_means_and_maxima_are():
    assert order_of(Tokens(), 5) == order_of(Pooled(), 4, 2, 2) == {}
    assert order_of(Images(), 3, 3, 2) == {"head": 4}


@pytest.mark.slow_cases("vgg11:width=0.05-shape0")
@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        ("vgg11:width=0.05", (32, 32, 3)),  # normalisation with statistics, convolutions, dense layers
        ("sequences", (6, 2)),
        ("char_gru:hidden=4", (6,)),  # an embedding, leaves that PyTorch names otherwise
        ("linear", (4,)),
    ],
)
def test_there_and_back_is_the_same_to_the_bit(spec, shape):
    model, params, _ = drawn(spec, shape, *({"linear": [None], "char_gru:hidden=4": [82]}.get(spec, [])))
    given = flattened(model, shape)
    assert given == ({"output": 3} if spec == "sequences" else {})
    state = to_torch(params, flattened=given)
    back = from_torch(state, params, flattened=given)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    assert has_torch_names(state, params) == (spec != "linear") and not has_torch_names(arrays_of(params), params)


def test_statistics_have_pytorchs_names():
    def layer(channels):
        return {"conv": {"kernel": np.zeros((3, 3, 2, channels))}, "norm": {"scale": np.zeros(channels)}}

    mean = np.arange(4.0)
    statistics = {name: {"norm": {"mean": mean, "var": mean}} for name in ("conv1", "conv2")}
    params = {"params": {"conv1": layer(4), "conv2": layer(4)}, "batch_stats": statistics}
    state = to_torch(params, modules={"conv1": "features.0"})
    np.testing.assert_array_equal(state["features.0.norm.running_mean"], mean)
    assert state["conv2.norm.num_batches_tracked"].shape == () and state["conv2.norm.num_batches_tracked"] == 0
    assert state["conv2.norm.weight"].shape == (4,)


PARAMS = {"conv1": {"kernel": np.zeros((2, 2, 3, 4))}, **drawn("mlp:hidden=4", (3, 2, 3))[1]}
DENSE = {name: layer for name, layer in PARAMS.items() if name != "conv1"}
ATTENTION = {"attention": {"query": {"kernel": np.zeros((8, 2, 4)), "bias": np.zeros((2, 4))}}}
BESIDE = "shape of attention/query/bias = [2, 4]: must be [outputs] beside"
NO_CONV, NO_MAP = (
    "must be a convolution, as its kernel is [",
    "'a flattened map and its means': must be a flattened map",
)


ATTENDING = nn.MultiHeadDotProductAttention(2)


def changed(name, array, **options):
    """Params of a state with one array replaced, or without it."""
    state = {key: value for key, value in (to_torch(DENSE) | {name: array}).items() if value is not None}
    return from_torch(state, DENSE, **options)


def test_params_of_attention_have_no_names_of_pytorch():
    assert not has_torch_names(arrays_of(ATTENTION), ATTENTION)  # files of our names are read as before


test_what_does_not_fit_is_named = refusals(
    (lambda: changed("fc1.bias", None), "shape of fc1.bias in state = None: must be (4,), as the model has it"),
    (lambda: changed("more", np.zeros(2), source="w.pt"), "shape of more in w.pt = (2,): must be none"),
    (lambda: changed("fc1.weight", np.zeros((18, 4))), "shape of fc1.weight in state = (18, 4): must be (4, 18)"),
    (lambda: to_torch(ATTENTION), BESIDE),
    (lambda: from_torch({}, ATTENTION), BESIDE),
    (lambda: order_of(Pooled(whole=True), 4, 2, 2), f"input of head = {NO_MAP}"),
    (lambda: order_of(Images(ATTENDING), 3, 3, 2), f"layer late/query = 'DenseGeneral': {NO_CONV}"),
    (lambda: order_of(Images(nn.ConvTranspose(4, (2, 2))), 3, 3, 2), f"layer late = 'ConvTranspose': {NO_CONV}"),
    begins=True,
)


test_options_that_do_not_fit_are_named = refusals(
    ({"modules": {"fc9": "0"}}, r"^modules = 'fc9': must be one of the layers: conv1, fc1, output$"),
    ({"modules": {"fc1": 3}}, r"^modules\['fc1'\] = 3: must be a name"),
    ({"modules": {"fc1": "output"}}, r"^modules = 'output\.bias': must be other names"),
    ({"modules": ["fc1"]}, r"^modules = 'a list': must be names of layers"),
    ({"flattened": {"conv1": 3}}, r"^flattened = 'conv1': must be one of the dense layers: fc1, output$"),
    ({"flattened": {"fc1": "3"}}, r"^flattened\['fc1'\] = '3': must be a whole number >= 1"),
    ({"flattened": {"fc1": 3.0}}, r"^flattened\['fc1'\] = 3\.0: must be a whole number >= 1"),
    ({"flattened": {"fc1": 4}}, r"^flattened\['fc1'\] = 4: must be a divisor of the 18 inputs"),
    by=lambda options: to_torch(PARAMS, **options),
)


# Networks of the package as a user of PyTorch would write them: "conv1/4/2" has stride 4 and padding 2, "pool/3" pools
# 3 by 3 at stride 2. A layer of VGG is a convolution and its normalisation, under our names.
VGG = "conv1 pool/2 conv2 pool/2 conv3 conv4 pool/2 conv5 conv6 pool/2 conv7 conv8 pool/2 flatten "
NETWORKS = {
    "cnn": "conv1 relu conv2 relu pool/2 flatten fc1 relu dropout output",
    "alexnet:width=0.2,variant=full": (
        "conv1/4/2 relu pool/3 conv2/1/2 relu pool/3 conv3/1/1 relu conv4/1/1 relu conv5/1/1 relu flatten "
        "dropout fc1 relu dropout fc2 relu output"
    ),
    "vgg11:width=0.1": VGG + "output",
    "vgg11:width=0.1,variant=full": VGG + "fc1 relu dropout fc2 relu dropout output",
}


def in_torch(spec, params):
    """The network, and the name of each layer's module."""
    from torch import nn

    params, layers, names = params.get("params", params), [], {}
    plain = {"relu": nn.ReLU, "flatten": nn.Flatten, "dropout": nn.Dropout}
    for word in NETWORKS[spec].split():
        name, *numbers = word.split("/")
        if name in params:
            names[name], layer = str(len(layers)), params[name]
            size = layer.get("conv", layer)["kernel"].shape
            if len(size) == 2:
                layers.append(nn.Linear(*size))
            else:
                stride, padding = map(int, numbers or (1, "norm" in layer))
                conv = nn.Conv2d(*size[2:], size[:2], stride, padding)
                normed = OrderedDict(conv=conv, norm=nn.BatchNorm2d(size[3]), relu=nn.ReLU())
                layers.append(nn.Sequential(normed) if "norm" in layer else conv)
        else:
            layers.append(plain[name]() if name in plain else nn.MaxPool2d(int(numbers[0]), 2))
    return nn.Sequential(*layers), names


@pytest.mark.slow
@pytest.mark.parametrize("spec", NETWORKS)
def test_pytorch_has_the_same_outputs(spec, tmp_path):
    """The same networks written with ``torch.nn``, loaded from a safetensors file, and the conversion back."""
    assert importlib.util.find_spec("torch") is not None, INSTALL
    import torch

    shape = (32, 32, 3)
    model, params, x = drawn(spec, shape)
    net, names = in_torch(spec, params)
    options = {"flattened": flattened(model, shape), "modules": names}
    models.write_arrays(tmp_path / "w.safetensors", to_torch(params, **options), torch=True)
    read = models.read_arrays(tmp_path / "w.safetensors")
    net.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in read.items()}, strict=True)
    net.eval()
    with torch.no_grad():
        found = net(torch.from_numpy(x.transpose(0, 3, 1, 2).copy())).numpy()
    np.testing.assert_allclose(found, model.apply(params, x), rtol=1e-3, atol=1e-5)
    torch.save(net.state_dict(), tmp_path / "w.pt")
    back = from_torch(models.read_arrays(tmp_path / "w.pt"), params, **options)
    jax.tree.map(np.testing.assert_array_equal, back, params)


@pytest.mark.slow
def test_a_file_of_torch_that_asks_for_code_is_refused(tmp_path):
    assert importlib.util.find_spec("torch") is not None, INSTALL
    import torch

    torch.save({"module": torch.nn.Linear(2, 3)}, tmp_path / "whole.pt")  # the module itself: its class would be called
    (tmp_path / "damaged.pt").write_bytes(b"no archive")
    for name in ("whole.pt", "damaged.pt"):
        with pytest.raises(ValueError, match=rf"^{name} = \w+: must hold tensors by name alone"):
            models.read_arrays(tmp_path / name)
    torch.save({"epoch": 3, "state_dict": {"w": torch.zeros(2)}}, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match=r"^checkpoint\.pt = 'dict': must be tensors by name: torch\.save"):
        models.read_arrays(tmp_path / "checkpoint.pt")


ARRAYS = {
    "conv/kernel": np.arange(12, dtype=np.float32).reshape(3, 4),
    "count": np.array(7, np.int64),
    "double": np.array([0.1, -2.0]),
    "empty": np.zeros((0, 2), np.float32),
    "half": np.array([1.5, -2], np.float16),
    "mask": np.array([True, False]),
}


@pytest.mark.parametrize("ending", ["npz", "safetensors"])
def test_what_is_written_is_read(tmp_path, ending):
    arrays = ARRAYS | {"brain": np.array([1.5, 3], ml_dtypes.bfloat16)}
    path = write_arrays(tmp_path / f"w.{ending}", arrays)
    found = read_arrays(path)
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
    again = write_arrays(tmp_path / f"again.{ending}", dict(reversed(arrays.items())))
    assert ending == "npz" or again.read_bytes() == path.read_bytes()


def written(folder, content, name="m.safetensors"):
    (folder / name).write_bytes(content)
    return folder / name


def test_the_library_of_safetensors_reads_ours_and_we_read_its(tmp_path):
    content = safetensors_bytes(ARRAYS, {"format": "pt"})
    for found in (safetensors.numpy.load(content), dict(models.read_safetensors(written(tmp_path, content)))):
        assert set(found) == set(ARRAYS)
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(found[name], array)
            assert found[name].dtype == array.dtype
    theirs = models.read_safetensors(written(tmp_path, safetensors.numpy.save(ARRAYS)))
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(theirs[name], array)
    with safetensors.safe_open(written(tmp_path, content), "numpy") as opened:
        assert opened.metadata() == {"format": "pt"}


test_what_cannot_be_used_is_named = refusals(
    (lambda folder: read_arrays(folder / "w.h5"), r"^extension of the file of weights = '\.h5': .*\.npz"),
    (lambda folder: read_arrays(folder / "w.npz"), r"^weights = '.*w\.npz': must be a file, but there is none$"),
    (lambda folder: write_arrays(folder / "w.pt", ARRAYS), r"^extension of the file of weights = '\.pt'"),
    (
        lambda folder: write_arrays(folder / "w.safetensors", {"x": np.zeros(2, np.complex64)}),
        r"^array x = 'complex64': must be F64, ",
    ),
    (lambda folder: read_arrays(written(folder, b"PK", "o.npz")), r"^o\.npz = a damaged file: must be an \.npz arch"),
    (
        lambda folder: models.read_safetensors(written(folder, (100_000).to_bytes(8, "little") + b"[" * 100_000)),
        r"^m\.safetensors = a header of 100000 bytes: must be JSON",
    ),
    (
        lambda _: filled({"w": np.zeros((2, 3))}, {"w": np.zeros(6)}, "mine"),
        r"^shape of w in mine = \(6,\): must be",
    ),
    (lambda _: filled({"w": np.zeros((2, 3))}, {}, "mine"), "^shape of w in mine = 'none': must be "),
    by=lambda folder, call: call(folder),
    folder=True,
)


def test_arrays_get_the_dtype_of_the_params():
    assert filled({"w": jnp.zeros((2, 3))}, {"w": np.ones((2, 3))}, "mine")["w"].dtype == jnp.float32
