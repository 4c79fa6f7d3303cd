"""``plan``: from a timing and a delay model to a ``Schedule``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedjax_async.base import check, registry
from fedjax_async.clock import delays as delay_models
from fedjax_async.clock import scenario as scenarios
from fedjax_async.clock.availability import AvailabilityModel
from fedjax_async.clock.budget import Until, budget_text
from fedjax_async.clock.decisions import Decisions, Ended
from fedjax_async.clock.durations import DelayModel
from fedjax_async.clock.faults import FaultModel
from fedjax_async.clock.network import NetworkModel, over
from fedjax_async.clock.record import DROPPED
from fedjax_async.clock.scenario import NO_LIMITS, Limits, Scenario
from fedjax_async.clock.timing import TIMINGS, Timing
from fedjax_async.types import Schedule


class NothingArrives(ValueError):
    """Not a single upload is applied within the budget."""


def plan(
    timing: Timing | str,
    delays: DelayModel | str,
    *,
    num_clients: int,
    local_steps: int | np.ndarray,
    until: Until,
    seed: int = 0,
    bytes_down: int | np.ndarray = 0,
    bytes_up: int | np.ndarray = 0,
    availability: AvailabilityModel | str | None = None,
    faults: FaultModel | str | None = None,
    network: NetworkModel | str | None = None,
    limits: Limits = NO_LIMITS,
    progress: Callable[[float], None] | None = None,
    decisions: Decisions | None = None,
) -> Schedule:
    """Decide when everything happens: which client starts from which version, what arrives when and closes a step.

    ``timing`` and ``delays`` are specs (``"buffer:size=10"``, ``"lognormal:sigma=0.5"``) or what the
    factories in ``TIMINGS`` and ``DELAYS`` return. ``local_steps`` (of one job), ``bytes_down`` and
    ``bytes_up`` (of one message) are numbers or arrays of one number per client. ``availability``,
    ``faults`` and ``network`` are specs or models too; specs of the first two may be joined with ``+``
    (``"drop:probability=0.1+late:extra=30"``). ``limits`` are the server's. ``progress(share)`` is called now and
    then with the share of the budget that is planned. In an adaptive run the planner asks ``decisions``; if they raise
    ``Ended``, the schedule ends there. The same arguments give the same schedule, and a longer budget
    continues a shorter one. A schedule also ends when no client will ever be online again.

    Raises ``ValueError`` for invalid settings and for a schedule that does not fit the machine's memory, and
    ``NothingArrives`` if not a single upload fits into the budget.

    >>> schedule = plan("every", "constant:mean=10", num_clients=3, local_steps=5, until=Until(updates=6))
    >>> schedule.client[schedule.job].tolist(), schedule.time.tolist()
    ([0, 1, 2, 0, 1, 2], [10.0, 10.0, 10.0, 20.0, 20.0, 20.0])
    >>> schedule.staleness.tolist()
    [0, 1, 2, 0, 1, 2]
    """
    check_until(until)
    for field, value, kinds in (("timing", timing, "TIMINGS"), ("delays", delays, "DELAYS")):
        check.require(isinstance(value, str) or callable(value), field, value, f"a name of {kinds} or a model")
    check.whole("num_clients", num_clients)
    check.whole("seed", seed, low=0)
    num_clients, seed = int(num_clients), int(seed)
    durations = delay_models.bind(delays, num_clients, seed)
    steps = per_client("local_steps", local_steps, num_clients, low=1, high=scenarios.MOST_STEPS)
    scenario = Scenario(
        num_clients,
        steps.astype(np.int64, copy=False),
        durations if network is None else over(network, durations, num_clients, seed),
        until,
        seed,
        per_client("bytes_down", bytes_down, num_clients, low=0),
        per_client("bytes_up", bytes_up, num_clients, low=0),
        scenarios.bind(availability, faults, limits, num_clients, seed),
        progress,
        decisions,
    )
    policy = registry.spec("timing", TIMINGS, timing).make() if isinstance(timing, str) else timing
    try:
        schedule = policy(scenario)
    except Ended:
        if decisions is None:
            raise
        schedule = decisions.schedule()
    if len(schedule.job) == 0 and decisions is not None and decisions.withheld and not decisions.uploads:
        raise NothingArrives(str(decisions.nothing_uploaded()))
    if len(schedule.job) == 0:
        raise NothingArrives(f"{budget_text(until)}: nothing arrives in time; {_why_nothing(schedule, until)}")
    return schedule


def _why_nothing(schedule: Schedule, until: Until) -> str:
    """Why no upload was applied."""
    first = float(schedule.upload_time.min(initial=np.inf))
    if first == np.inf:
        return "nothing is ever uploaded" + (": no client is online for long enough" if schedule.exhausted else "")
    if until.time is None or first > until.time:
        return f"the first upload takes {first:.6g} s"
    dropped = np.isin(schedule.outcome, DROPPED)
    if dropped[schedule.upload_time <= until.time].all():
        return f"all {np.sum(dropped)} uploads that came are dropped, too late (timeout) or too stale (max_staleness)"
    return f"the first upload comes after {first:.6g} s, but the server applies it only later"


def check_until(until: Until) -> None:
    """Raise ``ValueError`` unless ``until`` sets at least one limit and all its limits are valid."""
    limited = isinstance(until, Until) and any(value is not None for value in until)
    check.require(limited, "until", until, "an Until with a limit, such as clock.Until(updates=100)")
    check.optional(check.real_positive, "until.time", until.time)
    check.optional(check.whole, "until.updates", until.updates)
    check.optional(check.whole, "until.steps", until.steps)


def per_client(field: str, value: int | np.ndarray, num_clients: int, low: int, high: int | None = None) -> np.ndarray:
    """``value``, one number for all or one per client, as an array [N].

    Raises ``ValueError`` unless all are whole, >= ``low`` and, if it is given, <= ``high``.
    """
    array = np.asarray(value)
    whole = array.dtype.kind in "iu" or (array.dtype.kind == "f" and bool((array == np.floor(array)).all()))
    allowed = f"whole numbers >= {low}{'' if high is None else f' and <= {high}'}, one for all or one per client"
    fits = whole and array.shape in ((), (num_clients,)) and array.min() >= low
    fits = fits and (high is None or array.max() <= high)
    check.require(fits, field, value, f"{allowed} ({num_clients})")
    return np.broadcast_to(array, (num_clients,))
