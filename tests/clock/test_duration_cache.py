import math

import numpy as np
import pytest

from fedjax_async.clock import durations, fast_paths
from fedjax_async.clock.durations import DurationCache
from fedjax_async.clock.fast_paths import DurationTable, make_cache


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


def test_a_table_draws_no_more_than_it_has_room_for_or_is_asked_for():
    drawn = []

    def draw(clients, numbers):
        drawn.append(np.broadcast(clients, numbers).size)
        return np.ones((len(clients), numbers.shape[1]))

    DurationTable(draw, 1000, 3000).pop(7)
    DurationTable(draw, 10, math.inf).pop(7)
    DurationTable(draw, fast_paths._CELLS // 5, math.inf).pop(7)
    assert drawn == [6000, 640, fast_paths._CELLS // 5 * 5]


@pytest.mark.parametrize(("items", "cells"), [(1, 1), (20, 1), (20, 70)])
def test_single_clients_and_arrays_of_them_pop_from_one_cache(items, cells, monkeypatch):
    monkeypatch.setattr(durations, "_ITEMS", items)
    monkeypatch.setattr(fast_paths, "_CELLS", cells)
    mine = make_cache(lambda clients, numbers: 1000.0 * clients + numbers + 1, 6, 100, lambda client: [client, 2, 4])
    taken = np.zeros(6)
    for some in [[1], [1], [0, 1, 2], [2], [2], [1, 2, 4], [4], [5], [0, 5]] * 5:
        found = [mine.pop(*some)] if len(some) == 1 else mine.pop_each(np.array(some))
        np.testing.assert_array_equal(found, 1000 * np.array(some) + taken[some] + 1)
        taken[some] += 1
