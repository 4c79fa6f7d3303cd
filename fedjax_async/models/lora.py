"""Text classification by a pretrained encoder of which only low-rank adapters and the classifier are trained."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_async import check
from fedjax_async.home import PRETRAINED_VERSIONS, default_data_dir, pretrained_folder
from fedjax_async.models.checkpoint import EncoderConfig, load_encoder
from fedjax_async.models.encoder import ACTIVATIONS, FROZEN, POOLING, Classifier
from fedjax_async.models.wrap import check_shape, cross_entropy
from fedjax_async.types import Array, Key, Model, Params


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

    In every layer the query and value projections become x W + b + (``alpha`` / ``rank``) (x A) B; A starts uniform
    in +-1/sqrt(width), B at zero, so that training starts from the pretrained encoder. The params are A, B and the
    classifier, and so are uploads. Inputs are int ids [B, L]; 0 is padding, which nothing attends to. No dropout.

    ``pooling``: ``mean`` over the tokens, or ``cls``, the first token's state. ``hidden``: a dense layer of the
    encoder's width with ReLU before the output, as in DistilBERT's classifiers. ``path``: a folder with the
    ``config.json`` and ``model.safetensors`` of another BERT-type model or of DistilBERT; by default the fetched
    MiniLM, which stands in for DistilBERT here.

    The frozen weights are closed over. JAX 0.10 copies such arrays into every program that it compiles (91 MB here, and
    a second more to compile) unless it was imported with JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS=1 in the environment: then,
    and in later versions always, they are inputs that all programs share.

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


def _folder(path: str | None) -> Path:
    """The folder of the pretrained model, after a look that its files are there."""
    home = default_data_dir()
    kept = pretrained_folder("minilm", PRETRAINED_VERSIONS["minilm"], home)
    folder = kept if path is None else Path(path).expanduser()
    missing = [name for name in ("config.json", "model.safetensors") if not (folder / name).is_file()]
    if missing and path is None:
        raise ValueError(f"model = 'minilm_lora': minilm is not in {home}; run: fedjax-async data fetch minilm")
    check.require(not missing, "path", str(folder), f"a folder with {' and '.join(missing)}")
    return folder


@lru_cache(maxsize=2)
def _loaded(folder: str) -> tuple[EncoderConfig, Params]:
    """The encoder's shape, and its weights on the device as float32."""
    config, weights = load_encoder(Path(folder))
    check.one_of("config.json: activation", config.activation, ACTIVATIONS)
    return config, jax.tree.map(lambda array: jnp.asarray(array, jnp.float32), weights)
