"""Waves, runs and slots of decentralised plans; coefficients and masses against facts that must hold."""

from __future__ import annotations

import math

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from fedjax_async import Settings, named
from fedjax_async.clock import Until
from fedjax_async.config import prepare
from fedjax_async.peers import connecting_window, masses, peer_runs, peer_slots, peer_waves, plan_peers, topologies
from fedjax_async.peers.checking import check_peer_schedule
from fedjax_async.peers.exchanges import EXCHANGES as REGISTERED
from fedjax_async.peers.exchanges import mean
from fedjax_async.peers.schedule import Delivery
from fedjax_async.peers.statistics import mass_after_mixing
from fedjax_async.peers.swift import communication_coefficients
from tests.peers.slow_peers import coefficients_by_hand
from tests.refusals import refusals

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
    assert all(runs[source] < runs[event] for event, needed in enumerate(needs(plan)) for source in needed)
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
    """Every node's scalar at the end, with learning rate 0."""
    values, sent = np.array(values, np.float64), np.zeros(len(plan.client))
    for event, node in enumerate(plan.client.tolist()):
        entries = slice(plan.inbox_bounds[event], plan.inbox_bounds[event + 1])
        old = values[node]
        values[node] = old + (plan.weight[entries] * (sent[plan.source[entries]] - old)).sum()
        sent[event] = values[node]
    return values


@pytest.mark.parametrize("policy", ["merge", "carry"])
@pytest.mark.parametrize("topology", ["ring:directed=true", "exponential:one_peer=true", "star", "gossip:receivers=2"])
def test_without_learning_all_nodes_agree(policy, topology):
    plan = a_plan(f"push_sum:policy={policy},capacity=2", topology, nodes=6, time=150)
    start = np.arange(6.0)
    values = mixed(plan, start)
    np.testing.assert_allclose(values, values[0], atol=1e-6)
    np.testing.assert_allclose(sum(masses(plan, np.linspace(0, 150, 7))), 6, rtol=1e-12)
    if policy == "merge":  # the mass-weighted mean never moves
        np.testing.assert_allclose(values, start.mean(), atol=1e-6)


test_masses_have_a_plan_and_times = refusals(
    *((a_plan(), times, "^times = .*: must be") for times in ([-1.0], 3.0, ["a"])),
    (None, [1.0], "^schedule = .*: must be"),
    by=masses,
)


@pytest.mark.parametrize("topology", ["ring", "torus", "small_world"])
def test_metropolis_weights_keep_the_mean(topology):
    plan = a_plan("dpsgd", topology, nodes=9, time=400, delays="constant")
    start = np.arange(9.0) ** 2
    values = mixed(plan, start)
    np.testing.assert_allclose(values, start.mean(), rtol=1e-6)


# --- plans of the user's own, and statistics ------------------------------------------------------------


@pytest.mark.parametrize("exchange", REGISTERED)
def test_plans_of_the_package_have_no_contradictions(exchange):
    conditions = {"availability": "sessions:on=4,off=1", "faults": "drop", "network": "link:latency=0.2,jitter=1"}
    plan = a_plan(exchange, nodes=5, time=9, delays="exponential", **conditions)
    assert check_peer_schedule(plan) is plan


def changed(column, change):
    """An exchange of the user's own, with a column of its plan changed."""

    def own(setup):
        plan = mean()(setup)
        return plan._replace(**{column: change(getattr(plan, column))})

    return own


test_a_plan_with_contradictions_is_refused = refusals(
    ("weight", lambda weight: 5 * weight, r"weight\[0\] = 1.66.*: must be at most 1 in sum"),
    ("weight", lambda weight: -weight, r"weight\[0\] = -0.3.*: must be a finite number >= 0"),
    ("weight", list, "weight = 'list': must be an array float64"),
    ("source", lambda source: source + 15, r"source\[0\] = .*: must be an event before the one that reads it"),
    ("source", lambda source: 0 * source, r"source\[0\] = 0: must be an event whose message has come to the node"),
    ("receiver", lambda receiver: receiver + 7, r"receiver\[0\] = 8: must be from 0 to 3"),
    ("number", np.zeros_like, r"number\[4\] = 0: must be the count of the node's events before"),
    ("local_steps", np.zeros_like, r"local_steps\[0\] = 0: must be at least 1"),
    ("end", np.zeros_like, r"end\[0\] = 0.0: must be finite, and after the start"),
    (
        "inbox_bounds",
        lambda bounds: 2 * bounds,
        r"^exchange: must lead to a plan without contradictions: schedule.inbox_bounds\[.*: must be ascending, from 0",
    ),
    by=lambda *change: prepare(Settings(
        dataset="synthetic", model="logistic", clients=4, steps=1, delay="constant", updates=20, topology="ring",
        method="async_dfedavg", exchange=named("own", changed(*change)),
    )),
)  # fmt: skip


def constant(exchange="mean", updates=36, **options):
    options = {"topology": "ring", "delays": "constant:mean=10"} | options
    return plan_peers(exchange, num_clients=3, local_steps=1, until=Until(updates=updates), seed=1, **options)


def test_an_exchange_that_returns_no_plan_is_refused():
    with pytest.raises(ValueError, match=r"^exchange = None: must be an exchange, exchange\(setup\) -> peers.PeerS"):
        constant(lambda setup: None)


def test_corrupt_messages_do_not_connect_nodes():
    assert connecting_window(constant()) == 10  # all nodes push to both neighbours every 10 s
    assert connecting_window(constant(faults="corrupt:probability=1")) == math.inf
    often = constant(faults="corrupt:probability=0.7")
    lost = often._replace(outcome=np.where(often.corrupt, Delivery.LOST, often.outcome))
    assert 10 < connecting_window(often) == connecting_window(lost) < math.inf


@pytest.mark.parametrize("reference", ["paper", "baseline"])
def test_the_mass_after_mixing_counts_the_parts_of_receivers_that_are_offline(reference):
    """SGP divides its steps by this mass. The authors' code divides it by all four neighbours and the node."""
    how = {"delays": "exponential:mean=1", "availability": "sessions:on=2,off=1"}
    s = a_plan(f"push_sum:reference={reference}", "complete", nodes=5, **how)
    receivers = np.bincount(s.push_event, minlength=len(s.client))
    parts = 5 if reference == "baseline" else receivers + 1
    np.testing.assert_allclose(mass_after_mixing(s), s.mass * parts, rtol=1e-12)
    assert receivers.min() < 4
