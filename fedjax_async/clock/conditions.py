"""The conditions of a plan: when clients are there, what fails, and the limits that the server sets."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedjax_async import check, registry
from fedjax_async.clock import inputs
from fedjax_async.clock.availability import AVAILABILITY, Availability, AvailabilityModel
from fedjax_async.clock.faults import FAULTS, Draw, FaultModel, Faults
from fedjax_async.clock.faults import in_units as mishap_in_units


class Limits(NamedTuple):
    """What the server puts up with.

    ``max_staleness``: an upload staler than this many server steps is dropped, and its client sent on
    as after an arrival. ``timeout``: so many seconds after the dispatch of a job the server gives it up
    and the place is free for another; ``late`` says what it does with the upload if it comes after
    all: ``apply`` or ``drop`` it.
    """

    max_staleness: int | None = None
    timeout: float | None = None
    late: str = "apply"


class Conditions(NamedTuple):
    """Conditions that know their clients and their seed."""

    availability: tuple[Availability, ...]
    faults: tuple[Faults, ...]
    limits: Limits


NO_LIMITS = Limits()
NO_CONDITIONS = Conditions((), (), NO_LIMITS)


def bind(
    availability: AvailabilityModel | str | None,
    faults: FaultModel | str | None,
    limits: Limits,
    num_clients: int,
    seed: int,
) -> Conditions | None:
    """The conditions of these clients in the world of ``seed``; ``None`` where there are none at all."""
    check_limits(limits)
    if availability is None and faults is None and limits == Limits(late=limits.late):
        return None
    failing = [model(num_clients, seed, part) for model, part in models_of("faults", FAULTS, faults)]
    there = [model(num_clients, seed, part) for model, part in models_of("availability", AVAILABILITY, availability)]
    there += [one.absence for one in failing if one.absence is not None]
    return Conditions(tuple(there), tuple(failing), limits)


def joined(spec: str) -> list[str]:
    """The parts of a spec such as ``drop:probability=0.1+late:extra=30``.

    A ``+`` joins where a name follows, and that ends there or takes options: ``csv:path=a+b.csv`` is one model.
    """
    return re.split(r"\+(?=[a-z_]*(?::|\+|$))", spec)


def models_of(
    kind: str, known: Mapping[str, Callable[..., Any]], spec: Callable[..., Any] | str | None
) -> list[tuple[Callable[..., Any], int]]:
    """The models that a spec joins, each with its count among its namesakes."""
    if spec is None:
        return []
    if not isinstance(spec, str):
        return [(spec, 0)]
    seen: Counter[str] = Counter()
    models = []
    for one in joined(spec):
        name, _ = registry.parse_spec(kind, one)
        models.append((registry.bind(kind, known, one)(), seen[name]))
        seen[name] += 1
    return models


def check_limits(limits: Limits) -> None:
    """``ValueError`` for limits that are none."""
    check.require(isinstance(limits, Limits), "limits", limits, "Limits(max_staleness, timeout, late)")
    inputs.optional_whole("limits.max_staleness", limits.max_staleness, low=0)
    inputs.optional_positive("limits.timeout", limits.timeout)
    check.one_of("limits.late", limits.late, ("apply", "drop"))


def in_units(conditions: Conditions, unit: float) -> Conditions:
    """The same conditions for a clock that counts in units of so many seconds."""

    def rescaled(source: Availability) -> Availability:
        def window(client: int, time: float) -> tuple[float, float]:
            start, end = source.window(client, time * unit)
            return start / unit, end / unit

        ready = source.prepare
        prepare = None if ready is None else lambda clients, time: ready(clients, time * unit)
        return source._replace(window=window, prepare=prepare)

    def slower(draw: Draw | None) -> Draw | None:
        return None if draw is None else lambda clients, numbers: mishap_in_units(draw(clients, numbers), unit)

    timeout = conditions.limits.timeout
    return Conditions(
        tuple(map(rescaled, conditions.availability)),
        tuple(one._replace(course=slower(one.course), marks=slower(one.marks)) for one in conditions.faults),
        conditions.limits._replace(timeout=None if timeout is None else timeout / unit),
    )
