"""Ringleader ASGD: steps along the mean of all clients' means, one for each client in a cycle.

Source: Maranjyan, Richtarik, "Ringleader ASGD: the first asynchronous SGD with optimal time complexity under data
heterogeneity" (2025): its estimator, which a summary gives, and the class ``RingleaderASGD`` in the authors' code.
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


class MeanDelta(NamedTuple):
    """A mean of deltas, of the weights alone."""

    value: Params
    deltas: Array  # int32[], how many


class ClientTable(NamedTuple):
    """The server's row about one client."""

    model: Params  # what it is sent until its turn
    now: MeanDelta  # of its deltas for this cycle
    next: MeanDelta  # of those that came after its turn, for the next one
    cycle: Array  # int32[], the cycle to which both belong
    turn: Array  # int32[], the cycle in which it had its last turn; -1: none


class ClientSum(NamedTuple):
    """Sum of means over the clients, of the weights alone."""

    total: Params
    clients: Array  # int32[], how many have one


class RingleaderState(NamedTuple):
    """Server state."""

    params: Params
    now: ClientSum
    next: ClientSum
    cycle: Array  # int32[], cycles completed
    turns: Array  # int32[], clients that had their turn in this one
    accepted: Array  # bool[], whether the last arrival was
    statistics: Sum  # of the changes of running statistics since the last server step
    guards: State
    facts: Facts  # static


def _more(old: MeanDelta, delta: Params) -> tuple[MeanDelta, Params]:
    """The mean with one delta more, and its change."""
    count = old.deltas + 1
    change = scaled(jax.tree.map(jnp.subtract, delta, old.value), 1.0 / count.astype(jnp.result_type(float)))
    return MeanDelta(jax.tree.map(jnp.add, old.value, change), count), change


def _summed(total: ClientSum, change: Params, old: MeanDelta) -> ClientSum:
    return ClientSum(jax.tree.map(jnp.add, total.total, change), total.clients + (old.deltas == 0).astype(jnp.int32))


def _zero(like: State) -> State:
    return jax.tree.map(jnp.zeros_like, like)


def _present(row: ClientTable, cycle: Array) -> ClientTable:
    """The row as of this cycle: what came early is now this cycle's."""
    same = row.cycle == cycle
    early = tree.where(row.cycle == cycle - 1, row.next, _zero(row.next))
    return row._replace(
        now=tree.where(same, row.now, early), next=tree.where(same, row.next, _zero(row.next)), cycle=cycle
    )


@takes(guards=guard_rails)
def ringleader(*, server_lr: Traced = 1.0, guards: Transform) -> ServerAlgorithm:
    """Steps along the mean of all clients' means, one for each client in a cycle (Maranjyan and Richtarik 2025).

    ``x <- x + eta (1/n) sum_i (1/b_i) sum_j Delta_ij``. A cycle begins with the wait for an upload of each client; then
    each client has its turn: with its next upload the server takes a step, and sends it the new model. What a client
    uploads after its turn, from the model that it got then, is kept for the next cycle, so that no work is lost and no
    delay is longer than 2n - 2 steps. A fast client's deltas are a larger batch, not a larger weight. The timing
    ``turns`` says which uploads are turns; with another one each closing upload is.

    Args:
      server_lr: ``eta > 0``.

    Deviations: clients take local steps, and deltas are in place of gradients. Until its turn a client goes on from the
    model that it has; here it is sent again, and counts as bytes and as a new message: the recorded staleness counts
    from it. In the authors' code a client that has had its turn goes on from the server's present model; the paper's
    estimator has one model for all deltas of a mean. A rejected upload that closes a step is its client's turn, without
    a step. Running statistics are averaged over the uploads of a step. Memory: a model and two means a client.
    """
    check.positive("server_lr", server_lr)
    require_no_steps(guards, "ringleader")
    average = mean()

    def init(params: Params, facts: Facts = Facts()) -> tuple[RingleaderState, ClientTable]:
        none = jnp.zeros((), jnp.int32)
        zero = MeanDelta(_zero(tree.wide(weights_of(params))), none)
        table = ClientSum(zero.value, none)
        state = RingleaderState(
            params=params,
            now=table,
            next=table,
            cycle=none,
            turns=none,
            accepted=jnp.zeros((), jnp.bool_),
            statistics=average.init(only_statistics(params)),
            guards=begun(guards, params, facts),
            facts=facts.static,
        )
        return state, ClientTable(params, zero, zero, none, none - 1)

    def receive(
        state: RingleaderState, memory: ClientTable, arrival: Arrival
    ) -> tuple[RingleaderState, ClientTable, Info]:
        result = transformed(guards, state.guards, state.params, arrival)
        accepted, delta = result.accepted, tree.wide(weights_of(result.direction))
        share = accepted.astype(result.arrival.weight.dtype)
        row = _present(memory, state.cycle)
        late = (row.turn == state.cycle) & ~arrival.closes
        now, change = _more(row.now, delta)
        after, change_after = _more(row.next, delta)
        taken, kept = accepted & ~late, accepted & late
        new = state._replace(
            now=tree.where(taken, _summed(state.now, change, row.now), state.now),
            next=tree.where(kept, _summed(state.next, change_after, row.next), state.next),
            accepted=accepted,
            statistics=average.add(state.statistics, only_statistics(result.direction), share, arrival),
            guards=tree.where(accepted, result.state, state.guards),
        )
        row = row._replace(now=tree.where(taken, now, row.now), next=tree.where(kept, after, row.next))
        return new, row, result.info(share)

    def close(state: RingleaderState, memory: ClientTable) -> tuple[RingleaderState, ClientTable]:
        statistics, came, emptied = average.close(state.statistics)
        clients = jnp.maximum(state.now.clients, 1).astype(jnp.result_type(float))
        step = with_statistics(scaled(scaled(state.now.total, 1.0 / clients), server_lr), statistics)
        step, steps = tree.cast_like(step, state.params), state.accepted & (came > 0)
        params = tree.where(steps, jax.tree.map(jnp.add, state.params, step), state.params)
        turns = state.turns + (memory.turn != state.cycle).astype(jnp.int32)
        row = memory._replace(model=params, turn=state.cycle)
        stays = state._replace(params=params, turns=turns, statistics=tree.where(steps, emptied, state.statistics))
        over = turns == state.facts.num_clients
        begins = stays._replace(now=state.next, next=_zero(state.next), cycle=state.cycle + 1, turns=_zero(turns))
        return tree.where(over, begins, stays), row

    def dispatch(state: RingleaderState, memory: ClientTable, request: Request) -> tuple[Message, ClientTable]:
        return Message(memory.model), memory

    return ServerAlgorithm(init, receive, dispatch, lambda state: state.params, close)
