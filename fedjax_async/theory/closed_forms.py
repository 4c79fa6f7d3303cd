"""Iterated fields with a known potential: generalised linear models, affine, quadratic and univariate fields.

Each function returns a :class:`ClosedForm`: a field and a function whose gradient is this field. The field of
``..._iterate`` is ``V^k``. The field of ``..._displacement`` is ``I - (I - gamma grad f)^k``; the mean of its potential
over the clients is FedAvg's surrogate loss (Theorem 11).

Corrected here: Theorem 4 is wrong for k >= 2. It keeps only the last local step; each of the k steps adds its own term
(see :func:`glm_displacement`). Its conclusion stands. Theorem 3 holds as printed.

Source: Charles and Rush (2022), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.base import check
from fedjax_async.theory.surrogate import integrate
from fedjax_async.theory.vector_fields import Field, Loss, Real, iterate
from fedjax_async.types import Array

Elementwise = Callable[[Array], Array]


class ClosedForm(NamedTuple):
    """A field and its potential: ``field = grad potential``; both take float[D]."""

    field: Field
    potential: Loss


def glm_loss(sigma: Elementwise, features: Array) -> Loss:
    """``f(x) = sum_i sigma(<x, z_i>)`` (eq. 5), the loss of a generalised linear model; ``features`` z: float[m, D].

    ``sigma`` acts on each entry of float[m]. Logistic regression with labels y_i = +-1 has ``z_i = y_i a_i`` and
    ``sigma(t) = ln(1 + e^-t)``.
    """
    return lambda x: jnp.sum(sigma(features @ x))


def glm_iterate(sigma: Elementwise, features: Array, k: int, *, nodes: int = 64) -> ClosedForm:
    """Theorem 3: ``(grad f)^k`` of :func:`glm_loss` with orthogonal features, for k >= 1.

    ``(grad f)^k(x) = sum_i sigma'(phi_i^(k-1)(<x, z_i>)) z_i`` with ``phi_i(t) = ||z_i||^2 sigma'(t)``.
    The potential is ``sum_i int_0^<x, z_i> sigma'(phi_i^(k-1)(t)) dt`` (eq. 6).

    Args:
      sigma: smooth, acts on each entry.
      features: float[m, D], mutually orthogonal rows.
      k: iterations.
      nodes: of the Gauss-Legendre rule for the m integrals of the potential.

    Raises: ``ValueError`` for features that are not orthogonal (not checked under ``jit``).
    """
    check.whole("k", k)
    squares = _squares(features)
    slope = _derivative(sigma)
    inner = iterate(lambda t: squares * slope(t), k - 1)
    return _ridge(lambda t: slope(inner(t)), features, nodes)


def glm_displacement(sigma: Elementwise, features: Array, gamma: Real, k: int, *, nodes: int = 64) -> ClosedForm:
    """Theorem 4, corrected: ``I - (I - gamma grad f)^k`` of :func:`glm_loss` with orthogonal features, for k >= 1.

    With ``psi_i(t) = t - gamma ||z_i||^2 sigma'(t)``, one step of gradient descent along z_i,

    ``(I - gamma grad f)^k(x) = x - gamma sum_{j=0}^{k-1} sum_i sigma'(psi_i^j(<x, z_i>)) z_i``.

    Eq. 7 has the term ``j = k - 1`` in place of the sum over j. The potential of the displacement is
    ``gamma sum_j sum_i int_0^<x, z_i> sigma'(psi_i^j(t)) dt``.

    Arguments and errors as in :func:`glm_iterate`; ``gamma`` > 0 is the local learning rate.
    """
    check.whole("k", k)
    check.positive("gamma", gamma)
    squares = _squares(features)
    slope = _derivative(sigma)
    gamma = jnp.asarray(gamma, features.dtype)

    def moved(t: Array) -> Array:
        def step(_: int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            here, total = carry
            move = gamma * slope(here)
            return here - squares * move, total + move

        return jax.lax.fori_loop(0, k, step, (t, jnp.zeros_like(t)))[1]

    return _ridge(moved, features, nodes)


def affine_iterate(matrix: Array, offset: Array, k: int) -> ClosedForm:
    """``V^k(x) = A^k x + sum_{j<k} A^j b`` of ``V(x) = A x + b`` with symmetric A, for k >= 0.

    The potential is ``x' A^k x / 2 + x' sum_{j<k} A^j b``. With symmetric A, V is k-conservative for all k.

    Args:
      matrix: A, float[D, D].
      offset: b, float[D].

    Raises: ``ValueError`` if A is not symmetric (not checked under ``jit``).
    """
    _require_symmetric("matrix", matrix)
    power = jnp.linalg.matrix_power(matrix, k)
    constant = iterate(lambda v: matrix @ v + offset, k)(jnp.zeros_like(offset))
    return ClosedForm(lambda x: power @ x + constant, lambda x: x @ power @ x / 2 + x @ constant)


def quadratic_displacement(curvature: Array, optimum: Array, gamma: Real, k: int) -> ClosedForm:
    """``I - (I - gamma grad f)^k`` of the quadratic ``f(x) = (x - b)' A (x - b) / 2``.

    It is ``M (x - b)`` with ``M = I - (I - gamma A)^k``. The potential ``(x - b)' M (x - b) / 2`` is another quadratic
    with the same optimum.

    Args:
      curvature: A, float[D, D], symmetric.
      optimum: b, float[D].
      gamma: local learning rate > 0.
      k: local steps >= 1.

    Raises: ``ValueError`` if A is not symmetric (not checked under ``jit``).
    """
    _require_symmetric("curvature", curvature)
    moved = _reach(curvature, gamma, k)
    return ClosedForm(lambda x: moved @ (x - optimum), lambda x: (x - optimum) @ moved @ (x - optimum) / 2)


def quadratic_fixed_point(curvature: Array, optima: Array, gamma: Real, k: int) -> Array:
    """FedAvg's fixed point x_s* on C quadratics: ``(sum_c M_c)^-1 sum_c M_c b_c``; float[D].

    It minimises the surrogate loss, which for k >= 2 is in general not the minimiser of the mean loss.

    Args:
      curvature: float[C, D, D], symmetric.
      optima: b, float[C, D].
      gamma, k: as in :func:`quadratic_displacement`.

    Raises: ``ValueError`` if a matrix is not symmetric, or their sum of M_c is singular to rounding, so that there is
    no single fixed point (neither is checked under ``jit``).
    """
    for c, matrix in enumerate(curvature):
        _require_symmetric(f"curvature[{c}]", matrix)
    moved = jax.vmap(lambda a: _reach(a, gamma, k))(curvature)
    total = moved.sum(axis=0)
    if not isinstance(total, jax.core.Tracer):
        rank = int(np.linalg.matrix_rank(np.asarray(total), hermitian=True))
        allowed = f"{len(total)}, that of a mean loss with one minimum"
        check.require(rank == len(total), "rank of the sum of I - (I - gamma A)^k", rank, allowed)
    return jnp.linalg.solve(total, jnp.einsum("cij,cj->i", moved, optima))


def elementwise_iterate(function: Elementwise, k: int, *, nodes: int = 64) -> ClosedForm:
    """``V^k`` of a field that maps each coordinate by itself, ``V(x)_i = v_i(x_i)``, for k >= 0.

    The potential is ``sum_i int_0^{x_i} v_i^k(t) dt``, by a Gauss-Legendre rule with ``nodes`` points. If each v_i
    is continuous, V is k-conservative for all k; this includes every continuous field in one dimension.
    """
    iterated = iterate(function, k)
    return ClosedForm(iterated, lambda x: jnp.sum(_integral_from_zero(iterated, x, nodes)))


def _ridge(function: Elementwise, features: Array, nodes: int) -> ClosedForm:
    """``sum_i function(<x, z_i>)_i z_i`` and its potential ``sum_i int_0^<x, z_i> function(t)_i dt``."""

    def potential(x: Array) -> Array:
        return jnp.sum(_integral_from_zero(function, features @ x, nodes))

    return ClosedForm(lambda x: function(features @ x) @ features, potential)


def _integral_from_zero(function: Elementwise, upper: Array, nodes: int) -> Array:
    return upper * integrate(lambda s: function(s * upper), upper.dtype, nodes)


def _derivative(sigma: Elementwise) -> Elementwise:
    return jax.grad(lambda t: jnp.sum(sigma(t)))


def _reach(curvature: Array, gamma: Real, k: int) -> Array:
    """``I - (I - gamma A)^k``."""
    check.whole("k", k)
    check.positive("gamma", gamma)
    identity = jnp.eye(curvature.shape[-1], dtype=curvature.dtype)
    return identity - jnp.linalg.matrix_power(identity - jnp.asarray(gamma, curvature.dtype) * curvature, k)


def _squares(features: Array) -> Array:
    """``||z_i||^2``; float[m]. Raises ``ValueError`` if the rows are not orthogonal to rounding."""
    squares = jnp.sum(jnp.square(features), axis=1)
    if not isinstance(features, jax.core.Tracer):
        gram = np.asarray(features @ features.T)
        _require_small("features", gram - np.diag(np.diag(gram)), gram, "mutually orthogonal rows")
    return squares


def _require_symmetric(field: str, matrix: Array) -> None:
    if not isinstance(matrix, jax.core.Tracer):
        _require_small(field, np.asarray(matrix) - np.asarray(matrix).T, np.asarray(matrix), "a symmetric matrix")


def _require_small(field: str, error: np.ndarray, whole: np.ndarray, allowed: str) -> None:
    tolerance = float(jnp.finfo(whole.dtype).eps) ** 0.5 * np.abs(whole).max()
    check.require(bool(np.abs(error).max() <= tolerance), field, f"array off by {np.abs(error).max():.3g}", allowed)
