"""Waves and slots of a decentralised run: how its plan is batched for the device, and where the messages live there.

An event can train once its node's previous event and the events whose messages it mixes are done. Its *level* is one
more than the highest level of these. So there are as many levels as events in the longest chain: the fewest batches
that any exact method needs. Evaluations need all nodes at once, so levels are counted from each evaluation anew.
Where memory is short, contiguous runs of the events in order (``peer_runs``) keep fewer messages alive, in more waves.

A message, of one event and one fragment, is written once and shared by all its readers. It occupies a *slot* from its
event to its last reader; slots are allocated ahead of time like registers.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

from fedjax_async.base import check
from fedjax_async.clock.record import SLACK, order_by_client
from fedjax_async.clock.waves import colour
from fedjax_async.peers.schedule import PeerSchedule

_CHUNK = 1 << 16  # events converted to lists at a time


def previous_events(client: np.ndarray) -> np.ndarray:
    """The event before each event of the same node, -1 for the first; int64[E]."""
    order = order_by_client(client)
    same = client[order[1:]] == client[order[:-1]]
    previous = np.full(len(client), -1, np.int64)
    previous[order[1:][same]] = order[:-1][same]
    return previous


def peer_waves(schedule: PeerSchedule, cuts: np.ndarray | None = None) -> np.ndarray:
    """The wave in which each event trains, int64[E]: waves are numbered in order of execution, and are never empty.

    ``cuts``: virtual times of evaluations, ascending, float64[V]: an event trains before the first evaluation at or
    after its end, and no wave holds events from both sides of an evaluation. Events after the last cut train in the
    last waves.

    Events of one wave need nothing from each other. Between two evaluations there are as few waves as events in the
    longest chain in which each event needs the one before.
    """
    cut, needs = first_cuts(schedule, cuts), _Needs(schedule)
    reached = cut.tolist()
    level = array("q")  # counted anew after each cut
    for event, needed in enumerate(needs):
        here = reached[event]
        level.append(1 + max((level[source] for source in needed if reached[source] == here), default=-1))
    levels = np.array(level, np.int64)
    depth = np.zeros(int(cut.max(initial=0)) + 1, np.int64)
    np.maximum.at(depth, cut, levels + 1)
    return levels + (np.cumsum(depth) - depth)[cut]


def peer_runs(schedule: PeerSchedule, cuts: np.ndarray | None = None, max_width: int | None = None) -> np.ndarray:
    """Waves as by ``peer_waves``, but contiguous runs of the events in order, each as long as possible.

    There are more of them than levels, and fewer messages are alive at a time. ``max_width``: the most events of a run.
    """
    check.optional(check.whole, "max_width", max_width)
    cut, needs = first_cuts(schedule, cuts), _Needs(schedule)
    order = np.lexsort((np.arange(len(cut)), cut))
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    ranks = rank.tolist()
    deepest = np.array([max((ranks[source] for source in needed), default=-1) for needed in needs], np.int64)
    begins = np.diff(cut[order], prepend=-1) != 0
    widest = len(order) + 1 if max_width is None else int(max_width)
    run, begin, wave = array("q"), 0, -1
    for position, (needed, is_first) in enumerate(zip(deepest[order].tolist(), begins.tolist())):
        if is_first or needed >= begin or position == begin + widest:
            begin, wave = position, wave + 1
        run.append(wave)
    return np.array(run, np.int64)[rank]


class _Needs:
    """The events that each event needs: its node's previous one, and those whose messages it mixes."""

    def __init__(self, schedule: PeerSchedule):
        self._schedule, self._previous = schedule, previous_events(schedule.client)

    def __iter__(self) -> Iterator[list[int]]:
        bounds = self._schedule.inbox_bounds
        for begin in range(0, len(self._previous), _CHUNK):
            stop = min(begin + _CHUNK, len(self._previous))
            sources = self._schedule.source[bounds[begin] : bounds[stop]].tolist()
            ends = (bounds[begin + 1 : stop + 1] - bounds[begin]).tolist()
            low = 0
            for before, high in zip(self._previous[begin:stop].tolist(), ends):
                needed = sources[low:high]
                if before >= 0:
                    needed.append(before)
                yield needed
                low = high


def first_cuts(schedule: PeerSchedule, cuts: np.ndarray | None) -> np.ndarray:
    """The index of the first of the V ``cuts`` at or after the end of each event; V if none is; int64[E]."""
    check.kind("schedule", schedule, PeerSchedule, "a PeerSchedule; that of a run is run.schedule")
    moments = np.zeros(0) if cuts is None else np.asarray(cuts, np.float64)
    check.require(bool((moments[1:] >= moments[:-1]).all()), "cuts", cuts, "ascending")
    return np.searchsorted(moments * SLACK, schedule.end, side="left")


def peer_slots(schedule: PeerSchedule, written: np.ndarray, read: np.ndarray) -> tuple[int, np.ndarray]:
    """How many slots the messages need, and the slot of each, int32[E, F]; -1 for messages that nobody mixes.

    ``written[e]``: how many events have been written once the messages of event e are; ``read[e]``: how many when event
    e reads its inbox; int64[E] both. A slot is free for messages written later than its last reading. The
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
