"""A budget must let the server complete a step, or the run would train clients and never change the model."""

from __future__ import annotations

import math
from collections.abc import Callable

from fedjax_async import check
from fedjax_async.clock import Until
from fedjax_async.config.settings import Settings
from fedjax_async.types import Schedule


def until_of(s: Settings) -> Until:
    """The budget that the settings give."""
    return Until(time=s.time, updates=s.updates, steps=s.server_steps)


def check_budget(s: Settings, schedule: Schedule, planned: Callable[[Until], Schedule] | None) -> None:
    """``ValueError`` if ``schedule`` completes no server step, naming the budget and what the first step needs.

    ``planned``: makes the schedule of this run for another budget, if that is possible.
    """
    if schedule.closes.any():
        return
    first = None if planned is None else _first_step(planned)
    why = "the uploads of its first server step: with fewer the model never changes"
    if len(schedule.job) == s.updates:
        needed = f"at least {len(first.job)}, {why}" if first else "enough to complete a server step"
        check.require(False, "updates", s.updates, needed)
    why = "when the first server step is complete: before, the model never changes"
    needed = f"at least {_rounded_up(float(first.time[-1]))}, {why}" if first else "enough to complete a server step"
    check.require(False, "time" if s.time is not None else "budget", s.time, needed)


def _first_step(planned: Callable[[Until], Schedule]) -> Schedule | None:
    """The schedule up to the end of the first server step; ``None`` if no budget completes one."""
    try:
        schedule = planned(Until(steps=1))
    except ValueError:
        return None
    return schedule if schedule.closes.any() else None


def _rounded_up(seconds: float) -> float:
    """With six digits, so that it is enough."""
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 5)
    return float(f"{math.ceil(seconds / unit) * unit:.6g}")
