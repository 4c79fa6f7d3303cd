"""Means over all examples of one client's part, batch by batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_async import check
from fedjax_async.types import Array, ClientData, Model, Params


def part_mean(measure: Callable[[Array, Array], Any], part: ClientData, batch_size: int = 256) -> Any:
    """Mean of ``measure(x, y)`` (a pytree of ``[B]``) over the rows of ``part``; NaN where it has none.

    The rows are read ``batch_size`` at a time, and the last batch is masked. Traceable, also in ``part.size``.
    """
    check.whole("batch_size", batch_size)
    real = jnp.result_type(float)
    lane = jnp.arange(batch_size, dtype=jnp.int32)

    def measured(start: Array) -> Any:
        mask = start + lane < part.size
        rows = part.order[part.offset + jnp.where(mask, start + lane, 0)]
        found = measure(part.x[rows], part.y[rows])
        return jax.tree.map(lambda values: jnp.sum(jnp.where(mask, values, 0).astype(real)), found)

    zero = jax.tree.map(lambda total: jnp.zeros(total.shape, real), jax.eval_shape(measured, jnp.int32(0)))
    batches = (part.size + batch_size - 1) // batch_size
    total = jax.lax.fori_loop(
        0, batches, lambda i, total: jax.tree.map(jnp.add, total, measured(jnp.int32(batch_size) * i)), zero
    )
    return jax.tree.map(lambda values: values / part.size.astype(real), total)


def mean_loss(model: Model, params: Params, part: ClientData, batch_size: int = 256) -> Array:
    """Mean loss of ``params`` over all examples of ``part``; float[], NaN for an empty part.

    ``model`` takes rows as the data hold them: give it ``models.decoded(model, data.decode)`` where they need decoding.
    """
    return part_mean(lambda x, y: model.loss(model.apply(params, x), y), part, batch_size)
