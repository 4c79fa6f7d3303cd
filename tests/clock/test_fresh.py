"""The timing ``fresh``, of Ringmaster ASGD and Rennala SGD, against a plain loop over the workers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.clock import Limits, Outcome, Until, fault_counts
from tests.clock.textbook import arrivals_of, check_invariants, make, same, seconds_of, table_of


def played(rows, size, threshold, stop, updates, everyone=False):
    """Ringmaster ASGD (2025), Algorithms 4 and 5, Rennala SGD (2023) for batches of ``size``, and Malenia SGD (2023).

    Returns the arrivals (client, number, time, delay, step) and the outcomes of jobs by (client, number).
    """
    step = filled = 0
    number, begun = [0] * len(rows), [0] * len(rows)
    ends = [row[0] for row in rows]
    arrivals, outcomes, came = [], {}, set()
    while len(arrivals) < updates:
        now = min(ends)
        done = [i for i, end in enumerate(ends) if end == now]
        for i in done:
            outcomes[i, number[i]] = "under way"
            if len(arrivals) == updates:
                continue
            delay = step - begun[i]
            outcomes[i, number[i]] = "ignored" if delay >= threshold else "applied"
            if delay < threshold:
                arrivals.append((i, number[i], now, delay, step))
                filled += 1
                came.add(i)
                if filled >= size and (not everyone or len(came) == len(rows)):
                    step, filled, came = step + 1, 0, set()
        if len(arrivals) == updates:
            break
        stopped = [i for i in range(len(rows)) if stop and i not in done and step - begun[i] >= threshold]
        outcomes |= {(i, number[i]): "stopped" for i in stopped}
        for i in done + stopped:
            number[i], begun[i] = number[i] + 1, step
            ends[i] = now + seconds_of(rows, i, number[i])
    return arrivals, outcomes


KNOWN = {"applied": Outcome.APPLIED, "ignored": Outcome.DROPPED_STALE, "stopped": Outcome.CALLED_OFF}


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=3, max_size=3), min_size=1, max_size=6),
    st.integers(1, 4), st.integers(1, 4), st.booleans(), st.integers(1, 40), st.booleans(),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_it_is_the_loop_over_the_workers(rows, size, threshold, stop, updates, everyone):
    spec = f"fresh:size={size},threshold={threshold},stop={str(stop).lower()},everyone={str(everyone).lower()}"
    s = make(spec, table_of(*rows), num_clients=len(rows), until=Until(updates=updates))
    check_invariants(s)
    arrivals, outcomes = played(rows, size, threshold, stop, updates, everyone)
    assert arrivals_of(s, "client", "number", "time", "staleness", "step") == arrivals
    for client, number, sent, outcome in zip(s.client, s.number, s.dispatch_time, s.outcome):
        if (found := outcomes.get((client, number), "under way")) != "under way" and sent < arrivals[-1][2]:
            assert outcome == KNOWN[found]


@pytest.mark.parametrize("given", [{}, {"availability": "sessions:on=4,off=2,leaving=lose", "faults": "crash+drop"}])
def test_without_stops_it_is_a_buffer_that_takes_no_stale_upload(given):
    for size, threshold in ((1, 3), (3, 1)):
        limited = make(f"buffer:size={size}", limits=Limits(max_staleness=threshold - 1), **given)
        same(make(f"fresh:size={size},threshold={threshold},stop=false", **given), limited)
        looser = f"fresh:size={size},threshold={threshold + 4},stop=false"
        same(make(looser, limits=Limits(threshold - 1), **given), limited)


def test_of_a_worker_that_is_very_slow_no_gradient_is_late_and_none_is_trained_in_vain():
    rows = [[1.0], [1.2], [1.3], [1000.0]]
    asgd = make("every", table_of(*rows), num_clients=4, updates=4000)
    ringmaster = make("fresh:threshold=6", table_of(*rows), num_clients=4, updates=4000)
    assert asgd.staleness.max() > 2000 and ringmaster.staleness.max() < 6
    counts = fault_counts(ringmaster)
    assert counts["dropped_stale"] == 0 and counts["called_off"] > 600
    assert set(ringmaster.client[ringmaster.outcome == Outcome.CALLED_OFF]) == {3}


@pytest.mark.parametrize("sampling", ["same", "uniform", "round_robin"])
def test_clients_of_failed_jobs_are_idle_only_once(sampling):
    s = make(
        f"fresh:threshold=2,concurrency=4,sampling={sampling}", "lognormal:heterogeneity=1", updates=300,
        faults="drop:probability=0.5+crash:probability=0.2,restart=3", limits=Limits(timeout=0.6),
        availability="sessions:on=9,off=2,leaving=lose",
    )  # fmt: skip
    check_invariants(s)
    assert len(s.job) == 300 and {Outcome.LOST, Outcome.GIVEN_UP, Outcome.CALLED_OFF} <= set(s.outcome)
