"""FLOCO's second stage: every client trains and uses a region of the simplex of its own.

The server keeps a signal of each client, its latest change of all vertices. When the stage begins it places the
clients in the simplex: principal components of their signals, projected on the simplex, at the scale that spreads the
clients most. From then on client i draws its points in a region around its centre ``beta_i``, and its own model is the
one at beta_i. ``floco.py`` has the simplex and both stages' training.

Source: Grinwald et al., "Federated learning with solution simplices" (2025); where the text is open, the authors' code
for Flower.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.base import check, tree
from fedjax_async.geometry.vectors import joined
from fedjax_async.server.rule import closed
from fedjax_async.server.running_statistics import weights_of
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

SCALES = np.linspace(1e-4, 1.0, 1000)  # of the projection, tried in turn
NEAREST = 1e-4  # smaller distances count as this one


class Region(NamedTuple):
    """What a message has besides the centroid: the simplex, and where in it its client trains."""

    offsets: Params  # of the vertices from the centroid
    centre: Array  # beta_i, float[V]
    share: Array  # float[], the size of the region over that of the simplex; 1: all of it


def within(region: Region, weights: Array) -> Array:
    """A point of the region, float[V], from one of the simplex: the simplex shrunk to ``share`` around the centre."""
    return region.centre + region.share * (weights - region.centre)


# --- where the clients are --------------------------------------------------------------------


def projected(points: Array, scale: Array) -> Array:
    """The nearest points to ``points`` [N, V] with entries >= 0 that sum to ``scale``, divided by ``scale``.

    Source: Duchi et al. (2008), Figure 1.
    """
    count = points.shape[1]
    # shifts change nothing; near 0, a small scale is not lost to rounding
    points = points - jnp.max(points, axis=1, keepdims=True)
    falling = -jnp.sort(-points, axis=1)
    excess = jnp.cumsum(falling, axis=1) - scale
    number = jnp.arange(1, count + 1).astype(points.dtype)[None]
    positive = jnp.maximum(jnp.sum((falling - excess / number > 0).astype(jnp.int32), axis=1, keepdims=True), 1)
    threshold = jnp.take_along_axis(excess, positive - 1, axis=1) / positive.astype(points.dtype)
    found = jnp.maximum(points - threshold, 0.0)
    return found / jnp.sum(found, axis=1, keepdims=True)


def energy(points: Array, seen: Array) -> Array:
    """The Riesz energy ``sum_{i<j} 1 / |p_i - p_j|^2`` of the seen points [N, V]; float[]. Low: far from each other."""
    apart = jnp.sum(jnp.square(points[:, None] - points[None]), axis=2)
    pairs = jnp.triu(seen[:, None] & seen[None], 1)
    return jnp.sum(jnp.where(pairs, 1.0 / jnp.maximum(apart, NEAREST**2), 0.0))


def placed(signals: Array, seen: Array, vertices: int) -> Array:
    """The centres beta [N, V] of the clients from their signals [N, F]; the centroid for clients not seen.

    The first V principal components of the signals are projected on the simplex, scaled by each of ``SCALES``; the
    scale with the lowest energy is taken. Components that are missing, with fewer clients or entries than vertices,
    are 0. The sign of a component is such that its largest entry in absolute value is positive.
    """
    weight = seen.astype(signals.dtype)[:, None]
    mean = jnp.sum(weight * signals, axis=0, keepdims=True) / jnp.maximum(jnp.sum(weight), 1.0)
    left, size, _ = jnp.linalg.svd(weight * (signals - mean), full_matrices=False)
    components = (left * size[None])[:, :vertices]
    largest = jnp.take_along_axis(components, jnp.argmax(jnp.abs(components), axis=0)[None], axis=0)
    components = components * jnp.where(largest < 0, -1.0, 1.0).astype(components.dtype)
    components = jnp.pad(components, ((0, 0), (0, vertices - components.shape[1])))
    scales = jnp.asarray(SCALES, components.dtype)
    energies = jax.lax.map(lambda scale: energy(projected(components, scale), seen), scales)
    best = projected(components, scales[jnp.argmin(energies)])
    return jnp.where(seen[:, None], best, 1.0 / vertices)


def sketched(vector: Array, size: int) -> Array:
    """``size`` random sums of the entries of a vector [L], with signs; the vector itself if L <= size.

    Entry k is added to sum ``k mod size`` with a fixed random sign. Scalar products are kept in expectation.
    """
    length = vector.shape[0]
    if length <= size:
        return vector
    signs = jax.random.rademacher(jax.random.key(0), (length,), vector.dtype)
    rows = -(-length // size)
    return jnp.sum(jnp.pad(signs * vector, (0, rows * size - length)).reshape(rows, size), axis=0)


# --- the server -------------------------------------------------------------------------------


class RegionState(NamedTuple):
    """Server state of :func:`in_regions`."""

    inner: State
    signals: Array  # of the clients' latest accepted uploads, float[N, F]
    seen: Array  # bool[N], whether there is one
    centres: Array  # beta, float[N, V]
    begun: Array  # bool[], whether the second stage has begun
    steps: Array  # int32[], server steps so far
    total: Array  # int32[], T, server steps of the run; 0: unknown


def in_regions(rule: ServerAlgorithm, *, vertices: int, start: float, radius: Traced, signal: int) -> ServerAlgorithm:
    """``rule`` of a simplex, whose clients train in regions after the share ``start`` of the run's server steps.

    ``rule`` finds the offsets of the message in ``arrival.extra``; messages of the new rule have a :class:`Region`.
    Outside a run, where the number of steps is unknown, the second stage never begins. Raises ``ValueError`` for
    invalid options.
    """
    check.in_range("regions", start, 0.0, 1.0)
    check.require(vertices > 1, "vertices", vertices, "at least 2 if regions < 1: one model has no regions")
    check.positive("radius", radius)
    check.whole("signal", signal)

    def init(params: Params, facts: Facts = Facts()) -> tuple[RegionState, State]:
        state, memory = rule.init(params, facts)
        message = jax.eval_shape(lambda: rule.dispatch(state, memory, Request())[0])
        length = vertices * sum(leaf.size for leaf in jax.tree.leaves(message.extra)) // max(vertices - 1, 1)
        count, real = facts.num_clients, jnp.result_type(float)
        length = min(length, signal)
        centres = jnp.full((count, vertices), 1.0 / vertices, real)
        before = (jnp.zeros((count, length), real), jnp.zeros(count, bool), centres, jnp.bool_(False), jnp.int32(0))
        row = jnp.zeros(())  # with a row, each client is sent a message of its own, see ``types.ServerAlgorithm``
        return RegionState(state, *before, jnp.asarray(facts.server_steps, jnp.int32)), (memory, row)

    def receive(state: RegionState, memory: State, arrival: Arrival) -> tuple[RegionState, State, Info]:
        inner, of_rule, info = rule.receive(state.inner, memory[0], arrival._replace(extra=arrival.extra.offsets))
        keeps = (info.weight > 0) & ~state.begun

        def kept() -> tuple[Array, Array]:
            offsets = arrival.upload.offsets
            weights = weights_of(arrival.upload.params)
            first = jax.tree.map(lambda c, o: (c - jnp.sum(o, axis=0))[None], weights, offsets)
            rest = jax.tree.map(lambda c, o: c[None] + o, weights, offsets)
            change = jnp.concatenate([joined(first), joined(rest)])
            new = -sketched(change, state.signals.shape[1])
            return state.signals.at[arrival.client].set(new), state.seen.at[arrival.client].set(True)

        signals, seen = jax.lax.cond(keeps, kept, lambda: (state.signals, state.seen))
        return state._replace(inner=inner, signals=signals, seen=seen), (of_rule, memory[1]), info

    def close(state: RegionState, memory: State) -> tuple[RegionState, State]:
        inner, of_rule = closed(rule, state.inner, memory[0])
        steps, real = state.steps + 1, jnp.result_type(float)
        late = steps.astype(real) >= tree.share_of(start, state.total)
        now = ~state.begun & late & (state.total > 0)
        centres = jax.lax.cond(
            now, lambda: placed(state.signals, state.seen, vertices).astype(real), lambda: state.centres
        )
        new = state._replace(inner=inner, centres=centres, begun=state.begun | now, steps=steps)
        return new, (of_rule, memory[1])

    def dispatch(state: RegionState, memory: State, request: Request) -> tuple[Message, State]:
        message, of_rule = rule.dispatch(state.inner, memory[0], request)
        real = jnp.result_type(float)
        share = jnp.where(state.begun, jnp.minimum(jnp.asarray(radius, real) / 2.0, 1.0), 1.0)
        region = Region(message.extra, state.centres[request.client], share)
        return message._replace(extra=region), (of_rule, memory[1])

    return ServerAlgorithm(init, receive, dispatch, lambda state: rule.params(state.inner), close)
