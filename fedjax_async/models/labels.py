"""Loss and accuracy of class labels: one label per example, or a sequence of labels that ends in padding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fedjax_async.types import Array

PADDING = 0  # the label of a position that does not count; in sequences only


def cross_entropy(outputs: Array, y: Array) -> Array:
    """``-log softmax(outputs)[y]`` of each example: ``[B, classes], int [B] -> [B]``, in nats.

    For sequences, ``[B, L, classes], int [B, L] -> [B]``, it is the mean over the labels that are not ``PADDING``.
    Every sequence then has the same weight, however long it is; a sequence without labels has loss 0.

    The logit of the label is selected by a mask: the gradient of an index would be a scatter, slow on a CPU.

    >>> [round(float(v), 4) for v in cross_entropy(jnp.zeros((2, 10)), jnp.array([3, 7]))]
    [2.3026, 2.3026]
    >>> [round(float(v), 4) for v in cross_entropy(jnp.zeros((2, 3, 10)), jnp.array([[3, 7, 0], [0, 0, 0]]))]
    [2.3026, 0.0]
    """
    y = _wide(y)
    classes = jnp.arange(outputs.shape[-1], dtype=y.dtype).reshape(*(1 for _ in y.shape), -1)
    picked = jnp.where(classes == y[..., None], outputs, jnp.zeros((), outputs.dtype)).sum(axis=-1)
    losses = jax.nn.logsumexp(outputs, axis=-1) - picked
    return losses if y.ndim == 1 else _mean(losses, y)


def hits(outputs: Array, y: Array) -> Array:
    """Whether the largest output is the label's (bool [B]); for sequences, the share of right labels (float [B]).

    The share has at least float32's digits: in bfloat16, 300 of 301 would be 255 of 256.

    >>> outputs = jnp.array([[[0, 9, 0], [0, 0, 9], [9, 0, 0]]], jnp.float32)
    >>> hits(outputs, jnp.array([[1, 1, 0]])).tolist()  # the last position is padding
    [0.5]
    """
    y = _wide(y)
    right = jnp.argmax(outputs, -1).astype(y.dtype) == y
    return right if y.ndim == 1 else _mean(right.astype(counting(outputs)), y)


def counting(outputs: Array) -> DTypeLike:
    """The dtype in which labels are counted: that of the outputs, or float32 if it has fewer digits."""
    return outputs.dtype if outputs.dtype.itemsize >= 4 else jnp.float32


def counts(y: Array) -> Array:
    """Which labels count: all of ``[B]``, those of ``[B, L]`` that are not ``PADDING``; bool of y's shape."""
    return jnp.ones(y.shape, bool) if y.ndim == 1 else y != PADDING


def _wide(y: Array) -> Array:
    """The labels as int32 or wider: in uint8, class 256 would be class 0."""
    return y if y.dtype.itemsize >= 4 else y.astype(jnp.int32)


def _mean(values: Array, y: Array) -> Array:
    """The mean over the labels of each sequence that count: [B, L] -> [B]; 0 without any."""
    mask = counts(y).astype(values.dtype)
    axes = tuple(range(1, y.ndim))
    return (values * mask).sum(axis=axes) / jnp.maximum(mask.sum(axis=axes), 1)
