"""The Lorentz (hyperboloid) model of hyperbolic space, on pytrees: projection, products, distance, penalty.

A pytree x of D parameters stands for the point ``pi_L(x) = (sqrt(beta + |x|^2), x)`` of the hyperboloid, so every
pytree is a point and every point has one pytree. The curvature of the space is ``-1 / beta``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async import check
from fedjax_async.geometry.vectors import (
    hypotenuse,
    inner,
    largest,
    leaves,
    length,
    power_of_two,
)
from fedjax_async.types import Array, Params, Traced


class LorentzPoint(NamedTuple):
    """A vector of D + 1 numbers."""

    time: Array  # float[], x_0
    space: Params  # D parameters


def lorentz_project(x: Params, *, beta: Traced = 1.0) -> LorentzPoint:
    """The point ``pi_L(x) = (sqrt(beta + |x|^2), x)`` of the hyperboloid ``<p, p>_L = -beta``, ``p_0 > 0``.

    Args:
      x: a pytree.
      beta: minus one over the curvature, > 0.

    Source: AsyncManifold (2025), eqs. 25 and 27.
    """
    return LorentzPoint(hypotenuse(radius_of(beta), length(leaves(x))), x)


def lorentz_inner(p: LorentzPoint, q: LorentzPoint) -> Array:
    """The Lorentz product ``<p, q>_L = -p_0 q_0 + sum_i p_i q_i``; float[].

    It overflows where the products do, and loses digits where they cancel. :func:`lorentz_distance` does neither.

    Source: AsyncManifold (2025), eq. 26.
    """
    return inner(leaves(p.space), leaves(q.space)) - p.time * q.time


def lorentz_distance(x: Params, y: Params, *, beta: Traced = 1.0) -> Array:
    """The geodesic distance ``sqrt(beta) arccosh(-<pi_L(x), pi_L(y)>_L / beta)``; float[].

    It and its gradient are finite for all finite x and y of any size. No gradient is longer than 1. Where x and y are
    equal, the distance has no derivative, and the gradient is zero. Both are computed from terms of one sign (the law
    of cosines in half angles), not from the difference in the definition, and are accurate to rounding. Digits are
    lost only between points far out on one ray: in float32 at ``|x| = 1e4``, the relative error is 3e-4.

    Args:
      x, y: pytrees of the same structure and shapes.
      beta: minus one over the curvature, > 0; not differentiated.

    Source: Nickel and Kiela (2018); AsyncManifold (2025), section 5.2.
    """
    return _distance(x, y, jax.lax.stop_gradient(radius_of(beta)))


def lorentz_penalty(x: Params, y: Params, *, sigma: Traced = 1.0, beta: Traced = 1.0, limit: Traced = 30.0) -> Array:
    """FedMRUR's penalty ``exp(|pi_L(x) - pi_L(y)|_L^2 / sigma)``, at most ``exp(limit)``; float[].

    ``|p - q|_L^2 = <p - q, p - q>_L = |x - y|^2 - (x_0 - y_0)^2``. It is 1 where x and y are equal. It and its gradient
    are finite for all finite x and y. Beyond the limit the penalty is constant and its gradient zero, and so it is
    where a sum of squares overflows (in float32 at ``|x| = 1e19``): a model that far away has diverged. Rounding errs
    by no more than that of x and y does. Three sums and one pass over the D parameters give it and its gradient.

    Args:
      x, y: pytrees of the same structure and shapes: theta and Theta^t.
      sigma: variance, > 0.
      beta: minus one over the curvature, > 0; not differentiated.
      limit: bound of the exponent, in [0, 80].

    Source: FedMRUR, An et al. (2023); AsyncManifold (2025), eq. 24, without the factor ``mu / 2``. Deviation:
    the limit.
    """
    check.positive("sigma", sigma)
    check.in_range("limit", limit, 0.0, 80.0)
    check.positive("beta", beta)
    real = jnp.result_type(float)
    sigma, limit, beta = (jnp.asarray(number, real) for number in (sigma, limit, beta))
    square = _square_apart(x, y, jax.lax.stop_gradient(beta))
    return jnp.exp(jnp.minimum(square, sigma * limit) / sigma)


def radius_of(beta: Any) -> Array:
    """The root of beta, in JAX's default float type; a ``ValueError`` unless beta > 0."""
    check.positive("beta", beta)
    return jnp.sqrt(jnp.asarray(beta, jnp.result_type(float)))


@jax.custom_jvp
def _distance(x: Params, y: Params, radius: Array) -> Array:
    return _distance_and_gradients(x, y, radius)[0]


@_distance.defjvp
def _distance_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    distance, x_gradient, y_gradient = _distance_and_gradients(*primals)
    return distance, inner(x_gradient, leaves(tangents[0])) + inner(y_gradient, leaves(tangents[1]))


def _distance_and_gradients(x: Params, y: Params, radius: Array) -> tuple[Array, list[Array], list[Array]]:
    """The distance and its gradients by x and by y.

    With X = |x|, Y = |y|, times ``x_0 = sqrt(beta + X^2)`` and y_0, and e the difference of the two unit vectors:
    ``beta sinh^2(d / (2 sqrt(beta))) = beta sinh^2((r_x - r_y) / 2) + X Y |e|^2 / 4``, where
    ``sinh(r_x - r_y) = (X - Y) (X + Y) / (X y_0 + Y x_0)``. The gradient by x is
    ``(y_0 x - x_0 y) / (x_0 sqrt(beta) sinh(d / sqrt(beta)))``, that by y is minus the same with x_0 and y_0 exchanged.
    All lengths are in units of a power of two, so that no product overflows.
    """
    x, y = leaves(x), leaves(y)
    limits = jnp.finfo(radius.dtype)
    size = jnp.clip(largest([*x, *y]), radius, radius * limits.max**0.75)
    inverse = 1.0 / power_of_two(size)
    x, y, unit_radius = [a * inverse for a in x], [b * inverse for b in y], radius * inverse
    x_length, y_length = length(x), length(y)
    x_time, y_time = hypotenuse(unit_radius, x_length), hypotenuse(unit_radius, y_length)
    total = jnp.where(x_length + y_length > 0, x_length + y_length, 1.0)
    change = list(map(jnp.subtract, x, y))
    longer_by = inner(change, [(a + b) / total for a, b in zip(x, y, strict=True)])  # X - Y

    # the change of direction, seen from the shorter vector, whose unit vector then errs least
    x_is_shorter = x_length < y_length
    shorter, longer = jnp.minimum(x_length, y_length), jnp.maximum(x_length, y_length)
    over = jnp.where(shorter > 0, shorter, 1.0)
    unit = [jnp.where(x_is_shorter, a, b) / over for a, b in zip(x, y, strict=True)]
    across = [c - longer_by * u for c, u in zip(change, unit, strict=True)]  # the longer length times e
    angular = 0.5 * length(across) * (jnp.sqrt(shorter) / jnp.sqrt(jnp.where(longer > 0, longer, 1.0)))

    shorter_time = jnp.where(x_is_shorter, x_time, y_time)
    longer_time = jnp.where(x_is_shorter, y_time, x_time)
    # in the order that never underflows
    crossed = jnp.where(total < unit_radius, (shorter / total) * longer_time, shorter * (longer_time / total))
    mixed_time = jnp.where(longer > 0, (longer / total) * shorter_time + crossed, unit_radius)
    wide = jnp.sqrt(hypotenuse(mixed_time, longer_by) + mixed_time)
    radial = unit_radius * (jnp.abs(longer_by) / wide) / jnp.sqrt(2.0 * mixed_time)
    half = hypotenuse(radial, angular)  # sqrt(beta) sinh(d / (2 sqrt(beta)))
    near = jnp.arcsinh(jnp.minimum(half / unit_radius, 1.0))
    far = jnp.log(half + hypotenuse(half, unit_radius)) - jnp.log(unit_radius)
    distance = 2.0 * radius * jnp.where(half < unit_radius, near, far)

    # y_0 x - x_0 y, its two parts across and along that unit vector without cancellation
    product = unit_radius / (x_time * y_time + x_length * y_length)
    squares = x_time * x_time + y_length * y_length
    along = longer_by * (unit_radius * (unit_radius + product * squares) / (x_time + y_time))
    apart = half > limits.tiny
    factor = jnp.where(apart, 0.5 * unit_radius / hypotenuse(unit_radius, half), 0.0)
    over = jnp.where(apart, half, 1.0)
    common = [((shorter_time * a + along * u) / over) * factor for a, u in zip(across, unit, strict=True)]
    return distance, [a / x_time for a in common], [-a / y_time for a in common]


@jax.custom_jvp
def _square_apart(x: Params, y: Params, beta: Array) -> Array:
    """``|pi_L(x) - pi_L(y)|_L^2``; the largest finite number, with gradient zero, if a sum of squares overflows."""
    return _apart(leaves(x), leaves(y), beta)[0]


@_square_apart.defjvp
def _square_apart_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    """The gradient by x is ``2 (x - y) - 2 (x_0 - y_0) x / x_0``, that by y the same with x and y exchanged."""
    x, y = map(leaves, primals[:2])
    square, four, x_share, y_share = _apart(x, y, primals[2])
    half = [0.5 * a - 0.5 * b for a, b in zip(x, y, strict=True)]  # never overflows
    by_x = [four * h - x_share * a for h, a in zip(half, x, strict=True)]
    by_y = [y_share * b - four * h for h, b in zip(half, y, strict=True)]
    return square, inner(by_x, leaves(tangents[0])) + inner(by_y, leaves(tangents[1]))


def _apart(x: list[Array], y: list[Array], beta: Array) -> tuple[Array, Array, Array, Array]:
    """``|x - y|^2 - (x_0 - y_0)^2``, and what its gradient needs: 4, ``2 (x_0 - y_0) / x_0``, ``2 (x_0 - y_0) / y_0``.

    ``x_0 - y_0 = (|x|^2 - |y|^2) / (x_0 + y_0)`` errs by the rounding of |x| and |y|. If a sum overflows, the first is
    the largest finite number, and the others are 0.
    """
    # XLA:CPU keeps in memory what has two users: this difference and that of the gradient differ by their factors.
    gaps = [jnp.sum(jnp.square(b - a)) for a, b in zip(x, y, strict=True)]
    sums = [inner(x, x), inner(y, y), sum(gaps, jnp.zeros((), beta.dtype))]
    near = jnp.isfinite(sums[0] + sums[1] + sums[2])
    x_square, y_square, gap = (jnp.where(near, one, jnp.zeros_like(one)) for one in sums)
    x_time, y_time = jnp.sqrt(beta + x_square), jnp.sqrt(beta + y_square)
    apart = (x_square - y_square) / (x_time + y_time)
    square = jnp.where(near, jnp.maximum(gap - apart * apart, 0.0), jnp.finfo(gap.dtype).max)
    return square, jnp.where(near, 4.0, 0.0).astype(gap.dtype), 2.0 * apart / x_time, 2.0 * apart / y_time
