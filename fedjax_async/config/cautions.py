"""Warnings about settings that are valid and do something that their words do not say.

Each warning has the same text for all runs of a kind, so that a comparison or a sweep says it once.
"""

from __future__ import annotations

import warnings

import numpy as np

from fedjax_async.base.notices import RunWarning
from fedjax_async.clock.record import SLACK, Outcome
from fedjax_async.config import own
from fedjax_async.config.settings import Settings
from fedjax_async.engine.evaluation import Every
from fedjax_async.models import starts_alike
from fedjax_async.types import ClientAlgorithm, FederatedData, Model, Schedule


def caution(s: Settings, model: Model, data: FederatedData) -> None:
    """Warn of start weights that no seed changes, and of batches that leave running statistics as they are."""
    if s.initial is None and (start := starts_alike(model)) is not None:
        warnings.warn(
            f"model: {start.kind} starts from the weights that it was made with, the same for every seed; for start "
            f"weights by the seed, give a factory, {start.factory}",
            RunWarning,
            stacklevel=2,
        )
    trains_by_itself = isinstance(own.thing_of("client", s.client), ClientAlgorithm)
    alone = s.batch_size == 1 or bool(np.any(np.asarray(data.size) == 1))
    if model.train is not None and alone and not trains_by_itself:
        whose = "batch_size = 1" if s.batch_size == 1 else "clients with a single training example"
        advice = "a larger batch_size" if s.batch_size == 1 else "a partition with min_size=2 or more"
        warnings.warn(
            f"{whose}: a batch of fewer than two examples has no variance, so it leaves the running statistics of the "
            f"model (BatchNorm) as they are; {advice}, or a model without such statistics, avoids it",
            RunWarning,
            stacklevel=2,
        )


def caution_evaluations(every: Every, end: float, updates: int, steps: int) -> None:
    """Warn of evaluations that the settings ask for after the end of the run; start and end are always evaluated.

    ``end``: of the run, in virtual seconds; ``updates``, ``steps``: how many arrivals and server steps it has.
    """
    if every.at is not None:
        late = [moment for moment in every.at if moment > end * SLACK]
        if late:
            which = f"{len(late)} of {len(every.at)} moments, from {min(late):g} s on,"
            text = f"eval_at: no evaluation at {which} because the run ends after {end:g} s"
            warnings.warn(text, RunWarning, stacklevel=2)
        return
    lengths = {
        "eval_time": (every.time, end, f"which ends after {end:g} s"),
        "eval_updates": (every.updates, updates, f"which has {updates} updates"),
        "eval_steps": (every.steps, steps, f"which has {steps} server steps"),
    }
    for field, (gap, length, known) in lengths.items():
        if gap is not None and gap > length * SLACK:
            text = f"{field} = {gap:.15g}: longer than the run, {known}: only its start and its end are evaluated"
            warnings.warn(text, RunWarning, stacklevel=2)


def caution_own_timing(s: Settings, schedule: Schedule) -> None:
    """Warn of faults and limits that a timing of the user's own seems not to use."""
    given = [name for name in ("faults", "timeout", "max_staleness") if getattr(s, name) is not None]
    plain = not given or bool(np.any(schedule.outcome > Outcome.UNDER_WAY)) or bool(np.any(schedule.corrupt))
    if not plain and own.thing_of("timing", s.timing) is not None:
        warnings.warn(
            f"{', '.join(given)}: changed no job; a timing of your own must apply scenario.conditions and limits "
            "itself, or call one of clock.TIMINGS, which does",
            RunWarning,
            stacklevel=2,
        )
