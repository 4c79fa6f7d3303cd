"""OrthoFL, its ablations, and the variant of its released code.

Clients keep weights of their own. After each upload a client continues from its own weights plus the part of the
others' change that is orthogonal to its own change. Read :func:`by_average` first: it is the paper's rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_async.base import check, registry, tree
from fedjax_async.base.factories import takes
from fedjax_async.geometry import GROUPINGS, project_out, project_out_span
from fedjax_async.models import STATISTICS
from fedjax_async.server.rule import closed, discount, guard_rails, rule
from fedjax_async.server.running_statistics import has_statistics, on_weights
from fedjax_async.server.transforms import (
    Transform,
    Weight,
    begun,
    require_no_correction,
    require_no_steps,
    scale_by_staleness,
    towards_client,
    transformed,
)
from fedjax_async.types import (
    Array,
    Arrival,
    Facts,
    Info,
    Message,
    Params,
    Path,
    Request,
    ServerAlgorithm,
    State,
    Traced,
)

# ``combine(change, now, before)``: how far a client moves from its start, given its own change and the change of the
# others, which is ``now - before``.
Combine = Callable[[Params, Params, Params], Params]


def plus(first: Params, second: Params) -> Params:
    """Leafwise sum."""
    return jax.tree.map(jnp.add, first, second)


def orthogonal(per: str) -> Combine:
    """``Delta + shift_perp``: the client's change plus the orthogonal part of the others' shift (eqs. 3-5).

    Running statistics are the client's own.
    """
    registry.find("per", GROUPINGS, per)

    return on_weights(lambda change, now, before: plus(change, project_out(now, change, minus=before, per=per)))


def after_the_first(transform: Transform) -> Transform:
    """``transform`` for all accepted arrivals but the first. The first passes unchanged."""

    def init(params: Params, facts: Facts = Facts()) -> State:
        return jnp.zeros((), jnp.bool_), begun(transform, params, facts)

    def update(direction: Params, state: State, params: Params, arrival: Arrival) -> tuple[Params, State, Array]:
        begun, before = state
        changed, after, weight = transform.update(direction, before, params, arrival)
        kept = tree.where(begun, changed, direction)
        return kept, (jnp.ones_like(begun), after), jnp.where(begun, weight, jnp.ones_like(weight))

    return Transform(init, update)


def moving_average(guards: Transform, mixed: Transform) -> ServerAlgorithm:
    """``W <- W + mixed(w_i - W)``."""
    return rule(towards_client(), guards, mixed, optimizer=optax.sgd(1.0))


# --- rules that calibrate their clients -------------------------------------------------------


class Sent(NamedTuple):
    """The server's row about one client."""

    weights: Params  # its own calibrated weights, its next message
    seen: Params  # the global model from which the shift of its next upload counts


class Averaged(NamedTuple):
    """State of :func:`by_average`."""

    average: State
    calibration: State
    waits: Array  # bool[], whether an arrival was accepted since the last server step
    alone: Array  # bool[], whether the last arrival is the only one of these


class Calibration(NamedTuple):
    """How a client's next weights follow from its arrival.

    ``init(params, facts) -> state``; ``update(state, arrival, now, seen) -> (change, state)``: the client continues
    from ``start + change``; ``now - seen`` is the shift of the global model since the client's last upload.
    """

    init: Callable[[Params, Facts], State]
    update: Callable[[State, Arrival, Params, Params], tuple[Params, State]]


def by_average(average: ServerAlgorithm, combine: Combine) -> ServerAlgorithm:
    """``average``, a rule without memory, with clients that start from calibrated weights of their own.

    A client that arrives with ``start + Delta`` is next sent ``start + combine(Delta, W, W_seen)``: ``W`` is the
    global model before this arrival is mixed in, ``W_seen`` the one right after the client's previous arrival. If that
    server step had other arrivals, too, it is the model before the step: the client hears of them, and its own part of
    the step is in the shift. If the rule rejects an upload, the client is sent the same weights again.
    """

    def update(state: State, arrival: Arrival, now: Params, seen: Params) -> tuple[Params, State]:
        return combine(arrival.upload, now, seen), state

    return _calibrated(average, Calibration(lambda params, facts: (), update))


def _calibrated(average: ServerAlgorithm, calibration: Calibration) -> ServerAlgorithm:
    def init(params: Params, facts: Facts = Facts()) -> tuple[Averaged, Sent]:
        no = jnp.bool_(False)
        return Averaged(begun(average, params, facts)[0], calibration.init(params, facts), no, no), Sent(params, params)

    def receive(state: Averaged, memory: Sent, arrival: Arrival) -> tuple[Averaged, Sent, Info]:
        now = average.params(state.average)
        change, calibrated = calibration.update(state.calibration, arrival, now, memory.seen)
        weights = plus(arrival.start, change)
        after, _, info = average.receive(state.average, (), arrival)
        accepted = info.weight > 0
        waits, alone = state.waits | accepted, accepted & ~state.waits
        new = Averaged(after, tree.where(accepted, calibrated, state.calibration), waits, alone)
        return new, tree.where(accepted, Sent(weights, now), memory), info

    def close(state: Averaged, memory: Sent) -> tuple[Averaged, Sent]:
        after, _ = closed(average, state.average, ())
        seen = tree.where(state.alone, average.params(after), memory.seen)
        return state._replace(average=after, waits=jnp.zeros_like(state.waits)), memory._replace(seen=seen)

    def dispatch(state: Averaged, memory: Sent, request: Request) -> tuple[Message, Sent]:
        return Message(memory.weights), memory

    return ServerAlgorithm(init, receive, dispatch, lambda state: average.params(state.average), close)


class Shared(NamedTuple):
    """State of :func:`by_last`."""

    average: State
    weights: Params  # S, calibrated last
    accepted: Array  # int32[], accepted arrivals so far


def by_last(average: ServerAlgorithm, combine: Combine, *, staleness_of_others: bool = False) -> ServerAlgorithm:
    """Like :func:`by_average`, but all clients share the weights ``S`` that were calibrated last.

    ``S <- start + combine(Delta, S, start)`` at every accepted arrival. Every message holds ``S``, for any client; the
    model of ``average`` is only evaluated. ``staleness_of_others``: the staleness that ``average`` sees is the
    number of accepted updates of others since the client's last accepted one.
    """

    def init(params: Params, facts: Facts = Facts()) -> tuple[Shared, Array]:
        return Shared(begun(average, params, facts)[0], params, jnp.int32(0)), jnp.int32(0)

    def receive(state: Shared, memory: Array, arrival: Arrival) -> tuple[Shared, Array, Info]:
        weights = plus(arrival.start, combine(arrival.upload, state.weights, arrival.start))
        if staleness_of_others:  # memory: accepted arrivals after this client's last one
            arrival = arrival._replace(staleness=state.accepted - memory)
        after, _, info = average.receive(state.average, (), arrival)
        counts = info.weight > 0
        accepted = state.accepted + counts.astype(jnp.int32)
        new = Shared(after, tree.where(counts, weights, state.weights), accepted)
        return new, jnp.where(counts, accepted, memory), info

    def close(state: Shared, memory: Array) -> tuple[Shared, Array]:
        return state._replace(average=closed(average, state.average, ())[0]), memory

    def dispatch(state: Shared, memory: Array, request: Request) -> tuple[Message, Array]:
        return Message(state.weights), memory

    return ServerAlgorithm(init, receive, dispatch, lambda state: average.params(state.average), close)


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
    """Clients keep their own weights and add the orthogonal part of the others' change (OrthoFL 2025).

    ``W <- (1 - b_t) W + b_t w_m``, ``b_t = mixing * s(tau)``. Client m continues from ``w_m + dW_perp``: ``dW`` is the
    shift of the global model since its last upload, before ``w_m`` is mixed in; ``dW_perp`` is the part of ``dW``
    orthogonal to the client's change in each layer. If no other client uploaded in between, client m keeps its own
    weights. If a server step has several arrivals, ``dW`` of each begins before the step. Memory: two models a client.

    Args:
      mixing: b in (0, 1].
      per: layers (``layer``), single tensors (``tensor``) or all parameters as one vector (``whole``).
      reference: ``average``: the shift of the moving average ``W``, as in the paper. ``shared``: the shift of the
        weights calibrated last, for any client, as in the released code; then ``W`` is only evaluated, and its first
        update has weight 1.

    BatchNorm's running statistics stay those of the client. ``clip`` bounds what is mixed into W, not the weights
    from which the client continues; a client with a rejected upload is sent the same weights again. The staleness tau
    counts server steps since the client received its model. The paper counts from the client's last upload, which gives
    1 + tau if clients start again as soon as they return.
    """
    check.positive("mixing", mixing)
    check.in_range("mixing", mixing, 0.0, 1.0)
    build = registry.find("reference", REFERENCES, reference)
    return build(guards, scale_by_staleness(discounted, mixing), orthogonal(per))


# --- ablations --------------------------------------------------------------------------------


class Latest(NamedTuple):
    """State of :func:`orthofl_no_average`."""

    params: Params
    guards: State


@takes(guards=guard_rails)
def orthofl_no_average(*, per: str = "layer", guards: Transform) -> ServerAlgorithm:
    """OrthoFL without moving average: the weights calibrated last are the global model (OrthoFL 2025, 5.4).

    ``W <- w_m + (W - start_m)_perp`` at every arrival, even if it closes no server step; ``per`` as in ``orthofl``.
    """
    require_no_steps(guards, "orthofl_no_average")
    require_no_correction(guards, "orthofl_no_average")
    combine = orthogonal(per)

    def init(params: Params, facts: Facts = Facts()) -> tuple[Latest, Array]:
        # The memory has no content. It declares that messages change with every arrival, not only when a step closes.
        return Latest(params, begun(guards, params, facts)), jnp.zeros((), jnp.int32)

    def receive(state: Latest, memory: Array, arrival: Arrival) -> tuple[Latest, Array, Info]:
        result = transformed(guards, state.guards, state.params, arrival)
        start = result.arrival.start
        after = Latest(plus(start, combine(result.direction, state.params, start)), result.state)
        share = result.accepted.astype(result.arrival.weight.dtype)
        return tree.where(result.accepted, after, state), memory, result.info(share)

    def dispatch(state: Latest, memory: Array, request: Request) -> tuple[Message, Array]:
        return Message(state.params), memory

    return ServerAlgorithm(init, receive, dispatch, lambda state: state.params)


@takes(discounted=discount, guards=guard_rails)
def orthofl_pairwise(
    *, mixing: Traced = 0.6, per: str = "layer", discounted: Weight, guards: Transform
) -> ServerAlgorithm:
    """OrthoFL that projects the client's change instead of the others' shift (OrthoFL 2025, 5.4: pairwise projection).

    The change of an arriving client is projected on the orthogonal complement of the latest changes of all other
    clients (from an orthonormal basis of these). The client continues from its start plus the projected change plus
    the whole shift of the global model. The paper specifies only the projection; to add the shift is our reading.
    State: N changes.

    Args:
      mixing, per: as in ``orthofl``.
    """
    check.positive("mixing", mixing)
    check.in_range("mixing", mixing, 0.0, 1.0)
    registry.find("per", GROUPINGS, per)

    def update(latest: Params, arrival: Arrival, now: Params, seen: Params) -> tuple[Params, Params]:
        zero = jax.tree.map(jnp.zeros_like, arrival.upload)
        others = tree.scatter(latest, arrival.client, zero)
        shift = jax.tree.map(jnp.subtract, now, seen)
        projected = on_weights(lambda change, rows: project_out_span(change, rows, per=per))(arrival.upload, others)
        return on_weights(plus)(projected, shift), tree.scatter(latest, arrival.client, arrival.upload)

    def init(params: Params, facts: Facts) -> Params:
        return tree.stack_zeros(params, facts.num_clients)  # every client's latest change, [N, ...]

    average = moving_average(guards, scale_by_staleness(discounted, mixing))
    return _calibrated(average, Calibration(init, update))


# --- the released code, which differs from the paper's text -----------------------------------


@takes(discounted=discount, guards=guard_rails)
def orthofl_released(*, mixing: Traced = 0.6, discounted: Weight, guards: Transform) -> ServerAlgorithm:
    """OrthoFL as in its released code: clients share one calibrated state, tensor by tensor (OrthoFL 2025).

    ``S <- w_m + (S - start_m)_perp``: ``start_m`` is the model that client m was sent, and S is its next one. The part
    orthogonal to ``w_m - start_m`` is computed in every tensor separately: a weight and its bias, LoRA's two factors.
    BatchNorm's tensors, scale and bias too, stay those of the client. The moving average
    ``W <- (1 - b_t) W + b_t w_m``, ``b_t = mixing * s(tau)``, is evaluated; its first weight is 1, and tau counts the
    updates of others since the client's last one. ``orthofl`` follows the paper's text. Deviation: the code adds
    ``1e-19`` to the denominator of the projection. In both, a tensor that did not change takes over the whole shift.

    Args:
      mixing: b in (0, 1].

    ``clip`` bounds what is mixed into W; a rejected upload leaves S unchanged. Memory: one number a client.
    """
    check.positive("mixing", mixing)
    check.in_range("mixing", mixing, 0.0, 1.0)
    average = moving_average(guards, after_the_first(scale_by_staleness(discounted, mixing)))
    return by_last(average, orthogonal_released, staleness_of_others=True)


def orthogonal_released(change: Params, now: Params, before: Params) -> Params:
    """``Delta + (now - before)_perp``, tensor by tensor; for all tensors of a BatchNorm, ``Delta`` alone."""
    normalises = _is_normalisation(change)
    shifted = jax.tree.map(jnp.add, change, project_out(now, change, minus=before, per="tensor"))
    unshifted, _ = tree.split(change, lambda path: not normalises(path))
    return tree.join(unshifted, shifted)


def _is_normalisation(params: Params) -> Callable[[Path], bool]:
    """A test of paths: whether one leads to a tensor of a BatchNorm, a module with running statistics."""
    if not has_statistics(params):
        return lambda path: False
    paths = [tree.path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params[STATISTICS])]
    modules = {path[:-1] for path in paths}
    return lambda path: path[0] == STATISTICS or path[1:-1] in modules
