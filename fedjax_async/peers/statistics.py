"""Statistics of the plan of a decentralised run: batches, ages of mixed messages, masses, connection by pushes."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from fedjax_async.base import check
from fedjax_async.clock.record import SLACK, at_or_before, order_by_client
from fedjax_async.peers.inboxes import first_reader
from fedjax_async.peers.schedule import Delivery, PeerSchedule, first_masses
from fedjax_async.peers.segments import bounds_of, search
from fedjax_async.peers.waves import peer_slots, peer_waves, previous_events


class PeerStatistics(NamedTuple):
    """How a plan batches, and how it mixes. Seconds are virtual; NaN where nothing is mixed."""

    events: int
    pushes: int
    mixed: int  # pushes that are mixed at least once
    waves: int  # the longest chain of events, if there are no evaluations on the way
    mean_width: float
    max_width: int
    slots: int  # messages alive at a time, at most
    mean_inbox: float  # messages per event
    mean_age: float  # seconds from the sending of a message to its mixing, weighted by its coefficient
    largest_age: float
    mean_behind: float  # events that the sender has completed since, weighted likewise
    smallest_mass: float  # of a node after an event
    largest_mass: float
    mass_lost: float  # at the end; NaN without masses
    window: float  # see ``connecting_window``


class Masses(NamedTuple):
    """Push-sum masses at V given times, float64[V] each; together what nodes begin with, N unless late ones have 0."""

    nodes: np.ndarray  # of the nodes; those that join later count with their first mass from the beginning
    on_the_way: np.ndarray
    buffered: np.ndarray
    lost: np.ndarray


def peer_statistics(schedule: PeerSchedule, waves: np.ndarray | None = None) -> PeerStatistics:
    """Statistics of a plan whose events train in ``waves`` (by default ``peer_waves`` without evaluations)."""
    check.kind("schedule", schedule, PeerSchedule, "a PeerSchedule; that of a run is run.schedule")
    waves = peer_waves(schedule) if waves is None else waves
    widths = np.bincount(waves)
    widths = widths[widths > 0]
    age, behind = ages(schedule)
    total = float(schedule.weight.sum())
    last = float(schedule.end.max(initial=0.0))
    return PeerStatistics(
        events=len(schedule.client),
        pushes=len(schedule.receiver),
        mixed=int((schedule.outcome == Delivery.MIXED).sum()),
        waves=len(widths),
        mean_width=len(schedule.client) / max(1, len(widths)),
        max_width=int(widths.max(initial=0)),
        slots=live_slots(schedule, waves),
        mean_inbox=len(schedule.source) / max(1, len(schedule.client)),
        mean_age=float(age @ schedule.weight) / total if total else math.nan,
        largest_age=float(age.max()) if len(age) else math.nan,
        mean_behind=float(behind @ schedule.weight) / total if total else math.nan,
        smallest_mass=float(schedule.mass.min(initial=1.0)),
        largest_mass=float(schedule.mass.max(initial=1.0)),
        mass_lost=float(masses(schedule, np.array([last])).lost[0]),
        window=connecting_window(schedule),
    )


def _moments(schedule: PeerSchedule, times: np.ndarray) -> np.ndarray:
    """``times`` as float64[V], after both are checked."""
    check.kind("schedule", schedule, PeerSchedule, "a PeerSchedule; that of a run is run.schedule")
    found = np.asarray(times)
    numbers = found.ndim == 1 and (found.dtype.kind in "iuf" or not found.size)
    allowed = "one axis of virtual times, numbers >= 0"
    check.require(numbers and bool((found >= 0).all()), "times", times, allowed)
    return found.astype(np.float64)


def readers(schedule: PeerSchedule) -> np.ndarray:
    """The event that mixes each inbox entry, int64[D]."""
    return np.repeat(np.arange(len(schedule.client)), np.diff(schedule.inbox_bounds))


def corrupt_entries(schedule: PeerSchedule) -> np.ndarray:
    """Which inbox entries arrive as NaN: those whose push to the reading node is corrupt; bool[D]."""
    if not schedule.corrupt.any():
        return np.zeros(len(schedule.source), np.bool_)
    shape = (len(schedule.client), schedule.fragments, schedule.num_clients)
    pushed = np.ravel_multi_index((schedule.push_event, schedule.push_fragment, schedule.receiver), shape)
    read = np.ravel_multi_index((schedule.source, schedule.fragment, schedule.client[readers(schedule)]), shape)
    return np.isin(read, pushed[schedule.corrupt])


def not_mixed_once(schedule: PeerSchedule) -> int:
    """How many messages are not mixed exactly once by each receiver: lost, corrupt, too late to count, or repeated.

    Also those that are not sent because the receiver is away, if the sender has more receivers at another event.
    Messages after which their receiver has no event any more do not count.
    """
    shape = (len(schedule.client), schedule.fragments, schedule.num_clients)
    pushed = np.ravel_multi_index((schedule.push_event, schedule.push_fragment, schedule.receiver), shape)
    counts = schedule.weight > 0
    entries = (schedule.source, schedule.fragment, schedule.client[readers(schedule)])
    read = np.ravel_multi_index(tuple(column[counts] for column in entries), shape)
    order = np.argsort(pushed)
    times = np.bincount(order[np.searchsorted(pushed[order], read)], minlength=len(pushed))
    pending = (_mixing(schedule)[0] == shape[0]) & np.isfinite(schedule.arrival)
    degree, most = np.bincount(schedule.push_event, minlength=shape[0]), np.zeros(schedule.num_clients, np.int64)
    np.maximum.at(most, schedule.client, degree)
    wrong = ((times != 1) & ~pending) | schedule.corrupt
    return int(np.sum(wrong)) + int(np.sum(most[schedule.client] - degree))


def other_coefficients(schedule: PeerSchedule) -> int:
    """How many messages are mixed with another coefficient than the first one of their sender at their receiver."""
    counts = schedule.weight > 0
    sender, receiver = schedule.client[schedule.source], schedule.client[readers(schedule)]
    link = (sender.astype(np.int64) * schedule.num_clients + receiver)[counts]
    _, first, which = np.unique(link, return_index=True, return_inverse=True)
    weight = schedule.weight[counts]
    return int(np.sum(~np.isclose(weight, weight[first][which], rtol=1e-9, atol=0)))


def ages(schedule: PeerSchedule) -> tuple[np.ndarray, np.ndarray]:
    """The staleness of inbox entries: seconds since the sending, float64[D], and the sender's events since, int64[D].

    The sender's events count that come after the sending one and are completed when the message is mixed.
    """
    mixed_at = schedule.mixed_at[readers(schedule)]
    order = order_by_client(schedule.client)
    bounds = bounds_of(np.bincount(schedule.client, minlength=schedule.num_clients))
    sender = schedule.client[schedule.source]
    completed = search(bounds, schedule.end[order], sender, mixed_at, "right") - bounds[sender]
    return mixed_at - schedule.end[schedule.source], completed - schedule.number[schedule.source] - 1


def live_slots(schedule: PeerSchedule, waves: np.ndarray) -> int:
    """How many message slots a run needs if it writes the messages of a wave when the wave is trained."""
    _, wave, widths = np.unique(waves, return_inverse=True, return_counts=True)
    done = np.cumsum(widths)
    return peer_slots(schedule, written=done[wave], read=(done - widths)[wave])[0]


def masses(schedule: PeerSchedule, times: np.ndarray) -> Masses:
    """Where the push-sum mass is at ``times``: in nodes, on the way, in buffers, or lost; NaN without masses.

    From its mixing to its pushing, a node holds the mass of its inbox as well. The mass of a lost message counts as
    lost from its sending; that of a message dropped by the buffer, from the receiver's next mixing, or from its arrival
    if there is none. A node that divides its mass into more parts than it sends loses the rest when it pushes
    (``reference=released``).
    """
    times, events = _moments(schedule, times), len(schedule.client)
    if not schedule.sent_mass.any():
        return Masses(*np.full((4, len(times)), math.nan))
    mass, pushed = schedule.sent_mass, schedule.end[schedule.push_event]
    lost = schedule.outcome == Delivery.LOST
    first = first_masses(schedule.joined, schedule.late_mass)
    reader, dropped, held, gained = _mixing(schedule)
    given = held + gained - schedule.mass  # by each event at its end, sent or not
    unsent = given - np.bincount(schedule.push_event, mass, events)
    leaves = np.append(schedule.mixed_at, 0.0)[reader]
    leaves = np.where(reader < events, leaves, schedule.arrival)

    def by(moments: np.ndarray, amounts: np.ndarray) -> np.ndarray:
        order = np.argsort(moments, kind="stable")
        return np.append(0.0, np.cumsum(amounts[order]))[at_or_before(moments[order], times)]

    received = by(schedule.arrival[~lost], mass[~lost])
    mixed, gone = by(schedule.mixed_at, gained), by(leaves[dropped], mass[dropped])
    wasted, astray = by(schedule.end, unsent), by(pushed[lost], mass[lost])
    return Masses(
        first.sum() + mixed - by(schedule.end, given),
        by(pushed, mass) - astray - received,
        received - mixed - gone,
        astray + gone + wasted,
    )


def _mixing(schedule: PeerSchedule) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The event that can mix each push first, int64[P], and whether the buffer drops its mass before, bool[P].

    And the mass that each event's node has before, and what it gains when it mixes, float64[E] both.
    """
    events, before = len(schedule.client), previous_events(schedule.client)
    sending = (schedule.push_event, schedule.receiver, schedule.arrival)
    reader = first_reader(schedule.num_clients, schedule.client, schedule.mixed_at, *sending)
    dropped = schedule.outcome == Delivery.OVERFLOWED
    if not schedule.carries:
        dropped |= schedule.outcome == Delivery.SUPERSEDED
    taken = (reader < events) & ~dropped
    gained = np.bincount(reader[taken], schedule.sent_mass[taken], events)
    first = first_masses(schedule.joined, schedule.late_mass)
    return reader, dropped, np.where(before >= 0, schedule.mass[before], first[schedule.client]), gained


def mass_after_mixing(schedule: PeerSchedule) -> np.ndarray:
    """The push-sum mass of each event's node after mixing, before it splits it; float64[E], 1 without masses.

    It is what the node keeps and sends, and what it divides among receivers that are not online
    (``reference=released``), to whom it sends nothing.
    """
    sent = np.bincount(schedule.push_event, schedule.sent_mass, minlength=len(schedule.client))
    whole: np.ndarray = schedule.mass + sent + schedule.unsent_mass
    return whole


def degrees(schedule: PeerSchedule, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many messages an event mixes and sends, on average over the events of each interval; float64[V] both.

    Interval v holds the events that mix (or end) after ``times[v - 1]``, at ``times[v]`` at the latest; NaN if none.
    """
    times = _moments(schedule, times)
    out = np.bincount(schedule.push_event, minlength=len(schedule.client))
    means = []
    for moments, counts in ((schedule.mixed_at, np.diff(schedule.inbox_bounds)), (schedule.end, out)):
        which = np.searchsorted(times * SLACK, moments, side="left")
        totals, number = (np.bincount(which, w, len(times) + 1)[: len(times)] for w in (counts, np.ones(len(counts))))
        with np.errstate(invalid="ignore"):
            means.append(totals / number)
    return means[0], means[1]


def connecting_window(schedule: PeerSchedule) -> float:
    """The seconds within which the delivered pushes connect all nodes strongly; infinity if they never do.

    Corrupt ones do not count, because their receivers mix nothing of them.

    The run is cut into consecutive windows, each just long enough that the messages that arrive in it connect the
    nodes that have joined and not left when it begins. The result is the length of the longest; what is left at the
    end of the run is no window. An interval twice as long contains a whole window; some interval just shorter than the
    result does not connect.
    """
    from scipy.sparse import coo_array  # noqa: PLC0415 - half a second, and needed only here
    from scipy.sparse.csgraph import connected_components  # noqa: PLC0415

    came = ~np.isin(schedule.outcome, (Delivery.LOST, Delivery.IN_FLIGHT)) & ~schedule.corrupt
    came = np.flatnonzero(came)
    came = came[np.argsort(schedule.arrival[came], kind="stable")]
    sender, receiver = schedule.client[schedule.push_event[came]], schedule.receiver[came]
    arrival, nodes = schedule.arrival[came], schedule.num_clients

    def connects(first: int, last: int, member: np.ndarray) -> bool:
        edges = (np.ones(last - first, np.bool_), (sender[first:last], receiver[first:last]))
        label = connected_components(coo_array(edges, (nodes, nodes)), connection="strong")[1]
        return bool((label[member] == label[member][0]).all())

    begin, first, longest = 0.0, 0, 0.0
    while True:
        member = np.flatnonzero((schedule.joined <= begin) & (begin < schedule.left))
        if len(member) < 2:
            later = schedule.joined[schedule.joined > begin]
            if not len(later) or later.min() > schedule.end.max():
                return longest or math.inf
            begin = float(later.min())
            first = int(np.searchsorted(arrival, begin, side="right"))
            continue
        step, low = len(member), first  # pushes up to ``low`` do not connect
        while first + step < len(came) and not connects(first, first + step, member):
            low, step = first + step, 2 * step
        high = min(first + step, len(came))
        if not connects(first, high, member):
            return longest or math.inf
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if connects(first, middle, member) else (middle, high)
        # All messages of one moment belong to one window.
        first = int(np.searchsorted(arrival, arrival[high - 1], side="right"))
        longest, begin = max(longest, float(arrival[high - 1]) - begin), float(arrival[high - 1])
