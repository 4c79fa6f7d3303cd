"""FedAvg as a field: the server's step, any server optimiser on it, and its orbits.

With clients' losses f_c, local learning rate gamma and k local steps, FedAvg is ``x <- x - eta V_s(x)`` with
``V_s = (1/C) sum_c (I - V_c^k)``, ``V_c = I - gamma grad f_c`` (eqs. 2 and 3). If the V_c are k-conservative, V_s is
the gradient of a surrogate loss, and any first-order optimiser may use it (section 6.1). If they are not, FedAvg may
run in a cycle (section 2.1, ``field_examples.closed_orbit``).

Source: Charles and Rush (2022), sections 2 and 6.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from fedjax_async.base import check, tree
from fedjax_async.theory.vector_fields import Field, Loss, Real, checked, displacement, flattened, gradient_map
from fedjax_async.types import Array, Params


def server_field(losses: Sequence[Loss], gamma: Real, k: int) -> Field:
    """``V_s = (1/C) sum_c (I - (I - gamma grad f_c)^k)`` (eq. 2) of the C client losses f_c.

    Args:
      losses: the f_c; each takes the parameters and returns float[].
      gamma: local learning rate > 0.
      k: local steps >= 1.

    Example:
      >>> field = server_field([lambda x: (x - 1.0) ** 2, lambda x: (x + 3.0) ** 2], gamma=0.25, k=2)
      >>> float(field(jnp.float32(0)))  # each client goes 3/4 of the way to its optimum
      0.75
    """
    return mean_displacement([gradient_map(loss, gamma) for loss in losses], k)


def mean_displacement(maps: Sequence[Field], k: int = 1) -> Field:
    """``(1/C) sum_c (I - V_c^k)`` of any client maps V_c, such as proximal steps or training to convergence."""
    check.whole("k", k)
    check.require(len(maps) > 0, "number of clients", len(maps), "at least 1")
    parts = [displacement(each, k) for each in maps]

    def field(x: Params) -> Params:
        total = reduce(lambda a, b: jax.tree.map(jnp.add, a, b), [part(x) for part in parts])
        return jax.tree.map(lambda leaf: leaf / len(parts), total)

    return field


def server_iterates(field: Field, start: Params, optimizer: optax.GradientTransformation, server_steps: int) -> Params:
    """``x_{t+1} = SERVEROPT(V_s(x_t))`` (eq. 13) with any optax optimiser; leaves [server_steps + 1, ...].

    ``optax.sgd(eta)`` is FedAvg (eq. 3), ``optax.sgd(eta, momentum)`` FedAvgM and ``optax.adagrad(eta)`` FedAdagrad.

    Args:
      field: V_s, which takes the place of the gradient.
      start: x_0, the first row of the result.
    """
    check.whole("server_steps", server_steps, 0)
    same = checked(field)

    def step(carry: tuple[Params, optax.OptState], _: None) -> tuple[tuple[Params, optax.OptState], Params]:
        x, state = tree.optimize(optimizer, same(carry[0]), carry[1], carry[0])
        return (x, state), x

    _, later = jax.lax.scan(step, (start, optimizer.init(start)), None, server_steps)
    return jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), start, later)


class Orbit(NamedTuple):
    """The iterates of FedAvg and the cycle in which they end."""

    points: Params  # leaves [server_steps + 1, ...]
    period: Array  # int[]; 1: a fixed point, 0: no cycle is found
    start: Array  # int[], the number of the first point in the cycle; 0 if no cycle is found


def orbit(field: Field, start: Params, *, lr: float = 1.0, server_steps: int = 100, tol: float | None = None) -> Orbit:
    """FedAvg's iterates ``x <- x - lr V_s(x)`` and their period.

    The period is the smallest p for which each of the last p points is within ``tol`` (Euclidean distance) of the point
    p steps earlier. It is at most ``(T + 1) / 2``, as a cycle must be seen twice. Needs memory for ``T^2`` distances.

    Args:
      field: V_s.
      start: x_0.
      lr: eta, server learning rate > 0.
      server_steps: T >= 1.
      tol: >= 0, smaller than the distance of neighbouring points and larger than the rounding errors of the field. By
        default ``eps^(2/3)`` of the dtype times the largest norm of the points: 2.4e-5 in float32, 3.7e-11 in float64,
        for points of norm 1.

    Example:
      >>> quarter_turn = lambda x: jnp.stack([x[0] + x[1], x[1] - x[0]])  # x - V_s(x) turns x by a right angle
      >>> int(orbit(quarter_turn, jnp.array([1.0, 0.0]), server_steps=12).period)
      4
    """
    check.positive("lr", lr)
    check.whole("server_steps", server_steps)
    check.optional(check.non_negative, "tol", tol)
    flattened(start)
    points = server_iterates(field, start, optax.sgd(lr), server_steps)
    flat = jax.vmap(lambda x: ravel_pytree(x)[0])(points)
    near = _tolerance(flat) if tol is None else tol
    time = jnp.arange(server_steps + 1)

    def far_from_earlier(lag: Array) -> Array:
        """Whether x_t is not x_{t - lag}; bool[server_steps + 1], false before t = lag."""
        distance = jnp.linalg.norm(flat - jnp.roll(flat, lag, axis=0), axis=1)
        return ~(distance <= near) & (time >= lag)

    lags = jnp.arange(1, (server_steps + 1) // 2 + 1)
    far = jax.lax.map(far_from_earlier, lags)  # [lags, server_steps + 1]
    cycles = ~jnp.any(far & (time[None] > server_steps - lags[:, None]), axis=1)
    shortest = jnp.argmax(cycles)
    last_far = jnp.max(jnp.where(far[shortest], time, lags[shortest] - 1))
    found = cycles[shortest]
    return Orbit(points, jnp.where(found, lags[shortest], 0), jnp.where(found, last_far - lags[shortest] + 1, 0))


def _tolerance(points: Array) -> Array:
    """``eps^(2/3)`` times the largest finite norm of the points, float[T, D]."""
    norms = jnp.linalg.norm(points, axis=1)
    largest = jnp.max(jnp.where(jnp.isfinite(norms), norms, 0.0))
    return float(jnp.finfo(points.dtype).eps) ** (2 / 3) * largest
