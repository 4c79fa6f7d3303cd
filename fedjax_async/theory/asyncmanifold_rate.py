"""AsyncManifold's convergence bound (eq. 69) and rate (Theorem 1), as printed and as derived again from its proof.

The bound is on ``(1/T) sum_s E ||grad L(Theta^s)||^2`` over T server steps along the uncorrected displacement. As
printed, ``O(...)`` has the constant 1 here. Derived again, the bound has the constants of the proof; it holds for equal
participation, in a Euclidean ambient space (C = 0) or on an embedded manifold, as follows.

A curved ambient manifold M, whose second fundamental form is at most C in norm. There the printed theorem fails. Eq. 36
to 41 compare the steps with the gradient in the surrounding space; the steps are tangent to M, and at a minimum on M
the gradient keeps its normal part. On the unit circle (C = 1), ``|x - (2, 0)|^2 / 2`` has its minimum at (1, 0) with a
gradient of length 1, while the right-hand side tends to 0. The bound holds for the Riemannian gradient, the projection
P of the gradient on the tangent space, if the server steps along the geodesic, to ``exp_Theta(-eta_g P Delta)``; Q and
D then compare its curve with this geodesic:

- ``|exp_x(v) - x - v| <= C |v|^2 / 2``, since a geodesic of unit speed has an acceleration of at most C. This replaces
  the Taylor expansion of eqs. 45 to 48: no term in eta_l^6, no bound of the derivative of the second fundamental form.
- ``|P_x - P_y| <= C d(x, y)``, so ``|grad L(x) - grad L(y)| <= (L_F + C G) d(x, y)`` for the Riemannian gradients, and
  the Riemannian Hessian is at most ``L_F + C G``. So this replaces L_F in the descent lemma and in the drift.
- Distances on M are at most the lengths of the paths. So eqs. 56 to 64 hold for them, with G_2 the bound of the
  minibatch gradients with the proximal term, and L_N that of the proximal gradient on M.

The curvature adds ``eta_l^2 C^2 G_2^4 / 2`` to the bound. With C = 0 it is that of Euclidean space.

What the paper does not say, each shown by a test:

- With ``eta_l ~ 1 / sqrt(T)`` the first term of eq. 69 falls as ``T^(-1/2)``. Theorem 1 prints ``T^(-3/2)``.
- ``sum_s (L(s) - Q L(s+1))`` is at most ``L(0) - L* + T Psi``, as in eq. 69, and at most ``L(0) - Q L* + (T - 1) Psi``.
  Theorem 1 adds the first part of the second bound and the ``T Psi`` of the first, which is too small for Q > 1. The
  extremes in Psi are those of the models after a step, ``t = 1, ..., T``.
- Eq. 66 loses ``sigma_l^2`` in its mu^2 term: it puts ``4 G^2`` in place of ``4 G^2 + sigma_l^2``.
- Eq. 61 drops a term of the growth factor, ``K eta_l^2 mu^2 L_N^2 <= 1 / K``; eq. 63 holds all the same.
- Assumption 6 for all positions on a curve requires Q <= 1 if the loss is positive, since the curve and the line meet
  at their ends. The proof uses it at the position of the step only, where Q > 1 is possible.

Source: AsyncManifold (2025), Theorem 1 and appendix A.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_async.base import check
from fedjax_async.theory.rates import Quantity, as_reals, check_each, numbers_of, require_admissible


class ManifoldConstants(NamedTuple):
    """The arguments of the bound: numbers, or arrays that broadcast, for curves. Losses [l], parameters [w].

    The losses may be any finite numbers with ``least <= first`` and ``lowest <= highest``. ``server_steps``,
    ``local_steps``, ``lr``, ``server_lr``, ``smoothness``, ``quality`` and ``proximal_smoothness`` must be > 0, all
    others >= 0. ``estimate`` measures smoothness, gradients and variance, :func:`curve_probe` Q, D and S along a run.
    """

    first: Quantity  # L(Theta^0), the loss of the initial model [l]
    least: Quantity  # L(Theta^*), the lowest loss that any model has; 0 is a lower bound of cross-entropies [l]
    lowest: Quantity  # the lowest loss of the models after a server step of the run [l]
    highest: Quantity  # the highest loss of these models [l]
    server_steps: Quantity  # T, server steps of the run
    local_steps: Quantity  # K, local steps of a job
    lr: Quantity  # eta_l, the clients' learning rate [w^2/l]
    server_lr: Quantity  # eta_g, the share of the way to a client's end that the server steps
    smoothness: Quantity  # L_F, Lipschitz constant of the gradients of the clients' losses [l/w^2]
    gradient: Quantity  # G, bound of the norm of these gradients [l/w]
    variance: Quantity  # sigma_l^2, bound of the variance of a minibatch gradient [l^2/w^2]
    staleness: Quantity = 0.0  # S, bound of the server steps between a client's start and its arrival
    quality: Quantity = 1.0  # Q, the loss on the line over that on the curve, at the position of the step
    divergence: Quantity = 1.0  # D, the distance along the curve over that along the line
    mu: Quantity = 0.0  # the weight of the proximal term [l/w^2]
    proximal_smoothness: Quantity = 1.0  # L_N, Lipschitz constant of the gradient of the squared proximal distance
    curvature: Quantity = 0.0  # C, bound of the second fundamental form of the ambient manifold; 0: Euclidean [1/w]
    penalised_gradient: Quantity = 0.0  # G_2, bound of the (minibatch) gradients with the proximal term [l/w]


class ManifoldBound(NamedTuple):
    """The terms of the bound [l^2/w^2]."""

    optimisation: Quantity  # of the gap between the first and the lowest loss
    quality: Quantity  # of Psi: below 0 for Q > 1
    step: Quantity  # of the length of a step
    drift: Quantity  # A_D: of the clients, and of the server since their start
    curvature: Quantity  # A_Gamma: 0 in Euclidean space

    @property
    def total(self) -> Quantity:
        """The sum: the bound itself."""
        return sum(self[1:], self[0])


LOSSES = ("first", "least", "lowest", "highest")
POSITIVE = ("server_steps", "local_steps", "lr", "server_lr", "smoothness", "quality", "proximal_smoothness")


def _checked(c: ManifoldConstants) -> ManifoldConstants:
    for name, value in c._asdict().items():
        range_of = "" if name in LOSSES else " > 0" if name in POSITIVE else " >= 0"
        for index, number in numbers_of(value):
            fits = check.is_real(number) and (name in LOSSES or number > 0 or (number == 0 and name not in POSITIVE))
            check.require(bool(fits), name + index, number, f"a finite number{range_of}")
    shapes = {name: np.shape(value) for name, value in c._asdict().items() if np.shape(value) != ()}
    try:
        np.broadcast_shapes(*shapes.values())
    except ValueError:
        check.require(False, "shapes", shapes, "such that the arrays broadcast")
    for low, high in (("least", "first"), ("lowest", "highest")):
        pair = getattr(c, low), getattr(c, high)
        if not any(isinstance(each, jax.core.Tracer) for each in pair):
            ordered = bool(np.all(np.asarray(pair[0]) <= np.asarray(pair[1])))
            check.require(ordered, low, pair[0], f"at most {high}, {check.shown(pair[1])}")
    return as_reals(c)


def quality_term(c: ManifoldConstants) -> Quantity:
    """``Psi = (1 - Q) min_t L(Theta^t)`` for Q >= 1, else ``(1 - Q) max_t L(Theta^t)`` (eq. 23)."""
    over: Any = c.quality >= 1  # a truth value, or an array of them
    return (1 - c.quality) * (over * c.lowest + (1 - over) * c.highest)


def manifold_bound(constants: ManifoldConstants, *, printed: bool = False, beyond: bool = False) -> ManifoldBound:
    """Eq. 69, derived again; or as ``printed``, with the constant 1 in place of each O.

    With ``curvature`` > 0 it bounds the mean squared Riemannian gradient, see the top of this file; the printed formula
    then bounds nothing.

    ``beyond``: compute it for learning rates above :func:`largest_lr_manifold` too, where it claims nothing.

    Raises: ``ValueError`` with the first constant that is out of range (in an array, with its index), or with eta_l and
    its largest admissible value.
    """
    c = _checked(constants)
    if not beyond:
        require_admissible("lr", c.lr, largest_lr_manifold(c), "eq. 63")
    optimisation, step, of_clients, of_prox = (1, 1, 1, 1) if printed else (2, 5, 40, 5)
    noisy = 4 * c.gradient**2 + c.variance
    of_penalty = c.gradient**2 if printed else noisy
    move = c.local_steps * c.server_lr * c.lr
    smoothness = c.smoothness if printed else c.smoothness + c.curvature * c.gradient
    late = smoothness**2 * (1 + (c.staleness * c.divergence * c.server_lr) ** 2) * noisy
    drift = of_clients * late + of_prox * (c.mu * c.proximal_smoothness) ** 2 * of_penalty
    bent = c.penalised_gradient**4 * c.curvature**2
    bent = bent * (1 + (c.lr * c.penalised_gradient) ** 2) if printed else bent / 2
    return ManifoldBound(
        optimisation * (c.first - c.least) / (c.server_steps * move),
        optimisation * quality_term(c) / move,
        step * smoothness * move * noisy,
        (c.local_steps * c.lr) ** 2 * drift,
        c.lr**2 * bent,
    )


def largest_lr_manifold(constants: ManifoldConstants) -> Quantity:
    """Largest eta_l that eq. 63 admits, ``1 / (mu L_N K)``; infinite for mu = 0. The field ``lr`` is not used."""
    c = _checked(constants._replace(lr=1.0))
    slope = c.mu * c.proximal_smoothness * c.local_steps
    with np.errstate(divide="ignore"):
        return 1.0 / slope if isinstance(slope, jax.Array) else np.divide(1.0, slope)


def manifold_rate(constants: ManifoldConstants, *, printed: bool = False) -> ManifoldBound:
    """Theorem 1: the bound at ``eta_l = 1 / (mu L_N K sqrt(T))``; the field ``lr`` is not used.

    Derived again, it is eq. 69 at this learning rate. As ``printed``, it is eq. 22 with the constant 1 in place of each
    O; it depends only on T, the losses, G, G_2, sigma_l, S, D, Q and C.

    Raises: ``ValueError`` with the first constant that is out of range; mu must be > 0.
    """
    c = _checked(constants._replace(lr=1.0))
    check_each(check.positive, "mu", c.mu)
    root = c.server_steps**0.5
    if not printed:
        lr = 1 / (c.mu * c.proximal_smoothness * c.local_steps * root)
        return manifold_bound(c._replace(lr=lr))
    noisy = 4 * c.gradient**2 + c.variance
    bent = c.curvature**2 * (c.penalised_gradient**4 / c.server_steps + c.penalised_gradient**6 / c.server_steps**2)
    late = (1 + (c.staleness * c.divergence) ** 2) * noisy + c.gradient**2
    gap = (c.first - c.quality * c.least) / (c.server_steps * root)
    return ManifoldBound(gap, quality_term(c) * root, noisy / root, late / c.server_steps, bent)


def fedasync_bound(constants: ManifoldConstants) -> ManifoldBound:
    """The corollary for FedAsync with a dominance penalty: steps on the line, ``Q = D = 1`` and ``C = 0``."""
    return manifold_bound(constants._replace(quality=1.0, divergence=1.0, curvature=0.0))
