from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.clock import stock
from fedjax_async.clock.stock import Stock, Table, stocked


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=200),
    st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=5),
    st.sampled_from([1, 7, 40, 1 << 17]),
)
@settings(deadline=None, max_examples=100)
def test_each_client_gets_its_jobs_in_turn_whoever_is_foreseen(asking, foreseen, items):
    old, stock._ITEMS = stock._ITEMS, items
    try:
        guesses = iter(foreseen * 200)
        mine = Stock(lambda clients, numbers: 1000 * clients + numbers, 6, lambda client: next(guesses))
        mine.prepare([0, 3, 3])
        assert [mine.take(client) for client in asking] == [
            1000 * client + asking[:k].count(client) for k, client in enumerate(asking)
        ]
    finally:
        stock._ITEMS = old


def test_what_is_drawn_ahead_is_bounded(monkeypatch):
    monkeypatch.setattr(stock, "_ITEMS", 1 << 10)
    drawn = []

    def draw(clients, numbers):
        drawn.append(np.broadcast(clients, numbers).size)
        return np.zeros((len(clients), numbers.shape[1]))

    many = Stock(draw, 100_000, lambda client: range(client, client + 100))
    for client in range(0, 100_000, 100):
        many.take(client)
        assert len(many._ready) <= (2 << 10) + 100
    assert max(drawn) == 100
    few = Stock(draw, 10)
    few.take(3)
    assert drawn[-1] == 10 * 64


@given(
    st.lists(st.integers(0, 5) | st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=200),
    st.sampled_from([1, 10, 100, math.inf]),
    st.sampled_from([1, 24, 70, 1 << 17]),
    st.sampled_from([1, 20, 1 << 17]),
)
@settings(deadline=None, max_examples=100)
def test_single_clients_and_arrays_of_them_take_from_one_stock(asking, jobs, cells, items):
    old, (stock._CELLS, stock._ITEMS) = (stock._CELLS, stock._ITEMS), (cells, items)
    try:
        mine = stocked(lambda clients, numbers: 1000.0 * clients + numbers + 1, 6, jobs, lambda client: [client, 2, 4])
        assert isinstance(mine, Table) == (cells >= 24 and jobs > 1)
        taken = [0] * 6
        for some in asking:
            clients = np.array([some] if isinstance(some, int) else sorted(some))
            found = [mine.take(some)] if isinstance(some, int) else mine.take_each(clients).tolist()
            assert found == [1000 * client + taken[client] + 1 for client in clients]
            for client in clients:
                taken[client] += 1
    finally:
        stock._CELLS, stock._ITEMS = old


def test_a_table_draws_no_more_than_it_has_room_for_or_is_asked_for():
    drawn = []

    def draw(clients, numbers):
        drawn.append(np.broadcast(clients, numbers).size)
        return np.ones((len(clients), numbers.shape[1]))

    Table(draw, 1000, 3000).take(7)
    Table(draw, 10, math.inf).take(7)
    Table(draw, stock._CELLS // 5, math.inf).take(7)
    assert drawn == [6000, 640, stock._CELLS // 5 * 5]
