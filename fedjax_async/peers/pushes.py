"""The pushes of compute events: their receivers, when they arrive, and which are lost or corrupt.

Messages on one link, from a sender to a receiver, arrive in order of sending. A message that would arrive while its
receiver is offline is lost, with the mass that it carries; one that is under way when the run ends is in flight.
Faults (``drop``, ``corrupt``) hit each message independently.
"""

from __future__ import annotations

import math
from array import array
from typing import NamedTuple

import numpy as np

from fedjax_async.base import check
from fedjax_async.clock import chance
from fedjax_async.clock.record import order_by_client
from fedjax_async.peers.receivers import Online, choose_receivers
from fedjax_async.peers.schedule import PeerScenario
from fedjax_async.peers.segments import bounds_of


class Events(NamedTuple):
    """The compute events of a plan, in order of ``mixed_at``."""

    client: np.ndarray  # int64[E]
    number: np.ndarray  # int64[E]
    turn: np.ndarray  # int64[E]  modulo the number of graphs, the graph along which it pushes
    start: np.ndarray  # float64[E]
    end: np.ndarray  # float64[E]
    mixed_at: np.ndarray  # float64[E]


class Pushes(NamedTuple):
    """Pushes in order of sending: sorted by the end of their event, then by event."""

    event: np.ndarray  # int64[P]
    fragment: np.ndarray  # int32[P]
    receiver: np.ndarray  # int32[P]
    arrival: np.ndarray  # float64[P]  inf: lost
    corrupt: np.ndarray  # bool[P]
    degree: np.ndarray  # int64[E]  how many pushes each event has


def make_pushes(
    setup: PeerScenario, events: Events, online: Online, end: float, fragments: int = 1, drop_unsent: bool = False
) -> Pushes:
    """What each event pushes: every fragment to receivers of its own. The run ends at ``end``.

    ``drop_unsent``: messages that a shared uplink has not begun to send when their node's next event ends are never
    sent, and are no pushes.
    """
    order = np.argsort(events.end, kind="stable")
    sender, turn, sent = events.client[order], events.turn[order], events.end[order]
    chosen = [
        choose_receivers(setup.topology, setup.scenario.seed, sender, turn, sent, online, fragment)
        for fragment in range(fragments)
    ]
    degree = np.stack([one for one, _ in chosen], axis=1).sum(axis=1)
    event, receiver = np.repeat(order, degree), chosen[0][1]
    fragment = np.zeros(len(event), np.int32)
    if fragments > 1:
        receiver, fragment = _together(chosen)
        if setup.network is not None and setup.network.shared:
            counter = (events.client[event], turn.repeat(degree), fragment, receiver)
            keys = chance.Draws(setup.scenario.seed, "pairs", *counter).random()
            shuffled = np.lexsort((keys, np.repeat(np.arange(len(order)), degree)))
            receiver, fragment = receiver[shuffled], fragment[shuffled]
    deadline = _next_ends(events) if drop_unsent else np.full(len(order), math.inf)
    arrival = _arrivals(setup, events, (event, fragment, receiver), fragments, deadline)
    lost, corrupt = _faults(setup, events, order, degree)
    begun = np.isfinite(arrival)
    if online is not None:
        lost |= ~online(receiver, arrival) & (arrival <= end)
    arrival[lost] = math.inf
    columns = (event, fragment, receiver, arrival, corrupt)
    if not begun.all():
        columns = tuple(column[begun] for column in columns)
    return Pushes(*columns, np.bincount(columns[0], minlength=len(order)))


def _together(chosen: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The receivers of all fragments in order of events, and the fragments."""
    fragments = len(chosen)
    events = np.arange(len(chosen[0][0])) * fragments
    rows = np.concatenate([np.repeat(events + fragment, counts) for fragment, (counts, _) in enumerate(chosen)])
    together = order_by_client(rows)
    receiver = np.concatenate([receivers for _, receivers in chosen])[together]
    return receiver, (rows[together] % fragments).astype(np.int32)


def _next_ends(events: Events) -> np.ndarray:
    """When the next event of each event's node ends; infinite for the last ones."""
    order = order_by_client(events.client)
    same = events.client[order[1:]] == events.client[order[:-1]]
    ends = np.full(len(order), math.inf)
    ends[order[:-1][same]] = events.end[order[1:][same]]
    return ends


def _arrivals(
    setup: PeerScenario,
    events: Events,
    messages: tuple[np.ndarray, np.ndarray, np.ndarray],
    fragments: int,
    deadline: np.ndarray,
) -> np.ndarray:
    """When messages (event, fragment, receiver) arrive, if nothing happens to them on the way."""
    event, fragment, receiver = messages
    sent, network = events.end[event], setup.network
    if network is None or network.between is None:
        return sent
    sender = events.client[event]
    numbers = events.number[event] * fragments + fragment
    times = network.between(sender, receiver, numbers, setup.message_bytes)
    both = isinstance(times, tuple) and len(times) == 2
    check.require(both, "network's between", type(times).__name__, "two arrays, (seconds on the link, seconds beyond)")
    occupied, travelling = times
    for seconds in (occupied, travelling):
        if not (np.shape(seconds) == sent.shape and np.isfinite(seconds).all() and (np.asarray(seconds) >= 0).all()):
            raise ValueError("network: the times of every message must be finite numbers >= 0, one per message")
    if network.shared:
        sent = _one_after_another(setup.scenario.num_clients, sender, sent, occupied, deadline[event])
        arrival = sent + travelling
    else:
        arrival = sent + occupied + travelling
    link = sender * setup.scenario.num_clients + receiver
    order = np.argsort(link, kind="stable")
    order = order[np.isfinite(arrival[order])]
    same, times = link[order[1:]] == link[order[:-1]], arrival[order]
    while (overtakes := same & (times[1:] < times[:-1])).any():
        times[1:][overtakes] = times[:-1][overtakes]
    arrival[order] = times
    return arrival


def _one_after_another(
    num_clients: int, sender: np.ndarray, sent: np.ndarray, occupied: np.ndarray, deadline: np.ndarray
) -> np.ndarray:
    """When messages have left their senders' links, one at a time; infinity for those not begun by their deadline."""
    free = [0.0] * num_clients
    left = array("d")
    for node, ready, seconds, last in zip(sender.tolist(), sent.tolist(), occupied.tolist(), deadline.tolist()):
        begins = free[node] if free[node] > ready else ready
        if begins < last:
            free[node] = begins + seconds
            left.append(free[node])
        else:
            left.append(math.inf)
    return np.array(left)


def _faults(
    setup: PeerScenario, events: Events, order: np.ndarray, degree: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Which pushes are lost and which corrupt; ``degree`` int64[E] in the ``order`` of sending."""
    count = int(degree.sum())
    lost, corrupt = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    if setup.message_faults is None:
        return lost, corrupt
    bounds = bounds_of(degree)
    for position in range(int(degree.max(initial=0))):
        rows = np.flatnonzero(degree > position)
        hit = order[rows]
        faults = setup.message_faults(position, events.client[hit], events.number[hit])
        lost[bounds[rows] + position] = faults.lost
        corrupt[bounds[rows] + position] = faults.corrupt
    return lost, corrupt
