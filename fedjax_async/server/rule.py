"""The one server rule: transform what arrives, average until the step closes, apply an optimiser."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_async import check, tree
from fedjax_async.server.transforms import Transform, chain, scaled
from fedjax_async.types import Array, Arrival, Message, Params, ServerAlgorithm, State

WEIGHTING = ("uniform", "examples")


class RuleState(NamedTuple):
    """Server state of :func:`rule`."""

    params: Params
    transforms: State
    total: Params  # weighted sum of the directions since the last close
    weight: Array  # float[], sum of their weights
    optimizer: State


def rule(
    *transforms: Transform,
    optimizer: optax.GradientTransformation,
    weighting: str = "uniform",
    divisor: Any = None,
) -> ServerAlgorithm:
    """Chain ``transforms`` on each arriving delta, average over the server step, apply ``optimizer``.

    ``d_i = transforms(Delta_i)``; when the step closes, ``mean = sum w_i d_i / sum w_i`` and
    ``x <- optimizer(x, gradient = -mean)``. When a step closes is the clock's affair.

    Args:
      weighting: ``"uniform"`` (w_i = 1) or ``"examples"`` (w_i = the client's example count).
      divisor: divide the sum by this number instead of by ``sum w_i`` (AsynFL divides by n).

    A rejected upload (arrival weight 0) is not counted; a step with none accepted changes nothing.
    ``info["weight"]`` is ``w_i`` times the scalar factors of the transforms, before the division.
    """
    check.one_of("weighting", weighting, WEIGHTING)
    if divisor is not None:
        check.positive("divisor", divisor)
    transform = chain(*transforms)
    by_examples = weighting == "examples"

    def init(params: Params) -> tuple[State, State]:
        state = RuleState(
            params=params,
            transforms=transform.init(params),
            total=jax.tree.map(jnp.zeros_like, params),
            weight=jnp.zeros((), jnp.result_type(float)),
            optimizer=optimizer.init(params),
        )
        return state, ()

    def receive(state: RuleState, memory: State, arrival: Arrival) -> tuple[RuleState, State, dict[str, Array]]:
        accepted = arrival.weight > 0
        direction, transforms_state = transform.update(arrival.upload, state.transforms, state.params, arrival)
        share = jnp.where(accepted, arrival.weight if by_examples else jnp.ones_like(arrival.weight), 0.0)
        share = share.astype(state.weight.dtype)
        if arrival.closes is True:  # each arrival is a server step: nothing to accumulate
            total, weight = scaled(direction, share), share
        else:
            total = jax.tree.map(jnp.add, state.total, scaled(direction, share))
            weight = state.weight + share
        below = jnp.where(weight > 0, weight, 1.0) if divisor is None else jnp.asarray(divisor, weight.dtype)
        gradient = scaled(total, -1.0 / below)
        params, optimizer_state = tree.optimize(optimizer, gradient, state.optimizer, state.params)
        applies = jnp.logical_and(arrival.closes, weight > 0)
        new = RuleState(
            params=tree.where(applies, params, state.params),
            transforms=tree.where(accepted, transforms_state, state.transforms),
            total=state.total,
            weight=state.weight,
            optimizer=tree.where(applies, optimizer_state, state.optimizer),
        )
        if arrival.closes is not True:
            new = new._replace(
                total=jax.tree.map(lambda t: jnp.where(arrival.closes, jnp.zeros_like(t), t), total),
                weight=jnp.where(arrival.closes, jnp.zeros_like(weight), weight),
            )
        return new, memory, {"weight": share * transform.weight(arrival).astype(share.dtype)}

    def dispatch(state: RuleState, memory: State) -> tuple[Message, State]:
        return Message(state.params), memory

    return ServerAlgorithm(init, receive, dispatch, params=lambda state: state.params)
