"""The timing ``polling``, whose clients answer with unfinished work, against what can be said of it by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.clock import Outcome, Until, plan
from tests.clock.textbook import N, check_invariants, make, table_of
from tests.refusals import refusals


@given(
    st.lists(st.lists(st.integers(1, 40), min_size=3, max_size=3), min_size=1, max_size=6),
    st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.integers(1, 50),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_clients_answer_with_the_steps_that_they_have_made(rows, steps, length, size, updates):
    """Times are whole numbers of the K-th part of a second, so that steps end at polls too."""
    size = min(size, len(rows))
    table, until = table_of(*(steps * np.array(rows)).tolist()), Until(updates=updates)
    s = make(f"polling:length={length},size={size}", table, num_clients=len(rows), local_steps=steps, until=until)
    check_invariants(s)
    came = s.upload_time <= s.time[-1]  # in the last poll, the budget may end before all answers are applied
    waited = np.where(came, s.upload_time, s.time[-1]) - s.dispatch_time
    takes = np.array([rows[i][min(k, 2)] for i, k in zip(s.client, s.number)])
    made = np.minimum(waited // takes, steps)
    np.testing.assert_array_equal(s.local_steps[came], made[came])
    assert (made[came] > 0).all() and (s.local_steps[~came] == steps).all()
    assert (s.time % length == 0).all()
    for poll in np.unique(s.time):
        asked, applied = s.client[s.upload_time == poll], s.client[s.job[s.time == poll]]
        there = (s.dispatch_time < poll) & (s.upload_time >= poll)
        ready = s.client[there & ((poll - s.dispatch_time) // takes > 0)]
        whole = len(applied) == len(asked)
        assert len(asked) == min(size, len(ready)) and set(asked.tolist()) <= set(ready.tolist())
        assert (np.diff(applied) > 0).all() and set(applied.tolist()) <= set(asked.tolist())
        assert (whole or poll == s.time[-1]) and set(asked.tolist()) <= set(s.client[s.dispatch_time == poll].tolist())
        closes = s.closes[s.time == poll]
        assert not closes[:-1].any() and closes[-1] == whole
    assert len(s.job) == updates


def test_clients_are_drawn_evenly_whatever_their_speed():
    s = make("polling:length=5,size=2", table_of(*[[float(2 + i)] for i in range(N)]), local_steps=4, updates=7000)
    counts = np.bincount(s.client[s.job], minlength=N)
    assert np.abs(counts - 1000).max() < 120
    mean = [s.local_steps[s.job][s.client[s.job] == i].mean() for i in range(N)]
    assert mean[0] > mean[-1] and max(s.local_steps) == 4


def test_a_longer_budget_continues_a_shorter_one_and_no_job_comes_before_the_next_poll():
    short, long = (make("polling:length=7,size=3", "lognormal:mean=9", until=Until(steps=n)) for n in (10, 30))
    for name in ("job", "time", "closes", "step"):
        np.testing.assert_array_equal(getattr(short, name), getattr(long, name)[: len(short.job)])
    under_way = short.outcome == Outcome.UNDER_WAY
    assert under_way.sum() == N and (short.upload_time[under_way] > short.time[-1]).all()
    assert len(make("polling:length=7,size=3", "lognormal:mean=9", until=Until(time=70.0)).time) > 0


def test_polls_without_an_answer_cost_no_time():
    s = make("polling:length=1e-6,size=1", "constant:mean=10", updates=30)
    check_invariants(s)
    assert (s.local_steps[s.job] == 1).all() and s.time[0] == pytest.approx(2.0)


def planned(options="length=5,size=2", **given):
    return plan(f"polling:{options}", "constant", num_clients=3, local_steps=4, until=Until(updates=3), **given)


test_bad_options_are_refused = refusals(
    ("length=0", "length = 0: must be"),
    ("size=4", "size = 4: must be at most 3, the number of clients"),
    ("size=0", "size = 0: must be"),
    by=planned,
)


@pytest.mark.parametrize("given", [{"availability": "sessions:on=3,off=2"}, {"faults": "drop:probability=0.1"}])
def test_what_may_keep_a_client_from_answering_is_refused(given):
    with pytest.raises(ValueError, match=r"^timing = 'polling': must be another one with availability"):
        planned(**given)


@pytest.mark.parametrize("timing", ["polling:length=1e-300,size=2", "pace:length=1e-17,concurrency=2,unknown=3"])
def test_looks_that_cannot_be_told_apart_are_refused(timing):
    """They looped for ever: the moment of the next look was always the same."""
    with pytest.raises(ValueError, match=r"^length = 1e-\d+: must be longer: at [\d.]+ s a look so soon after"):
        make(timing, "lognormal:mean=9", updates=12)
