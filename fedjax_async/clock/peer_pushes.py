"""The pushes of compute events: to whom, when they arrive, and which are lost or corrupt.

Messages on one link, from a sender to a receiver, arrive in order of sending. A message that would arrive while its
receiver is offline is lost, with the mass that it carries. Faults (``drop``, ``corrupt``) hit each message
independently.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from fedjax_async.clock.peer_scenario import PeerScenario
from fedjax_async.clock.peer_timelines import Presence
from fedjax_async.clock.receivers import choose_receivers
from fedjax_async.clock.record import order_by_client
from fedjax_async.clock.segments import bounds_of


class Events(NamedTuple):
    """The compute events of a plan in their final order, of (mixed_at, client)."""

    client: np.ndarray  # int64[E]
    number: np.ndarray  # int64[E]
    turn: np.ndarray  # int64[E]  which of the graphs of a topology it pushes along
    start: np.ndarray  # float64[E]
    end: np.ndarray  # float64[E]
    mixed_at: np.ndarray  # float64[E]


class Pushes(NamedTuple):
    """Pushes in order of sending: of (end, event, fragment)."""

    event: np.ndarray  # int64[P]
    fragment: np.ndarray  # int32[P]
    receiver: np.ndarray  # int32[P]
    arrival: np.ndarray  # float64[P]  inf: lost
    corrupt: np.ndarray  # bool[P]
    degree: np.ndarray  # int64[E]  how many pushes each event has


def make_pushes(world: PeerScenario, events: Events, presence: Presence, fragments: int = 1) -> Pushes:
    """What each event pushes: every fragment to receivers of its own."""
    order = np.argsort(events.end, kind="stable")
    sender, turn, sent = events.client[order], events.turn[order], events.end[order]
    chosen = [
        choose_receivers(world.topology, world.scenario.seed, sender, turn, sent, presence, fragment)
        for fragment in range(fragments)
    ]
    counts = np.stack([one for one, _ in chosen], axis=1)
    degree_in_order = counts.sum(axis=1)
    if fragments == 1:
        receiver, fragment = chosen[0][1], np.zeros(len(chosen[0][1]), np.int32)
    else:
        rows = np.concatenate([np.repeat(np.arange(len(order)) * fragments + f, c) for f, (c, _) in enumerate(chosen)])
        together = order_by_client(rows)
        receiver = np.concatenate([one for _, one in chosen])[together]
        fragment = (rows[together] % fragments).astype(np.int32)
    event = np.repeat(order, degree_in_order)
    arrival = _arrivals(world, events, event, fragment, receiver, fragments)
    lost, corrupt = _faults(world, events, order, degree_in_order)
    if presence.starts is not None:
        lost |= ~presence.online(receiver, arrival)
    arrival[lost] = math.inf
    degree = np.empty(len(order), np.int64)
    degree[order] = degree_in_order
    return Pushes(event, fragment, receiver, arrival, corrupt, degree)


def _arrivals(
    world: PeerScenario,
    events: Events,
    event: np.ndarray,
    fragment: np.ndarray,
    receiver: np.ndarray,
    fragments: int,
) -> np.ndarray:
    sent = events.end[event]
    if world.network is None or world.network.between is None:
        return sent
    sender = events.client[event]
    numbers = events.number[event] * fragments + fragment
    seconds = np.asarray(world.network.between(sender, receiver, numbers, world.message_bytes), np.float64)
    if not (seconds.shape == sent.shape and np.isfinite(seconds).all() and (seconds >= 0).all()):
        raise ValueError("network: the time of every message must be a finite number >= 0")
    arrival = sent + seconds
    link = sender * world.scenario.num_clients + receiver
    order = np.argsort(link, kind="stable")
    same, times = link[order[1:]] == link[order[:-1]], arrival[order]
    while (overtakes := same & (times[1:] < times[:-1])).any():
        times[1:][overtakes] = times[:-1][overtakes]
    arrival[order] = times
    return arrival


def _faults(
    world: PeerScenario, events: Events, order: np.ndarray, degree: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Which pushes are lost and which corrupt; ``degree`` int64[E] in the ``order`` of sending."""
    count = int(degree.sum())
    lost, corrupt = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    if world.message_faults is None:
        return lost, corrupt
    bounds = bounds_of(degree)
    for position in range(int(degree.max(initial=0))):
        rows = np.flatnonzero(degree > position)
        hit = order[rows]
        faults = world.message_faults(position, events.client[hit], events.number[hit])
        lost[bounds[rows] + position] = faults.lost
        corrupt[bounds[rows] + position] = faults.corrupt
    return lost, corrupt
