"""Riemannian manifolds as tuples of pure functions on pytrees, and gradient descent along their geodesics.

Both manifolds here are all of R^D as sets: a point is any pytree, a tangent vector a pytree of the same shapes. Params
of a model need no conversion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_async.base import check
from fedjax_async.geometry.hyperbolic import lorentz_distance, radius_of
from fedjax_async.geometry.projection import project_out
from fedjax_async.geometry.vectors import hypotenuse, inner, leaves, length, rebuild, unit
from fedjax_async.types import Array, Number, Params, State, Traced


class Manifold(NamedTuple):
    """``exp(x, v)`` is the point at time 1 of the geodesic from x with velocity v; ``log(x, y)`` is the inverse."""

    inner: Callable[[Params, Params, Params], Array]  # (x, u, v) -> float[], the metric at x
    distance: Callable[[Params, Params], Array]  # (x, y) -> float[]
    exp: Callable[[Params, Params], Params]  # (x, v) -> y
    log: Callable[[Params, Params], Params]  # (x, y) -> v
    gradient: Callable[[Params, Params], Params]  # (x, partial derivatives at x) -> Riemannian gradient


def euclidean() -> Manifold:
    """R^D with straight lines: ``exp(x, v) = x + v``, ``log(x, y) = y - x``."""

    def distance(x: Params, y: Params) -> Array:
        return length(leaves(jax.tree.map(jnp.subtract, x, y)))

    return Manifold(
        inner=lambda x, u, v: inner(leaves(u), leaves(v)),
        distance=distance,
        exp=lambda x, v: jax.tree.map(jnp.add, x, v),
        log=lambda x, y: jax.tree.map(jnp.subtract, y, x),
        gradient=lambda x, partials: partials,
    )


def lorentz(*, beta: Traced = 1.0) -> Manifold:
    """Hyperbolic space of curvature ``-1 / beta``, every point given by its space part (:mod:`.hyperbolic`).

    With ``x_0 = sqrt(beta + |x|^2)``, ``|v|`` the length of v in the metric and d the distance of x and y:

    - metric: ``<u, v>_x = <u, v> - <x, u> <x, v> / x_0^2``, the Lorentz product of the lifted vectors;
    - ``exp(x, v) = cosh(|v| / sqrt(beta)) x + sqrt(beta) sinh(|v| / sqrt(beta)) v / |v|``;
    - ``log(x, y) = (d / sqrt(beta)) / sinh(d / sqrt(beta)) (y - cosh(d / sqrt(beta)) x)``;
    - gradient: ``g + x <x, g> / beta``.

    The coordinates grow like the exponential of the distance from the origin, and so do the errors of ``exp`` and
    ``log``: in float32 they overflow at a distance of about ``88 sqrt(beta)``. ``distance`` never overflows.

    Args:
      beta: minus one over the curvature, > 0.

    Source: Nickel and Kiela (2018); Law et al. (2019); AsyncManifold (2025), eqs. 13, 25 and 26.
    """
    check.positive("beta", beta)

    def product(x: Params, u: Params, v: Params) -> Array:
        x, u, v = leaves(x), leaves(u), leaves(v)
        direction, size = unit(x), length(x)
        u_along, v_along = inner(u, direction), inner(v, direction)
        u_across = [a - u_along * d for a, d in zip(u, direction, strict=True)]
        # the parts across and along x separately: the difference in the definition would lose digits
        radius = radius_of(beta)
        shrink = jnp.square(radius / hypotenuse(radius, size))
        return inner(u_across, v) + shrink * u_along * v_along

    def size_of(x: Params, v: Params) -> Array:
        x, v = leaves(x), leaves(v)
        shrink = radius_of(beta) / hypotenuse(radius_of(beta), length(x))
        across = length(project_out(v, x, per="whole"))
        # at x = 0 the projection removes nothing, and v has no part along x
        return hypotenuse(across, shrink * inner(v, unit(x)))

    def exp(x: Params, v: Params) -> Params:
        turn = size_of(x, v) / radius_of(beta)
        terms = zip(leaves(x), leaves(v), strict=True)
        return rebuild([jnp.cosh(turn) * a + _sinh_over(turn) * b for a, b in terms], x)

    def log(x: Params, y: Params) -> Params:
        turn = lorentz_distance(x, y, beta=beta) / radius_of(beta)
        excess = 2.0 * jnp.square(jnp.sinh(0.5 * turn))  # cosh(turn) - 1
        terms = zip(leaves(x), leaves(y), strict=True)
        return rebuild([((b - a) - excess * a) / _sinh_over(turn) for a, b in terms], x)

    def gradient(x: Params, partials: Params) -> Params:
        point, slopes = leaves(x), leaves(partials)
        along = inner(point, slopes) / jnp.asarray(beta, jnp.result_type(float))
        return rebuild([g + along * a for a, g in zip(point, slopes, strict=True)], partials)

    return Manifold(product, lambda x, y: lorentz_distance(x, y, beta=beta), exp, log, gradient)


MANIFOLDS: dict[str, Callable[..., Manifold]] = {"euclidean": euclidean, "lorentz": lorentz}


def geodesic(manifold: Manifold, start: Params, end: Params, s: Number) -> Params:
    """The point ``exp(start, s log(start, end))`` of the geodesic; s in [0, 1] is the share of the way.

    Source: AsyncManifold (2025), eq. 20: the server's step along a geodesic.
    """
    way = manifold.log(start, end)
    share = jnp.asarray(s, jnp.result_type(float))
    return manifold.exp(start, rebuild([share * v for v in leaves(way)], way))


def riemannian_sgd(lr: Traced | Callable[[Array], Array], manifold: Manifold) -> optax.GradientTransformation:
    """Riemannian gradient descent: ``x <- exp(x, -lr grad f(x))``.

    An optax transformation: its updates are ``exp(x, -lr grad) - x``, so ``optax.apply_updates`` makes the step. On the
    Euclidean manifold it is SGD.

    Args:
      lr: the step size, > 0; or a schedule of optax, a function of the number of steps taken before.
      manifold: the manifold of the params.

    Raises: ``ValueError`` if its update gets no params.

    Source: Bonnabel (2013); Nickel and Kiela (2018); AsyncManifold (2025), section 2.3.
    """
    check.positive("lr", lr)

    def update(partials: Params, state: State, params: Params | None = None) -> tuple[Params, State]:
        check.require(params is not None, "params", params, "given: a step along a geodesic depends on where it starts")
        rate = jnp.asarray(lr(state.count) if callable(lr) else lr, jnp.result_type(float))
        slope = manifold.gradient(params, partials)
        step = rebuild([-rate * g for g in leaves(slope)], slope)
        after = optax.ScaleByScheduleState(state.count + 1) if callable(lr) else state
        return jax.tree.map(jnp.subtract, manifold.exp(params, step), params), after

    def init(params: Params) -> State:
        del params
        return optax.ScaleByScheduleState(jnp.int32(0)) if callable(lr) else optax.EmptyState()

    return optax.GradientTransformation(init, update)


def _sinh_over(x: Array) -> Array:
    """``sinh(x) / x``, 1 at 0."""
    is_zero = x == 0
    safe = jnp.where(is_zero, jnp.ones_like(x), x)
    return jnp.where(is_zero, jnp.ones_like(x), jnp.sinh(safe) / safe)
