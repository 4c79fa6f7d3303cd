"""Trimmed mean: in each coordinate, the extreme values of a server step are left out."""

from __future__ import annotations

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
