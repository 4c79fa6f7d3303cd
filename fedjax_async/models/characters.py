"""Models of text, character by character: a recurrent network (GRU) and a small transformer.

Inputs are codes [B, L], with ``PADDING`` at the end of short texts; padding changes no output before it. The outputs
are logits at every position, [B, L, classes], for the next character; with ``last``, [B, classes] at the end of each
text.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedjax_async.base import check
from fedjax_async.models.labels import PADDING
from fedjax_async.models.wrap import check_shape, from_flax
from fedjax_async.types import Array, Model

VOCABULARY = 82  # padding, unknown and the 80 characters of ``data.characters``


class Embedding(nn.Module):
    """Codes [B, L] -> vectors [B, L, features], by a product with a one-hot matrix: its gradient needs no scatter."""

    vocabulary: int
    features: int

    @nn.compact
    def __call__(self, codes: Array) -> Array:
        table = self.param("table", nn.initializers.normal(1.0), (self.vocabulary, self.features), jnp.float32)
        return jax.nn.one_hot(codes, self.vocabulary, dtype=table.dtype) @ table


def at_the_end(hidden: Array, codes: Array) -> Array:
    """The vectors at the last character of each text: [B, L, features], [B, L] -> [B, features]."""
    positions = jnp.arange(codes.shape[1], dtype=jnp.int32).reshape(1, -1)
    end = jnp.max(jnp.where(codes != PADDING, positions, 0), axis=1, keepdims=True)
    chosen = (positions == end).astype(hidden.dtype)  # a mask, not an index: its gradient needs no scatter
    return (hidden * chosen[:, :, None]).sum(axis=1)


class GRU(nn.Module):
    """``h' = (1 - z) n + z h`` with ``r, z = sigmoid(W x + U h)`` and ``n = tanh(W x + r (U h + b))``, from h = 0."""

    features: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        size, count = self.features, x.shape[0]
        inputs = nn.Dense(3 * size, name="input")(x)  # of all steps at once
        square = nn.initializers.orthogonal()
        gates = [self.param(f"recurrent_{gate}", square, (size, size), jnp.float32) for gate in "rzn"]
        kernel = jnp.concatenate(gates, axis=1)
        bias = self.param("recurrent_bias", nn.initializers.zeros_init(), (size,), jnp.float32).reshape(1, size)

        def step(h: Array, given: Array) -> tuple[Array, Array]:
            own = h @ kernel
            r, z = jnp.split(jax.nn.sigmoid(given[:, : 2 * size] + own[:, : 2 * size]), 2, axis=1)
            n = jnp.tanh(given[:, 2 * size :] + r * (own[:, 2 * size :] + bias))
            h = (1 - z) * n + z * h
            return h, h

        _, outputs = jax.lax.scan(step, jnp.zeros((count, size), inputs.dtype), inputs.swapaxes(0, 1))
        return outputs.swapaxes(0, 1)


class Recurrent(nn.Module):
    """Embedding, GRU layers, logits."""

    num_classes: int
    vocabulary: int
    embedding: int
    hidden: int
    layers: int
    last: bool

    @nn.compact
    def __call__(self, codes: Array) -> Array:
        codes = codes.astype(jnp.int32)
        x = Embedding(self.vocabulary, self.embedding, name="embedding")(codes)
        for n in range(1, self.layers + 1):
            x = GRU(self.hidden, name=f"gru{n}")(x)
        return nn.Dense(self.num_classes, name="output")(at_the_end(x, codes) if self.last else x)


class Norm(nn.Module):
    """Layer normalisation, ``(x - mean) / sqrt(var + 1e-6) * scale + bias`` over the features, in the dtype of x."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        ones, zeros = nn.initializers.ones_init(), nn.initializers.zeros_init()
        scale, bias = (self.param(n, init, x.shape[-1:], jnp.float32) for n, init in (("scale", ones), ("bias", zeros)))
        centred = x - x.mean(axis=-1, keepdims=True)
        unit = centred * jax.lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + 1e-6)
        return unit * scale.reshape(1, 1, -1) + bias.reshape(1, 1, -1)


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron; each follows a normalisation and is added to its input."""

    heads: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        count, length, width = x.shape
        q, k, v = jnp.split(nn.Dense(3 * width, name="attention_input")(Norm(name="norm1")(x)), 3, axis=-1)
        q, k, v = (part.reshape(count, length, self.heads, -1) for part in (q, k, v))
        scores = jnp.einsum("blhd,bmhd->bhlm", q, k) / jnp.sqrt(jnp.asarray(width // self.heads, x.dtype))
        seen = jnp.tril(jnp.ones((1, 1, length, length), bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, jnp.asarray(-1e9, scores.dtype)), axis=-1)
        mixed = jnp.einsum("bhlm,bmhd->blhd", weights, v).reshape(count, length, width)
        x = x + nn.Dense(width, name="attention_output")(mixed)
        inner = jax.nn.gelu(nn.Dense(4 * width, name="fc1")(Norm(name="norm2")(x)))
        return x + nn.Dense(width, name="fc2")(inner)


class Transformer(nn.Module):
    """Embedding plus learned positions, blocks, normalisation, logits."""

    num_classes: int
    vocabulary: int
    width: int
    heads: int
    layers: int
    last: bool

    @nn.compact
    def __call__(self, codes: Array) -> Array:
        codes = codes.astype(jnp.int32)
        shape = (1, codes.shape[1], self.width)
        x = Embedding(self.vocabulary, self.width, name="embedding")(codes)
        x = x + self.param("positions", nn.initializers.normal(0.1), shape, jnp.float32)
        for n in range(1, self.layers + 1):
            x = Block(self.heads, name=f"block{n}")(x)
        x = Norm(name="norm")(x)
        return nn.Dense(self.num_classes, name="output")(at_the_end(x, codes) if self.last else x)


def _check(input_shape: tuple[int, ...], num_classes: int, vocabulary: int, last: bool, **sizes: int) -> None:
    check_shape(input_shape, rank=1)
    check.whole("num_classes", num_classes, 2)
    check.whole("vocabulary", vocabulary, 2)
    check.kind("last", last, bool, "true or false")
    for name, size in sizes.items():
        check.whole(name, size)


def char_gru(
    *,
    hidden: int = 128,
    layers: int = 1,
    embedding: int = 16,
    last: bool = False,
    vocabulary: int = VOCABULARY,
    num_classes: int = VOCABULARY,
    input_shape: tuple[int, ...] = (80,),
) -> Model:
    """Character model with GRU layers of width `hidden`: 67,698 parameters on the 82 characters of shakespeare.

    Loss: the mean cross entropy of the next characters, without padding. ``last``: one prediction per text, at its end,
    as LEAF's Shakespeare and Sent140 need. Deviation from McMahan et al. (2017): their network has two LSTM layers of
    width 256. Source of the GRU: Cho et al. (2014), with the recurrent bias of cuDNN.
    """
    _check(input_shape, num_classes, vocabulary, last, hidden=hidden, layers=layers, embedding=embedding)
    return from_flax(Recurrent(num_classes, vocabulary, embedding, hidden, layers, last), input_shape=input_shape)


def char_transformer(
    *,
    width: int = 64,
    heads: int = 4,
    layers: int = 2,
    last: bool = False,
    vocabulary: int = VOCABULARY,
    num_classes: int = VOCABULARY,
    input_shape: tuple[int, ...] = (80,),
) -> Model:
    """Causal transformer over characters, `layers` blocks of `width`: 115,794 parameters on 80 characters of 82.

    Loss and ``last`` as for char_gru. Source: Vaswani et al. (2017), but with the normalisation before each part.
    """
    _check(input_shape, num_classes, vocabulary, last, width=width, heads=heads, layers=layers)
    check.require(width % heads == 0, "width", width, f"a multiple of heads = {heads}")
    return from_flax(Transformer(num_classes, vocabulary, width, heads, layers, last), input_shape=input_shape)
