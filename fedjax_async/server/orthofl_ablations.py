"""What remains of OrthoFL without its moving average, or with another projection. (Without calibration: FedAsync.)"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async import check, registry, tree
from fedjax_async.geometry import GROUPINGS, project_out_span
from fedjax_async.registry import takes
from fedjax_async.server.calibration import Sent, handed_on, marker, plus, seen_after
from fedjax_async.server.options import discount, guard_rails
from fedjax_async.server.orthofl import moving_average, orthogonal
from fedjax_async.server.rule import known
from fedjax_async.server.staleness import Weight
from fedjax_async.server.statistics import on_weights
from fedjax_async.server.transforms import Transform, scale_by_staleness, take
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


class Latest(NamedTuple):
    """State of :func:`orthofl_no_average`."""

    params: Params
    guards: State


@takes(guards=guard_rails)
def orthofl_no_average(*, per: str = "layer", guards: Transform) -> ServerAlgorithm:
    """OrthoFL without moving average: the weights calibrated last are the global model (OrthoFL 2025, 5.4).

    ``W <- w_m + (W - start_m)_perp`` at every arrival, whenever steps close; ``per`` as in ``orthofl``.
    """
    combine = orthogonal(per)

    def init(params: Params) -> tuple[Latest, Array]:
        return Latest(params, guards.init(params)), marker()

    def receive(state: Latest, memory: Array, arrival: Arrival) -> tuple[Latest, Array, Info]:
        taken = take(guards, state.guards, state.params, arrival)
        after = Latest(handed_on(state.params, taken.arrival.start, taken.direction, combine), taken.state)
        weight = jnp.where(taken.accepted, taken.factor, 0.0).astype(taken.arrival.weight.dtype)
        return tree.where(taken.accepted, after, state), memory, Info(weight)

    def dispatch(state: Latest, memory: Array, request: Request) -> tuple[Message, Array]:
        return Message(state.params), memory

    return ServerAlgorithm(init, receive, dispatch, lambda state: state.params)


class Changes(NamedTuple):
    """State of :func:`orthofl_pairwise`."""

    average: State
    latest: Params  # every client's latest change, [N, ...]
    accepted: Array  # bool[], whether the rule counted the last arrival


@takes(discounted=discount, guards=guard_rails)
def orthofl_pairwise(
    *, mixing: Traced = 0.6, per: str = "layer", num_clients: int = 10, discounted: Weight, guards: Transform
) -> ServerAlgorithm:
    """OrthoFL with the client's change, not the others' shift, projected (OrthoFL 2025, 5.4: pairwise projection).

    The change of an arriving client is projected on the orthogonal complement of the latest changes of all
    other clients, of which an orthonormal basis is made first; it goes on from its start plus that plus the
    whole shift of the global model. The paper says no more than its first half; that clients keep the
    shift is our reading. State: N changes.

    Args:
      mixing, per: as in ``orthofl``.
      num_clients: N; a simulation fills it in.
    """
    check.positive("mixing", mixing)
    check.in_range("mixing", mixing, 0.0, 1.0)
    check.whole("num_clients", num_clients)
    registry.find("per", GROUPINGS, per)
    return _pairwise(moving_average(guards, scale_by_staleness(discounted, mixing)), per, num_clients)


def _pairwise(average: ServerAlgorithm, per: str, num_clients: int) -> ServerAlgorithm:
    def init(params: Params) -> tuple[Changes, Sent]:
        latest = tree.stack_zeros(params, num_clients)
        return Changes(average.init(params)[0], latest, jnp.bool_(False)), Sent(params, params)

    def receive(state: Changes, memory: Sent, arrival: Arrival) -> tuple[Changes, Sent, Info]:
        nothing = jax.tree.map(jnp.zeros_like, arrival.upload)
        others = tree.put(state.latest, arrival.client, nothing)
        now = average.params(state.average)
        shift = jax.tree.map(jnp.subtract, now, memory.seen)
        projected = on_weights(lambda own, rows: project_out_span(own, rows, per=per))(arrival.upload, others)
        weights = plus(arrival.start, on_weights(plus)(projected, shift))
        after, _, info = average.receive(state.average, (), arrival)
        accepted = info.weight > 0
        latest = tree.where(accepted, tree.put(state.latest, arrival.client, arrival.upload), state.latest)
        return Changes(after, latest, accepted), tree.where(accepted, Sent(weights, now), memory), info

    def close(state: Changes, memory: Sent) -> tuple[Changes, Sent]:
        after, seen = seen_after(average, state.average, state.accepted, memory.seen)
        return state._replace(average=after), memory._replace(seen=seen)

    def dispatch(state: Changes, memory: Sent, request: Request) -> tuple[Message, Sent]:
        return Message(memory.weights), memory

    def given(facts: Facts) -> ServerAlgorithm:
        return _pairwise(known(average, facts), per, num_clients)

    return ServerAlgorithm(init, receive, dispatch, lambda state: average.params(state.average), close, given)
