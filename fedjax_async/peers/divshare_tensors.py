"""DivShare as the code released with PushCen-ADFL has it: receivers take some whole tensors of each message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.base import check, tree
from fedjax_async.peers.full_mixing import changed, no_change
from fedjax_async.types import Array, Event, Message, Params, PeerAlgorithm, Stays

_NUMBERED = 2**31 + 4  # folded into the key of an event: the number by which chance goes


class Numbered(NamedTuple):
    """A message: the sender's model, and a random number from which its fragments follow."""

    params: Params
    number: Array  # uint32[]


class Node(NamedTuple):
    """What a node keeps: its model, and the number of its latest message (0 before)."""

    params: Params
    number: Array  # uint32[]


class Inbox(NamedTuple):
    """What the chosen tensors of the messages add up to."""

    change: Params  # sum_j (w_j - w_i)
    counts: Array  # int32[L], how many messages gave each tensor
    seen: Array  # int32[], messages


def fragment_numbers(number: Array, tensors: int, fragments: int) -> Array:
    """The fragment of each of L tensors, int32[L]: a random order, cut into ``fragments`` parts.

    The first ``L % fragments`` parts have one tensor more than the others. ``fragments`` is at most L.
    """
    parts = np.repeat(np.arange(fragments), [len(part) for part in np.array_split(np.arange(tensors), fragments)])
    order = jnp.argsort(jax.random.bits(jax.random.key(number), (tensors,), jnp.uint32))
    return jnp.zeros(tensors, jnp.int32).at[order].set(jnp.asarray(parts, jnp.int32))


def tensor_fragments(stays: Stays, *, fragments: int = 10) -> PeerAlgorithm:
    """Numbered models are sent; a receiver takes one random fragment of each, and averages tensor by tensor.

    A sender divides the tensors of its model at random into ``fragments`` parts (or as many as there are tensors).
    For each message of its inbox a receiver draws one part, of the others it takes nothing:
    ``w[l] <- (w[l] + sum_{j in R_l} w_j[l]) / (1 + |R_l|)``, where R_l are the messages whose drawn part holds
    tensor l. The planned coefficients are not used.

    Chance of the receiver follows from the number of its latest message, so receivers that have not sent anything yet
    draw alike for the same message at the same place of their inboxes.

    Args:
      fragments: at least 1.

    Source: ADFLab, the code released with PushCen-ADFL (2026), its DivShare client. All fragments travel to every
    receiver there, so a message costs the bytes of a whole model. Running statistics are no tensors of it here.
    """
    check.whole("fragments", fragments)

    def count_of(params: Params) -> int:
        return len(jax.tree.leaves(tree.split(params, stays)[0]))

    def open_inbox(row: Node) -> Inbox:
        return Inbox(no_change(row.params, stays), jnp.zeros(count_of(row.params), jnp.int32), jnp.int32(0))

    def add(inbox: Inbox, row: Node, message: Numbered, weight: Array) -> Inbox:
        del weight
        tensors = count_of(row.params)
        parts = min(fragments, tensors)
        chance = jax.random.fold_in(jax.random.fold_in(jax.random.key(message.number), row.number), inbox.seen)
        drawn = jax.random.randint(chance, (), 0, parts, jnp.int32)
        taken = fragment_numbers(message.number, tensors, parts) == drawn

        def added(total: Array, own: Array, other: Array, take: Array) -> Array:
            return jnp.where(take, total + (other - own).astype(total.dtype), total)

        own = tree.split(row.params, stays)[0]
        chosen = jax.tree.unflatten(jax.tree.structure(own), list(taken))
        change = jax.tree.map(added, inbox.change, own, message.params, chosen)
        return Inbox(change, inbox.counts + taken.astype(jnp.int32), inbox.seen + 1)

    def wake(row: Node, inbox: Inbox, event: Event) -> Node:
        del event
        counts = jax.tree.unflatten(jax.tree.structure(inbox.change), list(inbox.counts))
        mean = jax.tree.map(lambda total, count: total / (1 + count).astype(total.dtype), inbox.change, counts)
        return row._replace(params=changed(row.params, mean))

    def push(row: Node, upload: Params, event: Event) -> tuple[Node, Numbered, Mapping[str, Array]]:
        number = jax.random.bits(jax.random.fold_in(event.key, _NUMBERED), (1,), jnp.uint32)
        params = jax.tree.map(jnp.add, row.params, upload)
        sent = jax.tree.map(lambda leaf: leaf[None], tree.split(params, stays)[0])
        return Node(params, number[0]), Numbered(sent, number), {}

    return PeerAlgorithm(
        init=lambda params: Node(params, jnp.uint32(0)),
        open=open_inbox,
        add=add,
        wake=wake,
        start=lambda row: Message(row.params),
        push=push,
        params=lambda row: row.params,
        wire=lambda message: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(message.params)),
    )
