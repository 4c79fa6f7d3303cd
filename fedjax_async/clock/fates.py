"""What becomes of jobs: the codes of ``Schedule.fate``, and counts of them."""

from __future__ import annotations

import enum

import numpy as np

from fedjax_async.types import Schedule


class Fate(enum.IntEnum):
    """What became of a job by the end of the plan: the codes of ``Schedule.fate``."""

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
APPLIED = (Fate.APPLIED, Fate.LATE)
DROPPED = (Fate.DROPPED_LATE, Fate.DROPPED_STALE)
RECEIVED = APPLIED + DROPPED
# The client trains these to the end although the server never applies them.
TRAINED_IN_VAIN = (Fate.LOST, Fate.DROPPED_LATE, Fate.DROPPED_STALE, Fate.GIVEN_UP)
NEVER_CAME = (Fate.LOST, Fate.CRASHED, Fate.INTERRUPTED)


def fault_counts(schedule: Schedule) -> dict[str, int]:
    """How many jobs came to grief, and how.

    * ``lost``: never reached the server, and it noticed; of these ``crashed`` and ``interrupted``;
    * ``late``: came after their timeout; of these ``dropped_late`` were not applied;
    * ``dropped_stale``: refused for their staleness (late ones too);
    * ``duplicates``: further copies delivered, and ignored;
    * ``corrupt``: applied uploads that are NaN (the engine rejects them);
    * ``called_off``, ``given_up`` (and not yet arrived at the end), ``under_way``.

    Of ``plan``'s schedules ``applied`` + ``lost`` + ``dropped_late`` + ``dropped_stale`` + ``called_off``
    + ``given_up`` + ``under_way`` is the number of jobs.
    """
    of = np.bincount(schedule.fate, minlength=len(Fate))
    return {
        "applied": len(schedule.job),
        "lost": int(sum(of[fate] for fate in NEVER_CAME)),
        "crashed": int(of[Fate.CRASHED]),
        "interrupted": int(of[Fate.INTERRUPTED]),
        "late": int(of[Fate.LATE] + of[Fate.DROPPED_LATE]),
        "dropped_late": int(of[Fate.DROPPED_LATE]),
        "dropped_stale": int(of[Fate.DROPPED_STALE]),
        "duplicates": int(schedule.copies.sum(dtype=np.int64)),
        "corrupt": int(schedule.corrupt[schedule.job].sum()) if len(schedule.corrupt) else 0,
        "called_off": int(of[Fate.CALLED_OFF]),
        "given_up": int(of[Fate.GIVEN_UP]),
        "under_way": int(of[Fate.UNDER_WAY]),
    }
