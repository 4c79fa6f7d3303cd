import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.clock import Limits, Outcome, Until, allocate, longest_chain, plan, wave_statistics, waves
from tests.clock.textbook import fewest_stabbing_points, most_live_at_once, replay, traces


@given(traces())
@settings(deadline=None, max_examples=150)
def test_waves_are_as_few_as_any_batching_can_be(schedule):
    intervals = [(int(schedule.dispatched_after[j]), e) for e, j in enumerate(schedule.job)]
    bounds = waves(schedule)
    assert bounds[0] == 0
    assert bounds[-1] == len(schedule.job)
    assert (np.diff(bounds) > 0).all()
    assert len(bounds) - 1 == fewest_stabbing_points(intervals)
    assert len(bounds) - 1 == longest_chain(schedule)


@given(traces(30), st.integers(1, 6))
@settings(deadline=None, max_examples=100)
def test_jobs_are_dispatched_before_the_wave_that_trains_them(schedule, cap):
    for max_width in (None, cap, 10**6):
        bounds = waves(schedule, max_width)
        for begin, end in itertools.pairwise(bounds):
            assert (schedule.dispatched_after[schedule.job[begin:end]] <= begin).all()
            assert end - begin <= (max_width or len(schedule.job))
    np.testing.assert_array_equal(waves(schedule, 1), np.arange(len(schedule.job) + 1))
    np.testing.assert_array_equal(waves(schedule, 10**6), waves(schedule))


def test_equal_delays_fill_every_wave():
    s = plan("every", "constant", num_clients=20, local_steps=1, until=Until(updates=400))
    statistics = wave_statistics(s)
    assert statistics.mean_width == statistics.mean_in_flight == 20
    assert statistics.share == 1
    assert wave_statistics(s, waves(s, 7)).max_width == 7


def test_dropped_uploads_are_not_in_flight():
    late = {"faults": "late:probability=0.3,factor=4", "limits": Limits(timeout=2.0, late="drop")}
    s = plan("every:concurrency=5", "exponential", num_clients=8, local_steps=1, until=Until(updates=300), **late)
    assert np.isfinite(s.upload_time[s.outcome == Outcome.DROPPED_LATE]).sum() > 50
    assert 1 < wave_statistics(s).mean_in_flight <= 5


def test_a_cap_of_zero_is_refused():
    s = plan("every", "constant", num_clients=2, local_steps=1, until=Until(updates=4))
    with pytest.raises(ValueError, match="max_width = 0"):
        waves(s, 0)


# --- slots --------------------------------------------------------------------------------------


@given(traces(25), st.booleans(), st.sampled_from([None, 1, 2, 3]))
@settings(deadline=None, max_examples=200)
def test_every_job_reads_the_message_it_was_sent(schedule, personal, cap):
    bounds = waves(schedule, cap)
    slots = allocate(schedule, bounds, personal)
    replay(schedule, bounds, slots, personal)
    assert slots.count == most_live_at_once(schedule, bounds, personal)
    never = np.setdiff1d(np.arange(len(schedule.client)), schedule.job)
    assert (slots.start_slot[never] == -1).all()
    assert len(slots.write_bounds) == len(schedule.job) + 2
    messages = len(schedule.client) if personal else len(np.unique(schedule.version[schedule.job]))
    assert slots.write_bounds[-1] == messages == len(slots.write_slot) == len(slots.write_client)
    assert slots.start_slot.dtype == slots.write_slot.dtype == slots.write_client.dtype == np.int32
    assert slots.write_bounds.dtype == np.int64
