"""The surrogate loss: a function whose gradient is a given field, recovered by a line integral.

If the server field V_s is conservative, ``V_s = grad f_s``, and FedAvg is gradient descent on the surrogate loss f_s
(Theorem 11). :func:`surrogate_loss` integrates V_s from a given point x0 to x. The integral is independent of the path
if and only if the field is conservative, so a second path measures the error. ``closed_forms.py`` has the surrogates
that are known exactly.

Source: Charles and Rush (2022), sections 2 and 6; the quadrature and its error estimate are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedjax_async.base import check
from fedjax_async.theory.vector_fields import Field, checked, flattened, require_same_form
from fedjax_async.types import Array, Params


class Surrogate(NamedTuple):
    """A line integral; both float[]."""

    value: Array  # f_s(x) - f_s(x0)
    error: Array  # |difference between two paths|: the curl of the field between them and the quadrature's error


def surrogate_loss(field: Field, x: Params, x0: Params, *, nodes: int = 32, via: Params | None = None) -> Surrogate:
    """``f_s(x) - f_s(x0) = int_0^1 <V(x0 + s (x - x0)), x - x0> ds``, with the difference to a second path as error.

    The second path has two straight parts and a corner at ``via``. Each part is integrated by a Gauss-Legendre rule,
    which is exact for polynomial fields of degree below ``2 nodes``.

    Args:
      field: V, for FedAvg :func:`~fedjax_async.theory.fedavg_dynamics.server_field`.
      x, x0: pytrees of D floats of one dtype. The value is 0 at ``x = x0``.
      nodes: evaluations of the field on each straight part; in total 3 times as many.
      via: the corner. By default the middle between x0 and x, moved by half their distance in a pseudo-random direction
        orthogonal to ``x - x0``, which is the same in every call.

    Returns: value and error. The value may be differentiated: its gradient is V(x) if V is conservative. In one
      dimension every field is conservative and the error is that of the quadrature only. An error near zero does not
      prove that V is conservative: positive and negative curl between the two paths may cancel.

    Raises: ``ValueError`` if ``x0`` or ``via`` has another structure, shapes or dtypes than ``x``.

    Example:
      >>> half_square = surrogate_loss(lambda x: x, jnp.array([3.0, 4.0]), jnp.zeros(2))
      >>> print(f"{half_square.value:.4f}")
      12.5000
    """
    for name, other in (("x0", x0), ("via", x if via is None else via)):
        require_same_form(name, other, x, "x")
    end, unravel = flattened(x)
    start, _ = ravel_pytree(x0)
    same = checked(field)
    corner = _detour(start, end) if via is None else ravel_pytree(via)[0]

    def flat_field(v: Array) -> Array:
        return ravel_pytree(same(unravel(v)))[0]

    def straight(a: Array, b: Array) -> Array:
        return integrate(lambda s: jnp.vdot(flat_field(a + s * (b - a)), b - a), end.dtype, nodes)

    value = straight(start, end)
    return Surrogate(value, jnp.abs(straight(start, corner) + straight(corner, end) - value))


def integrate(function: Callable[[Array], Array], dtype: np.dtype, nodes: int) -> Array:
    """``int_0^1 function(s) ds`` by a Gauss-Legendre rule; ``function`` takes float[] and returns one array."""
    check.whole("nodes", nodes)
    points, weights = (jnp.asarray(each / 2, dtype) for each in np.polynomial.legendre.leggauss(nodes))
    return jnp.tensordot(weights, jax.lax.map(function, points + 0.5), 1)


def _detour(start: Array, end: Array) -> Array:
    """The middle of the segment, moved at a right angle by half its length; the middle itself in one dimension."""
    along = end - start
    square = jnp.vdot(along, along)
    random = jax.random.normal(jax.random.key(0), along.shape, along.dtype)
    safe = jnp.where(square > 0, square, jnp.ones_like(square))
    aside = random - jnp.vdot(random, along) / safe * along
    size = jnp.vdot(aside, aside)
    # in one dimension ``aside`` is nothing but rounding
    turn = jnp.sqrt(jnp.where(along.size > 1, square / jnp.where(size > 0, size, jnp.ones_like(size)), 0.0))
    return jax.lax.stop_gradient((start + end) / 2 + turn / 2 * aside)
