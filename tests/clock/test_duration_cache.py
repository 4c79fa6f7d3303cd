from __future__ import annotations

import math

import numpy as np

from fedjax_async.clock import durations, fast_paths
from fedjax_async.clock.durations import DurationCache
from fedjax_async.clock.fast_paths import DurationTable


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
