"""What becomes of jobs: the codes of ``Schedule.outcome``, and counts of them."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from fedjax_async.types import Schedule


class Outcome(enum.IntEnum):
    """What became of a job by the end of the plan: the codes of ``Schedule.outcome``."""

    APPLIED = 0  # its upload came in time and was applied
    UNDER_WAY = 1  # the server still waits for it
    CALLED_OFF = 2  # its round ended without it
    LOST = 3  # trained, but the upload was lost on the way
    CRASHED = 4  # the client crashed before it had uploaded
    INTERRUPTED = 5  # the client went off or left, or its group failed
    LATE = 6  # applied, though it came after its timeout
    DROPPED_LATE = 7  # came after its timeout and was not applied
    DROPPED_STALE = 8  # came, but staler than the server admits
    GIVEN_UP = 9  # the server gave it up at its timeout; its upload comes after the end, or its round ended first


# The upload reached the server, and these were applied:
APPLIED = (Outcome.APPLIED, Outcome.LATE)
DROPPED = (Outcome.DROPPED_LATE, Outcome.DROPPED_STALE)
RECEIVED = APPLIED + DROPPED
NEVER_CAME = (Outcome.LOST, Outcome.CRASHED, Outcome.INTERRUPTED)


def trained_in_vain(schedule: Schedule) -> np.ndarray:
    """Which jobs the client trains to the end although the server never applies them; bool[J].

    Their uploads are lost, dropped, or come after the server has given them up. Crashed and interrupted jobs, and those
    whose round ended before them, are not trained to the end.
    """
    schedule = with_derived_columns(schedule)
    unapplied = np.isin(schedule.outcome, (Outcome.LOST, *DROPPED))
    return unapplied | ((schedule.outcome == Outcome.GIVEN_UP) & np.isfinite(schedule.upload_time))


def with_derived_columns(schedule: Schedule) -> Schedule:
    """The schedule with ``outcome``, ``freed_time``, ``corrupt`` and ``copies`` derived where they are left empty.

    See ``clock.make_schedule``. ``ValueError`` if one of them is neither empty nor of one entry a job.
    """
    jobs = len(schedule.client)
    columns = {name: np.asarray(getattr(schedule, name)) for name in ("outcome", "freed_time", "corrupt", "copies")}
    for name, column in columns.items():
        if column.shape not in ((0,), (jobs,)):
            raise ValueError(f"schedule.{name}: has shape {column.shape}, must be empty or ({jobs},), one entry a job")
    empty = [name for name, column in columns.items() if len(column) != jobs]
    if not empty:
        return schedule
    derived: dict[str, Any] = {"corrupt": np.zeros(jobs, np.bool_), "copies": np.zeros(jobs, np.int8)}
    if "outcome" in empty:
        derived["outcome"] = np.where(np.isinf(schedule.upload_time), Outcome.CALLED_OFF, Outcome.UNDER_WAY).astype(
            np.int8
        )
        derived["outcome"][schedule.job] = Outcome.APPLIED
    if "freed_time" in empty:
        order = np.argsort(schedule.client, kind="stable")
        clients, sent = schedule.client[order], schedule.dispatch_time[order]
        following = np.full(jobs, np.inf)
        following[order[:-1]] = np.where(clients[1:] == clients[:-1], sent[1:], np.inf)
        derived["freed_time"] = np.where(np.isinf(schedule.upload_time), following, schedule.upload_time)
    return schedule._replace(**{name: derived[name] for name in empty})


def fault_counts(schedule: Schedule) -> dict[str, int]:
    """How many jobs came to grief, and how.

    * ``lost``: never reached the server, and it noticed; of these ``crashed`` and ``interrupted``;
    * ``late``: came after their timeout; of these ``dropped_late`` were not applied;
    * ``dropped_stale``: refused for their staleness (late ones too);
    * ``duplicates``: further copies delivered, and ignored;
    * ``corrupt``: arrivals whose uploads are NaN: the engine rejects them, and they fill no buffer;
    * ``called_off``, ``given_up`` (and not yet arrived at the end), ``under_way``.

    Of ``plan``'s schedules ``applied`` + ``lost`` + ``dropped_late`` + ``dropped_stale`` + ``called_off``
    + ``given_up`` + ``under_way`` is the number of jobs.
    """
    schedule = with_derived_columns(schedule)
    of = np.bincount(schedule.outcome, minlength=len(Outcome))
    return {
        "applied": len(schedule.job),
        "lost": int(sum(of[outcome] for outcome in NEVER_CAME)),
        "crashed": int(of[Outcome.CRASHED]),
        "interrupted": int(of[Outcome.INTERRUPTED]),
        "late": int(of[Outcome.LATE] + of[Outcome.DROPPED_LATE]),
        "dropped_late": int(of[Outcome.DROPPED_LATE]),
        "dropped_stale": int(of[Outcome.DROPPED_STALE]),
        "duplicates": int(schedule.copies.sum(dtype=np.int64)),
        "corrupt": int(schedule.corrupt[schedule.job].sum()),
        "called_off": int(of[Outcome.CALLED_OFF]),
        "given_up": int(of[Outcome.GIVEN_UP]),
        "under_way": int(of[Outcome.UNDER_WAY]),
    }
