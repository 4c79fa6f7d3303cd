"""The timing ``hurry``, whose late clients upload what they have, against a plain loop over the workers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.clock import Until, plan
from tests.clock.textbook import N, check_invariants, make, same, table_of
from tests.refusals import refusals


def played(rows, steps, size, bound, updates):
    """Arrivals (worker, time, local steps, delay, whether it closes). A local step of job k takes ``rows[i][k]``."""
    n, step, filled, asked = len(rows), 0, 0, set()
    begun, since, count, left = [0] * n, [0] * n, [0] * n, [steps] * n  # left: local steps of the job
    arrivals = []

    def takes(i):
        return rows[i][min(count[i], len(rows[i]) - 1)]

    while len(arrivals) < updates:
        now = min(begun[i] + left[i] * takes(i) for i in range(n))
        idle = set()
        while len(arrivals) < updates:
            back = [i for i in range(n) if i not in idle and begun[i] + left[i] * takes(i) == now]
            if not back:
                break
            i = back[0]
            idle.add(i)
            asked.discard(i)
            filled += 1
            late = []
            if filled >= size and not asked:
                late = [j for j in range(n) if j not in idle and step - since[j] >= bound]
                for j in late:
                    left[j] = min(left[j], (now - begun[j]) // takes(j) + 1)
                    asked.add(j)
            closes = filled >= size and not asked
            arrivals.append((i, now, left[i], step - since[i], closes))
            if closes:
                step, filled = step + 1, 0
        for i in idle:
            count[i], begun[i], since[i], left[i] = count[i] + 1, now, step, steps
    return arrivals


@given(
    st.lists(st.lists(st.integers(1, 30), min_size=3, max_size=3), min_size=1, max_size=6),
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 50),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_it_is_the_loop_over_the_workers(rows, steps, size, bound, updates):
    table, until = table_of(*(steps * np.array(rows)).tolist()), Until(updates=updates)
    s = make(f"hurry:size={size},bound={bound}", table, num_clients=len(rows), local_steps=steps, until=until)
    check_invariants(s)
    columns = (s.client[s.job], s.time, s.local_steps[s.job], s.staleness, s.closes)
    found = [tuple(row) for row in zip(*(column.tolist() for column in columns))]
    assert found == played(rows, steps, size, bound, updates)
    assert s.staleness.max() <= bound


def test_a_very_slow_client_takes_part_with_few_steps_and_is_never_staler_than_the_bound():
    rows = [[1.0], [1.2], [1.3], [100.0]]
    s = make("hurry:size=3,bound=5", table_of(*rows), num_clients=4, local_steps=10, updates=600)
    slow = s.local_steps[s.job][s.client[s.job] == 3]
    assert s.staleness.max() == 5 and len(slow) > 10 and set(slow) == {1}
    assert set(s.local_steps[s.job][s.client[s.job] == 0]) == {10}


def test_without_late_clients_it_is_a_buffer():
    for size in (1, 3):
        names = ("client", "local_steps", "dispatch_time", "upload_time", "job", "time", "closes", "version")
        same(make(f"hurry:size={size},bound=10000"), make(f"buffer:size={size}"), names)
        # Here the budget ends within a moment, and all clients get replies.
        at_once = {"delays": "constant:mean=10", "updates": N + 3}
        last = make(f"hurry:size={size},bound=10000", **at_once)
        same(last, make(f"buffer:size={size}", **at_once), names)
        assert len(last.client) == 3 * N


def planned(options="size=2,bound=3", **given):
    return plan(f"hurry:{options}", "constant", num_clients=3, local_steps=4, until=Until(updates=3), **given)


test_bad_options_are_refused = refusals(
    ("size=0", "size = 0: must be"),
    ("bound=0", "bound = 0: must be"),
    by=planned,
)


@pytest.mark.parametrize("given", [{"availability": "sessions:on=3,off=2"}, {"faults": "drop:probability=0.1"}])
def test_what_may_keep_a_client_from_answering_is_refused(given):
    with pytest.raises(ValueError, match=r"^timing = 'hurry': must be another one with availability"):
        planned(**given)
