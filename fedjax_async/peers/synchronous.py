"""Synchronous exchanges without a server: all nodes train a round, exchange messages, and wait for each other.

A round begins when the round before is over: all of its nodes are done, and their messages have arrived. The nodes
that are online then take part; they push to each other along the edges of the topology (the n-th graph of a list in
round n). The round does not wait for an event that is lost because its node crashes or goes offline. If no event is
completed, or nobody is online, it is no round: the messages of the last one wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedjax_async.clock.availability import together
from fedjax_async.clock.budget import Forecast
from fedjax_async.clock.event_queue import FRUITLESS
from fedjax_async.clock.job_outcomes import draw_jobs, job_outcomes
from fedjax_async.clock.record import Outcome
from fedjax_async.clock.scenario import Scenario, too_short
from fedjax_async.peers.exchange_parts import Exchanged, rows_of, with_masses, without_masses
from fedjax_async.peers.inboxes import fill_inboxes
from fedjax_async.peers.pushes import Events, Pushes, make_pushes
from fedjax_async.peers.receivers import Online
from fedjax_async.peers.schedule import PeerScenario, PeerSchedule
from fedjax_async.peers.timelines import budget, end_of_run, presence, worked_until

_DIRECTED = "topology: must be undirected graphs for the exchange dpsgd"


def dpsgd() -> Callable[[PeerScenario], PeerSchedule]:
    """Synchronous gossip: w_i <- sum_j W_ij w_j with Metropolis weights, W_ij = 1 / (1 + max(d_i, d_j)).

    Only messages of the round before count; if none came from a neighbour, its weight stays with the node itself. Needs
    undirected graphs. A node trains after it has mixed.

    Source: D-PSGD, Lian et al. (2017); the weights: Xiao and Boyd (2004).
    """

    def plan(setup: PeerScenario) -> PeerSchedule:
        topology, nodes = setup.topology, setup.scenario.num_clients
        graphs = topology.graphs if topology.drawn is None else (topology.drawn(0),)
        if not graphs or any(not _is_symmetric(graph.senders, graph.receivers) for graph in graphs):
            raise ValueError(_DIRECTED)
        exchanged = _rounds(setup, "discard")
        source, reader, in_time = _entries(exchanged)
        events = exchanged.events
        graph, first = topology.along(events.turn[source])
        degrees, senders = graph.degrees, graph.senders
        if not _is_symmetric(senders, graph.receivers + senders - senders % nodes):  # of graphs drawn for later rounds
            raise ValueError(_DIRECTED)
        larger = np.maximum(degrees[first + events.client[source]], degrees[first + events.client[reader]])
        return without_masses(setup, exchanged, in_time / (1.0 + larger))

    return plan


def epidemic() -> Callable[[PeerScenario], PeerSchedule]:
    """Synchronous gossip with plain means: w_i <- (w_i + sum_j w_j) / (n + 1) over the n models that came to node i.

    Only messages of the round before count. Any topology: `random_regular` with `redraw` gives EL-Oracle, `gossip`
    EL-Local. On one graph for all rounds it is D-PSGD with plain means, and a run warns. A node trains after it has
    mixed, so that the models that are evaluated, also those of the end, have not been mixed since they were trained.

    Source: Epidemic Learning, de Vos et al. (2023), by the code of its authors (decentralizepy: EL_Local, EL_Oracle,
    PlainAverageSharing). There a graph of EL-Oracle that is not connected gets more edges; here it stays regular.
    """

    def plan(setup: PeerScenario) -> PeerSchedule:
        exchanged = _rounds(setup, "discard")
        _, reader, in_time = _entries(exchanged)
        received = np.bincount(reader, in_time, minlength=len(exchanged.events.client))
        return without_masses(setup, exchanged, in_time / (1.0 + received[reader]))

    return plan


def sgp() -> Callable[[PeerScenario], PeerSchedule]:
    """Synchronous push-sum: each node divides its mass equally among its receivers and itself, round by round.

    Any topology, directed ones and gossip too; messages to a node that misses rounds wait, and their masses with them.

    Source: stochastic gradient push, Assran et al. (2019).
    """
    return lambda setup: with_masses(setup, _rounds(setup, "carry"), carries=True)


@dataclass(frozen=True)
class Overlapping:
    """The exchange of messages that leave before the training of their events."""

    def __call__(self, setup: PeerScenario) -> PeerSchedule:
        return with_masses(setup, _rounds(setup, "carry", early=True), carries=True)


def overlap() -> Overlapping:
    """Synchronous push-sum whose messages are on their way while the nodes train: for methods that send before.

    As ``sgp``, but a round lasts as long as its longest training or its latest message, not as long as both. In tables
    and pictures a message leaves when its event ends, as everywhere; one that is there by then arrives at that moment.
    An event that fails sends nothing, though its message would have left before.

    Source: overlap SGP, see ``osgp`` in ``full_mixing.py``.
    """
    return Overlapping()


def _entries(exchanged: Exchanged) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each inbox entry: the event that sent it, the one that reads it, and whether that is in the next round."""
    source, reader = exchanged.pushes.event[exchanged.boxes.push], rows_of(exchanged.boxes.bounds)
    turn = exchanged.events.turn
    return source, reader, turn[reader] == turn[source] + 1


def _is_symmetric(senders: np.ndarray, receivers: np.ndarray) -> bool:
    back = np.lexsort((senders, receivers))
    return np.array_equal(receivers[back], senders) and np.array_equal(senders[back], receivers)


class _Round(NamedTuple):
    client: np.ndarray  # int64, ascending
    end: np.ndarray
    worked: float  # until when any node worked, on lost events too


def _rounds(setup: PeerScenario, policy: str, early: bool = False) -> Exchanged:
    """Events, pushes and inboxes of a synchronous run; ``early``: messages leave when a round begins."""
    scenario = setup.scenario
    most, horizon = budget(scenario)
    numbers, planned = np.zeros(scenario.num_clients, np.int64), 0
    train = _trainer(scenario)
    forecast = Forecast(scenario.until, scenario.progress)
    events: list[Events] = []
    pushes: list[Pushes] = []
    time, turn, worked = 0.0, 0, 0.0
    while time <= horizon and time < math.inf and planned < most:
        done, after = train(time)
        kept = np.flatnonzero(done.end <= horizon)
        if len(kept) > most - planned:
            kept = np.sort(kept[np.argsort(done.end[kept], kind="stable")[: int(most - planned)]])
        client, end = done.client[kept], done.end[kept]
        start = np.full(len(client), time)
        one = Events(client, numbers[client], np.full(len(client), turn), start, end, start)
        leaving = one._replace(end=start) if early else one
        sent = make_pushes(setup, leaving, _among(done.client, scenario.num_clients), math.inf)
        if early:
            sent = sent._replace(arrival=np.maximum(sent.arrival, end[sent.event]))
        events.append(one)
        pushes.append(sent._replace(event=sent.event + planned))
        arrived = sent.arrival[np.isfinite(sent.arrival)]
        came = float(arrived.max(initial=0.0))
        time, worked = max(after, came), max(worked, done.worked, came)
        numbers[client] += 1
        planned, turn = planned + len(client), turn + bool(len(client))  # a moment without events is no round
        forecast.note(planned, time=min(time, horizon), updates=planned)
    every = Events(*(np.concatenate(columns) for columns in zip(*events)))
    sent = Pushes(*(np.concatenate(columns) for columns in zip(*pushes)))
    last = end_of_run(scenario, every.end)
    boxes = fill_inboxes(scenario.num_clients, every, sent, last, policy=policy)
    present = presence(scenario, last)._replace(exhausted=planned < most and worked <= horizon)
    return Exchanged(every, present, sent, boxes)


def _among(clients: np.ndarray, num_clients: int) -> Online:
    """``online`` for a round in which only these nodes take part."""
    present = np.zeros(num_clients, np.bool_)
    present[clients] = True
    return lambda nodes, times: np.broadcast_to(present[nodes], np.broadcast_shapes(nodes.shape, times.shape))


def _trainer(scenario: Scenario) -> Callable[[float], tuple[_Round, float]]:
    """``train(time)``: the events of a round that begins then, and when the next one can begin at the earliest."""
    interval = together([source.interval for source in scenario.conditions.availability])
    job_outcome = job_outcomes(scenario.conditions)
    attempts = np.zeros(scenario.num_clients, np.int64)
    free = np.zeros(scenario.num_clients)  # after a crash
    everyone = np.arange(scenario.num_clients)
    fruitless = 0

    def train(time: float) -> tuple[_Round, float]:
        nonlocal fruitless
        client, soonest = everyone[free <= time], float(free[free > time].min(initial=math.inf))
        if interval is not None:
            begins = np.array([interval(node, time)[0] for node in client.tolist()], np.float64)
            soonest = min(soonest, float(begins[begins > time].min(initial=math.inf)))
            client = client[begins <= time]
        if not len(client):
            return _Round(client, np.zeros(0), 0.0), soonest
        drawn = draw_jobs(scenario, client, attempts[client])
        attempts[client] += 1
        if not scenario.conditions.availability and not scenario.conditions.faults:
            end = time + drawn
            if not (end > time).all():
                raise too_short(int(client[np.argmin(end)]), time)
            return _Round(client, end, float(end.max())), float(end.max())
        worked = 0.0
        ends = np.full(len(client), math.inf)
        for k, (node, draw) in enumerate(zip(client.tolist(), drawn.tolist())):
            outcome = job_outcome(node, time, (*draw[:3], False, False) if isinstance(draw, tuple) else draw)
            if outcome.outcome is Outcome.APPLIED:
                ends[k] = outcome.upload
                worked = max(worked, outcome.upload)
            else:
                worked = max(worked, worked_until(outcome, time))
                free[node] = max(outcome.client_free, math.nextafter(time, math.inf))
                soonest = min(soonest, float(free[node]))
        came = np.isfinite(ends)
        fruitless = 0 if came.any() else fruitless + 1
        if fruitless > FRUITLESS:
            raise ValueError(f"faults, availability: in {FRUITLESS} rounds not one event was completed")
        after = float(ends[came].max()) if came.any() else soonest
        return _Round(client[came], ends[came], worked), after

    return train
