"""Waves, runs and slots of decentralised plans; coefficients and masses against facts that must hold."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from fedjax_async.clock import Until
from fedjax_async.peers import masses, peer_runs, peer_slots, peer_waves, plan_peers, topologies
from fedjax_async.peers.swift import communication_coefficients
from tests.peers.slow_peers import coefficients_by_hand

EXCHANGES = ["push_sum", "mean:aggregate_at=end", "swift", "divshare", "dpsgd", "epidemic", "sgp", "overlap", "alone"]


def needs(plan):
    """For each event, the events that it needs."""
    last, out = {}, []
    for event, node in enumerate(plan.client.tolist()):
        out.append(plan.source[plan.inbox_bounds[event] : plan.inbox_bounds[event + 1]].tolist())
        out[-1] += [last[node]] if node in last else []
        last[node] = event
    return out


def a_plan(exchange="push_sum", topology="ring", nodes=9, time=8, **options):
    options = {"delays": "lognormal:heterogeneity=0.5", "seed": 1, **options}
    return plan_peers(exchange, num_clients=nodes, local_steps=2, until=Until(time=time), topology=topology, **options)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("cuts", [None, [0.0, 2.0, 2.0, 5.5, 8.0], [3.0]])
def test_a_wave_is_a_level_and_a_run_is_contiguous(exchange, cuts):
    plan = a_plan(exchange)
    moments = np.array([] if cuts is None else cuts)
    stretch = [int(sum(end > moment for moment in moments)) for end in plan.end]
    level = []
    for event, needed in enumerate(needs(plan)):
        level.append(1 + max((level[s] for s in needed if stretch[s] == stretch[event]), default=-1))
    names = sorted(set(zip(stretch, level)))
    expected = [names.index(name) for name in zip(stretch, level)]
    np.testing.assert_array_equal(peer_waves(plan, cuts and moments), expected)
    runs = peer_runs(plan, cuts and moments)
    order = np.lexsort((np.arange(len(runs)), stretch))
    assert (np.diff(runs[order]) >= 0).all() and runs.max() >= max(expected)
    for event, needed in enumerate(needs(plan)):
        assert all(runs[source] < runs[event] for source in needed)
    assert np.bincount(peer_runs(plan, max_width=2)).max() <= 2


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_no_message_is_overwritten_before_its_last_reader(exchange):
    plan = a_plan(exchange)
    for wave in (peer_waves(plan), peer_runs(plan)):
        widths = np.bincount(wave)
        done = np.cumsum(widths)
        count, slot = peer_slots(plan, written=done[wave], read=(done - widths)[wave])
        held, most = {}, 0
        for k in range(len(widths)):
            for event in np.flatnonzero(wave == k):
                for d in range(plan.inbox_bounds[event], plan.inbox_bounds[event + 1]):
                    message = (plan.source[d], plan.fragment[d])
                    assert held[slot[message]] == message
            for event in np.flatnonzero(wave == k):
                held |= {slot[event, f]: (event, f) for f in range(plan.fragments) if slot[event, f] >= 0}
            most = max(most, len(held))
        assert most == count


@profile(max_examples=40)
@given(st.integers(2, 9), st.floats(0.2, 1.0), st.integers(0, 10**6))
def test_swift_coefficients_are_those_of_nodes_that_talk(nodes, p, seed):
    graph = topologies.from_networkx(nx.gnp_random_graph(nodes, p, seed), nodes)
    by_hand = coefficients_by_hand(graph)
    found = communication_coefficients(graph)
    for edge, (i, j) in enumerate(zip(graph.senders.tolist(), graph.receivers.tolist())):
        assert found[edge] == pytest.approx(by_hand[i][j], rel=1e-12)
    assert (np.bincount(graph.senders, found, nodes) < 1 + 1e-12).all()


def mixed(plan, values):
    """Every node's scalar after each event, with learning rate 0: float64[E]; and the scalars at the end."""
    values, sent = np.array(values, np.float64), np.zeros(len(plan.client))
    for event, node in enumerate(plan.client.tolist()):
        entries = slice(plan.inbox_bounds[event], plan.inbox_bounds[event + 1])
        old = values[node]
        values[node] = old + (plan.weight[entries] * (sent[plan.source[entries]] - old)).sum()
        sent[event] = values[node]
    return sent, values


@pytest.mark.parametrize("policy", ["merge", "carry"])
@pytest.mark.parametrize("topology", ["ring:directed=true", "exponential:one_peer=true", "star", "gossip:receivers=2"])
def test_without_learning_all_nodes_agree(policy, topology):
    plan = a_plan(f"push_sum:policy={policy},capacity=2", topology, nodes=6, time=150)
    start = np.arange(6.0)
    values = mixed(plan, start)[1]
    np.testing.assert_allclose(values, values[0], atol=1e-6)
    np.testing.assert_allclose(sum(masses(plan, np.linspace(0, 150, 7))), 6, rtol=1e-12)
    for wrong in ((plan, [-1.0]), (plan, 3.0), (plan, ["a"]), (None, [1.0])):
        with pytest.raises(ValueError, match=r"^(times|schedule) = .*: must be"):
            masses(*wrong)
    if policy == "merge":  # the mass-weighted mean never moves
        np.testing.assert_allclose(values, start.mean(), atol=1e-6)


@pytest.mark.parametrize("topology", ["ring", "torus", "small_world"])
def test_metropolis_weights_keep_the_mean(topology):
    plan = a_plan("dpsgd", topology, nodes=9, time=400, delays="constant")
    start = np.arange(9.0) ** 2
    values = mixed(plan, start)[1]
    np.testing.assert_allclose(values, start.mean(), rtol=1e-6)
