"""Delay corrections as probes: they measure the model to which each would lead; the run itself does not change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async import geometry
from fedjax_async.geometry import Correction, CurveFamily
from fedjax_async.local import Curve
from fedjax_async.local.batches import mean_loss
from fedjax_async.server import begun, closed
from fedjax_async.server.steps import CONTROLS, along_curve
from fedjax_async.types import (
    Array,
    Arrival,
    ClientData,
    DataParts,
    Facts,
    Info,
    Message,
    Model,
    Params,
    Request,
    ServerAlgorithm,
    State,
)

STRENGTH = 5.0  # of DC-ASGD-a: 2.5 times the default, as in the paper
ENDS: dict[str, Correction] = {
    "asgd": geometry.asgd(),
    "fedasync": geometry.fedasync(),
    "dc_asgd_a": geometry.dc_asgd_a(strength=STRENGTH),
    "orthograd": geometry.orthograd(),
    "orthopos": geometry.orthopos(),
    "orthostrict": geometry.orthostrict(),
}
GRADIENT, POSITION = ("asgd", "orthograd"), ("fedasync", "orthopos")  # those that trust the displacement, the position
CURVED = (*GRADIENT, *POSITION)  # the end corrections after which the curve is measured
CONTROL = {"none": "curve", "rotation": "rotated curve"}  # treatment of the control point -> its name in columns


class Observed(NamedTuple):
    """Server state of :func:`observed`."""

    inner: State
    corrections: dict[str, State]  # used by those that average over arrivals, such as DC-ASGD-a


def observed(rule: ServerAlgorithm) -> ServerAlgorithm:
    """``rule`` that also keeps, for each correction, its state as if it had corrected every arrival."""

    def init(params: Params, facts: Facts = Facts()) -> tuple[Observed, State]:
        state, memory = begun(rule, params, facts)
        return Observed(state, {name: end.init(params) for name, end in ENDS.items()}), memory

    def receive(state: Observed, memory: State, arrival: Arrival) -> tuple[Observed, State, Info]:
        after = {name: made[1] for name, made in corrected(rule.params(state.inner), state, arrival).items()}
        inner, memory, info = rule.receive(state.inner, memory, arrival)
        return Observed(inner, after), memory, info

    def close(state: Observed, memory: State) -> tuple[Observed, State]:
        inner, memory = closed(rule, state.inner, memory)
        return state._replace(inner=inner), memory

    def dispatch(state: Observed, memory: State, request: Request) -> tuple[Message, State]:
        return rule.dispatch(state.inner, memory, request)

    return ServerAlgorithm(init, receive, dispatch, lambda state: rule.params(state.inner), close)


def change_of(arrival: Arrival) -> Params:
    """The change of the client's model; from a curve, that of its end."""
    return arrival.upload.params if isinstance(arrival.upload, Curve) else arrival.upload


def corrected(now: Params, state: Observed, arrival: Arrival) -> dict[str, tuple[Params, State]]:
    """Correction -> the corrected change, and the correction's next state. ``now``: the server's params."""
    drift = jax.tree.map(jnp.subtract, now, arrival.start)
    change = change_of(arrival)
    return {name: end.correct(change, drift, state.corrections[name]) for name, end in ENDS.items()}


def proposals(
    now: Params, state: Observed, arrival: Arrival, position: float, family: CurveFamily | None = None
) -> dict[str, Params]:
    """Name -> the model that the server would move to: ``position`` of the way to each corrected end.

    ``CORRECTION`` is on the line to it. If the client uploads a curve, there are also ``CORRECTION, curve`` (the
    control point keeps its offset), ``CORRECTION, rotated curve`` (the control point turns with the chord), and
    ``fresh`` and ``fresh, curve`` on the client's own line and curve, from its start. ``family``: of the curves,
    quadratic by default.
    """
    family = geometry.quadratic() if family is None else family
    s, change = jnp.asarray(position, jnp.result_type(float)), change_of(arrival)
    made: dict[str, Params] = {}

    def keep(name: str, start: Params, chord: Params, bend: Params | None = None) -> None:
        aside = jax.tree.map(jnp.zeros_like, chord) if bend is None else family.aside(bend, s)
        made[name] = jax.tree.map(jnp.add, start, along_curve(start, chord, aside, s))

    for name, (chord, _) in corrected(now, state, arrival).items():
        keep(name, now, chord)
        if isinstance(arrival.upload, Curve) and name in CURVED:
            for control, title in CONTROL.items():
                bend = family.each(CONTROLS[control])(arrival.upload.offset, change, chord)
                keep(f"{name}, {title}", now, chord, bend)
    if isinstance(arrival.upload, Curve):
        keep("fresh", arrival.start, change)
        keep("fresh, curve", arrival.start, change, arrival.upload.offset)
    return made


def probe(
    observing: ServerAlgorithm,
    model: Model,
    examples: Mapping[str, tuple[Any, Any]],
    position: float,
    family: CurveFamily | None = None,
) -> Callable[[Observed, State, Arrival, DataParts], dict[str, Array]]:
    """A probe of :func:`proposals`: columns ``PROPOSAL | PART``, its mean loss on each part of ``examples``.

    ``observing``: the rule that :func:`observed` made. ``examples``: name of a part -> (x, y). ``family``: as there.
    There is also a column ``staleness``.
    """
    parts = {name: _whole(x, y) for name, (x, y) in examples.items()}

    def measured(state: Observed, memory: State, arrival: Arrival, own: DataParts) -> dict[str, Array]:
        del memory, own
        made = proposals(observing.params(state), state, arrival, position, family)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *made.values())
        columns: dict[str, Array] = {"staleness": arrival.staleness}
        for part, data in parts.items():
            losses = jax.lax.map(lambda params, data=data: mean_loss(model, params, data), stacked)
            columns |= {f"{name} | {part}": losses[index] for index, name in enumerate(made)}
        return columns

    return measured


def _whole(x: Any, y: Any) -> ClientData:
    """All rows as the examples of one client."""
    count = len(y)
    return ClientData(
        jnp.asarray(x), jnp.asarray(y), jnp.arange(count, dtype=jnp.int32), jnp.int32(0), jnp.int32(count)
    )
