"""CA2FL: a buffer whose mean is calibrated by every client's latest delta."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async import check, tree
from fedjax_async.registry import takes
from fedjax_async.server.aggregate import Sum, mean
from fedjax_async.server.options import guard_rails
from fedjax_async.server.running_statistics import weights_of, with_statistics
from fedjax_async.server.transforms import Transform, scaled, take
from fedjax_async.types import Array, Arrival, Info, Message, Params, Request, ServerAlgorithm, State, Traced


class Cached(NamedTuple):
    """The server's row about one client: its deltas of two moments."""

    before: Params  # h_i, its latest delta at the beginning of server step ``step``
    newest: Params  # its latest delta
    step: Array  # int32[], server steps taken when the newest came; -1: none came yet


class Ca2flState(NamedTuple):
    """Server state; the cached deltas themselves are the clients' rows."""

    params: Params
    mean: Params  # h, the mean of all clients' cached deltas at the beginning of this step
    changes: Params  # sum of what the cached deltas have changed by since
    gathered: Sum  # of ``Delta_i - h_i`` since
    step: Array  # int32[], server steps taken
    guards: State


@takes(guards=guard_rails)
def ca2fl(*, server_lr: Traced = 1.0, num_clients: int = 10, guards: Transform) -> ServerAlgorithm:
    """Mean of K deltas, corrected by the cached deltas of all clients (Wang et al. 2024).

    ``v = h + (1/K) sum_{i in buffer} (Delta_i - h_i)``, ``x <- x + eta v``, and then ``h_i <- Delta_i``:
    ``h_i`` is the last delta of client i in earlier steps (zero at first), ``h`` the mean of all (Algorithm 2 of
    "Tackling the data heterogeneity in asynchronous federated learning with cached update calibration").
    Of a client that is twice in a buffer the newest delta is cached. Memory: 2 D scalars a client. Running statistics
    are averaged over the buffer and not cached: no change of them is worth anything later.

    Args:
      server_lr: ``eta > 0``.
      num_clients: N, of which ``h`` is the mean; a run by name fills it in.
    """
    check.positive("server_lr", server_lr)
    check.whole("num_clients", num_clients)
    gathering = mean()

    def init(params: Params) -> tuple[Ca2flState, Cached]:
        zero = jax.tree.map(jnp.zeros_like, params)
        begun = jnp.zeros((), jnp.int32)
        state = Ca2flState(params, zero, zero, gathering.init(params), begun, guards.init(params))
        return state, Cached(zero, zero, begun - 1)

    def receive(state: Ca2flState, memory: Cached, arrival: Arrival) -> tuple[Ca2flState, Cached, Info]:
        taken = take(guards, state.guards, state.params, arrival)
        delta, accepted = taken.direction, taken.accepted
        share = accepted.astype(taken.arrival.weight.dtype)
        before = tree.where(memory.step == state.step, memory.before, memory.newest)
        difference = jax.tree.map(jnp.subtract, delta, before)
        latest = with_statistics(delta, jax.tree.map(jnp.zeros_like, delta))
        changed = jax.tree.map(lambda s, d, old: s + d - old, state.changes, latest, memory.newest)
        new = state._replace(
            changes=tree.where(accepted, changed, state.changes),
            gathered=gathering.add(state.gathered, difference, share, arrival),
            guards=tree.where(accepted, taken.state, state.guards),
        )
        row = Cached(before, latest, state.step)
        return new, tree.where(accepted, row, memory), Info(share * taken.factor.astype(share.dtype))

    def close(state: Ca2flState, memory: Cached) -> tuple[Ca2flState, Cached]:
        correction, count, emptied = gathering.close(state.gathered)
        direction = jax.tree.map(jnp.add, state.mean, correction)
        moved = with_statistics(weights_of(scaled(direction, server_lr)), direction)
        now = jax.tree.map(jnp.add, state.mean, scaled(state.changes, 1.0 / num_clients))
        changes = jax.tree.map(jnp.zeros_like, state.changes)
        after = jax.tree.map(jnp.add, state.params, moved)
        stepped = Ca2flState(after, now, changes, emptied, state.step + 1, state.guards)
        return tree.where(count > 0, stepped, state), memory

    def dispatch(state: Ca2flState, memory: Cached, request: Request) -> tuple[Message, Cached]:
        return Message(state.params), memory

    return ServerAlgorithm(init, receive, dispatch, lambda state: state.params, close)
