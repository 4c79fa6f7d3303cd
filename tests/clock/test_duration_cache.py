from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.clock import durations, fast_paths
from fedjax_async.clock.durations import DurationCache
from fedjax_async.clock.fast_paths import DurationTable, make_cache


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=200),
    st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=5),
    st.sampled_from([1, 7, 40, 1 << 17]),
)
@settings(deadline=None, max_examples=100)
def test_each_client_gets_its_jobs_in_turn_whoever_is_foreseen(asking, foreseen, items):
    old, durations._ITEMS = durations._ITEMS, items
    try:
        guesses = iter(foreseen * 200)
        mine = DurationCache(lambda clients, numbers: 1000 * clients + numbers, 6, lambda client: next(guesses))
        mine.prepare([0, 3, 3])
        assert [mine.pop(client) for client in asking] == [
            1000 * client + asking[:k].count(client) for k, client in enumerate(asking)
        ]
    finally:
        durations._ITEMS = old


def test_what_is_drawn_ahead_is_bounded(monkeypatch):
    monkeypatch.setattr(durations, "_ITEMS", 1 << 10)
    drawn = []

    def draw(clients, numbers):
        drawn.append(np.broadcast(clients, numbers).size)
        return np.zeros((len(clients), numbers.shape[1]))

    many = DurationCache(draw, 100_000, lambda client: range(client, client + 100))
    for client in range(0, 100_000, 100):
        many.pop(client)
        assert len(many._ready) <= (2 << 10) + 100
    assert max(drawn) == 100
    few = DurationCache(draw, 10)
    few.pop(3)
    assert drawn[-1] == 10 * 64


@given(
    st.lists(st.integers(0, 5) | st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=200),
    st.sampled_from([1, 10, 100, math.inf]),
    st.sampled_from([1, 24, 70, 1 << 17]),
    st.sampled_from([1, 20, 1 << 17]),
)
@settings(deadline=None, max_examples=100)
def test_single_clients_and_arrays_of_them_pop_from_one_cache(asking, jobs, cells, items):
    old, (fast_paths._CELLS, durations._ITEMS) = (fast_paths._CELLS, durations._ITEMS), (cells, items)
    try:
        mine = make_cache(
            lambda clients, numbers: 1000.0 * clients + numbers + 1, 6, jobs, lambda client: [client, 2, 4]
        )
        assert isinstance(mine, DurationTable) == (cells >= 24 and jobs > 1)
        taken = [0] * 6
        for some in asking:
            clients = np.array([some] if isinstance(some, int) else sorted(some))
            found = [mine.pop(some)] if isinstance(some, int) else mine.pop_each(clients).tolist()
            assert found == [1000 * client + taken[client] + 1 for client in clients]
            for client in clients:
                taken[client] += 1
    finally:
        fast_paths._CELLS, durations._ITEMS = old


def test_a_table_draws_no_more_than_it_has_room_for_or_is_asked_for():
    drawn = []

    def draw(clients, numbers):
        drawn.append(np.broadcast(clients, numbers).size)
        return np.ones((len(clients), numbers.shape[1]))

    DurationTable(draw, 1000, 3000).pop(7)
    DurationTable(draw, 10, math.inf).pop(7)
    DurationTable(draw, fast_paths._CELLS // 5, math.inf).pop(7)
    assert drawn == [6000, 640, fast_paths._CELLS // 5 * 5]
