"""Jobs that are *trained in vain*: the server never applies their uploads.

A client with state between jobs (private parameters, residuals, control variates) also trains the jobs whose uploads
are lost, dropped or given up, and its next job starts from the state that they leave. These jobs are inserted among
the arrivals as late as possible: right before the next message to their client. Jobs of clients without state, and
the last job of a client, change nothing and are left out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedjax_async.clock import trained_in_vain
from fedjax_async.types import Schedule


class TrainedSchedule(NamedTuple):
    """A schedule with the jobs that are trained in vain among its arrivals (they close nothing)."""

    schedule: Schedule
    applied: np.ndarray  # bool[E'], which arrivals the server applies
    position: np.ndarray  # int64[E + 1]: after n applied arrivals, how many arrivals come before the next applied one


def _needed(schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """Jobs that are trained in vain, and the next job of the same client, which needs their state; int64 each."""
    order = np.lexsort((schedule.number, schedule.client))
    same = schedule.client[order][1:] == schedule.client[order][:-1]
    job, following = order[:-1][same], order[1:][same]
    vain = trained_in_vain(schedule)[job]
    found = np.argsort(job[vain])
    return job[vain][found], following[vain][found]


def all_training(schedule: Schedule) -> TrainedSchedule:
    """All jobs that must be trained where clients keep something between jobs."""
    arrivals = len(schedule.job)
    job, following = _needed(schedule)
    if not len(job):
        return TrainedSchedule(schedule, np.ones(arrivals, np.bool_), np.arange(arrivals + 1))
    due = schedule.dispatched_after[following]  # applied arrivals before each inserted job
    order = np.lexsort((job, due))
    job, due = job[order], due[order]
    moved = np.arange(arrivals) + np.searchsorted(due, np.arange(arrivals), side="right")
    position = np.concatenate([moved, due + np.arange(len(due))])
    total = arrivals + len(job)

    def merged(of_arrivals: np.ndarray, inserted: np.ndarray) -> np.ndarray:
        out = np.empty(total, of_arrivals.dtype)
        out[position] = np.concatenate([of_arrivals, inserted])
        return out

    closed = np.concatenate([[0], np.cumsum(schedule.closes)])
    # inserted before a dispatch: the jobs due earlier and, of those due at the same moment, the jobs sent before it
    jobs = len(schedule.client)
    before = np.searchsorted(due * jobs + job, schedule.dispatched_after * jobs + np.arange(jobs))
    expanded = schedule._replace(
        dispatched_after=schedule.dispatched_after + before,
        job=merged(schedule.job, job),
        time=merged(schedule.time, schedule.dispatch_time[following[order]]),
        closes=merged(schedule.closes, np.zeros(len(job), np.bool_)),
        step=merged(schedule.step, closed[due]),
    )
    applied = merged(np.ones(arrivals, np.bool_), np.zeros(len(job), np.bool_))
    position = np.concatenate([moved, [total]])  # counts the inserted jobs due by then: messages sent then need them
    return TrainedSchedule(expanded, applied, position)
