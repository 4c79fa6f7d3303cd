"""Schedules made by hand or read from files: missing columns are derived, contradictions are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_async.base import check
from fedjax_async.clock.record import (
    APPLIED,
    NEVER_CAME,
    SLACK,
    Outcome,
    job_numbers,
    order_by_client,
    with_derived_columns,
)
from fedjax_async.types import Schedule

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

JOBS = {
    "client": np.int32,
    "number": np.int32,
    "local_steps": np.int32,
    "dispatch_time": np.float64,
    "upload_time": np.float64,
    "dispatched_after": np.int64,
    "version": np.int64,
    "outcome": np.int8,
    "freed_time": np.float64,
    "corrupt": np.bool_,
    "copies": np.int8,
}
ARRIVALS = {"job": np.int64, "time": np.float64, "closes": np.bool_, "step": np.int64}
OPTIONAL = ("outcome", "freed_time", "corrupt", "copies")

_IS_APPLIED = np.isin(np.arange(len(Outcome)), APPLIED)  # by code, whether the upload was applied
LARGEST = np.finfo(np.float64).max  # virtual seconds


def make_schedule(
    *,
    num_clients: int,
    client: ArrayLike,
    local_steps: ArrayLike,
    dispatch_time: ArrayLike,
    upload_time: ArrayLike,
    dispatched_after: ArrayLike,
    job: ArrayLike,
    time: ArrayLike,
    closes: ArrayLike,
    number: ArrayLike | None = None,
    version: ArrayLike | None = None,
    step: ArrayLike | None = None,
    outcome: ArrayLike | None = None,
    freed_time: ArrayLike | None = None,
    corrupt: ArrayLike | None = None,
    copies: ArrayLike | None = None,
    failure_time: ArrayLike | None = None,
) -> Schedule:
    """Make a ``Schedule`` from its columns: sequences or arrays of the shapes given at ``Schedule``.

    ``local_steps`` and ``closes`` may be one value for all. Columns not given are derived: ``number``, ``version`` and
    ``step`` are counts of what came before. A job that arrives has the ``outcome`` APPLIED; any other job has
    UNDER_WAY, or CALLED_OFF if its upload never comes. ``freed_time`` is the upload's time, or, if that is infinite,
    the time of the client's next job. No upload is corrupt or comes twice, and no ``failure_time`` is known.

    Raises ``ValueError`` where ``check_schedule`` does.

    >>> schedule = make_schedule(num_clients=2, client=[0, 1, 0], local_steps=5, dispatch_time=[0, 0, 1],
    ...     upload_time=[1, 2, 3], dispatched_after=[0, 0, 1], job=[0, 1], time=[1, 2], closes=True)
    >>> schedule.staleness.tolist(), schedule.number.tolist()
    ([0, 1], [0, 0, 1])
    """
    jobs, arrivals = np.shape(client), np.shape(job)
    given = {"client": client, "closes": _spread(closes, arrivals)}
    columns: dict[str, Any] = {name: _cast(name, value, (JOBS | ARRIVALS)[name]) for name, value in given.items()}
    optional = {"outcome": outcome, "freed_time": freed_time, "corrupt": corrupt, "copies": copies}
    optional |= {"failure_time": failure_time}
    columns |= {name: np.zeros(0) if value is None else value for name, value in optional.items()}
    before = _cast("dispatched_after", dispatched_after, np.int64)
    if columns["closes"].shape != arrivals:
        raise ValueError(
            f"schedule.closes: has length {np.size(closes)}, must have one entry per arrival ({arrivals[0]})"
        )
    closed = np.concatenate([[0], np.cumsum(columns["closes"], dtype=np.int64)])
    _within("dispatched_after", before, 0, len(closed) - 1)
    _within("client", columns["client"], 0, num_clients - 1)
    columns |= {
        "number": job_numbers(columns["client"]) if number is None else number,
        "local_steps": _spread(local_steps, jobs),
        "dispatch_time": dispatch_time,
        "upload_time": upload_time,
        "dispatched_after": before,
        "version": closed[before] if version is None else version,
        "job": job,
        "time": time,
        "step": closed[:-1] if step is None else step,
    }
    return check_schedule(Schedule(num_clients=num_clients, **columns))


def check_schedule(schedule: Schedule) -> Schedule:
    """Check a schedule; returns it with the dtypes of ``Schedule`` and all optional columns, see ``make_schedule``.

    Raises ``ValueError`` naming the column and the value if columns differ in length or type or contradict each
    other, or if a client gets a job while it still has one. A client has a job until its upload is applied. If it never
    is, the client has the job until the server stops waiting for it and its upload, if any, has come. Times may differ
    by rounding, see ``at_or_before``.
    """
    check.whole("schedule.num_clients", schedule.num_clients)
    columns: dict[str, Any] = {}
    for kinds, entry in ((JOBS, "job"), (ARRIVALS, "arrival")):
        length = None
        for name, kind in kinds.items():
            value = _cast(name, getattr(schedule, name), kind)
            length = value.shape[0] if length is None else length
            if value.shape != (length,) and not (name in OPTIONAL and len(value) == 0):
                raise ValueError(
                    f"schedule.{name}: has length {len(value)}, must have one entry per {entry} ({length})"
                )
            columns[name] = value
    columns["failure_time"] = _cast("failure_time", schedule.failure_time, np.float64)
    _check_columns(schedule._replace(num_clients=int(schedule.num_clients), **columns))
    filled = with_derived_columns(schedule._replace(num_clients=int(schedule.num_clients), **columns))
    _check_outcomes(filled)
    _check_overlaps(filled)
    _check_order(filled)
    return filled


def _spread(value: ArrayLike, shape: tuple[int, ...]) -> ArrayLike:
    return np.broadcast_to(value, shape) if np.ndim(value) == 0 else value


def _cast(name: str, value: ArrayLike, kind: type[np.generic]) -> np.ndarray:
    """A column as a 1-d array of its type; ``ValueError`` if the conversion changes a value."""
    found = np.asarray(value)
    if found.ndim != 1 or found.dtype.kind not in "biuf":
        raise ValueError(f"schedule.{name}: must be a sequence of numbers, not {found.dtype} of shape {found.shape}")
    if found.dtype == kind:
        return found
    with np.errstate(invalid="ignore"):
        cast = found.astype(kind)
    _require(name, found, cast == found, f"of type {np.dtype(kind)}")
    return cast


def _require(name: str, values: np.ndarray, sound: np.ndarray, allowed: str) -> None:
    """Raise ``ValueError`` for the first value that is not ``sound``."""
    if not sound.all():
        index = int(np.argmin(sound))
        raise ValueError(f"schedule.{name}[{index}] = {values[index].item()}: must be {allowed}")


def _within(name: str, values: np.ndarray, low: float, high: float) -> None:
    if len(values) and not (values.min() >= low and values.max() <= high):  # the comparisons are false for NaN
        allowed = "a finite number >= 0" if high == LARGEST else f"from {low} to {high}"
        _require(name, values, (values >= low) & (values <= high), allowed)


def _ordered(name: str, values: np.ndarray) -> None:
    if not (values[1:] >= values[:-1]).all():
        _require(name, values, np.concatenate([[True], values[1:] >= values[:-1]]), "at least the one before")


def _check_columns(s: Schedule) -> None:
    """Check the columns that must be given."""
    jobs, arrivals = len(s.client), len(s.job)
    _within("client", s.client, 0, s.num_clients - 1)
    _within("local_steps", s.local_steps, 1, np.iinfo(np.int32).max)
    _within("dispatch_time", s.dispatch_time, 0, LARGEST)
    _within("time", s.time, 0, LARGEST)
    _within("dispatched_after", s.dispatched_after, 0, arrivals)
    _within("job", s.job, 0, jobs - 1)
    for name in ("dispatch_time", "dispatched_after", "time"):
        _ordered(name, getattr(s, name))
    _require("upload_time", s.upload_time, s.upload_time >= s.dispatch_time, "at or after its dispatch")
    _require(
        "number", s.number, s.number == job_numbers(s.client), "the count of jobs that the client had been given before"
    )
    _require("job", s.job, np.bincount(s.job, minlength=jobs)[s.job] == 1, "among the arrivals once")
    sent = s.dispatched_after[s.job]
    _require("job", s.job, sent <= np.arange(arrivals), "a job that was sent before it arrives")
    arrived = s.upload_time[s.job] <= s.time * SLACK
    _require("time", s.time, arrived, "at or after the upload_time of its job")
    closed = np.concatenate([[0], np.cumsum(s.closes, dtype=np.int64)])
    steps = "the count of steps closed before"
    _require("version", s.version, s.version == closed[s.dispatched_after], steps)
    _require("step", s.step, s.step == closed[:-1], steps)


def _check_outcomes(s: Schedule) -> None:
    """Check the columns that may be left out."""
    _within("outcome", s.outcome, 0, len(Outcome) - 1)
    _within("copies", s.copies, 0, np.iinfo(np.int8).max)
    arrived = np.zeros(len(s.client), np.bool_)
    arrived[s.job] = True
    _require(
        "outcome", s.outcome, _IS_APPLIED[s.outcome] == arrived, "APPLIED or LATE for arrivals, and for them alone"
    )
    _require("freed_time", s.freed_time, s.freed_time >= s.dispatch_time, "at or after its dispatch")
    if len(s.failure_time) == 0:
        return
    if len(s.failure_time) != len(s.client):
        raise ValueError(
            f"schedule.failure_time: has length {len(s.failure_time)}, must be empty or have one entry per job "
            f"({len(s.client)})"
        )
    others = np.isin(s.outcome, (Outcome.UNDER_WAY, Outcome.CALLED_OFF, Outcome.GIVEN_UP)) & np.isinf(s.upload_time)
    failed = np.isin(s.outcome, NEVER_CAME) | others
    allowed = "infinite, or for a LOST, CRASHED or INTERRUPTED job, or one that never comes, at or after its dispatch"
    sound = (s.failure_time >= s.dispatch_time) & (failed | np.isinf(s.failure_time))
    _require("failure_time", s.failure_time, sound, allowed)


def _check_overlaps(s: Schedule) -> None:
    """Check that a client has one job at a time."""
    order = order_by_client(s.client)
    same = s.client[order[1:]] == s.client[order[:-1]]
    job, following = order[:-1][same], order[1:][same]
    arrival = np.full(len(s.client), -1, np.int64)
    arrival[s.job] = np.arange(len(s.job))
    end = np.maximum(_finite(s.freed_time), _finite(s.upload_time))
    end[s.job] = s.time
    sound = (s.dispatched_after[following] > arrival[job]) & (end[job] <= s.dispatch_time[following] * SLACK)
    if not sound.all():
        k = int(np.argmin(sound))
        before, after = int(job[k]), int(following[k])
        which = f", arrival {arrival[before]}," if arrival[before] >= 0 else ""
        raise ValueError(
            f"schedule.dispatch_time[{after}] = {s.dispatch_time[after]} after {s.dispatched_after[after]} arrivals: "
            f"must not be before client {s.client[before]} is done with its job {before}{which} at {end[before]}"
        )


def _check_order(s: Schedule) -> None:
    """Check that the counts of arrivals before a dispatch agree with the times."""
    times = np.concatenate([[0.0], s.time, [np.inf]])
    before, after = times[s.dispatched_after], times[s.dispatched_after + 1]
    sound = (before <= s.dispatch_time * SLACK) & (s.dispatch_time <= after * SLACK)
    _require("dispatched_after", s.dispatched_after, sound, "the count of arrivals applied before its dispatch")


def _finite(times: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(times), times, 0.0)
