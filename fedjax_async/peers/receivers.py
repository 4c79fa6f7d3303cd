"""The receivers of pushes: the neighbours in a graph, or nodes drawn for each push; in both cases nodes online then.

A draw depends on the sender, the number of its event and the fragment. The receivers are the first k different online
nodes of an endless sequence of random nodes. Where that would take long, they are the k online nodes with the smallest
of N random keys.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedjax_async.clock import chance
from fedjax_async.peers.segments import members
from fedjax_async.peers.topologies import Graph, Topology

# ``online(nodes, times)``, arrays that broadcast: whether each node is online then; ``None``: all always are.
Online = Callable[[np.ndarray, np.ndarray], np.ndarray] | None

_CELLS = 1 << 21  # random numbers drawn at once


def choose_receivers(
    topology: Topology,
    seed: int,
    sender: np.ndarray,
    turn: np.ndarray,
    time: np.ndarray,
    online: Online,
    fragment: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """The receivers of the pushes of events: how many each event has, int64[E], and all in order, int32[P].

    ``sender``, ``turn`` and ``time`` [E] belong to the events. ``turn`` counts the events of a sender: it selects among
    the graphs of a topology, and makes draws differ.
    """
    if topology.graphs or topology.drawn is not None:
        return _neighbours(*topology.along(turn), sender, time, online)
    wanted, others = topology.random, topology.num_clients - 1
    if wanted == 0:
        return np.zeros(len(sender), np.int64), np.zeros(0, np.int32)
    counts, blocks = np.empty(len(sender), np.int64), []
    by_keys = others < 4 * wanted
    depth = topology.num_clients if by_keys else wanted
    rows = max(1, _CELLS // depth)
    for begin in range(0, len(sender), rows):
        block = slice(begin, begin + rows)
        draw = _smallest_keys if by_keys else _first_different
        counter = (seed, fragment, sender[block], turn[block], time[block])
        counts[block], drawn = draw(topology.num_clients, wanted, counter, online)
        blocks.append(drawn)
    return counts, np.concatenate(blocks) if blocks else np.zeros(0, np.int32)


def _neighbours(
    graph: Graph, first: np.ndarray, sender: np.ndarray, time: np.ndarray, online: Online
) -> tuple[np.ndarray, np.ndarray]:
    rows = first + sender
    receivers, counts = graph.receivers[members(graph.bounds, rows)], graph.degrees[rows]
    if online is None:
        return counts, receivers
    push = np.repeat(np.arange(len(rows)), counts)
    reached = online(receivers, time[push])
    return np.bincount(push[reached], minlength=len(rows)), receivers[reached]


Counter = tuple[int, int, np.ndarray, np.ndarray, np.ndarray]  # seed, fragment, sender, turn, time


def _first_different(num_clients: int, wanted: int, counter: Counter, online: Online) -> tuple[np.ndarray, np.ndarray]:
    """The first ``wanted`` different nodes online of each push's sequence of random nodes."""
    seed, fragment, sender, turn, time = counter
    chosen, lacking, depth = np.empty((len(sender), wanted), np.int32), np.arange(len(sender)), wanted
    while len(lacking) and depth <= max(num_clients // 4, wanted):
        draws = chance.Draws(seed, "gossip", fragment, sender[lacking, None], turn[lacking, None], np.arange(depth))
        nodes = (draws.random() * (num_clients - 1)).astype(np.int32)
        nodes += nodes >= sender[lacking, None]
        fits = _is_first(nodes)
        if online is not None:
            fits &= online(nodes, time[lacking, None])
        enough = fits.sum(axis=1) >= wanted
        fits &= np.cumsum(fits, axis=1) <= wanted
        chosen[lacking[enough]] = nodes[enough][fits[enough]].reshape(-1, wanted)
        lacking, depth = lacking[~enough], 2 * depth
    counts = np.full(len(sender), wanted, np.int64)
    if not len(lacking):
        return counts, chosen.reshape(-1)
    few = (seed, fragment, sender[lacking], turn[lacking], time[lacking])
    counts[lacking], rest = _smallest_keys(num_clients, wanted, few, online)
    kept = np.arange(wanted) < counts[:, None]
    has = np.zeros(len(sender), np.bool_)
    has[lacking] = True
    chosen[kept & has[:, None]] = rest
    return counts, chosen[kept]


def _is_first(nodes: np.ndarray) -> np.ndarray:
    """Where a row names a node for the first time; bool, the shape of ``nodes``."""
    first = np.ones(nodes.shape, np.bool_)
    in_order = np.sort(nodes, axis=1)
    rows = np.flatnonzero((in_order[:, 1:] == in_order[:, :-1]).any(axis=1))
    order = np.argsort(nodes[rows], axis=1, kind="stable")
    repeated = np.zeros(order.shape, np.bool_)
    in_order = in_order[rows]
    repeated[:, 1:] = in_order[:, 1:] == in_order[:, :-1]
    again = np.zeros(order.shape, np.bool_)
    np.put_along_axis(again, order, repeated, axis=1)
    first[rows] = ~again
    return first


def _smallest_keys(num_clients: int, wanted: int, counter: Counter, online: Online) -> tuple[np.ndarray, np.ndarray]:
    """The ``wanted`` nodes online with the smallest random keys, or all that are online, in order of the keys."""
    seed, fragment, sender, turn, time = counter
    everyone, counts, blocks = np.arange(num_clients), np.empty(len(sender), np.int64), []
    rows = max(1, _CELLS // num_clients)
    for begin in range(0, len(sender), rows):
        block = slice(begin, begin + rows)
        keys = chance.Draws(seed, "gossip keys", fragment, sender[block, None], turn[block, None], everyone).random()
        keys[np.arange(len(keys)), sender[block]] = np.inf
        if online is not None:
            keys[~online(everyone, time[block, None])] = np.inf
        order = np.argsort(keys, axis=1, kind="stable")[:, :wanted].astype(np.int32)
        fits = np.isfinite(np.take_along_axis(keys, order, axis=1))
        counts[block] = fits.sum(axis=1)
        blocks.append(order[fits])
    return counts, np.concatenate(blocks)
