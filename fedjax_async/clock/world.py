"""The world as a timing policy sees it: the clients, how long their jobs take, the budget, the conditions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

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


def too_short(client: int, time: float) -> ValueError:
    """The error for a job whose end cannot be told from its beginning."""
    return ValueError(f"delays: a job of client {client} is too short to advance the clock at {time} s")
