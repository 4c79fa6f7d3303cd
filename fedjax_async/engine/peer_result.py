"""What an engine returns for a decentralised run, and the moments at which its nodes are evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedjax_async.base import check
from fedjax_async.clock import at_or_before
from fedjax_async.peers.schedule import PeerSchedule
from fedjax_async.types import Params

# Columns of the table of events that algorithms and clients may not record.
RESERVED = (
    "event", "client", "number", "start", "end", "mixed_at", "time", "local_steps", "gradients", "mass", "upload_norm",
    "accepted", "refused_messages",
)  # fmt: skip

# When the models of all nodes, and their mean, are evaluated on the global test set: at every evaluation, at the first
# and the last, or never. Such an evaluation reads the set N + 1 times; the nodes' own tests together are about one set.
GLOBAL_TESTS = ("all", "ends", "never")


class PeerResult(NamedTuple):
    """What either engine returns.

    ``scores``: ``loss`` and ``accuracy`` [V, N] of each node's model on its own tests, NaN without any;
    ``global_loss`` and ``global_accuracy`` [V, N] on the global test set, NaN where they are not evaluated;
    ``average_loss`` and ``average_accuracy`` [V] of the mean model of the nodes online, likewise; ``consensus`` [V],
    the mean over the nodes online of ``||w_i - mean||^2``, without running statistics. The last three are NaN while
    no node is online. Under ``global_tests = "never"`` the ``global`` and ``average`` columns are left out. The wave
    engine adds ``validation_loss`` and ``validation_accuracy`` [V, N] where clients hold validation parts out.
    """

    params: Params  # all nodes' models, [N, ...]
    scores: dict[str, np.ndarray]  # one row per evaluation
    records: dict[str, np.ndarray]  # one row per executed event, in order of their numbers
    counters: dict[str, Any]
    events: np.ndarray  # int64[E'], the events that were executed: those that end by the last evaluation
    probes: Mapping[str, dict[str, np.ndarray]] = MappingProxyType({})  # one table each
    rows: int | None = None  # evaluations that were made, fewer than planned in a run that was stopped; None: all
    kept: tuple[int, Params] | None = None  # the row and the models that an observer wanted kept


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
