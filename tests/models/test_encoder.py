"""Pretrained encoders: the file format, the names, the forward pass, adapters, the trained and uploaded params."""

import json
import time
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedjax_async.base import tree
from fedjax_async.base.home import PRETRAINED_VERSIONS
from fedjax_async.data import load
from fedjax_async.data.published import PRETRAINED
from fedjax_async.models import NEED_WEIGHTS, in_dtype, make, minilm_lora, rematerialised
from fedjax_async.models.pretrained import load_encoder, read_config
from fedjax_async.models.safetensors import read_safetensors
from tests.models.tiny_encoder import (
    CONFIGS,
    LAYERS,
    POSITIONS,
    WIDTH,
    file_bytes,
    forward,
    tensors,
    texts,
    write_checkpoint,
)
from tests.refusals import refusals

RANK, ALPHA = 3, 6.0
USUAL = {"rank": RANK, "alpha": ALPHA, "num_classes": 4, "input_shape": (7,)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("checkpoints")
    return {kind: write_checkpoint(home / kind, kind) for kind in CONFIGS}


def tiny(folder, **options):
    return minilm_lora(**(USUAL | {"path": str(folder)} | options))


@cache
def started(folder, **options):
    """A tiny model, its ``apply`` compiled, and its initial params."""
    model = tiny(folder, **options)
    return model._replace(apply=jax.jit(model.apply)), model.init(jax.random.key(0))


def moved(params, seed=3):
    """Params that differ from the initial ones, so that B is not zero."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: leaf + jnp.asarray(rng.normal(0, 0.3, leaf.shape), leaf.dtype), params)


# --- files ------------------------------------------------------------------------------------------


def test_bfloat16(tmp_path):
    values = np.asarray(jnp.array([1.5, -3.0], jnp.bfloat16))
    (tmp_path / "m").write_bytes(file_bytes({"x": values}, {"bfloat16": "BF16"}))
    assert read_safetensors(tmp_path / "m")["x"].astype(np.float32).tolist() == [1.5, -3.0]


def entry(shape=(2,), offsets=(0, 8), dtype="F32"):
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"x": 1},
        entry(dtype="F31"),
        entry(shape=(3,)),
        entry(shape=(-1, -2)),
        entry(shape=(2.0,)),
        entry(shape=(True, 2)),
        entry(shape="2"),
        entry(offsets=(8, 16)),
        entry(offsets=(0, 8, 16)),
        entry(offsets=(-8, 0)),
        entry(shape=(1,), offsets=(0, 4)),
        entry(shape=(2**62, 2**62)),
        entry() | {"y": entry()["x"]},
        {"x": entry()["x"] | {"dtype": []}},
    ],
    ids=json.dumps,
)
def test_headers_that_lie_are_refused(tmp_path, header):
    text = json.dumps(header).encode()
    (tmp_path / "m.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 8)
    with pytest.raises(ValueError, match=r"^m\.safetensors.* must be") as caught:
        read_safetensors(tmp_path / "m.safetensors")
    assert "\n" not in str(caught.value)


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
    begin = time.perf_counter()
    with pytest.raises(
        ValueError, match=r"run: fedjax-async data fetch minilm .offline: with --source FILE"
    ) as missing:
        make(name)
    assert time.perf_counter() - begin < 1
    with pytest.raises(ValueError, match=r"data fetch mnist .offline: with --source FILE") as missing_data:
        load("mnist")
    alike = [str(error.value).partition("not in ")[2].partition(" data fetch ")[0] for error in (missing, missing_data)]
    assert alike[0] == alike[1]


def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"path = .*: must be a folder with model.safetensors"):
        minilm_lora(path=str(tmp_path))


def test_the_model_looks_for_the_version_that_is_fetched():
    assert PRETRAINED["minilm"].version == PRETRAINED_VERSIONS["minilm"]


# --- the encoder ------------------------------------------------------------------------------------


def test_a_configuration_with_a_byte_order_mark_is_read(tmp_path):
    folder = write_checkpoint(tmp_path / "marked", next(iter(CONFIGS)))
    plain = read_config(folder / "config.json")
    (folder / "config.json").write_bytes("\ufeff".encode() + (folder / "config.json").read_bytes())
    assert read_config(folder / "config.json") == plain


def test_names_of_larger_models_and_old_normalisations(tmp_path, folders):
    renamed = {
        f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): array
        for name, array in tensors("bert").items()
    } | {"cls.predictions.bias": np.zeros(5, np.float32), "bert.embeddings.position_ids": np.zeros((1, 4), np.int64)}
    _, expected = load_encoder(folders["bert"])
    _, found = load_encoder(write_checkpoint(tmp_path / "c", "bert", renamed))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_half_precision_checkpoints(tmp_path, folders):
    halves = {name: array.astype(np.float16) for name, array in tensors("distilbert").items()}
    halves = {f"distilbert.{name}": array for name, array in halves.items()}
    model = tiny(write_checkpoint(tmp_path / "c", "distilbert", halves))
    full, params = started(folders["distilbert"])
    np.testing.assert_allclose(jax.jit(model.apply)(params, texts()), full.apply(params, texts()), atol=0.02)


# --- adapters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "pooling"), [("distilbert", "mean"), ("bert", "cls")])
def test_training_starts_from_the_pretrained_encoder(folders, kind, pooling):
    model, params = tiny(folders[kind], pooling=pooling), started(folders[kind])[1]
    states, real = forward(kind, tensors(kind), texts()), texts() != 0
    pooled = [s[r].mean(0) for s, r in zip(states, real)] if pooling == "mean" else states[:, 0]
    expected = np.array(pooled) @ np.float64(params["output"]["kernel"])
    np.testing.assert_allclose(jax.jit(model.apply)(params, texts()), expected, atol=5e-5)
    assert np.abs(expected).max() > 0.1


def test_adapters_add_to_query_and_value(folders):
    kind = "bert"
    model, params = started(folders[kind], pooling="cls", hidden=True)
    params = moved(params)
    exact = jax.tree.map(np.float64, params)
    adapters = {
        (i, place): ALPHA / RANK * exact[f"layer{i}"][name]["lora_a"] @ exact[f"layer{i}"][name]["lora_b"]
        for i in range(LAYERS)
        for place, name in ((0, "query"), (2, "value"))
    }
    first = forward(kind, tensors(kind), texts(), adapters)[:, 0]
    inner = np.maximum(first @ exact["hidden"]["kernel"] + exact["hidden"]["bias"], 0)
    expected = inner @ exact["output"]["kernel"] + exact["output"]["bias"]
    np.testing.assert_allclose(model.apply(params, texts()), expected, atol=1e-4)


def test_only_adapters_and_classifier_are_params(folders):
    adapters, output = LAYERS * 2 * RANK * 2 * WIDTH, WIDTH * 4 + 4
    for hidden in (False, True):
        params = started(folders["bert"], pooling="cls", hidden=hidden)[1]
        assert tree.num_scalars(params) == adapters + (WIDTH * WIDTH + WIDTH) * hidden + output
    assert set(params["layer0"]) == {"query", "value"}
    for i in range(LAYERS):
        for name in ("query", "value"):
            assert set(params[f"layer{i}"][name]) == {"lora_a", "lora_b"}
            assert not params[f"layer{i}"][name]["lora_b"].any()
            assert params[f"layer{i}"][name]["lora_a"].all()


def test_every_param_has_a_gradient(folders):
    model, params = started(folders["bert"], pooling="cls", hidden=True)
    y = jnp.array([0, 1, 2])
    gradient = jax.jit(jax.grad(lambda p: model.loss(model.apply(p, texts()), y).mean()))(moved(params))
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(gradient))


def test_padding_changes_nothing(folders):
    model, params = started(folders["bert"])
    params = moved(params)
    longer = np.pad(texts(), ((0, 0), (0, 4)))
    np.testing.assert_allclose(model.apply(params, longer), model.apply(params, texts()), atol=1e-5)
    empty = model.apply(params, np.zeros((2, 7), np.int32))  # rows of a masked batch
    assert np.isfinite(empty).all()


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
    model, params = started(folders["bert"])
    with pytest.raises(ValueError, match="inputs = 'float32': must be token ids"):
        model.apply(params, jnp.ones((2, 7)))
