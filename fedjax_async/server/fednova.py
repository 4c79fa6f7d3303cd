"""FedNova: clients that take more local steps do not count for more."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_async import check
from fedjax_async.registry import takes
from fedjax_async.server.aggregate import Aggregate
from fedjax_async.server.options import guard_rails
from fedjax_async.server.rule import rule
from fedjax_async.server.running_statistics import weights_of, with_statistics
from fedjax_async.server.transforms import Transform, scaled
from fedjax_async.types import Array, Arrival, Params, ServerAlgorithm, Traced


class Normalised(NamedTuple):
    """What :func:`normalised` gathers."""

    total: Params  # sum of ``w_i d_i / tau_i``, of running statistics of ``w_i d_i``
    steps: Array  # float[], sum of ``w_i tau_i``
    weight: Array  # float[], sum of ``w_i``


def normalised() -> Aggregate:
    """``tau_eff sum p_i d_i / tau_i``; ``tau_eff = sum p_i tau_i``, ``p_i = w_i / sum w_j``, ``tau_i`` local steps."""

    def init(params: Params) -> Normalised:
        nothing = jnp.zeros((), jnp.result_type(float))
        return Normalised(jax.tree.map(jnp.zeros_like, params), nothing, nothing)

    def add(gathered: Normalised, direction: Params, share: Array, arrival: Arrival) -> Normalised:
        steps = jnp.asarray(arrival.local_steps).astype(share.dtype)
        part = with_statistics(weights_of(scaled(direction, share / steps)), scaled(direction, share))
        total = jax.tree.map(jnp.add, gathered.total, part)
        return Normalised(total, gathered.steps + share * steps, gathered.weight + share)

    def close(gathered: Normalised) -> tuple[Params, Array, Normalised]:
        total, steps, weight = gathered
        below = jnp.where(weight > 0, weight, 1.0)
        average = scaled(total, 1.0 / below)
        direction = with_statistics(weights_of(scaled(average, steps / below)), average)
        return direction, weight, jax.tree.map(jnp.zeros_like, gathered)

    return Aggregate(init, add, close)


@takes(guards=guard_rails)
def fednova(*, server_lr: Traced = 1.0, weighting: str = "examples", guards: Transform) -> ServerAlgorithm:
    """Mean of the deltas per local step, times the mean number of steps (Wang et al. 2020).

    ``x <- x + eta_g tau_eff sum_i p_i Delta_i / tau_i``, ``tau_eff = sum_i p_i tau_i``, with ``tau_i`` local steps of
    plain SGD: eq. 6 of "Tackling the objective inconsistency problem in heterogeneous federated optimization". Where
    all take equally many steps, or one alone, it is FedAvg.

    Args:
      server_lr: ``eta_g > 0``.
      weighting: ``p_i`` by ``examples`` or ``uniform``.
    """
    check.positive("server_lr", server_lr)
    return rule(guards, optimizer=optax.sgd(server_lr), weighting=weighting, aggregate=normalised())
