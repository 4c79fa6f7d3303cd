"""Iterated vector fields: how far they are from gradients.

A field V maps a pytree of floats to one of the same structure and shapes, D floats in all; ``V^k`` applies it k times.
V is k-conservative if ``V^k`` is a gradient. A smooth field on all of R^D is a gradient if and only if its Jacobian J
is symmetric everywhere (eq. 8). FedAvg with k local steps descends a surrogate loss if the maps ``I - gamma grad f_c``
of its clients are k-conservative (Theorem 11, :mod:`fedjax_async.theory.fedavg_dynamics`).

Start with :func:`antisymmetry`, or :func:`estimate_antisymmetry` where D is large. Both measure the displacement
``I - V^k``, which is one client's part of FedAvg's step. If the steps are small, ``J(V^k)`` is close to the identity;
relative to the identity, every antisymmetric part would look small. An antisymmetric part no larger than the rounding
of the subtraction counts as zero: if V^k is the identity, ``I - V^k`` is nothing but rounding.

Fields must return pytrees with the structure, shapes and dtypes of their argument, and the leaves of a point must be
floats of one dtype; otherwise ``ValueError`` is raised. Leaves may be empty or scalars.

Source: Charles and Rush, "Iterated Vector Fields and Conservatism, with Applications to Federated Learning" (2022),
sections 1, 2 and 4. The paper tests only whether ``J - J'`` is zero; the relative size and its estimate are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedjax_async.base import check
from fedjax_async.types import Array, Key, Params

Field = Callable[[Params], Params]
Loss = Callable[[Params], Array]
Real = float | Array  # float[]


ROUNDING = 2.0  # assumed rounding error of J(V^k), in units of k eps ||J(V^k)||; orthogonal maps reach half of it
MOST_DENSE = 2**14  # the most floats of a point for a dense Jacobian: 1 GiB in float32


class CurlEstimate(NamedTuple):
    """A relative antisymmetry estimated from random directions; both float[]."""

    value: Array
    standard_error: Array  # 0 if the value is exact


class MeanCurl(NamedTuple):
    """Relative antisymmetries of C fields and of their mean."""

    parts: CurlEstimate  # float[C] both
    mean: CurlEstimate


class Conservatism(NamedTuple):
    """What :func:`is_k_conservative` found at P points."""

    holds: Array  # bool[], largest <= tol
    largest: Array  # float[], the largest relative antisymmetry
    worst: Array  # int[], the index of its point


def iterate(field: Field, k: int) -> Field:
    """``V^k = V o ... o V``, k times; the identity for k = 0.

    Args:
      field: V.
      k: a whole number >= 0, static.

    Example:
      >>> float(iterate(lambda x: 2.0 * x, 3)(jnp.float32(1)))
      8.0
    """
    check.whole("k", k, 0)
    step = checked(field)
    return lambda x: jax.lax.fori_loop(0, k, lambda _, y: step(y), x)


def checked(field: Field) -> Field:
    """The same field, which raises ``ValueError`` for a result unlike its argument in structure, shapes or dtypes."""

    def same(x: Params) -> Params:
        result = field(x)
        require_same_form("result of the field", result, x, "its argument")
        return result

    return same


def require_same_form(name: str, found: Params, wanted: Params, of: str) -> None:
    """Raise ``ValueError`` unless two pytrees have the same structure, shapes and dtypes."""
    one, two = _form(found), _form(wanted)
    check.require(one == two, name, one, f"of the form of {of}, {check.shown(two)}")


def gradient_map(loss: Loss, gamma: Real) -> Field:
    """``x -> x - gamma grad f(x)``: one step of gradient descent on ``loss`` f at learning rate gamma > 0."""
    check.positive("gamma", gamma)

    def step(leaf: Array, slope: Array) -> Array:
        return leaf - jnp.asarray(gamma, leaf.dtype) * slope

    return lambda x: jax.tree.map(step, x, jax.grad(loss)(x))


def displacement(field: Field, k: int) -> Field:
    """``I - V^k``. For ``V = gradient_map(f_c, gamma)`` it is client c's term of the server field (eq. 2)."""
    iterated = iterate(field, k)
    return lambda x: jax.tree.map(jnp.subtract, x, iterated(x))


def antisymmetric_part(field: Field, k: int, x: Params) -> Array:
    """``D_k(V)(x) = J(V^k)(x) - J(V^k)(x)'`` (eq. 8); float[D, D], in the order of ``ravel_pytree``."""
    jacobian = _jacobian(iterate(field, k), x)
    return jacobian - jacobian.T


def curl(field: Field, x: Params) -> Array:
    """Relative antisymmetry of any field's Jacobian at x: ``||J - J'||_F / ||J + J'||_F``; float[].

    It is 0 if J is symmetric (or zero), and infinite if J is antisymmetric. It costs D forward derivatives and memory
    for D^2 floats; see :func:`estimate_curl` for large D.

    Example:
      >>> float(curl(lambda x: jnp.stack([x[0] - x[1], x[0] + x[1]]), jnp.ones(2)))
      1.0
    """
    jacobian = _jacobian(field, x)
    return _ratio(_sum_of_squares(jacobian - jacobian.T), _sum_of_squares(jacobian + jacobian.T))


def estimate_curl(key: Key, field: Field, x: Params, *, pairs: int = 16) -> CurlEstimate:
    """:func:`curl` without the matrix, from ``pairs`` random pairs of derivatives ``(J v, J' v)``.

    For a uniformly random direction v of length sqrt(D), ``E ||(J -+ J') v||^2 = ||J -+ J'||_F^2``. The directions are
    orthogonal to each other. This lowers the variance and makes the value exact from D pairs on. The field is
    evaluated and linearised once; each pair then costs one forward and one backward derivative. Memory: one pair of
    derivatives at a time, and the directions (``pairs * D`` floats).

    Args:
      key: a JAX random key.
      field: must be differentiable forward and backward; loops in it need a fixed number of iterations.
      x: the point, D floats of one dtype.
      pairs: at least 2; more than D is the same as D.

    Returns: the root of the ratio of the two means, and its standard error by the delta method with the correction
      ``sqrt(1 - pairs / D)`` for directions drawn without replacement. The bias is of the order 1 / pairs.
    """
    check.whole("pairs", pairs, 2)
    flat, unravel = flattened(x)
    push, pull = _derivatives(field, flat, unravel)

    def squares(direction: Array) -> tuple[Array, Array]:
        return _squares(push(direction), pull(direction))

    anti, sym = jax.lax.map(squares, _directions(key, flat, pairs))
    return _from_squares(anti, sym, flat.size)


def estimate_mean_curl(
    key: Key, field: Callable[[Array, Params], Params], weights: Array, x: Params, *, pairs: int = 16
) -> MeanCurl:
    """:func:`estimate_curl` of C fields and of their weighted mean, all from the same directions.

    One field is linearised at a time. The directions and sums need ``3 pairs * D`` floats.

    Args:
      field: ``field(c, x)``, differentiable as in :func:`estimate_curl`; ``c`` int32[].
      weights: float[C], of the fields in the mean; they need not sum to 1, since the result is a ratio.
      key, x, pairs: as in :func:`estimate_curl`.
    """
    check.whole("pairs", pairs, 2)
    flat, unravel = flattened(x)
    directions = _directions(key, flat, pairs)

    def part(total: tuple[Array, Array], one: tuple[Array, Array]) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        c, weight = one
        push, pull = _derivatives(lambda v: field(c, v), flat, unravel)
        both = jax.lax.map(lambda direction: (push(direction), pull(direction)), directions)
        total = jax.tree.map(lambda t, derivative: t + weight * derivative, total, both)
        return total, jax.vmap(_squares)(*both)

    numbers = jnp.arange(len(weights), dtype=jnp.int32)
    nothing = (jnp.zeros_like(directions), jnp.zeros_like(directions))
    total, squares = jax.lax.scan(part, nothing, (numbers, jnp.asarray(weights, flat.dtype)))
    each = jax.vmap(lambda anti, sym: _from_squares(anti, sym, flat.size))(*squares)
    return MeanCurl(each, _from_squares(*jax.vmap(_squares)(*total), flat.size))


def antisymmetry(field: Field, k: int, x: Params) -> Array:
    """How far ``V^k`` is from conservative at x: :func:`curl` of the displacement ``I - V^k``; float[].

    It is 0 at all x if and only if V (smooth on R^D) is k-conservative, since ``I - V^k`` and ``V^k`` have the same
    antisymmetric part up to its sign. It is set to 0 if ``||J - J'||_F`` is at most
    ``2 k eps (||J(V^k)||_F + ||I||_F)``, with the dtype's eps: a smaller value may be rounding. If V amplifies its
    rounding errors in between, even a larger value may be rounding: this happens if Jacobians far from orthogonal
    cancel, such as those of ``P R P^-1`` with an ill-conditioned P.

    Example:
      >>> f = lambda x: x[0] ** 2 * x[1]
      >>> step = gradient_map(f, 0.1)
      >>> x = jnp.array([1.0, 2.0])
      >>> float(antisymmetry(step, 1, x)) < 1e-6 < float(antisymmetry(step, 2, x))
      True
    """
    jacobian = _jacobian(iterate(field, k), x)
    moved = jnp.eye(len(jacobian), dtype=jacobian.dtype) - jacobian
    rounding = _rounding(k, _sum_of_squares(jacobian), len(jacobian))
    return _ratio(_sum_of_squares(moved - moved.T), _sum_of_squares(moved + moved.T), rounding)


def estimate_antisymmetry(key: Key, field: Field, k: int, x: Params, *, pairs: int = 16) -> CurlEstimate:
    """:func:`antisymmetry` without the matrix; arguments and errors as in :func:`estimate_curl`."""
    check.whole("pairs", pairs, 2)
    flat, unravel = flattened(x)
    push, pull = _derivatives(iterate(field, k), flat, unravel)

    def squares(direction: Array) -> tuple[Array, Array, Array]:
        forward, backward = push(direction), pull(direction)
        return *_squares(direction - forward, direction - backward), _sum_of_squares(forward)

    anti, sym, size = jax.lax.map(squares, _directions(key, flat, pairs))
    return _from_squares(anti, sym, flat.size, _rounding(k, size.mean(), flat.size))


def is_k_conservative(field: Field, k: int, points: Params, tol: float = 1e-6) -> Conservatism:
    """Whether :func:`antisymmetry` is at most ``tol`` at all P points; leaves of ``points`` are [P, ...].

    It is a test, not a proof: V^k may be conservative at these points and not at others. If V^k is the identity up to
    rounding (V a rotation by 2 pi / k), it holds. A value that is not finite counts as a failure.
    """
    check.non_negative("tol", tol)
    counts = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(points)}
    allowed = "leaves [P, ...] with the same P >= 1, one row a point"
    check.require(len(counts) == 1 and counts.pop() not in ((), (0,)), "points", _form(points), allowed)
    values = jax.lax.map(lambda x: antisymmetry(field, k, x), points)
    worst = jnp.argmax(values)
    return Conservatism(values[worst] <= tol, values[worst], worst)


def flattened(x: Params) -> tuple[Array, Callable[[Array], Params]]:
    """``ravel_pytree(x)``. Raises ``ValueError`` unless the leaves hold floats of one dtype, at least one float."""
    dtypes = {jnp.result_type(leaf) for leaf in jax.tree.leaves(x)}
    floats = len(dtypes) == 1 and jnp.issubdtype(next(iter(dtypes)), jnp.floating)
    check.require(floats, "x", _form(x), "floats of one dtype, such as float32; close over other values")
    flat, unravel = ravel_pytree(x)
    check.require(flat.size > 0, "x", _form(x), "at least one float")
    return flat, unravel


def _form(x: Params) -> object:
    """Dtypes and shapes, in the structure of x."""
    return jax.tree.map(lambda leaf: f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}", x)


def _jacobian(field: Field, x: Params) -> Array:
    flat, unravel = flattened(x)
    allowed = f"at most {MOST_DENSE} for a matrix of D x D; estimate_antisymmetry and estimate_curl do without"
    check.require(flat.size <= MOST_DENSE, "D", flat.size, allowed)
    return jax.jacfwd(_flat(field, unravel))(flat)


def _flat(field: Field, unravel: Callable[[Array], Params]) -> Callable[[Array], Array]:
    """The field on float[D]."""
    same = checked(field)
    return lambda v: ravel_pytree(same(unravel(v)))[0]


def _directions(key: Key, flat: Array, pairs: int) -> Array:
    """Orthogonal random directions of length sqrt(D); float[P, D], P the smaller of ``pairs`` and D."""
    wide = flat.dtype if flat.dtype.itemsize >= 4 else jnp.float32  # half precision has no decomposition
    basis = _orthonormal(jax.random.normal(key, (flat.size, min(pairs, flat.size)), wide))
    return flat.size**0.5 * basis.T.astype(flat.dtype)


@jax.custom_batching.sequential_vmap
def _orthonormal(columns: Array) -> Array:
    """An orthonormal basis of the columns of float[D, P], one matrix after the other.

    In a batch, jaxlib's decomposition on a CPU keeps a thread waiting for others: two of them in a program wait for
    each other for ever on two cores.
    """
    return jnp.linalg.qr(columns)[0]


def _derivatives(field: Field, flat: Array, unravel: Callable[[Array], Params]) -> tuple[Field, Field]:
    """``v -> J v`` and ``v -> J' v`` of a field at a point, which is evaluated once."""
    _, push = jax.linearize(_flat(field, unravel), flat)
    transposed = jax.linear_transpose(push, flat)
    return push, lambda direction: transposed(direction)[0]


def _sum_of_squares(values: Array) -> Array:
    return jnp.sum(jnp.square(values))


def _squares(forward: Array, backward: Array) -> tuple[Array, Array]:
    """``||(J - J') v||^2`` and ``||(J + J') v||^2``; float[] both."""
    return _sum_of_squares(forward - backward), _sum_of_squares(forward + backward)


def _from_squares(anti: Array, sym: Array, dim: int, rounding: Real = 0.0) -> CurlEstimate:
    """The estimate from the squares of P directions, float[P] both."""
    count = len(anti)
    value = _ratio(anti.mean(), sym.mean(), rounding)
    if count == dim:
        return CurlEstimate(value, jnp.zeros_like(value))
    spread = jnp.std(anti - jnp.square(value) * sym, ddof=1) * ((1 - count / dim) / count) ** 0.5
    slope = 2 * value * sym.mean()
    return CurlEstimate(value, jnp.where(slope > 0, spread / jnp.where(slope > 0, slope, 1.0), 0.0))


def _rounding(k: int, square: Array, dim: int) -> Array:
    """The largest ``||J - J'||_F^2`` that may be rounding, from ``||J(V^k)||_F^2``; 0 if that is not finite."""
    most = jnp.square(ROUNDING * k * float(jnp.finfo(square.dtype).eps) * (jnp.sqrt(square) + dim**0.5))
    return jnp.where(jnp.isfinite(most), most, jnp.zeros_like(most))


def _ratio(anti: Array, sym: Array, rounding: Real = 0.0) -> Array:
    """``sqrt(anti / sym)``; 0 if ``anti`` is at most ``rounding``."""
    nothing = anti <= rounding
    return jnp.where(nothing, jnp.zeros_like(anti), jnp.sqrt(anti / jnp.where(nothing, jnp.ones_like(sym), sym)))
