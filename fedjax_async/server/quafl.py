"""QuAFL: clients with models of their own, polled by the server, and averages on both sides.

Source: Zakerinia, Talaei, Nadiradze, Alistarh, "Communication-efficient federated learning with data and client
heterogeneity" (2024), the overview of its first version ("QuAFL: federated averaging made asynchronous and
communication-efficient"), and the authors' code (github.com/ShayanTalaei/QuAFL).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async.base import check, tree
from fedjax_async.base.factories import takes
from fedjax_async.server.aggregate import Sum, mean
from fedjax_async.server.rule import guard_rails
from fedjax_async.server.transforms import (
    Transform,
    begun,
    require_no_correction,
    require_no_steps,
    scaled,
    transformed,
)
from fedjax_async.types import Arrival, Facts, Info, Message, Params, Request, ServerAlgorithm, State


class QuaflState(NamedTuple):
    """Server state; the row of each client is its own model, as it starts again."""

    params: Params
    towards: Sum  # from the server's model to those of the clients, since the last server step
    guards: State


@takes(guards=guard_rails)
def quafl(*, size: int = 10, guards: Transform) -> ServerAlgorithm:
    """Clients keep models of their own and average with the server when it polls them (QuAFL, Zakerinia et al. 2024).

    The server polls s clients, and each sends its model ``y_i`` as it is, in the midst of its local steps. Then
    ``x' = (x + sum_i y_i) / (s + 1)``, and each of these clients goes on from ``(x + s y_i) / (s + 1)``, with x from
    before the step. The timing ``polling`` says who is polled, and after how many local steps.

    Args:
      size: s, the ``size`` of the timing. If fewer clients answer, their mean has the same weight ``s / (s + 1)``, as
        in the authors' code.

    Deviations: the setting ``compress`` quantises what a client's model has changed, and nothing that the server sends;
    the paper sends both models by a lattice code around the receiver's own. The authors' code multiplies the clients'
    rate by ``(s + 1) / s``: set it so. A poll has at least one local step of each client. A client whose upload is
    rejected goes on from the model that it had. Memory: a model a client.
    """
    check.whole("size", size)
    require_no_steps(guards, "quafl")
    require_no_correction(guards, "quafl")
    average, own = mean(), size / (size + 1)

    def init(params: Params, facts: Facts = Facts()) -> tuple[QuaflState, Params]:
        return QuaflState(params, average.init(params), begun(guards, params, facts)), params

    def receive(state: QuaflState, memory: Params, arrival: Arrival) -> tuple[QuaflState, Params, Info]:
        result = transformed(guards, state.guards, state.params, arrival)
        accepted, share = result.accepted, result.accepted.astype(result.arrival.weight.dtype)
        model = jax.tree.map(jnp.add, result.arrival.start, result.direction)
        towards = scaled(jax.tree.map(jnp.subtract, model, state.params), own)
        new = state._replace(
            towards=average.add(state.towards, towards, share, arrival),
            guards=tree.where(accepted, result.state, state.guards),
        )
        middle = jax.tree.map(jnp.add, state.params, towards)
        return new, tree.where(accepted, middle, memory), result.info(share)

    def close(state: QuaflState, memory: Params) -> tuple[QuaflState, Params]:
        change, came, emptied = average.close(state.towards)
        moved = jax.tree.map(jnp.add, state.params, tree.cast_like(change, state.params))
        params = tree.where(came > 0, moved, state.params)
        return state._replace(params=params, towards=emptied), memory

    def dispatch(state: QuaflState, memory: Params, request: Request) -> tuple[Message, Params]:
        return Message(memory), memory

    return ServerAlgorithm(init, receive, dispatch, lambda state: state.params, close)
