"""The files of a pretrained BERT-type encoder: ``config.json`` and ``model.safetensors``.

The model may be of BERT's type (BERT, MiniLM) or a DistilBERT, which uses other names and has no token types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_async.base import check
from fedjax_async.base.check import require
from fedjax_async.models.safetensors import read_safetensors

Weights = dict[str, dict[str, object]]


class EncoderConfig(NamedTuple):
    """The shape of a BERT-type encoder."""

    layers: int
    width: int
    heads: int
    intermediate: int  # width of the hidden layer of the feed-forward part
    vocabulary: int
    positions: int  # the longest text, in tokens
    token_types: int  # 0: the model has no token type embedding
    activation: str = "gelu"
    epsilon: float = 1e-12  # of the layer normalisations
    padding: int = 0  # id of the token that fills short texts


class Family(NamedTuple):
    """The names that one type of model uses in its files."""

    config: dict[str, str]  # field of EncoderConfig -> key of config.json
    prefix: str  # of the names of the encoder's weights, in files of larger models
    layer: str  # of the names of one layer's weights, before its number
    modules: dict[str, str]  # our name of a module of a layer -> theirs


FAMILIES: dict[str, Family] = {
    "bert": Family(
        config={
            "layers": "num_hidden_layers",
            "width": "hidden_size",
            "heads": "num_attention_heads",
            "intermediate": "intermediate_size",
            "vocabulary": "vocab_size",
            "positions": "max_position_embeddings",
            "token_types": "type_vocab_size",
            "activation": "hidden_act",
            "epsilon": "layer_norm_eps",
            "padding": "pad_token_id",
        },
        prefix="bert.",
        layer="encoder.layer.",
        modules={
            "query": "attention.self.query",
            "key": "attention.self.key",
            "value": "attention.self.value",
            "output": "attention.output.dense",
            "attention_norm": "attention.output.LayerNorm",
            "up": "intermediate.dense",
            "down": "output.dense",
            "output_norm": "output.LayerNorm",
        },
    ),
    "distilbert": Family(
        config={
            "layers": "n_layers",
            "width": "dim",
            "heads": "n_heads",
            "intermediate": "hidden_dim",
            "vocabulary": "vocab_size",
            "positions": "max_position_embeddings",
            "activation": "activation",
            "padding": "pad_token_id",
        },
        prefix="distilbert.",
        layer="transformer.layer.",
        modules={
            "query": "attention.q_lin",
            "key": "attention.k_lin",
            "value": "attention.v_lin",
            "output": "attention.out_lin",
            "attention_norm": "sa_layer_norm",
            "up": "ffn.lin1",
            "down": "ffn.lin2",
            "output_norm": "output_layer_norm",
        },
    ),
}
TABLES = {"word": "word_embeddings", "position": "position_embeddings", "type": "token_type_embeddings"}


def load_encoder(folder: Path) -> tuple[EncoderConfig, Weights]:
    """Read the encoder in ``folder``: its configuration, and its weights as float NumPy arrays.

    The weights are ``{"embeddings": {word, position[, type], norm}, "layer0": {query: {kernel [in, out], bias}, ...},
    ...}``. Raises ``ValueError`` naming what is missing.
    """
    family, config = read_config(folder / "config.json")
    tensors = read_safetensors(folder / "model.safetensors")
    tensors = {name.removeprefix(family.prefix): array for name, array in tensors.items()}

    def pair(name: str) -> dict[str, np.ndarray]:
        """Kernel and bias of a dense layer, or scale and bias of a normalisation."""
        weight = _named(tensors, f"{name}.weight", f"{name}.gamma")
        first, array = ("kernel", weight.T) if weight.ndim == 2 else ("scale", weight)
        return {first: array, "bias": _named(tensors, f"{name}.bias", f"{name}.beta")}

    tables = {ours: name for ours, name in TABLES.items() if ours != "type" or config.token_types}
    weights: Weights = {
        "embeddings": {ours: _named(tensors, f"embeddings.{name}.weight") for ours, name in tables.items()}
    }
    weights["embeddings"]["norm"] = pair("embeddings.LayerNorm")
    for i in range(config.layers):
        weights[f"layer{i}"] = {ours: pair(f"{family.layer}{i}.{name}") for ours, name in family.modules.items()}
    return config, weights


def read_config(path: Path) -> tuple[Family, EncoderConfig]:
    """Type and configuration of the model in a ``config.json``; raises ``ValueError`` if damaged or not supported."""
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} = {str(error).splitlines()[0]}: must be JSON") from error
    require(isinstance(content, dict), str(path), content, "a JSON object")
    check.one_of(f"{path.name}: model_type", content.get("model_type"), FAMILIES)
    family = FAMILIES[content["model_type"]]
    kind = content.get("position_embedding_type", "absolute")
    check.one_of(f"{path.name}: position_embedding_type", kind, ["absolute"])
    given = {field: content[key] for field, key in family.config.items() if content.get(key) is not None}
    needed = [family.config[f] for f in EncoderConfig._fields[:6] if f not in given]
    require(not needed, path.name, needed, "given in it")
    config = EncoderConfig(**({"token_types": 0} | given))
    for field in ("layers", "width", "heads", "intermediate", "vocabulary", "positions"):
        check.whole(f"{path.name}: {family.config[field]}", getattr(config, field))
    for field in ("token_types", "padding"):
        check.whole(f"{path.name}: {family.config.get(field, field)}", getattr(config, field), 0)
    check.real_positive(f"{path.name}: {family.config.get('epsilon', 'epsilon')}", config.epsilon)
    fits = config.width % config.heads == 0
    require(fits, f"{path.name}: {family.config['heads']}", config.heads, f"a divisor of {config.width}")
    return family, config


def _named(tensors: Mapping[str, np.ndarray], *names: str) -> np.ndarray:
    """The array under the first of ``names`` that exists; raises ``ValueError`` if none does."""
    found = next((name for name in names if name in tensors), None)
    if found is None:
        raise ValueError(f"weights = {len(tensors)} arrays: must have {names[0]}")
    floating = np.issubdtype(tensors[found].dtype, np.floating) or tensors[found].dtype.name == "bfloat16"
    require(floating, found, tensors[found].dtype.name, "floating-point")
    return tensors[found]
