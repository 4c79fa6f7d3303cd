"""Pretrained encoders: files, names, the forward pass, what is trained; and low-rank adapters of any model."""

from __future__ import annotations

import functools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given
from hypothesis import strategies as st

from fedjax_async import named, results, simulate
from fedjax_async.base import tree
from fedjax_async.base.home import PRETRAINED_VERSIONS
from fedjax_async.data import load
from fedjax_async.data.published import PRETRAINED
from fedjax_async.models import NEED_WEIGHTS, from_flax, in_dtype, lora, make, minilm_lora, rematerialised
from fedjax_async.models.pretrained import load_encoder, read_config
from fedjax_async.models.safetensors import read_safetensors
from fedjax_async.models.weights import arrays_of
from tests.models.tiny_encoder import CONFIGS, LAYERS, POSITIONS, WIDTH, forward, tensors, texts, write_checkpoint
from tests.refusals import refusals

RANK, ALPHA = 3, 6.0
USUAL = {"rank": RANK, "alpha": ALPHA, "num_classes": 4, "input_shape": (7,)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("checkpoints")
    return {kind: write_checkpoint(home / kind, kind) for kind in CONFIGS}


def tiny(folder, **options):
    return minilm_lora(**(USUAL | {"path": str(folder)} | options))


@functools.cache
def started(folder, **options):
    """A tiny model, its ``apply`` compiled, and its initial params."""
    model = tiny(folder, **options)
    return model._replace(apply=jax.jit(model.apply)), model.init(jax.random.key(0))


def moved(params, seed=3):
    """Params that differ from the initial ones, so that B is not zero."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: leaf + jnp.asarray(rng.normal(0, 0.3, leaf.shape), leaf.dtype), params)


def read_header(folder, header, content=b"\0" * 8):
    """Arrays of a file with this header, which may lie."""
    text = json.dumps(header).encode()
    (folder / "m.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content)
    return read_safetensors(folder / "m.safetensors")


def entry(shape=(2,), offsets=(0, 8), dtype="F32"):
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def test_bfloat16(tmp_path):
    found = read_header(tmp_path, entry(offsets=(0, 4), dtype="BF16"), b"\xc0\x3f\x40\xc0")
    assert found["x"].astype(np.float32).tolist() == [1.5, -3.0]


LIES = [
    [], {"x": 1}, entry(dtype="F31"), entry(shape=(3,)), entry(shape=(-1, -2)), entry(shape=(2.0,)),
    entry(shape=(True, 2)), entry(shape="2"), entry(offsets=(8, 16)), entry(offsets=(0, 8, 16)),
    entry(offsets=(-8, 0)), entry(shape=(1,), offsets=(0, 4)), entry(shape=(2**62, 2**62)),
    entry() | {"y": entry()["x"]}, {"x": entry()["x"] | {"dtype": []}},
]  # fmt: skip
test_headers_that_lie_are_refused = refusals(
    *((header, r"^m\.safetensors.* must be") for header in LIES), by=read_header, folder=True
)


@given(data=st.binary(max_size=40))
def test_any_bytes_are_arrays_or_a_value_error(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="must be"):
        read_safetensors(path)


test_checkpoints_that_do_not_fit_are_refused = refusals(
    ({"model_type": "roberta"}, "model_type = 'roberta': must be one of bert, distilbert"),
    ({"position_embedding_type": "relative_key"}, "must be one of absolute"),
    ({"num_attention_heads": 3}, "num_attention_heads = 3: must be a divisor of 8"),
    ({"hidden_size": None}, "must be given in it"),
    ({"num_hidden_layers": 3}, "must have encoder.layer.2.attention.self.query.weight"),
    (
        {"intermediate_size": 13},
        r"layer0/down/kernel in .* \(shapes as in config.json\) = \(12, 8\): must be \(13, 8\)",
    ),
    ({"vocab_size": 2.5}, "must be a whole number"),
    ({"type_vocab_size": "x"}, "type_vocab_size = 'x': must be a whole number"),
    ({"layer_norm_eps": "y"}, "layer_norm_eps = 'y': must be a finite number > 0"),
    ({"hidden_act": "swish"}, "activation = 'swish': must be one of gelu, gelu_new, relu"),
    by=lambda folder, changes: tiny(write_checkpoint(folder / "c", "bert", **changes)),
    folder=True,
)


@pytest.mark.parametrize("name", NEED_WEIGHTS)
def test_missing_weights_fail_at_once_and_name_the_command(tmp_path, monkeypatch, name):
    monkeypatch.setenv("FEDJAX_ASYNC_DATA", str(tmp_path))
    begin, alike = time.perf_counter(), []
    for get, wanted, fetched in ((make, name, "minilm"), (load, "mnist", "mnist")):
        with pytest.raises(ValueError, match=f"data fetch {fetched} .offline: with --source FILE") as missing:
            get(wanted)
        alike.append(str(missing.value).partition("not in ")[2].partition(" data fetch ")[0])
    assert time.perf_counter() - begin < 1
    assert alike[0] == alike[1] and alike[0].endswith("run: fedjax-async")
    assert PRETRAINED["minilm"].version == PRETRAINED_VERSIONS["minilm"]  # what is looked for is what is fetched


def test_a_folder_without_weights_is_refused_and_a_byte_order_mark_is_not(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"path = .*: must be a folder with model.safetensors"):
        minilm_lora(path=str(tmp_path))
    file = write_checkpoint(tmp_path / "marked", "bert") / "config.json"
    plain = read_config(file)
    file.write_bytes("\ufeff".encode() + file.read_bytes())
    assert read_config(file) == plain


def test_names_of_larger_models_and_old_normalisations(tmp_path, folders):
    renamed = {
        f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): array
        for name, array in tensors("bert").items()
    } | {"cls.predictions.bias": np.zeros(5, np.float32), "bert.embeddings.position_ids": np.zeros((1, 4), np.int64)}
    _, expected = load_encoder(folders["bert"])
    _, found = load_encoder(write_checkpoint(tmp_path / "c", "bert", renamed))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_half_precision_checkpoints(tmp_path, folders):
    halves = {f"distilbert.{name}": array.astype(np.float16) for name, array in tensors("distilbert").items()}
    model = tiny(write_checkpoint(tmp_path / "c", "distilbert", halves))
    full, params = started(folders["distilbert"])
    np.testing.assert_allclose(jax.jit(model.apply)(params, batch()), full.apply(params, batch()), atol=0.02)


def batch():
    """The texts, with more padding, and two rows of a masked batch."""
    return np.pad(texts(), ((0, 2), (0, 4)))


@pytest.mark.parametrize(("kind", "pooling"), [("distilbert", "mean"), ("bert", "cls")])
def test_training_starts_from_the_pretrained_encoder_and_padding_changes_nothing(folders, kind, pooling):
    model, params = started(folders[kind], **({} if pooling == "mean" else {"pooling": pooling}))
    states, real = forward(kind, tensors(kind), texts()), texts() != 0
    pooled = [s[r].mean(0) for s, r in zip(states, real)] if pooling == "mean" else states[:, 0]
    expected = np.array(pooled) @ np.float64(params["output"]["kernel"])
    found = model.apply(params, batch())
    np.testing.assert_allclose(found[:3], expected, atol=5e-5)
    assert np.abs(expected).max() > 0.1 and np.isfinite(found).all()


def test_adapters_add_to_query_and_value_and_every_param_has_a_gradient(folders):
    kind = "bert"
    model = tiny(folders[kind], pooling="cls", hidden=True)
    params = moved(model.init(jax.random.key(0)))
    exact = jax.tree.map(np.float64, params)
    adapters = {
        (i, place): ALPHA / RANK * exact[f"layer{i}"][name]["lora_a"] @ exact[f"layer{i}"][name]["lora_b"]
        for i in range(LAYERS)
        for place, name in ((0, "query"), (2, "value"))
    }
    first = forward(kind, tensors(kind), texts(), adapters)[:, 0]
    inner = np.maximum(first @ exact["hidden"]["kernel"] + exact["hidden"]["bias"], 0)
    expected = inner @ exact["output"]["kernel"] + exact["output"]["bias"]

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def slope(params):
        outputs = model.apply(params, texts())
        return model.loss(outputs, jnp.arange(3)).mean(), outputs

    gradient, outputs = slope(params)
    np.testing.assert_allclose(outputs, expected, atol=1e-4)
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(gradient))


def test_only_adapters_and_classifier_are_params(folders):
    adapters, output = LAYERS * 2 * RANK * 2 * WIDTH, WIDTH * 4 + 4
    for hidden in (False, True):
        params = tiny(folders["bert"], pooling="cls", hidden=hidden).init(jax.random.key(0))
        assert tree.num_scalars(params) == adapters + (WIDTH * WIDTH + WIDTH) * hidden + output
    assert set(params["layer0"]) == {"query", "value"}
    for i in range(LAYERS):
        for name in ("query", "value"):
            assert set(params[f"layer{i}"][name]) == {"lora_a", "lora_b"}
            assert not params[f"layer{i}"][name]["lora_b"].any()
            assert params[f"layer{i}"][name]["lora_a"].all()


@pytest.mark.slow
def test_other_dtypes_and_rematerialisation(folders):
    model, params = started(folders["bert"])
    params = moved(params)
    plain = model.apply(params, texts())
    low = in_dtype(model, jnp.bfloat16).apply(params, texts())
    assert low.dtype == jnp.float32
    np.testing.assert_allclose(low, plain, atol=0.2)
    again = rematerialised(model)
    both = [jax.jit(jax.grad(lambda p, m=m: jnp.square(m.apply(p, texts())).sum()))(params) for m in (model, again)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *both)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)
        assert model.apply(exact, texts()).dtype == jnp.float64
        np.testing.assert_allclose(model.apply(exact, texts()), plain, atol=1e-4)


test_bad_options = refusals(
    ({"rank": 0}, "rank = 0"),
    ({"rank": WIDTH + 1}, "at most 8, the encoder's width"),
    ({"alpha": 0.0}, "alpha = 0.0"),
    ({"num_classes": 1}, "num_classes = 1"),
    ({"pooling": "max"}, "pooling = 'max': must be one of mean, cls"),
    ({"input_shape": (28, 28, 1)}, r"input_shape = \(28, 28, 1\)"),
    ({"input_shape": (POSITIONS + 1,)}, "at most 16 tokens"),
    by=lambda folder, options: tiny(write_checkpoint(folder / "c", "bert"), **options),
    folder=True,
)


def test_inputs_must_be_token_ids(folders):
    model, params = started(folders["distilbert"])
    with pytest.raises(ValueError, match="inputs = 'float32': must be token ids"):
        model.apply(params, jnp.ones((2, 7)))


class Normalised(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        return nn.Dense(3)(nn.relu(x))


KEY = jax.random.key(0)
PLAIN = make("lenet5", num_classes=10, input_shape=(28, 28, 1))


@functools.cache
def base():
    return jax.jit(PLAIN.init)(KEY)


def test_the_start_is_the_base_and_the_change_is_a_product_of_two_small_matrices():
    x = jax.random.normal(KEY, (3, 28, 28, 1))
    model = lora(PLAIN, base(), rank=2, alpha=6.0, weights="fc*/kernel,conv1/kernel", trained="output/*")
    params = jax.jit(model.init)(jax.random.key(1))
    apply, plain = jax.jit(model.apply), jax.jit(PLAIN.apply)
    np.testing.assert_allclose(apply(params, x), plain(base(), x), rtol=1e-6)
    assert set(arrays_of(params["a"])) == {"conv1/kernel", "fc1/kernel", "fc2/kernel"}
    assert set(arrays_of(params["full"])) == {"output/kernel", "output/bias"}
    moved = jax.tree.map(lambda leaf: leaf + 0.1, params)
    by_hand = jax.tree.map(np.array, base())
    for name in params["a"]:
        layer = by_hand[name]
        change = 3.0 * np.asarray(moved["a"][name]["kernel"]) @ np.asarray(moved["b"][name]["kernel"])
        layer["kernel"] = layer["kernel"] + change.reshape(layer["kernel"].shape)
    by_hand["output"] = {name: leaf + np.float32(0.1) for name, leaf in by_hand["output"].items()}
    np.testing.assert_allclose(apply(moved, x), plain(by_hand, x), rtol=1e-4, atol=1e-5)


def test_a_convolution_of_pytorch_is_a_matrix_of_its_outputs():
    base = {"conv": {"weight": jnp.ones((8, 4, 3, 5)), "bias": jnp.ones(8)}}
    model = lora(PLAIN._replace(apply=lambda params, x, key=None: params), base, weights="*/weight", rank=2)
    params = model.init(KEY)
    assert params["a"]["conv"]["weight"].shape == (8, 2) and params["b"]["conv"]["weight"].shape == (2, 4 * 3 * 5)
    moved = jax.tree.map(jnp.ones_like, params)
    np.testing.assert_allclose(model.apply(moved, None)["conv"]["weight"], np.full((8, 4, 3, 5), 1 + 16 / 2 * 2))


def test_running_statistics_go_on_as_those_of_the_model():
    plain = from_flax(Normalised(), input_shape=(5,))
    base = jax.jit(plain.init)(KEY)
    model = lora(plain, base, rank=1)
    params = jax.jit(model.init)(KEY)
    x = jax.random.normal(KEY, (4, 5))
    outputs, changed = jax.jit(model.train)(params, x, KEY, jnp.ones(4))
    want, after = jax.jit(plain.train)(base, x, KEY, jnp.ones(4))
    np.testing.assert_allclose(outputs, want, rtol=1e-5, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, changed["batch_stats"], after["batch_stats"])
    jax.tree.map(np.testing.assert_array_equal, changed["params"], params["params"])


def test_what_stays_with_a_client_stays_there_in_the_adapted_model():
    plain = from_flax(
        Normalised(), input_shape=(5,), private=lambda path: path[0] == "batch_stats" or "Dense_1" in path
    )
    base = plain.init(KEY)
    stays = lora(plain, base, rank=1, trained="Dense_1/bias").private
    owned = [("b", "Dense_1", "kernel"), ("full", "Dense_1", "bias")]
    assert all(stays(("params", *path)) for path in owned) and stays(("batch_stats", "BatchNorm_0", "mean"))
    assert not stays(("params", "a", "Dense_0", "kernel"))
    head = from_flax(nn.Dense(3), input_shape=(5,), private=lambda path: path == ("bias",))
    assert lora(head, head.init(KEY), rank=1).private is None  # the bias is a part of the constant base


def test_an_adapted_model_is_saved_and_read_and_its_layers_have_names(tmp_path):
    plain = make("mlp:hidden=8", num_classes=10, input_shape=(28, 28, 1))
    model = lora(plain, jax.jit(plain.init)(KEY), rank=2, trained="output/*")
    about = {"clients": 3, "updates": 3, "lr": 0.05, "steps": 1, "engine": "reference"}
    run = simulate(model=named("small", model), out=tmp_path / "run", plots=False, **about)
    jax.tree.map(np.testing.assert_array_equal, results.load(tmp_path / "run").params, run.params)
    simulate(model=model, initial=str(tmp_path / "run"), personal="output", **about)


def test_a_run_trains_and_sends_the_adapters_alone():
    plain = make("mlp", num_classes=10, input_shape=(28, 28, 1))
    base = jax.jit(plain.init)(KEY)
    model = lora(plain, base, rank=2, alpha=2.0)
    run = simulate(method="asgd", model=model, clients=4, updates=12, lr=0.05, steps=5, engine="reference")
    numbers = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, KEY)))
    assert run.evaluations["bytes_up"][-1] == 12 * 4 * numbers
    assert numbers < sum(leaf.size for leaf in jax.tree.leaves(base)) / 10
    assert run.evaluations["loss"][-1] < run.evaluations["loss"][0]


test_wrong_options_are_refused = refusals(
    ({"rank": 0}, "rank = 0"),
    ({"alpha": 0.0}, "alpha = 0.0"),
    ({"weights": "fc9/kernel"}, "weights = 'fc9/kernel': must be paths of the model .*fc1/kernel"),
    ({"trained": "fc9/*"}, "trained = 'fc9/*': must be paths of the model"),
    ({"weights": "fc1/*"}, "weights = ['fc1/bias']: must be of weights with two axes or more"),
    by=lambda change: lora(PLAIN, base(), **change),
)
