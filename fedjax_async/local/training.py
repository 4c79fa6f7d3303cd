"""Local training with any optax optimiser, optionally with a proximal term."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_async.base import check, tree
from fedjax_async.local.batches import batch, seed_of, stored_batch
from fedjax_async.local.dp_sgd import DPSGDOptions, noised_gradient, require_one_gradient, require_usable
from fedjax_async.local.job import gradients_a_step
from fedjax_async.local.private import keeping
from fedjax_async.local.proximal_metrics import ProximalMetric, metric_of
from fedjax_async.types import Array, ClientAlgorithm, ClientData, Key, Message, Model, Number, Params, State


class WithinJob(NamedTuple):
    """A factor on the local updates that changes within a job: ``factor(k, K)``, local step k (0, 1, ...) of K."""

    factor: Callable[[Array, Array], Array]


FEWEST_EXAMPLES = 2  # in a minibatch that updates running statistics
Scale = Callable[[Array], Array] | WithinJob | None  # a function of the message's version, or of the local step


class Work(NamedTuple):
    """Local variables of one job."""

    params: Params
    optimizer: State
    key: Key
    seed: Array  # uint32[2], orders the minibatches


def _total(
    model: Model,
    pulled: Callable[..., Params],
    correct: Callable[..., Params] | None,
    message: Message,
    gradient: Params,
    weights: Params,
) -> Params:
    """The gradient with the proximal term, as ``correct`` changes it."""
    gradient = pulled(gradient, weights, without_statistics(model, message.params))
    if correct is None:
        return gradient
    found = correct(gradient, weights, message)
    have, want = (jax.tree.flatten(jax.tree.map(jnp.shape, each)) for each in (found, gradient))
    check.require(have == want, "what correct returned", jax.tree.map(jnp.shape, found), "like the gradient")
    return found


def local_training(
    model: Model,
    *,
    optimizer: optax.GradientTransformation,
    batch_size: int = 32,
    proximal: Number = 0.0,
    scale: Scale = None,
    correct: Callable[[Params, Params, Message], Params] | None = None,
    metric: ProximalMetric | str | None = None,
    keep_optimizer: bool = False,
    shuffle: bool = True,
    per_example: DPSGDOptions | None = None,
) -> ClientAlgorithm:
    """Minibatch training from the message's params; uploads the model delta ``w_K - w_0``.

    ``w_{k+1} = w_k + scale(v) * optimizer(grad F_batch(w_k) + mu (w_k - w_0))``

    Args:
      model: its ``loss`` is per example, so that the last batch of an epoch is a masked mean. If the model has
        ``train``, the optimiser and the proximal term see only ``params["params"]``. Every step replaces the other
        entries (running statistics) by those that ``train`` returns, and their change is uploaded. A batch of fewer
        than two examples leaves the running statistics as they are.
      optimizer: any optax transformation; its state starts anew in every job. If its update takes ``grad_fn``
        (sharpness-aware optimisers do), it gets the gradient of the step's objective as a function of the weights.
        Its attribute ``gradients``, 1 by default, is the number of gradients that a step costs.
      batch_size: B; a client with fewer examples trains on all of them in every step.
      proximal: mu >= 0, weight of ``(mu/2) ||w - w_0||^2`` (FedProx: Li et al. 2020, eq. 2).
      scale: optional factor on the local updates, a function of the message's version ``v`` (server steps closed
        before dispatch), for example an optax schedule that decays over the run; or a ``WithinJob``.
      correct: optional ``correct(gradient, weights, message) -> gradient``, called in every step after the proximal
        term, for example for control variates. A wrapper passes what ``correct`` needs of its own state in
        ``message.extra``, and keeps the state of the wrapped client beside it. Gradient and weights have no running
        statistics: a wrapper adds ``without_statistics(model, control)``, not ``control``.
      metric: optional ``metric(w, w_0) -> float[]`` in place of ``||w - w_0||^2``, or a name in ``PROXIMAL_METRICS``.
      keep_optimizer: whether the optimiser's state (momentum, moments) is kept from job to job. If an upload is
        rejected, its job does not change the state.
      shuffle: whether each epoch draws a new order; if not, batches are taken in the order of the stored examples, and
        the examples after the last whole batch are left out.
      per_example: DP-SGD, see ``dp_sgd.noised_gradient``: clip the gradient of each example, add noise to their sum.

    Returns: a ``ClientAlgorithm``. Its state between jobs holds the leaves that the model declares ``private`` (see
    :func:`keeping`), and with ``keep_optimizer`` the optimiser's state. Raises ``ValueError`` for an invalid option.
    """
    require_parts(model, optimizer, batch_size, scale)
    check.one_of("keep_optimizer", keep_optimizer, (False, True))
    check.one_of("shuffle", shuffle, (False, True))
    check.require(correct is None or callable(correct), "correct", correct, "correct(gradient, weights, message)")
    if per_example is not None:
        require_usable(model, optimizer)
    pulled = proximal_term(proximal, metric)
    optimizer, each = optax.with_extra_args_support(optimizer), gradients_a_step(optimizer)

    def begin(key: Key, message: Message, client_state: State, data: ClientData) -> Work:
        del data
        state = client_state if keep_optimizer else optimizer.init(without_statistics(model, message.params))
        return Work(message.params, state, key, seed_of(key))

    def step(work: Work, k: Array, message: Message, data: ClientData) -> Work:
        loss_grad = batch_gradient(model, work.params, data, (work.seed, work.key, k), batch_size, shuffle, per_example)
        old, total = without_statistics(model, work.params), partial(_total, model, pulled, correct, message)
        gradient, moved = loss_grad(old)
        factor = decay_factor(scale, message, k, jnp.asarray(message.local_steps))

        def slope(weights: Params, _: object) -> Params:
            if per_example is not None:
                require_one_gradient("several")  # whatever the optimiser's attribute ``gradients`` says
            return total(loss_grad(weights)[0], weights)

        new, state = tree.optimize(optimizer, total(gradient, old), work.optimizer, old, factor, grad_fn=slope)
        return work._replace(params=replaced(model, new, moved), optimizer=state)

    def finish(work: Work, message: Message, client_state: State) -> tuple[Params, State]:
        kept = work.optimizer if keep_optimizer else client_state
        return jax.tree.map(jnp.subtract, work.params, message.params), kept

    def init(params: Params) -> State:
        return optimizer.init(without_statistics(model, params)) if keep_optimizer else ()

    plain = ClientAlgorithm(init, begin, step, finish, gradients=lambda steps, examples: each * steps)
    return plain if model.private is None else keeping(plain, model.private)


def require_parts(model: Model, optimizer: object, batch_size: object, scale: object) -> None:
    """Raise ``ValueError`` for the first invalid one of these options of local training."""
    check.kind("model", model, Model, "a Model, as models.make or models.from_flax returns")
    check.kind("optimizer", optimizer, optax.GradientTransformation, "an optax transformation, such as optax.sgd(0.1)")
    check.whole("batch_size", batch_size)
    known = scale is None or callable(scale) or isinstance(scale, WithinJob)
    check.require(known, "scale", scale, "a function of the message's version, or WithinJob(f)")


# --- the parts of a step ----------------------------------------------------------------------

LocalStep = tuple[Array, Key, Array]  # the seed that orders the job's minibatches, the job's key, the step's number


def decay_factor(scale: Scale, message: Message, k: Array, steps: Array) -> Array | None:
    """The factor on update ``k`` of ``steps`` in a job; ``None`` without a decay."""
    if isinstance(scale, WithinJob):
        return scale.factor(k, steps)
    return None if scale is None else scale(jnp.asarray(message.version))


def batch_gradient(
    model: Model,
    params: Params,
    data: ClientData,
    local_step: LocalStep,
    batch_size: int,
    shuffle: bool = True,
    per_example: DPSGDOptions | None = None,
) -> Callable[[Params], tuple[Params, Params]]:
    """``gradient(weights) -> (gradient, moved)`` of the mean loss of one minibatch, times ``data.weight`` if given.

    Running statistics are read from ``params``; ``moved`` are the params with updated statistics (``()`` if there are
    none). ``per_example``: clip and noise of DP-SGD, which replaces the mean by a clipped and noised one.
    """
    seed, job_key, k = local_step
    position, mask = batch(seed, k, data.size, batch_size) if shuffle else stored_batch(k, data.size, batch_size)
    index = data.order[data.offset + position]
    if per_example is not None:
        factor = mask.astype(jnp.result_type(float))
        if data.weight is not None:
            factor = factor * jnp.broadcast_to(data.weight, data.y.shape[:1])[index].astype(factor.dtype)
        examples = data.x[index], data.y[index], factor, data.size
        gradient = noised_gradient(model, per_example, *examples, job_key, k)
        return lambda weights: (gradient(weights), ())

    def objective(weights: Params) -> tuple[Array, Params]:
        outputs, moved = _forward(model, weights, params, data.x[index], jax.random.fold_in(job_key, k), mask)
        losses = model.loss(outputs, data.y[index])
        require_per_example(losses, mask)
        share = mask.astype(losses.dtype)
        if data.weight is not None:
            weight = data.weight[index] if jnp.ndim(data.weight) else data.weight
            losses = losses * weight.astype(losses.dtype)
        return jnp.sum(losses * share) / jnp.sum(share), moved

    return jax.grad(objective, has_aux=True)


def proximal_term(proximal: Number, metric: ProximalMetric | str | None) -> Callable[[Params, Params, Params], Params]:
    """``pulled(gradient, weights, start) -> gradient``, the gradient plus that of ``(mu/2) metric(weights, start)``."""
    check.non_negative("proximal", proximal)
    distance = metric_of(metric) if isinstance(metric, str) else metric
    known = distance is None or callable(distance)
    check.require(known, "metric", metric, "a function metric(w, w_0), or a name in PROXIMAL_METRICS")
    if isinstance(proximal, (int, float)) and proximal == 0:
        return lambda gradient, weights, start: gradient

    def pulled(gradient: Params, weights: Params, start: Params) -> Params:
        if distance is None:
            pull = jax.tree.map(lambda w, w0: jnp.asarray(proximal, w.dtype) * (w - w0), weights, start)
        else:
            slope = jax.grad(distance)(weights, start)
            pull = jax.tree.map(lambda g: jnp.asarray(proximal, g.dtype) * (0.5 * g), slope)
        return jax.tree.map(jnp.add, gradient, pull)

    return pulled


def require_per_example(losses: Array, mask: Array) -> None:
    """Raise ``ValueError`` unless there is one loss an example: the mean of a batch would count padded rows."""
    found = list(jnp.shape(losses))
    allowed = f"{list(mask.shape)}: one loss an example, not their mean"
    check.require(found == list(mask.shape), "shape of model.loss", found, allowed)


def without_statistics(model: Model, params: Params) -> Params:
    """The part of the params, or of their change, that the optimiser sees: without running statistics."""
    return params if model.train is None else params["params"]


def replaced(model: Model, weights: Params, moved: Params) -> Params:
    """Params of these weights, with the running statistics of ``moved``."""
    return weights if model.train is None else {**moved, "params": weights}


def shared_part(model: Model, weights: Params) -> Params:
    """The trained weights, or their change, with zeros for the leaves that stay with their client."""
    if model.private is None:
        return weights
    others, private = tree.split(weights if model.train is None else {"params": weights}, model.private)
    whole = tree.join(others, jax.tree.map(jnp.zeros_like, private))
    return whole if model.train is None else whole["params"]


def _forward(model: Model, weights: Params, params: Params, x: Array, key: Key, mask: Array) -> tuple[Array, Params]:
    """Outputs, and the params with updated running statistics (``()`` for a model without them).

    A batch of fewer than two examples has no variance: it would move a running variance towards zero, and so it leaves
    the statistics as they are.
    """
    if model.train is None:
        return model.apply(weights, x, key), ()
    outputs, moved = model.train({**params, "params": weights}, x, key, mask)
    enough = jnp.sum(mask) >= FEWEST_EXAMPLES
    kept = {
        name: jax.lax.cond(enough, lambda new, old: new, lambda new, old: old, moved[name], params[name])
        for name in moved
        if name != "params"
    }
    return outputs, {**moved, **kept}
