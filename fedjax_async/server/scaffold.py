"""SCAFFOLD: control variates at server and clients correct the drift of local training.

Source: Karimireddy et al., "SCAFFOLD: stochastic controlled averaging for federated learning" (2020), Algorithm 1.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_async.base import check, tree
from fedjax_async.base.factories import takes
from fedjax_async.local import Scale, decay_factor, local_training
from fedjax_async.local.private import wrapping
from fedjax_async.local.training import without_statistics
from fedjax_async.server.rule import closed, guard_rails, rule
from fedjax_async.server.running_statistics import weights_of
from fedjax_async.server.transforms import Transform, scaled
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


class Change(NamedTuple):
    """The upload of a client."""

    params: Params  # Delta = w_K - w_0
    control: Params  # c_i+ - c_i, of the weights alone


class ScaffoldState(NamedTuple):
    """Server state."""

    inner: State  # of the rule that applies the deltas
    control: Params  # c, in float32 where the params have half precision
    accumulated: Params  # sum of the changes of the clients' c_i since the last server step
    facts: Facts  # static


@takes(guards=guard_rails)
def scaffold(*, server_lr: Traced = 1.0, guards: Transform) -> ServerAlgorithm:
    """Mean of the deltas, with a control variate that follows the clients' mean (Karimireddy et al. 2020).

    ``x <- x + eta_g mean_i Delta_i`` and ``c <- c + (|S| / N) mean_i (c_i+ - c_i)`` over the clients S of a server
    step; if every arrival closes its step, ``|S| = 1``. If an upload is lost, its client does not learn of the loss and
    keeps its new c_i; then c differs from the clients' mean. The clients run :func:`scaffold_client`. A message holds x
    and c, an upload is a :class:`Change`: both are twice as long as FedAvg's. ``clip`` bounds the deltas.

    Args:
      server_lr: ``eta_g > 0``.
    """
    check.positive("server_lr", server_lr)
    inner = rule(guards, optimizer=optax.sgd(server_lr))

    def init(params: Params, facts: Facts = Facts()) -> tuple[ScaffoldState, State]:
        zero = jax.tree.map(jnp.zeros_like, tree.wide(weights_of(params)))
        state, memory = inner.init(params, facts)
        return ScaffoldState(state, zero, zero, facts.static), memory

    def receive(state: ScaffoldState, memory: State, arrival: Arrival) -> tuple[ScaffoldState, State, Info]:
        change: Change = arrival.upload
        after, memory, info = inner.receive(state.inner, memory, arrival._replace(upload=change.params))
        added = jax.tree.map(jnp.add, state.accumulated, tree.wide(change.control))
        accumulated = tree.where(info.weight > 0, added, state.accumulated)
        return state._replace(inner=after, accumulated=accumulated), memory, info

    def close(state: ScaffoldState, memory: State) -> tuple[ScaffoldState, State]:
        after, memory = closed(inner, state.inner, memory)
        change = scaled(state.accumulated, 1.0 / state.facts.num_clients)
        control = jax.tree.map(jnp.add, state.control, change)
        emptied = jax.tree.map(jnp.zeros_like, state.accumulated)
        return state._replace(inner=after, control=control, accumulated=emptied), memory

    def dispatch(state: ScaffoldState, memory: State, request: Request) -> tuple[Message, State]:
        message, memory = inner.dispatch(state.inner, memory, request)
        return message._replace(extra=tree.cast_like(state.control, weights_of(message.params))), memory

    return ServerAlgorithm(init, receive, dispatch, lambda state: inner.params(state.inner), close)


class Work(NamedTuple):
    """Local variables of one job."""

    inner: State
    control: Params  # c_i
    factors: Array  # float[], sum of the factors on the learning rate over the local steps so far


def scaffold_client(
    model: Model,
    *,
    lr: Traced,
    batch_size: int = 32,
    proximal: Traced = 0.0,
    scale: Scale = None,
) -> ClientAlgorithm:
    """SGD along ``g - c_i + c``; uploads a :class:`Change`.

    ``w_{k+1} = w_k - eta (g(w_k) - c_i + c)``, and after K steps ``c_i+ = c_i - c + (w_0 - w_K) / (K eta)``: option II
    of the paper, eq. 4. It holds for plain SGD alone, so the optimiser is fixed. With ``scale``, K is
    replaced by the sum of the steps' factors: c_i+ is then the mean of the gradients, weighted by the rates of their
    steps. If the sum is 0, c_i stays. State: c_i, zero at first.

    Args:
      lr: ``eta > 0``.
      batch_size, proximal, scale: as in ``local_training``.
    """

    def correct(gradient: Params, weights: Params, message: Message) -> Params:
        control, client_control = message.extra  # c and c_i
        controls = without_statistics(model, control), without_statistics(model, client_control)
        return jax.tree.map(lambda g, c, ci: g - ci + c, gradient, *controls)

    base = local_training(
        model, optimizer=optax.sgd(lr), batch_size=batch_size, proximal=proximal, scale=scale, correct=correct
    )

    def init(params: Params) -> State:
        return base.init(params), jax.tree.map(jnp.zeros_like, weights_of(params))

    def begin(key: Key, message: Message, client_state: State, data: ClientData) -> Work:
        inner, control = client_state
        return Work(base.begin(key, message, inner, data), control, jnp.zeros((), jnp.result_type(float)))

    def step(work: Work, k: Array, message: Message, data: ClientData) -> Work:
        controlled = message._replace(extra=(message.extra, work.control))
        factor = decay_factor(scale, message, k, jnp.asarray(message.local_steps))
        factors = work.factors + (1.0 if factor is None else factor.astype(work.factors.dtype))
        return Work(base.step(work.inner, k, controlled, data), work.control, factors)

    def finish(work: Work, message: Message, client_state: State) -> tuple[Change, State]:
        delta, inner = base.finish(work.inner, message, client_state[0])
        total = work.factors * jnp.asarray(lr, work.factors.dtype)
        moved = total > 0
        mean_gradient = scaled(weights_of(delta), -1.0 / jnp.where(moved, total, 1.0))
        change = jax.tree.map(lambda g, c: jnp.where(moved, g - c, 0.0), mean_gradient, message.extra)
        return Change(delta, change), (inner, jax.tree.map(jnp.add, work.control, change))

    return wrapping(base, init=init, begin=begin, step=step, finish=finish)
