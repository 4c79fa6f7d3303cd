"""Waves and slots of a decentralised run: how its plan is batched for the device, and where the messages live there.

An event can train once its node's previous event and the events whose messages it mixes are done. Its *level* is one
more than the deepest of these, so that there are as few levels as the longest chain of events: the fewest batches
that any exact method needs. Evaluations need all nodes at once, so levels are counted from each evaluation anew.

A message, of one event and one fragment, is written once and shared by all its readers. It occupies a *slot* from its
event to its last reader; slots are allocated ahead of time like registers.
"""

from __future__ import annotations

from array import array

import numpy as np

from fedjax_async import check
from fedjax_async.clock.peer_schedule import PeerSchedule
from fedjax_async.clock.record import SLACK, order_by_client
from fedjax_async.clock.waves import colour

_CHUNK = 1 << 16  # events whose columns are lists at one time


def previous_events(client: np.ndarray) -> np.ndarray:
    """The event before each event of the same node, -1 for the first; int64[E]."""
    order = order_by_client(client)
    same = client[order[1:]] == client[order[:-1]]
    previous = np.full(len(client), -1, np.int64)
    previous[order[1:][same]] = order[:-1][same]
    return previous


def stretches(schedule: PeerSchedule, cuts: np.ndarray) -> np.ndarray:
    """The first of the ascending moments ``cuts`` at or after the end of each event; V, their number, if none is."""
    return np.searchsorted(np.asarray(cuts, np.float64) * SLACK, schedule.end, side="left")


def peer_waves(schedule: PeerSchedule, cuts: np.ndarray | None = None) -> np.ndarray:
    """The wave in which each event trains, int64[E]: waves are numbered in order of execution, and are never empty.

    ``cuts``: virtual times of evaluations, ascending, float64[V]: an event trains before the first evaluation at or
    after its end, and no wave holds events from both sides of an evaluation. Events after the last cut train in the
    last waves.

    Events of one wave need nothing from each other. Between two evaluations there are as few waves as the longest
    chain of events, each in need of the one before.
    """
    check.kind("schedule", schedule, PeerSchedule, "a PeerSchedule; that of a run is run.schedule")
    stretch = stretches(schedule, np.zeros(0) if cuts is None else cuts)
    previous, bounds = previous_events(schedule.client), schedule.inbox_bounds
    level = array("q")  # counted from the beginning of the event's stretch
    reached = stretch.tolist() if cuts is not None else None
    for begin in range(0, len(stretch), _CHUNK):
        stop = min(begin + _CHUNK, len(stretch))
        sources = schedule.source[bounds[begin] : bounds[stop]].tolist()
        ends = (bounds[begin + 1 : stop + 1] - bounds[begin]).tolist()
        low = 0
        for event, (before, high) in enumerate(zip(previous[begin:stop].tolist(), ends), begin):
            needed = sources[low:high]
            if before >= 0:
                needed.append(before)
            if reached is not None:
                here = reached[event]
                needed = [source for source in needed if reached[source] == here]
            level.append(1 + max(map(level.__getitem__, needed)) if needed else 0)
            low = high
    levels = np.array(level, np.int64)
    depth = np.zeros(int(stretch.max(initial=0)) + 1, np.int64)
    np.maximum.at(depth, stretch, levels + 1)
    return levels + (np.cumsum(depth) - depth)[stretch]


def peer_slots(schedule: PeerSchedule, written: np.ndarray, read: np.ndarray) -> tuple[int, np.ndarray]:
    """How many slots the messages need, and the slot of each, int32[E, F]; -1 for messages that nobody mixes.

    ``written[e]``: how many events have been written when the messages of event e are; ``read[e]``: how many have been
    when e reads its inbox; int64[E] both. A slot is free for messages written later than its last reading. The
    number is the smallest possible (greedy, optimal for intervals).
    """
    fragments = schedule.fragments
    message = schedule.source * fragments + schedule.fragment
    last_read = np.full(len(schedule.client) * fragments, -1, np.int64)
    np.maximum.at(last_read, message, np.repeat(read, np.diff(schedule.inbox_bounds)))
    used = np.flatnonzero(last_read >= 0)
    used = used[np.argsort(written[used // fragments], kind="stable")]
    chosen, count = colour(written[used // fragments], last_read[used])
    slot = np.full(len(last_read), -1, np.int32)
    slot[used] = chosen
    return count, slot.reshape(-1, fragments)
