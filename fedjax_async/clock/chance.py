"""The clock's chance: every draw is a function of the seed, a named stream and a place, never of the order of asking.

Job durations are drawn in *tiles* of ``ROWS`` job numbers x ``COLUMNS`` clients. Tiles are small enough
that a million clients, of which a thousand are in flight, cost no more than the tiles they touch, and
large enough that NumPy draws them at a few nanoseconds a number.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

ROWS = 16  # consecutive job numbers of one client
COLUMNS = 64  # neighbouring clients

# One constant for the clock as a whole keeps these streams apart from those of other rooms: NumPy pads
# short seeds with zeros, so [5] and [5, 0] are the same stream.
_CLOCK = 0xC10C
_STREAMS = {"speeds": 1, "noise": 2, "devices": 3, "sampling": 4, "participation": 5, "rounds": 6}


def generator(seed: int, stream: str, *place: int) -> np.random.Generator:
    """The generator of one stream of the clock at one place."""
    return np.random.default_rng([seed, _CLOCK, _STREAMS[stream], *place])


def padded(num_clients: int) -> int:
    """``num_clients`` rounded up to whole tiles."""
    return -(-num_clients // COLUMNS) * COLUMNS


def gather_tiles(draw: Callable[[int, int], np.ndarray], clients: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Entries (clients[k], numbers[k]) of the table whose tile (i, j) is ``draw(i, j)`` of shape [ROWS, COLUMNS].

    Tile (i, j) covers clients ``i * COLUMNS ...`` and job numbers ``j * ROWS ...``; each tile that is
    touched is drawn once.
    """
    tile = (numbers // ROWS << 32) | clients // COLUMNS
    place = numbers % ROWS * COLUMNS + clients % COLUMNS

    def read(key: int, places: np.ndarray) -> np.ndarray:
        return draw(key & 0xFFFFFFFF, key >> 32).reshape(-1)[places]

    if len(tile) and (tile == tile[0]).all():  # the planner asks for one tile at a time
        return read(int(tile[0]), place)
    out = np.empty(clients.shape, np.float64)
    order = np.argsort(tile, kind="stable")
    keys = np.unique(tile)
    for key, inside in zip(keys.tolist(), np.split(order, np.searchsorted(tile[order], keys[1:]))):
        out[inside] = read(key, place[inside])
    return out


def deck(seed: int, stream: str, cards: int, count: int) -> np.ndarray:
    """``count`` draws from ``cards`` cards without replacement, reshuffled when they run out; int64[count].

    The first draws are the same whatever ``count``, so adding clients leaves the others as they were.
    """
    shuffles = -(-count // cards)
    return np.argsort(generator(seed, stream).random((shuffles, cards)), axis=1).reshape(-1)[:count]
