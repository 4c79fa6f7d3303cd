"""Shapes of the named topologies: degrees, directions, connection."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest

from fedjax_async import register
from fedjax_async.base.notices import NotConnected, RunWarning
from fedjax_async.clock import Until
from fedjax_async.peers import plan_peers, topologies
from tests.refusals import refusals

# spec, nodes, whether it is undirected, degrees
SHAPES = [
    ("ring", 7, True, 2), ("ring:directed=true", 7, False, 1), ("torus", 12, True, 4), ("exponential", 8, False, 3),
    ("complete", 5, True, 4), ("random_regular:degree=4", 9, True, 4), ("erdos_renyi:p=0.4", 9, True, None),
    ("erdos_renyi:p=0.5,directed=true", 9, False, None), ("small_world:neighbours=4,p=0.3", 10, True, None),
]  # fmt: skip


def digraph(graph):
    found = nx.DiGraph(zip(graph.senders.tolist(), graph.receivers.tolist()))
    found.add_nodes_from(range(len(graph.bounds) - 1))
    return found


@pytest.mark.parametrize(("spec", "nodes", "undirected", "degree"), SHAPES)
def test_shapes(spec, nodes, undirected, degree):
    (graph,) = topologies.bind(spec, nodes, seed=3).graphs
    edges = digraph(graph)
    assert nx.is_strongly_connected(edges) and nx.number_of_selfloops(edges) == 0
    assert all((v, u) in edges.edges for u, v in edges.edges) == undirected
    assert degree is None or (graph.degrees == degree).all()
    for node in range(nodes):
        own = graph.receivers[graph.bounds[node] : graph.bounds[node + 1]]
        assert (np.diff(own) > 0).all(), "receivers ascend"
    again = topologies.bind(spec, nodes, seed=3).graphs[0]
    np.testing.assert_array_equal(again.receivers, graph.receivers)


def test_a_star_has_a_hub_and_a_circle_of_powers_is_gone_round_in_turn():
    (star,) = topologies.bind("star", 6, seed=0).graphs
    assert star.degrees.tolist() == [5, 1, 1, 1, 1, 1] and star.receivers[5:].tolist() == [0] * 5
    graphs = topologies.bind("exponential:one_peer=true", 8, seed=0).graphs
    for step, graph in zip((1, 2, 4), graphs, strict=True):
        np.testing.assert_array_equal(graph.receivers, (np.arange(8) + step) % 8)
    gossip = [topologies.bind(spec, nodes, seed=0) for spec, nodes in (("gossip", 6), ("gossip:receivers=5", 6))]
    assert gossip == [topologies.Topology(6, (), 5)] * 2 and topologies.bind("gossip", 20, seed=0).random == 10
    # networkx would give each node two neighbours of three
    assert set(topologies.bind("small_world:neighbours=4,p=0", 9, 0).graphs[0].degrees) == {4}


def test_regular_graphs_may_be_drawn_for_each_push():
    topology, again = (topologies.bind("random_regular:degree=3,redraw=true", 8, seed=3) for _ in range(2))
    graphs = [topology.drawn(turn) for turn in range(40)]
    for graph in graphs:
        edges = digraph(graph)
        assert (graph.degrees == 3).all() and all((v, u) in edges.edges for u, v in edges.edges)
    assert len({tuple(graph.receivers.tolist()) for graph in graphs}) > 30, "the graphs differ"
    pairs = np.bincount(np.concatenate([graph.senders * 8 + graph.receivers for graph in graphs]), minlength=64)
    share = pairs.reshape(8, 8)[~np.eye(8, dtype=bool)] / len(graphs)
    assert np.abs(share - 3 / 7).max() < 0.3, "each pair meets"
    turns = np.array([7, 2, 7])
    together, first = again.along(turns)
    for turn, row in zip(turns.tolist(), first.tolist()):
        mine = slice(together.bounds[row], together.bounds[row + 8])
        np.testing.assert_array_equal(together.receivers[mine], graphs[turn].receivers)
    matched = topologies.bind("random_regular:degree=1,redraw=true", 4, seed=0).drawn(0)
    assert (matched.degrees == 1).all(), "pairs need not be connected"


def test_edge_lists_and_graphs(tmp_path):
    path = tmp_path / "edges.csv"
    path.write_text("source,target\n0,1\n1,2\n2,0\n2,0\n")
    (one,) = topologies.bind(f"csv:path={path},directed=true", 3, seed=0).graphs
    assert (one.senders.tolist(), one.receivers.tolist()) == ([0, 1, 2], [1, 2, 0])
    (both,) = topologies.bind(f"csv:path={path}", 3, seed=0).graphs
    assert both.degrees.tolist() == [2, 2, 2]
    turns = topologies.bind([nx.path_graph(3), nx.cycle_graph(3, nx.DiGraph)], 3, seed=0).graphs
    assert [graph.degrees.tolist() for graph in turns] == [[1, 2, 1], [1, 1, 1]]
    with pytest.raises(ValueError, match="node 2 must be below 2"):
        topologies.bind(f"csv:path={path}", 2, seed=0)


def test_weights_of_edges_are_not_used_and_a_warning_says_so():
    weighted = nx.Graph()
    weighted.add_weighted_edges_from([(0, 1, 0.9), (1, 2, 0.1)])
    with pytest.warns(RunWarning, match="topology: the weights of the graph's edges are not used"):
        found = topologies.bind(weighted, 3, seed=0)
    (plain,) = topologies.bind(nx.path_graph(3), 3, seed=0).graphs
    np.testing.assert_array_equal(found.graphs[0].receivers, plain.receivers)


def test_graphs_that_do_not_connect_all_nodes_are_used_with_a_warning(tmp_path):
    path = tmp_path / "edges.csv"
    path.write_text("source,target\n0,1\n1,2\n")
    directed = nx.DiGraph([(0, 1), (1, 2)])
    for given, nodes, parts in [
        (f"csv:path={path}", 5, "5 nodes form 3 groups, the largest of 3"),
        (f"csv:path={path},directed=true", 3, "3 nodes form 3 groups, the largest of 1"),
        (directed, 3, "3 nodes form 3 groups"),
        (own(graphs=(topologies.from_networkx(directed, 3),)), 3, "3 nodes form 3 groups"),
    ]:
        with pytest.warns(NotConnected, match=f"topology: not strongly connected: its {parts}"):
            assert len(topologies.bind(given, nodes, seed=0).graphs) == 1
    back = topologies.bind([directed, nx.DiGraph([(2, 0), (0, 1)])], 3, seed=0)  # connected in turn: no warning
    assert len(back.graphs) == 2


DEGREE = "degree of random_regular = "
test_what_makes_no_graph_is_refused = refusals(
    ("ring2", 3, "topology"), (nx.path_graph(4), 3, "nodes"), ("erdos_renyi:p=0", 3, "connected"),
    ("gossip:receivers=6", 6, "receivers = 6: must be at most the 5 others"),
    ("small_world:neighbours=3", 9, "neighbours = 3: must be even"),
    ("random_regular:degree=3,redraw=true", 7, f"^{DEGREE}3: must be below the 7 nodes"),
    ("random_regular:degree=8,redraw=true", 8, f"^{DEGREE}8: must be below the 8 nodes"),
    ("random_regular:degree=4,redraw=true", 2, f"^{DEGREE}4: must be below the 2 nodes"),
    by=lambda spec, nodes: topologies.bind(spec, nodes, seed=0),
)  # fmt: skip


def own(**fields):
    return lambda nodes, seed: topologies.Topology(nodes, **fields)


def graph_of(bounds, receivers):
    return topologies.Graph(np.array(bounds), np.array(receivers, np.int32))


def graphs_of(*given):
    return own(graphs=(graph_of(*given),))


def test_dpsgd_refuses_graphs_that_are_directed_in_a_later_round_only():
    ring, one_way = (topologies.bind(f"ring:directed={one}", 4, seed=0).graphs[0] for one in ("false", "true"))
    with pytest.raises(ValueError, match="topology: must be undirected graphs for the exchange dpsgd"):
        plan_peers(
            "dpsgd", "constant", num_clients=4, local_steps=1, until=Until(updates=12),
            topology=own(drawn=lambda turn: one_way if turn else ring),
        )  # fmt: skip


FIRST = r"^topology.graphs\[0\].receivers"
test_a_wrong_topology_of_ones_own_is_refused = refusals(
    (graphs_of([0, 2, 3, 4], [0, 1, 2, 0]), rf"{FIRST}\[0\] = 0: .* not the sender 0"),
    (graphs_of([0, 1, 2, 3], [1, 7, 0]), rf"{FIRST}\[1\] = 7: must be a node from 0 to 2"),
    (graphs_of([0, 2, 3, 4], [1, 1, 2, 0]), rf"{FIRST}\[1\] = 1: .* after the one before"),
    (graphs_of([0, 1, 2], [1, 0]), r"^topology.graphs\[0\].bounds = 'int64\[3\]': must be int64\[4\]"),
    (own(drawn=lambda turn: None), r"^topology.drawn\(0\) = None: must be a peers.Graph"),
    (own(random=5), "^topology.random = 5: must be a whole number from 0 to 2"),
    by=lambda topology: plan_peers(
        "mean", "constant", num_clients=3, local_steps=1, until=Until(updates=6), topology=topology
    ),
)


def test_a_registered_topology_is_checked_and_warned_of_as_an_object_is(nothing_stays_registered):
    @register("topology", "apart")
    def apart():
        return graphs_of([0, 1, 2, 2], [1, 0])

    with pytest.warns(NotConnected, match="form 2 groups"):
        topologies.bind("apart", 3, 0)
