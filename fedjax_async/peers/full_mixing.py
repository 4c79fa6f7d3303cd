"""Peers that send full models: Async-DFedAvg, SWIFT, D-PSGD, Epidemic Learning, SGP, and training alone.

All of them mix ``w <- w + sum_d weight_d (w_d - w)`` and push what they trained. They differ in their exchange, which
the clock plans: receivers and times of messages, what a buffer keeps, and the coefficients. Only SGP also scales its
steps, and in its overlapping form pushes the model from before its training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from fedjax_async.base import tree
from fedjax_async.peers.triggering import when_moved
from fedjax_async.types import Array, Event, Message, Params, PeerAlgorithm, State, Stays, Traced


def full_models(stays: Stays, *, trigger: Traced | None = None) -> PeerAlgorithm:
    """Full models, mixed with the planned coefficients. Without ``trigger`` the row is the node's model.

    Args:
      trigger: a node sends its model only when it has moved this far since it last sent it, see
        ``triggering.when_moved``; ``None``: after every event.
    """
    made = _full_models(stays, lambda upload, event: upload)
    return made if trigger is None else when_moved(made, stays, trigger)


def sgp(stays: Stays) -> PeerAlgorithm:
    """Stochastic gradient push: full models with push-sum masses, steps divided by the node's mass.

    ``x <- x + upload(z)`` with ``z = x / s`` is kept as ``z <- z + upload(z) / s``: what is mixed and evaluated is z.
    A node without mass (``push_sum:late_mass=0``, until its first message) trains as if it had the mass 1. With the
    exchange ``push_sum`` nodes much faster than others give their mass away, so that their steps are very long.

    Source: Assran et al., "Stochastic gradient push for distributed deep learning" (2019), algorithm 1.
    """
    return _full_models(stays, lambda upload, event: _divided(upload, event.mass))._replace(debiased=True)


def osgp(stays: Stays) -> PeerAlgorithm:
    """Overlap SGP: a node sends its mixed model before it trains, and mixes what came while it trained.

    An event: ``x <- x + sum_j x_j``, ``s <- s + sum_j s_j``; each of the d receivers and the node get ``x / (d + 1)``
    and ``s / (d + 1)``; then ``x <- x + upload(z)`` with ``z = x / s``. What is mixed and evaluated is z, as in
    :func:`sgp`: it moves by ``upload(z) / s`` with the mass s after the split. So about half of all mass is under way,
    and steps of z are that much longer than those of SGP at the same rate.

    Source: Assran et al. (2019), by the code of its authors (facebookresearch/stochastic_gradient_push,
    GossipDataParallel with overlap=True and synch_freq=0). Deviation: all nodes begin a round together; there a node
    waits for its own neighbours only. Its larger synch_freq, with which nodes go on while messages are late, has the
    exchange ``push_sum`` in its place, with which they never wait.
    """
    return _full_models(stays, lambda upload, event: _divided(upload, event.kept), early=True)._replace(debiased=True)


def _divided(upload: Params, mass: Array | float) -> Params:
    some = jnp.where(jnp.asarray(mass) > 0, mass, 1.0)
    return jax.tree.map(lambda leaf: leaf / some.astype(leaf.dtype), upload)


def _full_models(stays: Stays, step: Callable[[Params, Event], Params], early: bool = False) -> PeerAlgorithm:
    def push(row: Params, upload: Params, event: Event) -> tuple[Params, Params, Mapping[str, Array]]:
        change = tree.split(upload, stays)
        trained = jax.tree.map(jnp.add, row, tree.join(step(change[0], event), change[1]))
        return trained, jax.tree.map(lambda leaf: leaf[None], tree.split(row if early else trained, stays)[0]), {}

    return PeerAlgorithm(
        init=lambda params: params,
        open=lambda row: no_change(row, stays),
        add=lambda inbox, row, message, weight: change_towards(inbox, row, message, weight, stays),
        wake=lambda row, inbox, event: changed(row, inbox),
        start=Message,
        push=push,
        params=lambda row: row,
        early=early,
    )


# --- the linear mixing, for other files of this room too ----------------------------------------


def no_change(params: Params, stays: Stays) -> Params:
    """Zeros like the leaves that are mixed, ``None`` in place of the others; sums of half precision are in float32."""
    return jax.tree.map(jnp.zeros_like, tree.wide(tree.split(params, stays)[0]))


def change_towards(change: Params, params: Params, message: Params, weight: Array, stays: Stays) -> Params:
    """``change + weight (message - params)`` on the leaves that are mixed."""

    def added(total: Array, own: Array, other: Array) -> Array:
        return total + weight.astype(total.dtype) * (other - own).astype(total.dtype)

    return jax.tree.map(added, change, tree.split(params, stays)[0], message)


def changed(params: Params, change: State) -> Params:
    """``params + change``; leaves that are ``None`` in ``change`` stay as they are."""

    def moved(step: Array | None, leaf: Array) -> Array:
        return leaf if step is None else leaf + step.astype(leaf.dtype)

    return jax.tree.map(moved, change, params, is_leaf=lambda leaf: leaf is None)
