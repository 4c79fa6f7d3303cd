"""ACED: the mean of the last deltas of the clients that were heard of lately, at each arrival.

Source: Chang et al., "Mitigating participation imbalance bias in asynchronous federated learning" (2025): the
delay-aware variant of ACE (``mifa.py``).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async.base import check, tree
from fedjax_async.base.factories import takes
from fedjax_async.server.aggregate import Sum, along, mean
from fedjax_async.server.rule import guard_rails
from fedjax_async.server.running_statistics import only_statistics, weights_of, with_statistics
from fedjax_async.server.transforms import Transform, begun, require_no_steps, scaled, transformed
from fedjax_async.types import Array, Arrival, Facts, Info, Message, Params, Request, ServerAlgorithm, State, Traced


class Heard(NamedTuple):
    """The server's row about one client."""

    delta: Params  # U_i, its last delta, of the weights alone; zero at first
    step: Array  # int32[], server steps closed when it was accepted; -1: none was


class AcedState(NamedTuple):
    """Server state. A *slot* holds what arrived in one server step; there are A + 1, of the steps t - A ... t."""

    params: Params
    slots: (
        Params  # [A + 1, ...], for each of these steps t' at t' mod (A + 1) the sum of its U_i that are still the last
    )
    counts: Array  # int32[A + 1], how many these are
    step: Array  # int32[], t, server steps closed with accepted uploads
    statistics: Sum  # of the changes of running statistics since the last server step
    guards: State


@takes(guards=guard_rails)
def aced(*, server_lr: Traced = 1.0, max_age: int | None = None, guards: Transform) -> ServerAlgorithm:
    """Mean of the last deltas of the clients that were heard of lately, at each arrival (Chang et al. 2025).

    ``U_j <- Delta_j`` for the arriving client j, then ``x <- x + eta (1 / |A(t)|) sum_{i in A(t)} U_i``, where the
    active clients A(t) are those with ``t - t_i <= tau_algo``: t_i is the server step at which the last delta of client
    i arrived and the client got its present model.

    Args:
      server_lr: ``eta > 0``.
      max_age: ``tau_algo >= 0``, in server steps; by default the number of clients. With 0 and a step at every arrival
        this is ASGD; if no client is ever older, it is ACE without waiting, over the clients heard of so far.

    Deviations: the paper begins with an update of every client from the first model; here clients are not active until
    they were heard of. Running statistics are averaged over the clients of the step and not kept. Server steps without
    accepted uploads do not count. Memory: D scalars a client and D scalars for each of ``tau_algo + 1`` steps.
    """
    check.positive("server_lr", server_lr)
    check.optional(check.whole, "max_age", max_age, low=0)
    require_no_steps(guards, "aced")
    average = mean()

    def init(params: Params, facts: Facts = Facts()) -> tuple[AcedState, Heard]:
        slots = 1 + (facts.num_clients if max_age is None else max_age)
        zero = jax.tree.map(jnp.zeros_like, weights_of(params))
        first = jnp.zeros((), jnp.int32)
        empty, none = tree.stack_zeros(zero, slots), jnp.zeros(slots, jnp.int32)
        statistics = average.init(only_statistics(params))
        state = AcedState(params, empty, none, first, statistics, begun(guards, params, facts))
        return state, Heard(zero, first - 1)

    def receive(state: AcedState, memory: Heard, arrival: Arrival) -> tuple[AcedState, Heard, Info]:
        result = transformed(guards, state.guards, state.params, arrival)
        accepted, delta = result.accepted, weights_of(result.direction)
        share = accepted.astype(result.arrival.weight.dtype)
        number = len(state.counts)
        now, before = state.step % number, memory.step % number
        active = jnp.logical_and(memory.step >= 0, state.step - memory.step < number)
        into = jnp.arange(number, dtype=jnp.int32) == now
        out_of = jnp.logical_and(jnp.arange(number, dtype=jnp.int32) == before, active)

        def moved(rows: Array, new: Array, old: Array) -> Array:
            added = along(into.astype(rows.dtype), rows) * new[None]
            return rows + added - along(out_of.astype(rows.dtype), rows) * old[None]

        slots = jax.tree.map(moved, state.slots, delta, memory.delta)
        counts = state.counts + into.astype(jnp.int32) - out_of.astype(jnp.int32)
        new = state._replace(
            slots=tree.where(accepted, slots, state.slots),
            counts=jnp.where(accepted, counts, state.counts),
            statistics=average.add(state.statistics, only_statistics(result.direction), share, arrival),
            guards=tree.where(accepted, result.state, state.guards),
        )
        return new, tree.where(accepted, Heard(delta, state.step), memory), result.info(share)

    def close(state: AcedState, memory: Heard) -> tuple[AcedState, Heard]:
        statistics, came, emptied = average.close(state.statistics)
        active = jnp.maximum(jnp.sum(state.counts, dtype=jnp.int32), 1).astype(jnp.result_type(float))
        direction = scaled(jax.tree.map(lambda rows: jnp.sum(rows, axis=0), state.slots), 1.0 / active)
        change = with_statistics(scaled(direction, server_lr), statistics)
        stays = jnp.arange(len(state.counts), dtype=jnp.int32) != (state.step + 1) % len(state.counts)
        stepped = state._replace(
            params=jax.tree.map(jnp.add, state.params, change),
            slots=jax.tree.map(lambda rows: rows * along(stays.astype(rows.dtype), rows), state.slots),
            counts=state.counts * stays.astype(jnp.int32),
            step=state.step + 1,
            statistics=emptied,
        )
        return tree.where(came > 0, stepped, state), memory

    def dispatch(state: AcedState, memory: Heard, request: Request) -> tuple[Message, Heard]:
        return Message(state.params), memory

    return ServerAlgorithm(init, receive, dispatch, lambda state: state.params, close)
