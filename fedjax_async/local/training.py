"""Local training with any optax optimiser, optionally with a proximal term."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_async import check, tree
from fedjax_async.local.batches import batch, seed_of
from fedjax_async.local.private import keeping
from fedjax_async.types import Array, ClientAlgorithm, ClientData, Key, Message, Model, Params, State


class Work(NamedTuple):
    """Local variables of one job."""

    params: Params
    optimizer: State
    key: Key
    seed: Array  # uint32[2], orders the minibatches


def local_training(
    model: Model,
    *,
    optimizer: optax.GradientTransformation,
    batch_size: int = 32,
    proximal: Any = 0.0,
    scale: Callable[[Array], Array] | None = None,
    correct: Callable[[Params, Params, Message], Params] | None = None,
) -> ClientAlgorithm:
    """Minibatch training from the message's params; uploads the model delta ``w_K - w_0``.

    ``w_{k+1} = w_k + scale(v) * optimizer(grad F_batch(w_k) + mu (w_k - w_0))``

    Args:
      model: its ``loss`` is per example, so that the last batch of an epoch is a masked mean. If the model has
        ``train``, the optimiser and the proximal term see only ``params["params"]``. Every step replaces the other
        entries (running statistics) by those that ``train`` returns, and their change is uploaded.
      optimizer: any optax transformation; its state starts anew in every job.
      batch_size: B; a client with fewer examples trains on all of them in every step.
      proximal: mu >= 0, weight of ``(mu/2) ||w - w_0||^2`` (FedProx: Li et al. 2020, eq. 2).
      scale: optional factor on the local updates, a function of the message's version ``v`` (server steps closed
        before dispatch), for example an optax schedule that decays over the run.
      correct: optional ``correct(gradient, weights, message) -> gradient``, called in every step after the proximal
        term, for example for control variates. A wrapper passes its client's state in ``message.extra``.

    Returns: a ``ClientAlgorithm``. Its only state between jobs are the leaves that the model declares ``private`` (see
    :func:`keeping`).
    """
    check.whole("batch_size", batch_size)
    check.non_negative("proximal", proximal)
    has_proximal = not (isinstance(proximal, (int, float)) and proximal == 0)

    def begin(key: Key, message: Message, client_state: State, data: ClientData) -> Work:
        del client_state, data
        return Work(message.params, optimizer.init(trained(model, message.params)), key, seed_of(key))

    def step(work: Work, k: Array, message: Message, data: ClientData) -> Work:
        position, mask = batch(work.seed, k, data.size, batch_size)
        index = data.order[data.offset + position]
        old = trained(model, work.params)

        def objective(weights: Params) -> tuple[Array, Params]:
            key = jax.random.fold_in(work.key, k)
            outputs, moved = _forward(model, weights, work.params, data.x[index], key, mask)
            losses = model.loss(outputs, data.y[index])
            require_per_example(losses, mask)
            share = mask.astype(losses.dtype)
            return jnp.sum(losses * share) / jnp.sum(share), moved

        gradient, moved = jax.grad(objective, has_aux=True)(old)
        if has_proximal:
            start = trained(model, message.params)
            pull = jax.tree.map(lambda w, w0: jnp.asarray(proximal, w.dtype) * (w - w0), old, start)
            gradient = jax.tree.map(jnp.add, gradient, pull)
        if correct is not None:
            gradient = correct(gradient, old, message)
        factor = None if scale is None else scale(jnp.asarray(message.version))
        weights, state = tree.optimize(optimizer, gradient, work.optimizer, old, factor)
        return work._replace(params=weights if model.train is None else {**moved, "params": weights}, optimizer=state)

    def finish(work: Work, message: Message, client_state: State) -> tuple[Params, State]:
        return jax.tree.map(jnp.subtract, work.params, message.params), client_state

    plain = ClientAlgorithm(init=lambda params: (), begin=begin, step=step, finish=finish)
    return plain if model.private is None else keeping(plain, model.private)


def require_per_example(losses: Array, mask: Array) -> None:
    """``ValueError`` unless there is one loss an example: the mean of a batch would count rows that are padding."""
    found = list(jnp.shape(losses))
    allowed = f"{list(mask.shape)}: one loss an example, not their mean"
    check.require(found == list(mask.shape), "shape of model.loss", found, allowed)


def trained(model: Model, params: Params) -> Params:
    """The part of the params, or of their change, that the optimiser sees: without running statistics."""
    return params if model.train is None else params["params"]


def _forward(model: Model, weights: Params, params: Params, x: Array, key: Key, mask: Array) -> tuple[Array, Params]:
    """Outputs, and the params with updated running statistics (``()`` for a model without)."""
    if model.train is None:
        return model.apply(weights, x, key), ()
    return model.train({**params, "params": weights}, x, key, mask)
