"""The world as a timing policy sees it: the clients, how long their jobs take, the budget, the conditions."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedjax_async.clock import chance
from fedjax_async.clock.conditions import Conditions
from fedjax_async.clock.durations import Delays


class Until(NamedTuple):
    """When a plan ends: at the first that is reached of virtual seconds, applied arrivals, closed server steps.

    ``time`` is inclusive. What the budget cuts off is never half done: arrivals that were applied to an
    unfinished server step are listed with ``closes`` false.
    """

    time: float | None = None
    updates: int | None = None
    steps: int | None = None


class World(NamedTuple):
    """All that a timing policy may know: the clients, their jobs' lengths and delays, the budget, the seed.

    ``conditions`` is ``None`` where clients are always there, nothing fails and the server sets no limits.
    """

    num_clients: int
    local_steps: np.ndarray  # int64[N]
    delays: Delays
    until: Until
    seed: int
    bytes_down: int | np.ndarray = 0
    bytes_up: int | np.ndarray = 0
    conditions: Conditions | None = None


def checked_durations(world: World, clients: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Seconds of these jobs, float64, with the world's local steps and bytes; all finite and > 0."""
    sizes = (_of_clients(one, clients) for one in (world.local_steps, world.bytes_down, world.bytes_up))
    values = world.delays.durations(clients, numbers, *sizes)
    if not (np.isfinite(values) & (values > 0)).all():
        raise ValueError("delays: every duration must be a finite number > 0")
    return values


def _of_clients(values: int | np.ndarray, clients: np.ndarray) -> int | np.ndarray:
    if not isinstance(values, np.ndarray):
        return values
    return values[0] if values.strides == (0,) else values[clients]  # one number for all of them


def duration_lookup(world: World) -> Callable[[int, int], float]:
    """``lookup(client, number) -> seconds``: durations drawn and scaled many tiles at a time, when first needed.

    The first jobs of all clients are in one flat table, for in a large population any client may be next,
    and most train a few times only. The others are in a dict: the job numbers 2..3, 4..7, 8..15, 16..31,
    32..47, ... of the clients of a block.
    """
    rows, width = chance.ROWS, min(chance.NEIGHBOURS * chance.COLUMNS, chance.padded(world.num_clients))
    blocks = -(-world.num_clients // width)
    shallow, stride = chance.SHALLOW, blocks * width
    first = array("d", bytes(8 * shallow * stride))
    later: dict[int, array] = {}

    def draw(block: int, numbers: np.ndarray) -> np.ndarray:
        clients = np.minimum(np.arange(block * width, (block + 1) * width), world.num_clients - 1)
        return checked_durations(world, *np.broadcast_arrays(clients, numbers[:, None]))

    def draw_first(block: int) -> None:
        for number, row in enumerate(draw(block, np.arange(shallow))):
            begin = number * stride + block * width
            first[begin : begin + width] = array("d", row.tobytes())

    def draw_later(block: int, begin: int, end: int) -> array:
        later[begin * blocks + block] = array("d", draw(block, np.arange(begin, end)).tobytes())
        return later[begin * blocks + block]

    def lookup(client: int, number: int) -> float:
        if number < shallow:
            place = number * stride + client
            if first[place] == 0:
                draw_first(client // width)
            return first[place]
        block, offset = divmod(client, width)
        if number < rows:
            begin = 1 << number.bit_length() - 1
            end = 2 * begin
        else:
            begin = number - number % rows
            end = begin + rows
        key = begin * blocks + block
        drawn = later[key] if key in later else draw_later(block, begin, end)
        return drawn[(number - begin) * width + offset]

    return lookup
