"""One job of a run, traced and never run: the shapes of a message, of an upload and of what an arrival changes.

``sent`` gives the shapes of what a run sends. ``job`` goes from a message to its arrival, ``arrived`` on through the
server step; ``event`` is the same for a node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async.base import tree
from fedjax_async.engine.components import Client, Components, Hyper, Server, abstract, bound, row_of
from fedjax_async.peers import Event, PeerAlgorithm
from fedjax_async.server import begun, closed
from fedjax_async.types import (
    Array,
    Arrival,
    ClientAlgorithm,
    ClientData,
    Facts,
    Info,
    Key,
    Message,
    Params,
    Request,
    ServerAlgorithm,
    State,
)


class Trial(NamedTuple):
    """A job at its arrival."""

    state: State  # of the server, before the arrival
    memory: State  # of the server about this client
    message: Message
    kept: State  # the client's state before the job
    upload: State
    arrival: Arrival


def sent(components: Components, params: Params) -> tuple[Message, State]:
    """Shapes of a message and of an upload before compression, from the shapes of the params.

    Raises ``ValueError`` for wrong values among ``components.hyper``.
    """
    bound(components.rule, components.hyper)
    found: tuple[Message, State] = shapes_of(_sent, components, params)
    return found


def _sent(
    server: Server, client: Client, facts: Facts, hyper: Hyper, params: Params, key: Key, pool: tuple[Array, Array]
) -> tuple[Message, State]:
    found = job(bound(server, hyper), bound(client, hyper), params, key, pool, facts)
    return found.message, found.upload


def shapes_of(function: Callable[..., Any], components: Components, params: Params, *more: Any) -> Any:
    """The shapes of ``function(rule, client, facts, *more, hyper, params, key, one row of the data)``."""
    rule, client, _, data, hyper = components
    key, pool = jax.eval_shape(jax.random.key, 0), (row_of(data.x), row_of(data.y))
    given = (rule, client, Facts(len(data.size)), *more)
    return tree.shapes(function, abstract(hyper), params, key, pool, given=given)


def one_row(x: Array, y: Array, zero: Array) -> ClientData:
    """The data of a client that has one row."""
    return ClientData(x, y, jnp.zeros(1, jnp.int32), zero, zero + 1)


def job(
    rule: ServerAlgorithm,
    client: ClientAlgorithm,
    params: Params,
    key: Key,
    pool: tuple[Array, Array],
    facts: Facts,
    *,
    zero: Array | None = None,
    steps: int = 0,
) -> Trial:
    """The first job of a run with these facts, with ``steps`` local steps.

    ``zero``: int32[], a traced 0, if the lengths of loops shall not be known.
    """
    zero, real = jnp.int32(0) if zero is None else zero, jnp.zeros((), jnp.result_type(float))
    state, memory = jax.tree.map(jnp.asarray, begun(rule, params, facts))
    message, memory = rule.dispatch(state, memory, Request())
    message = jax.tree.map(jnp.asarray, message._replace(version=zero, local_steps=zero + 1))
    data, kept = one_row(*pool, zero), jax.tree.map(jnp.asarray, client.init(params))
    work = jax.tree.map(jnp.asarray, client.begin(key, message, kept, data))
    for k in range(steps):
        work = client.step(work, zero + k, message, data)
    upload, _ = client.finish(work, message._replace(local_steps=()), kept)
    start, extra = message.params, message.extra
    arrival = Arrival(upload, start, zero, real, zero, real, jnp.bool_(True), zero, extra, key, zero > 0)
    return Trial(state, memory, message, kept, upload, arrival)


def arrived(rule: ServerAlgorithm, trial: Trial) -> tuple[State, State, Info, Params, Message]:
    """State, memory and info after the arrival and its server step, the new params and the next message."""
    state, memory, info = rule.receive(trial.state, trial.memory, trial.arrival)
    state, memory = closed(rule, state, memory)
    return state, memory, info, rule.params(state), rule.dispatch(state, memory, Request())[0]


def event(
    node: PeerAlgorithm, client: ClientAlgorithm, params: Params, key: Key, pool: tuple[Array, Array]
) -> tuple[State, Mapping[str, Array]]:
    """One message of a node that wakes, trains without local steps, pushes and mixes its own message; its columns."""
    zero, real = jnp.int32(0), jnp.result_type(float)
    start, now = node.init(params), Event(key, jnp.ones((), real))
    inbox = node.open(start)
    row = node.wake(start, inbox, now)
    node.params(row)
    message = node.start(row)._replace(version=zero, local_steps=zero + 1)
    kept = client.init(params)
    upload, _ = client.finish(client.begin(key, message, kept, one_row(*pool, zero)), message, kept)
    _, messages, columns = node.push(row, upload, now)
    one = jax.tree.map(lambda leaf: leaf[0], messages)
    node.add(inbox, start, one, jnp.zeros((), real))
    return one, columns
