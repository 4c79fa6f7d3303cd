"""When the nodes of a decentralised run are evaluated, and what they may not record."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fedjax_async.base import check
from fedjax_async.clock import at_or_before
from fedjax_async.peers.schedule import PeerSchedule

# Columns of the table of events that algorithms and clients may not record.
RESERVED = (
    "event", "client", "number", "start", "end", "mixed_at", "time", "local_steps", "gradients", "mass", "upload_norm",
    "accepted", "refused_messages",
)  # fmt: skip

# When the models of all nodes, and their mean, are evaluated on the global test set: at every evaluation, at the first
# and the last, or never. Such an evaluation reads the set N + 1 times; the nodes' own tests together are about one set.
GLOBAL_TESTS = ("all", "ends", "never")


def checked_points(points: ArrayLike) -> np.ndarray:
    """The virtual times of the evaluations, float64[V].

    Raises ``ValueError`` unless they are finite, begin at 0 and never decrease.
    """
    times = np.asarray(points, np.float64)
    fits = times.ndim == 1 and len(times) > 0 and bool(np.isfinite(times).all())
    fits = fits and times[0] == 0 and bool((np.diff(times) >= 0).all())
    check.require(bool(fits), "points", points, "finite virtual times in order, from 0")
    return times


def online(schedule: PeerSchedule, times: np.ndarray) -> np.ndarray:
    """Which nodes are online at each time; bool[V, N]."""
    times = np.asarray(times)[:, None]
    return np.asarray((schedule.joined[None] <= times) & (times < schedule.left[None]))


def executed(schedule: PeerSchedule, times: np.ndarray) -> np.ndarray:
    """The events that end at or before the last of ``times``, in order of their numbers; int64."""
    order = np.argsort(schedule.end, kind="stable")
    return np.sort(order[: at_or_before(schedule.end[order], times[-1])])
