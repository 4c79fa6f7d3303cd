"""The scenario, the input of a timing: clients, durations of jobs, budget, seed, and the conditions.

The *conditions* are when clients are online, the faults of jobs, and the limits that the server sets.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import numpy as np

from fedjax_async.base import check, registry
from fedjax_async.base.grammar import joined
from fedjax_async.clock import faults as fault_models
from fedjax_async.clock.availability import AVAILABILITY, Availability, AvailabilityModel, checked_availability
from fedjax_async.clock.budget import Until
from fedjax_async.clock.durations import Delays
from fedjax_async.clock.faults import FAULTS, DrawFaults, FaultModel, Faults, Pace
from fedjax_async.clock.views import Decider

MOST_STEPS = int(np.iinfo(np.int32).max)  # local steps of a job, as schedules keep them

OfModels = TypeVar("OfModels")  # of availability or of faults


class Limits(NamedTuple):
    """What the server tolerates.

    ``max_staleness``: an upload staler than this many server steps is dropped, and its client becomes idle as after
    an arrival. ``timeout``: so many seconds after the dispatch of a job the server gives it up, and another client
    may get a job instead. ``late`` says what the server does with the upload if it comes after the timeout:
    ``apply`` or ``drop`` it.
    """

    max_staleness: int | None = None
    timeout: float | None = None
    late: str = "apply"


class Conditions(NamedTuple):
    """Conditions bound to their clients and their seed."""

    availability: tuple[Availability, ...]
    faults: tuple[Faults, ...]
    limits: Limits


NO_LIMITS = Limits()
NO_CONDITIONS = Conditions((), (), NO_LIMITS)


class Scenario(NamedTuple):
    """All that a timing may know: clients, durations of their jobs, budget, seed and conditions.

    Local steps are those of one job, bytes those of one message; a number for all clients or int64[N].
    """

    num_clients: int
    local_steps: np.ndarray  # int64[N]
    delays: Delays
    until: Until
    seed: int
    bytes_down: int | np.ndarray = 0
    bytes_up: int | np.ndarray = 0
    conditions: Conditions = NO_CONDITIONS
    progress: Callable[[float], None] | None = None  # called with the share of the budget that is planned
    decisions: Decider | None = None  # of an adaptive run


def checked_durations(scenario: Scenario, clients: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Seconds of these jobs, float64, with the local steps and bytes of the scenario; all finite and > 0."""
    sizes = (_of_clients(one, clients) for one in (scenario.local_steps, scenario.bytes_down, scenario.bytes_up))
    return finite(scenario.delays.durations(clients, numbers, *sizes))


def finite(durations: np.ndarray) -> np.ndarray:
    """The durations of jobs, as float64 of whatever numbers; ``ValueError`` unless all are finite and > 0."""
    seconds: np.ndarray = np.asarray(durations, np.float64)
    if not (np.isfinite(seconds) & (seconds > 0)).all():
        raise ValueError("delays: every duration must be a finite number > 0")
    return seconds


def _of_clients(values: int | np.ndarray, clients: np.ndarray) -> int | np.ndarray:
    if not isinstance(values, np.ndarray):
        return values
    return values[0] if values.strides == (0,) else values[clients]  # stride 0: one number for all clients


def require_all_answer(scenario: Scenario, timing: str, why: str) -> None:
    """``ValueError`` for a policy, availability, faults or limits, under which a timing's clients may not answer."""
    check.require(scenario.decisions is None, "timing", timing, "another one in a run with a policy")
    allowed = f"another one with availability, faults or limits: its clients must {why}"
    check.require(scenario.conditions == NO_CONDITIONS, "timing", timing, allowed)


def require_apart(length: float, now: float) -> None:
    """``ValueError`` for looks of the server that are so close together that ``now`` plus ``length`` is ``now``."""
    allowed = f"longer: at {now:.6g} s a look so soon after the last one comes at the same time"
    check.require(now + length > now, "length", length, allowed)


def too_short(client: int, time: float) -> ValueError:
    """The error for a job so short that its end equals its beginning in floating point."""
    if time == math.inf:
        return ValueError(f"delays: the jobs of client {client} are too long: their times are not finite numbers")
    return ValueError(f"delays: a job of client {client} is too short to advance the clock at {time} s")


# --- conditions ---------------------------------------------------------------------------------


def bind(
    availability: AvailabilityModel | str | None,
    faults: FaultModel | str | None,
    limits: Limits,
    num_clients: int,
    seed: int,
) -> Conditions:
    """Bind models, or those named by specs, to ``num_clients`` clients and a seed.

    ``NO_CONDITIONS`` if clients are always online, nothing fails and the server sets no limits.
    """
    check.require(isinstance(limits, Limits), "limits", limits, "Limits(max_staleness, timeout, late)")
    check.optional(check.whole, "limits.max_staleness", limits.max_staleness, low=0)
    check.optional(check.real_positive, "limits.timeout", limits.timeout)
    check.one_of("limits.late", limits.late, ("apply", "drop"))
    if availability is None and faults is None and limits == Limits(late=limits.late):
        return NO_CONDITIONS
    failing = [
        fault_models.checked_faults(model(num_clients, seed, part), num_clients)
        for model, part in models_of("faults", FAULTS, faults)
    ]
    sources = [
        checked_availability(model(num_clients, seed, part))
        for model, part in models_of("availability", AVAILABILITY, availability)
    ]
    sources += [source.absence for source in failing if source.absence is not None]
    return Conditions(tuple(sources), tuple(failing), limits)


def models_of(
    kind: str, known: Mapping[str, Callable[..., OfModels]], spec: OfModels | str | None
) -> list[tuple[OfModels, int]]:
    """The models that a spec joins, each with the count of models of its name before it."""
    if spec is None:
        return []
    if not isinstance(spec, str):
        return [(spec, 0)]
    seen: Counter[str] = Counter()
    models = []
    for part in joined(spec):
        found = registry.spec(kind, known, part)
        models.append((found.make(), seen[found.name]))
        seen[found.name] += 1
    return models


def in_units(conditions: Conditions, unit: float) -> Conditions:
    """The same conditions with times in units of ``unit`` seconds."""
    if conditions == NO_CONDITIONS:
        return conditions

    def rescaled(source: Availability) -> Availability:
        def interval(client: int, time: float) -> tuple[float, float]:
            start, end = source.interval(client, time * unit)
            return start / unit, end / unit

        ready = source.prepare
        prepare = None if ready is None else lambda clients, time: ready(clients, time * unit)
        return source._replace(interval=interval, prepare=prepare)

    def slower(draw: DrawFaults | None) -> DrawFaults | None:
        return None if draw is None else lambda clients, numbers: fault_models.in_units(draw(clients, numbers), unit)

    def paced(pace: Pace | None) -> Pace | None:
        if pace is None:
            return None

        def in_rounds(client: int, time: float) -> tuple[float, float]:
            rate, until = pace(client, time * unit)
            return rate, until / unit

        return in_rounds

    def failing(one: Faults) -> Faults:
        return one._replace(draw=slower(one.draw), draw_copies=slower(one.draw_copies), pace=paced(one.pace))

    timeout = conditions.limits.timeout
    return Conditions(
        tuple(map(rescaled, conditions.availability)),
        tuple(map(failing, conditions.faults)),
        conditions.limits._replace(timeout=None if timeout is None else timeout / unit),
    )
