"""Inboxes: which message is mixed by which event of its receiver, and what the buffers dropped.

A node's buffer collects messages until the node mixes them, all at once. It keeps the ``newest`` message of each
sender (of each fragment), or all. It has room for ``capacity`` messages. The policy says what happens to the others:

* ``discard``: a superseded message is gone; if the buffer is full, the oldest message is. Their mass is lost.
* ``carry``: the oldest message of a full buffer is set aside with its mass, and is mixed at the next aggregation with
  the others. The mass of a superseded message moves to the first newer message of the same sender that is not
  superseded itself: one in the buffer, or one set aside. If the sender's last message was set aside, the next one
  supersedes nothing.
* ``merge``: nothing is superseded or dropped, whatever the capacity: every message is mixed with its own mass.

A message is in time for an event if it arrives at or before the moment at which the event mixes, and was sent by an
earlier event.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from fedjax_async.clock.record import order_by_client
from fedjax_async.peers.pushes import Events, Pushes
from fedjax_async.peers.schedule import Delivery
from fedjax_async.peers.segments import bounds_of, search

BUFFER_POLICIES = ("discard", "carry", "merge")


class Inboxes(NamedTuple):
    """What is mixed: entries, and *contributions*, the pushes whose mass arrives with them, in order of events."""

    bounds: np.ndarray  # int64[E + 1]  of the entries
    push: np.ndarray  # int64[D]  the push of each entry
    contributed: np.ndarray  # int64[E + 1]  bounds of the contributions
    contribution: np.ndarray  # int64[C]  the push
    entry: np.ndarray  # int64[C]  the entry with which its mass arrives
    outcome: np.ndarray  # int8[P]
    mixed_by: np.ndarray  # int64[P]


def first_reader(
    num_clients: int,
    client: np.ndarray,
    mixed_at: np.ndarray,
    source: np.ndarray,
    receiver: np.ndarray,
    arrival: np.ndarray,
) -> np.ndarray:
    """For each push, the first event of its receiver that can mix it, int64[P]; E if there is none or the push is lost.

    ``client`` and ``mixed_at`` [E] belong to the events; ``source`` (the event that pushes), ``receiver`` and
    ``arrival`` [P] to the pushes.
    """
    by_client = order_by_client(client)
    bounds = bounds_of(np.bincount(client, minlength=num_clients))
    at = search(bounds, mixed_at[by_client], receiver, arrival, "left")
    by_client = np.append(by_client, len(client))
    # An event of the same moment that comes before the sender's cannot mix the push; the next one can.
    inside = at < bounds[receiver + 1]
    at[inside] += by_client[at[inside]] <= source[inside]
    inside = (at < bounds[receiver + 1]) & np.isfinite(arrival)
    return np.where(inside, by_client[at], len(client))


def fill_inboxes(
    num_clients: int,
    events: Events,
    pushes: Pushes,
    end: float,
    *,
    capacity: int | None = None,
    newest: bool = True,
    policy: str = "discard",
    fragments: int = 1,
) -> Inboxes:
    """Deliver the pushes of a run that ends at ``end``, with the buffers described above."""
    count = len(events.client)
    sending = (pushes.event, pushes.receiver, pushes.arrival)
    reader = first_reader(num_clients, events.client, events.mixed_at, *sending)
    outcome = np.where(np.isfinite(pushes.arrival), Delivery.IN_FLIGHT, Delivery.LOST).astype(np.int8)
    came = np.flatnonzero((reader < count) | (pushes.arrival <= end))
    # Messages in the buffers at the end are a group of their own for each receiver.
    group = np.where(reader[came] < count, reader[came], count + pushes.receiver[came])
    arrival = pushes.arrival[came]
    if (arrival[1:] < arrival[:-1]).any():
        order = np.argsort(arrival, kind="stable")
        came, group = came[order], group[order]
    order = order_by_client(group)
    came, group = came[order], group[order]
    sender = events.client[pushes.event[came]]
    successor, evicted = np.full(len(came), -1, np.int64), np.zeros(len(came), np.bool_)
    if policy != "merge" and newest:
        successor = _successors((group * num_clients + sender) * fragments + pushes.fragment[came])
    if policy != "merge" and capacity is not None:
        names = sender * fragments + pushes.fragment[came] if newest else np.arange(len(came))
        evicted = _evicted(group, names, capacity)
    superseded = (successor >= 0) & ~evicted
    kept = ~superseded if policy == "carry" else ~superseded & ~evicted
    outcome[came] = np.where(group < count, Delivery.MIXED, Delivery.WAITING)
    outcome[came[superseded]] = Delivery.SUPERSEDED
    outcome[came[evicted & ~kept]] = Delivery.OVERFLOWED
    into = np.arange(len(came))
    if policy == "carry":
        into[superseded] = successor[superseded]
        while (further := into[into] != into).any():
            into[further] = into[into[further]]
    return _assemble(came, group, kept, kept if policy != "carry" else kept | superseded, into, count, outcome)


def _assemble(
    came: np.ndarray,
    group: np.ndarray,
    kept: np.ndarray,
    contributes: np.ndarray,
    into: np.ndarray,
    count: int,
    outcome: np.ndarray,
) -> Inboxes:
    mixed = group < count
    entry = np.cumsum(kept) - 1  # groups of events come before those of the end
    kept, contributes = np.flatnonzero(kept & mixed), np.flatnonzero(contributes & mixed)
    mixed_by = np.full(len(outcome), -1, np.int64)
    mixed_by[came[kept]] = group[kept]
    return Inboxes(
        bounds_of(np.bincount(group[kept], minlength=count)),
        came[kept],
        bounds_of(np.bincount(group[contributes], minlength=count)),
        came[contributes],
        entry[into[contributes]],
        outcome,
        mixed_by,
    )


def _successors(keys: np.ndarray) -> np.ndarray:
    """The next position with the same key, -1 if there is none."""
    successor = np.full(len(keys), -1, np.int64)
    in_order = np.sort(keys)
    repeated = np.unique(in_order[1:][in_order[1:] == in_order[:-1]])
    if not len(repeated):
        return successor
    at = np.minimum(np.searchsorted(repeated, keys), len(repeated) - 1)
    where = np.flatnonzero(repeated[at] == keys)
    where = where[np.argsort(keys[where], kind="stable")]
    same = keys[where[1:]] == keys[where[:-1]]
    successor[where[:-1][same]] = where[1:][same]
    return successor


def _evicted(group: np.ndarray, names: np.ndarray, capacity: int) -> np.ndarray:
    """Which messages leave a full buffer, because ``capacity`` others with different names came after them.

    Messages are listed group by group, each in order of arrival; one with a name that is in the buffer takes its place.
    """
    evicted = np.zeros(len(group), np.bool_)
    begins = np.flatnonzero(np.diff(group, prepend=-1))
    sizes = np.diff(begins, append=len(group))
    full = sizes > capacity
    for begin, size in zip(begins[full].tolist(), sizes[full].tolist()):
        buffer: OrderedDict[int, int] = OrderedDict()
        gone = []
        for position, name in enumerate(names[begin : begin + size].tolist(), begin):
            buffer[name] = position
            buffer.move_to_end(name)
            if len(buffer) > capacity:
                gone.append(buffer.popitem(last=False)[1])
        evicted[gone] = True
    return evicted
