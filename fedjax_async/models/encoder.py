"""A BERT-type encoder whose pretrained weights stand still, with low-rank adapters and a classifier that learn.

Pretrained weights are variables of the collection ``frozen``; ``params`` holds what is trained and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedjax_async.models.checkpoint import EncoderConfig
from fedjax_async.types import Array

FROZEN = "frozen"
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


def _mean(hidden: Array, mask: Array) -> Array:
    """Mean over the tokens of a text."""
    weight = mask.astype(hidden.dtype)[:, :, None]
    return (hidden * weight).sum(axis=1) / jnp.maximum(weight.sum(axis=1), 1)


POOLING: dict[str, Callable[[Array, Array], Array]] = {"mean": _mean, "cls": lambda hidden, mask: hidden[:, 0]}
# uniform in +-1/sqrt(inputs), as in the adapters' usual implementation
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


class Norm(nn.Module):
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
    """Word, position and (always the first) type of every token, summed and normalised: ``[B, L] -> [B, L, width]``."""

    config: EncoderConfig

    @nn.compact
    def __call__(self, ids: Array, dtype: Any) -> Array:
        c = self.config
        rows = {"word": c.vocabulary, "position": c.positions, "type": c.token_types}
        tables = {
            name: self.variable(FROZEN, name, jnp.zeros, (count, c.width)).value
            for name, count in rows.items()
            if count
        }
        fixed = tables["position"][: ids.shape[1]]
        fixed = fixed + tables["type"][:1] if c.token_types else fixed
        x = jnp.take(tables["word"], ids, axis=0).astype(dtype) + fixed.astype(dtype)[None]
        return Norm(c.epsilon, name="norm")(x)


class Layer(nn.Module):
    """Self-attention and a dense layer, each with a shortcut and normalised after it; adapters on query and value."""

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
        x = Norm(c.epsilon, name="attention_norm")(x + Linear(c.width, name="output")(mixed))
        inner = ACTIVATIONS[c.activation](Linear(c.intermediate, name="up")(x))
        return Norm(c.epsilon, name="output_norm")(x + Linear(c.width, name="down")(inner))


def hidden_states(config: EncoderConfig, rank: int, scale: float, ids: Array, dtype: Any) -> tuple[Array, Array]:
    """The last layer's ``[B, L, width]`` and which tokens are no padding, ``[B, L]``; call it inside a module."""
    mask = ids != config.padding
    x = Embeddings(config, name="embeddings")(ids, dtype)
    for i in range(config.layers):
        x = Layer(config, rank, scale, name=f"layer{i}")(x, mask)
    return x, mask


class Encoder(nn.Module):
    """Token ids ``[B, L]`` to the last layer's ``[B, L, width]``; nothing in it is trained."""

    config: EncoderConfig

    @nn.compact
    def __call__(self, ids: Array, dtype: Any = jnp.float32) -> Array:
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
    def __call__(self, ids: Array, dtype: Any = jnp.float32) -> Array:
        x, mask = hidden_states(self.config, self.rank, self.scale, ids, dtype)
        x = POOLING[self.pooling](x, mask)
        if self.hidden:
            x = nn.relu(nn.Dense(self.config.width, dtype=dtype, name="hidden")(x))
        return nn.Dense(self.num_classes, dtype=dtype, name="output")(x)
