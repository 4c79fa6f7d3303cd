"""Speeds that change during a run: the fault ``drift``, and work at changing paces in general."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedjax_async import simulate
from fedjax_async.clock import FAULTS, Faults, JobFaults, Until
from fedjax_async.clock.faults import paces_together
from fedjax_async.clock.job_outcomes import job_outcomes
from fedjax_async.clock.scenario import NO_LIMITS, bind, models_of
from tests.clock.test_unreliable import make
from tests.clock.textbook import table_of


def bound(spec, num_clients=1, seed=0):
    ((model, part),) = models_of("faults", FAULTS, spec)
    return model(num_clients, seed, part)


@pytest.mark.parametrize(("share", "times"), [
    (1, [10, 20, 45, 85, 125]),  # the third job has done half of its work at 25, the rest takes four times as long
    (0, [28.75, 38.75, 48.75]),  # a slow job has done 6.25 s of its work at 25, the rest takes 3.75 s
])  # fmt: skip
def test_a_job_under_way_goes_on_at_the_new_speed(share, times):
    s = make("every", table_of([10]), num_clients=1, until=Until(updates=len(times)),
             faults=f"drift:at=25,factor=4,share={share}")  # fmt: skip
    np.testing.assert_allclose(s.time, times, rtol=1e-12)


def test_rounds_wait_for_the_clients_that_are_slow_by_then():
    s = make("cohort:size=2", table_of([10], [10]), num_clients=2, until=Until(steps=4),
             faults="drift:at=15,factor=3,share=1")  # fmt: skip
    np.testing.assert_allclose(np.unique(s.time), [10, 30, 60, 90])  # 5 s of the second round's work are left at 15


def test_rounds_of_participation_sets_count_in_rounds():
    """They plan in units of their length; speeds change at the same moment."""
    seconds = []
    for length in (1, 7):
        delays, faults = table_of([2 * length], [2 * length]), f"drift:at={3 * length},share=1"
        s = make(f"participation:length={length},probability=1", delays, num_clients=2, updates=8, faults=faults)
        seconds.append(s.time / length)
    np.testing.assert_allclose(*seconds)


def test_about_the_share_of_the_clients_slows_down_and_the_others_speed_up():
    pace = bound("drift:at=100,share=0.3,factor=4", 2000).pace
    before, after = ([pace(client, time) for client in range(2000)] for time in (99.0, 100.0))
    assert {(rate, until) for rate, until in before} == {(1.0, 100.0), (0.25, 100.0)}
    assert {until for _, until in after} == {math.inf}
    assert all({one[0], other[0]} == {1.0, 0.25} for one, other in zip(before, after, strict=True))
    assert abs(np.mean([rate == 0.25 for rate, _ in after]) - 0.3) < 4 * math.sqrt(0.21 / 2000)
    assert [pace(client, 0.0) for client in range(50)] == [bound("drift:at=100,share=0.3", 50).pace(k, 0.0)
                                                           for k in range(50)]  # fmt: skip


def slowly(client, time, seconds, pace, interval=None, step=1 / 512):
    """When the work is done, in small steps of time."""
    while seconds > 1e-9:
        online = interval is None or interval(client, time)[0] <= time
        seconds -= step * pace(client, time)[0] * online
        time += step
    return time


def test_work_at_two_paces_and_with_pauses_is_that_of_small_steps():
    conditions = bind("periodic:on=3,off=2,phase=1,leaving=pause", "drift:at=8,share=1+drift:at=13,factor=2,share=0",
                      NO_LIMITS, 3, 0)  # fmt: skip
    outcome_of = job_outcomes(conditions)
    pace, interval = paces_together(conditions.faults), conditions.availability[0].interval
    for client, time, seconds in ((0, 0.5, 0.25), (0, 0.5, 4.0), (1, 5.0, 3.5), (2, 10.5, 2.0), (2, 20.0, 1.5)):
        begins = max(time, interval(client, time)[0])
        found = outcome_of(client, begins, seconds)
        assert found.upload == pytest.approx(slowly(client, begins, seconds, pace, interval), abs=0.02)


def test_a_crash_comes_after_its_share_of_the_work():
    outcome_of = job_outcomes(bind(None, "drift:at=10,factor=4,share=1", NO_LIMITS, 1, 0))
    found = outcome_of(
        0, 5.0, (10.0, 7.5, 3.0, False, False)
    )  # 5 s of work by 10, then 2.5 s at a quarter of the speed
    assert (found.crash, found.client_free) == (20.0, 23.0)


def test_a_pace_of_ones_own_counts_and_a_steady_one_changes_nothing():
    def steady(num_clients, seed, part):
        return Faults(draw=lambda clients, numbers: JobFaults(), pace=lambda client, time: (1.0, math.inf))

    usual = make("buffer:size=2", "exponential", num_clients=5, until=Until(updates=60))
    same = make("buffer:size=2", "exponential", num_clients=5, until=Until(updates=60), faults=steady)
    np.testing.assert_array_equal(usual.time, same.time)
    np.testing.assert_array_equal(usual.client, same.client)


@pytest.mark.parametrize(("spec", "why"), [
    ("drift:at=0", "at = 0: must be"), ("drift:share=2", "share = 2: must be"),
    ("drift:factor=0", "factor = 0: must be"),
])  # fmt: skip
def test_what_is_out_of_range_is_refused(spec, why):
    with pytest.raises(ValueError, match=why):
        simulate(faults=spec, model="logistic", updates=5)


@pytest.mark.parametrize("found", [(0.0, math.inf), (math.nan, math.inf), (1.0, 0.5), None])
def test_a_wrong_pace_of_ones_own_is_refused(found):
    with pytest.raises(ValueError, match=r"^faults: pace\(0, .*must be \(share, until\), a finite share > 0"):
        make(
            "every", "constant", num_clients=1, until=Until(updates=9), faults=lambda *_: Faults(pace=lambda *_: found)
        )
