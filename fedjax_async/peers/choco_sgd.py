"""CHOCO-SGD: gossip of compressed differences to public copies, with error feedback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async.base import check, tree
from fedjax_async.compress import Compressor, on_tree
from fedjax_async.compress.payload import Payload
from fedjax_async.peers.full_mixing import changed
from fedjax_async.peers.triggering import moved
from fedjax_async.types import Array, Event, Message, Params, PeerAlgorithm, Stays, Traced

_SENDING = 2**31  # folded into the job's key; the numbers of local steps, folded in too, are smaller


class Node(NamedTuple):
    """What a node keeps. Public copies begin at zero."""

    params: Params  # x_i
    copy: Params  # x_hat_i, its own public copy
    others: Params  # sum_j w_ij x_hat_j over its neighbours
    weight: Array  # sum_j w_ij over its neighbours, float[]: the largest of an inbox so far


class Inbox(NamedTuple):
    """What an inbox adds up to."""

    change: Params  # sum_j w_ij q_j
    weight: Array  # sum_j w_ij, float[]


class Difference(NamedTuple):
    """A message: what is sent of a node's change."""

    payload: Payload  # C(x_i - x_hat_i)
    counts: Array | tuple[()] = ()  # bool[], with a trigger; false: nothing is sent


def read(code: Compressor, message: Difference) -> Params:
    """q_i: 0 where nothing was sent, also for compressors that make something of zeros."""
    decoded: Params = code.decompress(message.payload)
    counts = message.counts
    return decoded if isinstance(counts, tuple) else jax.tree.map(lambda q: jnp.where(counts, q, 0), decoded)


def choco(stays: Stays, compressor: Compressor, *, gamma: Traced = 0.2, trigger: Traced | None = None) -> PeerAlgorithm:
    """``x_i <- x_i + gamma sum_j w_ij (x_hat_j - x_hat_i)``; sends ``q_i = C(x_i - x_hat_i)``.

    Every node that has q_i then updates its copy, ``x_hat_i <- x_hat_i + q_i``. What the compressor loses stays in
    ``x_i - x_hat_i`` and is sent later. Each message must reach all neighbours once, in order: the clock's exchange is
    synchronous, its graph stays the same, and so do its coefficients w_ij. If a message is lost, or does not come as
    its receiver or sender is away, the copies differ for the rest of the run, and a run warns; so it does of
    coefficients that change. A copy from which nothing comes stays as it is.

    Args:
      compressor: C.
      gamma: consensus step size, in (0, 1].
      trigger: SPARQ-SGD: a node sends only if ``||x_i - x_hat_i|| >= trigger``; else q_i = 0, of no bytes. ``None``:
        always.

    Source: Koloskova et al., "Decentralized stochastic optimization and gossip algorithms with compressed
    communication" (2019), algorithms 2 and 6; Singh, Data, George, Diggavi, "SPARQ-SGD: event-triggered and compressed
    communication in decentralized stochastic optimization" (2019), algorithm 1. Deviation from the latter: its
    ``c_t eta_t^2`` is ``trigger^2`` for all t, and it sends at equality too.
    """
    check.positive("gamma", gamma)
    check.in_range("gamma", gamma, 0, 1)
    if trigger is not None:
        check.non_negative("trigger", trigger)

    def compressed(params: Params) -> tuple[Compressor, Params]:
        sent = tree.split(params, stays)[0]
        return on_tree(compressor, sent), sent

    def init(params: Params) -> Node:
        zeros = jax.tree.map(jnp.zeros_like, compressed(params)[1])
        return Node(params, zeros, zeros, jnp.zeros((), jnp.result_type(float)))

    def add(inbox: Inbox, row: Node, message: Difference, weight: Array) -> Inbox:
        decoded = read(compressed(row.params)[0], message)
        change = jax.tree.map(lambda total, q: total + weight.astype(total.dtype) * q, inbox.change, decoded)
        return Inbox(change, inbox.weight + weight.astype(inbox.weight.dtype))

    def wake(row: Node, inbox: Inbox, event: Event) -> Node:
        del event
        others = jax.tree.map(jnp.add, row.others, inbox.change)
        weight = jnp.maximum(row.weight, inbox.weight)

        def pull(other: Array, own: Array) -> Array:
            return jnp.asarray(gamma, own.dtype) * (other - weight.astype(own.dtype) * own)

        mixed = changed(row.params, jax.tree.map(pull, others, row.copy))
        return row._replace(params=mixed, others=others, weight=weight)

    def push(row: Node, upload: Params, event: Event) -> tuple[Node, Difference, Mapping[str, Array]]:
        params = jax.tree.map(jnp.add, row.params, upload)
        code, sent = compressed(params)
        gap = jax.tree.map(jnp.subtract, sent, row.copy)
        message, record = Difference(code.compress(jax.random.fold_in(event.key, _SENDING), gap)), dict[str, Array]()
        if trigger is not None:
            sends, record = moved(gap, trigger)
            message = message._replace(counts=sends)
        decoded = read(code, message)
        left = tree.norm(jax.tree.map(jnp.subtract, gap, decoded))
        row = row._replace(params=params, copy=jax.tree.map(jnp.add, row.copy, decoded))
        return row, jax.tree.map(lambda leaf: leaf[None], message), {"residual_norm": left, **record}

    return PeerAlgorithm(
        init,
        lambda row: Inbox(jax.tree.map(jnp.zeros_like, row.others), jnp.zeros((), jnp.result_type(float))),
        add,
        wake,
        lambda row: Message(row.params),
        push,
        lambda row: row.params,
        cumulative=True,
    )
