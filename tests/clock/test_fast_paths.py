"""Every fast path gives the schedule of the general definition, column by column, exactly."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.clock import (
    Conditions,
    Delays,
    Limits,
    Outcome,
    Scenario,
    Until,
    bind_delays,
    durations,
    fast_paths,
    plan,
)
from fedjax_async.clock.buffering import plan_buffer
from fedjax_async.clock.durations import DurationCache
from fedjax_async.clock.fast_paths import DurationTable, make_cache
from fedjax_async.clock.idle_clients import SUCCESSORS
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
    return [made(scenario, size, concurrency, sampling) for made in (fast, plan_buffer)]


@given(
    st.lists(st.lists(st.integers(1, 6), min_size=3, max_size=3), min_size=1, max_size=12),
    st.builds(Until, st.none() | st.integers(6, 30), st.integers(1, 60), st.none() | st.integers(1, 9)),
    st.integers(0, 9), st.none() | st.integers(0, 4), st.data(),
)  # fmt: skip
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
@pytest.mark.parametrize(("until", "clients", "size", "concurrency", "limit"), [
    # with many idle clients and few
    (Until(updates=2000), 5, 1, 1, None),
    (Until(updates=2000), 60, 1, 4, None),
    (Until(updates=2000), 2500, 1, 4, None),
    # one extension of the arrivals, and several
    (Until(updates=300), 40, 1, 40, 0),
    (Until(steps=40), 40, 3, 40, 2),
    (Until(time=9.0), 40, 5, 17, 20),
], ids=str)  # fmt: skip
def test_long_fast_buffers_are_the_general_ones(sampling, until, clients, size, concurrency, limit, monkeypatch):
    options = ("lognormal:heterogeneity=0.5", clients, size, concurrency, sampling, until, 0, limit)
    fast, general = both(*options)
    same(fast, general)
    assert limit is None or limit > 2 or (fast.outcome == Outcome.DROPPED_STALE).sum() > 60
    monkeypatch.setattr(fast_paths, "_CELLS", 1)  # durations from a cache in place of a table
    same(both(*options)[0], general)


def test_uploads_that_are_dropped_for_ever_are_said(monkeypatch):
    monkeypatch.setattr(fast_paths, "FRUITLESS", 4)
    world = {"num_clients": 30, "local_steps": 1, "until": Until(updates=900), "limits": Limits(max_staleness=0)}
    with pytest.raises(ValueError, match="jobs not one was applied"):
        plan("every", "constant", **world)


@pytest.mark.parametrize("sampling", SUCCESSORS)
def test_only_buffers_without_conditions_take_the_fast_path(sampling, monkeypatch):
    """Which of the two is used, and that ``plan`` gives the same schedule by both."""
    taken = []
    fast = fast_paths.buffer
    monkeypatch.setattr(fast_paths, "buffer", lambda *arguments: taken.append(1) or fast(*arguments))
    options = {"num_clients": 9, "local_steps": 2, "until": Until(updates=50)}
    buffers = [f"every:concurrency=4,sampling={sampling}", f"buffer:size=3,concurrency=4,sampling={sampling}"]
    for spec in (*buffers, "window:length=1", "cohort:size=3", "participation"):
        same(plan(spec, "lognormal", **options), plan(spec, "lognormal", availability="always", **options))
    assert len(taken) == len(buffers)


# --- durations drawn ahead ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.float32, np.int64, np.int32])
@pytest.mark.parametrize("sampling", ["uniform", "round_robin"])
def test_delays_of_ones_own_may_be_numbers_of_any_type(kind, sampling):
    """Few jobs of many clients, for which no table of durations is drawn ahead."""

    def model(kind):
        return lambda num_clients, seed: Delays(
            num_clients, lambda clients, numbers, *sizes: (60 + clients % 7 + numbers).astype(kind)
        )

    options = {"num_clients": 100, "local_steps": 1, "until": Until(updates=9)}
    timing = f"every:concurrency=4,sampling={sampling}"
    same(plan(timing, model(kind), **options), plan(timing, model(np.float64), **options))


def test_what_is_drawn_ahead_is_bounded(monkeypatch):
    monkeypatch.setattr(durations, "_ITEMS", 1 << 10)
    drawn = []

    def draw(clients, numbers):
        drawn.append(np.broadcast(clients, numbers).size)
        return np.ones((len(clients), numbers.shape[1]))

    many = DurationCache(draw, 100_000, lambda client: range(client, client + 100))
    for client in range(0, 100_000, 100):
        many.pop(client)
        assert len(many._ready) <= (2 << 10) + 100
    assert max(drawn) == 100
    DurationCache(draw, 10).pop(3)
    DurationTable(draw, 1000, 3000).pop(7)
    DurationTable(draw, 10, math.inf).pop(7)
    DurationTable(draw, fast_paths._CELLS // 5, math.inf).pop(7)
    assert drawn[-4:] == [640, 6000, 640, fast_paths._CELLS // 5 * 5]


@pytest.mark.parametrize(("items", "cells"), [(1, 1), (20, 1), (20, 70)])
def test_single_clients_and_arrays_of_them_pop_from_one_cache(items, cells, monkeypatch):
    monkeypatch.setattr(durations, "_ITEMS", items)
    monkeypatch.setattr(fast_paths, "_CELLS", cells)
    mine = make_cache(lambda clients, numbers: 1000.0 * clients + numbers + 1, 6, 100, lambda client: [client, 2, 4])
    taken = np.zeros(6)
    for some in [[1], [1], [0, 1, 2], [2], [2], [1, 2, 4], [4], [5], [0, 5]] * 5:
        found = [mine.pop(*some)] if len(some) == 1 else mine.pop_each(np.array(some))
        np.testing.assert_array_equal(found, 1000 * np.array(some) + taken[some] + 1)
        taken[some] += 1
