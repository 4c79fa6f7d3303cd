"""Small pieces from which server rules are chained, in the manner of optax.

A transform sees one arriving direction (at first: the upload) and may change it:
``update(direction, state, params, arrival) -> (direction, state, weight)``, where ``weight`` is the
scalar by which it multiplied (1 if it did something else): the effective weights of a run are
recorded from it, and an arrival whose weight is 0 counts as rejected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async import check, tree
from fedjax_async.server.running_statistics import rebased, weights_in
from fedjax_async.server.staleness import Weight
from fedjax_async.types import Array, Arrival, Params, State, Traced


class Transform(NamedTuple):
    """``init(params) -> state`` and ``update(direction, state, params, arrival) -> (direction, state, weight)``."""

    init: Callable[[Params], State]
    update: Callable[[Params, State, Params, Arrival], tuple[Params, State, Array]]


class Taken(NamedTuple):
    """What a transform makes of an arrival."""

    arrival: Arrival  # as the transform saw it
    direction: Params  # what is left of the upload, shaped like it
    state: State  # the transform's, after this arrival
    factor: Array  # float[], the transform's weight
    accepted: Array  # bool[], whether neither weight is 0


def take(transform: Transform, state: State, params: Params, arrival: Arrival) -> Taken:
    """Pass one arrival through ``transform``, as every rule does first.

    The transform sees a float weight (by hand, numbers of examples come as integers, while weights of transforms are
    fractions) and running statistics counted from the server's, see :func:`rebased`. The rule decides, by
    ``accepted``, whether the new state is kept.

    Args:
      state: the transform's, before this arrival.
      params: the server's, shaped like the upload.
    """
    weight = jnp.asarray(arrival.weight, jnp.result_type(float))
    arrival = rebased(arrival._replace(weight=weight), params)
    direction, after, factor = transform.update(arrival.upload, state, params, arrival)
    return Taken(arrival, direction, after, factor, jnp.logical_and(weight > 0, factor != 0))


def stateless(function: Callable[[Params, Params, Arrival], Params]) -> Transform:
    """A transform without state or weight from ``function(direction, params, arrival) -> direction``."""

    def update(direction: Params, state: State, params: Params, arrival: Arrival) -> tuple[Params, State, Array]:
        return function(direction, params, arrival), state, jnp.ones_like(arrival.weight)

    return Transform(lambda params: (), update)


def scale_by(weight: Callable[[Arrival], Array]) -> Transform:
    """Multiply the direction by the scalar ``weight(arrival)``."""
    return _scale(lambda direction, arrival: weight(arrival))


def _scale(weight: Callable[[Params, Arrival], Array]) -> Transform:
    def update(direction: Params, state: State, params: Params, arrival: Arrival) -> tuple[Params, State, Array]:
        del params
        factor = weight(direction, arrival)
        return scaled(direction, factor), state, factor

    return Transform(lambda params: (), update)


def chain(*transforms: Transform) -> Transform:
    """One transform after the other; its state is the tuple of theirs, its weight the product."""

    def init(params: Params) -> State:
        return tuple(t.init(params) for t in transforms)

    def update(direction: Params, state: State, params: Params, arrival: Arrival) -> tuple[Params, State, Array]:
        states, product = [], jnp.ones_like(arrival.weight)
        for transform, before in zip(transforms, state, strict=True):
            direction, after, weight = transform.update(direction, before, params, arrival)
            states.append(after)
            product = product * weight.astype(product.dtype)
        return direction, tuple(states), product

    return Transform(init, update)


def scaled(tree: Params, factor: Any) -> Params:
    """Every leaf times a scalar, in the leaf's own dtype."""
    return jax.tree.map(lambda leaf: leaf * jnp.asarray(factor, leaf.dtype), tree)


def towards_client() -> Transform:
    """Replace the delta by ``x_i - x``, the way from the server's params to the client's trained ones."""

    def function(delta: Params, params: Params, arrival: Arrival) -> Params:
        return jax.tree.map(lambda w0, d, x: w0 + d - x, arrival.start, delta, params)

    return stateless(function)


def scale_by_staleness(weight: Weight, scale: Any = 1.0) -> Transform:
    """Multiply the direction by ``scale * s(tau)``."""

    def factor(arrival: Arrival) -> Array:
        s = weight(arrival.staleness)
        return jnp.asarray(scale, s.dtype) * s

    return scale_by(factor)


def clip_by_norm(limit: Any) -> Transform:
    """Scale the direction down to a Euclidean norm (over all weights) of at most ``limit`` > 0.

    ``d <- d min(1, limit / ||d||)``, which is also the recorded weight: the norm bounding of Sun et al.,
    "Can you really backdoor federated learning?" (2019). Exact up to rounding in the dtype of params.
    """
    check.positive("limit", limit)

    def factor(direction: Params, arrival: Arrival) -> Array:
        norm = tree.norm(weights_in(direction))
        bound = jnp.asarray(limit, norm.dtype)
        return jnp.where(norm > bound, bound / norm, jnp.ones_like(norm))

    return _scale(factor)


def scale_overstale(after: Traced, factor: Traced = 0.0) -> Transform:
    """Multiply arrivals of a staleness above ``after`` >= 0 by ``factor`` in [0, 1]; 0 rejects them.

    The clock does not know what a rule rejects: such an arrival still fills its place in a buffer, and a step of such
    arrivals closes without changing anything. The run's setting ``max_staleness`` drops uploads before they count.
    """
    check.non_negative("overstale_after", after)
    check.in_range("overstale", factor, 0.0, 1.0)

    def weight(arrival: Arrival) -> Array:
        real = arrival.weight.dtype
        over = arrival.staleness.astype(real) > jnp.asarray(after, real)
        return jnp.where(over, jnp.asarray(factor, real), jnp.ones((), real))

    return scale_by(weight)
