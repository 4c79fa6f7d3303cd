"""Schedules made by hand: filled where columns are left out, refused where they contradict each other."""

from time import perf_counter

import numpy as np
import pytest

from fedjax_async.clock import (
    Outcome,
    Until,
    check_schedule,
    concurrency,
    fault_counts,
    load_schedule,
    load_schedule_csv,
    make_schedule,
    plan,
    save_schedule,
    save_schedule_csv,
    wave_statistics,
)
from fedjax_async.types import Schedule
from tests.clock.textbook import make, same
from tests.refusals import refusals

OPTIONAL = ("outcome", "freed_time", "corrupt", "copies")
DERIVED = ("number", "version", "step", *OPTIONAL)
# Client 0 has job 0 (arrival 0, at 1), job 2, whose upload never comes, and job 3; client 1 has job 1.
COLUMNS = {
    "num_clients": 3, "client": [0, 1, 0, 0], "local_steps": 5, "dispatch_time": [0, 0, 1, 4],
    "upload_time": [1, 2, np.inf, 5], "dispatched_after": [0, 0, 1, 2], "job": [0, 1, 3], "time": [1, 2, 5],
    "closes": [True, False, True],
}  # fmt: skip


def bare(schedule):
    """The schedule without its optional columns, as if made by hand."""
    return Schedule(**{name: getattr(schedule, name) for name in Schedule._fields if name not in OPTIONAL})


def test_what_is_left_out_is_derived():
    s = make_schedule(**COLUMNS)
    assert s.number.tolist() == [0, 0, 1, 2]
    assert s.version.tolist() == [0, 0, 1, 1]
    assert s.step.tolist() == [0, 1, 1]
    assert s.local_steps.tolist() == [5, 5, 5, 5]
    assert s.outcome.tolist() == [Outcome.APPLIED, Outcome.APPLIED, Outcome.CALLED_OFF, Outcome.APPLIED]
    assert s.freed_time.tolist() == [1, 2, 4, 5]
    assert not s.corrupt.any()
    assert not s.copies.any()
    planned = plan("every", "constant", num_clients=2, local_steps=1, until=Until(updates=3))
    assert [np.asarray(c).dtype for c in s] == [np.asarray(c).dtype for c in planned]
    same(check_schedule(bare(s)), s)
    same(make_schedule(**COLUMNS, outcome=s.outcome.tolist(), corrupt=[0, 0, 0, 0], number=s.number), s)


@pytest.mark.parametrize("timing", ["every:concurrency=3", "buffer:size=3", "window:length=1", "cohort:size=3"])
def test_a_reliable_plan_is_made_again_from_its_columns(timing):
    s = make(timing)
    fields = {name: value for name, value in s._asdict().items() if name not in (*DERIVED, "exhausted")}
    same(make_schedule(**fields), s)
    assert check_schedule(s) == s  # the very same arrays


@pytest.mark.parametrize(("save", "load"), [(save_schedule, load_schedule), (save_schedule_csv, load_schedule_csv)])
def test_a_schedule_made_by_hand_is_saved_whole(tmp_path, save, load):
    save(tmp_path / "trace", bare(make_schedule(**COLUMNS)))
    same(load(tmp_path / "trace"), make_schedule(**COLUMNS))


def test_a_schedule_made_by_hand_has_statistics():
    s = make("buffer:size=3,concurrency=5")
    assert wave_statistics(bare(s)) == wave_statistics(s)
    for one, other in zip(concurrency(bare(s)), concurrency(s)):
        np.testing.assert_array_equal(one, other)
    assert fault_counts(bare(s)) == fault_counts(s)
    assert concurrency(bare(make_schedule(**COLUMNS)))[1].tolist() == [2, 2, 1, 1, 0]


test_contradictions_are_refused = refusals(
    ({"client": [0, 1, 0, 3]}, r"schedule\.client\[3\] = 3: must be from 0 to 2"),
    ({"client": [0, 1, 0, -1]}, r"schedule\.client\[3\] = -1"),
    ({"client": [0, 1.5, 0, 0]}, r"schedule\.client\[1\] = 1\.5: must be of type int32"),
    ({"client": [0, 2**40, 0, 0]}, r"schedule\.client\[1\] = 1099511627776"),
    ({"client": ["a", "b", "c", "d"]}, r"schedule\.client: must be a sequence of numbers"),
    ({"num_clients": 0}, r"num_clients = 0|schedule\.client\[0\]"),
    ({"local_steps": 0}, r"schedule\.local_steps\[0\] = 0"),
    ({"local_steps": [5, 5]}, r"schedule\.local_steps: has length 2, must have one entry per job \(4\)"),
    ({"dispatch_time": [0, 0, 1, 0.5]}, r"schedule\.dispatch_time\[3\] = 0\.5: must be at least the one before"),
    ({"dispatch_time": [0, 0, 1, np.nan]}, r"schedule\.dispatch_time\[3\] = nan: must be a finite number >= 0"),
    ({"upload_time": [1, -1, np.inf, 5]}, r"schedule\.upload_time\[1\] = -1\.0: must be at or after its dispatch"),
    ({"upload_time": [1, 3, np.inf, 5]}, r"schedule\.time\[1\] = 2\.0: must be at or after the upload_time"),
    ({"dispatched_after": [0, 0, 1, 4]}, r"schedule\.dispatched_after\[3\] = 4: must be from 0 to 3"),
    ({"dispatched_after": [0, 0, 2, 1]}, r"schedule\.dispatched_after\[3\] = 1: must be at least"),
    ({"dispatched_after": [0, 0, 1, 1]}, r"schedule\.dispatched_after\[3\] = 1: must be the count of arrivals"),
    ({"dispatched_after": [0, 1, 1, 2]}, r"schedule\.dispatched_after\[1\] = 1: must be the count of arrivals"),
    ({"dispatched_after": [0, 0, 1, 3]}, r"schedule\.job\[2\] = 3: must be a job that was sent before it arrives"),
    ({"job": [0, 1, 4]}, r"schedule\.job\[2\] = 4: must be from 0 to 3"),
    ({"job": [0, 1, 1]}, r"schedule\.job\[1\] = 1: must be among the arrivals once"),
    ({"time": [1, 2, 1.5]}, r"schedule\.time\[2\] = 1\.5: must be at least the one before"),
    ({"time": [1, 2]}, r"schedule\.time: has length 2, must have one entry per arrival"),
    ({"closes": [True]}, r"schedule\.closes: has length 1, must have one entry per arrival \(3\)"),
    ({"number": [0, 0, 1, 1]}, r"schedule\.number\[3\] = 1"),
    ({"version": [0, 0, 0, 1]}, r"schedule\.version\[2\] = 0: must be the count of steps closed before"),
    ({"step": [0, 1, 2]}, r"schedule\.step\[2\] = 2"),
    ({"outcome": [0, 0, 0, 0]}, r"schedule\.outcome\[2\] = 0: must be APPLIED or LATE for arrivals"),
    ({"outcome": [0, 0, 77, 0]}, r"schedule\.outcome\[2\] = 77: must be from 0 to 10"),
    ({"outcome": [0, 0]}, r"schedule\.outcome: has length 2"),
    ({"freed_time": [1, 2, 0.5, 5]}, r"schedule\.freed_time\[2\] = 0\.5"),
    ({"copies": [0, -1, 0, 0]}, r"schedule\.copies\[1\] = -1"),
    ({"corrupt": [0, 2, 0, 0]}, r"schedule\.corrupt\[1\] = 2"),
    # job 2 is sent before arrival 0 of the same client is applied: by count, though at the same moment, and by time
    ({"dispatched_after": [0, 0, 0, 2]}, r"after 0 arrivals: must not be before client 0 is done with its job 0"),
    ({"dispatch_time": [0, 0, 0.5, 4]}, r"dispatch_time\[2\] = 0\.5 .* done with its job 0, arrival 0, at 1\.0"),
    # job 3 is sent before job 2 is freed, or before its upload has come, though it was given up
    ({"freed_time": [1, 2, 4.5, 5]}, r"dispatch_time\[3\] = 4\.0 .* with its job 2 at 4\.5"),
    ({"upload_time": [1, 2, 4.5, 5], "freed_time": [1, 2, 3, 5], "outcome": [0, 0, Outcome.DROPPED_LATE, 0]},
     r"dispatch_time\[3\] = 4\.0 .* with its job 2 at 4\.5"),
    ({"upload_time": [1, 2, 4.5, 5]}, r"with its job 2 at 4\.5"),
    by=lambda change: make_schedule(**(COLUMNS | change)),
)  # fmt: skip


def test_jobs_that_follow_each_other_at_one_moment_do_not_overlap():
    tie = COLUMNS | {"upload_time": [1 + 1e-15, 2, 4 * (1 + 1e-15), 5], "time": [1 + 1e-15, 2, 5]}
    assert make_schedule(**tie).freed_time[2] > 4


def test_a_schedule_without_jobs_is_one():
    empty = dict.fromkeys(("client", "dispatch_time", "upload_time", "dispatched_after", "job", "time", "closes"), ())
    assert len(make_schedule(num_clients=1, local_steps=1, **empty).outcome) == 0


@pytest.mark.slow
def test_a_million_jobs_are_checked_well_within_a_second():
    s = plan("every:concurrency=1000", "exponential", num_clients=10**5, local_steps=1, until=Until(updates=10**6))
    for one in (s, bare(s)):
        begin = perf_counter()
        check_schedule(one)
        assert perf_counter() - begin < 3  # a busy machine; about 0.2 s alone
