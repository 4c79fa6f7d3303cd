"""Check the contract of ``PeerAlgorithm`` before a run, by one abstract event: nothing is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_async import tree
from fedjax_async.config.contracts import alike, fits, is_array, returned
from fedjax_async.engine.components import Client, Hyper, Peer, abstract, bound, row_of
from fedjax_async.peers import Event, PeerAlgorithm
from fedjax_async.types import ClientAlgorithm, ClientData, FederatedData, Key, Message, Params

_PUSH = "push(row, upload, event) -> (row, messages, columns)"
_COLUMNS = "columns, a mapping, name -> scalar"
_FAMILY = "a PeerAlgorithm, or a function of hyper that returns one"


def shapes_of_message(
    peer: Peer, trainer: Client, hyper: Mapping[str, float], params: Params, data: FederatedData
) -> Any:
    """The shapes of one message, from an abstract event that pushes it and mixes it.

    Raises ``ValueError`` naming the function of ``PeerAlgorithm`` that raises or breaks its contract.
    """

    returned("method.peer", _FAMILY, bound, peer, dict(hyper))  # raises for wrong values
    key, pool = jax.eval_shape(jax.random.key, 0), (row_of(data.x), row_of(data.y))
    return tree.shapes(_event(peer, trainer), abstract(hyper), params, key, pool)


@lru_cache(maxsize=64)
def _event(peer: Peer, trainer: Client) -> Callable[..., Any]:
    """A function of hyperparameters, params, a key and a row of data, that returns a message."""

    def message(hyper: Hyper, params: Params, key: Key, pool: tuple[Any, Any]) -> Any:
        node = returned("method.peer", _FAMILY, bound, peer, hyper)
        fits(isinstance(node, PeerAlgorithm), "method.peer", node, "a PeerAlgorithm")
        client = bound(trainer, hyper)
        start = returned("peer.init", "init(params) -> row", node.init, params)
        event = Event(key, jnp.ones((), jnp.result_type(float)))
        inbox = returned("peer.open", "open(row) -> inbox", node.open, start)
        row = returned("peer.wake", "wake(row, inbox, event) -> row", node.wake, start, inbox, event)
        alike("peer.wake", row, start, "a row", "as peer.init")
        model = returned("peer.params", "params(row) -> params", node.params, row)
        alike("peer.params", model, params, "params", "as the model's")
        row, messages = _pushed(node, client, row, params, event, pool)
        one = jax.tree.map(lambda leaf: leaf[0], messages)
        added = "add(inbox, row, message, weight) -> inbox"
        weight = jnp.zeros((), jnp.result_type(float))
        alike("peer.add", returned("peer.add", added, node.add, inbox, start, one, weight), inbox, "an inbox")
        return one

    return message


def _pushed(
    node: PeerAlgorithm, client: ClientAlgorithm, row: Any, params: Params, event: Event, pool: tuple[Any, Any]
) -> tuple[Any, Any]:
    """The row after a training without local steps, and the messages that the node pushes."""
    begin = returned("peer.start", "start(row) -> Message", node.start, row)
    fits(isinstance(begin, Message), "peer.start", begin, "a Message")
    begin = begin._replace(version=jnp.int32(0), local_steps=jnp.int32(1))
    state, zero = client.init(params), jnp.int32(0)
    rows = ClientData(*pool, jnp.zeros(1, jnp.int32), zero, zero + 1)
    upload, _ = client.finish(client.begin(event.key, begin, state, rows), begin, state)
    pushed = returned("peer.push", _PUSH, node.push, row, upload, event)
    fits(isinstance(pushed, tuple) and len(pushed) == 3, "peer.push", pushed, "(row, messages, columns)")
    after, messages, columns = pushed
    alike("peer.push's row", after, row, "a row", "as peer.init")
    leaves = jax.tree.leaves(messages)
    good = bool(leaves) and all(is_array(leaf) and leaf.shape[:1] == (node.fragments,) for leaf in leaves)
    fits(good, "peer.push's messages", messages, f"arrays [F, ...], F = {node.fragments} fragments")
    scalars = isinstance(columns, Mapping) and all(is_array(v) and v.shape == () for v in columns.values())
    fits(scalars, "peer.push's columns", columns, _COLUMNS)
    return after, messages
