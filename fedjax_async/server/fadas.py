"""FADAS: AMSGrad on the mean delta of a buffer, slowed down when the buffer is stale."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_async import check, registry
from fedjax_async.registry import takes
from fedjax_async.server.options import Adaptive, adaptive, guard_rails
from fedjax_async.server.rule import rule
from fedjax_async.server.transforms import Transform
from fedjax_async.types import Array, Params, ServerAlgorithm, Traced


class Moments(NamedTuple):
    """State of :func:`amsgrad`."""

    first: Params
    second: Params
    largest: Params  # the largest second moment so far


def amsgrad(b1: Any, b2: Any, eps: Any) -> optax.GradientTransformation:
    """``-m / (sqrt(v_hat) + eps)``, ``v_hat <- max(v_hat, v)``, moments without correction of their bias.

    Unlike ``optax.scale_by_amsgrad``, which corrects it (Reddi, Kale, Kumar 2018 do not).
    """

    def init(params: Params) -> Moments:
        nothing = jax.tree.map(jnp.zeros_like, params)
        return Moments(nothing, nothing, nothing)

    def update(gradient: Params, state: Moments, params: Params | None = None) -> tuple[Params, Moments]:
        del params

        def averaged(rate: Any, old: Array, new: Array) -> Array:
            rate = jnp.asarray(rate, old.dtype)
            return rate * old + (1 - rate) * new

        first = jax.tree.map(lambda m, g: averaged(b1, m, g), state.first, gradient)
        second = jax.tree.map(lambda v, g: averaged(b2, v, jnp.square(g)), state.second, gradient)
        largest = jax.tree.map(jnp.maximum, state.largest, second)
        updates = jax.tree.map(lambda m, v: -m / (jnp.sqrt(v) + jnp.asarray(eps, v.dtype)), first, largest)
        return updates, Moments(first, second, largest)

    return optax.GradientTransformation(init, update)


def _unadapted(server_lr: Any) -> Callable[[Array], Array]:
    return lambda oldest: jnp.asarray(server_lr, oldest.dtype)


def _inverse(server_lr: Any) -> Callable[[Array], Array]:
    def rate(oldest: Array) -> Array:
        return jnp.minimum(jnp.asarray(server_lr, oldest.dtype), 1.0 / jnp.maximum(oldest, 1.0))

    return rate


def _scaled(server_lr: Any) -> Callable[[Array], Array]:
    return lambda oldest: jnp.asarray(server_lr, oldest.dtype) / jnp.maximum(oldest, 1.0)


# How the rate depends on the largest staleness of the buffer, once that exceeds the threshold.
ADAPTATIONS = {"off": _unadapted, "inverse": _inverse, "scaled": _scaled}


@takes(options=partial(adaptive, eps=1e-8), guards=guard_rails)
def fadas(
    *, options: Adaptive, adaptation: str = "inverse", tolerated: Traced = 1.0, guards: Transform
) -> ServerAlgorithm:
    """AMSGrad on the mean of K deltas, with a rate that yields to staleness (Wang et al. 2024).

    ``m <- b1 m + (1 - b1) d``, ``v <- b2 v + (1 - b2) d^2``, ``v_hat <- max(v_hat, v)``,
    ``x <- x + eta_t m / (sqrt(v_hat) + eps)`` with d the mean delta of the buffer (Algorithm 1 of "FADAS: towards
    federated adaptive asynchronous optimization").

    Args:
      server_lr: ``eta > 0``.
      adaptation: ``eta_t`` for a buffer whose largest staleness tau exceeds ``tolerated``: ``inverse``,
        ``min(eta, 1 / tau)`` (the paper; felt only once tau exceeds ``1 / eta``), ``scaled``, ``eta / tau`` (the
        authors' code), or ``off``, ``eta``.
      tolerated: the staleness tau_c >= 0 up to which the rate is ``eta``.
    """
    server_lr, b1, b2, eps = options
    check.non_negative("tolerated", tolerated)
    adapted = registry.find("adaptation", ADAPTATIONS, adaptation)(server_lr)

    def rate(oldest: Array) -> Array:
        late = oldest > jnp.asarray(tolerated, oldest.dtype)
        return jnp.where(late, adapted(oldest), jnp.asarray(server_lr, oldest.dtype))

    return rule(guards, optimizer=amsgrad(b1, b2, eps), rate=rate)
