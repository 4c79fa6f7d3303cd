"""Topologies: to which nodes a node can push. Fixed graphs, graphs that change from push to push, and gossip.

A model is ``model(num_clients, seed) -> Topology``; registry ``TOPOLOGIES``. A networkx graph with the nodes
0..N-1, directed or not, is a topology too, and so is a list of graphs: the n-th push of a node goes along graph
``n mod T`` (in a synchronous exchange, that of round n). A topology may also draw a graph for each n. A random graph
that stays is drawn again until it is strongly connected; given graphs are used with a warning if they are not, all
together (``base.notices.NotConnected``).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from fedjax_async.base import check, notices, registry
from fedjax_async.clock import chance, csv_tables
from fedjax_async.peers.segments import bounds_of

if TYPE_CHECKING:
    import networkx as nx

USUAL_RECEIVERS = 10  # of gossip
_TRIES = 100  # draws of a random graph until one is strongly connected
_KEPT = 1 << 12  # graphs of a topology that draws one for each push


class Graph(NamedTuple):
    """A directed graph: node i pushes to ``receivers[bounds[i]:bounds[i + 1]]``, in ascending order, without itself."""

    bounds: np.ndarray  # int64[N + 1]
    receivers: np.ndarray  # int32[edges]

    @property
    def degrees(self) -> np.ndarray:
        """The number of receivers of each node, int64[N]."""
        return np.diff(self.bounds)

    @property
    def senders(self) -> np.ndarray:
        """The sender of each edge, int64[edges]."""
        return np.repeat(np.arange(len(self.bounds) - 1), self.degrees)


class Topology(NamedTuple):
    """Fixed ``graphs``, used in turn; or ``drawn(n)``, the graph of each node's n-th push; or neither.

    Without both, each push goes to ``random`` other nodes, drawn afresh.
    """

    num_clients: int
    graphs: tuple[Graph, ...] = ()
    random: int = 0
    drawn: Callable[[int], Graph] | None = None

    def along(self, turns: np.ndarray) -> tuple[Graph, np.ndarray]:
        """The graphs of these turns, numbers of pushes or rounds, as one, and in it the row of node 0 for each turn.

        Receivers are still numbered 0..N-1. The topology has graphs.
        """
        if self.drawn is None:
            return _stacked(self.graphs), turns % len(self.graphs) * self.num_clients
        which, row = np.unique(turns, return_inverse=True)
        return _stacked([self.drawn(turn) for turn in which.tolist()]), row * self.num_clients


TopologyModel = Callable[[int, int], Topology]
GivenTopology: TypeAlias = "str | TopologyModel | Topology | nx.Graph | Sequence[nx.Graph]"


def _networkx() -> ModuleType:
    """The library of graphs, imported when the first one is made: it takes a third of a second."""
    import networkx  # noqa: PLC0415

    return networkx


def make_graph(num_clients: int, senders: np.ndarray, receivers: np.ndarray) -> Graph:
    """The graph with these edges; double ones count once, loops not at all."""
    keys = np.unique(np.asarray(senders, np.int64) * num_clients + receivers)
    keys = keys[keys // num_clients != keys % num_clients]
    bounds = np.searchsorted(keys, np.arange(num_clients + 1) * num_clients)
    return Graph(bounds, (keys % num_clients).astype(np.int32))


def _stacked(graphs: Sequence[Graph]) -> Graph:
    """All graphs as one: node i of graph g is row g * N + i."""
    if not graphs:
        return Graph(np.zeros(1, np.int64), np.zeros(0, np.int32))
    counts = np.concatenate([graph.degrees for graph in graphs])
    return Graph(bounds_of(counts), np.concatenate([graph.receivers for graph in graphs]))


def _fixed(make: Callable[[int, int], nx.Graph]) -> TopologyModel:
    """A topology of the networkx graph ``make(num_clients, seed)``."""
    return lambda num_clients, seed: Topology(num_clients, (from_networkx(make(num_clients, seed), num_clients),))


def _connected(make: Callable[[int, int], nx.Graph], what: str) -> TopologyModel:
    """A topology of the first of the random graphs ``make(num_clients, seed)`` that is connected."""

    def model(num_clients: int, seed: int) -> Topology:
        nx = _networkx()
        for attempt in range(_TRIES):
            graph = make(num_clients, _seed(seed, attempt))
            if nx.is_strongly_connected(graph) if graph.is_directed() else nx.is_connected(graph):
                return Topology(num_clients, (from_networkx(graph, num_clients),))
        raise ValueError(f"topology: {what}: none of {_TRIES} graphs of {num_clients} nodes is strongly connected")

    return model


def _redrawn(make: Callable[[int, int], nx.Graph]) -> TopologyModel:
    """A topology of the random graphs ``make(num_clients, seed)``, another one for each turn."""

    def model(num_clients: int, seed: int) -> Topology:
        @lru_cache(maxsize=_KEPT)
        def drawn(turn: int) -> Graph:
            return from_networkx(make(num_clients, _seed(seed, turn)), num_clients)

        drawn(0)  # what does not fit the number of nodes is said here
        return Topology(num_clients, drawn=drawn)

    return model


def _seed(seed: int, number: int) -> int:
    """The seed of the ``number``-th graph."""
    return int(chance.Draws(seed, "topology", number).random()[0] * 2**32)


def gossip(*, receivers: int | None = None) -> TopologyModel:
    """Each push goes to `receivers` other nodes, drawn uniformly among those online (to all if there are fewer).

    Without `receivers`: to 10, or to all others if there are fewer.
    """
    check.optional(check.whole, "receivers", receivers)

    def model(num_clients: int, seed: int) -> Topology:
        others = num_clients - 1
        check.require(receivers is None or receivers <= others, "receivers", receivers, f"at most the {others} others")
        return Topology(num_clients, random=min(USUAL_RECEIVERS, others) if receivers is None else receivers)

    return model


def ring(*, directed: bool = False) -> TopologyModel:
    """Each node and the next one on a circle, in both directions, or `directed`: only to the next."""
    check.kind("directed", directed, bool, "true or false")
    nx = _networkx()
    return _fixed(lambda n, seed: nx.cycle_graph(n, nx.DiGraph if directed else None))


def torus() -> TopologyModel:
    """A grid with wrap-around, 4 neighbours; its sides are as equal as the factors of N allow (a ring for prime N)."""

    def make(n: int, seed: int) -> nx.Graph:
        nx, rows = _networkx(), max(side for side in range(1, math.isqrt(n) + 1) if n % side == 0)
        grid = nx.grid_2d_graph(rows, n // rows, periodic=True)
        return nx.relabel_nodes(grid, {(i, j): i * (n // rows) + j for i, j in grid})

    return _fixed(make)


def exponential(*, one_peer: bool = False) -> TopologyModel:
    """Node i pushes to i + 1, i + 2, i + 4, ... mod N, directed; `one_peer`: one of these per push, in turn."""
    check.kind("one_peer", one_peer, bool, "true or false")

    def model(num_clients: int, seed: int) -> Topology:
        nodes = np.arange(num_clients)
        steps = [2**k for k in range(max(1, math.ceil(math.log2(num_clients))))]
        graphs = [make_graph(num_clients, nodes, (nodes + step) % num_clients) for step in steps]
        if one_peer:
            return Topology(num_clients, tuple(graphs))
        senders, receivers = (
            np.concatenate([getattr(graph, name) for graph in graphs]) for name in ("senders", "receivers")
        )
        return Topology(num_clients, (make_graph(num_clients, senders, receivers),))

    return model


def complete() -> TopologyModel:
    """Each node pushes to all others."""
    return _fixed(lambda n, seed: _networkx().complete_graph(n))


def star() -> TopologyModel:
    """Node 0 is a hub: it pushes to all others, and they push to it."""
    return _fixed(lambda n, seed: _networkx().star_graph(n - 1))


def random_regular(*, degree: int = 4, redraw: bool = False) -> TopologyModel:
    """A random graph in which each node has `degree` neighbours (N times `degree` must be even).

    `redraw`: another graph for each push of a node, in a synchronous exchange for each round, connected or not.
    """
    check.whole("degree", degree)
    check.kind("redraw", redraw, bool, "true or false")

    def make(n: int, seed: int) -> nx.Graph:
        allowed = f"below the {n} nodes, and even times {n}"
        check.require(degree < n and n * degree % 2 == 0, "degree of random_regular", degree, allowed)
        return _networkx().random_regular_graph(degree, n, seed)

    return _redrawn(make) if redraw else _connected(make, f"degree = {degree}")


def erdos_renyi(*, p: float | None = None, directed: bool = False) -> TopologyModel:
    """Each pair of nodes is joined with probability `p` (without it, 2 ln N / N); `directed`: each direction alone."""
    check.optional(check.share, "p", p)
    check.kind("directed", directed, bool, "true or false")

    def make(n: int, seed: int) -> nx.Graph:
        share = min(1.0, 2 * math.log(n) / n) if p is None else p
        share = share if 1.0 - share < 1.0 else 0.0  # networkx divides by log(1 - p)
        return _networkx().fast_gnp_random_graph(n, share, seed, directed)

    return _connected(make, f"p = {p}")


def small_world(*, neighbours: int = 4, p: float = 0.1) -> TopologyModel:
    """Watts-Strogatz: a ring of `neighbours` nearest neighbours, each edge moved at random with probability `p`.

    ``neighbours`` is even: half of them on each side.
    """
    check.whole("neighbours", neighbours, low=2)
    check.require(neighbours % 2 == 0, "neighbours", neighbours, "even: half of them on each side")
    check.share("p", p)

    def make(n: int, seed: int) -> nx.Graph:
        check.require(neighbours <= n, "neighbours", neighbours, f"at most the {n} nodes")
        return _networkx().watts_strogatz_graph(n, neighbours, p, seed)

    return _connected(make, f"neighbours = {neighbours}, p = {p}")


def csv(*, path: str, directed: bool = False) -> TopologyModel:
    """An edge list from a CSV file: columns source and target (0, 1, ...); `directed`: from source to target only."""
    check.kind("directed", directed, bool, "true or false")
    rows = csv_tables.read(str(path), ("source", "target"), required=("source", "target"))
    edges = np.array([[csv_tables.client(row, name) for name in ("source", "target")] for row in rows], np.int64)

    def model(num_clients: int, seed: int) -> Topology:
        beyond = np.flatnonzero(edges.max(axis=1) >= num_clients)
        if len(beyond):
            raise ValueError(f"{rows[beyond[0]][0]}: node {edges[beyond[0]].max()} must be below {num_clients}")
        source, target = edges.T
        if not directed:
            source, target = np.concatenate([source, target]), np.concatenate([target, source])
        return warned_of(Topology(num_clients, (make_graph(num_clients, source, target),)))

    return model


TOPOLOGIES: dict[str, Callable[..., TopologyModel]] = {
    "gossip": gossip,
    "ring": ring,
    "torus": torus,
    "exponential": exponential,
    "complete": complete,
    "star": star,
    "random_regular": random_regular,
    "erdos_renyi": erdos_renyi,
    "small_world": small_world,
    "csv": csv,
}


def from_networkx(graph: nx.Graph, num_clients: int) -> Graph:
    """The graph of a networkx graph with the nodes 0..N-1; an undirected edge counts as one in each direction."""
    if set(graph) != set(range(num_clients)):
        missing = len(set(range(num_clients)) - set(graph))
        found = f"it has {len(graph)} nodes and lacks {missing} of these"
        raise ValueError(f"topology: the graph must have the nodes 0..{num_clients - 1}, but {found}")
    edges = np.array([(u, v) for u, v in graph.edges()], np.int64).reshape(-1, 2)
    if not graph.is_directed():
        edges = np.concatenate([edges, edges[:, ::-1]])
    return make_graph(num_clients, edges[:, 0], edges[:, 1])


def is_graphs(given: object) -> bool:
    """Whether it is a networkx graph, or a list of at least one."""
    graphs = list(given) if isinstance(given, (list, tuple)) else [given]
    return bool(graphs) and all(hasattr(graph, "edges") and hasattr(graph, "is_directed") for graph in graphs)


def of_graphs(given: object) -> Topology:
    """The topology of a networkx graph, or of a list of graphs that are used in turn; ``ValueError`` otherwise.

    The nodes are 0..N-1. Graphs of one list must have the same number of nodes. Warns of edges with weights.
    """
    if isinstance(given, Topology):
        return given
    check.require(is_graphs(given), "topology", given, "a name of TOPOLOGIES, a networkx graph or a list of graphs")
    graphs: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given]
    if any("weight" in about for graph in graphs for *_, about in graph.edges(data=True)):
        text = "topology: the weights of the graph's edges are not used: the exchange decides how much nodes mix"
        warnings.warn(text, notices.RunWarning, stacklevel=2)
    return warned_of(Topology(len(graphs[0]), tuple(from_networkx(graph, len(graphs[0])) for graph in graphs)))


def warned_of(topology: Topology) -> Topology:
    """The topology itself, after a warning if its graphs together are not strongly connected."""
    if not topology.graphs:
        return topology
    from scipy.sparse import coo_array  # noqa: PLC0415 - half a second, and needed only for given graphs
    from scipy.sparse.csgraph import connected_components  # noqa: PLC0415

    nodes = topology.num_clients
    edges = tuple(
        np.concatenate([getattr(graph, name) for graph in topology.graphs]) for name in ("senders", "receivers")
    )
    matrix = coo_array((np.ones(len(edges[0]), np.bool_), edges), (nodes, nodes))
    groups, group = connected_components(matrix, connection="strong")
    if groups > 1:
        warnings.warn(
            f"topology: not strongly connected: its {nodes} nodes form {groups} groups, the largest of "
            f"{np.bincount(group).max()}, with messages between two groups in one direction or none, so that their "
            "models need not agree",
            notices.NotConnected,
            stacklevel=2,
        )
    return topology


def bind(topology: GivenTopology, num_clients: int, seed: int) -> Topology:
    """Bind a topology to ``num_clients`` nodes and a seed: a spec, a model, a networkx graph, or a list of graphs.

    Raises ``ValueError`` for anything else, and for a graph with other nodes. Warns (``base.notices.NotConnected``) if
    the graphs of a file, of your own model or of networkx are not strongly connected, all together.
    """
    own = callable(topology) or isinstance(topology, Topology)
    if isinstance(topology, str):
        spec = registry.spec("topology", TOPOLOGIES, topology)
        topology, own = spec.make(), spec.name in registry.ADDED.get("topology", {})
    if callable(topology):
        topology = topology(num_clients, seed)
        check.kind("topology", topology, Topology, "a model that returns peers.Topology")
    found = of_graphs(topology)
    if found.num_clients != num_clients:
        raise ValueError(f"topology: the graph must have the nodes 0..{num_clients - 1}, and has {found.num_clients}")
    return warned_of(_checked(found)) if own else found


def _checked(topology: Topology) -> Topology:
    """A topology of the user's own, whose graphs keep the contract of ``Graph``; ``ValueError`` otherwise."""
    nodes, drawn = topology.num_clients, topology.drawn
    check.whole("topology.random", topology.random, low=0, high=nodes - 1)
    for number, graph in enumerate(topology.graphs):
        _check_graph(f"topology.graphs[{number}]", graph, nodes)
    if drawn is None:
        return topology

    def checked(turn: int) -> Graph:
        graph = drawn(turn)
        _check_graph(f"topology.drawn({turn})", graph, nodes)
        return graph

    return topology._replace(drawn=checked)


def _check_graph(field: str, graph: Graph, nodes: int) -> None:
    check.kind(field, graph, Graph, "a peers.Graph")
    bounds, receivers = np.asarray(graph.bounds), np.asarray(graph.receivers)
    rows = bounds.shape == (nodes + 1,) and receivers.ndim == 1 and {bounds.dtype.kind, receivers.dtype.kind} <= {"i"}
    rows = rows and bounds[0] == 0 and bounds[-1] == len(receivers) and bool((np.diff(bounds) >= 0).all())
    allowed = f"int64[{nodes + 1}], ascending from 0 to the number of receivers, {receivers.size}"
    check.require(rows, f"{field}.bounds", f"{bounds.dtype}{list(bounds.shape)}", allowed)
    senders = np.repeat(np.arange(nodes), np.diff(bounds))
    sound = (receivers >= 0) & (receivers < nodes) & (receivers != senders)
    sound &= np.diff(senders * nodes + receivers, prepend=-1) > 0
    if not sound.all():
        at = int(np.argmin(sound))
        allowed = (
            f"a node from 0 to {nodes - 1} after the one before, for each sender, and not the sender {senders[at]}"
        )
        check.require(False, f"{field}.receivers[{at}]", receivers[at].item(), allowed)
