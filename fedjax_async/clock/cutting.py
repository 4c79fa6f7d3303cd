"""A schedule that ends early: what is known at that moment of a longer one."""

from __future__ import annotations

import numpy as np

from fedjax_async.clock.record import DROPPED, NEVER_CAME, SLACK, Outcome, with_derived_columns
from fedjax_async.types import Schedule

_JOBS = ("client", "number", "local_steps", "dispatch_time", "upload_time", "dispatched_after", "version")
_OUTCOMES = ("outcome", "freed_time", "corrupt", "copies")


def cut(schedule: Schedule, arrivals: int, time: float) -> Schedule:
    """The first ``arrivals`` arrivals, and the jobs that were sent by virtual second ``time``.

    ``time`` must not be before the last of these arrivals. A job without an outcome by then gets UNDER_WAY, or GIVEN_UP
    if its timeout has passed. A job keeps DROPPED_LATE only if its upload has come by then, and WITHHELD only if
    the server knows it by then. Its ``upload_time`` stays.

    Two things are not those of a plan that ends at ``time``, because the longer schedule does not know them: further
    copies of an upload count with it even if they come after ``time``, and an upload that the server drops at the end
    of a window counts as dropped as soon as it has come.

    Raises ``ValueError`` for columns that ``with_derived_columns`` refuses.
    """
    schedule = with_derived_columns(schedule)
    sent = np.searchsorted(schedule.dispatched_after, arrivals, side="right")
    jobs = min(int(sent), int(np.searchsorted(schedule.dispatch_time, time * SLACK, side="right")))
    columns = {name: getattr(schedule, name)[:jobs] for name in (*_JOBS, *_OUTCOMES)}
    freed = columns["freed_time"] <= time * SLACK
    applied = np.zeros(len(schedule.client), np.bool_)
    applied[schedule.job[:arrivals]] = True
    late = np.isin(columns["outcome"], (Outcome.LATE, *DROPPED))  # if freed before the upload: timed out
    came = columns["upload_time"] <= time * SLACK
    dropped = np.isin(columns["outcome"], DROPPED)
    was_applied = np.isin(columns["outcome"], (Outcome.APPLIED, Outcome.LATE))
    through = np.where(was_applied, applied[:jobs], np.where(dropped, came, freed))
    pending = np.where(late & freed, Outcome.GIVEN_UP, Outcome.UNDER_WAY)
    noticed = through & np.isin(columns["outcome"], NEVER_CAME)
    columns["outcome"] = np.where(through, columns["outcome"], pending).astype(np.int8)
    columns["copies"] = np.where(through, columns["copies"], 0).astype(np.int8)
    of_arrivals = {name: getattr(schedule, name)[:arrivals] for name in ("job", "time", "closes", "step")}
    failed = schedule.failure_time[:jobs]
    if len(failed):
        columns["failure_time"] = np.where(noticed | (failed <= time * SLACK), failed, np.inf)
    return schedule._replace(**columns, **of_arrivals, exhausted=False)
