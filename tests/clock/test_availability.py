import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.base.notices import RunWarning
from fedjax_async.clock import AVAILABILITY, Availability, Until, plan
from fedjax_async.clock.availability import together
from fedjax_async.clock.scenario import models_of
from fedjax_async.peers import plan_peers

INF = math.inf
MODELS = [
    "always", "joins:share=0.4,by=50", "leaves:share=0.4,by=50", "periodic:on=5,off=3", "periodic:on=5,off=0",
    "periodic:on=0.1,off=0.2,phase=0.25", "sessions:on=5,off=3", "sessions:on=5,off=3,family=lognormal,spread=2",
]  # fmt: skip


def window_of(spec, num_clients=1000, seed=0):
    models = models_of("availability", AVAILABILITY, spec)
    return together([model(num_clients, seed, part).interval for model, part in models])


def stretches(window, client, end=100.0):
    """All online intervals that begin before ``end``."""
    found, time = [], 0.0
    while time < end:
        start, stop = window(client, time)
        if start == INF:
            break
        found.append((start, stop))
        time = stop
    return found


@pytest.mark.parametrize("spec", [*MODELS, "joins:share=0.5+periodic:on=4,off=1+sessions:on=9,off=1"])
@given(client=st.integers(0, 999), times=st.lists(st.floats(0, 300), min_size=1, max_size=6))
@settings(deadline=None, max_examples=25)
def test_a_stretch_holds_the_moment_or_is_the_next_whatever_was_asked_before(spec, client, times):
    asked_in_order = window_of(spec)
    for time in times:
        start, end = window_of(spec)(client, time)
        assert (start, end) == asked_in_order(client, time)
        assert start < end or start == end == INF
        assert end > time
        if start > time and start < INF:
            assert asked_in_order(client, start) == (start, end)
        for inside in (max(start, time), (max(start, time) + min(end, 1e6)) / 2):
            if start <= inside < end:
                assert asked_in_order(client, inside)[1] == end


@pytest.mark.parametrize("spec", MODELS)
def test_the_draws_of_a_client_are_its_own(spec):
    few, many = window_of(spec, num_clients=10), window_of(spec, num_clients=5000)
    assert [few(i, 20.0) for i in range(10)] == [many(i, 20.0) for i in range(10)]
    if "always" in spec or "phase" in spec or "off=0" in spec:
        return
    other = window_of(spec, seed=1)
    assert [many(i, 20.0) for i in range(100)] != [other(i, 20.0) for i in range(100)]
    twice = [model(100, 0, part) for model, part in models_of("availability", AVAILABILITY, f"{spec}+{spec}")]
    assert [twice[0].interval(i, 20.0) for i in range(100)] != [twice[1].interval(i, 20.0) for i in range(100)]


@pytest.mark.parametrize(("spec", "share"), [
    ("joins:share=0.4,by=50", lambda time: 1 - 0.4 * max(0, 1 - time / 50)),
    ("leaves:share=0.25,by=50", lambda time: 1 - 0.25 * min(1, time / 50)),
    ("periodic:on=5,off=3", lambda time: 5 / 8),
    ("sessions:on=5,off=3", lambda time: 5 / 8),
])  # fmt: skip
def test_the_share_of_the_clients_that_are_online(spec, share):
    window = window_of(spec, 1500)
    for time in (0.0, 12.5, 30.0, 50.0):
        there = np.mean([window(client, time)[0] <= time for client in range(1500)])
        assert abs(there - share(time)) <= 4 * math.sqrt(share(time) * (1 - share(time)) / 1500)


@pytest.mark.parametrize(("spec", "online"), [
    ("joins:share=1,at=7", [(7, INF)]),
    ("leaves:share=1,at=7", [(0, 7)]),
    ("leaves:share=1,at=0", []),
    ("periodic:on=5,off=3,phase=4", [(-4, 1), (4, 9), (12, 17)]),
])  # fmt: skip
def test_moments_that_are_given(spec, online):
    for client in (0, 3, 49):
        assert stretches(window_of(spec), client, 17) == online


def test_a_spread_that_sessions_cannot_have_is_said():
    """The family is exponential unless another one is given."""
    with pytest.warns(RunWarning, match="^availability: spread = 0.1 of sessions has no effect with family = 'expo"):
        window_of("sessions:on=600,off=300,spread=0.1")


@pytest.mark.slow
def test_sessions_have_their_means():
    window = window_of("sessions:on=5,off=3", 2000)
    rows = [stretches(window, i, 200.0) for i in range(2000)]
    on = np.concatenate([[end - start for start, end in row[1:]] for row in rows])
    off = np.concatenate([[b[0] - a[1] for a, b in itertools.pairwise(row)] for row in rows])
    assert abs(on.mean() - 5) < 4 * 5 / math.sqrt(len(on)) + 0.1  # the last one before 200 counts as a whole
    assert abs(off.mean() - 3) < 4 * 3 / math.sqrt(len(off)) + 0.1


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_sources_joined_are_there_when_all_are(data):
    rows = []
    for _ in range(data.draw(st.integers(2, 3))):
        cuts = data.draw(st.lists(st.integers(0, 40), min_size=2, max_size=8, unique=True).map(sorted))
        rows.append([(a, b) for a, b in zip(cuts[::2], cuts[1::2])])

    def source(row):
        return lambda client, time: next(((a, b) for a, b in row if time < b), (INF, INF))

    window = together([source(row) for row in rows])
    everywhere = [t for t in range(40) if all(any(a <= t < b for a, b in row) for row in rows)]
    found = [t for start, end in stretches(window, 0, 50.0) for t in range(int(max(start, 0)), int(end))]
    assert found == everywhere
    assert together([]) is None


# --- recorded traces ----------------------------------------------------------------------------


def test_a_trace_gives_each_client_its_stretches(tmp_path):
    (tmp_path / "trace.csv").write_text("client,start,end\n1,0,5\n0,2.5,4\n\n0,10,12\n1,5,6\n0,7,8\n")
    window = window_of(f"csv:path={tmp_path}/trace.csv", 2)
    assert stretches(window, 0) == [(2.5, 4), (7, 8), (10, 12)]
    assert stretches(window, 1) == [(0, 6)]  # touching intervals become one
    assert window(1, 6.0) == (INF, INF)


def test_a_trace_repeats(tmp_path):
    (tmp_path / "trace.csv").write_text("client,start,end\n0,0,2\n0,6,10\n1,3,4\n2,0,10\n")
    window = window_of(f"csv:path={tmp_path}/trace.csv,repeat=10", 3)
    assert stretches(window, 0, 30) == [(0, 2), (6, 12), (16, 22), (26, 32)]
    assert stretches(window, 1, 24) == [(3, 4), (13, 14), (23, 24)]
    assert window(2, 25.0)[1] == INF


@pytest.mark.parametrize(("found", "says"), [
    (Availability(lambda client, time: (0.0, 3.0)), r"interval\(0, 3.*= \(0.0, 3.0\): must be \(start, end\)"),
    (Availability(lambda client, time: (time, math.nan)), r"interval\(0, 0\) = \(0.0, nan\): must be"),
    (Availability(lambda client, time: (0.0, math.inf), "finsh"), "leaving = 'finsh': must be one of finish"),
])  # fmt: skip
@pytest.mark.parametrize("nodes", [False, True])
def test_wrong_intervals_of_a_model_of_ones_own_are_refused(found, says, nodes):
    """An interval that has passed made a client online for good, and nodes search for the next one without end."""
    world = {"num_clients": 2, "local_steps": 1, "until": Until(time=9), "availability": lambda n, seed, part: found}
    with pytest.raises(ValueError, match=f"^availability's {says}"):
        plan_peers("mean", "constant", topology="ring", **world) if nodes else plan("every", "constant", **world)
