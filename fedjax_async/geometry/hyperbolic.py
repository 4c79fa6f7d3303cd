"""The Lorentz (hyperboloid) model of hyperbolic space, on pytrees: projection, products, distance, penalty.

A pytree x of D parameters stands for the point ``pi_L(x) = (sqrt(beta + |x|^2), x)`` of the hyperboloid, so every
pytree is a point and every point has one pytree. The curvature of the space is ``-1 / beta``.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async.base import check
from fedjax_async.geometry.vectors import (
    hypotenuse,
    inner,
    joined,
    largest,
    leaves,
    length,
    power_of_two,
    require_alike,
)
from fedjax_async.types import Array, Number, Params, Traced


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

    It overflows if the products do, and loses digits if they cancel. :func:`lorentz_distance` does neither.

    Source: AsyncManifold (2025), eq. 26.
    """
    return inner(leaves(p.space), leaves(q.space)) - p.time * q.time


def lorentz_distance(x: Params, y: Params, *, beta: Traced = 1.0) -> Array:
    """The geodesic distance ``sqrt(beta) arccosh(-<pi_L(x), pi_L(y)>_L / beta)``; float[].

    It and its gradient are finite for all finite x and y of any size. No gradient is longer than 1. If x and y are
    equal, the distance has no derivative, and the gradient is set to zero. Distance and gradient are computed from
    terms of one sign (the law of cosines in half angles), not from the difference in the definition. The angle comes
    from exact products of the coordinates. So both are accurate to rounding, also for points far from the origin that
    are close to each other or on one ray. But rounding a point's coordinates turns its ray, and far from the origin
    this alone moves it by a large distance.

    Args:
      x, y: pytrees of the same structure and shapes.
      beta: minus one over the curvature, > 0; not differentiated.

    Source: Nickel and Kiela (2018); AsyncManifold (2025), section 5.2.
    """
    require_alike({"x": x, "y": y})
    return _distance(joined(x), joined(y), jax.lax.stop_gradient(radius_of(beta)))


def lorentz_penalty(x: Params, y: Params, *, sigma: Traced = 1.0, beta: Traced = 1.0, limit: Traced = 30.0) -> Array:
    """FedMRUR's penalty ``exp(|pi_L(x) - pi_L(y)|_L^2 / sigma)``, at most ``exp(limit)``; float[].

    ``|p - q|_L^2 = <p - q, p - q>_L = |x - y|^2 - (x_0 - y_0)^2``. It is 1 where x and y are equal. It and its gradient
    are finite for all finite x and y. Beyond the limit the penalty is constant and its gradient zero. The same holds if
    a sum of squares overflows (in float32 at ``|x| = 1e19``): a model that far away has diverged. The rounding error is
    no larger than that of rounding x and y. Three sums and one pass over the D parameters give it and its gradient.

    Args:
      x, y: pytrees of the same structure and shapes: theta and Theta^t.
      sigma: variance, > 0.
      beta: minus one over the curvature, > 0; not differentiated.
      limit: bound of the exponent, in [0, 80].

    Source: FedMRUR, An et al. (2023); AsyncManifold (2025), eq. 24, without the factor ``mu / 2``. Deviation:
    the limit.
    """
    require_alike({"x": x, "y": y})
    check.positive("sigma", sigma)
    check.in_range("limit", limit, 0.0, 80.0)
    check.positive("beta", beta)
    real = jnp.result_type(float)
    sigma, limit, beta = (jnp.asarray(number, real) for number in (sigma, limit, beta))
    square = _square_apart(x, y, jax.lax.stop_gradient(beta))
    return jnp.exp(jnp.minimum(square, sigma * limit) / sigma)


def radius_of(beta: Number) -> Array:
    """The root of beta, in JAX's default float type. Raises ``ValueError`` unless beta > 0."""
    check.positive("beta", beta)
    return jnp.sqrt(jnp.asarray(beta, jnp.result_type(float)))


@jax.custom_jvp
def _distance(x: Array, y: Array, radius: Array) -> Array:
    return _distance_and_gradients(x, y, radius)[0]


@_distance.defjvp
def _distance_jvp(primals: tuple[Array, Array, Array], tangents: tuple[Array, Array, Array]) -> tuple[Array, Array]:
    distance, x_gradient, y_gradient = _distance_and_gradients(*primals)
    return distance, jnp.sum(x_gradient * tangents[0]) + jnp.sum(y_gradient * tangents[1])


def _distance_and_gradients(x: Array, y: Array, radius: Array) -> tuple[Array, Array, Array]:
    """The distance and its gradients by x and by y, all [D].

    With X = |x|, Y = |y|, ``x_0 = sqrt(beta + X^2)``, y_0 likewise, and e the difference of the two unit vectors:
    ``beta sinh^2(d / (2 sqrt(beta))) = beta sinh^2((r_x - r_y) / 2) + X Y |e|^2 / 4``, where
    ``sinh(r_x - r_y) = (X - Y) (X + Y) / (X y_0 + Y x_0)``. The gradient by x is
    ``(y_0 x - x_0 y) / (x_0 sqrt(beta) sinh(d / sqrt(beta)))``; the gradient by y is the same with x and y exchanged.
    All lengths are in units of a power of two, so that no product overflows.
    """
    limits = jnp.finfo(radius.dtype)
    size = jnp.clip(largest([x, y]), radius, radius * limits.max**0.75)
    inverse = 1.0 / power_of_two(size)
    x, y, unit_radius = x * inverse, y * inverse, radius * inverse
    x_length, y_length = length([x]), length([y])
    x_time, y_time = hypotenuse(unit_radius, x_length), hypotenuse(unit_radius, y_length)
    total = jnp.where(x_length + y_length > 0, x_length + y_length, 1.0)
    longer_by = jnp.sum((x - y) * ((x + y) / total))  # X - Y

    # the change of direction, seen from the shorter vector
    x_is_shorter = x_length < y_length
    shorter, longer = jnp.minimum(x_length, y_length), jnp.maximum(x_length, y_length)
    unit, turned = _turn(jnp.where(x_is_shorter, x, y), jnp.where(x_is_shorter, y, x))
    across = longer * jnp.where(x_is_shorter, -turned, turned)
    angular = 0.5 * longer * length([turned]) * (jnp.sqrt(shorter) / jnp.sqrt(jnp.where(longer > 0, longer, 1.0)))

    shorter_time = jnp.where(x_is_shorter, x_time, y_time)
    longer_time = jnp.where(x_is_shorter, y_time, x_time)
    # this order of the operations never underflows
    crossed = jnp.where(total < unit_radius, (shorter / total) * longer_time, shorter * (longer_time / total))
    mixed_time = jnp.where(longer > 0, (longer / total) * shorter_time + crossed, unit_radius)
    wide = jnp.sqrt(hypotenuse(mixed_time, longer_by) + mixed_time)
    radial = unit_radius * (jnp.abs(longer_by) / wide) / jnp.sqrt(2.0 * mixed_time)
    half = hypotenuse(radial, angular)  # sqrt(beta) sinh(d / (2 sqrt(beta)))
    near = jnp.arcsinh(jnp.minimum(half / unit_radius, 1.0))
    far = jnp.log(half + hypotenuse(half, unit_radius)) - jnp.log(unit_radius)
    distance = 2.0 * radius * jnp.where(half < unit_radius, near, far)

    # (y_0 x - x_0 y) / half as two parts, across and along that unit vector, without cancellation or underflow
    apart = half > limits.tiny
    over = jnp.where(apart, half, 1.0)
    share = unit_radius / (shorter_time + shorter * (longer / longer_time))
    bent = longer_time * share * (jnp.square(x_time / longer_time) + jnp.square(y_length / longer_time))
    along = longer_by * ((unit_radius / over) * ((unit_radius + bent) / (x_time + y_time)))
    factor = jnp.where(apart, 0.5 * unit_radius / hypotenuse(unit_radius, half), 0.0)
    common = ((shorter_time * across) / over + along * unit) * factor
    return distance, common / x_time, -common / y_time


def _turn(s: Array, t: Array) -> tuple[Array, Array]:
    """``s / |s|`` and ``t / |t| - s / |s|`` of vectors [D], accurate to rounding also where the difference is tiny.

    For vectors less than 60 degrees apart the difference is computed from the part of t across s. That part is
    ``t - (t_k / s_k) s`` without its own part along s, with s_k the largest entry of s. Each entry
    ``(s_k t_i - t_k s_i) / s_k`` is computed exactly before it is rounded. The unit vector of a zero vector is zero.
    """
    if s.size == 0:
        return s, t
    s, t = (a / power_of_two(largest([a])) for a in (s, t))
    k = jnp.argmax(jnp.abs(s))
    s_length, t_length = (jnp.where(size > 0, size, 1.0) for size in (length([s]), length([t])))
    s_unit, t_unit = s / s_length, t / t_length
    rest = _difference_of_products(s[k], t, t[k], s) / jnp.where(s[k] == 0, 1.0, s[k])
    rest = (rest - jnp.sum(rest * s_unit) * s_unit) / t_length
    sine = length([rest])
    square = jnp.minimum(sine * sine, 1.0)
    turned = rest - (square / (1.0 + jnp.sqrt(1.0 - square))) * s_unit  # minus (1 - cosine) along s
    near = (jnp.sum(s_unit * t_unit) > 0.5) & (square < 1.0)
    return s_unit, jnp.where(near, turned, t_unit - s_unit)


def _difference_of_products(a: Array, b: Array, c: Array, d: Array) -> Array:
    """``a b - c d``, rounded once.

    Every number is split into two numbers with half its digits. The products of these are exact, so a fused
    multiply-add does not change them. They are added together with the errors of all additions but the last.
    """
    (a, a_rest), (b, b_rest), (c, c_rest), (d, d_rest) = map(_halves, (a, b, c, d))
    terms = [a_rest * b_rest, -c_rest * d_rest, a * b_rest, -c * d_rest, a_rest * b, -c_rest * d, a * b, -c * d]
    for _ in range(2):
        total, errors = terms[0], []
        for term in terms[1:]:
            total, error = _exact_sum(total, term)
            errors.append(error)
        terms = [*errors, total]
    return sum(terms[1:], terms[0])


def _halves(number: Array) -> tuple[Array, Array]:
    """Two numbers, one with the leading and one with the other digits; their sum is exactly ``number``."""
    limits = jnp.finfo(number.dtype)
    leading = jax.lax.reduce_precision(number, limits.nexp, (limits.nmant - 1) // 2)
    return leading, number - leading


def _exact_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """The rounded sum and its error. Source: Knuth (1969), section 4.2.2, theorem B."""
    total = a + b
    share = total - a
    return total, (a - (total - share)) + (b - share)


@jax.custom_jvp
def _square_apart(x: Params, y: Params, beta: Array) -> Array:
    """``|pi_L(x) - pi_L(y)|_L^2``; the largest finite number, with gradient zero, if a sum of squares overflows."""
    return _apart(leaves(x), leaves(y), beta)[0]


@_square_apart.defjvp
def _square_apart_jvp(
    primals: tuple[Params, Params, Array], tangents: tuple[Params, Params, Array]
) -> tuple[Array, Array]:
    """The gradient by x is ``2 (x - y) - 2 (x_0 - y_0) x / x_0``, that by y the same with x and y exchanged."""
    x, y = map(leaves, primals[:2])
    square, four, x_share, y_share = _apart(x, y, primals[2])
    half = [0.5 * a - 0.5 * b for a, b in zip(x, y, strict=True)]  # never overflows
    by_x = [four * h - x_share * a for h, a in zip(half, x, strict=True)]
    by_y = [y_share * b - four * h for h, b in zip(half, y, strict=True)]
    return square, inner(by_x, leaves(tangents[0])) + inner(by_y, leaves(tangents[1]))


def _apart(x: list[Array], y: list[Array], beta: Array) -> tuple[Array, Array, Array, Array]:
    """``|x - y|^2 - (x_0 - y_0)^2``, and for its gradient: 4, ``2 (x_0 - y_0) / x_0``, ``2 (x_0 - y_0) / y_0``.

    ``x_0 - y_0 = (|x|^2 - |y|^2) / (x_0 + y_0)`` has only the rounding error of |x| and |y|. If a sum overflows, the
    first result is the largest finite number, and the others are 0.
    """
    # XLA:CPU stores a value that is used twice. So this difference is not the gradient's: they differ by a factor.
    gaps = [jnp.sum(jnp.square(b - a)) for a, b in zip(x, y, strict=True)]
    sums = [inner(x, x), inner(y, y), sum(gaps, jnp.zeros((), beta.dtype))]
    near = jnp.isfinite(sums[0] + sums[1] + sums[2])
    x_square, y_square, gap = (jnp.where(near, one, jnp.zeros_like(one)) for one in sums)
    x_time, y_time = jnp.sqrt(beta + x_square), jnp.sqrt(beta + y_square)
    apart = (x_square - y_square) / (x_time + y_time)
    square = jnp.where(near, jnp.maximum(gap - apart * apart, 0.0), jnp.finfo(gap.dtype).max)
    return square, jnp.where(near, 4.0, 0.0).astype(gap.dtype), 2.0 * apart / x_time, 2.0 * apart / y_time
