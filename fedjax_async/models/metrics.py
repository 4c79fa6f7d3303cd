"""Metrics of a model's outputs beside loss and accuracy: the type ``Metric``, and the metrics that have names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async.base import check
from fedjax_async.models.labels import counting, counts
from fedjax_async.types import Array


class Metric(NamedTuple):
    """``values(outputs, y)`` is averaged over examples; ``finish(means)``, if given, computes the metric from these.

    ``outputs`` [B, ...] are the model's, ``y`` [B, ...] labels or targets. ``values`` returns one number per example,
    [B], or several: an array [B, ...] or a pytree of such arrays. Booleans count as 0 and 1. The averages are exact
    means over the rows of a test set or of a client's part of it; they do not depend on the batches. ``finish`` gets
    them without the first axis and returns a number; without ``finish``, ``values`` must return [B].

    Both must be pure and traceable. Larger is better, unless the metric's name ends in ``loss`` or ``error``. If the
    name has ``accuracy`` in it, the metric is a share, which tables and curves show in percent.

    >>> brier = Metric(lambda outputs, y: jnp.sum((jax.nn.softmax(outputs) - jax.nn.one_hot(y, 3)) ** 2, -1))
    >>> [round(float(value), 3) for value in brier.values(jnp.zeros((2, 3)), jnp.array([0, 2]))]
    [0.667, 0.667]
    """

    values: Callable[[Array, Array], object]
    finish: Callable[[Any], Array] | None = None


def top(*, k: int = 5) -> Metric:
    """Share of the examples whose class is among the k largest outputs (with ties, lower classes come first)."""
    check.whole("k", k)

    def values(outputs: Array, y: Array) -> Array:
        check.require(k <= outputs.shape[-1], "k of top", k, f"at most {outputs.shape[-1]}, the number of classes")
        _, best = jax.lax.top_k(outputs, k)
        return jnp.any(best == _labels("top", y)[:, None], axis=-1)

    return Metric(values)


def macro_f1() -> Metric:
    """Mean F1 score of the classes: ``2 TP / (2 TP + FP + FN)``; classes neither present nor predicted are left out."""

    def finish(shares: dict[str, Array]) -> Array:
        both = shares["labelled"] + shares["predicted"]
        return _mean_where(2 * shares["right"], both)

    return Metric(lambda outputs, y: _confusion("macro_f1", outputs, y), finish)


def balanced_accuracy() -> Metric:
    """Mean recall of the classes: the share of a class's examples classified right. Absent classes do not count."""

    def finish(shares: dict[str, Array]) -> Array:
        return _mean_where(shares["right"], shares["labelled"])

    return Metric(lambda outputs, y: _confusion("balanced_accuracy", outputs, y), finish)


def label_accuracy() -> Metric:
    """Share of all labels that are predicted right: in sequences every label has equal weight, padding has none."""

    def values(outputs: Array, y: Array) -> dict[str, Array]:
        _require_labels("label_accuracy", y)
        right = jnp.argmax(outputs, -1).astype(jnp.int32) == y.astype(jnp.int32)
        both = {"right": right & counts(y), "all": counts(y)}
        real = counting(outputs)
        return {name: jnp.sum(mask.reshape(len(y), -1), axis=-1, dtype=real) for name, mask in both.items()}

    def finish(means: dict[str, Array]) -> Array:
        return means["right"] / means["all"]

    return Metric(values, finish)


def _require_labels(name: str, y: Array) -> None:
    check.require(jnp.issubdtype(y.dtype, jnp.integer), f"targets of {name}", str(y.dtype), "class labels, integers")


def _labels(name: str, y: Array) -> Array:
    """The labels as int32[B]."""
    _require_labels(name, y)
    allowed = "one label per example (label_accuracy is for sequences)"
    check.require(y.ndim == 1, f"targets of {name}", f"labels of shape {list(y.shape)}", allowed)
    return y.astype(jnp.int32)


def _confusion(name: str, outputs: Array, y: Array) -> dict[str, Array]:
    """For each example and class: whether it is the label, the prediction, and both; float[B, classes] each."""
    classes = outputs.shape[-1]
    labelled = jax.nn.one_hot(_labels(name, y), classes)
    predicted = jax.nn.one_hot(jnp.argmax(outputs, axis=-1), classes)
    return {"labelled": labelled, "predicted": predicted, "right": labelled * predicted}


def _mean_where(above: Array, below: Array) -> Array:
    """The mean of ``above / below`` over the classes with ``below`` > 0."""
    there = below > 0
    ratio = jnp.where(there, above / jnp.where(there, below, 1), 0)
    return jnp.sum(ratio) / jnp.sum(there).astype(ratio.dtype)


METRICS: dict[str, Callable[..., Metric]] = {
    "top": top,
    "macro_f1": macro_f1,
    "balanced_accuracy": balanced_accuracy,
    "label_accuracy": label_accuracy,
}
