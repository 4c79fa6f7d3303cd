"""FLOCO: clients train a simplex of models, the server averages its vertices and evaluates its centroid.

Source: Grinwald et al., "Federated learning with solution simplices" (2025); AsyncManifold (2025), section 5.1.1. The
second stage, in which every client trains a region of its own, is in ``regions.py``. A simplex of V vertices is its
centroid c and the offsets of the vertices ``1 .. V-1`` from it; the offset of vertex 0 is minus their sum. So the point
with weights lambda is ``c + sum_v (lambda_v - lambda_0) o_v``, a message has the size of V models, and means of
vertices are means of centroids and offsets.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_async.base import check, tree
from fedjax_async.base.factories import takes
from fedjax_async.geometry import sample_weights, simplex_point
from fedjax_async.local.batches import seed_of
from fedjax_async.local.job import gradients_a_step
from fedjax_async.local.private import keeping
from fedjax_async.local.training import (
    Scale,
    batch_gradient,
    decay_factor,
    proximal_term,
    replaced,
    shared_part,
    without_statistics,
)
from fedjax_async.server.regions import in_regions, within
from fedjax_async.server.rule import closed, guard_rails, rule
from fedjax_async.server.running_statistics import weights_of, with_statistics
from fedjax_async.server.transforms import Transform
from fedjax_async.types import (
    Array,
    Arrival,
    ClientAlgorithm,
    ClientData,
    Facts,
    Info,
    Key,
    Message,
    Model,
    Params,
    Request,
    ServerAlgorithm,
    State,
    Traced,
)

_POINT = 2**31 + 3  # folded into the job's key: the points of the simplex


class Simplex(NamedTuple):
    """The upload of a client: the change of a simplex."""

    params: Params  # of the centroid
    offsets: Params  # of the vertices 1 .. V-1 from the centroid, of the weights alone; leaves [V-1, ...]


# --- the server -------------------------------------------------------------------------------


@takes(guards=guard_rails)
def floco(
    *,
    server_lr: Traced = 1.0,
    vertices: int = 3,
    spread: Traced = 1.0,
    weighting: str = "examples",
    regions: float = 1.0,
    radius: Traced | None = None,
    signal: int | None = None,
    guards: Transform,
) -> ServerAlgorithm:
    """Mean of the clients' simplices; the centroid is evaluated (Grinwald et al. 2025).

    ``Phi_v <- Phi_v + eta sum_i p_i (Phi_iv - Phi_v)`` for every vertex v. The clients run :func:`floco_client`. With
    one vertex it is FedAvg. ``clip`` bounds the change of centroid and offsets together.

    With ``regions < 1`` the second stage follows. The server places all clients in the simplex by the principal
    components of their latest changes, so that clients with similar changes are near each other; each then trains at
    points of its region, and its own model is the one at its centre. Measure it as a personal model
    (``per_client=True``); the centroid stays the model of the server.

    Args:
      server_lr: ``eta > 0``.
      vertices: V >= 1.
      spread: how far apart the vertices start, in [0, 1]: at ``x + spread (pi_v(x) - mean_u pi_u(x))``, where x is the
        model's initialisation and ``pi_v`` shuffles the entries of every tensor, as a substitute for another
        initialisation (``pi_0`` changes nothing). So the centroid starts at x, as in all methods. With 0 all vertices
        start at x; use it for pretrained models.
      weighting: ``p_i`` by ``examples`` or ``uniform``.
      regions: the share of the run's server steps before the second stage, in [0, 1]; 1: never. The authors have 0.5.
      radius: rho > 0 of a region: the simplex shrunk by ``rho / 2`` around the client's centre, which lies within rho
        of it in the 1-norm; the whole simplex from rho = 2 on. Only with ``regions < 1``; 0.3 by default, as the
        authors have it.
      signal: the most numbers that the server keeps of a client's change, >= 1; more are summed with random signs. Only
        with ``regions < 1``; 4096 by default.

    Deviations in the second stage: the server uses the latest change of each client so far, of all weights, where the
    authors' code asks all clients in one round and takes the last layer's; clients without an accepted upload stay at
    the centroid. Regions lie within the simplex; the authors' code draws from the ball around the centre, which leaves
    it.
    """
    check.positive("server_lr", server_lr)
    check.whole("vertices", vertices)
    check.in_range("spread", spread, 0.0, 1.0)
    inner = rule(guards, optimizer=optax.sgd(server_lr), weighting=weighting)

    def init(params: Params, facts: Facts = Facts()) -> tuple[State, State]:
        return inner.init(_joined(params, spread_out(weights_of(params), vertices, spread)), facts)

    def receive(state: State, memory: State, arrival: Arrival) -> tuple[State, State, Info]:
        change: Simplex = arrival.upload
        start = _joined(arrival.start, arrival.extra)
        return inner.receive(state, memory, arrival._replace(upload=_joined(*change), start=start))

    def close(state: State, memory: State) -> tuple[State, State]:
        return closed(inner, state, memory)

    def dispatch(state: State, memory: State, request: Request) -> tuple[Message, State]:
        message, memory = inner.dispatch(state, memory, request)
        return message._replace(params=_centre(message.params), extra=message.params["offsets"]), memory

    plain = ServerAlgorithm(init, receive, dispatch, lambda state: _centre(inner.params(state)), close)
    check.in_range("regions", regions, 0.0, 1.0)
    if regions == 1:
        for name, value in (("radius", radius), ("signal", signal)):
            check.require(value is None, name, value, "left out unless regions < 1")
        return plain
    radius, signal = 0.3 if radius is None else radius, 4096 if signal is None else signal
    return in_regions(plain, vertices=vertices, start=regions, radius=radius, signal=signal)


def _joined(params: Params, offsets: Params) -> Params:
    """Centroid and offsets as one pytree, with running statistics where rules look for them."""
    return with_statistics({"weights": weights_of(params), "offsets": offsets}, params)


def _centre(joined: Params) -> Params:
    return with_statistics(joined["weights"], joined)


def spread_out(weights: Params, vertices: int, spread: Traced) -> Params:
    """Offsets [V-1, ...] of the first simplex from its centroid ``weights``."""
    chance = np.random.default_rng(0)

    def offsets(leaf: Array) -> Array:
        orders = [np.arange(leaf.size), *(chance.permutation(leaf.size) for _ in range(vertices - 1))]
        shuffled = jnp.stack([leaf.reshape(-1)[order].reshape(leaf.shape) for order in orders])
        return jnp.asarray(spread, leaf.dtype) * (shuffled - jnp.mean(shuffled, axis=0, keepdims=True))[1:]

    return jax.tree.map(offsets, weights)


# --- the client -------------------------------------------------------------------------------


class Work(NamedTuple):
    """Local variables of one job."""

    vertices: Params  # of the trained weights, leaves [V, ...]
    params: Params  # of the last point, for its running statistics
    optimizer: State
    key: Key
    seed: Array  # uint32[2], orders the minibatches


def floco_client(
    model: Model,
    *,
    optimizer: optax.GradientTransformation,
    batch_size: int = 32,
    proximal: Traced = 0.0,
    scale: Scale = None,
    regions: float = 1.0,
) -> ClientAlgorithm:
    """Train all vertices of a simplex; uploads the change of the simplex, a :class:`Simplex`.

    For each minibatch a point of the simplex is drawn uniformly, ``lambda ~ Dirichlet(1, ..., 1)``, and vertex v steps
    along ``lambda_v g``, with g the gradient at that point. The proximal term pulls each vertex to where it started.
    Options as in ``local_training``. With one vertex it is ``local_training``. Private leaves are the same in all
    vertices; they are trained with g itself, and stay with their client. With ``regions < 1``, as the server has it,
    points are drawn in the region of the message, and the client's own model is that at the region's centre.
    """
    check.whole("batch_size", batch_size)
    check.in_range("regions", regions, 0.0, 1.0)
    has_regions = regions < 1
    pulled = proximal_term(proximal, None)
    optimizer, each = optax.with_extra_args_support(optimizer), gradients_a_step(optimizer)

    def sent(message: Message) -> Params:
        return message.extra.offsets if has_regions else message.extra

    def corners(message: Message) -> Params:
        offsets = jax.vmap(lambda row: shared_part(model, row))(without_statistics(model, sent(message)))
        return jax.tree.map(_corners, without_statistics(model, message.params), offsets)

    def begin(key: Key, message: Message, client_state: State, data: ClientData) -> Work:
        del client_state, data
        vertices = corners(message)
        return Work(vertices, message.params, optimizer.init(vertices), key, seed_of(key))

    def step(work: Work, k: Array, message: Message, data: ClientData) -> Work:
        count = jax.tree.leaves(work.vertices)[0].shape[0]
        weights = sample_weights(jax.random.fold_in(jax.random.fold_in(work.key, _POINT), k), count)
        if has_regions:
            weights = within(message.extra, weights)
        gradient_at = batch_gradient(model, work.params, data, (work.seed, work.key, k), batch_size)
        start = corners(message)

        def gradients(vertices: Params) -> tuple[Params, Params, Params]:
            point = simplex_point(vertices, weights)
            gradient, moved = gradient_at(point)
            return pulled(_of_vertices(model, gradient, weights), vertices, start), point, moved

        gradient, point, moved = gradients(work.vertices)
        factor = decay_factor(scale, message, k, jnp.asarray(message.local_steps))
        vertices, state = tree.optimize(
            optimizer,
            gradient,
            work.optimizer,
            work.vertices,
            factor,
            grad_fn=lambda vertices, _: gradients(vertices)[0],
        )
        return work._replace(vertices=vertices, params=replaced(model, point, moved), optimizer=state)

    def finish(work: Work, message: Message, client_state: State) -> tuple[Simplex, State]:
        now = _centre_and_offsets(model, work)
        return Simplex(*jax.tree.map(jnp.subtract, now, (message.params, sent(message)))), client_state

    def own(message: Message, client_state: State) -> Params:
        del client_state
        return replaced(model, simplex_point(corners(message), message.extra.centre), message.params)

    plain = ClientAlgorithm(
        lambda params: (),
        begin,
        step,
        finish,
        own=own if has_regions else None,
        gradients=lambda steps, examples: each * steps,
    )
    return plain if model.private is None else keeping(plain, model.private, part="params")


def _of_vertices(model: Model, gradient: Params, weights: Array) -> Params:
    """The gradient of each vertex [V, ...] from that at the point with these ``weights`` [V] of the vertices."""
    each = jax.tree.map(lambda g: jnp.multiply.outer(weights.astype(g.dtype), g), shared_part(model, gradient))
    if model.private is None:
        return each
    # private leaves are the same in all vertices, so every vertex takes their whole gradient
    own = jax.tree.map(jnp.subtract, gradient, shared_part(model, gradient))
    return jax.tree.map(lambda e, g: e + g[None], each, own)


def _centre_and_offsets(model: Model, work: Work) -> tuple[Params, Params]:
    """The params at the centroid of the vertices, and the offsets of all vertices but the first from it."""
    centre = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), work.vertices)
    offsets = jax.tree.map(lambda leaf, c: leaf[1:] - c[None], work.vertices, centre)
    return replaced(model, centre, work.params), offsets if model.train is None else {"params": offsets}


def _corners(centre: Array, offsets: Array) -> Array:
    """The vertices [V, ...] from the centroid and the offsets of all but the first."""
    return centre[None] + jnp.concatenate([-jnp.sum(offsets, axis=0, keepdims=True), offsets])
