"""Means over a buffer that is never emptied: SWIFT as the code released with PushCen-ADFL has it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedjax_async.base import check
from fedjax_async.peers.exchange_parts import AGGREGATE_AT, Exchanged, events_and_pushes, rows_of, without_masses
from fedjax_async.peers.inboxes import Inboxes, first_reader
from fedjax_async.peers.pushes import Events, Pushes
from fedjax_async.peers.schedule import Delivery, PeerScenario, PeerSchedule
from fedjax_async.peers.segments import bounds_of


def kept_mean(
    *, capacity: int = 16, times: int = 2, aggregate_at: str = "end"
) -> Callable[[PeerScenario], PeerSchedule]:
    """The plain mean of the node and the last `capacity` messages, `times` in a row; messages stay in the buffer.

    Each event mixes all n messages in the buffer, those that it has mixed before too, also several of one sender:
    ``w <- (w + sum_j w_j) / (n + 1)``, `times` times, which leaves the node ``(n + 1)^-times`` of its own model and
    gives each message an equal part of the rest. A message leaves the buffer when `capacity` others have come after it.
    Simultaneous events come in the order in which they were scheduled.

    Source: ADFLab, the code released with PushCen-ADFL (2026), its SWIFT client.
    """
    check.whole("capacity", capacity)
    check.whole("times", times)
    check.one_of("aggregate_at", aggregate_at, AGGREGATE_AT)

    def plan(setup: PeerScenario) -> PeerSchedule:
        events, present, pushes, end = events_and_pushes(setup, aggregate_at, ties="scheduled")
        boxes = _buffers(setup.scenario.num_clients, events, pushes, end, capacity)
        count = np.maximum(1, np.diff(boxes.bounds))
        weight = (1 - (1.0 + count) ** -times) / count
        return without_masses(setup, Exchanged(events, present, pushes, boxes), weight[rows_of(boxes.bounds)])

    return plan


def _buffers(nodes: int, events: Events, pushes: Pushes, end: float, capacity: int) -> Inboxes:
    """The inboxes: the last ``capacity`` messages that have come to the node of each event, the oldest first."""
    count = len(events.client)
    reader = first_reader(nodes, events.client, events.mixed_at, pushes.event, pushes.receiver, pushes.arrival)
    outcome = np.where(np.isfinite(pushes.arrival), Delivery.IN_FLIGHT, Delivery.LOST).astype(np.int8)
    came = np.flatnonzero((reader < count) | (pushes.arrival <= end))
    came = came[np.lexsort((pushes.arrival[came], reader[came], pushes.receiver[came]))]
    lists = bounds_of(np.bincount(pushes.receiver[came], minlength=nodes))  # of each node: its messages, in order
    keys = pushes.receiver[came] * np.int64(count + 1) + reader[came]
    stop = np.searchsorted(keys, events.client * np.int64(count + 1) + np.arange(count), side="right")
    begin = np.maximum(lists[events.client], stop - capacity)
    bounds = bounds_of(stop - begin)
    push = came[np.arange(bounds[-1]) + np.repeat(begin - bounds[:-1], stop - begin)]
    dropped = np.arange(len(came)) < np.repeat(lists[1:] - capacity, np.diff(lists))
    outcome[came] = np.where(dropped, Delivery.OVERFLOWED, Delivery.WAITING)
    outcome[push] = Delivery.MIXED
    mixed_by = np.full(len(pushes.event), -1, np.int64)
    mixed_by[push[::-1]] = rows_of(bounds)[::-1]  # the first event that mixed it is written last
    empty, nothing = np.zeros(0, np.int64), np.zeros(count + 1, np.int64)
    return Inboxes(bounds, push, nothing, empty, empty, outcome, mixed_by)
