"""SWIFT: nodes keep the last message of each neighbour, and mix them with coefficients computed from the degrees.

Source: Bornstein et al., "SWIFT: rapid decentralized federated learning via wait-free model communication" (2023). The
coefficients are those of the code that its authors released.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedjax_async.base import check
from fedjax_async.peers.exchange_parts import AGGREGATE_AT, Exchanged, events_and_pushes, without_masses
from fedjax_async.peers.inboxes import Inboxes, first_reader
from fedjax_async.peers.pushes import Events, Pushes
from fedjax_async.peers.schedule import Delivery, PeerScenario, PeerSchedule
from fedjax_async.peers.segments import bounds_of, members, search
from fedjax_async.peers.topologies import Graph, Topology


def swift(*, every: int = 1, aggregate_at: str = "start") -> Callable[[PeerScenario], PeerSchedule]:
    """SWIFT: every `every`-th event of a node mixes the last message of each neighbour, also if it was mixed before.

    w <- w + sum_j c_j (w_j - w) with the coefficients of ``communication_coefficients``; a neighbour from which nothing
    has come yet counts as the node itself. All events push to all neighbours. Needs one undirected graph.

    Source: SWIFT, Algorithm 1, and its released code.
    """
    check.whole("every", every)
    check.one_of("aggregate_at", aggregate_at, AGGREGATE_AT)

    def plan(setup: PeerScenario) -> PeerSchedule:
        graph = undirected(setup.topology, "swift")
        coefficients = communication_coefficients(graph)
        events, present, pushes, end = events_and_pushes(setup, aggregate_at)
        boxes, edge = _last_messages(graph, events, pushes, end, every)
        return without_masses(setup, Exchanged(events, present, pushes, boxes), coefficients[edge])

    return plan


def undirected(topology: Topology, exchange: str) -> Graph:
    """The graph of a topology of one undirected graph; ``ValueError`` for any other."""
    if len(topology.graphs) == 1:
        graph, nodes = topology.graphs[0], topology.num_clients
        forth, back = graph.senders * nodes + graph.receivers, graph.receivers * np.int64(nodes) + graph.senders
        if np.array_equal(forth, np.sort(back)):
            return graph
    raise ValueError(
        f"topology: must be one undirected graph for the exchange {exchange}, such as ring or random_regular:degree=4"
    )


def communication_coefficients(graph: Graph) -> np.ndarray:
    """SWIFT's coefficients, float64[edges]: for an edge i -> j, that with which node i mixes the message of node j.

    From the highest degree d down: a node with no neighbour of higher degree takes 1 / (d + 1) for all neighbours.
    Any other takes from its m neighbours of higher degree the coefficients that they have for their neighbours, and
    divides the rest among the others and itself: u = (1 - sum) / (d - m + 1). The others get the smallest u among
    the node and its neighbours of equal degree. The matrix is not always doubly stochastic.
    """
    degrees, bounds, receivers = graph.degrees, graph.bounds.tolist(), graph.receivers
    coefficients = np.empty(len(receivers))
    given = np.zeros(len(degrees))  # the coefficient that a node has for its neighbours of lower degree
    proposed = np.zeros(len(degrees))  # and the one before the comparison with those of equal degree
    by_degree = np.argsort(-degrees, kind="stable")
    for nodes in np.split(by_degree, np.flatnonzero(np.diff(degrees[by_degree])) + 1):
        for node in nodes.tolist():
            neighbours = receivers[bounds[node] : bounds[node + 1]]
            higher = neighbours[degrees[neighbours] > degrees[node]]
            left = len(neighbours) - len(higher)
            proposed[node] = (1 - given[higher].sum()) / (left + 1)
        for node in nodes.tolist():
            edges = slice(bounds[node], bounds[node + 1])
            neighbours = receivers[edges]
            above = degrees[neighbours] > degrees[node]
            equal = neighbours[degrees[neighbours] == degrees[node]]
            given[node] = proposed[node]
            if above.any():
                given[node] = min(proposed[node], proposed[equal].min(initial=np.inf))
            coefficients[edges] = np.where(above, given[neighbours], given[node])
    return coefficients


def _last_messages(graph: Graph, events: Events, pushes: Pushes, end: float, every: int) -> tuple[Inboxes, np.ndarray]:
    """The inboxes, and the edge (receiver -> sender) of each entry."""
    nodes, count = len(graph.bounds) - 1, len(events.client)
    reader = first_reader(nodes, events.client, events.mixed_at, pushes.event, pushes.receiver, pushes.arrival)
    edge_keys = graph.senders * nodes + graph.receivers
    edge = np.searchsorted(edge_keys, pushes.receiver * np.int64(nodes) + events.client[pushes.event])
    came = np.flatnonzero(pushes.arrival <= end)
    came = came[np.argsort(edge[came], kind="stable")]  # by edge, in order of sending and of arrival
    by_edge = bounds_of(np.bincount(edge[came], minlength=len(edge_keys)))
    mixing = np.flatnonzero(events.number % every == 0)
    asked = members(graph.bounds, events.client[mixing])
    event = np.repeat(mixing, graph.degrees[events.client[mixing]])
    latest = search(by_edge, reader[came], asked, event, "right") - 1
    known = latest >= by_edge[asked]
    push, event, asked = came[latest[known]], event[known], asked[known]
    outcome = np.where(np.isfinite(pushes.arrival), Delivery.IN_FLIGHT, Delivery.LOST).astype(np.int8)
    outcome[came] = Delivery.SUPERSEDED
    outcome[came[by_edge[1:][np.diff(by_edge) > 0] - 1]] = Delivery.WAITING
    mixed_by = np.full(len(pushes.event), -1, np.int64)
    mixed_by[push[::-1]] = event[::-1]  # the first event that mixed it is written last
    outcome[push] = Delivery.MIXED
    empty, nothing = np.zeros(0, np.int64), np.zeros(count + 1, np.int64)
    boxes = Inboxes(bounds_of(np.bincount(event, minlength=count)), push, nothing, empty, empty, outcome, mixed_by)
    return boxes, asked
