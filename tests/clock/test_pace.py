"""The timing ``pace``, whose steps are as far apart as the slowest client needs, against a loop over the looks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.clock import Choice, Decisions, Limits, Policy, Until, plan
from tests.clock.test_policies import Stand
from tests.clock.textbook import check_invariants, make, same, table_of
from tests.refusals import refusals


def played(rows, bound, length, unknown, jobs, updates):
    """Arrivals (worker, time, staleness, whether it closes). Of idle workers those with the lowest numbers begin."""
    n, step, closed_at, tick = len(rows), 0, 0, 0
    took, count, waiting, arrivals = [unknown] * n, [0] * n, [], []
    ends, since = {}, [0] * n

    def begin(now, able):
        for i in sorted(able)[: jobs - len(ends)]:
            ends[i], since[i] = now + rows[i][min(count[i], len(rows[i]) - 1)], step
            count[i] += 1

    begin(0, range(n))
    while len(arrivals) < updates:
        tick += 1
        now, contributors = tick * length, []
        for _, i in sorted((end, i) for i, end in ends.items() if end <= now):
            del ends[i]
            waiting.append(i)
            took[i] = rows[i][min(count[i] - 1, len(rows[i]) - 1)]
        slowest = max((took[i] for i in ends), default=0)
        if waiting and bound * (now - closed_at) >= slowest:
            arrivals += [(i, now, step - since[i], k == len(waiting)) for k, i in enumerate(waiting, 1)]
            step, closed_at, contributors, waiting = step + 1, now, waiting, []
        idle = set(range(n)) - {*ends, *waiting}
        begin(now, idle - {*contributors})
        begin(now, idle & {*contributors})
    return arrivals[:updates]


def arrivals_of(s):
    return list(zip(*(column.tolist() for column in (s.client[s.job], s.time, s.staleness, s.closes))))


def lowest(view, idle, count):
    return Choice(idle[:count], np.zeros(count))


ROWS = st.lists(st.lists(st.integers(1, 30), min_size=3, max_size=3), min_size=2, max_size=7)
NUMBERS = st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 40))


@given(ROWS, NUMBERS, st.integers(1, 6), st.integers(1, 50))
@settings(max_examples=150, deadline=None)
def test_it_is_the_loop_over_the_looks(rows, numbers, jobs, updates):
    bound, length, unknown = numbers
    n, table, until = len(rows), table_of(*rows), Until(updates=updates)
    spec = f"pace:bound={bound},length={length},unknown={unknown},concurrency="
    everyone = make(f"{spec}{n}", table, num_clients=n, until=until)
    check_invariants(everyone)
    assert arrivals_of(everyone) == played(rows, bound, length, unknown, n, updates)
    jobs = min(jobs, n - 1)  # a policy has clients to choose among
    some = make(f"{spec}{jobs}", table, num_clients=n, until=until, decisions=Decisions(Policy(lowest), Stand()))
    assert arrivals_of(some) == played(rows, bound, length, unknown, jobs, updates)


def test_where_jobs_take_as_long_as_the_last_ones_no_upload_is_staler_than_the_bound():
    rows = [[1.0], [2.0], [3.0], [40.0], [55.0]]
    for bound in (2, 5):
        s = make(f"pace:bound={bound},length=0.5,unknown=60,concurrency=5", table_of(*rows), num_clients=5, updates=400)
        slow = s.staleness[s.client[s.job] == 4]
        assert s.staleness.max() <= bound and len(slow) > 3 and set(slow) <= {bound - 1, bound}
        apart = np.diff(s.time[s.closes])
        assert apart.min() >= 40 / bound


def test_new_jobs_are_sent_before_the_step_to_others_than_those_that_wait_for_it():
    table = table_of([2.0], [9.0], [2.0], [2.0])
    s = make("pace:bound=1,length=1,unknown=10,concurrency=2,sampling=round_robin", table, num_clients=4, updates=12)
    assert s.client[:4].tolist() == [0, 1, 2, 3] and s.dispatch_time[:4].tolist() == [0, 0, 2, 4]
    assert s.time[0] == 9 and s.version[:4].tolist() == [0, 0, 0, 0]


def test_a_look_at_which_all_uploads_are_dropped_is_no_step():
    """Client 1 comes at 8, and is too stale at 12, 6 seconds after the step at 6. Its next upload need not wait."""
    given = {"num_clients": 2, "updates": 2, "limits": Limits(max_staleness=0)}
    s = make("pace:bound=1,length=1,unknown=1,concurrency=2", table_of([6.0, 50.0], [8.0, 1.0]), **given)
    assert s.client[s.job].tolist() == [0, 1] and s.time.tolist() == [6, 13] and s.dispatch_time[:4].max() == 12


def test_its_jobs_in_flight_are_20_or_half_of_the_clients():
    for clients, jobs in ((1, 1), (5, 2), (30, 15), (100, 20)):
        s = make("pace", "constant:mean=60", num_clients=clients, updates=jobs)
        assert (s.dispatch_time == 0).sum() == jobs
        same(s, make(f"pace:concurrency={jobs}", "constant:mean=60", num_clients=clients, updates=jobs))


@pytest.mark.parametrize(("what", "conditions"), [
    ("faults", {"faults": "drop:probability=0.2+crash:probability=0.1,restart=3+corrupt:probability=0.2"}),
    ("absences", {"availability": "sessions:on=5,off=3"}),
    ("lateness", {"faults": "late:probability=0.3,extra=3", "limits": Limits(timeout=1.5, late="drop")}),
    ("staleness", {"limits": Limits(max_staleness=2)}),
])  # fmt: skip
def test_with_what_may_go_wrong_steps_stay_apart_and_clients_have_one_job(what, conditions):
    spec = "pace:bound=3,length=0.1,unknown=2,concurrency=4"
    s = make(spec, "lognormal:mean=1,heterogeneity=0.5", num_clients=9, updates=200, **conditions)
    check_invariants(s)
    assert (np.bincount(s.client, minlength=9) > 3).all()
    looks = s.time / 0.1
    np.testing.assert_allclose(looks, np.rint(looks), atol=1e-6)
    assert (np.diff(s.time[s.closes]) > 0).all()


def planned(options):
    return plan(f"pace:{options}", "constant", num_clients=3, local_steps=4, until=Until(updates=3))


test_bad_options_are_refused = refusals(
    ("bound=0", "bound = 0: must be"),
    ("length=0", "length = 0: must be"),
    ("unknown=-1", "unknown = -1: must be"),
    ("concurrency=4", "concurrency = 4: must be"),
    ("sampling=some", "sampling = 'some': unknown"),
    by=planned,
)
