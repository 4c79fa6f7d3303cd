"""Corollaries 1 to 4 and Lemma 1: the terms inside the O of each, with every hidden constant 1 and L = 1.

They hold for the learning rates ``slow_lrs`` (Corollaries 1 and 4, Lemma 1) and ``fast_lrs`` (2 and 3), if T is so
large that these meet the conditions of the theorems. Corollaries 2 and 3 refuse gamma below
``smallest_gamma_asynflc``. They use the gap, variance, heterogeneity, clients, local_steps,
delays and gamma of ``Constants``. Arrays broadcast. ``rates`` gives the source and the errors in print.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedjax_async.theory.rates import (
    Bound,
    Constants,
    Quantity,
    checked,
    compression_factor,
    larger,
    require_weak_compression,
)


class LearningRates(NamedTuple):
    """eta and eta_g."""

    lr: Quantity
    server_lr: Quantity


def slow_lrs(constants: Constants) -> LearningRates:
    """``eta = 1 / (K sqrt(T))``, ``eta_g = sqrt(K n)``: the choice of Corollaries 1 and 4."""
    c = checked(constants)
    return LearningRates(1 / (c.local_steps * c.delays.server_steps**0.5), (c.local_steps * c.clients) ** 0.5)


def fast_lrs(constants: Constants) -> LearningRates:
    """``eta = 1 / (K tau_max T^(1/3))``, ``eta_g = K``: the choice of Corollaries 2 and 3."""
    c = checked(constants)
    return LearningRates(
        1 / (c.local_steps * c.delays.tau_max * c.delays.server_steps ** (1 / 3)), float(c.local_steps)
    )


def corollary_1(constants: Constants) -> Bound:
    """AsynFL, eq. 12: ``(Delta + sigma^2) / sqrt(T K n)``, then drift and delays over T.

    tau_avg and tau_avgm are the larger of their two kinds.
    """
    c = checked(constants)
    d, total, steps = c.delays, c.delays.server_steps, c.local_steps
    leading = 1 / (total * steps * c.clients) ** 0.5
    mean, highest = larger(d.tau_avg0, d.tau_avg1), larger(d.tau_avgm0, d.tau_avgm1)
    variance = leading + 1 / (total * steps) + mean / total
    spread = (1 + steps * c.clients * d.tau_max * highest) / total
    return Bound(leading * c.gap, variance * c.variance, spread * c.heterogeneity)


def corollary_2(constants: Constants) -> Bound:
    """AsynFLC on IID data, eq. 14: ``tau_max (Delta + sigma^2) / (K T^(2/3))``; heterogeneity must be 0.

    As printed; the term that eq. 13 lacks would be ``sigma^2 / (n tau_max T^(1/3))``.
    """
    c = checked(constants)
    if np.any(c.heterogeneity):
        raise ValueError(f"heterogeneity = {c.heterogeneity!r}: must be 0 for Corollary 2; corollary_3 has its terms")
    return corollary_3(c)


def corollary_3(constants: Constants) -> Bound:
    """AsynFLC, eq. 15: Corollary 2 and ``tau_max^2 sigma_g^2 (T^(-2/3) + 1)``, which does not vanish for large T."""
    c = checked(constants)
    require_weak_compression(c)
    top, fast = c.delays.tau_max, c.delays.server_steps ** (-2 / 3)
    common = top * fast / c.local_steps
    return Bound(common * c.gap, common * c.variance, top**2 * (fast + 1) * c.heterogeneity)


def corollary_4(constants: Constants) -> Bound:
    """AsynFLC-EF, eq. 18: ``(Delta + sigma^2) / sqrt(T K n)``, drift over T, and delays times the compression factor.

    As printed: without compression it has no term with delays, although eq. 17 keeps those of Corollary 1.
    """
    c = checked(constants)
    total, steps, n, top = c.delays.server_steps, c.local_steps, c.clients, c.delays.tau_max
    leading, lost = 1 / (total * steps * n) ** 0.5, compression_factor(c.gamma)
    variance = leading + 1 / (total * steps) + lost * n * top / total
    spread = (1 + lost * steps * n * top**2) / total
    return Bound(leading * c.gap, variance * c.variance, spread * c.heterogeneity)


def residual_order(constants: Constants) -> Bound:
    """Lemma 1, eq. 16: squared residual of error feedback, mean over clients and steps [w^2]; 0 at gamma = 1."""
    c = checked(constants)
    lost, total, top = compression_factor(c.gamma), c.delays.server_steps, c.delays.tau_max
    variance = lost * top / (c.local_steps * total)
    return Bound(0.0 * c.gap, variance * c.variance, lost * top**2 / total * c.heterogeneity)
