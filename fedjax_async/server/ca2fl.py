"""CA2FL, FedVARP, FedStale: the mean of a step's deltas, calibrated by the latest delta of every client.

Sources: Wang et al., "Tackling the data heterogeneity in asynchronous federated learning with cached update
calibration" (2024), Algorithm 2; Jhunjhunwala, Sharma, Nagarkatti, Joshi, "FedVARP: tackling the variance due to
partial client participation in federated learning" (2022), of which CA2FL is the asynchronous form; Rodio, Neglia,
"FedStale: leveraging stale client updates in federated learning" (2024), and its code (github.com/arodio/FedStale),
which has FedVARP's step too.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async.base import check, tree
from fedjax_async.base.factories import takes
from fedjax_async.server.aggregate import Sum, mean
from fedjax_async.server.rule import guard_rails
from fedjax_async.server.running_statistics import with_statistics
from fedjax_async.server.transforms import Transform, begun, require_no_steps, scaled, stepped, transformed
from fedjax_async.types import Array, Arrival, Facts, Info, Message, Params, Request, ServerAlgorithm, State, Traced


class Cached(NamedTuple):
    """The server's row about one client: its deltas at two moments."""

    before: Params  # h_i, its latest delta at the beginning of server step ``step``
    newest: Params  # its latest delta
    step: Array  # int32[], server steps closed when ``newest`` arrived; -1: no delta arrived yet


class Ca2flState(NamedTuple):
    """Server state; the rows of the clients hold the cached deltas."""

    params: Params
    mean: Params  # h, the mean of all clients' cached deltas at the beginning of this step
    changes: Params  # sum of the changes of the cached deltas since then
    accumulated: Sum  # of ``Delta_i - h_i`` since then
    step: Array  # int32[], server steps closed
    guards: State
    facts: Facts  # static


@takes(guards=guard_rails)
def ca2fl(*, server_lr: Traced = 0.3, guards: Transform) -> ServerAlgorithm:
    """Mean of K deltas, corrected by the cached deltas of all clients (Wang et al. 2024).

    ``v = h + (1/K) sum_{i in buffer} (Delta_i - h_i)``, ``x <- x + eta v``, and then ``h_i <- Delta_i``:
    ``h_i`` is the last delta of client i in earlier steps (zero at first), ``h`` the mean of all (Algorithm 2 of
    "Tackling the data heterogeneity in asynchronous federated learning with cached update calibration").
    If a client is twice in a buffer, its newest delta is cached. Running statistics are averaged over the buffer and
    not cached, because their old changes are useless later. Memory: 2 D scalars a client.

    Defaults: K = 10, that of FedBuff, which it corrects. The rate is this project's, because the authors have released
    no code that we know of: at rate 1 and with 100 clients in flight the accuracy swings (``experiments/methods``).

    Args:
      server_lr: ``eta > 0``.
    """
    return _calibrated("ca2fl", server_lr, None, guards)


@takes(guards=guard_rails)
def fedvarp(*, server_lr: Traced = 1.0, guards: Transform) -> ServerAlgorithm:
    """FedAvg corrected by the last deltas of all clients (Jhunjhunwala et al. 2022).

    ``v = (1/N) sum_j y_j + (1/|S|) sum_{i in S} (Delta_i - y_i)``, ``x <- x + eta v``, and then ``y_i <- Delta_i`` for
    the clients S of the round; ``y_i`` is the last delta of client i, zero at first. It is :func:`ca2fl` in synchronous
    rounds, and with a buffer it is CA2FL at another rate; all that is said there holds here.

    Args:
      server_lr: ``eta > 0``.
    """
    return _calibrated("fedvarp", server_lr, None, guards)


@takes(guards=guard_rails)
def fedstale(*, server_lr: Traced = 1.0, beta: Traced = 0.5, guards: Transform) -> ServerAlgorithm:
    """Between FedAvg and FedVARP: the last deltas of all clients count beta times (Rodio and Neglia 2024).

    ``v = (1/|S|) sum_{i in S} (Delta_i - beta h_i) + (beta / N) sum_j h_j``, ``x <- x + eta v``, and then
    ``h_i <- Delta_i``: fresh deltas of the round's clients S, and stale ones of all. ``beta = 0`` is FedAvg with
    uniform weights, ``beta = 1`` is :func:`fedvarp`.

    Args:
      server_lr: ``eta > 0``.
      beta: in [0, 1]. The default is this project's; the paper's advice is less where clients participate unequally.

    Deviation: the paper weighs fresh deltas by ``1 / (N p_i)``, with p_i the client's probability to participate, here
    by ``1 / |S|``. The rest is as in :func:`ca2fl`.
    """
    check.in_range("beta", beta, 0.0, 1.0)
    return _calibrated("fedstale", server_lr, beta, guards)


def _calibrated(name: str, server_lr: Traced, beta: Traced | None, guards: Transform) -> ServerAlgorithm:
    """The rule: ``v = beta h + mean (Delta_i - beta h_i)``; ``beta = None``: 1."""
    check.positive("server_lr", server_lr)
    require_no_steps(guards, name)

    def stale(cached: Params) -> Params:
        return cached if beta is None else scaled(cached, beta)

    average = mean()

    def init(params: Params, facts: Facts = Facts()) -> tuple[Ca2flState, Cached]:
        zero = jax.tree.map(jnp.zeros_like, tree.wide(params))
        first = jnp.zeros((), jnp.int32)
        limits = begun(guards, params, facts)
        state = Ca2flState(params, zero, zero, average.init(params), first, limits, facts.static)
        return state, Cached(zero, zero, first - 1)

    def receive(state: Ca2flState, memory: Cached, arrival: Arrival) -> tuple[Ca2flState, Cached, Info]:
        result = transformed(guards, state.guards, state.params, arrival)
        delta, accepted = tree.wide(result.direction), result.accepted
        share = accepted.astype(result.arrival.weight.dtype)
        before = tree.where(memory.step == state.step, memory.before, memory.newest)
        difference = jax.tree.map(jnp.subtract, delta, stale(before))
        latest = with_statistics(delta, jax.tree.map(jnp.zeros_like, delta))
        changes = jax.tree.map(lambda s, d, old: s + d - old, state.changes, latest, memory.newest)
        new = state._replace(
            changes=tree.where(accepted, changes, state.changes),
            accumulated=average.add(state.accumulated, difference, share, arrival),
            guards=tree.where(accepted, result.state, state.guards),
        )
        row = Cached(before, latest, state.step)
        return new, tree.where(accepted, row, memory), result.info(share)

    def close(state: Ca2flState, memory: Cached) -> tuple[Ca2flState, Cached]:
        correction, count, emptied = average.close(state.accumulated)
        direction = jax.tree.map(jnp.add, stale(state.mean), correction)
        cached_mean = jax.tree.map(jnp.add, state.mean, scaled(state.changes, 1.0 / state.facts.num_clients))
        no_changes = jax.tree.map(jnp.zeros_like, state.changes)
        params = stepped(state.params, direction, server_lr)
        new = state._replace(
            params=params, mean=cached_mean, changes=no_changes, accumulated=emptied, step=state.step + 1
        )
        return tree.where(count > 0, new, state), memory

    def dispatch(state: Ca2flState, memory: Cached, request: Request) -> tuple[Message, Cached]:
        return Message(state.params), memory

    return ServerAlgorithm(init, receive, dispatch, lambda state: state.params, close)
