"""Transforms: small functions of one arriving direction, from which rules are chained as in optax.

A transform is ``update(direction, state, params, arrival) -> (direction, state, weight)``. The first direction of a
chain is the upload. ``weight`` is the scalar by which the transform multiplied the direction, or 1 if it did
something else. The run records the product of these weights. An arrival of weight 0 counts as rejected, but still fills
its buffer and closes its step; the setting ``max_staleness`` drops uploads before they count.

The file ends with the staleness weights ``s(tau)``: how much an update that is tau server steps old still counts.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_async.base import check, factories, registry, tree
from fedjax_async.server.running_statistics import rebased, weights_in, weights_of, with_statistics
from fedjax_async.types import Array, Arrival, Facts, Info, Number, Params, State, Traced

Weight = Callable[[Array], Array]  # s(tau): int32[] -> float[]


class Transform(NamedTuple):
    """``init(params) -> state`` and ``update(direction, state, params, arrival) -> (direction, state, weight)``.

    ``init(params, facts)``, if it needs facts of the run, as a rule's. ``first``: it needs the
    upload as it came, so no transform may precede it. ``steps``: optax transformations of the server's steps, which
    :func:`server.rule` applies after its optimizer. ``columns(state) -> {name: scalar}``, optional: columns that a run
    records after each arrival. ``sums``: whether the new direction is the weight times the old one plus a term
    that does not depend on the old one, and the weight is never 0 and does not depend on any upload: a sum of several
    uploads, some of weight 0, would be one of fewer.
    """

    init: Callable[..., State]
    update: Callable[[Params, State, Params, Arrival], tuple[Params, State, Array]]
    first: bool = False
    steps: tuple[optax.GradientTransformation, ...] = ()
    columns: Callable[[State], dict[str, Array]] | None = None
    sums: bool = False


class Transformed(NamedTuple):
    """The result of :func:`transformed`."""

    arrival: Arrival  # as the transform saw it
    direction: Params  # the transformed upload
    state: State  # of the transform, after this arrival
    factor: Array  # float[], the weight of the transform
    accepted: Array  # bool[], whether the arrival's weight and the factor are both nonzero
    columns: dict[str, Array]  # of the transform, from the state that the rule keeps

    def info(self, share: Array) -> Info:
        """The record of an arrival to which the rule gives the weight ``share``; 0 unless it is accepted."""
        return Info(share * self.factor.astype(share.dtype), self.columns)


def transformed(transform: Transform, state: State, params: Params, arrival: Arrival) -> Transformed:
    """Apply ``transform`` to one arrival: the first thing that every rule does.

    The arrival's weight may be an integer, a number of examples; the transform sees it as a float. It sees running
    statistics as changes from the server's, see :func:`rebased`. The rule keeps the new state only if ``accepted``.

    Args:
      state: of the transform, before this arrival.
      params: of the server, shaped like the upload.

    Raises ``ValueError`` if ``transform`` has ``steps``.
    """
    require_no_steps(transform, "a rule that is not made by server.rule")
    weight = jnp.asarray(arrival.weight, jnp.result_type(float))
    arrival = rebased(arrival._replace(weight=weight), params)
    direction, after, factor = transform.update(arrival.upload, state, params, arrival)
    accepted = jnp.logical_and(weight > 0, factor != 0)
    columns = tree.where(accepted, columns_of(transform, after), columns_of(transform, state))
    return Transformed(arrival, direction, after, factor, accepted, columns)


# --- how to make a transform ------------------------------------------------------------------


def stateless(function: Callable[[Params, Params, Arrival], Params]) -> Transform:
    """A transform without state, of weight 1: ``function(direction, params, arrival) -> direction``."""

    def update(direction: Params, state: State, params: Params, arrival: Arrival) -> tuple[Params, State, Array]:
        return function(direction, params, arrival), state, jnp.ones_like(arrival.weight)

    return Transform(lambda params: (), update)


def scale_by(weight: Callable[[Arrival], Array]) -> Transform:
    """Multiply the direction by the scalar ``weight(arrival)``, its running statistics by 1 where that is larger."""
    return _scale(lambda direction, arrival: weight(arrival))


def _scale(weight: Callable[[Params, Arrival], Array]) -> Transform:
    def update(direction: Params, state: State, params: Params, arrival: Arrival) -> tuple[Params, State, Array]:
        del params
        factor = weight(direction, arrival)
        return weighted(direction, factor), state, factor

    return Transform(lambda params: (), update)


def chain(*transforms: Transform) -> Transform:
    """Apply the transforms one after the other. The state is the tuple of their states, the weight their product.

    Raises ``ValueError`` if an argument is no transform, or if a transform with ``first`` is not the first one.
    """

    for i, transform in enumerate(transforms):
        check.kind(f"transforms[{i}]", transform, Transform, "a Transform, such as server.clip_by_norm(1.0)")
        if i > 0 and transform.first:
            why = "the rule changes the delta before, and a delay correction needs it as the client sent it"
            raise ValueError(f"correction: must be left out: {why}")

    def init(params: Params, facts: Facts = Facts()) -> State:
        return tuple(begun(t, params, facts) for t in transforms)

    def update(direction: Params, state: State, params: Params, arrival: Arrival) -> tuple[Params, State, Array]:
        states, product = [], jnp.ones_like(arrival.weight)
        for transform, before in zip(transforms, state, strict=True):
            direction, after, weight = transform.update(direction, before, params, arrival)
            states.append(after)
            product = product * weight.astype(product.dtype)
        return direction, tuple(states), product

    first = bool(transforms) and transforms[0].first
    steps = tuple(step for t in transforms for step in t.steps)

    def columns(state: State) -> dict[str, Array]:
        return {name: c for t, own in zip(transforms, state, strict=True) for name, c in columns_of(t, own).items()}

    sums, recorded = all(t.sums for t in transforms), any(t.columns is not None for t in transforms)
    return Transform(init, update, first, steps, columns if recorded else None, sums)


def columns_of(transform: Transform, state: State) -> dict[str, Array]:
    """The columns that a run records of the transform's state; none if the transform has none."""
    return {} if transform.columns is None else transform.columns(state)


def begun(part: Any, params: Params, facts: Facts) -> Any:
    """What ``part`` begins a run with: ``part.init(params, facts)``, or ``part.init(params)`` if it takes no facts.

    ``part``: a rule, a transform, an aggregate or a correction.
    """
    return part.init(params, facts) if factories.asks_for(part.init, "facts") else part.init(params)


def require_no_steps(transform: Transform, rule: str) -> None:
    """Raise ``ValueError`` if ``transform`` has ``steps``: the rule named ``rule`` cannot apply them."""
    given = f"{len(transform.steps)} of them (momentum of steps, cyclic, geodesic)"
    check.require(not transform.steps, "parts of the step", given, f"left out: {rule} takes its step by itself")


def require_no_correction(transform: Transform, rule: str) -> None:
    """Raise ``ValueError`` for a delay correction: the rule named ``rule`` steps along models, not along changes."""
    if transform.first:
        raise ValueError(f"correction: must be left out: {rule} takes the client's start plus its delta as its model")


def scaled(params: Params, factor: Number) -> Params:
    """Every leaf times a scalar, in the dtype of the leaf."""
    return jax.tree.map(lambda leaf: leaf * jnp.asarray(factor, leaf.dtype), params)


def weighted(direction: Params, factor: Array) -> Params:
    """``direction`` times a scalar; running statistics times 1 at most, or variances might become negative."""
    least = jnp.minimum(factor, jnp.ones_like(factor))
    return with_statistics(scaled(weights_of(direction), factor), scaled(direction, least))


def stepped(params: Params, direction: Params, rate: Number) -> Params:
    """``params + rate * direction``; running statistics move by the direction itself."""
    change = with_statistics(scaled(weights_of(direction), rate), direction)
    return jax.tree.map(jnp.add, params, tree.cast_like(change, params))


# --- the transforms ---------------------------------------------------------------------------


def towards_client() -> Transform:
    """Replace the delta by ``x_i - x``: from the server's params to the client's trained params."""

    def function(delta: Params, params: Params, arrival: Arrival) -> Params:
        return jax.tree.map(lambda w0, d, x: w0 + d - x, arrival.start, delta, params)

    return stateless(function)._replace(sums=True)


def scale_by_staleness(weight: Weight, scale: Number = 1.0) -> Transform:
    """Multiply the direction by ``scale * s(tau)``."""
    check.require(callable(weight), "weight", weight, "a function of the staleness, such as staleness_weight() makes")

    def factor(direction: Params, arrival: Arrival) -> Array:
        s = jnp.asarray(weight(arrival.staleness))
        s = s if jnp.issubdtype(s.dtype, jnp.floating) else s.astype(arrival.weight.dtype)
        return jnp.asarray(scale, s.dtype) * s

    return _scale(factor)._replace(sums=True)


def clip_by_norm(limit: Number) -> Transform:
    """Scale the direction down to a Euclidean norm (over all weights) of at most ``limit`` > 0.

    ``d <- d min(1, limit / ||d||)``; this factor is the recorded weight. Exact up to rounding in the dtype of params.
    Source: norm bounding of Sun et al., "Can you really backdoor federated learning?" (2019).
    """
    check.positive("limit", limit)

    def factor(direction: Params, arrival: Arrival) -> Array:
        norm = tree.norm(weights_in(direction))
        bound = jnp.asarray(limit, norm.dtype)
        return jnp.where(norm > bound, bound / norm, jnp.ones_like(norm))

    return _scale(factor)


def scale_overstale(after: Traced, factor: Traced = 0.0) -> Transform:
    """Multiply the direction by ``factor`` in [0, 1] if the staleness is above ``after`` >= 0; 0 rejects the arrival.

    The clock does not know what a rule rejects. So a rejected arrival still counts towards the size of a buffer, and
    a server step changes nothing if all its arrivals are rejected. The setting ``max_staleness`` of a run is
    different: it drops uploads before they count.
    """
    check.non_negative("overstale_after", after)
    check.in_range("overstale", factor, 0.0, 1.0)

    def weight(arrival: Arrival) -> Array:
        real = arrival.weight.dtype
        over = arrival.staleness.astype(real) > jnp.asarray(after, real)
        return jnp.where(over, jnp.asarray(factor, real), jnp.ones((), real))

    return scale_by(weight)._replace(sums=not (isinstance(factor, numbers.Real) and factor == 0))


# --- staleness weights ------------------------------------------------------------------------

# Source: Xie, Koyejo, Gupta, "Asynchronous federated optimization" (2019), section 5.2. The polynomial with exponent
# 1/2 is also FedBuff's (Nguyen et al. 2022, section 3).


def constant() -> Weight:
    """``s = 1``."""
    return lambda tau: jnp.ones_like(tau, dtype=jnp.result_type(float))


def hinge(*, slope: Traced = 10.0, threshold: Traced = 4.0) -> Weight:
    """``s = 1`` up to ``threshold`` b, then ``1 / (slope (tau - b) + 1)``."""
    check.positive("slope", slope)
    check.non_negative("threshold", threshold)

    def weight(tau: Array) -> Array:
        real = jnp.result_type(float)
        late = jnp.maximum(tau.astype(real) - jnp.asarray(threshold, real), 0.0)
        return 1.0 / (jnp.asarray(slope, real) * late + 1.0)

    return weight


def polynomial(*, exponent: Traced = 0.5) -> Weight:
    """``s = (1 + tau)^(-exponent)``."""
    check.non_negative("exponent", exponent)

    def weight(tau: Array) -> Array:
        real = jnp.result_type(float)
        return (1.0 + tau.astype(real)) ** -jnp.asarray(exponent, real)

    return weight


STALENESS: dict[str, Callable[..., Weight]] = {"constant": constant, "hinge": hinge, "polynomial": polynomial}


def staleness_weight(name: str, **options: object) -> Weight:
    """The staleness weight called ``name``. An option that is ``None`` keeps the default of the weight.

    Raises ``ValueError`` for an unknown name, and for an option that the weight does not have.
    """
    given = {k: v for k, v in options.items() if v is not None}
    factory = registry.find("staleness", STALENESS, name)
    known = factories.options_of(factory)
    for key, value in given.items():
        check.require(key in known, key, value, f"left out: staleness weight {name!r} does not take it")
    return factory(**given)
