"""Plans of decentralised runs against the definition, which plays one event at a time (``slow_peers.py``)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from fedjax_async.clock import Until
from fedjax_async.clock import delays as delay_models
from fedjax_async.clock import network as networks
from fedjax_async.clock import scenario as scenarios
from fedjax_async.clock.scenario import NO_LIMITS, Scenario
from fedjax_async.peers import plan_peers, topologies
from fedjax_async.peers.planning import _message_faults
from fedjax_async.peers.schedule import PeerScenario
from fedjax_async.peers.statistics import readers
from tests.peers.slow_peers import here_from_the_start, plan_slowly

DELAYS = ["constant", "constant:mean=0.5,reference_steps=1", "lognormal:heterogeneity=0.5", "exponential"]
STEPS = np.array([1, 2, 3, 4, 1, 2, 6])  # of the nodes: they often end at the same moments, but not always
TOPOLOGIES = [
    "gossip:receivers=2", "gossip", "ring", "ring:directed=true", "exponential:one_peer=true", "star",
    "random_regular:degree=1,redraw=true",
]  # fmt: skip
UNTIL = [Until(time=6), Until(updates=31), Until(time=5, updates=29)]
ABSENCES = [
    None, "joins:share=0.4,by=4", "joins:share=0.4,at=2", "leaves:share=0.4,by=5", "sessions:on=3,off=1",
    "sessions:on=3,off=1,leaving=lose", "periodic:on=2,off=0.5,leaving=pause",
]  # fmt: skip
FAULTS = [None, "drop:probability=0.2", "crash:probability=0.2,restart=0.5", "corrupt+late:extra=1"]
NETWORKS = [None, "link:latency=0.25", "link:up=8,latency=0.1,jitter=1", "link:up=16,jitter=0.5,shared=true"]


def worlds(**given_settings):
    return st.fixed_dictionaries(
        {
            "delays": st.sampled_from(DELAYS),
            "topology": st.sampled_from(TOPOLOGIES),
            "until": st.sampled_from(UNTIL),
            "availability": st.sampled_from(ABSENCES),
            "faults": st.sampled_from(FAULTS),
            "network": st.sampled_from(NETWORKS),
            "num_clients": st.integers(2, 7),
            "seed": st.integers(0, 1000),
            **given_settings,
        }
    ).filter(lambda world: fits(world["topology"], world["num_clients"]))


def fits(topology, nodes):
    return nodes > 2 if topology == "gossip:receivers=2" else nodes % 2 == 0 or "degree=1" not in topology


def world_of(delays, num_clients, until, seed, topology, availability, faults, network, message_bytes=4):
    conditions = scenarios.bind(availability, faults, NO_LIMITS, num_clients, seed)
    bound = delay_models.bind(delays, num_clients, seed)
    scenario = Scenario(num_clients, STEPS[:num_clients], bound, until, seed, 0, message_bytes, conditions)
    linked = None if network is None else networks.bind(network, num_clients, seed)
    graph = topologies.bind(topology, num_clients, seed)
    return PeerScenario(scenario, graph, message_bytes, linked, _message_faults(faults, scenario))


def spec_of(name, options):
    return f"{name}:" + ",".join(f"{key}={str(value).lower()}" for key, value in options.items())


def check_equal(settings, spec, kind, **options):
    slow, account = plan_slowly(world_of(**settings), kind, **options)
    given = {"local_steps": STEPS[: settings["num_clients"]], "message_bytes": 4, **settings}
    if not slow["client"]:
        with pytest.raises(ValueError, match="no compute event"):
            plan_peers(spec, **given)
        return account
    plan = plan_peers(spec, **given)
    for name, expected in slow.items():
        rtol = 1e-12 if name in ("mass", "unsent_mass", "sent_mass", "weight") else 0
        np.testing.assert_allclose(getattr(plan, name), expected, rtol=rtol, err_msg=name)
    return account


@given(
    worlds(),
    st.sampled_from(["discard", "carry", "merge"]),
    st.sampled_from([1, 2, 3, None]),
    st.booleans(),
    st.sampled_from(["start", "end"]),
    st.sampled_from(["paper", "released", "baseline"]),
    st.sampled_from([0, 1]),
)
def test_push_sum_is_its_definition(settings, policy, capacity, newest, aggregate_at, reference, late_mass):
    options = {"policy": policy, "capacity": capacity, "newest": newest}
    options |= {"aggregate_at": aggregate_at, "reference": reference, "late_mass": late_mass}
    spec = spec_of("push_sum", options)
    accounts = check_equal(settings, spec, "push_sum", **options)
    first = sum(1 if early else late_mass for early in here_from_the_start(world_of(**settings).scenario))
    for _, account in accounts:  # after every event of the run
        assert sum(account) == pytest.approx(first, rel=1e-12, abs=1e-12)
        assert account[-1] == 0 or policy == "discard" or settings["availability"] or settings["faults"]


@profile(max_examples=25)
@given(worlds(), st.booleans(), st.sampled_from([1, 3, None]), st.sampled_from(["start", "end"]))
def test_mean_and_alone_are_their_definition(settings, newest, capacity, aggregate_at):
    options = {"newest": newest, "capacity": capacity, "aggregate_at": aggregate_at}
    check_equal(settings, spec_of("mean", options), "mean", **options)
    check_equal(settings, f"alone:aggregate_at={aggregate_at}", "alone", aggregate_at=aggregate_at)


@profile(max_examples=25)
@given(worlds(topology=st.sampled_from(["ring", "star", "complete", "small_world:neighbours=2"])), st.integers(1, 3))
def test_swift_is_its_definition(settings, every):
    check_equal(settings, f"swift:every={every}", "swift", every=every)


@profile(max_examples=25)
@given(worlds(), st.sampled_from([1, 3, 16]), st.integers(1, 3), st.sampled_from(["start", "end"]))
def test_kept_mean_is_its_definition(settings, capacity, times, aggregate_at):
    options = {"capacity": capacity, "times": times, "aggregate_at": aggregate_at}
    check_equal(settings, spec_of("kept_mean", options), "kept_mean", newest=False, **options)


def test_kept_mean_mixes_no_message_of_the_future_where_nodes_times_events_exceed_32_bits():
    plan = plan_peers(
        "kept_mean:capacity=1", "lognormal:mean=10,sigma=0.5", num_clients=50_000, local_steps=1,
        until=Until(updates=50_000), topology="ring",
    )  # fmt: skip
    assert (plan.source < readers(plan)).all() and len(plan.source) > 1000


@profile(max_examples=25)
@given(worlds(topology=st.sampled_from(["gossip:receivers=2", "ring"])))
def test_divshare_is_its_definition(settings):
    check_equal(settings, "divshare:omega=0.4", "divshare", omega=0.4)


def test_nodes_that_all_join_very_late_are_planned_as_soon_as_others():
    """Up to twice that time, they would have 10^12 events."""
    world = {"num_clients": 3, "local_steps": 1, "until": Until(updates=9), "topology": "complete"}
    late, early = (plan_peers("mean", "constant", availability=f"joins:share=1,at={at}", **world) for at in (2**40, 0))
    np.testing.assert_array_equal(late.end - 2**40, early.end)
    np.testing.assert_array_equal(late.source, early.source)


def test_a_time_in_which_nobody_is_online_is_no_round():
    """The nodes are online from 0 to 25 s and from 45 to 70 s: the messages of the last round before wait till then."""
    common = {"num_clients": 3, "local_steps": 1, "topology": "ring"}
    plan = plan_peers(
        "dpsgd", "constant:mean=10", until=Until(time=75), availability="periodic:on=25,off=20,phase=0", **common
    )
    assert np.unique(plan.start).tolist() == [0, 10, 20, 45, 55, 65]
    without = plan_peers("dpsgd", "constant:mean=10", until=Until(updates=18), **common)
    np.testing.assert_array_equal(plan.weight, without.weight)
    np.testing.assert_allclose(plan.weight, 1 / 3)
    np.testing.assert_array_equal(plan.source, without.source)


def test_a_message_that_comes_too_late_for_its_round_is_not_averaged():
    """Nodes crash: those that were not in a round find messages of earlier rounds when they are back."""
    plan = plan_peers(
        "epidemic", "lognormal:mean=10,heterogeneity=0.3", num_clients=6, local_steps=1, until=Until(updates=60),
        topology="gossip:receivers=3", faults="crash:probability=0.3,restart=12", seed=2,
    )  # fmt: skip
    turn = np.searchsorted(np.unique(plan.start), plan.start)
    late = 0
    for event in range(len(plan.client)):
        entries = slice(plan.inbox_bounds[event], plan.inbox_bounds[event + 1])
        in_time = turn[plan.source[entries]] == turn[event] - 1
        late += int((~in_time).sum())
        np.testing.assert_allclose(plan.weight[entries], in_time / (1 + in_time.sum()))
    assert late > 0 and plan.weight.max() > 0.3


def test_graphs_take_turns_by_rounds_in_which_nodes_train():
    """The exponential graph of one peer: hops of 1 and 2 take turns, whatever the time between two rounds."""
    common = {"num_clients": 4, "local_steps": 1, "topology": "exponential:one_peer=true"}
    online = "periodic:on=10,off=20,phase=0"
    plan = plan_peers("sgp", "constant:mean=10", until=Until(time=100), availability=online, **common)
    without = plan_peers("sgp", "constant:mean=10", until=Until(updates=16), **common)
    assert np.unique(plan.start).tolist() == [0, 30, 60, 90]
    np.testing.assert_array_equal(plan.receiver, without.receiver)
