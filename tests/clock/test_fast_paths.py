"""Every fast path gives the schedule of the general definition, column by column, exactly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.clock import (
    SUCCESSORS,
    Conditions,
    Limits,
    Outcome,
    Scenario,
    Until,
    bind_delays,
    buffering,
    fast_paths,
    plan,
)
from tests.clock.textbook import check_invariants, same, table_of

# ties, and none
DELAYS = ["constant", "constant:mean=0.1", "constant:heterogeneity=1", "exponential", "lognormal:heterogeneity=0.5"]


def both(delays, num_clients, size, concurrency, sampling, until, seed=0, max_staleness=None):
    """The schedule by the fast path and by the definition."""
    steps = np.arange(1, num_clients + 1)
    bound = bind_delays(delays, num_clients, seed)
    scenario = Scenario(num_clients, steps, bound, until, seed)
    fast = fast_paths.buffer
    if max_staleness is not None:
        scenario = scenario._replace(conditions=Conditions((), (), Limits(max_staleness)))
        fast = fast_paths.buffer_of_fresh
    return [made(scenario, size, concurrency, sampling) for made in (fast, buffering.plan_buffer)]


@given(
    st.lists(st.lists(st.integers(1, 6), min_size=3, max_size=3), min_size=1, max_size=12),
    st.builds(
        Until, time=st.none() | st.integers(6, 30), updates=st.integers(1, 60), steps=st.none() | st.integers(1, 9)
    ),
    st.integers(0, 9),
    st.none() | st.integers(0, 4),
    st.data(),
)
@settings(max_examples=300)
def test_a_fast_buffer_is_the_general_one(rows, until, seed, max_staleness, data):
    concurrency = data.draw(st.integers(1, len(rows)))
    size = data.draw(st.integers(1, concurrency))
    sampling = data.draw(st.sampled_from(list(SUCCESSORS)))
    # in tenths, sums of equal durations differ by rounding
    scale = data.draw(st.sampled_from([1, 0.1]))
    table = table_of(*[[scale * seconds for seconds in row] for row in rows])
    delays = data.draw(st.sampled_from([table, table, *DELAYS]))
    fast, general = both(delays, len(rows), size, concurrency, sampling, until, seed, max_staleness)
    same(fast, general)
    check_invariants(fast)


@pytest.mark.parametrize("sampling", SUCCESSORS)
@pytest.mark.parametrize("until", [Until(updates=300), Until(steps=40), Until(time=9.0)], ids=str)
def test_a_fast_buffer_of_fresh_uploads_is_the_general_one(sampling, until):
    dropped = set()
    for limit in (0, 2, 20):
        for size, concurrency in ((1, 40), (3, 40), (1, 17), (5, 17)):
            options = {"seed": limit, "max_staleness": limit}
            fast, general = both("lognormal:heterogeneity=0.5", 40, size, concurrency, sampling, until, **options)
            same(fast, general)
            dropped.add(int((fast.outcome == Outcome.DROPPED_STALE).sum()))
    assert max(dropped) > 300 and min(dropped) < 60  # several extensions of the arrivals, and one


def test_uploads_that_are_dropped_for_ever_are_said(monkeypatch):
    monkeypatch.setattr(fast_paths, "FRUITLESS", 4)
    with pytest.raises(ValueError, match="jobs not one was applied"):
        plan(
            "every", "constant", num_clients=30, local_steps=1, until=Until(updates=900), limits=Limits(max_staleness=0)
        )


@pytest.mark.parametrize("clients", [5, 60, 2500])
@pytest.mark.parametrize("sampling", ["uniform", "round_robin"])
def test_draws_known_in_advance_change_nothing(clients, sampling, monkeypatch):
    """With many idle clients and few; durations from a table or from a cache."""
    for concurrency in (1, 4):
        options = (clients, 1, concurrency, sampling, Until(updates=4000))
        general = both("exponential", *options)[1]
        for cells in (1 << 19, 1):
            monkeypatch.setattr(fast_paths, "_CELLS", cells)
            same(both("exponential", *options)[0], general)


@pytest.mark.parametrize("sampling", SUCCESSORS)
def test_only_buffers_without_conditions_take_the_fast_path(sampling, monkeypatch):
    """Which of the two is used, and that ``plan`` gives the same schedule by both."""
    taken = []
    fast = fast_paths.buffer
    monkeypatch.setattr(fast_paths, "buffer", lambda *arguments: taken.append(1) or fast(*arguments))
    options = {"num_clients": 9, "local_steps": 2, "until": Until(updates=50)}
    for spec in (f"every:concurrency=4,sampling={sampling}", f"buffer:size=3,concurrency=4,sampling={sampling}"):
        same(plan(spec, "lognormal", **options), plan(spec, "lognormal", availability="always", **options))
    assert len(taken) == 2
    for spec in ("window:length=1", "cohort:size=3", "participation"):
        same(plan(spec, "lognormal", **options), plan(spec, "lognormal", availability="always", **options))
    assert len(taken) == 2
