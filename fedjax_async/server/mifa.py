"""MIFA and ACE: each step is the mean of the last delta of every client, also of those that are absent.

Sources: Gu, Huang, Zhang, Huang, "Fast federated learning in the presence of arbitrary device unavailability" (2021),
Algorithm 1 and the released code (github.com/hmgxr128/MIFA_code); Chang et al., "Mitigating participation imbalance
bias in asynchronous federated learning" (2025), whose ACE is the same mean with a step at every arrival: read in its
introduction and as IA2SGD in the code of the authors of Ringmaster ASGD, not in its own algorithm.
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


class Last(NamedTuple):
    """The server's row about one client."""

    delta: Params  # its last delta, of the weights alone; zero at first
    known: Array  # bool[], whether a delta of it was accepted


class MifaState(NamedTuple):
    """Server state; the rows of the clients hold their last deltas."""

    params: Params
    mean: Params  # of the last deltas of all N clients, of the weights alone
    clients: Array  # int32[], how many clients have a delta
    statistics: Sum  # of the changes of running statistics since the last server step
    guards: State
    facts: Facts  # static


@takes(guards=guard_rails)
def mifa(*, server_lr: Traced = 1.0, wait: bool = False, guards: Transform) -> ServerAlgorithm:
    """Mean of the last delta of every client, also of those that are absent (Gu et al. 2021).

    ``G_i <- Delta_i`` of the clients that arrive, then ``x <- x + eta (1/N) sum_{i=1}^N G_i`` when the server step
    closes. The paper is about rounds in which all available clients train: with the timing ``cohort:size=N`` these are
    all that are online. In asynchronous runs G_i is the delta from whatever model client i started from,
    and the mean is over deltas of different ages.

    Args:
      server_lr: ``eta > 0``.
      wait: whether the model stays as it is until a delta of every client was accepted, which is the first round of the
        paper. Otherwise the G_i of clients not heard of yet are 0, and the first steps are short; the released code has
        both. A client that never arrives stops a run that waits.

    Deviations: the paper's G_i is divided by the client's learning rate and multiplied by the present one, here a delta
    keeps the rate of its own job. Running statistics are averaged over the clients of the step and not kept, because
    old changes of them are useless later. Memory: D scalars a client.
    """
    return _last_deltas("mifa", server_lr, wait, guards)


@takes(guards=guard_rails)
def ace(*, server_lr: Traced = 1.0, wait: bool = True, guards: Transform) -> ServerAlgorithm:
    """Mean of the last delta of every client, at each arrival (Chang et al. 2025).

    "All-client engagement": ``u <- u + (Delta_j - U_j) / N`` and ``U_j <- Delta_j`` for the arriving client j, then
    ``x <- x + eta u``, with u the mean of all U_i. It is :func:`mifa` with a step at every arrival.

    Args:
      server_lr: ``eta > 0``.
      wait: whether the model stays as it is until every client was heard of. The paper begins with an update of every
        client from the first model.

    Deviation: clients that return before all have been heard of train from the first model again.
    """
    return _last_deltas("ace", server_lr, wait, guards)


def _last_deltas(name: str, server_lr: Traced, wait: bool, guards: Transform) -> ServerAlgorithm:
    """The rule of both."""
    check.positive("server_lr", server_lr)
    check.kind("wait", wait, bool, "True or False")
    require_no_steps(guards, name)
    average = mean()

    def init(params: Params, facts: Facts = Facts()) -> tuple[MifaState, Last]:
        zero = jax.tree.map(jnp.zeros_like, tree.wide(weights_of(params)))
        statistics = average.init(only_statistics(params))
        limits = begun(guards, params, facts)
        state = MifaState(params, zero, jnp.zeros((), jnp.int32), statistics, limits, facts.static)
        return state, Last(zero, jnp.zeros((), jnp.bool_))

    def receive(state: MifaState, memory: Last, arrival: Arrival) -> tuple[MifaState, Last, Info]:
        result = transformed(guards, state.guards, state.params, arrival)
        accepted, delta = result.accepted, tree.wide(weights_of(result.direction))
        share = accepted.astype(result.arrival.weight.dtype)
        change = scaled(jax.tree.map(jnp.subtract, delta, memory.delta), 1.0 / state.facts.num_clients)
        new = state._replace(
            mean=tree.where(accepted, jax.tree.map(jnp.add, state.mean, change), state.mean),
            clients=state.clients + jnp.logical_and(accepted, ~memory.known).astype(jnp.int32),
            statistics=average.add(state.statistics, only_statistics(result.direction), share, arrival),
            guards=tree.where(accepted, result.state, state.guards),
        )
        return new, tree.where(accepted, Last(delta, jnp.ones_like(memory.known)), memory), result.info(share)

    def close(state: MifaState, memory: Last) -> tuple[MifaState, Last]:
        statistics, count, emptied = average.close(state.statistics)
        change = tree.cast_like(with_statistics(scaled(state.mean, server_lr), statistics), state.params)
        heard = state.clients >= state.facts.num_clients if wait else count > 0
        moved = tree.where(jnp.logical_and(count > 0, heard), jax.tree.map(jnp.add, state.params, change), state.params)
        return state._replace(params=moved, statistics=emptied), memory

    def dispatch(state: MifaState, memory: Last, request: Request) -> tuple[Message, Last]:
        return Message(state.params), memory

    return ServerAlgorithm(init, receive, dispatch, lambda state: state.params, close)
