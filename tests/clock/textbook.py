"""Slow and obvious versions of what the clock does fast; they share no code with it but the delays."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import strategies as st

from fedjax_async.clock import Delays, Outcome, Until, check_schedule, fault_counts, plan
from fedjax_async.types import Schedule

N = 7
TIMING_SPECS = [
    "every", "every:concurrency=3,sampling=same", "every:concurrency=3,sampling=uniform",
    "every:concurrency=3,sampling=round_robin", "buffer:size=4", "buffer:size=2,concurrency=5", "fresh:size=2",
    "fresh:threshold=3,stop=false,concurrency=5", "fresh:threshold=4,sampling=round_robin,concurrency=4",
    "window:length=0.7", "window:length=1,concurrency=4,sampling=round_robin", "cohort:size=4",
    "cohort:size=3,over_selection=2,deadline=2", "participation:length=0.3",
    "participation:probability=0.5,spread=0.8,length=0.4",
]  # fmt: skip


def make(timing, delays="lognormal", updates=60, time=None, **options):
    """A plan of N clients that take five steps."""
    options = {"num_clients": N, "local_steps": 5, "until": Until(updates=updates, time=time)} | options
    return plan(timing, delays, **options)


def same(one, other, names=None):
    """Assert that two schedules have equal columns of equal types."""
    for name in names or one._fields:
        mine, theirs = np.asarray(getattr(one, name)), np.asarray(getattr(other, name))
        np.testing.assert_array_equal(mine, theirs, err_msg=name)
        assert mine.dtype == theirs.dtype, name


def table_of(*rows):
    """Delays written out: row i holds the durations of client i's jobs."""
    table = np.array(rows, np.float64)

    def durations(clients, numbers, local_steps=1, bytes_down=0, bytes_up=0):
        return table[clients, np.minimum(numbers, table.shape[1] - 1)]

    return lambda num_clients, seed: Delays(num_clients, durations)


def check_invariants(schedule: Schedule) -> None:
    """Check what holds for every schedule of every policy."""
    assert check_schedule(schedule) == schedule  # nothing to fill in, nothing to refuse
    jobs, arrivals = len(schedule.client), len(schedule.job)
    assert {schedule.client.dtype, schedule.number.dtype, schedule.local_steps.dtype} == {np.dtype(np.int32)}
    assert {schedule.dispatch_time.dtype, schedule.upload_time.dtype, schedule.time.dtype} == {np.dtype(np.float64)}
    assert schedule.closes.dtype == np.bool_
    for column in (schedule.dispatched_after, schedule.version, schedule.job, schedule.step):
        assert column.dtype == np.int64
    assert len(set(map(len, (schedule.job, schedule.time, schedule.closes, schedule.step)))) == 1
    assert len(np.unique(schedule.job)) == arrivals
    assert (np.diff(schedule.time) >= 0).all()
    assert (np.diff(schedule.dispatch_time) >= 0).all()
    assert (np.diff(schedule.dispatched_after) >= 0).all()
    assert (schedule.upload_time > schedule.dispatch_time).all()
    assert (schedule.upload_time[schedule.job] <= schedule.time).all()
    assert (schedule.dispatched_after[schedule.job] <= np.arange(arrivals)).all()
    closed = [0]
    for closes in schedule.closes.tolist():
        closed.append(closed[-1] + closes)
    assert schedule.step.tolist() == closed[:-1]
    assert schedule.version.tolist() == [closed[p] for p in schedule.dispatched_after.tolist()]
    assert (schedule.staleness >= 0).all()
    check_outcomes(schedule)
    applied_at = np.full(jobs, np.inf)
    applied_at[schedule.job] = schedule.time
    for client in range(schedule.num_clients):
        own = np.flatnonzero(schedule.client == client)
        assert schedule.number[own].tolist() == list(range(len(own)))
        # never twice in flight: sent again only once the last job has come, or will never come
        for job, following in itertools.pairwise(own):
            assert schedule.freed_time[job] <= schedule.dispatch_time[following]
            came = schedule.upload_time[job] if np.isinf(applied_at[job]) else applied_at[job]
            assert np.isinf(came) or came <= schedule.dispatch_time[following]


def check_outcomes(schedule: Schedule) -> None:
    """Check that the outcome of every job agrees with its times and with the list of arrivals."""
    kinds = (schedule.outcome.dtype, schedule.freed_time.dtype, schedule.corrupt.dtype, schedule.copies.dtype)
    assert kinds == (np.int8, np.float64, np.bool_, np.int8)
    assert {len(schedule.client)} == {len(schedule.outcome), len(schedule.freed_time), len(schedule.copies)}
    assert len(schedule.corrupt) == len(schedule.client)
    outcome = [Outcome(code) for code in schedule.outcome]
    arrived = {Outcome.APPLIED, Outcome.LATE}
    assert sorted(schedule.job) == [j for j, f in enumerate(outcome) if f in arrived]
    never = {Outcome.LOST, Outcome.CRASHED, Outcome.INTERRUPTED, Outcome.CALLED_OFF}
    for j, what in enumerate(outcome):
        assert (what in never) <= np.isinf(schedule.upload_time[j])
        assert (what in {Outcome.APPLIED, Outcome.DROPPED_STALE}) <= np.isfinite(schedule.upload_time[j])
        if what in {Outcome.LATE, Outcome.DROPPED_LATE}:
            assert schedule.freed_time[j] < schedule.upload_time[j] < np.inf
        if what == Outcome.GIVEN_UP:  # infinite: a round ended without it
            assert schedule.freed_time[j] < schedule.upload_time[j]
        if what == Outcome.APPLIED:
            assert schedule.freed_time[j] == schedule.upload_time[j]
        received = {Outcome.DROPPED_LATE, Outcome.DROPPED_STALE} | arrived
        assert schedule.copies[j] == 0 or what in received
    assert (schedule.freed_time > schedule.dispatch_time).all()
    assert np.isfinite(schedule.freed_time).all()
    counts = fault_counts(schedule)
    parts = ("applied", "lost", "dropped_late", "dropped_stale", "called_off", "given_up", "under_way", "withheld")
    assert sum(counts[part] for part in parts) == len(outcome)
    assert counts["lost"] >= counts["crashed"] + counts["interrupted"]


@st.composite
def traces(draw, max_arrivals: int = 9) -> Schedule:
    """Any consistent schedule, with or without closed steps, with jobs that never arrive."""
    arrivals = draw(st.integers(1, max_arrivals))
    sent = [draw(st.integers(0, e)) for e in range(arrivals)]
    lost = draw(st.lists(st.integers(0, arrivals), max_size=3))
    closes = np.array(draw(st.lists(st.booleans(), min_size=arrivals, max_size=arrivals)))
    rows = sorted([(position, 0, e) for e, position in enumerate(sent)] + [(p, 1, -1) for p in lost])
    dispatched_after = np.array([position for position, _, _ in rows], np.int64)
    place = [e for _, _, e in rows]
    closed = np.concatenate([[0], np.cumsum(closes, dtype=np.int64)])
    jobs = np.arange(len(rows), dtype=np.int32)
    return Schedule(
        num_clients=len(rows),
        client=jobs,
        number=np.zeros_like(jobs),
        local_steps=np.ones_like(jobs),
        dispatch_time=dispatched_after.astype(np.float64),
        upload_time=np.array([e + 1.0 if e >= 0 else np.inf for e in place]),
        dispatched_after=dispatched_after,
        version=closed[dispatched_after],
        job=np.array([place.index(e) for e in range(arrivals)], np.int64),
        time=np.arange(1.0, arrivals + 1),
        closes=closes,
        step=closed[:-1],
        outcome=np.array([Outcome.APPLIED if e >= 0 else Outcome.LOST for e in place], np.int8),
        freed_time=np.array([e + 1.0 if e >= 0 else p + 0.5 for p, _, e in rows]),
        corrupt=np.array(draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))), np.bool_),
        copies=np.zeros(len(rows), np.int8),
    )


def fewest_stabbing_points(intervals):
    """Try all sets of positions, smallest sets first."""
    for size in range(1, len(intervals) + 1):
        for points in itertools.combinations(range(len(intervals)), size):
            if all(any(low <= p <= high for p in points) for low, high in intervals):
                return size
    return 0


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
