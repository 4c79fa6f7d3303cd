from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.clock import Until, allocate, plan, waves
from tests.clock.textbook import traces


def replay(schedule, bounds, slots, personal):
    """Run the engine's reads and writes on simulated registers; check that each job reads its message."""
    registers = [None] * slots.count
    begins = set(bounds[:-1].tolist())
    width = dict(zip(bounds[:-1].tolist(), np.diff(bounds).tolist()))
    version = 0
    for p in range(len(schedule.job) + 1):
        if p > 0:
            version += int(schedule.closes[p - 1])
        for m in range(slots.write_bounds[p], slots.write_bounds[p + 1]):
            registers[slots.write_slot[m]] = (version, int(slots.write_client[m]) if personal else None)
        if p in begins:
            for job in schedule.job[p : p + width[p]]:
                expected = (schedule.version[job], schedule.client[job] if personal else None)
                assert registers[slots.start_slot[job]] == expected


def most_live_at_once(schedule, bounds, personal):
    """Count, at every position, the messages written and not yet read for the last time."""
    sent = enumerate(schedule.dispatched_after) if personal else []  # also to jobs that never arrive
    life = {job: (position, position) for job, position in sent}
    for v in range(len(bounds) - 1):
        for job in schedule.job[bounds[v] : bounds[v + 1]]:
            message = job if personal else schedule.version[job]
            low, high = life.get(message, (10**9, -1))
            life[message] = (min(low, schedule.dispatched_after[job]), max(high, bounds[v]))
    return max(sum(low <= p <= high for low, high in life.values()) for p in range(len(schedule.job) + 1))


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


@pytest.mark.parametrize("cap", [None, 1, 5])
@pytest.mark.parametrize("personal", [False, True])
@pytest.mark.parametrize("delays", ["constant", "lognormal:heterogeneity=1", "exponential"])
@pytest.mark.parametrize("timing", ["every", "every:concurrency=8", "buffer:size=5", "window:length=1"])
def test_asynchronous_schedules_need_no_more_slots_than_jobs_in_flight(timing, delays, personal, cap):
    s = plan(timing, delays, num_clients=20, local_steps=1, until=Until(updates=300))
    bounds = waves(s, cap)
    slots = allocate(s, bounds, personal)
    replay(s, bounds, slots, personal)
    in_flight = 8 if "concurrency" in timing else 20
    assert slots.count <= in_flight + (not personal)


@pytest.mark.parametrize("cap", [None, 1, 4])
def test_synchronous_schedules_need_one_slot(cap):
    for timing in ("cohort:size=6", "cohort:size=6,over_selection=3", "window:length=1000"):
        s = plan(timing, "lognormal", num_clients=20, local_steps=1, until=Until(steps=12))
        bounds = waves(s, cap)
        slots = allocate(s, bounds, personal=False)
        replay(s, bounds, slots, False)
        assert slots.count == 1
    personal = allocate(s, bounds, personal=True)
    assert personal.count == 20
