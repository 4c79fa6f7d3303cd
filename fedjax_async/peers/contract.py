"""The contract of a decentralised algorithm, seen from one node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedjax_async.types import Array, Key, Message, Params, State


class Event(NamedTuple):
    """What a node knows of its compute event when it mixes and when it sends."""

    key: Key  # of the job, the same as the client's ``begin`` gets
    mass: Any  # float[], its push-sum mass after mixing, before it is split; 1 in an algorithm without masses


class PeerAlgorithm(NamedTuple):
    """What ONE node does at a compute event: mix its inbox, train, push. Only the engine stacks nodes.

    A *row* is all that a node keeps between events, beside the state of its local training. A compute event is

    1. ``inbox = open(row)``; then ``inbox = add(inbox, row, message, weight)`` for each message of the inbox; then
       ``row = wake(row, inbox, event)``. The weights are planned by the clock (``PeerSchedule.weight``): the row's
       model becomes ``w + sum_d weight_d (message_d - w)``. A message that is not finite is not added: the node's own
       model stands in its place.
    2. Local training by a ``ClientAlgorithm``, which begins from the message ``start(row)``.
    3. ``row, messages, columns = push(row, upload, event)``: the row after training, and what the node sends, a pytree
       of leaves [F, ...], one entry a fragment. ``upload`` is what the client algorithm uploads, zeros if it is not
       finite. ``columns``: scalars to record about the event, by name.

    ``init(params) -> row``: at the beginning of the run, also for a node that joins late.
    ``params(row) -> params``: the node's model, which is evaluated.
    ``wire(message) -> bytes`` of one message on the network, from its shapes; ``None``: the bytes of its arrays.
    """

    init: Callable[[Params], State]
    open: Callable[[State], State]
    add: Callable[[State, State, Any, Array], State]
    wake: Callable[[State, State, Event], State]
    start: Callable[[State], Message]
    push: Callable[[State, Any, Event], tuple[State, Any, Mapping[str, Array]]]
    params: Callable[[State], Params]
    fragments: int = 1  # F
    wire: Callable[[Any], int] | None = None
