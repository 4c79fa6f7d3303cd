"""Made-up checkpoints of a BERT-type model and a DistilBERT, and their forward pass in NumPy."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import safetensors.numpy

LAYERS, WIDTH, HEADS, INNER, VOCABULARY, POSITIONS = 2, 8, 2, 12, 30, 16

SIZES = LAYERS, WIDTH, HEADS, INNER, VOCABULARY, POSITIONS
NAMES = {
    "bert": ["num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"],
    "distilbert": ["n_layers", "dim", "n_heads", "hidden_dim"],
}
OPTIONS = {
    "bert": {"type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-5},
    "distilbert": {"activation": "gelu"},
}
CONFIGS = {
    kind: dict(zip([*names, "vocab_size", "max_position_embeddings"], SIZES))
    | OPTIONS[kind] | {"model_type": kind, "pad_token_id": 0}
    for kind, names in NAMES.items()
}  # fmt: skip
BERT = CONFIGS["bert"]
# in the order of the forward pass below: query, key, value, output, up, down; then the two normalisations
DENSE = {
    "bert": [
        *(f"encoder.layer.{{}}.attention.{name}" for name in ("self.query", "self.key", "self.value", "output.dense")),
        *(f"encoder.layer.{{}}.{name}.dense" for name in ("intermediate", "output")),
    ],
    "distilbert": [
        *(f"transformer.layer.{{}}.attention.{name}_lin" for name in ("q", "k", "v", "out")),
        *(f"transformer.layer.{{}}.ffn.lin{n}" for n in (1, 2)),
    ],
}
NORMS = {
    "bert": ["encoder.layer.{}.attention.output.LayerNorm", "encoder.layer.{}.output.LayerNorm"],
    "distilbert": ["transformer.layer.{}.sa_layer_norm", "transformer.layer.{}.output_layer_norm"],
}


def tensors(kind: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under the names of this type of model; dense weights are [out, in]."""
    rng = np.random.default_rng(seed)
    tables = {"word": VOCABULARY, "position": POSITIONS} | ({"token_type": 2} if kind == "bert" else {})
    sizes = {f"embeddings.{name}_embeddings.weight": (rows, WIDTH) for name, rows in tables.items()}
    norms = ["embeddings.LayerNorm", *(name.format(i) for name in NORMS[kind] for i in range(LAYERS))]
    sizes |= {f"{name}.{part}": (WIDTH,) for name in norms for part in ("weight", "bias")}
    for i in range(LAYERS):
        for name in DENSE[kind]:
            fan_in = INNER if name is DENSE[kind][5] else WIDTH
            fan_out = INNER if name is DENSE[kind][4] else WIDTH
            sizes[f"{name.format(i)}.weight"] = (fan_out, fan_in)
            sizes[f"{name.format(i)}.bias"] = (fan_out,)
    return {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in sizes.items()}


def write_checkpoint(folder: Path, kind: str, arrays: dict[str, np.ndarray] | None = None, **config: object) -> Path:
    """The two files of a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[kind] | config))
    safetensors.numpy.save_file(tensors(kind) if arrays is None else arrays, folder / "model.safetensors")
    return folder


def forward(kind: str, w: dict[str, np.ndarray], ids: np.ndarray, adapters: dict | None = None) -> np.ndarray:
    """The last layer's states of each text, one text and one head at a time, in float64; [B, L, WIDTH].

    ``adapters``: (layer, 0 for query or 2 for value) -> [in, out], added to the weights.
    """
    w = {name: array.astype(np.float64) for name, array in w.items()}
    epsilon = BERT["layer_norm_eps"] if kind == "bert" else 1e-12

    def norm(x, name):
        scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon)
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    def dense(x, i, place):
        name = DENSE[kind][place].format(i)
        extra = (adapters or {}).get((i, place), 0)
        return x @ (w[f"{name}.weight"].T + extra) + w[f"{name}.bias"]

    out = np.zeros((*ids.shape, WIDTH))
    for b, text in enumerate(ids):
        x = w["embeddings.word_embeddings.weight"][text] + w["embeddings.position_embeddings.weight"][: len(text)]
        if kind == "bert":
            x = x + w["embeddings.token_type_embeddings.weight"][0]
        x = norm(x, "embeddings.LayerNorm")
        for i in range(LAYERS):
            q, k, v = (dense(x, i, place) for place in range(3))
            mixed = np.zeros_like(x)
            for head in np.split(np.arange(WIDTH), HEADS):
                scores = q[:, head] @ k[:, head].T / math.sqrt(WIDTH // HEADS)
                scores[:, text == 0] = -np.inf
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                mixed[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, head]
            x = norm(x + dense(mixed, i, 3), NORMS[kind][0].format(i))
            inner = dense(x, i, 4)
            inner = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
            x = norm(x + dense(inner, i, 5), NORMS[kind][1].format(i))
        out[b] = x
    return out


def texts() -> np.ndarray:
    """int32 [3, 7]: a full text, one with padding, a short one."""
    ids = np.random.default_rng(1).integers(1, VOCABULARY, (3, 7)).astype(np.int32)
    ids[1, 5:] = 0
    ids[2, 2:] = 0
    return ids
