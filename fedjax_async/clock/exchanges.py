"""Exchanges: which messages nodes push, which they mix, and with which coefficients. Registry ``EXCHANGES``.

An exchange is ``exchange(world) -> PeerSchedule``, ``world`` a ``PeerScenario``. ``aggregate_at`` says when an event
mixes its inbox: at its ``start``, before it trains; or at its ``end``, where all of its training then happens too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedjax_async import check
from fedjax_async.clock.forecast import host_memory
from fedjax_async.clock.inboxes import POLICIES, Inboxes, fill_inboxes
from fedjax_async.clock.masses import push_sum_masses
from fedjax_async.clock.peer_pushes import Events, Pushes, make_pushes
from fedjax_async.clock.peer_scenario import PeerScenario
from fedjax_async.clock.peer_schedule import PeerSchedule
from fedjax_async.clock.peer_timelines import Computes, Presence, compute_events, end_of_run, presence
from fedjax_async.clock.topologies import Topology

Exchange = Callable[[PeerScenario], PeerSchedule]

AGGREGATE_AT = ("start", "end")
_BYTES_PER_PUSH = 320  # in planning, at the peak


def push_sum(
    *,
    capacity: int | None = 16,
    newest: bool = True,
    policy: str = "carry",
    aggregate_at: str = "start",
    reference: str = "paper",
) -> Exchange:
    """Push-sum: models carry masses, so that the mass-weighted mean is right on directed graphs too.

    Event: S = s + sum_j sigma_j; w <- (s w + sum_j sigma_j w_j) / S; training; each of the d receivers and the node get
    S / (d + 1). The buffer keeps the `newest` message of each sender (false: all) and has room for `capacity` messages
    (none: any number); `policy` is `discard`, `carry` or `merge`, see ``inboxes.py``. `reference` = `released`: the
    mass is divided by the receivers wanted and one more, even if fewer are online, and the first event of a node
    replaces its model by the plain mean of its messages, as the code released with PushCen-ADFL does.

    Source: PushCen-ADFL, Algorithms 1 and 5.
    """
    _check_buffer(capacity, newest, policy, aggregate_at)
    check.one_of("reference", reference, ("paper", "released"))
    released = reference == "released"

    def plan(world: PeerScenario) -> PeerSchedule:
        exchanged = _exchange(world, aggregate_at, capacity=capacity, newest=newest, policy=policy)
        events, pushes, boxes = exchanged.events, exchanged.pushes, exchanged.boxes
        degree = _wanted(world.topology, events) if released else pushes.degree
        source = pushes.event[boxes.contribution]
        num_clients = world.scenario.num_clients
        total, share = push_sum_masses(num_clients, events.client, degree + 1, boxes.contributed, source)
        arrived = np.bincount(boxes.entry, share[source], len(boxes.push))
        weight = arrived / total[_rows(boxes.bounds)]
        if released:
            entries = np.diff(boxes.bounds)
            first = (events.number == 0)[_rows(boxes.bounds)]
            weight[first] = (1 / np.maximum(entries, 1))[_rows(boxes.bounds)][first]
        return _schedule(world, exchanged, weight, share, share[pushes.event])

    return plan


def mean(
    *, capacity: int | None = None, newest: bool = True, policy: str = "discard", aggregate_at: str = "start"
) -> Exchange:
    """The plain mean of a node's model and the n messages in its buffer, 1 / (n + 1) each.

    Options as of ``push_sum``; there are no masses to `carry`.
    """
    _check_buffer(capacity, newest, policy, aggregate_at)
    check.one_of("policy", policy, ("discard", "merge"))

    def plan(world: PeerScenario) -> PeerSchedule:
        exchanged = _exchange(world, aggregate_at, capacity=capacity, newest=newest, policy=policy)
        weight = (1 / (1 + np.diff(exchanged.boxes.bounds)))[_rows(exchanged.boxes.bounds)]
        return _without_masses(world, exchanged, weight)

    return plan


def none(*, aggregate_at: str = "start") -> Exchange:
    """Nodes train alone: no messages."""
    check.one_of("aggregate_at", aggregate_at, AGGREGATE_AT)

    def plan(world: PeerScenario) -> PeerSchedule:
        alone = world._replace(topology=Topology(world.scenario.num_clients))
        return _without_masses(world, _exchange(alone, aggregate_at), np.zeros(0))

    return plan


EXCHANGES: dict[str, Callable[..., Exchange]] = {
    "push_sum": push_sum,
    "mean": mean,
    "none": none,
}


# --- what exchanges share -----------------------------------------------------------------------


class Exchanged(NamedTuple):
    """All but the coefficients of a plan."""

    events: Events
    present: Presence
    pushes: Pushes
    boxes: Inboxes
    fragments: int = 1


def _check_buffer(capacity: int | None, newest: bool, policy: str, aggregate_at: str) -> None:
    check.optional(check.whole, "capacity", capacity)
    check.kind("newest", newest, bool, "true or false")
    check.one_of("policy", policy, POLICIES)
    check.one_of("aggregate_at", aggregate_at, AGGREGATE_AT)


def in_order(computes: Computes, aggregate_at: str) -> Events:
    """The events in order of (mixed_at, client)."""
    order = np.lexsort((computes.client, getattr(computes, aggregate_at)))
    client, number, start, end = (column[order] for column in computes)
    return Events(client, number, number, start, end, start if aggregate_at == "start" else end)


def _exchange(
    world: PeerScenario,
    aggregate_at: str,
    *,
    capacity: int | None = None,
    newest: bool = True,
    policy: str = "discard",
    fragments: int = 1,
) -> Exchanged:
    """Events, pushes and inboxes of nodes that wait for nobody and empty their buffers whenever they mix."""
    computes = compute_events(world.scenario)
    events = in_order(computes, aggregate_at)
    check_fits(world, events, fragments)
    end = end_of_run(world.scenario, events.end)
    present = presence(world.scenario, end)
    pushes = make_pushes(world, events, present, fragments)
    boxes = fill_inboxes(
        world.scenario.num_clients,
        events,
        pushes,
        end,
        capacity=capacity,
        newest=newest,
        policy=policy,
        fragments=fragments,
    )
    return Exchanged(events, present, pushes, boxes, fragments)


def _wanted(topology: Topology, events: Events) -> np.ndarray:
    """How many receivers the pushes of each event would have if all nodes were online; int64[E]."""
    if not topology.graphs:
        return np.full(len(events.client), topology.random)
    degrees = np.stack([graph.degrees for graph in topology.graphs])
    return degrees[events.turn % len(degrees), events.client]


def check_fits(world: PeerScenario, events: Events, fragments: int = 1) -> None:
    """``ValueError`` if the pushes of these events do not fit the machine's memory."""
    pushes = float(_wanted(world.topology, events).sum()) * fragments
    most = host_memory() // _BYTES_PER_PUSH
    if pushes > most:
        raise ValueError(
            f"until = {world.scenario.until}: must end within {most:.2g} messages, which fill this machine's memory, "
            f"and not {pushes:.2g}; shorten the budget, or choose a topology with fewer receivers"
        )


def _rows(bounds: np.ndarray) -> np.ndarray:
    """The row of each value; int64."""
    return np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))


def _without_masses(world: PeerScenario, exchanged: Exchanged, weight: np.ndarray) -> PeerSchedule:
    events, pushes = exchanged.events, exchanged.pushes
    return _schedule(world, exchanged, weight, np.ones(len(events.client)), np.zeros(len(pushes.event)))


def _schedule(
    world: PeerScenario, exchanged: Exchanged, weight: np.ndarray, mass: np.ndarray, sent_mass: np.ndarray
) -> PeerSchedule:
    events, present, pushes, boxes, fragments = exchanged
    return PeerSchedule(
        num_clients=world.scenario.num_clients,
        client=events.client.astype(np.int32),
        number=events.number.astype(np.int32),
        local_steps=world.scenario.local_steps[events.client].astype(np.int32),
        start=events.start,
        end=events.end,
        mixed_at=events.mixed_at,
        mass=mass,
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
        message_bytes=world.message_bytes,
    )
