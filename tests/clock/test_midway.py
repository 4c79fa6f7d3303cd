"""The timing ``midway``, with a second message in each job, against a plain loop over the workers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.clock import Outcome, Until, fault_counts, plan
from tests.clock.textbook import N, check_invariants, make, same, table_of
from tests.refusals import refusals


def played(rows, steps, share, size, updates):
    """Arrivals (client, time, delay since the second message, step), and messages (client, time, version).

    At a moment all uploads come first, in order of the clients, then their answers, then second messages.
    """
    step = filled = 0
    count, begun = [0] * len(rows), [0.0] * len(rows)
    arrivals, messages, version = [], [(i, 0.0, 0) for i in range(len(rows))], [0] * len(rows)
    first = max(1, min(steps - 1, round(share * steps)))

    def moments(i):
        takes = rows[i][min(count[i], len(rows[i]) - 1)]
        return begun[i] + takes * first / steps, begun[i] + takes

    second = [True] * len(rows) if steps > 1 else [False] * len(rows)  # still to come
    while len(arrivals) < updates:
        now = min(moments(i)[not second[i]] for i in range(len(rows)))
        back = [i for i in range(len(rows)) if not second[i] and moments(i)[1] == now]
        for i in back:
            if len(arrivals) < updates:
                arrivals.append((i, now, step - version[i], step))
                filled += 1
                if filled == size:
                    step, filled = step + 1, 0
        for i in back:
            count[i], begun[i], version[i], second[i] = count[i] + 1, now, step, steps > 1
            messages.append((i, now, step))
        for i in range(len(rows)):
            if second[i] and i not in back and moments(i)[0] == now:
                version[i], second[i] = step, False
                messages.append((i, now, step))
    return arrivals, messages


@given(
    st.lists(st.lists(st.integers(1, 9).map(lambda n: 4 * n), min_size=3, max_size=3), min_size=1, max_size=6),
    st.sampled_from([1, 2, 4]), st.sampled_from([0.1, 0.25, 0.5, 0.8]), st.integers(1, 3), st.integers(1, 40),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_it_is_the_loop_over_the_workers(rows, steps, share, size, updates):
    size = min(size, len(rows))
    until = Until(updates=updates)
    s = make(f"midway:at={share},size={size}", table_of(*rows), num_clients=len(rows), local_steps=steps, until=until)
    check_invariants(s)
    arrivals, messages = played(rows, steps, share, size, updates)
    columns = (s.client[s.job], s.time, s.staleness, s.step)
    assert [tuple(row) for row in zip(*(column.tolist() for column in columns))] == arrivals
    end = arrivals[-1][1]
    assert (s.dispatch_time <= end).all(), "a job whose middle comes after the end has no second part"
    sent = sorted(zip(s.client.tolist(), s.dispatch_time.tolist(), s.version.tolist()))
    assert [row for row in sent if row[1] < end] == sorted(row for row in messages if row[1] < end)
    parts = s.outcome[s.dispatch_time + s.upload_time < 2 * end]
    assert np.isin(parts, (Outcome.APPLIED, Outcome.WITHHELD, Outcome.UNDER_WAY)).all()


def test_the_parts_are_the_whole_job():
    whole, s = make("buffer:size=2", local_steps=5), make("midway:size=2,at=0.3", local_steps=5)
    for name in ("time", "closes", "step"):
        np.testing.assert_array_equal(getattr(s, name), getattr(whole, name))
    np.testing.assert_array_equal(s.client[s.job], whole.client[whole.job])
    first = np.flatnonzero(s.outcome == Outcome.WITHHELD)
    assert (s.local_steps[first] == 2).all() and (s.local_steps[s.job] == 3).all()
    counts = fault_counts(s)
    assert counts["withheld"] >= len(s.job) and (s.staleness <= whole.staleness).all()
    assert s.staleness.sum() < whole.staleness.sum()
    takes = (s.upload_time - s.dispatch_time)[first]
    following = [np.flatnonzero((s.client == s.client[j]) & (s.number == s.number[j] + 1))[0] for j in first]
    np.testing.assert_allclose(takes / (s.upload_time - s.dispatch_time)[following], 2 / 3)
    np.testing.assert_array_equal(s.upload_time[first], s.dispatch_time[following])


def test_a_job_of_one_step_has_one_part():
    same(make("midway", local_steps=1), make("every", local_steps=1))
    mixed = make("midway", local_steps=np.array([1, 4, 4, 4, 4, 4, 4]))
    assert not np.isin(0, mixed.client[mixed.outcome == Outcome.WITHHELD])
    assert set(mixed.client[mixed.outcome == Outcome.WITHHELD]) == set(range(1, N))


@pytest.mark.parametrize("budget", ["updates", "time", "steps"])
def test_a_longer_budget_continues_a_shorter_one(budget):
    short, long = (make("midway:size=2", until=Until(**{budget: most})) for most in (20, 60))
    jobs, arrivals = len(short.client) - N, len(short.job)
    for name in ("client", "number", "local_steps", "dispatch_time", "upload_time", "dispatched_after", "version"):
        np.testing.assert_array_equal(getattr(short, name)[:jobs], getattr(long, name)[:jobs])
    for name in ("job", "time", "closes", "step"):
        np.testing.assert_array_equal(getattr(short, name), getattr(long, name)[:arrivals])


def planned(options, **given):
    return plan(f"midway:{options}", "constant", num_clients=3, local_steps=4, until=Until(updates=3), **given)


test_bad_options_are_refused = refusals(
    ("at=0", "at = 0: must be in"),
    ("at=1", "at = 1: must be in"),
    ("at=true", "at = True: must be in"),
    ("size=4", "size = 4: must be at most the 3 clients"),
    ("size=0", "size = 0: must be"),
    ("sampling=any", "sampling = 'any': unknown"),
    by=planned,
)
test_what_may_keep_a_client_from_its_second_message_is_refused = refusals(
    ({"availability": "sessions:on=3,off=2"}, "timing = 'midway': must be another one with availability"),
    ({"faults": "drop:probability=0.1"}, "timing = 'midway': must be another one with availability"),
    by=lambda given: planned("at=0.5", **given),
)
