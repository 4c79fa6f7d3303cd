"""Files of weights, and params under PyTorch's names: round trips, and networks in PyTorch's conventions."""

from __future__ import annotations

import functools
import importlib.util

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


# --- PyTorch's layers in NumPy: images [B, C, H, W], weights [out, in, ...] --------------------------


def conv2d(x, state, name, padding=0):
    weight = state[f"{name}.weight"].astype(np.float64)
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    windows = np.lib.stride_tricks.sliding_window_view(x, weight.shape[2:], axis=(2, 3))  # [B, in, H, W, kh, kw]
    return np.einsum("bihwkl,oikl->bohw", windows, weight) + state[f"{name}.bias"][:, None, None]


def max_pool2d(x):
    b, c, h, w = x.shape
    return x[:, :, : h // 2 * 2, : w // 2 * 2].reshape(b, c, h // 2, 2, w // 2, 2).max(axis=(3, 5))


def linear(x, state, name):
    return x @ state[f"{name}.weight"].astype(np.float64).T + state[f"{name}.bias"]


def relu(x):
    return np.maximum(x, 0)


def lenet5(x, state):
    x = max_pool2d(relu(conv2d(x, state, "conv1", padding=2)))
    x = max_pool2d(relu(conv2d(x, state, "conv2")))
    x = x.reshape(len(x), -1)  # channels first
    for name in ("fc1", "fc2"):
        x = relu(linear(x, state, name))
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
    hidden = relu(linear(x.transpose(0, 3, 1, 2).reshape(BATCH, -1), state, "net.0"))
    np.testing.assert_allclose(linear(hidden, state, "net.2"), model.apply(params, x), rtol=1e-5)


def test_embedded_positions_are_in_pytorchs_order_and_maps_of_convolutions_are_not():
    tokens = models.from_flax(Tokens(), input_shape=(5,))
    assert flattened(tokens, (5,)) == {}
    assert flattened(models.from_flax(Images(), input_shape=(3, 3, 2)), (3, 3, 2)) == {"head": 4}


def test_means_and_maxima_over_the_positions_are_no_flattened_map():
    assert flattened(models.from_flax(Pooled(), input_shape=(4, 2, 2)), (4, 2, 2)) == {}
    with pytest.raises(ValueError, match=r"^input of head = 'a flattened map and its means': must be a flattened map"):
        flattened(models.from_flax(Pooled(whole=True), input_shape=(4, 2, 2)), (4, 2, 2))


@pytest.mark.parametrize(
    ("late", "layer"),
    [
        (nn.MultiHeadDotProductAttention(2), r"late/query = 'DenseGeneral'"),
        (nn.ConvTranspose(4, (2, 2)), r"late = 'ConvTranspose'"),
    ],
)
def test_kernels_that_pytorch_lays_out_otherwise_are_refused(late, layer):
    model = models.from_flax(Images(late), input_shape=(3, 3, 2))
    with pytest.raises(ValueError, match=rf"^layer {layer}: must be a convolution, as its kernel is \["):
        flattened(model, (3, 3, 2))


def test_params_of_attention_are_refused():
    params = {"attention": {"query": {"kernel": np.zeros((8, 2, 4)), "bias": np.zeros((2, 4))}}}
    for convert in (to_torch, functools.partial(from_torch, {})):
        with pytest.raises(ValueError, match=r"^shape of attention/query/bias = \[2, 4\]: must be \[outputs\] beside"):
            convert(params)
    assert not has_torch_names(arrays_of(params), params)  # files of our names are read as before


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


def test_what_does_not_fit_is_named():
    _, params, _ = drawn("mlp:hidden=4", (3, 2, 3))
    state = to_torch(params)
    lacking = {name: array for name, array in state.items() if name != "fc1.bias"}
    with pytest.raises(ValueError, match=r"^shape of fc1\.bias in state = None: must be \(4,\), as the model has it"):
        from_torch(lacking, params)
    with pytest.raises(ValueError, match=r"^shape of more in w\.pt = \(2,\): must be none"):
        from_torch(state | {"more": np.zeros(2)}, params, source="w.pt")
    with pytest.raises(ValueError, match=r"^shape of fc1\.weight in state = \(18, 4\): must be \(4, 18\)"):
        from_torch(state | {"fc1.weight": state["fc1.weight"].T}, params)


test_options_that_do_not_fit_are_named = refusals(
    ({"modules": {"fc9": "0"}}, r"^modules = 'fc9': must be one of the layers: conv1, fc1, output$"),
    ({"modules": {"fc1": 3}}, r"^modules\['fc1'\] = 3: must be a name"),
    ({"modules": {"fc1": "output"}}, r"^modules = 'output\.bias': must be other names"),
    ({"modules": ["fc1"]}, r"^modules = 'a list': must be names of layers"),
    ({"flattened": {"conv1": 3}}, r"^flattened = 'conv1': must be one of the dense layers: fc1, output$"),
    ({"flattened": {"fc1": "3"}}, r"^flattened\['fc1'\] = '3': must be a whole number >= 1"),
    ({"flattened": {"fc1": 3.0}}, r"^flattened\['fc1'\] = 3\.0: must be a whole number >= 1"),
    ({"flattened": {"fc1": 4}}, r"^flattened\['fc1'\] = 4: must be a divisor of the 18 inputs"),
    by=lambda options: to_torch(
        {"conv1": {"kernel": np.zeros((2, 2, 3, 4))}, **drawn("mlp:hidden=4", (3, 2, 3))[1]}, **options
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    ["cnn", "alexnet:width=0.2,variant=full", "vgg11:width=0.1", "vgg11:width=0.1,variant=full"],
)
def test_pytorch_has_the_same_outputs(spec, tmp_path):
    """The same networks written with ``torch.nn``, loaded from a safetensors file, and the conversion back."""
    assert importlib.util.find_spec("torch") is not None, INSTALL
    import torch

    from tests.models.in_torch import NETWORKS

    shape = (32, 32, 3)
    model, params, x = drawn(spec, shape)
    net = NETWORKS[spec.partition(":")[0]](params)
    state = to_torch(params, flattened=flattened(model, shape), modules=net.names)
    models.write_arrays(tmp_path / "w.safetensors", state, torch=True)
    read = models.read_arrays(tmp_path / "w.safetensors")
    net.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in read.items()}, strict=True)
    net.eval()
    with torch.no_grad():
        found = net(torch.from_numpy(x.transpose(0, 3, 1, 2).copy())).numpy()
    np.testing.assert_allclose(found, model.apply(params, x), rtol=1e-3, atol=1e-5)
    torch.save(net.state_dict(), tmp_path / "w.pt")
    options = {"flattened": flattened(model, shape), "modules": net.names}
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


# --- files of weights: written and read here and by the safetensors library ----------------------------

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


def test_the_library_of_safetensors_reads_ours_and_we_read_its(tmp_path):
    content = safetensors_bytes(ARRAYS, {"format": "pt"})
    for found in (safetensors.numpy.load(content), dict(models.read_safetensors(_file(tmp_path, content)))):
        assert set(found) == set(ARRAYS)
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(found[name], array)
            assert found[name].dtype == array.dtype
    theirs = models.read_safetensors(_file(tmp_path, safetensors.numpy.save(ARRAYS)))
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(theirs[name], array)
    with safetensors.safe_open(_file(tmp_path, content), "numpy") as opened:
        assert opened.metadata() == {"format": "pt"}


def _file(folder, content, name="m.safetensors"):
    path = folder / name
    path.write_bytes(content)
    return path


test_what_cannot_be_used_is_named = refusals(
    (lambda folder: read_arrays(folder / "w.h5"), r"^extension of the file of weights = '\.h5': .*\.npz"),
    (lambda folder: read_arrays(folder / "w.npz"), r"^weights = '.*w\.npz': must be a file, but there is none$"),
    (lambda folder: write_arrays(folder / "w.pt", ARRAYS), r"^extension of the file of weights = '\.pt'"),
    (
        lambda folder: write_arrays(folder / "w.safetensors", {"x": np.zeros(2, np.complex64)}),
        r"^array x = 'complex64': must be F64, ",
    ),
    (lambda folder: read_arrays(_file(folder, b"PK", "o.npz")), r"^o\.npz = a damaged file: must be an \.npz arch"),
    (
        lambda folder: models.read_safetensors(_file(folder, (100_000).to_bytes(8, "little") + b"[" * 100_000)),
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
