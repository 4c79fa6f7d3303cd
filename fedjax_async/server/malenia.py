"""Malenia SGD: the mean over the clients of the mean of each client's deltas in a server step.

Source: Tyurin, Richtarik, "Optimal time complexities of parallel stochastic optimization methods under a fixed
computation model" (2023), in the form in which later papers of its authors give it beside Rennala SGD.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async.base import check, tree
from fedjax_async.base.factories import takes
from fedjax_async.server.aggregate import Sum, mean
from fedjax_async.server.rule import guard_rails
from fedjax_async.server.running_statistics import only_statistics, weights_of, with_statistics
from fedjax_async.server.transforms import Transform, begun, require_no_steps, scaled, transformed
from fedjax_async.types import Array, Arrival, Facts, Info, Message, Params, Request, ServerAlgorithm, State, Traced


class OwnMean(NamedTuple):
    """The server's row about one client."""

    mean: Params  # of its deltas in server step ``step``, of the weights alone
    deltas: Array  # int32[], how many these are
    step: Array  # int32[], the step of its last accepted delta; -1: none was


class MaleniaState(NamedTuple):
    """Server state."""

    params: Params
    total: Params  # sum of the clients' own means in this server step, of the weights alone
    clients: Array  # int32[], how many clients these are
    step: Array  # int32[], server steps closed with accepted uploads
    statistics: Sum  # of the changes of running statistics in this step
    guards: State


@takes(guards=guard_rails)
def malenia(*, server_lr: Traced = 1.0, guards: Transform) -> ServerAlgorithm:
    """Mean over clients of the mean of each one's deltas in a server step (Tyurin and Richtarik 2023).

    ``x <- x + eta (1/n) sum_i (1/B_i) sum_{j <= B_i} Delta_ij``: client i sends B_i deltas from the model x while the
    server waits for all n. A fast client's deltas are a larger batch, not a larger weight, so the mean has no bias
    where the clients' data differ; with weights by ``B_i`` it is Rennala SGD (method ``rennala``). The timing
    ``fresh:everyone=true`` waits for all clients, from one model. If only some take part in a step, the mean is over
    these.

    Args:
      server_lr: ``eta > 0``.

    Deviations: the paper waits until the harmonic mean of the B_i exceeds S / n; the timing waits until each is 1, and
    until there are ``size`` uploads in all. Running statistics are averaged over the uploads of the step. Memory: D
    scalars a client.
    """
    check.positive("server_lr", server_lr)
    require_no_steps(guards, "malenia")
    average = mean()

    def init(params: Params, facts: Facts = Facts()) -> tuple[MaleniaState, OwnMean]:
        zero, none = jax.tree.map(jnp.zeros_like, tree.wide(weights_of(params))), jnp.zeros((), jnp.int32)
        statistics = average.init(only_statistics(params))
        state = MaleniaState(params, zero, none, none, statistics, begun(guards, params, facts))
        return state, OwnMean(zero, none, none - 1)

    def receive(state: MaleniaState, memory: OwnMean, arrival: Arrival) -> tuple[MaleniaState, OwnMean, Info]:
        result = transformed(guards, state.guards, state.params, arrival)
        accepted, delta = result.accepted, tree.wide(weights_of(result.direction))
        share = accepted.astype(result.arrival.weight.dtype)
        again = memory.step == state.step
        before = tree.where(again, memory.mean, jax.tree.map(jnp.zeros_like, memory.mean))
        count = jnp.where(again, memory.deltas, 0) + 1
        change = scaled(jax.tree.map(jnp.subtract, delta, before), 1.0 / count.astype(jnp.result_type(float)))
        new = state._replace(
            total=tree.where(accepted, jax.tree.map(jnp.add, state.total, change), state.total),
            clients=state.clients + jnp.logical_and(accepted, ~again).astype(jnp.int32),
            statistics=average.add(state.statistics, only_statistics(result.direction), share, arrival),
            guards=tree.where(accepted, result.state, state.guards),
        )
        row = OwnMean(jax.tree.map(jnp.add, before, change), count, state.step)
        return new, tree.where(accepted, row, memory), result.info(share)

    def close(state: MaleniaState, memory: OwnMean) -> tuple[MaleniaState, OwnMean]:
        statistics, came, emptied = average.close(state.statistics)
        clients = jnp.maximum(state.clients, 1).astype(jnp.result_type(float))
        change = with_statistics(scaled(scaled(state.total, 1.0 / clients), server_lr), statistics)
        stepped = state._replace(
            params=jax.tree.map(jnp.add, state.params, tree.cast_like(change, state.params)),
            total=jax.tree.map(jnp.zeros_like, state.total),
            clients=jnp.zeros_like(state.clients),
            step=state.step + 1,
            statistics=emptied,
        )
        return tree.where(came > 0, stepped, state), memory

    def dispatch(state: MaleniaState, memory: OwnMean, request: Request) -> tuple[Message, OwnMean]:
        return Message(state.params), memory

    return ServerAlgorithm(init, receive, dispatch, lambda state: state.params, close)
