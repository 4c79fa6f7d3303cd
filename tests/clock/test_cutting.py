"""A schedule that is cut equals the plan of that length."""

from __future__ import annotations

import numpy as np
import pytest

from fedjax_async.clock import Limits, Outcome, Until, at_or_before, check_schedule, cut, fault_counts, plan

TROUBLE = {
    "faults": "drop:probability=0.2+duplicate:probability=0.2",
    "limits": Limits(max_staleness=4, timeout=2.5, late="drop"),
}
KNOWN = ("client", "number", "local_steps", "dispatch_time", "dispatched_after", "version", "corrupt", "outcome")
ARRIVALS = ("job", "time", "closes", "step")


def planned(timing, until, **conditions):
    return plan(timing, "exponential:mean=1", num_clients=6, local_steps=np.ones(6, int), until=until, **conditions)


@pytest.mark.parametrize("conditions", [{}, TROUBLE], ids=["calm", "trouble"])
@pytest.mark.parametrize("timing", ["every", "buffer:size=3", "cohort:size=3", "window:length=1.5"])
def test_a_cut_schedule_is_the_plan_of_that_length(timing, conditions):
    long = planned(timing, Until(time=40.0), **conditions)
    for moment in (0.0, 4.5, 12.0, 25.5, 40.0):
        arrivals = int(at_or_before(long.time, moment))
        have = check_schedule(cut(long, arrivals, moment))
        if arrivals == 0:
            assert len(have.job) == 0 and not np.isin(have.outcome, (Outcome.APPLIED, Outcome.LATE)).any()
            continue
        want = planned(timing, Until(time=moment), **conditions)
        for name in KNOWN + ARRIVALS:
            np.testing.assert_array_equal(getattr(have, name), getattr(want, name), err_msg=f"{name} at {moment}")
        counts, wanted = fault_counts(have), fault_counts(want)
        assert {n: c for n, c in counts.items() if n != "duplicates"} == {
            n: c for n, c in wanted.items() if n != "duplicates"
        }


def test_the_whole_schedule_stays_as_it_is():
    whole = planned("buffer:size=3", Until(time=20.0), **TROUBLE)
    for have, want in zip(cut(whole, len(whole.job), 20.0), whole):
        np.testing.assert_array_equal(have, want)
