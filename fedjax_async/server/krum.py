"""Krum and multi-Krum: the uploads of a server step that have the nearest neighbours."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_async import check
from fedjax_async.registry import takes
from fedjax_async.server.aggregate import along, buffered
from fedjax_async.server.options import discount, guard_rails
from fedjax_async.server.rule import rule
from fedjax_async.server.staleness import Weight
from fedjax_async.server.transforms import Transform, scale_by_staleness
from fedjax_async.types import Array, Params, ServerAlgorithm, Traced


def squared_distances(rows: Params, count: Array) -> Array:
    """``||V_i - V_j||^2`` over all leaves of the ``count`` first rows [K, ...]; float[K, K], exactly symmetric.

    From differences: the usual ``||a||^2 + ||b||^2 - 2 a b`` cancels where uploads are alike, which is
    just where Krum compares them.
    """
    real = jnp.result_type(float)
    leaves = [leaf.reshape(leaf.shape[0], -1).astype(real) for leaf in jax.tree.leaves(rows)]
    size = leaves[0].shape[0]

    def from_row(i: Array, found: Array) -> Array:
        parts = [jnp.sum(jnp.square(leaf - leaf[i][None]), axis=1) for leaf in leaves]
        return found.at[i].set(jnp.sum(jnp.stack(parts), axis=0))

    found = jax.lax.fori_loop(0, count, from_row, jnp.zeros((size, size), real))
    return 0.5 * (found + found.T)


def krum_scores(distances: Array, count: Array, byzantine: Array) -> Array:
    """Sum of the squared distances to the ``count - byzantine - 2`` nearest others; float[K], inf beyond ``count``."""
    index = jax.lax.iota(count.dtype, distances.shape[0])
    filled = index < count
    others = filled[:, None] & filled[None] & (index[:, None] != index[None])
    nearest = jnp.sort(jnp.where(others, distances, jnp.full_like(distances, jnp.inf)), axis=1)
    near = index[None] < count - byzantine - 2
    scores = jnp.sum(jnp.where(near, nearest, jnp.zeros_like(nearest)), axis=1)
    return jnp.where(filled, scores, jnp.full_like(scores, jnp.inf))


def _whole(field: str, value: Any, low: int) -> None:
    check.non_negative(field, value)
    if isinstance(value, numbers.Real):
        number = float(value)
        check.require(number >= low and number.is_integer(), field, value, f"a whole number >= {low}")


@takes(discounted=discount, guards=guard_rails)
def krum(
    *,
    byzantine: Traced = 1,
    select: Traced = 1,
    server_lr: Traced = 1.0,
    size: int = 10,
    discounted: Weight,
    guards: Transform,
) -> ServerAlgorithm:
    """The delta with the nearest neighbours, or the mean of several such (Blanchard et al. 2017).

    ``x <- x + eta_g V*``, ``V_i = s(tau_i) Delta_i``: of the n accepted deltas of a server step, V* is the one
    whose ``n - f - 2`` nearest others are nearest, by the sum of squared distances (section 4 of the
    paper; of equals the first to arrive). With ``select = m > 1``, multi-Krum: the mean of the m best.

    The guarantee against f bad uploads needs ``n >= 2 f + 3``. A step with fewer guards against as many as
    it can, ``(n - 3) // 2``; of two uploads the first is taken. Never more than ``n - f`` are averaged.

    Args:
      byzantine: f, whole and >= 0.
      select: m, whole and >= 1.
      server_lr: ``eta_g > 0``.
      size: rows of the buffer, at least the most uploads of a server step.
    """
    _whole("byzantine", byzantine, 0)
    _whole("select", select, 1)
    check.positive("server_lr", server_lr)

    def combine(rows: Params, count: Array) -> Params:
        bad = jnp.clip((count - 3) // 2, 0, jnp.asarray(byzantine).astype(count.dtype))
        best = jnp.clip(jnp.asarray(select).astype(count.dtype), 1, jnp.maximum(count - bad, 1))
        order = jnp.argsort(krum_scores(squared_distances(rows, count), count, bad), stable=True)
        chosen = jnp.argsort(order).astype(count.dtype) < best
        real = jnp.result_type(float)

        def of_leaf(values: Array) -> Array:
            total = jnp.sum(jnp.where(along(chosen, values), values, jnp.zeros_like(values)), axis=0, dtype=real)
            return (total / best.astype(real)).astype(values.dtype)

        return jax.tree.map(of_leaf, rows)

    return rule(
        guards, scale_by_staleness(discounted), optimizer=optax.sgd(server_lr), aggregate=buffered(size, combine)
    )
