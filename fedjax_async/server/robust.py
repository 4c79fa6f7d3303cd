"""Rules that withstand bad uploads: coordinate-wise median, trimmed mean, Krum."""

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


def middle_mean(rows: Params, count: Array, cut: Array) -> Params:
    """Coordinate-wise mean of the ``count`` first rows without the ``cut`` smallest and ``cut`` largest values.

    ``rows`` [K, ...], ``count`` and ``cut`` int32[] with ``2 cut < count``. Nothing is sorted: a value is kept
    if the number of smaller ones says so. Counting is a loop over rows that vectorises over coordinates,
    20 times faster on a CPU than sorting 10 rows.
    """
    real = jnp.result_type(float)
    left = jnp.maximum(count - 2 * cut, 1).astype(real)

    def of_leaf(values: Array) -> Array:
        index = along(jax.lax.iota(count.dtype, values.shape[0]), values)
        filled = jnp.where(index < count, values, jnp.full_like(values, jnp.inf))

        def add(i: Array, total: Array) -> Array:
            one = filled[i]
            # of equal values, the first to arrive is the smaller
            smaller = (filled < one[None]) | ((filled == one[None]) & (index < i))
            rank = jnp.sum(smaller, axis=0, dtype=count.dtype)
            return total + jnp.where((rank >= cut) & (rank < count - cut), one, jnp.zeros_like(one)).astype(real)

        total = jax.lax.fori_loop(0, count, add, jnp.zeros(values.shape[1:], real))
        return (total / left).astype(values.dtype)

    return jax.tree.map(of_leaf, rows)


@takes(discounted=discount, guards=guard_rails)
def trimmed_mean(
    *, trim: Traced = 0.2, server_lr: Traced = 1.0, size: int = 10, discounted: Weight, guards: Transform
) -> ServerAlgorithm:
    """Coordinate-wise trimmed mean of the deltas, against bad uploads (Yin et al. 2018).

    ``x <- x + eta_g trmean_trim(s(tau_i) Delta_i)``: of the n accepted deltas of a server step, the
    ``floor(trim n)`` smallest and as many largest values of each coordinate are dropped and the others
    averaged (Definition 2 of the paper). Withstands bad uploads up to the share ``trim``. With ``trim = 0``
    it is FedBuff; fewer than ``1 / trim`` uploads are not trimmed.

    Args:
      trim: beta in [0, 0.5], where 0.5 gives the median.
      server_lr: ``eta_g > 0``.
      size: rows of the buffer, at least the most uploads of a server step.
    """
    check.in_range("trim", trim, 0.0, 0.5)
    check.positive("server_lr", server_lr)

    def combine(rows: Params, count: Array) -> Params:
        real = jnp.result_type(float)
        # 1e-4, or 0.29 x 100 would be rounded down to 28
        cut = jnp.floor(jnp.asarray(trim, real) * count.astype(real) + 1e-4).astype(count.dtype)
        return middle_mean(rows, count, jnp.minimum(cut, jnp.maximum(count - 1, 0) // 2))

    return rule(
        guards, scale_by_staleness(discounted), optimizer=optax.sgd(server_lr), aggregate=buffered(size, combine)
    )


def median(rows: Params, count: Array) -> Params:
    """Coordinate-wise median of the ``count`` first rows [K, ...]; of an even number, the mean of the middle two."""
    return middle_mean(rows, count, jnp.maximum(count - 1, 0) // 2)


@takes(discounted=discount, guards=guard_rails)
def fedmedian(*, server_lr: Traced = 1.0, size: int = 10, discounted: Weight, guards: Transform) -> ServerAlgorithm:
    """Coordinate-wise median of the deltas, against bad uploads (Yin et al. 2018).

    ``x <- x + eta_g median_i(s(tau_i) Delta_i)`` over the accepted deltas of a server step: Definition 1
    of the paper, with FedBuff's discount of stale deltas. Withstands fewer than half of them being bad.

    Args:
      server_lr: ``eta_g > 0``.
      size: rows of the buffer, at least the most uploads of a server step.
    """
    check.positive("server_lr", server_lr)
    return rule(
        guards, scale_by_staleness(discounted), optimizer=optax.sgd(server_lr), aggregate=buffered(size, median)
    )


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
