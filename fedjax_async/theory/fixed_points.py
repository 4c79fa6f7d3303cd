"""FedAvg's fixed point, and its distance to the minimiser of the mean loss.

With k >= 2 local steps, the fixed point x_s* of FedAvg (``V_s(x_s*) = 0``) is in general not the minimiser x* of the
mean loss f (section 6). :func:`fixed_point` and :func:`minimiser` find both for losses that are strongly convex,
:func:`fixed_point_shift` gives ``x_s* - x*`` to the first order in the local learning rate, from derivatives at x*.
``closed_forms.quadratic_fixed_point`` has the exact point for quadratics.

Source: Charles and Rush (2022), section 6; the first order is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_async.base import check, tree
from fedjax_async.theory.vector_fields import Field, Loss, Real, checked
from fedjax_async.types import Array, Params

Search = tuple[Params, Params, optax.OptState, Array]  # of a minimum: the point, the gradient, the optimiser, steps


class Found(NamedTuple):
    """A point at which a field vanishes."""

    point: Params
    residual: Array  # float[], the norm of the field there
    steps: Array  # int32[], iterations; the most allowed if the residual is above the tolerance


def fixed_point(field: Field, start: Params, *, lr: Real = 1.0, tol: float = 1e-6, steps: int = 10_000) -> Found:
    """Iterate ``x <- x - lr V(x)`` until ``||V(x)|| <= tol``.

    Args:
      field: V, for FedAvg :func:`~fedjax_async.theory.fedavg_dynamics.server_field`.
      start: x_0.
      lr: server learning rate > 0.
      tol: > 0, larger than the rounding errors of the field.
      steps: the most iterations.
    """
    check.positive("lr", lr)
    check.positive("tol", tol)
    check.whole("steps", steps)
    field = checked(field)

    def far(state: tuple[Params, Params, Array]) -> Array:
        return (tree.norm(state[1]) > tol) & (state[2] < steps)

    def step(state: tuple[Params, Params, Array]) -> tuple[Params, Params, Array]:
        x = jax.tree.map(lambda leaf, v: leaf - jnp.asarray(lr, leaf.dtype) * v, state[0], state[1])
        return x, field(x), state[2] + 1

    point, last, taken = jax.lax.while_loop(far, step, (start, field(start), jnp.int32(0)))
    return Found(point, tree.norm(last), taken)


def minimiser(loss: Loss, start: Params, *, tol: float = 1e-6, steps: int = 1000) -> Found:
    """Minimise a loss by L-BFGS with line search until ``||grad f(x)|| <= tol``; the rest as in :func:`fixed_point`."""
    check.positive("tol", tol)
    check.whole("steps", steps)
    optimizer = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(loss)

    def far(state: Search) -> Array:
        return (tree.norm(state[1]) > tol) & (state[3] < steps)

    def step(state: Search) -> Search:
        x, _, kept, taken = state
        value, slope = value_and_grad(x, state=kept)
        moves, kept = optimizer.update(slope, kept, x, value=value, grad=slope, value_fn=loss)
        x = optax.apply_updates(x, moves)
        return x, jax.grad(loss)(x), kept, taken + 1

    state = (start, jax.grad(loss)(start), optimizer.init(start), jnp.int32(0))
    # optax counts in int32 and indexes in JAX's default integer type
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        point, slope, _, taken = jax.lax.while_loop(far, step, state)
    return Found(point, tree.norm(slope), taken)


def fixed_point_shift(losses: Sequence[Loss], gamma: Real, k: int, x: Params, *, iterations: int = 200) -> Params:
    """``x_s* - x*`` to the first order in gamma: ``gamma (k - 1) / 2 H^-1 (1/C) sum_c H_c grad f_c``, all at x*.

    H_c is the Hessian of f_c and H their mean. Up to terms of order gamma^3, one client's part of the server field is
    ``x - V_c^k(x) = gamma k grad f_c - gamma^2 k (k - 1) / 2 H_c grad f_c``, and the mean over c vanishes at x_s*. The
    Hessians weight the clients' gradients at x*, so for equal Hessians the first order vanishes. The rest is of order
    ``(gamma k)^2``.

    Args:
      losses: the f_c, twice differentiable, whose mean is strongly convex.
      gamma: local learning rate > 0.
      k: local steps.
      x: x*, the minimiser of the mean loss.
      iterations: the most iterations of conjugate gradients, which apply H^-1.
    """
    check.positive("gamma", gamma)
    check.whole("k", k)
    check.require(len(losses) > 0, "number of clients", len(losses), "at least 1")

    def product(loss: Loss, v: Params) -> Params:
        return jax.jvp(jax.grad(loss), (x,), (v,))[1]

    def mean(parts: Sequence[Params]) -> Params:
        return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]) / len(leaves), *parts)

    pull = mean([product(loss, jax.grad(loss)(x)) for loss in losses])
    solved, _ = jax.scipy.sparse.linalg.cg(lambda v: mean([product(f, v) for f in losses]), pull, maxiter=iterations)
    return jax.tree.map(lambda leaf: jnp.asarray(gamma * (k - 1) / 2, leaf.dtype) * leaf, solved)
