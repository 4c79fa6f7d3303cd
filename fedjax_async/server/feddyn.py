"""FedDyn: a linear term in each client's objective makes its optimum agree with the global one.

Source: Acar et al., "Federated learning based on dynamic regularization" (2021), Algorithm 1.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_async.base import check, tree
from fedjax_async.base.factories import takes
from fedjax_async.local import Scale, local_training
from fedjax_async.local.private import wrapping
from fedjax_async.local.training import without_statistics
from fedjax_async.server.aggregate import Sum, mean
from fedjax_async.server.rule import guard_rails
from fedjax_async.server.running_statistics import weights_of, with_statistics
from fedjax_async.server.transforms import (
    Transform,
    chain,
    require_no_steps,
    scaled,
    towards_client,
    transformed,
)
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


class FedDynState(NamedTuple):
    """Server state."""

    params: Params  # x
    shift: Params  # h, of the weights alone
    accumulated: Sum  # of ``w_i - x`` since the last server step
    deltas: Params  # sum of Delta_i since then, of the weights alone
    guards: State
    facts: Facts  # static


@takes(guards=guard_rails)
def feddyn(*, alpha: Traced = 0.01, guards: Transform) -> ServerAlgorithm:
    """Mean of the clients' models, corrected by the sum of all their deltas so far (Acar et al. 2021).

    ``h <- h - (alpha / N) sum_i Delta_i`` and ``x <- mean_i w_i - h / alpha`` over the clients of a server step. The
    clients run :func:`feddyn_client` with the same alpha. In asynchronous runs ``Delta_i`` counts from the model that
    the client started from. At the server alpha cancels, because h is proportional to it; it matters in local
    training. ``clip`` bounds ``w_i - x`` in the mean, but not ``Delta_i`` in h.

    Args:
      alpha: weight of the dynamic regulariser, > 0.
    """
    check.positive("alpha", alpha)
    require_no_steps(guards, "feddyn")
    transform, average = chain(towards_client(), guards), mean()

    def init(params: Params, facts: Facts = Facts()) -> tuple[FedDynState, State]:
        zero = jax.tree.map(jnp.zeros_like, tree.wide(weights_of(params)))
        limits = transform.init(params, facts)
        return FedDynState(params, zero, average.init(params), zero, limits, facts.static), ()

    def receive(state: FedDynState, memory: State, arrival: Arrival) -> tuple[FedDynState, State, Info]:
        result = transformed(transform, state.guards, state.params, arrival)
        share = result.accepted.astype(result.arrival.weight.dtype)
        deltas = jax.tree.map(jnp.add, state.deltas, tree.wide(weights_of(arrival.upload)))
        new = state._replace(
            accumulated=average.add(state.accumulated, result.direction, share, result.arrival),
            deltas=tree.where(result.accepted, deltas, state.deltas),
            guards=tree.where(result.accepted, result.state, state.guards),
        )
        return new, memory, result.info(share)

    def close(state: FedDynState, memory: State) -> tuple[FedDynState, State]:
        direction, weight, emptied = average.close(state.accumulated)
        rate = jnp.asarray(alpha, jnp.result_type(float))
        shift = jax.tree.map(jnp.subtract, state.shift, scaled(state.deltas, rate / state.facts.num_clients))
        mean_model = jax.tree.map(jnp.add, tree.wide(state.params), direction)
        params = jax.tree.map(jnp.subtract, weights_of(mean_model), scaled(shift, 1.0 / rate))
        no_deltas = jax.tree.map(jnp.zeros_like, state.deltas)
        params = tree.cast_like(with_statistics(params, mean_model), state.params)
        new = state._replace(params=params, shift=shift, accumulated=emptied, deltas=no_deltas)
        return tree.where(weight > 0, new, state), memory

    def dispatch(state: FedDynState, memory: State, request: Request) -> tuple[Message, State]:
        return Message(state.params), memory

    return ServerAlgorithm(init, receive, dispatch, lambda state: state.params, close)


class Work(NamedTuple):
    """Local variables of one job."""

    inner: State
    shift: Params  # h_i


def feddyn_client(
    model: Model,
    *,
    optimizer: optax.GradientTransformation,
    batch_size: int = 32,
    proximal: Traced = 0.0,
    scale: Scale = None,
    alpha: Traced = 0.01,
) -> ClientAlgorithm:
    """Local training on ``F_i(w) - <h_i, w> + (alpha / 2) ||w - x||^2`` from x; uploads the model delta.

    After K steps ``h_i <- h_i - alpha (w_K - x)``. State: h_i, zero at first. ``alpha`` > 0; the other options are
    those of ``local_training``.
    """
    check.positive("alpha", alpha)

    def correct(gradient: Params, weights: Params, message: Message) -> Params:
        start = without_statistics(model, message.params)

        def corrected(g: Array, w: Array, x: Array, h: Array) -> Array:
            return g - h + jnp.asarray(alpha, w.dtype) * (w - x)

        return jax.tree.map(corrected, gradient, weights, start, without_statistics(model, message.extra))

    base = local_training(
        model, optimizer=optimizer, batch_size=batch_size, proximal=proximal, scale=scale, correct=correct
    )

    def init(params: Params) -> State:
        return base.init(params), jax.tree.map(jnp.zeros_like, weights_of(params))

    def begin(key: Key, message: Message, client_state: State, data: ClientData) -> Work:
        inner, shift = client_state
        return Work(base.begin(key, message, inner, data), shift)

    def step(work: Work, k: Array, message: Message, data: ClientData) -> Work:
        return work._replace(inner=base.step(work.inner, k, message._replace(extra=work.shift), data))

    def finish(work: Work, message: Message, client_state: State) -> tuple[Params, State]:
        delta, inner = base.finish(work.inner, message, client_state[0])
        shift = jax.tree.map(jnp.subtract, work.shift, scaled(weights_of(delta), alpha))
        return delta, (inner, shift)

    return wrapping(base, init=init, begin=begin, step=step, finish=finish)
