"""When clients are offline, for pictures of a schedule: the same draws that its planner made."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from fedjax_async.base import check
from fedjax_async.clock.availability import AvailabilityModel, together
from fedjax_async.clock.faults import FaultModel
from fedjax_async.clock.scenario import NO_LIMITS, bind

OfflineTimes = Callable[[int, float], np.ndarray]
MOST = 100_000  # absences of one client; more could not be drawn


def offline_times(
    availability: AvailabilityModel | str | None,
    num_clients: int,
    *,
    faults: FaultModel | str | None = None,
    seed: int = 0,
) -> OfflineTimes:
    """``times(client, until)``: the intervals before virtual second ``until`` in which a client is offline.

    They are float64[M, 2], in order. The arguments are those of ``plan``; faults count because groups of clients may
    fail together. ``ValueError`` for models that ``plan`` refuses, and for more than 100,000 absences of a client.

    >>> offline_times("periodic:on=3,off=2,phase=0", 1)(0, 9.0).tolist()
    [[3.0, 5.0], [8.0, 9.0]]
    """
    check.whole("num_clients", num_clients)
    interval = together([one.interval for one in bind(availability, faults, NO_LIMITS, num_clients, seed).availability])

    def times(client: int, until: float) -> np.ndarray:
        found: list[tuple[float, float]] = []
        time = 0.0
        while interval is not None and time < until:
            start, end = interval(client, time)
            if start > time:
                found.append((time, min(start, until)))
            time = max(end, math.nextafter(time, math.inf))
            check.require(
                len(found) <= MOST, "until", until, f"less: client {client} is offline more than {MOST:,} times"
            )
        return np.array(found, np.float64).reshape(-1, 2)

    return times
