"""A window takes what reaches its end up to a rounding error."""

from __future__ import annotations

import numpy as np
import pytest

from fedjax_async.clock import Limits, Until, check_schedule, plan

UNRELIABLE = {"limits": Limits(max_staleness=10**6)}


@pytest.mark.parametrize("conditions", [{}, UNRELIABLE])
@pytest.mark.parametrize("length", [0.1, 0.3, 0.7, 1.1, 60.1, 1 / 3])
@pytest.mark.parametrize("windows", [1, 2, 3])
def test_a_job_as_long_as_some_windows_takes_so_many(length, windows, conditions):
    delays = f"constant:mean={length * windows!r}"
    options = {"num_clients": 2, "local_steps": 1, "until": Until(steps=200), **conditions}
    s = plan(f"window:length={length!r}", delays, **options)
    check_schedule(s)
    np.testing.assert_array_equal(np.rint(s.time / length), windows * np.repeat(np.arange(1, 201), 2))
    assert (s.upload_time[s.job] <= s.time).all()
    assert (s.freed_time[s.job] <= s.time).all()
    assert (s.staleness == 0).all()
