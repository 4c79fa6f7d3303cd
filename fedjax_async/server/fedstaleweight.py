"""FedStaleWeight: the uploads of clients that are usually stale weigh more, so that slow clients count as fast ones do.

Source: Ma, Tu, Chen, Reddi, "FedStaleWeight: buffered asynchronous federated learning with fair aggregation via
staleness reweighting" (2024), read in the authors' code (``afl_bench/experiments/expected_staleness.py`` of
github.com/18jeffreyma/afl-bench).
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import optax

from fedjax_async.base import check
from fedjax_async.base.factories import takes
from fedjax_async.server.rule import Weighting, guard_rails, rule
from fedjax_async.server.transforms import Transform, Transformed
from fedjax_async.types import Array, Params, ServerAlgorithm, Traced


class Recent(NamedTuple):
    """The server's row about one client."""

    staleness: Array  # float[window], of its last accepted uploads, the newest first; 0 beyond ``uploads``
    uploads: Array  # int32[], how many these are, at most ``window``


def remembered(memory: Recent, staleness: Array) -> Recent:
    """The row with one more staleness, in place of the oldest one if it is full."""
    newest = staleness.astype(memory.staleness.dtype)[None]
    window = memory.staleness.shape[0]
    return Recent(jnp.concatenate([newest, memory.staleness[:-1]]), jnp.minimum(memory.uploads + 1, window))


@takes(guards=guard_rails)
def fedstaleweight(*, server_lr: Traced = 1.0, window: int = 5, guards: Transform) -> ServerAlgorithm:
    """Mean of deltas weighted by their clients' mean staleness (FedStaleWeight, Ma et al. 2024).

    ``x <- x + eta sum_i s_i Delta_i / sum_i s_i`` over the uploads of a server step, with the mean staleness ``s_i``
    of the last ``window`` uploads of client i, this one included. A client that is n times slower uploads n times less
    and is about n times staler, so that in the long run all clients have more nearly the same weight. Where staleness
    is 0 for all uploads of a step, as in rounds, the step changes nothing.

    Args:
      server_lr: ``eta > 0``; 1 in the authors' code, which has none.
      window: how many uploads of a client are averaged, >= 1.

    The timing is ``buffer``. Memory: ``window`` scalars a client.

    Deviations: the authors' code keeps a client's first four values and replaces the fifth, where its comment has a
    window that moves; here it moves. Two uploads of one client in one step weigh by what was known when each arrived,
    there both by the later mean. Running statistics are averaged with the same weights; there they stay. The recorded
    weight is ``s_i``; uploads of a client that has never been stale have weight 0 and count as rejected.
    """
    check.positive("server_lr", server_lr)
    check.whole("window", window)

    def usual(result: Transformed, params: Params, memory: Recent) -> tuple[Array, Recent]:
        row = remembered(memory, result.arrival.staleness)
        average = row.staleness.sum() / row.uploads.astype(row.staleness.dtype)
        return average.astype(result.arrival.weight.dtype), row

    def nothing() -> Recent:
        return Recent(jnp.zeros(window, jnp.result_type(float)), jnp.zeros((), jnp.int32))

    return rule(guards, optimizer=optax.sgd(server_lr), weighting=Weighting(usual, nothing))
