"""Small pieces from which server rules are chained, in the manner of optax.

A transform sees one arriving direction (at first: the upload) and may change it:
``update(direction, state, params, arrival) -> (direction, state)``. ``weight(arrival)`` is the
scalar by which it multiplies (1 if it does something else): the effective weights of a run are
recorded from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async.server.staleness import Weight
from fedjax_async.types import Array, Arrival, Params, State


class Transform(NamedTuple):
    """``init(params) -> state``, ``update(direction, state, params, arrival)``, ``weight(arrival)``."""

    init: Callable[[Params], State]
    update: Callable[[Params, State, Params, Arrival], tuple[Params, State]]
    weight: Callable[[Arrival], Array]


def unweighted(arrival: Arrival) -> Array:
    """The weight of a transform that does not scale: 1."""
    return jnp.ones_like(arrival.weight)


def stateless(
    function: Callable[[Params, Params, Arrival], Params], weight: Callable[[Arrival], Array] = unweighted
) -> Transform:
    """A transform without state from ``function(direction, params, arrival) -> direction``."""
    return Transform(lambda params: (), lambda d, state, params, arrival: (function(d, params, arrival), state), weight)


def scale_by(weight: Callable[[Arrival], Array]) -> Transform:
    """Multiply the direction by the scalar ``weight(arrival)``."""
    return stateless(lambda d, params, arrival: scaled(d, weight(arrival)), weight)


def chain(*transforms: Transform) -> Transform:
    """One transform after the other; its state is the tuple of theirs."""

    def init(params: Params) -> State:
        return tuple(t.init(params) for t in transforms)

    def update(direction: Params, state: State, params: Params, arrival: Arrival) -> tuple[Params, State]:
        states = []
        for transform, before in zip(transforms, state, strict=True):
            direction, after = transform.update(direction, before, params, arrival)
            states.append(after)
        return direction, tuple(states)

    def weight(arrival: Arrival) -> Array:
        product = unweighted(arrival)
        for transform in transforms:
            product = product * transform.weight(arrival).astype(product.dtype)
        return product

    return Transform(init, update, weight)


def scaled(tree: Params, factor: Array) -> Params:
    """Every leaf times a scalar, in the leaf's own dtype."""
    return jax.tree.map(lambda leaf: leaf * jnp.asarray(factor, leaf.dtype), tree)


def towards_client() -> Transform:
    """Replace the delta by ``x_i - x``, the way from the server's params to the client's trained ones."""

    def function(delta: Params, params: Params, arrival: Arrival) -> Params:
        return jax.tree.map(lambda w0, d, x: w0 + d - x, arrival.start, delta, params)

    return stateless(function)


def scale_by_staleness(weight: Weight, scale: Any = 1.0) -> Transform:
    """Multiply the direction by ``scale * s(tau)``."""
    return scale_by(lambda arrival: scale * weight(arrival.staleness))
