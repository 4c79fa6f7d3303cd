"""CA2FL: a buffer whose mean is calibrated by every client's latest delta."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_async import check, tree
from fedjax_async.server.aggregate import Sum, mean
from fedjax_async.server.options import guard_rails, takes
from fedjax_async.server.transforms import Transform, scaled
from fedjax_async.types import Array, Arrival, Message, Params, ServerAlgorithm, State


class Ca2flState(NamedTuple):
    """Server state; the cached deltas themselves are the clients' rows of memory."""

    params: Params
    cached: Params  # h, the mean of all clients' cached deltas at the last close
    gathered: Sum  # of what the arrivals since then differ from their cached deltas by
    guards: State


@takes(guards=guard_rails)
def ca2fl(*, server_lr: Any = 1.0, num_clients: int = 10, guards: Transform) -> ServerAlgorithm:
    """Mean of K deltas, corrected by the cached deltas of all clients (Wang et al. 2024).

    ``v = h + (1/K) sum_{i in buffer} (Delta_i - h_i)``, ``x <- x + eta v``; ``h_i`` is the last delta of
    client i (zero at first), then ``Delta_i``, and ``h`` the mean of all ``h_i`` (Algorithm 2 of "Tackling
    the data heterogeneity in asynchronous federated learning with cached update calibration"). A client
    that is twice in a buffer counts with its newest delta in ``h``, and with both in the mean. Memory: a row
    of D scalars a client.

    Args:
      server_lr: ``eta > 0``.
      num_clients: N, the number of rows in ``h``; a simulation fills it in.
    """
    check.positive("server_lr", server_lr)
    check.whole("num_clients", num_clients)
    gathering = mean()

    def init(params: Params) -> tuple[Ca2flState, Params]:
        nothing = jax.tree.map(jnp.zeros_like, params)
        return Ca2flState(params, nothing, gathering.init(params), guards.init(params)), nothing

    def receive(state: Ca2flState, memory: Params, arrival: Arrival) -> tuple[Ca2flState, Params, dict[str, Array]]:
        arrival = arrival._replace(weight=jnp.asarray(arrival.weight, jnp.result_type(float)))
        delta, guards_state, factor = guards.update(arrival.upload, state.guards, state.params, arrival)
        accepted = jnp.logical_and(arrival.weight > 0, factor != 0)
        share = accepted.astype(jnp.result_type(float))
        difference = jax.tree.map(jnp.subtract, delta, memory)
        calibration, count, gathered = gathering.close(gathering.add(state.gathered, difference, share), arrival.closes)
        closes = jnp.logical_and(arrival.closes, count > 0)
        direction = jax.tree.map(jnp.add, state.cached, calibration)
        moved = optax.apply_updates(state.params, scaled(direction, server_lr))
        changed = jax.tree.map(jnp.add, state.cached, scaled(calibration, count / num_clients))
        new = Ca2flState(
            params=tree.where(closes, moved, state.params),
            cached=tree.where(closes, changed, state.cached),
            gathered=gathered,
            guards=tree.where(accepted, guards_state, state.guards),
        )
        return new, tree.where(accepted, delta, memory), {"weight": share * factor.astype(share.dtype)}

    def dispatch(state: Ca2flState, memory: Params) -> tuple[Message, Params]:
        return Message(state.params), memory

    return ServerAlgorithm(init, receive, dispatch, params=lambda state: state.params)
