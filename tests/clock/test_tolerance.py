"""One tolerance says what is at or before a moment: 3 windows of 0.1 s end at 0.30000000000000004 s, which is 0.3 s."""

import numpy as np
import pytest

from fedjax_async.clock import Limits, Outcome, Until, at_or_before, check_schedule, plan
from fedjax_async.clock.record import Record
from fedjax_async.clock.scenario import Scenario
from fedjax_async.engine import Every, evaluation_points
from fedjax_async.engine.record import EngineResult, Traffic, make_run
from tests.clock.textbook import table_of


def windows(**until):
    return plan("window:length=0.1", table_of([0.05], [0.1]), num_clients=2, local_steps=1, until=Until(**until))


def test_times_that_differ_by_rounding_are_the_same_moment():
    times = np.arange(1, 1001) * 0.1
    moments = np.cumsum(np.full(1000, 0.1))
    assert (times != moments).any()
    np.testing.assert_array_equal(at_or_before(times, moments), np.arange(1, 1001))
    np.testing.assert_array_equal(at_or_before(moments, times), np.arange(1, 1001))
    assert at_or_before(times, 0.1 * (1 - 1e-9)) == 0
    np.testing.assert_array_equal(at_or_before(np.array([0.0, np.inf]), np.array([0.0, np.inf])), [1, 2])


@pytest.mark.parametrize(("every", "end", "times"), [
    (Every(at=[0.3]), 0.5, [0, 0.3, 0.5]),
    (Every(time=0.3), 0.5, [0, 0.3, 0.5]),
    (Every(time=0.1), 0.3, [0, 0.1, 0.2, 0.3]),  # the end, up to rounding, is evaluated once
    (Every(at=[0.1 * 3]), 0.3, [0, 0.3]),
])  # fmt: skip
def test_an_evaluation_at_a_multiple_of_a_window_sees_its_arrivals(every, end, times):
    schedule = windows(time=end)
    points = evaluation_points(schedule, every, horizon=end)
    np.testing.assert_array_equal(points.time, times)
    seen = [np.sum(schedule.time < time + 0.05) for time in times]
    np.testing.assert_array_equal(points.position, seen)
    assert schedule.time[seen[times.index(0.3)] - 1] > 0.3


def test_traffic_is_counted_with_the_same_tolerance():
    schedule = windows(time=0.5)
    schedule = schedule._replace(upload_time=schedule.upload_time.copy())
    schedule.upload_time[schedule.job] = schedule.time
    points = evaluation_points(schedule, Every(at=[0.3]), horizon=0.5)
    arrivals = len(schedule.job)
    records = {"accepted": np.ones(arrivals, bool), **dict.fromkeys(("weight", "upload_norm"), np.ones(arrivals))}
    run = make_run({}, schedule, points, EngineResult((), {}, records, {}), Traffic(down=1, up=1))
    assert run.evaluations["bytes_up"][1] == run.evaluations["update"][1] == points.position[1]
    assert run.evaluations["bytes_down"][1] == np.sum(schedule.dispatch_time < 0.35)


def test_copies_at_the_end_of_a_plan_count_up_to_rounding():
    record = Record(Scenario(2, np.ones(2, np.int64), None, Until(updates=1), 0))
    assert record.apply(record.dispatch(0, 0.0, 0.3), 0.3, True) is False
    assert record.end >= 0.1 + 0.2


@pytest.mark.parametrize("conditions", [{}, {"limits": Limits(max_staleness=10**6)}])
@pytest.mark.parametrize("length", [0.1, 0.3, 0.7, 1.1, 60.1, 1 / 3])
@pytest.mark.parametrize("windows", [1, 2, 3])
def test_a_job_as_long_as_some_windows_takes_so_many(length, windows, conditions):
    delays = f"constant:mean={length * windows!r}"
    options = {"num_clients": 2, "local_steps": 1, "until": Until(steps=200), **conditions}
    s = check_schedule(plan(f"window:length={length!r}", delays, **options))
    np.testing.assert_array_equal(np.rint(s.time / length), windows * np.repeat(np.arange(1, 201), 2))
    assert (s.upload_time[s.job] <= s.time).all()
    assert (s.freed_time[s.job] <= s.time).all()
    assert (s.staleness == 0).all()


AT_ONCE = {"num_clients": 2, "local_steps": 3, "until": Until(updates=40)}  # jobs of 3 * 0.1 = 0.30000000000000004 s
ONLINE = "periodic:on=0.3,off=1,phase=0"


@pytest.mark.parametrize(("timing", "conditions"), [
    ("every", {"limits": Limits(timeout=0.3)}),
    ("every", {"availability": f"{ONLINE},leaving=lose"}),
    ("every", {"availability": f"{ONLINE},leaving=pause"}),
    ("cohort:size=2,deadline=0.3", {}),
])  # fmt: skip
def test_a_job_as_long_as_what_it_is_given_is_in_time(timing, conditions):
    s = check_schedule(plan(timing, "constant:mean=0.1,reference_steps=1", **AT_ONCE, **conditions))
    assert (s.outcome[: len(s.job)] == Outcome.APPLIED).all()
    np.testing.assert_allclose((s.upload_time - s.dispatch_time)[s.job], 0.3)
    np.testing.assert_array_equal(s.freed_time[s.job], s.upload_time[s.job])
