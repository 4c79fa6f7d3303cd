"""Ringleader ASGD with its timing ``turns``, against a plain loop over the workers."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.clock import Until, buffering
from fedjax_async.server import SERVERS
from fedjax_async.types import Facts, Request
from tests.clock.textbook import check_invariants, make, table_of
from tests.server.made_up import D, arrival, flat, received, start_params, unflat

LR = 0.3
TARGETS = np.random.default_rng(4).normal(size=(8, D))


def change_of(model, worker):
    """A worker's delta: part of the way to its own optimum, bent by a nonlinearity."""
    return 0.3 * np.tanh(TARGETS[worker] - model)


def played(rows, updates, x):
    """Arrivals (worker, time, whether the server stepped), the models after them, and the delays of the deltas used.

    A worker goes on from the model that it has until the server gives it a new one, at its turn. Uploads of one moment
    are taken in order of the workers before any of them starts again.
    """
    n = len(rows)
    has, since, count, ends = [x] * n, [0] * n, [0] * n, [row[0] for row in rows]
    now, early, left, step = [[] for _ in rows], [[] for _ in rows], set(), 0
    arrivals, path, delays = [], [], []
    while len(arrivals) < updates:
        time = min(ends)
        back = [i for i in range(n) if ends[i] == time]
        for i in back:
            if len(arrivals) == updates:
                break
            delta, collecting = (change_of(has[i], i), since[i]), not left
            (now if collecting or i in left else early)[i].append(delta)
            if turn := i in left or (collecting and all(now)):
                x = x + LR * np.mean([np.mean([d for d, _ in each], axis=0) for each in now], axis=0)
                delays += [step - begun for each in now for _, begun in each]
                step += 1
                left = left - {i} if left else {*range(n)} - {i}
                has[i], since[i] = x, step
                if not left:
                    now, early = early, [[] for _ in rows]
            arrivals.append((i, time, turn))
            path.append(x)
        for i in back:
            count[i] += 1
            ends[i] = time + rows[i][min(count[i], len(rows[i]) - 1)]
    return arrivals, np.array(path), delays


worlds = st.lists(st.lists(st.integers(1, 9), min_size=3, max_size=3), min_size=1, max_size=6)


@given(worlds, st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_uploads_have_their_turns_as_in_the_loop_over_the_workers(rows, updates):
    s = make("turns", table_of(*rows), num_clients=len(rows), until=Until(updates=updates))
    check_invariants(s)
    arrivals, _, delays = played(rows, updates, np.zeros(D))
    columns = (s.client[s.job], s.time, s.closes)
    assert [tuple(row) for row in zip(*(column.tolist() for column in columns))] == arrivals
    assert max(delays, default=0) <= 2 * len(rows) - 2


@pytest.mark.float64
@pytest.mark.parametrize("rows", [[[1, 1, 1], [2, 3, 2], [9, 8, 9]], [[2, 1, 3], [2, 2, 2], [4, 4, 4], [5, 9, 2]]])
def test_the_models_are_those_of_the_loop_over_the_workers(rows):
    n, updates = len(rows), 80
    s = make("turns", table_of(*rows), num_clients=n, until=Until(updates=updates))
    rule = SERVERS["ringleader"](server_lr=LR)
    receive, dispatch = jax.jit(received(rule)), jax.jit(rule.dispatch)
    state, row = rule.init(start_params(), Facts(n))
    memory, starts, path, sent = [row] * n, {}, [], 0
    for e in range(updates + 1):
        while sent < len(s.client) and s.dispatched_after[sent] == e:
            who = s.client[sent]
            message, memory[who] = dispatch(state, memory[who], Request())
            starts[sent], sent = message.params, sent + 1
        if e < updates:
            job, who = s.job[e], int(s.client[s.job[e]])
            change = unflat(change_of(flat(starts[job]), who), float)
            arrived = arrival(change, starts[job], int(s.staleness[e]), who, closes=bool(s.closes[e]))
            state, memory[who], info = receive(state, memory[who], arrived)
            assert info.weight == 1
            path.append(flat(rule.params(state)))
    _, expected, _ = played(rows, updates, flat(start_params()))
    np.testing.assert_allclose(path, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.float64
def test_a_rejected_upload_is_its_clients_turn_without_a_step():
    rule = SERVERS["ringleader"]()
    state, row = rule.init(start_params(), Facts(2))
    rows, zero = [row, row], unflat(np.zeros(D), float)
    for who, closes, weight in ((0, False, 1.0), (1, True, 1.0), (0, True, 0.0)):
        delta = unflat(np.full(D, 1.0 + who), float) if weight else zero
        given = arrival(delta, start_params(), 0, who, closes=closes, weight=weight)
        state, rows[who], info = received(rule)(state, rows[who], given)
    np.testing.assert_allclose(flat(state.params), flat(start_params()) + 1.5)
    assert info.weight == 0 and state.cycle == 1 and state.turns == 0 and state.now.clients == 0
    np.testing.assert_array_equal(flat(rows[0].model), flat(state.params))


@pytest.mark.parametrize("timing", ["turns", "fresh:everyone=true,stop=false,threshold=1000"])
def test_a_plan_whose_client_is_gone_says_so(timing, monkeypatch):
    monkeypatch.setattr(buffering, "LONGEST_WAIT", 500)
    with pytest.raises(ValueError, match=r"^timing: of the last 500 uploads not one completes a server step"):
        make(timing, until=Until(steps=40), availability="leaves:share=0.3,by=5")


def test_a_fast_client_has_one_turn_a_cycle_and_a_larger_batch():
    s = make("turns", table_of([1.0], [1.3], [1.7], [40.0]), num_clients=4, updates=2000)
    turns = s.client[s.job][s.closes]
    for cycle in range(len(turns) // 4):
        assert sorted(turns[4 * cycle : 4 * cycle + 4]) == [0, 1, 2, 3]
    assert np.bincount(s.client[s.job])[0] > 30 * np.bincount(s.client[s.job])[3]
