"""The client of AsyncCurve: it trains its end model, and a curve of low loss from the start to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_async.base import check, tree
from fedjax_async.geometry import CurveFamily, family
from fedjax_async.geometry.vectors import joined, parted
from fedjax_async.local.batches import seed_of
from fedjax_async.local.job import gradients_a_step
from fedjax_async.local.private import keeping
from fedjax_async.local.proximal_metrics import metric_of
from fedjax_async.local.training import (
    Scale,
    batch_gradient,
    decay_factor,
    proximal_term,
    replaced,
    require_parts,
    shared_part,
    without_statistics,
)
from fedjax_async.local.warm import READINGS, require_adam, warmed
from fedjax_async.types import Array, ClientAlgorithm, ClientData, Key, Message, Model, Params, State, Traced, Tree

Counted = TypeVar("Counted", np.ndarray, Array)

_CONTROL = 2**31 + 1  # folded into the job's key: minibatches and positions of the control point's steps
_DROPOUT = 2**31  # folded into the control point's key: what the model draws at its steps, so that it differs from s
ORDERS = ("alternate", "after")


class Curve(NamedTuple):
    """The upload of a client: the curve from its start to its end."""

    params: Params  # Theta_i - Theta^t
    offset: Params  # of the inner points from the chord (``geometry.families``), quadratic: phi - M; weights alone


class Chord(NamedTuple):
    """The chord of a curve, from its start to its end."""

    vector: Array  # c, float[D]
    inverse: Array  # 1 / <c, c>, or 0 if c is so short that its square is 0; float[]


class Work(NamedTuple):
    """Local variables of one job."""

    params: Params  # theta
    optimizer: State
    displacement: Array  # dphi, of the trained weights; float[D], or [m, D] for a curve with m > 1 inner points
    control: State  # of the control point's optimiser
    chord: Chord  # of the curve that the control point is trained on
    keys: tuple[Key, Key]  # of the end's steps and of the control point's
    seeds: tuple[Array, Array]  # of their minibatches


def _check_options(control_lr: Traced, gamma: Traced, warm: str, optimizer: optax.GradientTransformation) -> None:
    check.positive("control_lr", control_lr)
    check.in_range("gamma", gamma, 0.0, 1.0)
    check.one_of("warm", warm, READINGS)
    if warm != "off":
        require_adam(jax.eval_shape(optimizer.init, jnp.zeros(())))


def curve_training(
    model: Model,
    *,
    optimizer: optax.GradientTransformation,
    batch_size: int = 32,
    proximal: Traced = 0.0,
    scale: Scale = None,
    metric: str = "hyperbolic",
    sigma: Traced | None = None,
    beta: Traced | None = None,
    control_lr: Traced = 1e-4,
    gamma: Traced = 1.0,
    order: str = "alternate",
    control_epochs: int | None = None,
    warm: str = "corrected",
    curve: str = "quadratic",
    bends: int | None = None,
) -> ClientAlgorithm:
    """Train the end of a curve and its control point; uploads a :class:`Curve` (AsyncManifold 2025, Algorithm 2).

    The end: ``optimizer`` on ``F_i(w) + (mu/2) metric(w, w_0)``. The control point: Adam on ``F_i(B(s))`` as a function
    of the displacement ``dphi``, at a position s drawn uniformly from [0, 1] for each minibatch, where
    ``B(s) = w_0 + s c + 2 s (1 - s) (dphi - gamma P_c(dphi))`` and c is the chord ``w - w_0``. Epochs of the end and of
    the control point alternate; in each of its epochs the moments of the control point start anew. A job of K local
    steps takes K steps of each, at the cost of two gradients a local step. They can run in parallel on a client, so its
    virtual time is that of K local steps. The end trains on the same minibatches as in ``local_training``.

    Args:
      optimizer, batch_size, proximal, scale: as in ``local_training``. ``scale`` multiplies both learning rates; a
        ``WithinJob`` counts the steps of the end and those of the control point separately.
      metric: of the proximal term, a name in ``PROXIMAL_METRICS``; ``sigma`` and ``beta`` are the options of
        ``hyperbolic``.
      control_lr: of the control point's Adam, > 0; the paper takes a tenth of the end's.
      gamma: share of dphi along the chord that is removed, in [0, 1].
      order: ``alternate``, or ``after``: all steps of the end first, then ``control_epochs`` epochs of the control
        point (5 by default), whose moments do not start anew, as in the paper's study. The loop over them has no fixed
        length, so JAX can differentiate it in forward mode only.
      warm: how Adam's moments start: ``corrected`` or ``printed``, from the server's last step in the message (see
        :func:`warmed`; ``optimizer`` must contain Adam), or ``off``, from zero.
      curve: ``quadratic``, ``cubic`` or ``chain``, see ``geometry.families``. With m inner points the displacement is
        one vector for each, trained together, and ``B(s) = w_0 + s c + sum_j b_j(s) (dphi_j - gamma P_c(dphi_j))``.
      bends: inner points of ``chain``, 1 by default.

    Source: AsyncManifold (2025), Algorithm 2. Deviations: the factor 2 in B; the uploaded offset is that of eq. 30,
    with the last chord; Adam adds eps to the root of the second moment. Curves other than the quadratic one are ours,
    by section 5.1, which leaves the family of curves open.
    """
    require_parts(model, optimizer, batch_size, scale)
    _check_options(control_lr, gamma, warm, optimizer)
    epochs = _control_epochs(order, control_epochs)
    pulled = proximal_term(proximal, metric_of(metric, sigma, beta))
    optimizer, each = optax.with_extra_args_support(optimizer), gradients_a_step(optimizer)
    control, shape = optax.adam(control_lr), family(curve, bends)
    parts = _Parts(model, optimizer, control, pulled, batch_size, gamma, scale, shape)

    def begin(key: Key, message: Message, client_state: State, data: ClientData) -> Work:
        del client_state
        start, other = without_statistics(model, message.params), jax.random.fold_in(key, _CONTROL)
        state = warmed(warm, optimizer.init(start), message.extra, _per_epoch(data, batch_size), model)
        return Work(message.params, state, *_straight(parts, start), (key, other), (seed_of(key), seed_of(other)))

    def step(work: Work, k: Array, message: Message, data: ClientData) -> Work:
        steps, per_epoch = jnp.asarray(message.local_steps), _per_epoch(data, batch_size)
        start = joined(without_statistics(model, message.params))

        def one(phase: Phase, work: Work) -> Work:
            return _half_step(parts, work, phase, start, message, data)

        if order == "alternate":
            return jax.lax.fori_loop(0, 2, lambda i, work: one(_alternate(2 * k + i, steps, per_epoch), work), work)
        span = _share(k, steps, epochs * per_epoch)
        return tree.loop("half steps", *span, lambda j, work: one(_after(j, steps, epochs * per_epoch), work), work)

    def finish(work: Work, message: Message, client_state: State) -> tuple[Curve, State]:
        return _uploaded(parts, work, message), client_state

    gradients = _gradients(order, epochs, batch_size, each)
    plain = ClientAlgorithm(lambda params: (), begin, step, finish, gradients=gradients)
    return plain if model.private is None else keeping(plain, model.private, part="params")


def _control_epochs(order: str, given: int | None) -> int:
    """Epochs of the control point with the order ``after``."""
    check.one_of("order", order, ORDERS)
    check.require(order == "after" or given is None, "control_epochs", given, "left out unless order=after")
    epochs = 5 if given is None else given
    check.whole("control_epochs", epochs, high=2**31 - 1)
    return epochs


def _gradients(order: str, epochs: int, batch_size: int, each: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """``gradients`` of the client: those of the end, ``each`` per local step, and those of the control point."""

    def gradients(steps: np.ndarray, examples: np.ndarray) -> np.ndarray:
        of_control = steps if order == "alternate" else epochs * _batches(examples, batch_size)
        return each * steps + of_control

    return gradients


# --- one gradient -----------------------------------------------------------------------------


class _Parts(NamedTuple):
    """The parts that all steps of a client share."""

    model: Model
    optimizer: optax.GradientTransformation  # of the end
    control: optax.GradientTransformation
    pulled: Callable[[Params, Params, Params], Params]  # adds the gradient of the proximal term
    batch_size: int
    gamma: Traced
    scale: Scale
    shape: CurveFamily


def _straight(parts: _Parts, start: Params) -> tuple[Array, State, Chord]:
    """Displacement, state of its optimiser and chord at the start of a job: the curve is a point."""
    zero = jnp.zeros_like(joined(start))
    still = zero if parts.shape.inner == 1 else jnp.zeros((parts.shape.inner, *zero.shape), zero.dtype)
    return still, parts.control.init(still), _chord(zero)


def _uploaded(parts: _Parts, work: Work, message: Message) -> Curve:
    """The change of the end and the offset of eq. 30, with the last chord."""
    model = parts.model
    delta = jax.tree.map(jnp.subtract, work.params, message.params)
    chord = shared_part(model, without_statistics(model, delta))
    last = _chord(joined(chord))
    offset = parts.shape.each(lambda dphi: parted(_bent(dphi, last, parts.gamma), chord))(work.displacement)
    return Curve(delta, offset if model.train is None else {"params": offset})


def _half_step(parts: _Parts, work: Work, phase: Phase, start: Array, message: Message, data: ClientData) -> Work:
    """A step of the end or of the control point, on vectors [D]: one pass each, however many leaves there are."""
    model, weights = parts.model, without_statistics(parts.model, work.params)
    old = joined(weights)
    s = jax.random.uniform(jax.random.fold_in(work.keys[1], phase.number), dtype=jnp.result_type(float))
    factor = decay_factor(parts.scale, message, phase.number, phase.total)

    def of_now(_: Chord) -> Chord:
        change = old - start
        return _chord(change if model.private is None else joined(shared_part(model, parted(change, weights))))

    def on_curve() -> Array:
        bent = parts.shape.each(lambda dphi: _bent(dphi, chord, parts.gamma))(work.displacement)
        return start + s * (old - start) + parts.shape.aside(bent, s)

    chord = _when(phase.anew, of_now, work.chord)
    # one gradient for both, so that jobs in different phases batch; a single job skips the rest by conditionals
    drawing = work.keys[0], jax.random.fold_in(work.keys[1], _DROPOUT)
    which = (*tree.where(phase.end, *zip(work.seeds, drawing, strict=True)), phase.number)
    gradient_at = batch_gradient(model, work.params, data, which, parts.batch_size)
    gradient, moved = gradient_at(parted(jax.lax.cond(phase.end, lambda: old, on_curve), weights))

    def end_moves(end: tuple[Params, State]) -> tuple[Params, State]:
        def total(weights: Params, _: object = None) -> Params:
            return parts.pulled(gradient_at(weights)[0], weights, parted(start, weights))

        pull = parted(parts.pulled(jnp.zeros_like(old), old, start), weights)
        descent = jax.tree.map(jnp.add, gradient, pull)
        after, state = tree.optimize(
            parts.optimizer, descent, end[1], without_statistics(model, end[0]), factor, grad_fn=total
        )
        return replaced(model, after, moved), state

    def control_moves(control: tuple[Array, State]) -> tuple[Array, State]:
        sideways = _bent(joined(shared_part(model, gradient)), chord, parts.gamma)
        slope = parts.shape.spread(sideways, s)
        fresh = tree.where(phase.fresh, parts.control.init(slope), control[1])
        return tree.optimize(parts.control, slope, fresh, control[0], factor)

    # two conditionals, each with the change as its true branch: then XLA:CPU updates in place and copies nothing
    params, optimizer = _when(phase.end, end_moves, (work.params, work.optimizer))
    displacement, control = _when(jnp.logical_not(phase.end), control_moves, (work.displacement, work.control))
    return Work(params, optimizer, displacement, control, chord, work.keys, work.seeds)


def _when(condition: Array, change: Callable[[Tree], Tree], values: Tree) -> Tree:
    return jax.lax.cond(condition, change, lambda values: values, values)


def _chord(vector: Array) -> Chord:
    square = jnp.sum(jnp.square(vector))
    return Chord(vector, 1.0 / jnp.where(square > 0, square, jnp.inf))


def _bent(vector: Array, chord: Chord, gamma: Traced) -> Array:
    """``v - gamma P_c(v)``."""
    share = gamma * jnp.sum(vector * chord.vector) * chord.inverse
    return vector - share * chord.vector


# --- which step comes when --------------------------------------------------------------------


class Phase(NamedTuple):
    """One gradient of a job."""

    end: Array  # bool[], whether it is a gradient of the end; if not, of the control point
    number: Array  # int32[], earlier gradients of the same kind (end or control point)
    fresh: Array  # bool[], whether the control point's moments start anew
    anew: Array  # bool[], whether it is the control point's first since the end moved: the chord is then new
    total: Array  # int32[], gradients of the same kind in this job


def _batches(examples: Counted, batch_size: int) -> Counted:
    return (examples + batch_size - 1) // batch_size


def _per_epoch(data: ClientData, batch_size: int) -> Array:
    per_epoch: Array = _batches(data.size, batch_size)
    return per_epoch


def _alternate(j: Array, steps: Array, per_epoch: Array) -> Phase:
    """Gradient ``j`` of 2 K: epochs of the end and of the control point alternate, and the last two may be shorter."""
    whole = steps // per_epoch * per_epoch
    epoch, within = j // per_epoch, j % per_epoch
    rest, over = steps - whole, j - 2 * whole
    complete, first = over < 0, over < rest
    end = jnp.where(complete, epoch % 2 == 0, first)
    number = jnp.where(complete, epoch // 2 * per_epoch + within, whole + jnp.where(first, over, over - rest))
    fresh = number % per_epoch == 0
    return Phase(end, number, fresh, ~end & fresh, steps)


def _after(j: Array, steps: Array, extra: Array) -> Phase:
    """Gradient ``j`` of ``K + extra``: the first K are of the end, all others of the control point."""
    end = j < steps
    number, total = tree.where(end, (j, steps), (j - steps, extra))
    return Phase(end, number, jnp.zeros_like(end), j == steps, total)


def _share(k: Array, steps: Array, extra: Array) -> tuple[Array, Array]:
    """The range of gradients of local step k: K local steps share ``K + extra`` gradients as evenly as possible."""
    real = jnp.result_type(float)
    each, rest = extra // steps, (extra % steps).astype(real)

    def first(k: Array) -> Array:
        return k * (1 + each) + jnp.floor(k.astype(real) / steps.astype(real) * rest).astype(jnp.int32)

    return first(k), first(k + 1)
