"""Bounds of FedBuff and of FedAsync as functions of a problem's constants.

:func:`fedbuff_bound` is Theorem 1 of Nguyen et al. for a constant local learning rate. :func:`fedasync_gap_bound` has
the factor for each server step from Xie et al.'s analysis of strongly convex losses. The paper hides the constants of
noise and delay in an O; here they are derived, for clients that share one loss. Its theorem on weakly convex losses
hides all constants in an O, so there is no value to compute. Fields of ``BufferedConstants`` may be arrays that
broadcast.

FedBuff's theorem is written from memory: neither its paper nor a copy of the theorem was at hand. The terms are tested
against runs on quadratics, which they bound, not against the paper's text.

Sources: Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek and Huba, "Federated Learning with Buffered Asynchronous
Aggregation" (2022), Theorem 1; Xie, Koyejo and Gupta, "Asynchronous Federated Optimization" (2019).
"""

from __future__ import annotations

from typing import NamedTuple

from fedjax_async.base import check
from fedjax_async.theory.rates import Bound, Quantity, as_reals, check_each, require_admissible


class BufferedConstants(NamedTuple):
    """The arguments of FedBuff's bound. Losses [l], parameters [w], gradients [l/w]."""

    gap: Quantity  # f(w_0) - f* [l]
    server_steps: Quantity  # T, server steps
    local_steps: Quantity  # Q
    lr: Quantity  # eta_l [w^2/l]
    server_lr: Quantity  # eta_g
    smoothness: Quantity  # L, the largest over clients [l/w^2]
    variance: Quantity  # sigma_l^2 of one minibatch gradient [l^2/w^2]
    heterogeneity: Quantity  # sigma_g^2 = mean of ||grad F_i - grad f||^2 [l^2/w^2]
    squared_gradient: Quantity  # G^2 >= ||grad F_i||^2 [l^2/w^2]; Nguyen et al. write G for the square
    staleness: Quantity  # tau_max, in server steps, with the run's size of the buffer


def fedbuff_bound(constants: BufferedConstants, *, beyond: bool = False) -> Bound:
    """FedBuff, Theorem 1: bounds ``(1/T) sum_t E ||grad f(w_t)||^2`` for ``eta_g eta_l Q <= 1/L``.

    ``2 gap / (eta_g eta_l Q T) + L eta_g eta_l sigma_l^2 / 2
    + 3 L^2 Q^2 eta_l^2 (eta_g^2 tau_max^2 + 1) (sigma_l^2 + sigma_g^2 + G^2)``

    It assumes that uploads have no staleness weights and that all clients are equally likely at each arrival. In
    :class:`Bound`, G^2 is counted with the heterogeneity. ``beyond``: compute it for larger learning rates too, where
    the theorem claims nothing.

    Raises: ``ValueError`` with the first constant that is out of range, or with eta_l and its largest admissible value.
    """
    c = as_reals(constants)
    for name in ("server_steps", "local_steps", "lr", "server_lr", "smoothness"):
        check_each(check.positive, name, getattr(c, name))
    for name in ("gap", "variance", "heterogeneity", "squared_gradient", "staleness"):
        check_each(check.non_negative, name, getattr(c, name))
    if not beyond:
        require_admissible("lr", c.lr, largest_lr_fedbuff(c), "Theorem 1")
    move = c.server_lr * c.lr * c.local_steps
    late = 3 * (c.smoothness * c.local_steps * c.lr) ** 2 * ((c.server_lr * c.staleness) ** 2 + 1)
    noise = c.smoothness * c.server_lr * c.lr / 2 + late
    return Bound(2 * c.gap / (move * c.server_steps), noise * c.variance, late * (c.heterogeneity + c.squared_gradient))


def largest_lr_fedbuff(constants: BufferedConstants) -> Quantity:
    """Largest eta_l that Theorem 1 admits: ``1 / (L eta_g Q)``; the field ``lr`` is not used."""
    c = as_reals(constants)
    for name in ("server_lr", "smoothness", "local_steps"):
        check_each(check.positive, name, getattr(c, name))
    return 1 / (c.smoothness * c.server_lr * c.local_steps)


def fedasync_factor(
    mixing: Quantity, lr: Quantity, convexity: Quantity, local_steps: Quantity, *, smoothness: Quantity
) -> Quantity:
    """``beta = 1 - a + a (1 - eta mu)^H``: the factor by which one fresh arrival reduces ``F - F*``.

    Args:
      mixing: a in (0, 1], with the staleness weight in it; the smallest if it varies.
      lr: eta > 0, at most 1 / L.
      convexity: mu > 0, of the loss.
      local_steps: H, the fewest of a job.
      smoothness: L >= mu.

    Raises: ``ValueError`` with the first argument that is out of range.
    """
    check_each(check.positive, "mixing", mixing)
    check_each(check.in_range, "mixing", mixing, 0, 1)
    given = {"lr": lr, "convexity": convexity, "local_steps": local_steps, "smoothness": smoothness}
    for name, value in given.items():
        check_each(check.positive, name, value)
    require_admissible("convexity", convexity, smoothness, "a loss of this smoothness")
    require_admissible("lr", lr, 1 / smoothness, "the analysis (1 / L)")
    return 1 - mixing + mixing * (1 - lr * convexity) ** local_steps


def fedasync_gap_bound(
    gap: Quantity, server_steps: Quantity, factor: Quantity, *, staleness: Quantity = 0, noise: Quantity = 0.0
) -> Quantity:
    """FedAsync on strongly convex losses: ``E F(x_T) - F* <= beta^ceil(T / (S + 1)) gap + noise``.

    For clients that share the loss F, with ``eta <= 1 / L``. With ``e = F - F*``, by convexity
    ``e_(t+1) <= (1 - a) e_t + a e_client``, ``e_client <= (1 - eta mu)^H e_(t - tau) + (1 - (1 - eta mu)^H) noise``.
    So the largest ``max(e - noise, 0)`` of the last S + 1 steps falls by beta in S + 1 steps.

    Args:
      gap: F(x_0) - F*.
      server_steps: T.
      factor: beta of :func:`fedasync_factor`.
      staleness: S, the largest.
      noise: ``eta L sigma^2 / (2 mu)``, sigma^2 the variance of a minibatch gradient.
    """
    check_each(check.in_range, "factor", factor, 0, 1)
    given = {"gap": gap, "server_steps": server_steps, "staleness": staleness, "noise": noise}
    for name, value in given.items():
        check_each(check.non_negative, name, value)
    steps, late = as_reals((server_steps, staleness))
    return factor ** -(-steps // (late + 1)) * gap + noise
