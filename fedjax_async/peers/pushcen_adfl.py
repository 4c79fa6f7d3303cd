"""PushCen-ADFL: push-sum aggregation of models that travel as centroids and indices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async.base import check, tree
from fedjax_async.compress import centroids, most_bits
from fedjax_async.local.anchored import REFERENCES, Dictionary, Rules, clustered
from fedjax_async.peers.full_mixing import change_towards, changed, no_change
from fedjax_async.types import Array, Event, Message, Params, Path, PeerAlgorithm, Stays, Traced

_FIRST = 2**31 + 3  # folded into the key of a node's first event: the clustering of the mean of its messages
SHORTCUTS = ("shortcut", "downsample")  # layers whose weights the released code sends as they are


class Node(NamedTuple):
    """What a node keeps."""

    params: Params  # w_i, in full precision
    dictionary: Dictionary  # G_i
    own: Dictionary  # V_i of its latest message; the released code averages it instead of G_i


class Inbox(NamedTuple):
    """What an inbox adds up to."""

    change: Params  # sum_j c_j (w_hat_j - w_i)
    tables: Params  # sum_j c_j V_j
    weight: Array  # sum_j c_j, float[]


def _first_message(row: Node) -> Message:
    return Message(row.params, row.dictionary)


def pushcen(
    stays: Stays, *, k: int = 32, max_iter: int = 3, tolerance: Traced = 0.05, reference: str = "paper"
) -> PeerAlgorithm:
    """Mix decoded models and dictionaries by push-sum mass; send centroids, indices and what is not clustered.

    ``w <- (s_i w + sum sigma_j w_hat_j) / S`` and ``G <- (s_i G + sum sigma_j V_j) / S`` (of the messages alone while
    there is no G), with ``S = s_i + sum sigma_j``: the clock plans ``sigma_j / S``. After training
    ``(V, A) = WCP(w, K, init=G)`` is sent; the node keeps its own w in full precision.

    Args:
      k: K centroids a layer.
      max_iter, tolerance: of the clustering.
      reference: ``paper``, or ``released``: the dictionary is that of the first clustering until messages come, and
        ``G <- (s_i V_i + sum sigma_j V_j) / S`` with the table V_i of the node's latest message. If a node has messages
        before it has sent any, its model becomes a mean of them (planned by the exchange), and G is the table of a
        clustering of this mean. Another clustering; weights of shortcuts are sent as they are.

    Its clients are those of ``local.anchored_training``, which get G in the message's ``extra``. Records
    ``quantisation_error``, ``||w_hat - w||``. Source: PushCen-ADFL (2026), algorithms 1 to 3. Deviation: the
    regulariser, the mask and the dictionary cover only the clustered leaves, those with two axes or more.
    """
    check.whole("k", k, 1, 256)
    check.whole("max_iter", max_iter, 1)
    check.non_negative("tolerance", tolerance)
    check.one_of("reference", reference, REFERENCES)
    rules, released = Rules(max_iter, tolerance, reference), reference == "released"

    def chosen(path: Path, leaf: Array) -> bool:
        dense = released and any(part.startswith(SHORTCUTS) for part in path)
        return centroids.is_weight(path, leaf) and not dense and not stays(path)

    def init(params: Params) -> Node:
        leaves = centroids.parts_of(params, chosen)[1]
        found = bool(jax.tree.leaves(leaves))
        check.require(found, "model", "without leaves of two axes", "one with weights to cluster")
        nothing = Dictionary(jax.tree.map(lambda leaf: jnp.zeros(k, leaf.dtype), leaves), jnp.zeros((), jnp.bool_))
        return Node(params, nothing, nothing)

    def open_inbox(row: Node) -> Inbox:
        zeros = jax.tree.map(jnp.zeros_like, row.dictionary.tables)
        return Inbox(no_change(row.params, stays), zeros, jnp.zeros((), jnp.result_type(float)))

    def add(inbox: Inbox, row: Node, message: centroids.Clustered, weight: Array) -> Inbox:
        decoded = centroids.lookup(message)
        tables = jax.tree.map(lambda t, v: t + weight.astype(t.dtype) * v, inbox.tables, message.tables)
        change = change_towards(inbox.change, row.params, decoded, weight, stays)
        return Inbox(change, tables, inbox.weight + weight.astype(inbox.weight.dtype))

    def wake(row: Node, inbox: Inbox, event: Event) -> Node:
        base = row.own if released else row.dictionary
        heard, params = inbox.weight > 0, changed(row.params, inbox.change)

        def mixed(old: Array, base: Array, total: Array, known: Array) -> Array:
            weight = inbox.weight.astype(total.dtype)
            alone = total / jnp.where(heard, weight, 1)
            return jnp.where(heard, jnp.where(known, (1 - weight) * base + total, alone), old)

        tables = jax.tree.map(
            lambda old, own, total: mixed(old, own, total, base.known), row.dictionary.tables, base.tables, inbox.tables
        )
        if released:
            key = jax.random.fold_in(event.key, _FIRST)
            tables = tree.when(  # G is not known: from random entries
                heard & ~base.known, lambda _: clustered(params, row.dictionary, key, rules).tables, tables
            )
        return row._replace(params=params, dictionary=Dictionary(tables, row.dictionary.known | heard))

    def push(row: Node, upload: Params, event: Event) -> tuple[Node, centroids.Clustered, Mapping[str, Array]]:
        dictionary = row.dictionary
        if released:  # the clustering with which the client began, once more
            first = clustered(row.params, dictionary, event.key, rules).tables
            kept = jax.tree.map(lambda g, v: jnp.where(dictionary.known, g, v), dictionary.tables, first)
            dictionary = Dictionary(kept, jnp.ones((), jnp.bool_))
        params = jax.tree.map(jnp.add, row.params, upload)
        found = clustered(tree.split(params, stays)[0], dictionary, event.key, rules)
        gap = jax.tree.map(jnp.subtract, centroids.lookup(found), tree.split(params, stays)[0])
        row = Node(params, dictionary, Dictionary(found.tables, jnp.ones((), jnp.bool_)))
        return row, jax.tree.map(lambda leaf: leaf[None], found), {"quantisation_error": tree.norm(gap)}

    return PeerAlgorithm(init, open_inbox, add, wake, _first_message, push, lambda row: row.params, wire=_wire)


def _wire(message: centroids.Clustered) -> int:
    """Bytes of a message, eq. 13, with header and checksum; from its shapes."""
    return most_bits(jax.eval_shape(centroids.payloads, message)) // 8
