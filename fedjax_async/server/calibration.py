"""Rules whose clients go on from their own weights, calibrated by what the others did meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async import tree
from fedjax_async.server.rule import closed, known
from fedjax_async.types import Array, Arrival, Facts, Info, Message, Params, Request, ServerAlgorithm, State

# ``combine(change, now, before)``: how a client moves from its start, given its own change and the others', which
# is the way from ``before`` to ``now``.
Combine = Callable[[Params, Params, Params], Params]


class Sent(NamedTuple):
    """The server's row about one client."""

    weights: Params  # what it is sent next: its own weights, calibrated
    seen: Params  # the global model right after its last upload


class Averaged(NamedTuple):
    """State of :func:`by_average`."""

    average: State
    accepted: Array  # bool[], whether the rule counted the last arrival


class Shared(NamedTuple):
    """State of :func:`by_last`."""

    average: State
    weights: Params  # what was sent last, to whichever client


def marker() -> Array:
    """A row that says nothing, but that messages change with every arrival, not only when a step closes."""
    return jnp.zeros((), jnp.int32)


def plus(one: Params, other: Params) -> Params:
    """Leafwise sum."""
    return jax.tree.map(jnp.add, one, other)


def handed_on(last: Params, start: Params, change: Params, combine: Combine) -> Params:
    """``start + combine(change, last, start)``."""
    return plus(start, combine(change, last, start))


def by_average(average: ServerAlgorithm, combine: Combine) -> ServerAlgorithm:
    """``average``, a rule without memory, whose clients start from calibrated weights of their own.

    A client that arrives with ``start + Delta`` is next sent ``start + combine(Delta, W, W_seen)``: ``W`` is
    the global model before this arrival is mixed in, ``W_seen`` the one right after its arrival before. A
    client whose upload the rule rejects is sent what it was sent before.
    """

    def init(params: Params) -> tuple[Averaged, Sent]:
        return Averaged(average.init(params)[0], jnp.bool_(False)), Sent(params, params)

    def receive(state: Averaged, memory: Sent, arrival: Arrival) -> tuple[Averaged, Sent, Info]:
        now = average.params(state.average)
        weights = plus(arrival.start, combine(arrival.upload, now, memory.seen))
        after, _, info = average.receive(state.average, (), arrival)
        accepted = info.weight > 0
        return Averaged(after, accepted), tree.where(accepted, Sent(weights, now), memory), info

    def close(state: Averaged, memory: Sent) -> tuple[Averaged, Sent]:
        after, seen = seen_after(average, state.average, state.accepted, memory.seen)
        return state._replace(average=after), memory._replace(seen=seen)

    def dispatch(state: Averaged, memory: Sent, request: Request) -> tuple[Message, Sent]:
        return Message(memory.weights), memory

    def given(facts: Facts) -> ServerAlgorithm:
        return by_average(known(average, facts), combine)

    return ServerAlgorithm(init, receive, dispatch, lambda state: average.params(state.average), close, given)


def seen_after(average: ServerAlgorithm, state: State, accepted: Array, seen: Params) -> tuple[State, Params]:
    """Close a step of ``average``: its state, and what the client whose arrival closed it has now seen."""
    after, _ = closed(average, state, ())
    return after, tree.where(accepted, average.params(after), seen)


def by_last(average: ServerAlgorithm, combine: Combine) -> ServerAlgorithm:
    """Like :func:`by_average`, but the shift is counted from the weights ``S`` that were calibrated last, for anyone.

    ``S <- start + combine(Delta, S, start)``, and ``S`` is what the next client to leave is sent, while
    the model of ``average`` is only evaluated.
    """

    def init(params: Params) -> tuple[Shared, Array]:
        return Shared(average.init(params)[0], params), marker()

    def receive(state: Shared, memory: Array, arrival: Arrival) -> tuple[Shared, Array, Info]:
        weights = handed_on(state.weights, arrival.start, arrival.upload, combine)
        after, _, info = average.receive(state.average, (), arrival)
        return Shared(after, tree.where(info.weight > 0, weights, state.weights)), memory, info

    def close(state: Shared, memory: Array) -> tuple[Shared, Array]:
        return state._replace(average=closed(average, state.average, ())[0]), memory

    def dispatch(state: Shared, memory: Array, request: Request) -> tuple[Message, Array]:
        return Message(state.weights), memory

    def given(facts: Facts) -> ServerAlgorithm:
        return by_last(known(average, facts), combine)

    return ServerAlgorithm(init, receive, dispatch, lambda state: average.params(state.average), close, given)
