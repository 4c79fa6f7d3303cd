"""A budget must let the server complete a step, or the run would train clients and never change the model."""

from __future__ import annotations

import math
from collections.abc import Callable

from fedjax_async.clock import NothingArrives, Until
from fedjax_async.config.settings import Settings
from fedjax_async.types import Schedule

Planned = Callable[[Until], Schedule]


def until_of(s: Settings) -> Until:
    """The budget that the settings give."""
    return Until(time=s.time, updates=s.updates, steps=s.server_steps)


def plan_within(s: Settings, planned: Planned, *, waits: bool, any_budget: bool) -> Schedule:
    """The schedule for the budget of the settings; ``ValueError`` if it completes no server step.

    The message names the budget and what the first server step needs. ``planned``: makes the schedule for a budget.
    ``waits``: whether the model changes only when a server step is complete. ``any_budget``: whether ``planned`` takes
    other budgets than that of the settings.
    """
    came = 0
    try:
        schedule = planned(until_of(s))
    except NothingArrives:
        first = _first_step(planned) if waits and any_budget and s.time is not None else None
        if first is None:
            raise
    else:
        if not waits or schedule.closes.any():
            return schedule
        came = len(schedule.job)
        first = _first_step(planned) if any_budget else None
    budget, allowed = f"time = {s.time}", "enough to complete a server step"
    if first is not None:
        end = rounded_up(float(first.time[-1]))
        allowed = f"at least {end}, when the first server step is complete: before it the model never changes"
    if came == s.updates:
        budget = f"updates = {s.updates}"
        if first is not None:
            allowed = f"at least {len(first.job)}, as the first server step needs: with fewer the model never changes"
    raise ValueError(f"{budget}: must be {allowed}")


def _first_step(planned: Planned) -> Schedule | None:
    """The schedule up to the end of the first server step; ``None`` if no budget completes one."""
    try:
        schedule = planned(Until(steps=1))
    except ValueError:
        return None
    return schedule if schedule.closes.any() else None


def rounded_up(seconds: float) -> float:
    """``seconds`` rounded up to six digits."""
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 5)
    return float(f"{math.ceil(seconds / unit) * unit:.6g}")
