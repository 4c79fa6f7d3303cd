"""Statistics of a schedule: delays as the theory counts them, concurrency, jobs and arrivals of each client."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedjax_async.clock.record import with_derived_columns
from fedjax_async.types import Schedule


class DelayStatistics(NamedTuple):
    """Delays in server steps over all closed steps and all clients; see ``delay_statistics``."""

    server_steps: int
    tau_max: int
    tau_avg0: float
    tau_avgm0: float
    tau_avg1: float
    tau_avgm1: float


def delay_statistics(schedule: Schedule, fresh: int = 0) -> DelayStatistics:
    """Maximum and average delays of AsynFLC, Definition 4.

    ``tau[t, i]``, for every closed step t = 0 .. T-1 and every client i, taking part or not, is t minus
    ``held[t, i]``, the version of the last model that i was sent before step t began applying (0 before
    the first). For a client whose upload is applied in step t this is the upload's staleness. With means
    over clients and steps,

        tau_max   = max tau[t, i]
        tau_avg0  = mean_t mean_i tau[t, i]
        tau_avgm0 = mean_t max_i tau[t, i]
        tau_avg1  = mean_t mean_i (mean_s tau[held[t, i], s])
        tau_avgm1 = mean_t mean_i (max_s tau[held[t, i], s])

    ``fresh`` is the delay of a client that holds the current model; it is added to every tau. The paper's formulas
    give 0, but its remark that synchronous training has delay 1 needs 1.

    Time and memory grow with J + T, not with T * N. ``ValueError`` if no step was closed.
    Source: AsynFLC (2025), Definitions 2 and 4.
    """
    steps, clients = int(schedule.closes.sum()), schedule.num_clients
    if steps == 0:
        raise ValueError("schedule: closes no server step, so there are no delays to average")
    since, until, old, new = _holdings(schedule, steps)
    now = np.arange(steps)
    mean = fresh + now - _running_sum(since, new - old, steps) / clients
    highest = fresh + now - _lowest_held(until, new, steps)
    return DelayStatistics(
        server_steps=steps,
        tau_max=int(highest.max()),
        tau_avg0=float(mean.mean()),
        tau_avgm0=float(highest.mean()),
        tau_avg1=float((mean[0] + _running_sum(since, mean[new] - mean[old], steps) / clients).mean()),
        tau_avgm1=float((highest[0] + _running_sum(since, highest[new] - highest[old], steps) / clients).mean()),
    )


def _holdings(schedule: Schedule, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The versions that clients hold, as changes: a client that held ``old`` holds ``new`` in steps since..until.

    Every client begins with a change from 0 to 0 at step 0, so that the intervals cover all steps.
    """
    begins = np.concatenate([[0], np.flatnonzero(schedule.closes)[:-1] + 1])  # first arrival of each step
    since = np.searchsorted(begins, schedule.dispatched_after)
    seen = since < steps
    everyone = np.arange(schedule.num_clients)
    client = np.concatenate([everyone, schedule.client[seen]])
    since = np.concatenate([np.zeros_like(everyone), since[seen]])
    new = np.concatenate([np.zeros_like(everyone), schedule.version[seen]])
    order = np.argsort(client, kind="stable")  # each client's changes in order of dispatch
    client, since, new = client[order], since[order], new[order]
    same = client[1:] == client[:-1]
    old = np.concatenate([[0], np.where(same, new[:-1], 0)])
    until = np.concatenate([np.where(same, since[1:] - 1, steps - 1), [steps - 1]])
    return since, until, old, new


def _running_sum(since: np.ndarray, change: np.ndarray, steps: int) -> np.ndarray:
    return np.cumsum(np.bincount(since, weights=change, minlength=steps))


def _lowest_held(until: np.ndarray, version: np.ndarray, steps: int) -> np.ndarray:
    """The lowest version that any client holds, for every step.

    Clients only ever receive the newest version. So once no client holds a version <= v, none ever will again: the
    lowest version never falls, and version v is gone after step ``last[v]``.
    """
    last = np.full(steps, -1, np.int64)
    np.maximum.at(last, version, until)
    # the lowest version at step t is the first v with last[v] >= t
    return np.searchsorted(np.maximum.accumulate(last), np.arange(steps))


def concurrency(schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """Jobs under way over time: ``count[k]`` from ``time[k]`` until ``time[k + 1]``. Returns (time, count).

    A job is under way from its dispatch until the server stops waiting for it: its upload arrives, it is called off,
    or the server notices that it is lost or gives it up.
    """
    end = with_derived_columns(schedule).freed_time
    time, index = np.unique(np.concatenate([schedule.dispatch_time, end]), return_inverse=True)
    change = np.repeat([1, -1], len(end))
    count = np.cumsum(np.bincount(index, weights=change, minlength=len(time))).astype(np.int64)
    finite = np.isfinite(time)
    return time[finite], count[finite]


def client_counts(schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """Jobs dispatched to and arrivals applied from each client; int64[N] each."""
    arrived = schedule.client[schedule.job]
    return (
        np.bincount(schedule.client, minlength=schedule.num_clients),
        np.bincount(arrived, minlength=schedule.num_clients),
    )


def staleness_histogram(schedule: Schedule) -> np.ndarray:
    """``histogram[s]``: how many arrivals had staleness s; int64[largest staleness + 1]."""
    return np.bincount(schedule.staleness)
