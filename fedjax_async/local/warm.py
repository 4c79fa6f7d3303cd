"""Warm moments: a client's Adam starts from moments that the server estimates from its own last step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from fedjax_async.base import check
from fedjax_async.local.training import without_statistics
from fedjax_async.types import Array, Model, Params, State

READINGS = ("corrected", "printed", "off")
_LONG_AGO = 2**30  # a step count whose bias correction is 1 to the last bit


def warmed(reading: str, state: State, step: Params, batches: Array, model: Model) -> State:
    """The optimiser's ``state`` with Adam's moments ``m = step / b`` and ``v = (step / b)^2``.

    ``corrected`` treats these moments as already corrected for bias, and Adam corrects them no more: from there on, m
    and v are plain moving averages. ``printed`` counts Adam's steps from 1, as in the text of AsyncManifold's Algorithm
    2: the first step then multiplies m by ``b1 / (1 - b1)``, which is 9 at b1 = 0.9, and v by 999 at b2 = 0.999. If the
    step is zero, as in the run's first messages, the moments start from zero as usual. ``off`` returns the state
    unchanged.

    Args:
      state: of a fresh optimiser that contains ``optax.scale_by_adam``.
      step: ``Theta^tau - Theta^{tau+1}``, minus the change of the weights in the server's last step.
      batches: b, minibatches of a local epoch; int32[].

    Raises ``ValueError`` if the optimiser contains no Adam, or the message no step.
    """
    if reading == "off":
        return state
    require_adam(state)
    check.require(bool(jax.tree.leaves(step)), "warm", reading, "off: the server's messages hold no step")
    step = without_statistics(model, step)
    cold = jnp.logical_not(jnp.any(jnp.stack([jnp.any(leaf != 0) for leaf in jax.tree.leaves(step)])))

    def filled(node: State) -> State:
        if not _is_adam(node):
            return node
        first = jax.tree.map(lambda s, m: s.astype(m.dtype) / batches.astype(m.dtype), step, node.mu)
        second = jax.tree.map(lambda m, v: jnp.square(m.astype(v.dtype)), first, node.nu)
        count = node.count if reading == "printed" else jnp.where(cold, node.count, jnp.int32(_LONG_AGO))
        return node._replace(count=count.astype(node.count.dtype), mu=first, nu=second)

    return jax.tree.map(filled, state, is_leaf=_is_adam)


def require_adam(state: State) -> None:
    """Raise ``ValueError`` unless the optimiser's ``state`` contains Adam's moments."""
    found = any(map(_is_adam, jax.tree.leaves(state, is_leaf=_is_adam)))
    allowed = "adam or adamw, alone or as the base of sam or asam, for the warm moments of asynccurve's clients"
    check.require(found, "optimizer", "one without Adam's moments", f"{allowed} (asynccurve:warm=off has none)")


def _is_adam(node: State) -> bool:
    return isinstance(node, optax.ScaleByAdamState)
