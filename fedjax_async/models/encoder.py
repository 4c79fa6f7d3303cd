"""MiniLM with LoRA: a BERT-type encoder with frozen pretrained weights; low-rank adapters and a classifier are trained.

Pretrained weights are variables of the collection ``frozen``. ``params`` has only the trained leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from fedjax_async.base import check, registry
from fedjax_async.base.home import PRETRAINED_VERSIONS, fetch_command, pretrained_folder, resolve_data_dir
from fedjax_async.models.labels import cross_entropy
from fedjax_async.models.pretrained import EncoderConfig, load_encoder
from fedjax_async.models.weights import arrays_of, filled
from fedjax_async.models.wrap import check_shape
from fedjax_async.types import Array, Key, Model, Params

FROZEN = "frozen"
FILES = ("config.json", "model.safetensors")
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


def _mean(hidden: Array, mask: Array) -> Array:
    """Mean over the tokens of each text, without padding."""
    weight = mask.astype(hidden.dtype)[:, :, None]
    return (hidden * weight).sum(axis=1) / jnp.maximum(weight.sum(axis=1), 1)


POOLING: dict[str, Callable[[Array, Array], Array]] = {"mean": _mean, "cls": lambda hidden, mask: hidden[:, 0]}
# uniform in +-1/sqrt(inputs), as in the usual implementation of LoRA
adapter_init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


class Linear(nn.Module):
    """``x W + b`` with frozen W and b; with ``rank`` > 0 also a trained ``scale (x A) B``, where B starts at zero."""

    features: int
    rank: int = 0
    scale: float = 1.0

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel = self.variable(FROZEN, "kernel", jnp.zeros, (x.shape[-1], self.features)).value.astype(x.dtype)
        bias = self.variable(FROZEN, "bias", jnp.zeros, (self.features,)).value.astype(x.dtype)
        y = x @ kernel + bias.reshape(*(1,) * (x.ndim - 1), -1)
        if not self.rank:
            return y
        a = self.param("lora_a", adapter_init, (x.shape[-1], self.rank))
        b = self.param("lora_b", nn.initializers.zeros_init(), (self.rank, self.features))
        return y + self.scale * ((x @ a) @ b)


class LayerNorm(nn.Module):
    """Layer normalisation with frozen scale and bias, computed in float32 or better."""

    epsilon: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        exact = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
        scale, bias = (
            self.variable(FROZEN, name, jnp.zeros, x.shape[-1:]).value.astype(exact.dtype).reshape(1, 1, -1)
            for name in ("scale", "bias")
        )
        centred = exact - exact.mean(axis=-1, keepdims=True)
        variance = jnp.square(centred).mean(axis=-1, keepdims=True)
        return (centred * jax.lax.rsqrt(variance + self.epsilon) * scale + bias).astype(x.dtype)


class Embeddings(nn.Module):
    """Normalised sum of word, position and type embeddings: ``[B, L] -> [B, L, width]``; the type is always 0."""

    config: EncoderConfig

    @nn.compact
    def __call__(self, ids: Array, dtype: DTypeLike) -> Array:
        c = self.config
        rows = {"word": c.vocabulary, "position": c.positions, "type": c.token_types}
        tables = {
            name: self.variable(FROZEN, name, jnp.zeros, (count, c.width)).value
            for name, count in rows.items()
            if count
        }
        same_for_all = tables["position"][: ids.shape[1]]
        same_for_all = same_for_all + tables["type"][:1] if c.token_types else same_for_all
        x = jnp.take(tables["word"], ids, axis=0).astype(dtype) + same_for_all.astype(dtype)[None]
        return LayerNorm(c.epsilon, name="norm")(x)


class Layer(nn.Module):
    """Self-attention and dense layers, each with a shortcut and then normalised; adapters on query and value."""

    config: EncoderConfig
    rank: int = 0
    scale: float = 1.0

    @nn.compact
    def __call__(self, x: Array, mask: Array) -> Array:
        c = self.config
        adapted = partial(Linear, c.width, self.rank, self.scale)
        projections = adapted(name="query"), Linear(c.width, name="key"), adapted(name="value")
        heads = (*x.shape[:2], c.heads, c.width // c.heads)
        q, k, v = (project(x).reshape(heads) for project in projections)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (heads[-1] ** -0.5)
        scores = jnp.where(mask[:, None, None, :], scores, jnp.finfo(scores.dtype).min)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v).reshape(x.shape)
        x = LayerNorm(c.epsilon, name="attention_norm")(x + Linear(c.width, name="output")(mixed))
        inner = ACTIVATIONS[c.activation](Linear(c.intermediate, name="up")(x))
        return LayerNorm(c.epsilon, name="output_norm")(x + Linear(c.width, name="down")(inner))


def hidden_states(config: EncoderConfig, rank: int, scale: float, ids: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    """Output of the last layer ``[B, L, width]`` and a mask of the tokens that are not padding ``[B, L]``.

    Must be called inside a module.
    """
    mask = ids != config.padding
    x = Embeddings(config, name="embeddings")(ids, dtype)
    for i in range(config.layers):
        x = Layer(config, rank, scale, name=f"layer{i}")(x, mask)
    return x, mask


class Encoder(nn.Module):
    """Token ids ``[B, L]`` to the output of the last layer ``[B, L, width]``; nothing is trained."""

    config: EncoderConfig

    @nn.compact
    def __call__(self, ids: Array, dtype: DTypeLike = jnp.float32) -> Array:
        return hidden_states(self.config, 0, 1.0, ids, dtype)[0]


class Classifier(nn.Module):
    """Token ids ``[B, L]`` to class scores: encoder with adapters, pooling, optional hidden layer with ReLU, output."""

    config: EncoderConfig
    num_classes: int
    rank: int
    scale: float
    pooling: str = "mean"
    hidden: bool = False

    @nn.compact
    def __call__(self, ids: Array, dtype: DTypeLike = jnp.float32) -> Array:
        x, mask = hidden_states(self.config, self.rank, self.scale, ids, dtype)
        x = POOLING[self.pooling](x, mask)
        if self.hidden:
            x = nn.relu(nn.Dense(self.config.width, dtype=dtype, name="hidden")(x))
        return nn.Dense(self.num_classes, dtype=dtype, name="output")(x)


def minilm_lora(
    *,
    rank: int = 8,
    alpha: float = 16.0,
    num_classes: int = 20,
    input_shape: tuple[int, ...] = (128,),
    pooling: str = "mean",
    hidden: bool = False,
    path: str | None = None,
) -> Model:
    """MiniLM with LoRA on token ids: 73,728 adapter + 385 `num_classes` head parameters trained, 22.7 million frozen.

    In every layer the query and value projections become x W + b + (``alpha`` / ``rank``) (x A) B. A starts uniform
    in +-1/sqrt(width), B at zero, so that training starts from the pretrained encoder. The params, and so the uploads,
    are A, B and the classifier. Inputs are int ids [B, L]; 0 is padding and is masked out. There is no dropout.

    ``pooling``: ``mean`` over the tokens, or ``cls``, the first token's state. ``hidden``: a dense layer of the
    encoder's width with ReLU before the output, as in DistilBERT's classifiers. ``path``: a folder with the
    ``config.json`` and ``model.safetensors`` of another BERT-type model or of DistilBERT; by default the fetched
    MiniLM, which stands in for DistilBERT here.

    The frozen weights are constants of the compiled programs. JAX 0.10 copies such arrays into every program (91 MB
    here, and a second more to compile), unless JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS=1 is in the environment when it is
    imported. In that case, and always in later versions, all programs share one copy.

    Raises ``ValueError`` for options out of range and for files that are missing or damaged.

    Source: Hu et al., LoRA (2022); Wang et al., MiniLM (2020); Sanh et al., DistilBERT (2019).
    """
    check.whole("rank", rank)
    check.positive("alpha", alpha)
    check.whole("num_classes", num_classes, 2)
    check.one_of("pooling", pooling, POOLING)
    check_shape(input_shape)
    check.require(len(input_shape) == 1, "input_shape", input_shape, "(tokens,): the model reads token ids")
    config, frozen = _loaded(str(_folder(path)))
    longest = f"at most {config.positions} tokens"
    check.require(input_shape[0] <= config.positions, "input_shape", input_shape, longest)
    check.require(rank <= config.width, "rank", rank, f"at most {config.width}, the encoder's width")
    net = Classifier(config, num_classes, rank, alpha / rank, pooling, hidden)
    ids = jnp.zeros((1, 1), jnp.int32)

    @jax.jit
    def init(key: Key) -> Params:
        return net.init(key, ids)["params"]

    def apply(params: Params, x: Array, key: Key | None = None) -> Array:
        check.require(jnp.issubdtype(x.dtype, jnp.integer), "inputs", x.dtype.name, "token ids, whole numbers")
        outputs: Any = net.apply({"params": params, FROZEN: frozen}, x, jax.tree.leaves(params)[0].dtype)
        return outputs

    return Model(init, apply, cross_entropy)


def _files(path: str | None) -> list[Path]:
    """The files that a run with the model reads; the names of those that are missing too."""
    return [_folder_of(path) / name for name in FILES]


minilm_lora.input_files = _files  # type: ignore[attr-defined]


def _folder_of(path: str | None) -> Path:
    if path is not None:
        return check.path("path", path)
    return pretrained_folder("minilm", PRETRAINED_VERSIONS["minilm"], resolve_data_dir(None))


def _folder(path: str | None) -> Path:
    """The folder of the pretrained model; ``ValueError`` if a file is missing."""
    folder = _folder_of(path)
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing and path is None:
        home = resolve_data_dir(None)
        raise ValueError(f"model = 'minilm_lora': minilm is not in {home}; {fetch_command('minilm')}")
    check.require(not missing, "path", str(folder), f"a folder with {' and '.join(missing)}")
    return folder


@registry.cached_by_name(maxsize=2)
def _loaded(folder: str) -> tuple[EncoderConfig, Params]:
    """The encoder's configuration, and its weights on the device as float32; ``ValueError`` for weights that differ."""
    config, weights = load_encoder(Path(folder))
    check.one_of("config.json: activation", config.activation, ACTIVATIONS)
    start = jax.eval_shape(Encoder(config).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), start[FROZEN])
    return config, filled(like, arrays_of(weights), f"{FILES[1]} (shapes as in {FILES[0]})")
