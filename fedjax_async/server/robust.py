"""Rules that tolerate bad uploads: coordinate-wise median, trimmed mean, Krum.

All three ignore a part of the honest uploads. If clients differ, they may lose accuracy even without an attacker.
"""

from __future__ import annotations

import numbers

import jax
import jax.numpy as jnp
import optax

from fedjax_async.base import check
from fedjax_async.base.factories import takes
from fedjax_async.server.aggregate import along, buffered
from fedjax_async.server.rule import discount, guard_rails, rule
from fedjax_async.server.transforms import Transform, Weight, scale_by_staleness
from fedjax_async.types import Array, Facts, Params, ServerAlgorithm, State, Traced


def middle_mean(rows: Params, count: Array, cut: Array) -> Params:
    """Coordinate-wise mean of the first ``count`` rows without the ``cut`` smallest and ``cut`` largest values.

    ``rows`` [K, ...], ``count`` and ``cut`` int32[] with ``2 cut < count``. Instead of sorting, it counts for each
    value how many are smaller. The count is a loop over rows, vectorised over coordinates: 20 times faster on a CPU
    than sorting 10 rows.
    """
    real = jnp.result_type(float)
    left = jnp.maximum(count - 2 * cut, 1).astype(real)

    def of_leaf(values: Array) -> Array:
        index = along(jax.lax.iota(count.dtype, values.shape[0]), values)
        filled = jnp.where(index < count, values, jnp.full_like(values, jnp.inf))

        def add(i: Array, total: Array) -> Array:
            row = filled[i]
            # of equal values, the first to arrive counts as smaller
            smaller = (filled < row[None]) | ((filled == row[None]) & (index < i))
            below = jnp.sum(smaller, axis=0, dtype=count.dtype)
            return total + jnp.where((below >= cut) & (below < count - cut), row, jnp.zeros_like(row)).astype(real)

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
    averaged (Definition 2 of the paper). Tolerates bad uploads up to the share ``trim``. With ``trim = 0``
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
        # without the 1e-4, 0.29 x 100 would be rounded down to 28
        cut = jnp.floor(jnp.asarray(trim, real) * count.astype(real) + 1e-4).astype(count.dtype)
        return middle_mean(rows, count, jnp.minimum(cut, jnp.maximum(count - 1, 0) // 2))

    return rule(
        guards, scale_by_staleness(discounted), optimizer=optax.sgd(server_lr), aggregate=buffered(size, combine)
    )


def median(rows: Params, count: Array) -> Params:
    """Coordinate-wise median of the first ``count`` rows [K, ...]; for an even count, the mean of the middle two."""
    return middle_mean(rows, count, jnp.maximum(count - 1, 0) // 2)


@takes(discounted=discount, guards=guard_rails)
def fedmedian(*, server_lr: Traced = 1.0, size: int = 10, discounted: Weight, guards: Transform) -> ServerAlgorithm:
    """Coordinate-wise median of the deltas, against bad uploads (Yin et al. 2018).

    ``x <- x + eta_g median_i(s(tau_i) Delta_i)`` over the accepted deltas of a server step: Definition 1
    of the paper, with FedBuff's staleness weight. Tolerates bad deltas as long as they are fewer than half.

    Args:
      server_lr: ``eta_g > 0``.
      size: rows of the buffer, at least the most uploads of a server step.
    """
    check.positive("server_lr", server_lr)
    return rule(
        guards, scale_by_staleness(discounted), optimizer=optax.sgd(server_lr), aggregate=buffered(size, median)
    )


def squared_distances(rows: Params, count: Array) -> Array:
    """``||V_i - V_j||^2`` over all leaves of the first ``count`` rows [K, ...]; float[K, K], exactly symmetric.

    Computed from differences, because ``||a||^2 + ||b||^2 - 2 a b`` loses its digits to cancellation where uploads
    are alike, and Krum compares such uploads.
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
    """Sum of the squared distances to the ``count - byzantine - 2`` nearest others; float[K], inf from ``count`` on."""
    index = jax.lax.iota(count.dtype, distances.shape[0])
    filled = index < count
    others = filled[:, None] & filled[None] & (index[:, None] != index[None])
    nearest = jnp.sort(jnp.where(others, distances, jnp.full_like(distances, jnp.inf)), axis=1)
    near = index[None] < count - byzantine - 2
    scores = jnp.sum(jnp.where(near, nearest, jnp.zeros_like(nearest)), axis=1)
    return jnp.where(filled, scores, jnp.full_like(scores, jnp.inf))


def _whole(field: str, value: object, low: int) -> None:
    check.non_negative(field, value)
    if isinstance(value, numbers.Real):
        number = float(value)
        fits = low <= number < 2**31 and number.is_integer()
        check.require(fits, field, value, f"a whole number from {low} to {2**31 - 1}")


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
    """The delta with the nearest neighbours, or the mean of several such deltas (Blanchard et al. 2017).

    ``x <- x + eta_g V*``, ``V_i = s(tau_i) Delta_i``. V* is the delta with the smallest score among the n accepted
    deltas of a server step. The score is the sum of squared distances to the ``n - f - 2`` nearest others (section 4
    of the paper). Of equal scores, the first to arrive wins. With ``select = m > 1``, multi-Krum: the mean of the m
    best.

    The guarantee against f bad uploads needs ``n >= 2 f + 3``: a rule of a smaller ``size`` is refused, and so is a run
    in which no server step has so many uploads. A single step with fewer uploads uses ``f = (n - 3) // 2``; of two
    uploads the first is used. Never more than ``n - f`` are averaged.

    Args:
      byzantine: f, whole and >= 0.
      select: m, whole and >= 1.
      server_lr: ``eta_g > 0``.
      size: rows of the buffer, at least the most uploads of a server step.
    """
    _whole("byzantine", byzantine, 0)
    _whole("select", select, 1)
    check.positive("server_lr", server_lr)
    _tolerates(byzantine, "size", size)

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

    usual = rule(
        guards, scale_by_staleness(discounted), optimizer=optax.sgd(server_lr), aggregate=buffered(size, combine)
    )

    def init(params: Params, facts: Facts = Facts()) -> tuple[State, State]:
        if facts.longest_step is not None:
            _tolerates(byzantine, "uploads of the longest server step", facts.longest_step)
        return usual.init(params, facts)

    return usual._replace(init=init)


def _tolerates(byzantine: object, field: str, count: object) -> None:
    """Raise ``ValueError`` if so few uploads cannot outvote f bad ones; nothing is checked if f is traced."""
    if isinstance(byzantine, numbers.Real) and isinstance(count, int):
        bad = int(float(byzantine))
        allowed = f"at least 2 f + 3 = {2 * bad + 3} for Krum with byzantine = f = {bad}"
        check.require(count >= 2 * bad + 3, field, count, allowed)
