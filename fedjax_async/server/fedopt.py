"""Adaptive optimisers at the server: FedAvgM, FedAdagrad, FedAdam, FedYogi and FADAS.

The negative mean delta of a server step is the gradient of a server optimiser. Source: Reddi et al., "Adaptive
federated optimization" (2021), Algorithm 2. Deviation: FedAdagrad, FedAdam and FedYogi use optax's optimisers, so Adam
corrects the bias of its moments, which the paper's algorithm does not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_async.base import check, registry
from fedjax_async.base.factories import takes
from fedjax_async.server.rule import guard_rails, rule
from fedjax_async.server.transforms import Transform
from fedjax_async.types import Array, Number, Params, ServerAlgorithm, Traced


@takes(guards=guard_rails)
def fedavgm(
    *, server_lr: Traced = 1.0, momentum: Traced = 0.9, weighting: str = "examples", guards: Transform
) -> ServerAlgorithm:
    """FedAvg with heavy-ball momentum at the server (Hsu, Qi, Brown 2019, section 3.2).

    ``m <- momentum m - mean``, ``x <- x - server_lr m``. ``momentum`` in [0, 1).
    """
    check.positive("server_lr", server_lr)
    check.below_one("momentum", momentum)
    return rule(guards, optimizer=optax.sgd(server_lr, momentum=momentum), weighting=weighting)


@takes(guards=guard_rails)
def fedadagrad(
    *,
    server_lr: Traced = 0.03,
    eps: Traced = 1e-3,
    initial: Traced = 1e-6,
    weighting: str = "examples",
    guards: Transform,
) -> ServerAlgorithm:
    """Adagrad on the mean delta (Reddi et al. 2021).

    ``v <- v + mean^2``, ``x <- x + server_lr mean / sqrt(v + eps)``; ``v`` starts at ``initial``.
    """
    check.positive("server_lr", server_lr)
    check.positive("eps", eps)
    check.non_negative("initial", initial)
    optimizer = optax.adagrad(server_lr, initial_accumulator_value=initial, eps=eps)
    return rule(guards, optimizer=optimizer, weighting=weighting)


class Adaptive(NamedTuple):
    """Options of an optimiser with two moments, in optax's order."""

    server_lr: Traced
    b1: Traced
    b2: Traced
    eps: Traced


def adaptive(*, server_lr: Traced = 0.01, b1: Traced = 0.9, b2: Traced = 0.99, eps: Traced = 1e-3) -> Adaptive:
    """Learning rate, decay of the first and the second moment in [0, 1), constant added to the root of the second."""
    check.positive("server_lr", server_lr)
    check.below_one("b1", b1)
    check.below_one("b2", b2)
    check.positive("eps", eps)
    return Adaptive(server_lr, b1, b2, eps)


@takes(options=adaptive, guards=guard_rails)
def fedadam(*, options: Adaptive, weighting: str = "examples", guards: Transform) -> ServerAlgorithm:
    """Adam on the mean delta (Reddi et al. 2021; their b1, b2 and adaptivity eps)."""
    return rule(guards, optimizer=optax.adam(*options), weighting=weighting)


@takes(options=adaptive, guards=guard_rails)
def fedyogi(*, options: Adaptive, weighting: str = "examples", guards: Transform) -> ServerAlgorithm:
    """Yogi on the mean delta: a second moment that changes additively (Reddi et al. 2021).

    Optax starts both moments at 1e-6. The paper starts the first one at 0.
    """
    return rule(guards, optimizer=optax.yogi(*options), weighting=weighting)


# --- FADAS ------------------------------------------------------------------------------------


class Moments(NamedTuple):
    """State of :func:`amsgrad`."""

    first: Params
    second: Params
    largest: Params  # the largest second moment so far


def amsgrad(b1: Number, b2: Number, eps: Number) -> optax.GradientTransformation:
    """``-m / (sqrt(v_hat) + eps)``, ``v_hat <- max(v_hat, v)``, without bias correction of the moments.

    ``optax.scale_by_amsgrad`` corrects the bias; Reddi, Kale, Kumar (2018) do not.
    """

    def init(params: Params) -> Moments:
        zero = jax.tree.map(jnp.zeros_like, params)
        return Moments(zero, zero, zero)

    def update(gradient: Params, state: Moments, params: Params | None = None) -> tuple[Params, Moments]:
        del params

        def averaged(rate: Number, old: Array, new: Array) -> Array:
            rate = jnp.asarray(rate, old.dtype)
            return rate * old + (1 - rate) * new

        first = jax.tree.map(lambda m, g: averaged(b1, m, g), state.first, gradient)
        second = jax.tree.map(lambda v, g: averaged(b2, v, jnp.square(g)), state.second, gradient)
        largest = jax.tree.map(jnp.maximum, state.largest, second)
        updates = jax.tree.map(lambda m, v: -m / (jnp.sqrt(v) + jnp.asarray(eps, v.dtype)), first, largest)
        return updates, Moments(first, second, largest)

    return optax.GradientTransformation(init, update)


def _unadapted(server_lr: Number) -> Callable[[Array], Array]:
    return lambda oldest: jnp.asarray(server_lr, oldest.dtype)


def _inverse(server_lr: Number) -> Callable[[Array], Array]:
    def rate(oldest: Array) -> Array:
        return jnp.minimum(jnp.asarray(server_lr, oldest.dtype), 1.0 / jnp.maximum(oldest, 1.0))

    return rate


def _scaled(server_lr: Number) -> Callable[[Array], Array]:
    return lambda oldest: jnp.asarray(server_lr, oldest.dtype) / jnp.maximum(oldest, 1.0)


# The learning rate as a function of the largest staleness of the buffer, once that exceeds the threshold.
ADAPTATIONS = {"off": _unadapted, "inverse": _inverse, "scaled": _scaled}


@takes(options=partial(adaptive, server_lr=0.001, eps=1e-8), guards=guard_rails)
def fadas(
    *, options: Adaptive, adaptation: str = "scaled", tolerated: Traced = 1.0, guards: Transform
) -> ServerAlgorithm:
    """AMSGrad on the mean of K deltas, with a learning rate reduced for stale buffers (Wang et al. 2024).

    ``m <- b1 m + (1 - b1) d``, ``v <- b2 v + (1 - b2) d^2``, ``v_hat <- max(v_hat, v)``,
    ``x <- x + eta_t m / (sqrt(v_hat) + eps)`` with d the mean delta of the buffer (Algorithm 1 of "FADAS: towards
    federated adaptive asynchronous optimization").

    Args:
      server_lr: ``eta > 0``.
      adaptation: ``eta_t`` if the largest staleness tau of the buffer exceeds ``tolerated``. ``inverse``:
        ``min(eta, 1 / tau)``, the paper's, which differs from ``eta`` only if tau exceeds ``1 / eta``. ``scaled``:
        ``eta / tau``, as in the authors' code. ``off``: ``eta``.
      tolerated: the staleness tau_c >= 0 up to which the learning rate is ``eta``.

    Defaults: K = 5, ``eta = 0.001``, ``tau_c = 1``, ``scaled``, eps = 1e-8: the command with delay-adaptive rates in
    the authors' README (github.com/yujiaw98/FADAS: 25 of 50 clients in flight), whose code is ``scaled``. Without
    adaptation they use ``eta = 0.0001``, which suits ``inverse`` too: it never reduces a rate as small as that.
    """
    server_lr, b1, b2, eps = options
    check.non_negative("tolerated", tolerated)
    adapted = registry.find("adaptation", ADAPTATIONS, adaptation)(server_lr)

    def rate(oldest: Array) -> Array:
        late = oldest > jnp.asarray(tolerated, oldest.dtype)
        return jnp.where(late, adapted(oldest), jnp.asarray(server_lr, oldest.dtype))

    return rule(guards, optimizer=amsgrad(b1, b2, eps), rate=rate)
