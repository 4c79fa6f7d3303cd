"""Port: uploads weighted by their age and by whether they lead where the server went meanwhile.

Source: Su, Li, "How asynchronous can federated learning be?" (2022), read in the authors' code (``examples/async/port``
of github.com/TL-System/plato).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async.base import check, tree
from fedjax_async.base.factories import takes
from fedjax_async.geometry.vectors import inner, leaves
from fedjax_async.server.aggregate import Sum, mean
from fedjax_async.server.rule import guard_rails
from fedjax_async.server.running_statistics import weights_of, with_statistics
from fedjax_async.server.transforms import Transform, begun, require_no_steps, scaled, transformed
from fedjax_async.types import (
    Array,
    Arrival,
    Facts,
    Info,
    Message,
    Params,
    Request,
    ServerAlgorithm,
    State,
    Traced,
)


class PortState(NamedTuple):
    """Server state."""

    params: Params
    deltas: Sum  # weighted, since the last server step
    guards: State


def likeness(direction: Params, start: Params, end: Params) -> Array:
    """The cosine of a direction and the way from ``start`` to ``end``, of the weights; 1 if one of them is zero."""
    along, first, last = (leaves(weights_of(each)) for each in (direction, start, end))
    way = [b - a for a, b in zip(first, last, strict=True)]
    product = jnp.sqrt(inner(along, along)) * jnp.sqrt(inner(way, way))
    sound = (product > 0) & jnp.isfinite(product)
    cosine = inner(along, way) / jnp.where(sound, product, 1.0)
    return jnp.where(sound & jnp.isfinite(cosine), jnp.clip(cosine, -1.0, 1.0), 1.0)


@takes(guards=guard_rails)
def port(
    *,
    server_lr: Traced = 1.0,
    likeness_weight: Traced = 1.0,
    age_weight: Traced = 3.0,
    bound: Traced = 10.0,
    guards: Transform,
) -> ServerAlgorithm:
    """Mean of deltas weighted by age and by likeness to the server's own change (Port, Su and Li 2022).

    ``x <- x + eta sum_i p_i Delta_i / sum_i p_i``, ``p_i = n_i (a (cos_i + 1) / 2 + b S / (tau_i + S))``: n_i examples,
    cos_i the cosine between Delta_i and the way that the server has gone since the client's start. A fresh upload, or
    one after which the server has not moved, has ``cos_i = 1``. The timing ``hurry`` keeps ``tau_i <= S``.

    Args:
      server_lr: ``eta > 0``.
      likeness_weight: ``a >= 0``.
      age_weight: ``b > 0``. 1 and 3 are those of the authors' example (``port_cifar10.yml``).
      bound: ``S > 0``, the ``bound`` of the timing.

    Deviations: the authors' code compares with the way of the last two steps, whatever the age; here it is the way
    since the client's start. The recorded weight is p_i.
    """
    for name, value in (("server_lr", server_lr), ("age_weight", age_weight), ("bound", bound)):
        check.positive(name, value)
    check.non_negative("likeness_weight", likeness_weight)
    require_no_steps(guards, "port")
    average = mean()

    def init(params: Params, facts: Facts = Facts()) -> tuple[PortState, State]:
        return PortState(params, average.init(params), begun(guards, params, facts)), ()

    def receive(state: PortState, memory: State, arrival: Arrival) -> tuple[PortState, State, Info]:
        result = transformed(guards, state.guards, state.params, arrival)
        real = result.arrival.weight.dtype
        alike = likeness(result.direction, result.arrival.start, state.params)
        cosine = jnp.where(arrival.staleness > 0, alike, 1.0).astype(real)
        a, b, limit = (jnp.asarray(value, real) for value in (likeness_weight, age_weight, bound))
        fits = a * (cosine + 1.0) / 2.0 + b * limit / (arrival.staleness.astype(real) + limit)
        share = jnp.where(result.accepted, result.arrival.weight * fits, 0.0)
        new = state._replace(
            deltas=average.add(state.deltas, result.direction, share, arrival),
            guards=tree.where(result.accepted, result.state, state.guards),
        )
        return new, memory, result.info(share)

    def close(state: PortState, memory: State) -> tuple[PortState, State]:
        direction, weight, emptied = average.close(state.deltas)
        step = with_statistics(weights_of(scaled(direction, server_lr)), direction)
        moved = jax.tree.map(jnp.add, state.params, step)
        return state._replace(params=tree.where(weight > 0, moved, state.params), deltas=emptied), memory

    def dispatch(state: PortState, memory: State, request: Request) -> tuple[Message, State]:
        return Message(state.params), memory

    return ServerAlgorithm(init, receive, dispatch, lambda state: state.params, close)
