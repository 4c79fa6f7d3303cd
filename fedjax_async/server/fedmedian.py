"""FedMedian: the coordinate-wise median of a server step."""

from __future__ import annotations

import jax.numpy as jnp
import optax

from fedjax_async import check
from fedjax_async.registry import takes
from fedjax_async.server.aggregate import buffered
from fedjax_async.server.options import discount, guard_rails
from fedjax_async.server.rule import rule
from fedjax_async.server.staleness import Weight
from fedjax_async.server.transforms import Transform, scale_by_staleness
from fedjax_async.server.trimmed_mean import middle_mean
from fedjax_async.types import Array, Params, ServerAlgorithm, Traced


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
