"""The one server rule: transform each arrival, aggregate until the server step closes, apply an optimiser.

The file ends with the options that many rules share: a rule gets them through ``base.factories.takes``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_async.base import check, tree
from fedjax_async.server.aggregate import Aggregate, mean
from fedjax_async.server.running_statistics import weights_of, with_statistics
from fedjax_async.server.transforms import (
    Transform,
    Transformed,
    Weight,
    begun,
    chain,
    clip_by_norm,
    scale_overstale,
    scaled,
    staleness_weight,
    transformed,
)
from fedjax_async.types import Array, Arrival, Facts, Info, Message, Params, Request, ServerAlgorithm, State, Traced


class Weighting(NamedTuple):
    """What an accepted arrival counts in its server step.

    ``of(result, params, memory) -> (weight, memory)``: ``result`` is the transformed arrival, ``params`` are the
    server's, ``memory`` is the server's row about the client; the new row is kept only if the arrival is accepted.
    """

    of: Callable[[Transformed, Params, State], tuple[Array, State]]
    memory: Callable[[], State] = tuple  # the row at first; () if there is none


# Weights that depend on no upload.
WEIGHTING: dict[str, Weighting] = {
    "uniform": Weighting(lambda result, params, memory: (jnp.ones_like(result.arrival.weight), memory)),
    "examples": Weighting(lambda result, params, memory: (result.arrival.weight, memory)),
}


class RuleState(NamedTuple):
    """Server state of :func:`rule`."""

    params: Params
    transforms: State
    accumulated: State  # of the aggregate, since the last close; () where every arrival closes its step
    optimizer: State  # in float32 where the params have half precision
    oldest: State = ()  # float[], largest staleness of the accepted arrivals since then; () without ``rate``
    facts: Facts = Facts().static  # whether every arrival closes its step


def closed(algorithm: ServerAlgorithm, state: State, memory: State) -> tuple[State, State]:
    """State and memory after the server step is closed; unchanged if the rule has no ``close``."""
    return (state, memory) if algorithm.close is None else algorithm.close(state, memory)


def rule(
    *transforms: Transform,
    optimizer: optax.GradientTransformation,
    weighting: str | Weighting = "uniform",
    aggregate: Aggregate | None = None,
    rate: Callable[[Array], Array] | None = None,
) -> ServerAlgorithm:
    """Chain ``transforms`` on each arriving delta, aggregate over the server step, apply ``optimizer``.

    ``d_i = transforms(Delta_i)``. When the step closes, ``d`` is the aggregate of all ``(d_i, w_i)``, by default
    their mean ``sum w_i d_i / sum w_i``, and ``x <- optimizer(x, gradient = -d)``. The clock decides when steps close.

    Args:
      weighting: ``"uniform"`` (w_i = 1), ``"examples"`` (w_i = the client's example count), or a :class:`Weighting`.
      optimizer: followed by the ``steps`` of the transforms, if they bring any.
      aggregate: :func:`mean` or :func:`buffered`; the latter counts each direction once, whatever its w_i.
      rate: multiplies the optimiser's update by ``rate(largest staleness of the accepted arrivals)``, before the
        ``steps`` of the transforms.

    If every arrival closes its step, the state carries no aggregate from one arrival to the next.

    A rejected upload does not count: its arrival weight is 0, or the transforms multiplied it by 0. A step without
    accepted uploads changes nothing. ``info.weight`` is ``w_i`` times the weights of the transforms, before the
    aggregation. Running statistics among the params move by ``d`` itself, without the optimiser, and their
    ``Delta_i`` counts from the server's present statistics (see ``running_statistics.rebased``).
    """
    if named := not isinstance(weighting, Weighting):
        check.one_of("weighting", weighting, tuple(WEIGHTING))
    weigh = weighting if isinstance(weighting, Weighting) else WEIGHTING[weighting]
    check.kind("optimizer", optimizer, optax.GradientTransformation, "an optax transformation, such as optax.sgd(1.0)")
    check.kind("aggregate", aggregate, (Aggregate, type(None)), "an Aggregate, such as server.mean() makes")
    check.require(rate is None or callable(rate), "rate", rate, "a function of the staleness")
    chained = chain(*transforms)
    stages = (optimizer, *(() if rate is None else (_RATED,)), *chained.steps)
    stepper = optax.chain(*stages) if len(stages) > 1 else optimizer
    transform = chained._replace(steps=())
    aggregate = mean() if aggregate is None else aggregate

    def init(params: Params, facts: Facts = Facts()) -> tuple[State, State]:
        oldest = () if rate is None else jnp.zeros((), jnp.result_type(float))
        inner = stepper.init(tree.wide(weights_of(params)))
        accumulated = () if facts.every_closes else begun(aggregate, params, facts.static)
        begins = transform.init(params, facts)
        return RuleState(params, begins, accumulated, inner, oldest, facts.static), weigh.memory()

    def receive(state: RuleState, memory: State, arrival: Arrival) -> tuple[RuleState, State, Info]:
        result = transformed(transform, state.transforms, state.params, arrival)
        arrival, (weight, row) = result.arrival, weigh.of(result, state.params, memory)
        share = jnp.where(result.accepted, weight, 0.0)
        anew = state.facts.every_closes
        before = begun(aggregate, state.params, state.facts) if anew else state.accumulated
        new = state._replace(
            transforms=tree.where(result.accepted, result.state, state.transforms),
            accumulated=aggregate.add(before, result.direction, share, arrival),
            oldest=() if rate is None else _oldest(state.oldest, arrival, result.accepted),
        )
        return new, tree.where(result.accepted, row, memory), result.info(share)

    def close(state: RuleState, memory: State) -> tuple[RuleState, State]:
        direction, weight, emptied = aggregate.close(state.accumulated)
        rated = {} if rate is None else {"rate": rate(state.oldest)}
        params, optimizer_state = _moved(stepper, state, direction, rated)
        new = state._replace(
            params=tree.where(weight > 0, params, state.params),
            accumulated=() if state.facts.every_closes else emptied,
            optimizer=tree.where(weight > 0, optimizer_state, state.optimizer),
            oldest=jax.tree.map(jnp.zeros_like, state.oldest),
        )
        return new, memory

    def dispatch(state: RuleState, memory: State, request: Request) -> tuple[Message, State]:
        return Message(state.params), memory

    sums = named and chained.sums and aggregate.sums
    return ServerAlgorithm(init, receive, dispatch, lambda state: state.params, close, sums)


def _oldest(so_far: Array, arrival: Arrival, accepted: Array) -> Array:
    """The largest staleness so far, this arrival included if it was accepted."""
    return jnp.where(accepted, jnp.maximum(so_far, arrival.staleness.astype(so_far.dtype)), so_far)


def _times_rate(
    change: Params, state: State, params: Params | None = None, *, rate: Array, **others: object
) -> tuple[Params, State]:
    return scaled(change, rate), state


_RATED = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), _times_rate)


def _moved(
    optimizer: optax.GradientTransformation, state: RuleState, direction: Params, rated: dict[str, Array]
) -> tuple[Params, State]:
    """The params after a server step along ``direction``, and the state of the optimiser; both are computed wide."""
    direction, params = tree.wide(direction), tree.wide(state.params)
    gradient = scaled(weights_of(direction), -1.0)
    weights, inner = tree.optimize(optimizer, gradient, state.optimizer, weights_of(params), **rated)
    moved = with_statistics(weights, jax.tree.map(jnp.add, params, direction))
    return tree.cast_like(moved, state.params), inner


# --- options that many rules share ------------------------------------------------------------


def guard_rails(
    *, clip: Traced | None = None, overstale_after: Traced | None = None, overstale: Traced | None = None
) -> Transform:
    """Limits on an arriving direction, applied before its staleness weight; none by default.

    Args:
      clip: scale the direction down to at most this Euclidean norm (:func:`clip_by_norm`).
      overstale_after: reject an upload of a larger staleness (:func:`scale_overstale`). The setting
        ``max_staleness`` of a run is different: there the server drops the upload before it counts.
      overstale: multiply such an upload by this factor in [0, 1] instead.
    """
    limits = []
    if clip is not None:
        check.positive("clip", clip)
        limits.append(clip_by_norm(clip))
    needs = "left out: it needs overstale_after"
    check.require(overstale_after is not None or overstale is None, "overstale", overstale, needs)
    if overstale_after is not None:
        limits.append(scale_overstale(overstale_after, 0.0 if overstale is None else overstale))
    return chain(*limits)


def discount(
    *,
    staleness: str = "polynomial",
    exponent: Traced | None = None,
    slope: Traced | None = None,
    threshold: Traced | None = None,
) -> Weight:
    """The staleness weight of a rule; an option that is ``None`` keeps the default of the weight.

    Args:
      staleness: ``constant``, ``hinge`` (options ``slope`` a = 10, ``threshold`` b = 4) or
        ``polynomial`` (option ``exponent`` = 0.5).
    """
    return staleness_weight(staleness, exponent=exponent, slope=slope, threshold=threshold)
