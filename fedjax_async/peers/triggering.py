"""Event-triggered sending: a node sends its model only when it has moved far enough since it last sent it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async.base import check, tree
from fedjax_async.types import Array, Event, Params, PeerAlgorithm, State, Stays, Traced

WITHHELD = "withheld"  # the column of ``PeerAlgorithm.push`` that says so


class Sender(NamedTuple):
    """What a node keeps."""

    row: State  # of the algorithm
    last: Params  # what it sent last, which its receivers have; at first the model with which all nodes begin


def moved(change: Params, trigger: Traced) -> tuple[Array, dict[str, Array]]:
    """Whether a node sends, bool[], and what it records; ``change``: of its model since it last sent it.

    It sends if ``||change|| >= trigger``, in the Euclidean norm over all leaves.
    """
    distance = tree.norm(change)
    sends = distance >= jnp.asarray(trigger, distance.dtype)
    return sends, {"moved": distance, WITHHELD: jnp.logical_not(sends)}


def when_moved(peer: PeerAlgorithm, stays: Stays, trigger: Traced) -> PeerAlgorithm:
    """``peer`` that withholds its model while ``||w - w_sent|| < trigger``; ``w_sent``: the model that it sent last.

    Receivers keep the last model of each sender: where the plan has them mix one that was withheld, they mix
    ``w_sent``. So they must have had all that was sent: the same receivers at every event, no lost messages, no late
    nodes, no masses. :func:`fedjax_async.config.peers.resolve_peers` checks the plan.

    Args:
      peer: an algorithm that sends the leaves of its model for which ``stays`` is false, in one fragment.
      trigger: the norm; 0 sends always.

    Source: the trigger of SPARQ-SGD (``choco_sgd.py``) for whole models.
    """
    check.non_negative("trigger", trigger)

    def sent_leaves(params: Params) -> Params:
        return tree.split(params, stays)[0]

    def push(held: Sender, upload: Params, event: Event) -> tuple[Sender, Params, Mapping[str, Array]]:
        row, _, columns = peer.push(held.row, upload, event)
        now = sent_leaves(peer.params(row))
        sends, record = moved(jax.tree.map(jnp.subtract, now, held.last), trigger)
        last = tree.where(sends, now, held.last)
        return Sender(row, last), jax.tree.map(lambda leaf: leaf[None], last), {**columns, **record}

    return peer._replace(
        init=lambda params: Sender(peer.init(params), sent_leaves(params)),
        open=lambda held: peer.open(held.row),
        add=lambda inbox, held, message, weight: peer.add(inbox, held.row, message, weight),
        wake=lambda held, inbox, event: held._replace(row=peer.wake(held.row, inbox, event)),
        start=lambda held: peer.start(held.row),
        push=push,
        params=lambda held: peer.params(held.row),
    )
