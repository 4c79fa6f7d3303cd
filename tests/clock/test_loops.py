"""The timings ``hurry``, ``midway``, ``polling`` and ``pace`` against plain loops over their workers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.clock import Choice, Decisions, Limits, Outcome, Policy, Until, fault_counts
from tests.clock.test_policies import Stand
from tests.clock.textbook import N, arrivals_of, check_invariants, make, same, seconds_of, table_of

WHOLE = ("client", "local_steps", "dispatch_time", "upload_time", "job", "time", "closes", "version")


def rows_of(most):
    """Seconds of the jobs of some clients, whole numbers up to ``most``."""
    return st.lists(st.lists(st.integers(1, most), min_size=3, max_size=3), min_size=1, max_size=6)


# --- hurry: late clients upload what they have --------------------------------------------------


def hurried(rows, steps, size, bound, updates):
    """Arrivals (worker, time, local steps, delay, whether it closes). A local step of job k takes ``rows[i][k]``."""
    n, step, filled, asked = len(rows), 0, 0, set()
    begun, since, count, left = [0] * n, [0] * n, [0] * n, [steps] * n  # left: local steps of the job
    arrivals = []

    def ends(i):
        return begun[i] + left[i] * seconds_of(rows, i, count[i])

    while len(arrivals) < updates:
        now = min(map(ends, range(n)))
        idle = set()
        while len(arrivals) < updates:
            back = [i for i in range(n) if i not in idle and ends(i) == now]
            if not back:
                break
            i = back[0]
            idle.add(i)
            asked.discard(i)
            filled += 1
            if filled >= size and not asked:
                for j in range(n):
                    if j not in idle and step - since[j] >= bound:
                        left[j] = min(left[j], (now - begun[j]) // seconds_of(rows, j, count[j]) + 1)
                        asked.add(j)
            closes = filled >= size and not asked
            arrivals.append((i, now, left[i], step - since[i], closes))
            if closes:
                step, filled = step + 1, 0
        for i in idle:
            count[i], begun[i], since[i], left[i] = count[i] + 1, now, step, steps
    return arrivals


@given(rows_of(30), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 50))
@settings(max_examples=150, deadline=None)
def test_hurry_is_the_loop_over_the_workers(rows, steps, size, bound, updates):
    table, until = table_of(*(steps * np.array(rows)).tolist()), Until(updates=updates)
    s = make(f"hurry:size={size},bound={bound}", table, num_clients=len(rows), local_steps=steps, until=until)
    check_invariants(s)
    columns = ("client", "time", "local_steps", "staleness", "closes")
    assert arrivals_of(s, *columns) == hurried(rows, steps, size, bound, updates)
    assert s.staleness.max() <= bound


def test_without_late_clients_it_is_a_buffer():
    for size in (1, 3):
        same(make(f"hurry:size={size},bound=10000"), make(f"buffer:size={size}"), WHOLE)
        # Here the budget ends within a moment, and all clients get replies.
        at_once = {"delays": "constant:mean=10", "updates": N + 3}
        last = make(f"hurry:size={size},bound=10000", **at_once)
        same(last, make(f"buffer:size={size}", **at_once), WHOLE)
        assert len(last.client) == 3 * N


# --- midway: a second message in each job -------------------------------------------------------


def sent_midway(rows, steps, share, size, updates):
    """Arrivals (client, time, delay since the second message, step), and messages (client, time, version).

    At a moment all uploads come first, in order of the clients, then their answers, then second messages.
    """
    n, step, filled = len(rows), 0, 0
    count, begun, version = [0] * n, [0.0] * n, [0] * n
    arrivals, messages = [], [(i, 0.0, 0) for i in range(n)]
    first = max(1, min(steps - 1, round(share * steps)))
    second = [steps > 1] * n  # still to come

    def moment(i):
        return begun[i] + seconds_of(rows, i, count[i]) * (first / steps if second[i] else 1)

    while len(arrivals) < updates:
        now = min(map(moment, range(n)))
        back = [i for i in range(n) if not second[i] and moment(i) == now]
        for i in back:
            if len(arrivals) < updates:
                arrivals.append((i, now, step - version[i], step))
                filled += 1
                if filled == size:
                    step, filled = step + 1, 0
        for i in back:
            count[i], begun[i], version[i], second[i] = count[i] + 1, now, step, steps > 1
            messages.append((i, now, step))
        for i in range(n):
            if second[i] and i not in back and moment(i) == now:
                version[i], second[i] = step, False
                messages.append((i, now, step))
    return arrivals, messages


@given(
    rows_of(9), st.sampled_from([1, 2, 4]), st.sampled_from([0.1, 0.25, 0.5, 0.8]), st.integers(1, 3),
    st.integers(1, 40),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_midway_is_the_loop_over_the_workers(rows, steps, share, size, updates):
    rows, size, until = (4 * np.array(rows)).tolist(), min(size, len(rows)), Until(updates=updates)
    s = make(f"midway:at={share},size={size}", table_of(*rows), num_clients=len(rows), local_steps=steps, until=until)
    check_invariants(s)
    arrivals, messages = sent_midway(rows, steps, share, size, updates)
    assert arrivals_of(s, "client", "time", "staleness", "step") == arrivals
    end = arrivals[-1][1]
    assert (s.dispatch_time <= end).all(), "a job whose middle comes after the end has no second part"
    sent = sorted(zip(s.client.tolist(), s.dispatch_time.tolist(), s.version.tolist()))
    assert [row for row in sent if row[1] < end] == sorted(row for row in messages if row[1] < end)
    parts = s.outcome[s.dispatch_time + s.upload_time < 2 * end]
    assert np.isin(parts, (Outcome.APPLIED, Outcome.WITHHELD, Outcome.UNDER_WAY)).all()


def test_the_parts_are_the_whole_job():
    whole, s = make("buffer:size=2", local_steps=5), make("midway:size=2,at=0.3", local_steps=5)
    same(s, whole, ("time", "closes", "step"))
    np.testing.assert_array_equal(s.client[s.job], whole.client[whole.job])
    first = np.flatnonzero(s.outcome == Outcome.WITHHELD)
    assert (s.local_steps[first] == 2).all() and (s.local_steps[s.job] == 3).all()
    assert fault_counts(s)["withheld"] >= len(s.job) and (s.staleness <= whole.staleness).all()
    assert s.staleness.sum() < whole.staleness.sum()
    following = [np.flatnonzero((s.client == s.client[j]) & (s.number == s.number[j] + 1))[0] for j in first]
    takes = s.upload_time - s.dispatch_time
    np.testing.assert_allclose(takes[first] / takes[following], 2 / 3)
    np.testing.assert_array_equal(s.upload_time[first], s.dispatch_time[following])


def test_a_job_of_one_step_has_one_part():
    same(make("midway", local_steps=1), make("every", local_steps=1))
    mixed = make("midway", local_steps=np.array([1, 4, 4, 4, 4, 4, 4]))
    assert set(mixed.client[mixed.outcome == Outcome.WITHHELD]) == set(range(1, N))


# --- polling: clients answer with unfinished work -----------------------------------------------


@given(rows_of(40), st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.integers(1, 50))
@settings(max_examples=100, deadline=None)
def test_clients_answer_a_poll_with_the_steps_that_they_have_made(rows, steps, length, size, updates):
    """Times are whole numbers of the K-th part of a second, so that steps end at polls too."""
    size = min(size, len(rows))
    table, until = table_of(*(steps * np.array(rows)).tolist()), Until(updates=updates)
    s = make(f"polling:length={length},size={size}", table, num_clients=len(rows), local_steps=steps, until=until)
    check_invariants(s)
    came = s.upload_time <= s.time[-1]  # in the last poll, the budget may end before all answers are applied
    waited = np.where(came, s.upload_time, s.time[-1]) - s.dispatch_time
    takes = np.array([seconds_of(rows, i, k) for i, k in zip(s.client, s.number)])
    made = np.minimum(waited // takes, steps)
    np.testing.assert_array_equal(s.local_steps[came], made[came])
    assert (made[came] > 0).all() and (s.local_steps[~came] == steps).all()
    assert (s.time % length == 0).all() and len(s.job) == updates
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


def test_clients_are_polled_evenly_whatever_their_speed():
    s = make("polling:length=5,size=2", table_of(*[[float(2 + i)] for i in range(N)]), local_steps=4, updates=7000)
    counts = np.bincount(s.client[s.job], minlength=N)
    assert np.abs(counts - 1000).max() < 120
    mean = [s.local_steps[s.job][s.client[s.job] == i].mean() for i in range(N)]
    assert mean[0] > mean[-1] and max(s.local_steps) == 4


def test_polls_without_an_answer_cost_no_time():
    s = make("polling:length=1e-6,size=1", "constant:mean=10", updates=30)
    check_invariants(s)
    assert (s.local_steps[s.job] == 1).all() and s.time[0] == pytest.approx(2.0)


# --- pace: steps as far apart as the slowest client needs ----------------------------------------


def paced(rows, bound, length, unknown, jobs, updates):
    """Arrivals (worker, time, staleness, whether it closes). Of idle workers those with the lowest numbers begin."""
    n, step, closed_at, tick = len(rows), 0, 0, 0
    took, count, waiting, arrivals = [unknown] * n, [0] * n, [], []
    ends, since = {}, [0] * n

    def begin(now, able):
        for i in sorted(able)[: jobs - len(ends)]:
            ends[i], since[i] = now + seconds_of(rows, i, count[i]), step
            count[i] += 1

    begin(0, range(n))
    while len(arrivals) < updates:
        tick += 1
        now, contributors = tick * length, []
        for _, i in sorted((end, i) for i, end in ends.items() if end <= now):
            del ends[i]
            waiting.append(i)
            took[i] = seconds_of(rows, i, count[i] - 1)
        slowest = max((took[i] for i in ends), default=0)
        if waiting and bound * (now - closed_at) >= slowest:
            arrivals += [(i, now, step - since[i], k == len(waiting)) for k, i in enumerate(waiting, 1)]
            step, closed_at, contributors, waiting = step + 1, now, waiting, []
        idle = set(range(n)) - {*ends, *waiting}
        begin(now, idle - {*contributors})
        begin(now, idle & {*contributors})
    return arrivals[:updates]


def lowest(view, idle, count):
    return Choice(idle[:count], np.zeros(count))


@given(rows_of(30), st.integers(1, 4), st.integers(1, 6), st.integers(1, 40), st.integers(1, 6), st.integers(1, 50))
@settings(max_examples=150, deadline=None)
def test_pace_is_the_loop_over_the_looks(rows, bound, length, unknown, jobs, updates):
    columns, n, table = ("client", "time", "staleness", "closes"), len(rows), table_of(*rows)
    spec, until = f"pace:bound={bound},length={length},unknown={unknown},concurrency=", Until(updates=updates)
    everyone = make(f"{spec}{n}", table, num_clients=n, until=until)
    check_invariants(everyone)
    assert arrivals_of(everyone, *columns) == paced(rows, bound, length, unknown, n, updates)
    jobs = min(jobs, n - 1)  # a policy has clients to choose among
    if jobs:
        some = make(f"{spec}{jobs}", table, num_clients=n, until=until, decisions=Decisions(Policy(lowest), Stand()))
        assert arrivals_of(some, *columns) == paced(rows, bound, length, unknown, jobs, updates)


def test_where_jobs_take_as_long_as_the_last_ones_no_upload_is_staler_than_the_bound():
    rows = [[1.0], [2.0], [3.0], [40.0], [55.0]]
    for bound in (2, 5):
        s = make(f"pace:bound={bound},length=0.5,unknown=60,concurrency=5", table_of(*rows), num_clients=5, updates=400)
        slow = s.staleness[s.client[s.job] == 4]
        assert s.staleness.max() <= bound and len(slow) > 3 and set(slow) <= {bound - 1, bound}
        apart = np.diff(s.time[s.closes])
        assert apart.min() >= 40 / bound


def test_its_jobs_in_flight_are_20_or_half_of_the_clients():
    for clients, jobs in ((1, 1), (5, 2), (30, 15), (100, 20)):
        s = make("pace", "constant:mean=60", num_clients=clients, updates=jobs)
        assert (s.dispatch_time == 0).sum() == jobs
        same(s, make(f"pace:concurrency={jobs}", "constant:mean=60", num_clients=clients, updates=jobs))


def test_with_whatever_may_go_wrong_steps_are_at_looks_and_apart():
    wrong = {"faults": "drop:probability=0.2+crash:probability=0.1,restart=3+corrupt:probability=0.2+late:extra=3"}
    wrong |= {"availability": "sessions:on=5,off=3", "limits": Limits(timeout=1.5, max_staleness=2, late="drop")}
    spec = "pace:bound=3,length=0.1,unknown=2,concurrency=4"
    s = make(spec, "lognormal:mean=1,heterogeneity=0.5", num_clients=9, updates=200, **wrong)
    check_invariants(s)
    assert (np.bincount(s.client, minlength=9) > 3).all()
    np.testing.assert_allclose(s.time / 0.1, np.rint(s.time / 0.1), atol=1e-6)
    assert (np.diff(s.time[s.closes]) > 0).all()


@pytest.mark.parametrize("timing", ["polling:length=1e-300,size=2", "pace:length=1e-17,concurrency=2,unknown=3"])
def test_looks_that_cannot_be_told_apart_are_refused(timing):
    """They looped for ever: the moment of the next look was always the same."""
    with pytest.raises(ValueError, match=r"^length = 1e-\d+: must be longer: at [\d.]+ s a look so soon after"):
        make(timing, "lognormal:mean=9", updates=12)
