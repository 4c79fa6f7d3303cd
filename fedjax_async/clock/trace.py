"""Schedules in files: exact ``.npz`` archives, and CSV tables of jobs for other programs or written by hand."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_async.base import check, disk
from fedjax_async.clock.archives import Format, check_columns, read_archive, single_numbers, write_archive
from fedjax_async.clock.checking import ARRIVALS, JOBS, check_schedule
from fedjax_async.types import Schedule, Tree

_FORMAT = Format("fedjax_async schedule", 2)  # 2: with the outcomes of jobs
FAILURE = "failure_time"  # files of earlier versions do not have it


def save_schedule(path: str | Path, schedule: Schedule) -> None:
    """Write a schedule as ``.npz``; a reader sees the whole old or the whole new file, never a part.

    A schedule made by hand is checked and completed first, as by ``check_schedule``.
    """
    write_archive(path, _FORMAT, check_schedule(schedule)._asdict())


def load_schedule(path: str | Path) -> Schedule:
    """Read what ``save_schedule`` wrote; ``ValueError`` if the file is truncated, foreign or inconsistent."""
    columns = read_archive(path, _FORMAT, Schedule._fields, {"exhausted": np.array(False), FAILURE: np.zeros(0)})
    schedule = Schedule(**(columns | single_numbers(path, columns, {"num_clients": int, "exhausted": bool})))
    return _checked(path, schedule)


def save_schedule_csv(path: str | Path, schedule: Schedule) -> None:
    """Write one line per job; ``arrival`` (its index among the arrivals), time and closes are empty if it has none.

    All columns are kept, ``failure_time`` where it is known, but not whether the schedule was ``exhausted``. A schedule
    made by hand is checked and completed first, as by ``check_schedule``.
    """
    schedule = check_schedule(schedule)
    failed = [FAILURE] if len(schedule.failure_time) else []
    arrival_of = np.full(len(schedule.client), -1, np.int64)
    arrival_of[schedule.job] = np.arange(len(schedule.job))
    columns = (getattr(schedule, name) for name in (*JOBS, *failed))
    jobs = zip(*((c.astype(int) if c.dtype == np.bool_ else c).tolist() for c in columns), arrival_of.tolist())
    times, closes = schedule.time.tolist(), schedule.closes.astype(int).tolist()
    lines = [",".join(["num_clients", *JOBS, *failed, "arrival", "time", "closes"])]
    for *job, e in jobs:
        arrival = (e, repr(times[e]), closes[e]) if e >= 0 else ("", "", "")
        lines.append(",".join(map(str, (schedule.num_clients, *job, *arrival))))
    text = "\n".join(lines) + "\n"
    disk.write(check.path("path", path), text.encode())


def load_schedule_csv(path: str | Path) -> Schedule:
    """Read what ``save_schedule_csv`` wrote, exactly; ``ValueError`` if it is damaged or foreign."""
    found = check.path("path", path)
    try:
        header, *lines = [cells for _, cells in disk.csv_lines(found)] or [[]]
        rows = [dict(zip(header, cells)) for cells in lines]
        missing = [name for name in ("num_clients", *JOBS) if rows and name not in rows[0]]
        if missing:
            raise ValueError(f"no column {missing[0]!r}")
        jobs: dict[str, Any] = {
            name: np.array([_parse(kind, row[name]) for row in rows], kind) for name, kind in JOBS.items()
        }
        arrived = {int(row["arrival"]): (j, row) for j, row in enumerate(rows) if row["arrival"]}
        ordered = [arrived[e] for e in range(len(arrived))]
        closes = np.array([int(row["closes"]) for _, row in ordered], np.bool_)
        schedule = Schedule(
            num_clients=int(rows[0]["num_clients"]),
            **jobs,
            job=np.array([j for j, _ in ordered], np.int64),
            time=np.array([float(row["time"]) for _, row in ordered], np.float64),
            closes=closes,
            step=np.cumsum(closes, dtype=np.int64) - closes,
            failure_time=np.array([float(row[FAILURE]) for row in rows if FAILURE in row], np.float64),
        )
    except FileNotFoundError:
        raise ValueError(f"path = {str(path)!r}: no such file") from None
    except (OSError, ValueError, TypeError, KeyError, IndexError, csv.Error) as error:
        raise ValueError(f"{path}: not a schedule, or truncated ({type(error).__name__}: {error})") from None
    return _checked(path, schedule)


def _parse(kind: Callable[[str], Tree], text: str) -> Tree | int:
    return int(text) if kind is np.bool_ else kind(text)


def _checked(path: str | Path, schedule: Schedule) -> Schedule:
    """Check shapes, types and the references between the columns; any error means a damaged file."""
    for names in (JOBS, ARRIVALS):
        length = len(getattr(schedule, next(iter(names))))
        check_columns(path, schedule, names, length)
    try:
        return check_schedule(schedule)
    except ValueError as error:
        raise ValueError(f"{path}: the columns contradict each other; the file is damaged ({error})") from None
