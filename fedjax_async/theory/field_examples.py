"""The example fields of Charles and Rush (2022), with the known properties of each.

:data:`EXAMPLES` has the fields of section 3 and appendix A by name. :func:`linear`, :func:`rotation` and :func:`cubic`
make further ones. :func:`closed_orbit` has the two clients on which FedAvg runs in a cycle (section 2.1 and appendix
C).

Beyond the paper: a cubic form of two variables is 2-conservative exactly if it is ``l <x, u>^3 + m <x, v>^3`` with
orthogonal u and v, so that by Theorem 3 it is k-conservative for all k (the paper has k = 3 only). The gradient of
``x^2 y`` is k-conservative exactly for odd k: with ``V^k = (X, Y)`` the quotient ``x X / (y Y)`` alternates between 2
and ``x^2 / y^2``, and for odd k the exponents p, q of X have ``p + 1 = 2 q``, as a potential needs.

Corrected here: eq. 17 lists the negative of eq. 2's V_s, and its four rows for a single region lack the factor 1/2 of
the mean over two clients. "I and (not III or not IV)" there must be read as "I, neither III nor IV", and likewise for
the other three. The orbit and its period 8 are right for the true mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.base import check
from fedjax_async.theory.fedavg_dynamics import mean_displacement
from fedjax_async.theory.vector_fields import Field, Loss
from fedjax_async.types import Array


class Example(NamedTuple):
    """A field on float[D] and its known properties."""

    name: str
    dim: int  # D
    field: Field  # V
    potential: Loss | None  # f with V = grad f; None if V is not conservative
    conservative: Callable[[int], bool | None]  # k >= 1 -> whether V is k-conservative; None: not known
    source: str


def linear(name: str, matrix: Sequence[Sequence[float]], source: str = "Appendix A.1") -> Example:
    """``V(x) = A x``: k-conservative exactly if A^k is symmetric (to 1e-12 of its largest entry)."""
    rows = np.asarray(matrix, float)

    def symmetric(k: int) -> bool:
        power = np.linalg.matrix_power(rows, k)
        return bool(np.abs(power - power.T).max() <= 1e-12 * np.abs(power).max())

    def field(x: Array) -> Array:
        return jnp.asarray(rows, x.dtype) @ x

    potential = (lambda x: jnp.vdot(x, field(x)) / 2) if symmetric(1) else None
    return Example(name, len(rows), field, potential, symmetric, source)


def rotation(j: int) -> Example:
    """Rotation of the plane by pi / j, j >= 1: k-conservative exactly if j divides k."""
    check.whole("j", j)
    cos, sin = np.cos(np.pi / j), np.sin(np.pi / j)
    turn = linear(f"rotation_{j}", [[cos, sin], [-sin, cos]])
    return turn._replace(conservative=lambda k: k % j == 0)


def cubic(name: str, a: float, b: float, c: float, d: float) -> Example:
    """The gradient of ``f(x, y) = a x^3 + b x^2 y + c x y^2 + d y^3``.

    It is 2-conservative exactly if :func:`cubic_condition` is 0, and then k-conservative for all k (see the module).
    Otherwise k >= 3 is left open. The condition is compared with 0 exactly, so use whole numbers.
    """
    holds = cubic_condition(a, b, c, d) == 0

    def potential(x: Array) -> Array:
        return a * x[0] ** 3 + b * x[0] ** 2 * x[1] + c * x[0] * x[1] ** 2 + d * x[1] ** 3

    def conservative(k: int) -> bool | None:
        return True if k == 1 or holds else (False if k == 2 else None)

    return Example(name, 2, jax.grad(potential), potential, conservative, "Appendix A.2")


def cubic_condition(a: float, b: float, c: float, d: float) -> float:
    """``g(a, b, c, d) = 3 a c - b^2 + 3 b d - c^2``; 0 exactly for 2-conservative cubic forms.

    Example:
      >>> cubic_condition(0, 1, 0, 0)  # x^2 y
      -1
      >>> cubic_condition(1, 3, 3, 1)  # (x + y)^3
      0
    """
    return 3 * a * c - b**2 + 3 * b * d - c**2


def _gradient(name: str, potential: Loss, conservative: Callable[[int], bool | None], source: str) -> Example:
    return Example(name, 2, jax.grad(potential), potential, conservative, source)


def _always(_: int) -> bool:
    return True


def _logistic(x: Array) -> Array:
    """Logistic loss of the features (1, 2) and (2, -1), which are orthogonal."""
    return jax.nn.softplus(-(x[0] + 2 * x[1])) + jax.nn.softplus(-(2 * x[0] - x[1]))


def _exponentials(x: Array) -> Array:
    return jnp.exp(x[0]) + jnp.exp(x[0] + x[1])


EXAMPLES: dict[str, Example] = {
    example.name: example
    for example in (
        _gradient("constant", lambda x: x[0] + 2 * x[1], _always, "Section 3, constant"),
        linear("symmetric", [[2, 1], [1, -1]], "Section 3, affine"),
        _gradient("univariate", lambda x: jnp.cosh(x[0]) - jnp.cos(x[1]), _always, "Section 3, univariate"),
        _gradient("logistic", _logistic, _always, "Theorem 3"),
        _gradient("exponential", lambda x: jnp.exp(x[0] + x[1]), _always, "Section 3.1, f_2"),
        _gradient("exponential_sum", _exponentials, {1: True, 2: False}.get, "Section 3.1, f_3"),
        linear("even_powers", [[1, 2], [1, -1]]),  # A^2 = 3 I
        linear("product_of_symmetric", [[0, -1], [1, 0]]),  # two symmetric matrices, one after the other
        rotation(2),
        rotation(3),
        rotation(4),
        # Section 3: (grad x^2 y)^2 = (4 x^3 y, 4 x^2 y^2)
        cubic("cubic_monomial", 0, 1, 0, 0)._replace(conservative=lambda k: k % 2 == 1),
        cubic("cubic_orthogonal", 9, 6, 18, -7),  # (2 x + y)^3 + (x - 2 y)^3
    )
}


class ClosedOrbit(NamedTuple):
    """Two clients with truncated quadratic losses on which FedAvg has a cycle; all maps take float[2]."""

    losses: tuple[Loss, Loss]  # f_1 and f_2 (eq. 4)
    limits: tuple[Field, Field]  # x -> the end of gradient descent from x, on f_1 and on f_2
    regions: Callable[[Array], Array]  # x -> bool[4]: whether x lies in I, II, III, IV (eq. 16)
    server_field: Field  # V_s after local training to convergence
    points: tuple[tuple[float, float], ...]  # the cycle for server learning rate 1 from (0, 1)
    period: int  # 8


def closed_orbit() -> ClosedOrbit:
    """Figure 1's clients: alpha, beta = 0.05, 5 and 5, 0.05, centres +-(1, 1) and +-(-1, 1) (eq. 4, appendix C).

    ``f_c = min(q_c(x - z_c), 1) + min(q_c(x + z_c), 1)`` with ``q_c(x, y) = beta_c x^2 / 2 + alpha_c y^2 / 2``. Let the
    local learning rate be below 2 / 5. Gradient descent ends at z_c from region I (client 1) or III (client 2), at -z_c
    from II or IV, and does not move elsewhere. At rate 0.39, k steps reduce the distance by ``0.9805^k``.

    A server learning rate eta < 1 also leads to a cycle, with a longer period (12 at 3/4, 20 at 1/2, 100 at 1/10).
    """
    weak, strong = 0.05, 5.0
    curvature = np.array([[strong, weak], [weak, strong]])  # of x and y, for each client
    centres = np.array([[1.0, 1.0], [-1.0, 1.0]])

    def squares(x: Array) -> Array:
        """The four quadratics, before truncation at 1; float[4] in the order of the regions."""
        offsets = jnp.stack([x - sign * z for z in jnp.asarray(centres, x.dtype) for sign in (1, -1)])
        weights = jnp.asarray(np.repeat(curvature, 2, axis=0) / 2, x.dtype)
        return jnp.sum(weights * jnp.square(offsets), axis=1)

    def regions(x: Array) -> Array:
        return squares(x) < 1

    def client(c: int) -> tuple[Loss, Field]:
        def loss(x: Array) -> Array:
            return jnp.sum(jnp.minimum(squares(x)[2 * c : 2 * c + 2], 1.0))

        def limit(x: Array) -> Array:
            near, opposite = regions(x)[2 * c], regions(x)[2 * c + 1]
            centre = jnp.asarray(centres[c], x.dtype)
            return jnp.where(near, centre, jnp.where(opposite, -centre, x))

        return loss, limit

    (loss_1, limit_1), (loss_2, limit_2) = client(0), client(1)
    half = ((0.0, 1.0), (-0.5, 1.0), (-1.0, 0.0), (-1.0, -0.5))
    points = (*half, *((-x + 0.0, -y + 0.0) for x, y in half))
    limits = (limit_1, limit_2)
    return ClosedOrbit((loss_1, loss_2), limits, regions, mean_displacement(limits), points, len(points))
