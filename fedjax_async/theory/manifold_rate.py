"""AsyncManifold's convergence bound (eq. 69) and rate (Theorem 1), as printed and as derived again from its proof.

The bound is on ``(1/T) sum_s E ||grad L(Theta^s)||^2`` over T server steps of the uncorrected displacement. ``O(...)``
as printed has the constant 1 here; derived again, the bound has the constants of the proof, and holds for a Euclidean
ambient space (C = 0) and equal participation.

What the paper does not say, each shown by a test:

- With ``eta_l ~ 1 / sqrt(T)`` the first term of eq. 69 falls as ``T^(-1/2)``. Theorem 1 prints ``T^(-3/2)``.
- ``sum_s (L(s) - Q L(s+1))`` is at most ``L(0) - L* + T Psi``, as in eq. 69, and at most ``L(0) - Q L* + (T - 1) Psi``.
  Theorem 1 has the first part of the second and ``T Psi`` of the first, which is too small for Q > 1. The extremes in
  Psi are those of the models after a step, ``t = 1, ..., T``.
- Eq. 66 loses ``sigma_l^2`` in its mu^2 term: it puts ``4 G^2`` in place of ``4 G^2 + sigma_l^2``.
- Eq. 61 drops a term of the growth factor, ``K eta_l^2 mu^2 L_N^2 <= 1 / K``; eq. 63 holds all the same.
- Assumption 6 for all positions on a curve requires Q <= 1 if the loss is positive, since the curve and the line meet
  at their ends. The proof uses it at the position of the step only, where Q > 1 is possible.

Source: AsyncManifold (2025), Theorem 1 and appendix A.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedjax_async import check
from fedjax_async.theory.rates import require_admissible


class ManifoldConstants(NamedTuple):
    """The arguments of the bound; arrays that broadcast, for curves. Losses [l], parameters [w], gradients [l/w]."""

    first: Any  # L(Theta^0) [l]
    least: Any  # L(Theta^*) [l]
    lowest: Any  # the lowest loss of the models after a step [l]
    highest: Any  # the highest [l]
    steps: Any  # T, server steps
    local_steps: Any  # K
    lr: Any  # eta_l [w^2/l]
    server_lr: Any  # eta_g
    smoothness: Any  # L_F [l/w^2]
    gradient: Any  # G, of the clients' losses [l/w]
    variance: Any  # sigma_l^2, of a minibatch gradient [l^2/w^2]
    staleness: Any = 0.0  # S
    quality: Any = 1.0  # Q, the loss on the line over that on the curve, at the position of the step
    divergence: Any = 1.0  # D, the distance along the curve over that along the line
    mu: Any = 0.0  # the weight of the proximal term [l/w^2]
    proximal_smoothness: Any = 1.0  # L_N
    curvature: Any = 0.0  # C, of the ambient manifold; 0: Euclidean [1/w]
    penalised_gradient: Any = 0.0  # G_2, of the clients' losses with the proximal term [l/w]


class ManifoldBound(NamedTuple):
    """The terms of the bound [l^2/w^2]."""

    optimisation: Any  # of the loss that is left to lose
    quality: Any  # Psi: below 0 for Q > 1
    step: Any  # of the length of a step
    drift: Any  # A_D: of clients and of the server meanwhile
    curvature: Any  # A_Gamma: 0 in Euclidean space

    @property
    def total(self) -> Any:
        """The sum: the bound itself."""
        return sum(self[1:], self[0])


def _checked(c: ManifoldConstants) -> ManifoldConstants:
    for name in ("steps", "local_steps", "lr", "server_lr", "smoothness", "quality", "proximal_smoothness"):
        check.positive(name, getattr(c, name))
    for name in ("gradient", "variance", "staleness", "divergence", "mu", "curvature", "penalised_gradient"):
        check.non_negative(name, getattr(c, name))
    return c


def quality_term(c: ManifoldConstants) -> Any:
    """``Psi = (1 - Q) min_t L(Theta^t)`` for Q >= 1, else ``(1 - Q) max_t L(Theta^t)`` (eq. 23)."""
    over = c.quality >= 1
    return (1 - c.quality) * (over * c.lowest + (1 - over) * c.highest)


def manifold_bound(constants: ManifoldConstants, *, printed: bool = False, beyond: bool = False) -> ManifoldBound:
    """Eq. 69; derived again, or ``printed`` with the constant 1 in place of each O.

    ``beyond``: compute it for learning rates above :func:`largest_lr_manifold`, too, where it claims nothing.

    Raises: ``ValueError`` naming the first constant that is out of range, or eta_l and the largest that is admissible.
    """
    c = _checked(constants)
    if not beyond:
        require_admissible("lr", c.lr, largest_lr_manifold(c), "eq. 63")
    optimisation, step, of_clients, of_prox = (1, 1, 1, 1) if printed else (2, 5, 40, 5)
    noisy = 4 * c.gradient**2 + c.variance
    of_penalty = c.gradient**2 if printed else noisy
    move = c.local_steps * c.server_lr * c.lr
    late = c.smoothness**2 * (1 + (c.staleness * c.divergence * c.server_lr) ** 2) * noisy
    drift = of_clients * late + of_prox * (c.mu * c.proximal_smoothness) ** 2 * of_penalty
    bent = c.penalised_gradient**4 * c.curvature**2 * (1 + (c.lr * c.penalised_gradient) ** 2)
    return ManifoldBound(
        optimisation * (c.first - c.least) / (c.steps * move),
        optimisation * quality_term(c) / move,
        step * c.smoothness * move * noisy,
        (c.local_steps * c.lr) ** 2 * drift,
        c.lr**2 * bent,
    )


def largest_lr_manifold(constants: ManifoldConstants) -> Any:
    """Largest eta_l of eq. 63, ``1 / (mu L_N K)``; infinite for mu = 0. The field ``lr`` is not used."""
    c = _checked(constants._replace(lr=1.0))
    with np.errstate(divide="ignore"):
        return np.divide(1.0, c.mu * c.proximal_smoothness * c.local_steps)


def manifold_rate(constants: ManifoldConstants, *, printed: bool = False) -> ManifoldBound:
    """Theorem 1: the bound at ``eta_l = 1 / (mu L_N K sqrt(T))``; the field ``lr`` is not used.

    Derived again it is eq. 69 at this learning rate. ``printed`` it is eq. 22 with the constant 1 in place of each O,
    which keeps T, the losses, G, G_2, sigma_l, S, D, Q and C only.

    Raises: ``ValueError`` naming the first constant that is out of range; mu must be > 0.
    """
    c = _checked(constants._replace(lr=1.0))
    check.positive("mu", c.mu)
    root = c.steps**0.5
    if not printed:
        lr = 1 / (c.mu * c.proximal_smoothness * c.local_steps * root)
        return manifold_bound(c._replace(lr=lr))
    noisy = 4 * c.gradient**2 + c.variance
    bent = c.curvature**2 * (c.penalised_gradient**4 / c.steps + c.penalised_gradient**6 / c.steps**2)
    late = (1 + (c.staleness * c.divergence) ** 2) * noisy + c.gradient**2
    gap = (c.first - c.quality * c.least) / (c.steps * root)
    return ManifoldBound(gap, quality_term(c) * root, noisy / root, late / c.steps, bent)


def fedasync_bound(constants: ManifoldConstants) -> ManifoldBound:
    """The corollary for FedAsync with a dominance penalty: steps on the line, ``Q = D = 1`` and ``C = 0``."""
    return manifold_bound(constants._replace(quality=1.0, divergence=1.0, curvature=0.0))
