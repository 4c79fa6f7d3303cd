"""A budget must let the server complete a step, and a run that ends before its budget says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fedjax_async.base.notices import ENDED_EARLY
from fedjax_async.clock import Until
from fedjax_async.clock.budget import EVERY
from fedjax_async.config.settings import Settings, as_dict
from fedjax_async.types import Run, Schedule

MOST = 50_000  # uploads that are planned to find out what the first server step needs, at least
JOBS = 4  # jobs that are planned for it, for each of these uploads: nearly all may be lost
CAUSES = ("availability", "faults", "timeout", "max_staleness")  # settings that keep uploads from coming


class Planned(Protocol):
    """Makes the schedule for a budget; calls ``planning`` now and then, every ``EVERY`` jobs if events are queued."""

    def __call__(self, until: Until, *, planning: Callable[[float], None] | None = ...) -> Schedule: ...


class _TooManyJobs(Exception):
    """What is looked for did not come within the jobs that may be planned for it."""


def refuse_budget(s: Settings, planned: Planned, schedule: Schedule | None, *, any_budget: bool) -> None:
    """``ValueError`` for a budget that completes no server step, naming it and what the first server step needs.

    ``schedule``: for this budget; None if nothing arrives, which is no error here if no budget completes a step.
    ``planned``: makes the schedule for a budget. ``any_budget``: whether it takes other budgets than the settings'.
    """
    looked = max(MOST, 100 * s.clients)
    first, seen = _first_step(planned, looked) if any_budget else (None, "")
    if schedule is None and first is None:
        return
    came, corrupt, early = 0, False, None
    if schedule is not None:
        came, corrupt = len(schedule.job), bool(schedule.corrupt[schedule.job].all())
        early = ended_early(s, as_dict(s), schedule)
    if corrupt and first is None:
        allowed = "such that some uploads are sound: all that come are corrupt, and these complete no server step"
        raise ValueError(f"faults = {as_dict(s)['faults']!r}: must be {allowed}")
    if early is not None and schedule is not None and schedule.exhausted:
        field = "faults" if s.availability is None else "availability"
        allowed = "such that clients complete a server step before they are gone"
        raise ValueError(f"{field} = {as_dict(s)[field]!r}: must be {allowed}; the run would have {early}")
    budget, allowed = f"time = {s.time}", "enough to complete a server step"
    causes = [f"{name} = {as_dict(s)[name]!r}" for name in CAUSES if getattr(s, name) is not None]
    if first is None and any_budget and causes:
        allowed += f", but {seen} ({', '.join(causes)})"
    if first is not None:
        end = rounded_up(float(first.time[-1]))
        allowed = f"at least {end}, when the first server step is complete: before it the model never changes"
    if came == s.updates:
        budget = f"updates = {s.updates}"
        if first is not None:
            allowed = f"at least {len(first.job)}, as the first server step needs: with fewer the model never changes"
    raise ValueError(f"{budget}: must be {allowed}")


def _first_step(planned: Planned, uploads: int) -> tuple[Schedule | None, str]:
    """The schedule up to the end of the first server step; None if so many uploads, or ``JOBS`` times as many jobs, do
    not complete one, which the text says.
    """
    most, looks = JOBS * uploads, 0
    gone = f"{uploads:,} uploads do not: the timing may wait for clients that are gone"

    def look(share: float) -> None:
        nonlocal looks
        looks += 1
        if looks * EVERY > most:
            raise _TooManyJobs

    try:
        schedule = planned(Until(updates=uploads, steps=1), planning=look)
    except _TooManyJobs:
        return None, f"{most:,} jobs do not: nearly all of their uploads may be lost"
    except ValueError:
        return None, gone
    return schedule if schedule.closes.any() else None, gone


def ended_early(s: Settings, described: Mapping[str, object], schedule: Any, *, whole: bool = True) -> str | None:
    """``ended after U of B updates because ...`` for a run that ends before its budget is spent, else None.

    ``described``: the settings as results keep them. ``schedule``: a ``Schedule`` or a ``PeerSchedule``. ``whole``:
    whether the run went through all of it; a run that was stopped did not.
    """
    server = isinstance(schedule, Schedule)
    updates, times = (len(schedule.job), schedule.time) if server else (len(schedule.client), schedule.end)
    steps = int(schedule.closes.sum()) if server else 0
    spent = updates == s.updates or (server and steps == s.server_steps)
    if not whole or spent or not (schedule.exhausted or s.time is None):
        return None
    last = max(times, default=0.0)
    done = ((f"{updates} of", s.updates, "updates"), (f"{steps} of", s.server_steps, "server steps"),
            (f"{last:.6g} of", s.time, "seconds"))  # fmt: skip
    reached = " and ".join(f"{count} {budget:.15g} {unit}" for count, budget, unit in done if budget is not None)
    if not schedule.exhausted:
        return f"ended after {reached} because the schedule of its timing ends there"
    causes = [f"{name} = {described[name]!r}" for name in ("availability", "faults") if described.get(name) is not None]
    who = "client" if server else "node"
    why = f"no {who} could train after the last update, at {last:.6g} s"
    return f"ended after {reached} because {why} ({', '.join(causes)})"


def with_early_end(run: Run, text: str | None) -> Run:
    """The run with a counter that holds ``text``, if there is one."""
    return run if text is None else run._replace(counters=run.counters | {ENDED_EARLY: text})


def rounded_up(seconds: float) -> float:
    """``seconds`` rounded up to six digits."""
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 5)
    return float(f"{math.ceil(seconds / unit) * unit:.6g}")
