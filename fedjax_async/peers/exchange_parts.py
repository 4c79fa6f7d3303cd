"""Parts that exchanges share: events, pushes and inboxes of nodes that never wait, masses, and the schedule."""

from __future__ import annotations

from array import array
from functools import partial
from typing import NamedTuple

import numpy as np

from fedjax_async.base import check
from fedjax_async.clock.budget import budget_text, host_memory
from fedjax_async.peers.inboxes import BUFFER_POLICIES, Inboxes, fill_inboxes
from fedjax_async.peers.pushes import Events, Pushes, make_pushes
from fedjax_async.peers.schedule import PeerScenario, PeerSchedule, first_masses
from fedjax_async.peers.timelines import Computes, Presence, compute_events, end_of_run, order_of, presence
from fedjax_async.peers.topologies import Topology

AGGREGATE_AT = ("start", "end")
_BYTES_PER_PUSH = 320  # in planning, at the peak
_CHUNK = 1 << 16  # events converted to lists at a time


class Exchanged(NamedTuple):
    """A plan without its mixing coefficients."""

    events: Events
    present: Presence
    pushes: Pushes
    boxes: Inboxes
    fragments: int = 1


def check_buffer(capacity: int | None, newest: bool, policy: str, aggregate_at: str) -> None:
    """Raise ``ValueError`` for invalid options of a buffer."""
    check.optional(check.whole, "capacity", capacity)
    check.kind("newest", newest, bool, "true or false")
    check.one_of("policy", policy, BUFFER_POLICIES)
    check.one_of("aggregate_at", aggregate_at, AGGREGATE_AT)


def in_order(computes: Computes, aggregate_at: str, ties: str = "client") -> Events:
    """The events in order of ``mixed_at``, simultaneous ones as ``order_of`` says."""
    order = order_of(computes, aggregate_at, ties)
    client, number, start, end = (column[order] for column in computes[:4])
    return Events(client, number, number, start, end, start if aggregate_at == "start" else end)


def events_and_pushes(
    setup: PeerScenario, aggregate_at: str, fragments: int = 1, drop_unsent: bool = False, ties: str = "client"
) -> tuple[Events, Presence, Pushes, float]:
    """Events, presence and pushes of nodes that train whenever they are online; and the moment when the run ends."""
    computes = compute_events(setup.scenario, ties)
    events = in_order(computes, aggregate_at, ties)
    _check_fits(setup, events, fragments)
    end = end_of_run(setup.scenario, events.end)
    present = presence(setup.scenario, end)._replace(exhausted=computes.exhausted)
    return events, present, make_pushes(setup, events, present.online, end, fragments, drop_unsent), end


def exchange(
    setup: PeerScenario,
    aggregate_at: str,
    *,
    capacity: int | None = None,
    newest: bool = True,
    policy: str = "discard",
    fragments: int = 1,
    drop_unsent: bool = False,
    ties: str = "client",
) -> Exchanged:
    """As ``events_and_pushes``, with the inboxes of nodes that empty their buffers whenever they mix."""
    events, present, pushes, end = events_and_pushes(setup, aggregate_at, fragments, drop_unsent, ties)
    fill = partial(fill_inboxes, capacity=capacity, newest=newest, policy=policy, fragments=fragments)
    boxes = fill(setup.scenario.num_clients, events, pushes, end)
    return Exchanged(events, present, pushes, boxes, fragments)


def wanted(topology: Topology, events: Events) -> np.ndarray:
    """How many receivers the pushes of each event would have if all nodes were online; int64[E]."""
    if not topology.graphs and topology.drawn is None:
        return np.full(len(events.client), topology.random)
    graph, first = topology.along(events.turn)
    return graph.degrees[first + events.client]


def _check_fits(setup: PeerScenario, events: Events, fragments: int) -> None:
    """Raise ``ValueError`` if the pushes of these events do not fit the machine's memory."""
    pushes = float(wanted(setup.topology, events).sum()) * fragments
    most = host_memory() // _BYTES_PER_PUSH
    if pushes > most:
        raise ValueError(
            f"{budget_text(setup.scenario.until)}: must end within {most:.2g} messages, which fill this machine's "
            f"memory, and not {pushes:.2g}; shorten the budget, or choose a topology with fewer receivers"
        )


def rows_of(bounds: np.ndarray) -> np.ndarray:
    """The row of each value, for rows with these bounds (``segments.py``); int64."""
    return np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))


def push_sum_masses(
    first: np.ndarray, client: np.ndarray, parts: np.ndarray, bounds: np.ndarray, source: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The mass S with which each event mixes, and the share of it for each receiver and the node; float64[E] both.

    Node i begins with mass ``first[i]``, usually 1. An event adds the masses of its inbox to the node's own,
    ``S = s + sum_j sigma_j``, mixes each message with the coefficient ``sigma_j / S``, and splits S into equal parts
    for its receivers and itself. Event e splits its mass into ``parts[e]`` and gets that of the events
    ``source[bounds[e]:bounds[e + 1]]``, which come before it.

    Source: Kempe, Dobra and Gehrke, "Gossip-based computation of aggregate information" (2003); Assran et al.,
    "Stochastic gradient push for distributed deep learning" (2019).
    """
    masses = first.tolist()
    total, share = array("d"), array("d")
    for begin in range(0, len(client), _CHUNK):
        stop = min(begin + _CHUNK, len(client))
        sources = source[bounds[begin] : bounds[stop]].tolist()
        ends = (bounds[begin + 1 : stop + 1] - bounds[begin]).tolist()
        low = 0
        for node, into, high in zip(client[begin:stop].tolist(), parts[begin:stop].tolist(), ends):
            mass = masses[node]
            for k in range(low, high):
                mass += share[sources[k]]
            low = high
            total.append(mass)
            part = mass / into
            share.append(part)
            masses[node] = part
    return np.array(total), np.array(share)


def with_masses(
    setup: PeerScenario,
    exchanged: Exchanged,
    parts: np.ndarray | None = None,
    carries: bool = False,
    late_mass: int = 1,
) -> PeerSchedule:
    """The schedule with push-sum masses; a message without mass is not mixed.

    ``parts``, int64[E]: into how many parts each event splits its mass, by default one for each receiver and for the
    node. ``carries``, ``late_mass``: see ``PeerSchedule``.
    """
    events, pushes, boxes = exchanged.events, exchanged.pushes, exchanged.boxes
    parts = pushes.degree + 1 if parts is None else parts
    source = pushes.event[boxes.contribution]
    first = first_masses(exchanged.present.joined, late_mass)
    total, share = push_sum_masses(first, events.client, parts, boxes.contributed, source)
    received = np.bincount(boxes.entry, share[source], len(boxes.push))
    weight = received / np.where(total > 0, total, 1)[rows_of(boxes.bounds)]
    schedule = schedule_of(setup, exchanged, weight, share, share[pushes.event])
    unsent = share * (parts - 1 - pushes.degree)
    return schedule._replace(unsent_mass=unsent, carries=carries, late_mass=late_mass)


def without_masses(setup: PeerScenario, exchanged: Exchanged, weight: np.ndarray) -> PeerSchedule:
    """The schedule with these coefficients, float64[D]."""
    events, pushes = exchanged.events, exchanged.pushes
    return schedule_of(setup, exchanged, weight, np.ones(len(events.client)), np.zeros(len(pushes.event)))


def schedule_of(
    setup: PeerScenario, exchanged: Exchanged, weight: np.ndarray, mass: np.ndarray, sent_mass: np.ndarray
) -> PeerSchedule:
    """The schedule with these coefficients and masses."""
    events, present, pushes, boxes, fragments = exchanged
    return PeerSchedule(
        num_clients=setup.scenario.num_clients,
        client=events.client.astype(np.int32),
        number=events.number.astype(np.int32),
        local_steps=setup.scenario.local_steps[events.client].astype(np.int32),
        start=events.start,
        end=events.end,
        mixed_at=events.mixed_at,
        mass=mass,
        unsent_mass=np.zeros(len(events.client)),
        inbox_bounds=boxes.bounds,
        source=pushes.event[boxes.push],
        fragment=pushes.fragment[boxes.push],
        weight=weight,
        push_event=pushes.event,
        push_fragment=pushes.fragment,
        receiver=pushes.receiver,
        sent_mass=sent_mass,
        arrival=pushes.arrival,
        outcome=boxes.outcome,
        mixed_by=boxes.mixed_by,
        corrupt=pushes.corrupt,
        joined=present.joined,
        left=present.left,
        fragments=fragments,
        message_bytes=setup.message_bytes,
        exhausted=present.exhausted,
    )
