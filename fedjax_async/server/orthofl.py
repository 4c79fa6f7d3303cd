"""OrthoFL: clients keep weights of their own, and take over what is orthogonal to their change; with its ablations."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_async import check, registry, tree
from fedjax_async.geometry import GROUPINGS, project_out, project_out_span
from fedjax_async.registry import takes
from fedjax_async.server.options import discount, guard_rails
from fedjax_async.server.rule import closed, known, rule
from fedjax_async.server.running_statistics import on_weights
from fedjax_async.server.staleness import Weight
from fedjax_async.server.transforms import Transform, scale_by_staleness, take, towards_client
from fedjax_async.types import Array, Arrival, Facts, Info, Message, Params, Request, ServerAlgorithm, State, Traced

# ``combine(change, now, before)``: how a client moves from its start, given its own change and the others', which
# is the way from ``before`` to ``now``.
Combine = Callable[[Params, Params, Params], Params]


class Sent(NamedTuple):
    """The server's row about one client."""

    weights: Params  # what it is sent next: its own weights, calibrated
    seen: Params  # the global model right after its last upload


class Averaged(NamedTuple):
    """State of :func:`by_average`."""

    average: State
    accepted: Array  # bool[], whether the rule counted the last arrival


class Shared(NamedTuple):
    """State of :func:`by_last`."""

    average: State
    weights: Params  # what was sent last, to whichever client


def marker() -> Array:
    """A row that says nothing, but that messages change with every arrival, not only when a step closes."""
    return jnp.zeros((), jnp.int32)


def plus(one: Params, other: Params) -> Params:
    """Leafwise sum."""
    return jax.tree.map(jnp.add, one, other)


def handed_on(last: Params, start: Params, change: Params, combine: Combine) -> Params:
    """``start + combine(change, last, start)``."""
    return plus(start, combine(change, last, start))


def by_average(average: ServerAlgorithm, combine: Combine) -> ServerAlgorithm:
    """``average``, a rule without memory, whose clients start from calibrated weights of their own.

    A client that arrives with ``start + Delta`` is next sent ``start + combine(Delta, W, W_seen)``: ``W`` is
    the global model before this arrival is mixed in, ``W_seen`` the one right after its arrival before. A
    client whose upload the rule rejects is sent what it was sent before.
    """

    def init(params: Params) -> tuple[Averaged, Sent]:
        return Averaged(average.init(params)[0], jnp.bool_(False)), Sent(params, params)

    def receive(state: Averaged, memory: Sent, arrival: Arrival) -> tuple[Averaged, Sent, Info]:
        now = average.params(state.average)
        weights = plus(arrival.start, combine(arrival.upload, now, memory.seen))
        after, _, info = average.receive(state.average, (), arrival)
        accepted = info.weight > 0
        return Averaged(after, accepted), tree.where(accepted, Sent(weights, now), memory), info

    def close(state: Averaged, memory: Sent) -> tuple[Averaged, Sent]:
        after, seen = seen_after(average, state.average, state.accepted, memory.seen)
        return state._replace(average=after), memory._replace(seen=seen)

    def dispatch(state: Averaged, memory: Sent, request: Request) -> tuple[Message, Sent]:
        return Message(memory.weights), memory

    def given(facts: Facts) -> ServerAlgorithm:
        return by_average(known(average, facts), combine)

    return ServerAlgorithm(init, receive, dispatch, lambda state: average.params(state.average), close, given)


def seen_after(average: ServerAlgorithm, state: State, accepted: Array, seen: Params) -> tuple[State, Params]:
    """Close a step of ``average``: its state, and what the client whose arrival closed it has now seen."""
    after, _ = closed(average, state, ())
    return after, tree.where(accepted, average.params(after), seen)


def by_last(average: ServerAlgorithm, combine: Combine) -> ServerAlgorithm:
    """Like :func:`by_average`, but the shift is counted from the weights ``S`` that were calibrated last, for anyone.

    ``S <- start + combine(Delta, S, start)``, and ``S`` is what the next client to leave is sent, while
    the model of ``average`` is only evaluated.
    """

    def init(params: Params) -> tuple[Shared, Array]:
        return Shared(average.init(params)[0], params), marker()

    def receive(state: Shared, memory: Array, arrival: Arrival) -> tuple[Shared, Array, Info]:
        weights = handed_on(state.weights, arrival.start, arrival.upload, combine)
        after, _, info = average.receive(state.average, (), arrival)
        return Shared(after, tree.where(info.weight > 0, weights, state.weights)), memory, info

    def close(state: Shared, memory: Array) -> tuple[Shared, Array]:
        return state._replace(average=closed(average, state.average, ())[0]), memory

    def dispatch(state: Shared, memory: Array, request: Request) -> tuple[Message, Array]:
        return Message(state.weights), memory

    def given(facts: Facts) -> ServerAlgorithm:
        return by_last(known(average, facts), combine)

    return ServerAlgorithm(init, receive, dispatch, lambda state: average.params(state.average), close, given)


def orthogonal(per: str) -> Combine:
    """``Delta + shift_perp``: of the others' shift, what is orthogonal to the client's own change; statistics its own.

    Source: OrthoFL (2025), eqs. 3-5.
    """
    registry.find("per", GROUPINGS, per)

    return on_weights(lambda change, now, before: plus(change, project_out(now, change, minus=before, per=per)))


def after_the_first(transform: Transform) -> Transform:
    """``transform`` for all accepted arrivals but the first, which is left as it is."""

    def init(params: Params) -> State:
        return jnp.zeros((), jnp.bool_), transform.init(params)

    def update(direction: Params, state: State, params: Params, arrival: Arrival) -> tuple[Params, State, Array]:
        begun, before = state
        changed, after, weight = transform.update(direction, before, params, arrival)
        kept = tree.where(begun, changed, direction)
        return kept, (jnp.ones_like(begun), after), jnp.where(begun, weight, jnp.ones_like(weight))

    return Transform(init, update)


def moving_average(guards: Transform, mixed: Transform) -> ServerAlgorithm:
    """``W <- W + mixed(w_i - W)``."""
    return rule(towards_client(), guards, mixed, optimizer=optax.sgd(1.0))


def _by_average(guards: Transform, mixed: Transform, combine: Combine) -> ServerAlgorithm:
    return by_average(moving_average(guards, mixed), combine)


def _by_last(guards: Transform, mixed: Transform, combine: Combine) -> ServerAlgorithm:
    return by_last(moving_average(guards, after_the_first(mixed)), combine)


REFERENCES: dict[str, Callable[[Transform, Transform, Combine], ServerAlgorithm]] = {
    "average": _by_average,
    "shared": _by_last,
}


@takes(discounted=discount, guards=guard_rails)
def orthofl(
    *, mixing: Traced = 0.6, per: str = "layer", reference: str = "average", discounted: Weight, guards: Transform
) -> ServerAlgorithm:
    """Clients keep their own weights and take over what is orthogonal to their own change (OrthoFL, 2025).

    ``W <- (1 - b_t) W + b_t w_m``, ``b_t = mixing * s(tau)``; client m goes on from ``w_m + dW_perp``, where
    ``dW`` is the shift of the global model since its last upload, before ``w_m`` is mixed in, and
    ``dW_perp`` the part of it orthogonal to the client's change in each layer. A client that nobody
    overtook keeps its own weights. Memory: two models a client.

    Args:
      mixing: b in (0, 1].
      per: layers (``layer``), single tensors (``tensor``) or all parameters as one vector (``whole``).
      reference: ``average``, the paper's shift, of the moving average ``W``; or ``shared``, that of the
        released code: the shift of the weights last calibrated, for any client, while ``W``, whose first
        update has weight 1, is only evaluated.

    BatchNorm's running statistics stay those of the client. ``clip`` bounds what the average takes over, not
    what the client goes on from; an upload that is rejected leaves its client where it was. The staleness
    tau counts server steps since the client received its model; the paper's s, counted from its last
    upload, is 1 + tau where clients leave as they return.
    """
    check.positive("mixing", mixing)
    check.in_range("mixing", mixing, 0.0, 1.0)
    build = registry.find("reference", REFERENCES, reference)
    return build(guards, scale_by_staleness(discounted, mixing), orthogonal(per))


class Latest(NamedTuple):
    """State of :func:`orthofl_no_average`."""

    params: Params
    guards: State


@takes(guards=guard_rails)
def orthofl_no_average(*, per: str = "layer", guards: Transform) -> ServerAlgorithm:
    """OrthoFL without moving average: the weights calibrated last are the global model (OrthoFL 2025, 5.4).

    ``W <- w_m + (W - start_m)_perp`` at every arrival, whenever steps close; ``per`` as in ``orthofl``.
    """
    combine = orthogonal(per)

    def init(params: Params) -> tuple[Latest, Array]:
        return Latest(params, guards.init(params)), marker()

    def receive(state: Latest, memory: Array, arrival: Arrival) -> tuple[Latest, Array, Info]:
        taken = take(guards, state.guards, state.params, arrival)
        after = Latest(handed_on(state.params, taken.arrival.start, taken.direction, combine), taken.state)
        weight = jnp.where(taken.accepted, taken.factor, 0.0).astype(taken.arrival.weight.dtype)
        return tree.where(taken.accepted, after, state), memory, Info(weight)

    def dispatch(state: Latest, memory: Array, request: Request) -> tuple[Message, Array]:
        return Message(state.params), memory

    return ServerAlgorithm(init, receive, dispatch, lambda state: state.params)


class Changes(NamedTuple):
    """State of :func:`orthofl_pairwise`."""

    average: State
    latest: Params  # every client's latest change, [N, ...]
    accepted: Array  # bool[], whether the rule counted the last arrival


@takes(discounted=discount, guards=guard_rails)
def orthofl_pairwise(
    *, mixing: Traced = 0.6, per: str = "layer", num_clients: int = 10, discounted: Weight, guards: Transform
) -> ServerAlgorithm:
    """OrthoFL with the client's change, not the others' shift, projected (OrthoFL 2025, 5.4: pairwise projection).

    The change of an arriving client is projected on the orthogonal complement of the latest changes of all
    other clients, of which an orthonormal basis is made first; it goes on from its start plus that plus the
    whole shift of the global model. The paper says no more than its first half; that clients keep the
    shift is our reading. State: N changes.

    Args:
      mixing, per: as in ``orthofl``.
      num_clients: N; a simulation fills it in.
    """
    check.positive("mixing", mixing)
    check.in_range("mixing", mixing, 0.0, 1.0)
    check.whole("num_clients", num_clients)
    registry.find("per", GROUPINGS, per)
    return _pairwise(moving_average(guards, scale_by_staleness(discounted, mixing)), per, num_clients)


def _pairwise(average: ServerAlgorithm, per: str, num_clients: int) -> ServerAlgorithm:
    def init(params: Params) -> tuple[Changes, Sent]:
        latest = tree.stack_zeros(params, num_clients)
        return Changes(average.init(params)[0], latest, jnp.bool_(False)), Sent(params, params)

    def receive(state: Changes, memory: Sent, arrival: Arrival) -> tuple[Changes, Sent, Info]:
        nothing = jax.tree.map(jnp.zeros_like, arrival.upload)
        others = tree.scatter(state.latest, arrival.client, nothing)
        now = average.params(state.average)
        shift = jax.tree.map(jnp.subtract, now, memory.seen)
        projected = on_weights(lambda own, rows: project_out_span(own, rows, per=per))(arrival.upload, others)
        weights = plus(arrival.start, on_weights(plus)(projected, shift))
        after, _, info = average.receive(state.average, (), arrival)
        accepted = info.weight > 0
        latest = tree.where(accepted, tree.scatter(state.latest, arrival.client, arrival.upload), state.latest)
        return Changes(after, latest, accepted), tree.where(accepted, Sent(weights, now), memory), info

    def close(state: Changes, memory: Sent) -> tuple[Changes, Sent]:
        after, seen = seen_after(average, state.average, state.accepted, memory.seen)
        return state._replace(average=after), memory._replace(seen=seen)

    def dispatch(state: Changes, memory: Sent, request: Request) -> tuple[Message, Sent]:
        return Message(memory.weights), memory

    def given(facts: Facts) -> ServerAlgorithm:
        return _pairwise(known(average, facts), per, num_clients)

    return ServerAlgorithm(init, receive, dispatch, lambda state: average.params(state.average), close, given)
