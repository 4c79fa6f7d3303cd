"""The one server rule: transform what arrives, aggregate it until the step closes, apply an optimiser."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_async import check, tree
from fedjax_async.server.aggregate import Aggregate, mean
from fedjax_async.server.statistics import weights_of, with_statistics
from fedjax_async.server.transforms import Transform, chain, scaled, take
from fedjax_async.types import Array, Arrival, Message, Params, ServerAlgorithm, State

WEIGHTING = ("uniform", "examples")


class RuleState(NamedTuple):
    """Server state of :func:`rule`."""

    params: Params
    transforms: State
    gathered: State  # the aggregate's, of the arrivals since the last close
    optimizer: State
    oldest: State = ()  # float[], the largest staleness of these arrivals, where the rate depends on it


def rule(
    *transforms: Transform,
    optimizer: optax.GradientTransformation,
    weighting: str = "uniform",
    aggregate: Aggregate | None = None,
    rate: Callable[[Array], Array] | None = None,
) -> ServerAlgorithm:
    """Chain ``transforms`` on each arriving delta, aggregate over the server step, apply ``optimizer``.

    ``d_i = transforms(Delta_i)``; when the step closes, ``d = aggregate of (d_i, w_i)``, by default their
    mean ``sum w_i d_i / sum w_i``, and ``x <- optimizer(x, gradient = -d)``. When a step closes is the
    clock's affair.

    Args:
      weighting: ``"uniform"`` (w_i = 1) or ``"examples"`` (w_i = the client's example count).
      aggregate: :func:`mean` or :func:`buffered`; the latter counts each direction once, whatever its w_i.
      rate: multiplies the optimiser's update by ``rate(largest staleness of the accepted arrivals)``.

    Running statistics among the params are no weights: they move by ``d`` itself, whatever the optimiser, and
    their ``Delta_i`` is the way from the server's to the client's: averaged is where clients stand, however stale.
    A rejected upload (arrival weight 0, or multiplied by 0 by the transforms) is not counted; a step with
    none accepted changes nothing. ``info["weight"]`` is ``w_i`` times the scalar factors of the
    transforms, before the aggregation.
    """
    check.one_of("weighting", weighting, WEIGHTING)
    transform = chain(*transforms)
    gathering = mean() if aggregate is None else aggregate

    def init(params: Params) -> tuple[State, State]:
        oldest = () if rate is None else jnp.zeros((), jnp.result_type(float))
        inner = optimizer.init(weights_of(params))
        state = RuleState(params, transform.init(params), gathering.init(params), inner, oldest)
        return state, ()

    def receive(state: RuleState, memory: State, arrival: Arrival) -> tuple[RuleState, State, dict[str, Array]]:
        taken = take(transform, state.transforms, state.params, arrival)
        arrival, counted = taken.arrival, taken.arrival.weight
        share = jnp.where(taken.accepted, counted if weighting == "examples" else jnp.ones_like(counted), 0.0)
        single = arrival.closes is True  # each arrival is a server step: nothing is carried from one to the next
        before = gathering.init(state.params) if single else state.gathered
        aggregated, weight, gathered = gathering.close(gathering.add(before, taken.direction, share), arrival.closes)
        oldest, slowness = _slowed(rate, state.oldest, arrival, taken.accepted)
        params, optimizer_state = _moved(optimizer, state, aggregated, slowness)
        applies = jnp.logical_and(arrival.closes, weight > 0)
        new = RuleState(
            params=tree.where(applies, params, state.params),
            transforms=tree.where(taken.accepted, taken.state, state.transforms),
            gathered=state.gathered if single else gathered,
            optimizer=tree.where(applies, optimizer_state, state.optimizer),
            oldest=oldest,
        )
        return new, memory, {"weight": share * taken.factor.astype(share.dtype)}

    def dispatch(state: RuleState, memory: State) -> tuple[Message, State]:
        return Message(state.params), memory

    return ServerAlgorithm(init, receive, dispatch, params=lambda state: state.params)


def _slowed(
    rate: Callable[[Array], Array] | None, oldest: State, arrival: Arrival, accepted: Array
) -> tuple[State, Array | None]:
    """The largest staleness to carry on (0 after a close), and the rate at the largest so far."""
    if rate is None:
        return oldest, None
    oldest = jnp.where(accepted, jnp.maximum(oldest, arrival.staleness.astype(oldest.dtype)), oldest)
    return jnp.where(arrival.closes, jnp.zeros_like(oldest), oldest), rate(oldest)


def _moved(
    optimizer: optax.GradientTransformation, state: RuleState, direction: Params, factor: Array | None
) -> tuple[Params, State]:
    """The params after a server step along ``direction``, and the optimiser's state."""
    gradient = scaled(weights_of(direction), -1.0)
    weights, inner = tree.optimize(optimizer, gradient, state.optimizer, weights_of(state.params), factor)
    return with_statistics(weights, jax.tree.map(jnp.add, state.params, direction)), inner
