"""Properties that FedAvg's surrogate loss inherits from the clients' losses, and the rates of FedAvg that follow.

All clients are k-conservative with smooth losses f_c of Hessians between alpha and beta, take k local steps at learning
rate gamma, and average to ``V_s = grad f_s``, whose minimiser x_s* need not be that of the mean loss. There is no
assumption on heterogeneity. ``lambda = (beta - alpha) / (beta + alpha)`` throughout.

| function | claim | holds for |
| --- | --- | --- |
| :func:`iterate_spectrum` | Proposition 5 | ``(grad f)^j`` where grad f is 1- to j-conservative |
| :func:`surrogate_constants` | Lemma 10 | strongly convex, convex and weakly convex f_c |
| :func:`fedavg_distance_bound` | Theorem 12 | alpha > 0, gamma = 2 / (alpha + beta), eta = 1 |
| :func:`fedavg_gap_bound` | Theorem 13 | alpha = 0, gamma = 1 / beta, eta = 1, f_s with a minimiser |
| :func:`fedavg_sharp_gap_bound` | Theorem 13, the best constant | as Theorem 13; attained for every k and t |
| :func:`fedavg_quadratic_gap_bound` | Theorem 13, for quadratics | as Theorem 13, quadratic f_c; attained |
| :func:`fedavgm_distance_bound` | Theorem 14 | as Theorem 12, quadratic f_c only |

What the paper does not say, each shown by a test:

- Proposition 5 prints the exponent k for the j-th iterate; its proof has j.
- Theorem 13 concludes that f_s has a finite minimiser since every client has one. This is false even for k = 1:
  ``(sqrt(x^2 + y^2) - y)^2 / 2`` and ``(x - 1)^2 / 2`` are convex, smooth outside the origin, have Lipschitz gradients
  and minimisers, but their mean approaches 0 only as y goes to infinity. If a minimiser exists, the bound holds.
- Theorem 13 is twice too large for large t, and quadratics stay below 1/e of that (0.18 of the printed bound). Neither
  depends on k: the hardest f_s is as hard for every k, so in f_s FedAvg's local steps accelerate nothing. (They do in
  f for equal clients, where t rounds are k t steps.)
- Theorem 14 has the factor 1 in place of ``1 + (1 + q) t``, and fails at t = 1. With the corrected factor it holds
  for quadratics. For other losses it fails with any factor: heavy ball with these parameters may cycle on a strongly
  convex function of one variable (Lessard, Recht and Packard, 2016, section 4.6), and such functions are
  k-conservative for all k. (The function is piecewise quadratic. The cycle stays away from its kinks, so a smooth
  function has the same cycle.)

Source: Charles and Rush (2022), sections 5 and 6 and appendix B.
"""

from __future__ import annotations

from typing import NamedTuple

from fedjax_async.base import check
from fedjax_async.theory.rates import Quantity, as_reals, check_each


class Spectrum(NamedTuple):
    """Bounds on the eigenvalues of a symmetric Jacobian, which is the Hessian of the field's potential."""

    low: float  # > 0: strongly convex; < 0: (-low)-weakly convex
    high: float


class HeavyBall(NamedTuple):
    """Server optimiser of Theorem 14: ``optax.sgd(lr, momentum)``."""

    lr: float  # eta
    momentum: float  # m = q^2
    rate: float  # q, the factor by which the distance falls in one round, up to a polynomial in t


def iterate_spectrum(low: float, high: float, j: int) -> Spectrum:
    """Proposition 5: bounds for ``(grad f)^j`` from ``low <= J(grad f) <= high``.

    ``[low^j, high^j]`` for low >= 0 (item 1), else ``[-l^j, l^j]`` with ``l = max(|low|, |high|)`` (item 2). Requires
    that grad f is i-conservative for all i <= j. Each Jacobian is then a product of symmetric matrices that commute.

    Example:
      >>> iterate_spectrum(0.5, 2.0, 3)
      Spectrum(low=0.125, high=8.0)
    """
    check.whole("j", j)
    check.in_range("high", high, low, float("inf"))
    if low >= 0:
        return Spectrum(low**j, high**j)
    largest = max(-low, high) ** j
    return Spectrum(-largest, largest)


def surrogate_constants(alpha: float, beta: float, gamma: float, k: int) -> Spectrum:
    """Lemma 10: bounds for the Hessian of h_k, ``grad h_k = I - (I - gamma grad f)^k``, and of FedAvg's surrogate loss.

    | alpha | condition on gamma | low | high |
    | --- | --- | --- | --- |
    | > 0 (item 1) | ``<= 2 / (alpha + beta)`` | ``1 - (1 - gamma alpha)^k`` | ``1 + (1 - gamma alpha)^k`` |
    | 0 (item 2) | ``<= 2 / beta`` | 0 | 2 |
    | < 0 (item 4, delta = -alpha) | ``<= 2 / beta`` | ``1 - (1 + gamma delta)^k`` | ``1 + (1 + gamma delta)^k`` |

    For alpha >= 0 and ``gamma <= 1 / beta``, high is 1 (item 2).

    Args:
      alpha: smallest eigenvalue of f's Hessians; if it is negative, f is (-alpha)-weakly convex.
      beta: Lipschitz constant of grad f, > 0 and at least |alpha|.
      gamma: local learning rate > 0.
      k: local steps.

    Raises: ``ValueError`` if a value or gamma's condition is out of range.
    """
    check.positive("beta", beta)
    check.in_range("alpha", alpha, -beta, beta)
    check.positive("gamma", gamma)
    check.whole("k", k)
    largest = 2 / (beta + max(alpha, 0))
    check.in_range("gamma", gamma, 0, largest)
    power = (1 - gamma * alpha) ** k
    return Spectrum(1 - power, 1 if alpha >= 0 and gamma * beta <= 1 else 1 + power)


def fedavg_client_lr(alpha: float, beta: float) -> float:
    """``gamma = 2 / (alpha + beta)``, the local learning rate of Theorems 12 and 14."""
    _check_convexity(alpha, beta)
    return 2 / (alpha + beta)


def fedavg_distance_bound(alpha: float, beta: float, k: int, t: Quantity, distance: Quantity) -> Quantity:
    """Theorem 12, eq. 11: ``||x_t - x_s*|| <= lambda^(k t) ||x_0 - x_s*||``.

    FedAvg with server learning rate 1 and local learning rate :func:`fedavg_client_lr`. Equality holds for equal
    quadratic clients if ``x_0 - x_s*`` is an eigenvector of eigenvalue alpha or beta. (Appendix B.1 prints t + 1 for t
    on the left-hand side.)

    Args:
      alpha, beta: bounds on the Hessians of all f_c, 0 < alpha <= beta.
      k: local steps.
      t: rounds >= 0, a number or an array.
      distance: ``||x_0 - x_s*||`` to the fixed point, not to the minimiser of the mean loss.
    """
    t, distance = _rounds(t, 0, distance)
    return _contraction(alpha, beta, k) ** t * distance


def fedavg_gap_bound(t: Quantity, distance: Quantity) -> Quantity:
    """Theorem 13, eq. 12: ``f_s(x_t) - f_s(x_s*) <= ||x_0 - x_s*||^2 / (2 t)`` for t >= 1.

    For convex clients with beta-Lipschitz gradients, gamma = 1 / beta and server learning rate 1. It needs a minimiser
    x_s* of f_s (see the module). Neither side depends on k except through f_s. (Appendix B.2 prints the distance
    without its square.)

    Args:
      t: rounds >= 1, a number or an array.
      distance: ``||x_0 - x_s*||``.
    """
    t, distance = _rounds(t, 1, distance)
    return distance**2 / (2 * t)


def fedavg_sharp_gap_bound(t: Quantity, distance: Quantity) -> Quantity:
    """Theorem 13 with the best constant: ``f_s(x_t) - f_s(x_s*) <= ||x_0 - x_s*||^2 / (4 t + 2)`` for t >= 0.

    f_s is convex with a 1-Lipschitz gradient (Lemma 10, item 2), and FedAvg is gradient descent on it at rate 1; this
    is the sharp bound of gradient descent (Drori and Teboulle, 2014, theorem 3.1). It is ``t / (2 t + 1)`` of eq. 12.
    For every k it is attained, by equal clients with the Huber loss of threshold :func:`fedavg_hardest_threshold`.

    Args: as in :func:`fedavg_gap_bound`.
    """
    t, distance = _rounds(t, 0, distance)
    return distance**2 / (4 * t + 2)


def fedavg_hardest_threshold(k: int, t: int, distance: float) -> float:
    """Threshold of the Huber losses that attain :func:`fedavg_sharp_gap_bound` after t rounds of k steps at rate 1.

    With slope ``min(|x|, threshold)``, k steps end at 0 from ``|x| <= k threshold`` and else move by ``k threshold``.
    So the surrogate is the Huber loss of threshold ``k threshold``, the hardest for t steps if that is
    ``distance / (2 t + 1)``.
    """
    check.whole("k", k)
    check.non_negative("t", t)
    check.positive("distance", distance)
    return distance / (k * (2 * t + 1))


def fedavg_quadratic_gap_bound(t: Quantity, distance: Quantity) -> Quantity:
    """Theorem 13 for quadratic clients: ``(2 t / (2 t + 1))^(2 t) ||x_0 - x_s*||^2 / (4 t + 2)`` for t >= 1.

    An error along an eigenvector of V_s with eigenvalue s in [0, 1] is multiplied by 1 - s in a round, so its gap is
    ``s (1 - s)^(2 t) / 2`` of its squared distance: at most at ``s = 1 / (2 t + 1)``, where equality holds. Relative to
    eq. 12 that is 0.148 for t = 1 and rises to ``1 / (2 e) = 0.184``.

    Args: as in :func:`fedavg_gap_bound`.
    """
    t, distance = _rounds(t, 1, distance)
    return (2 * t / (2 * t + 1)) ** (2 * t) * fedavg_sharp_gap_bound(t, distance)


def fedavgm_parameters(alpha: float, beta: float, k: int) -> HeavyBall:
    """Learning rate and momentum of Theorem 14 (appendix B.1), with ``kappa = (1 + lambda^k) / (1 - lambda^k)``.

    ``eta = 4 / (sqrt(1 + lambda^k) + sqrt(1 - lambda^k))^2``, ``q = (sqrt(kappa) - 1) / (sqrt(kappa) + 1)``, m = q^2.
    """
    power = _contraction(alpha, beta, k)
    high, low = (1 + power) ** 0.5, (1 - power) ** 0.5
    rate = (high - low) / (high + low)
    return HeavyBall(4 / (high + low) ** 2, rate**2, rate)


def fedavgm_distance_bound(alpha: float, beta: float, k: int, t: Quantity, distance: Quantity) -> Quantity:
    """Theorem 14, corrected: ``||x_t - x_s*|| <= (1 + (1 + q) t) q^t ||x_0 - x_s*||`` for quadratic clients.

    FedAvgM with :func:`fedavgm_parameters` and local learning rate :func:`fedavg_client_lr`. Eq. 14 lacks the factor.
    After t rounds, an error along an eigenvector of V_s with eigenvalue ``1 - lambda^k`` is ``(1 + (1 - q) t) q^t``
    times the first error. With eigenvalue ``1 + lambda^k`` (reached for odd k) the factor is
    ``(1 + (1 + q) t) (-q)^t``, which attains the bound.

    Args: as in :func:`fedavg_distance_bound`.
    """
    t, distance = _rounds(t, 0, distance)
    rate = fedavgm_parameters(alpha, beta, k).rate
    return (1 + (1 + rate) * t) * rate**t * distance


def _contraction(alpha: float, beta: float, k: int) -> float:
    """``lambda^k``, the factor of one client's k steps."""
    _check_convexity(alpha, beta)
    check.whole("k", k)
    return ((beta - alpha) / (beta + alpha)) ** k


def _check_convexity(alpha: float, beta: float) -> None:
    check.positive("alpha", alpha)
    check.positive("beta", beta)
    check.in_range("beta", beta, alpha, float("inf"))


def _rounds(t: Quantity, fewest: int, distance: Quantity) -> tuple[Quantity, Quantity]:
    """Both, see :func:`as_reals`."""
    check_each(check.non_negative, "t", t)
    check_each(check.in_range, "t", t, fewest, float("inf"))
    check_each(check.non_negative, "distance", distance)
    return as_reals((t, distance))
