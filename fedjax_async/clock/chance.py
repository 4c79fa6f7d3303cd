"""The clock's chance: every draw is a function of the seed, a named stream and a place, never of the order of asking.

Job durations are drawn in *tiles* of ``ROWS`` job numbers x ``COLUMNS`` clients. Tiles are small enough
that a million clients, of which a thousand are in flight, cost no more than the tiles they touch, and
large enough that NumPy draws them at a few nanoseconds a number.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np

from fedjax_async.clock.seeding import Generators

ROWS = 16  # consecutive job numbers of one client
COLUMNS = 64  # neighbouring clients
SHALLOW = 2  # the rows of a tile drawn at first: of a large population most clients train a few times only

# One constant for the clock as a whole keeps these streams apart from those of other rooms: NumPy pads
# short seeds with zeros, so [5] and [5, 0] are the same stream.
_CLOCK = 0xC10C
_STREAMS = {
    **{"speeds": 1, "noise": 2, "devices": 3, "sampling": 4, "participation": 5, "rounds": 6, "substitutes": 7},
    **{"joins": 8, "leaves": 9, "periodic": 10, "sessions": 11, "traces": 12},
    **{"drop": 13, "duplicate": 14, "crash": 15, "late": 16, "corrupt": 17, "groups": 18, "outages": 19},
    **{"links": 20, "jitter": 21},
}

_BLOCK = 1024  # clients whose once-for-all draws are made together


NEIGHBOURS = 64  # tiles of neighbouring clients that the planner draws together

# Tiles drawn together: enough to share the cost of array calls, few enough for the caches.
_TOGETHER = 256

DrawTiles = Callable[[np.ndarray, np.ndarray, int], np.ndarray]


def generator(seed: int, stream: str, *place: int) -> np.random.Generator:
    """The generator of one stream of the clock at one place."""
    return np.random.default_rng([seed, _CLOCK, _STREAMS[stream], *place])


def generators(seed: int, stream: str, places: np.ndarray, *common: int) -> Generators:
    """The generators of one stream at many places, int[places, words]; ``common`` words come before these."""
    return Generators([seed, _CLOCK, _STREAMS[stream], *common], places)


def padded(num_clients: int) -> int:
    """``num_clients`` rounded up to whole tiles."""
    return -(-num_clients // COLUMNS) * COLUMNS


def once_a_client(draw: Callable[[int], np.ndarray]) -> Callable[[int], float]:
    """``value(client)``: a number drawn once a client, a block of neighbours at a time, when first needed.

    ``draw(k) -> float64[_BLOCK]`` gives those of block ``k``; see ``block``.
    """
    blocks: dict[int, array] = {}

    def value(client: int) -> float:
        k, place = divmod(client, _BLOCK)
        if k not in blocks:
            blocks[k] = array("d", draw(k).astype(np.float64).tobytes())
        return blocks[k][place]

    return value


def block(seed: int, stream: str, part: int, k: int, rows: int) -> np.ndarray:
    """``rows`` uniform numbers in [0, 1) for each client of block ``k``: float64[rows, _BLOCK]."""
    return generator(seed, stream, part, k).random((_BLOCK, rows)).T


def blocks(num_clients: int) -> int:
    """How many blocks hold ``num_clients``."""
    return -(-num_clients // _BLOCK)


def normal_block(seed: int, stream: str, part: int, k: int, rows: int) -> np.ndarray:
    """``rows`` standard normal numbers for each client of block ``k``: float64[rows, _BLOCK]."""
    return generator(seed, stream, part, k).standard_normal((_BLOCK, rows)).T


def gather_tiles(draw: DrawTiles, clients: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Entries (clients[k], numbers[k]) of a table that is drawn in tiles of [ROWS, COLUMNS].

    ``draw(columns, rows, depth)`` gives the first ``depth`` rows of the tiles (columns[t], rows[t]),
    float64[tiles, depth, COLUMNS]; tile (i, j) covers clients ``i * COLUMNS ...`` and job numbers
    ``j * ROWS ...``. Each tile that is touched is drawn once, and only as deep as needed.
    """
    if not clients.size:
        return np.empty(clients.shape)
    column, row = clients // COLUMNS, numbers // ROWS
    width = int(column.max()) + 1
    tiles, which = _ranked(row * width + column)
    depth = int((numbers % ROWS).max()) + 1
    place = numbers % ROWS * COLUMNS + clients % COLUMNS
    if len(tiles) <= _TOGETHER:
        return draw(tiles % width, tiles // width, depth).reshape(-1)[which * (depth * COLUMNS) + place]
    out = np.empty(clients.shape)
    order = np.argsort(which, kind="stable")
    for first in range(0, len(tiles), _TOGETHER):
        some = tiles[first : first + _TOGETHER]
        low, high = np.searchsorted(which, [first, first + _TOGETHER], sorter=order)
        inside = order[low:high]
        drawn = draw(some % width, some // width, int((numbers[inside] % ROWS).max()) + 1)
        out[inside] = drawn.reshape(len(some), -1)[which[inside] - first, place[inside]]
    return out


def _ranked(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct values in order, and which of them each entry is (``np.unique``, without sorting if it can be)."""
    low, high = int(values.min()), int(values.max())
    if low == high:
        return values[:1], np.zeros(values.shape, np.int64)
    if high - low > 4 * values.size + 1_000_000:
        return np.unique(values, return_inverse=True)
    present = np.zeros(high - low + 1, np.bool_)
    present[values - low] = True
    return np.flatnonzero(present) + low, (np.cumsum(present) - 1)[values - low]


def deck(seed: int, stream: str, cards: int, count: int, *place: int) -> np.ndarray:
    """``count`` draws from ``cards`` cards without replacement, reshuffled when they run out; int64[count].

    The first draws are the same whatever ``count``, so adding clients leaves the others as they were.
    """
    shuffles = -(-count // cards)
    return np.argsort(generator(seed, stream, *place).random((shuffles, cards)), axis=1).reshape(-1)[:count]
