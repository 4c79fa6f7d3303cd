"""AREA: the server's model is the mean of the last models of all clients.

Source: Iakovidou, Kim, "Asynchronous federated stochastic optimization for heterogeneous objectives under arbitrary
delays" (2024), read in the code and the documentation of its first author
(github.com/chariako/asynchronous_federated_learning_simulation, memory ``models``).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async.base import tree
from fedjax_async.base.factories import takes
from fedjax_async.server.aggregate import Sum, mean
from fedjax_async.server.rule import guard_rails
from fedjax_async.server.running_statistics import only_statistics, weights_of, with_statistics
from fedjax_async.server.transforms import (
    Transform,
    begun,
    require_no_correction,
    require_no_steps,
    scaled,
    transformed,
)
from fedjax_async.types import Arrival, Facts, Info, Message, Params, Request, ServerAlgorithm, State


class AreaState(NamedTuple):
    """Server state; the row of each client is its last model, of the weights alone."""

    params: Params
    residuals: Params  # sum of what the clients' models have changed since the last server step, of the weights alone
    statistics: Sum  # of the changes of running statistics since then
    guards: State
    facts: Facts  # static


@takes(guards=guard_rails)
def area(*, guards: Transform) -> ServerAlgorithm:
    """The mean of the last models of all clients (AREA, asynchronous exact averaging: Iakovidou and Kim 2024).

    A client uploads what its trained model has changed since its last trained model, ``w_i - w_i'``, at first since
    the run's first model; when the server step closes, ``x <- x + (1/N) sum (w_i - w_i')`` over its uploads. So
    ``x = (1/N) sum_i w_i`` over all N clients at the end of each step, and a fast client counts for no more than a slow
    one.

    The memory ``w_i'`` is the client's in the paper. Here the clients upload deltas and the server keeps their models:
    the same numbers, and as many bytes. Memory: D scalars a client. The server has no rate of its own.

    Deviations: in the authors' code a client starts again from the model from before its own upload is applied, here
    from the one after. Running statistics are averaged over the clients of the step. If an upload is rejected, the last
    model stays.
    """
    require_no_steps(guards, "area")
    require_no_correction(guards, "area")
    average = mean()

    def init(params: Params, facts: Facts = Facts()) -> tuple[AreaState, Params]:
        first = tree.wide(weights_of(params))
        zero, statistics = jax.tree.map(jnp.zeros_like, first), average.init(only_statistics(params))
        return AreaState(params, zero, statistics, begun(guards, params, facts), facts.static), first

    def receive(state: AreaState, memory: Params, arrival: Arrival) -> tuple[AreaState, Params, Info]:
        result = transformed(guards, state.guards, state.params, arrival)
        accepted, share = result.accepted, result.accepted.astype(result.arrival.weight.dtype)
        parts = (tree.wide(weights_of(part)) for part in (result.arrival.start, result.direction))
        model = jax.tree.map(jnp.add, *parts)
        residuals = jax.tree.map(lambda total, new, old: total + new - old, state.residuals, model, memory)
        new = state._replace(
            residuals=tree.where(accepted, residuals, state.residuals),
            statistics=average.add(state.statistics, only_statistics(result.direction), share, arrival),
            guards=tree.where(accepted, result.state, state.guards),
        )
        return new, tree.where(accepted, model, memory), result.info(share)

    def close(state: AreaState, memory: Params) -> tuple[AreaState, Params]:
        statistics, came, emptied = average.close(state.statistics)
        change = with_statistics(scaled(state.residuals, 1.0 / state.facts.num_clients), statistics)
        change = tree.cast_like(change, state.params)
        moved = tree.where(came > 0, jax.tree.map(jnp.add, state.params, change), state.params)
        zero = jax.tree.map(jnp.zeros_like, state.residuals)
        return state._replace(params=moved, residuals=zero, statistics=emptied), memory

    def dispatch(state: AreaState, memory: Params, request: Request) -> tuple[Message, Params]:
        return Message(state.params), memory

    return ServerAlgorithm(init, receive, dispatch, lambda state: state.params, close)
