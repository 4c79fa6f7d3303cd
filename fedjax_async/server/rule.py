"""The one server rule: transform what arrives, aggregate it until the step closes, apply an optimiser."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_async import check, tree
from fedjax_async.server.aggregate import Aggregate, mean
from fedjax_async.server.running_statistics import weights_of, with_statistics
from fedjax_async.server.transforms import Transform, chain, scaled, take
from fedjax_async.types import Array, Arrival, Facts, Info, Message, Params, Request, ServerAlgorithm, State

WEIGHTING = ("uniform", "examples")


class RuleState(NamedTuple):
    """Server state of :func:`rule`."""

    params: Params
    transforms: State
    gathered: State  # the aggregate's, of the arrivals since the last close; () where every arrival closes
    optimizer: State
    oldest: State = ()  # float[], the largest staleness of these arrivals, where the rate depends on it


def known(algorithm: ServerAlgorithm, facts: Facts) -> ServerAlgorithm:
    """The rule for a run of which ``facts`` hold; the rule itself if it does not ask."""
    return algorithm if algorithm.given is None else algorithm.given(facts)


def closed(algorithm: ServerAlgorithm, state: State, memory: State) -> tuple[State, State]:
    """State and memory after the step is closed; unchanged by a rule that does everything in ``receive``."""
    return (state, memory) if algorithm.close is None else algorithm.close(state, memory)


def rule(
    *transforms: Transform,
    optimizer: optax.GradientTransformation,
    weighting: str = "uniform",
    aggregate: Aggregate | None = None,
    rate: Callable[[Array], Array] | None = None,
    facts: Facts | None = None,
) -> ServerAlgorithm:
    """Chain ``transforms`` on each arriving delta, aggregate over the server step, apply ``optimizer``.

    ``d_i = transforms(Delta_i)``; when the step closes, ``d = aggregate of (d_i, w_i)``, by default their
    mean ``sum w_i d_i / sum w_i``, and ``x <- optimizer(x, gradient = -d)``. When a step closes is the
    clock's affair.

    Args:
      weighting: ``"uniform"`` (w_i = 1) or ``"examples"`` (w_i = the client's example count).
      aggregate: :func:`mean` or :func:`buffered`; the latter counts each direction once, whatever its w_i.
      rate: multiplies the optimiser's update by ``rate(largest staleness of the accepted arrivals)``.
      facts: of the run, if they are known; the engine gives them through ``given``. Where every arrival closes its
        step, nothing is carried from one to the next.

    Running statistics among the params are no weights: they move by ``d`` itself, whatever the optimiser, and
    their ``Delta_i`` is the way from the server's to the client's: averaged is where clients stand, however stale.
    A rejected upload (arrival weight 0, or multiplied by 0 by the transforms) is not counted; a step with
    none accepted changes nothing. ``info.weight`` is ``w_i`` times the scalar factors of the
    transforms, before the aggregation.
    """
    check.one_of("weighting", weighting, WEIGHTING)
    transform = chain(*transforms)
    gathering = mean() if aggregate is None else aggregate
    carries = facts is None or not facts.every_closes

    def init(params: Params) -> tuple[State, State]:
        oldest = () if rate is None else jnp.zeros((), jnp.result_type(float))
        inner = optimizer.init(weights_of(params))
        gathered = gathering.init(params) if carries else ()
        return RuleState(params, transform.init(params), gathered, inner, oldest), ()

    def receive(state: RuleState, memory: State, arrival: Arrival) -> tuple[RuleState, State, Info]:
        taken = take(transform, state.transforms, state.params, arrival)
        arrival, counted = taken.arrival, taken.arrival.weight
        share = jnp.where(taken.accepted, counted if weighting == "examples" else jnp.ones_like(counted), 0.0)
        before = state.gathered if carries else gathering.init(state.params)
        new = state._replace(
            transforms=tree.where(taken.accepted, taken.state, state.transforms),
            gathered=gathering.add(before, taken.direction, share, arrival),
            oldest=_oldest(state.oldest, arrival, taken.accepted),
        )
        return new, memory, Info(share * taken.factor.astype(share.dtype))

    def close(state: RuleState, memory: State) -> tuple[RuleState, State]:
        direction, weight, emptied = gathering.close(state.gathered)
        factor = None if rate is None else rate(state.oldest)
        params, optimizer_state = _moved(optimizer, state, direction, factor)
        new = RuleState(
            params=tree.where(weight > 0, params, state.params),
            transforms=state.transforms,
            gathered=emptied if carries else (),
            optimizer=tree.where(weight > 0, optimizer_state, state.optimizer),
            oldest=jax.tree.map(jnp.zeros_like, state.oldest),
        )
        return new, memory

    def dispatch(state: RuleState, memory: State, request: Request) -> tuple[Message, State]:
        return Message(state.params), memory

    def given(facts: Facts) -> ServerAlgorithm:
        return rule(*transforms, optimizer=optimizer, weighting=weighting, aggregate=aggregate, rate=rate, facts=facts)

    return ServerAlgorithm(init, receive, dispatch, lambda state: state.params, close, given)


def _oldest(oldest: State, arrival: Arrival, accepted: Array) -> State:
    """The largest staleness so far, this arrival included if it was accepted."""

    def later(so_far: Array) -> Array:
        return jnp.where(accepted, jnp.maximum(so_far, arrival.staleness.astype(so_far.dtype)), so_far)

    return jax.tree.map(later, oldest)


def _moved(
    optimizer: optax.GradientTransformation, state: RuleState, direction: Params, factor: Array | None
) -> tuple[Params, State]:
    """The params after a server step along ``direction``, and the optimiser's state."""
    gradient = scaled(weights_of(direction), -1.0)
    weights, inner = tree.optimize(optimizer, gradient, state.optimizer, weights_of(state.params), factor)
    return with_statistics(weights, jax.tree.map(jnp.add, state.params, direction)), inner
