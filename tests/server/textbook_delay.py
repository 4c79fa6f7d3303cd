"""The delay-corrected rules once more: float64 NumPy in the paper's pseudo-gradients, with a loop over the arrivals.

``Delta = Theta^t - Theta_i``, ``b = Theta^t - Theta^tau``, step ``Theta^tau - eta mean(Delta_hat)``.
Source: AsyncManifold (2025), eq. 15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.server.textbook import Guards, Loop, Path, Upload
from tests.server.textbook_memory import WHOLE

# (Delta, b, memory, arrivals in all) -> (Delta_hat, memory)
Corrected = Callable[[np.ndarray, np.ndarray, Any, int], tuple[np.ndarray, Any]]


def corrected(correct: Corrected, lr: float = 1.0) -> Loop:
    """Each delta is corrected against the model at its arrival; the mean is subtracted when the step closes."""

    def loop(x: np.ndarray, uploads: list[Upload], guards: Guards) -> Path:
        memory, accumulated, path, weights = None, [], [], []
        for u in uploads:
            factor = 0.0
            if u.examples > 0:
                delta_hat, after = correct(-u.delta, u.start - x, memory, len(uploads))
                factor = guards.factor(delta_hat, u)
            if factor > 0:
                memory = after
                accumulated.append(factor * delta_hat)
            weights.append(factor)
            if u.closes and accumulated:
                x = x - lr * np.mean(accumulated, axis=0)
                accumulated = []
            path.append(x)
        return np.array(path), np.array(weights)

    return loop


def dc_asgd(lam: float = 0.04) -> Corrected:
    """Zheng et al. (2017), eq. 10."""
    return lambda delta, b, memory, total: (delta + lam * delta**2 * -b, memory)


def dc_asgd_a(lam: float = 2.0, m: float = 0.95, eps: float = 1e-7) -> Corrected:
    """Zheng et al. (2017), eq. 14."""

    def correct(delta: np.ndarray, b: np.ndarray, ms: Any, total: int) -> tuple[np.ndarray, Any]:
        ms = (0.0 if ms is None else m * ms) + (1 - m) * delta**2
        return delta - lam / np.sqrt(ms + eps) * delta**2 * b, ms

    return correct


def ortho(alpha: float, threshold: float, groups: list[slice] = WHOLE) -> Corrected:
    """OrthoCorrect(alpha, theta_0)."""
    return lambda delta, b, memory, total: (ortho_correct(delta, b, alpha, threshold, groups), memory)


def ortho_correct(delta: np.ndarray, b: np.ndarray, alpha: float, threshold: float, groups: list[slice]) -> np.ndarray:
    out = delta.copy()
    for g in groups:
        lengths = np.linalg.norm(delta[g]) * np.linalg.norm(b[g])
        if lengths > 0:
            product = delta[g] @ b[g]
            along = product / (b[g] @ b[g]) if threshold == 1 or product / lengths <= threshold else alpha
            out[g] = delta[g] - along * b[g]
    return out


RULES = {"asgd": (0.0, -2.0), "fedasync": (1.0, -2.0), "orthograd": (0.0, 0.0), "orthopos": (1.0, 0.0)}


def orthodyn(
    fractions: tuple[float, ...] = (0.5,),
    phases: tuple[str, ...] = ("orthograd", "orthopos"),
    decay: float = 0.99,
    groups: list[slice] = WHOLE,
    *,
    share: bool = False,
) -> Corrected:
    """OrthoDyn with either switch; the memory is (phase, lengths of the accepted changes, their largest average)."""

    def correct(delta: np.ndarray, b: np.ndarray, memory: Any, total: int) -> tuple[np.ndarray, Any]:
        phase, lengths, largest = memory or (0, [], 0.0)
        lengths = [*lengths, np.linalg.norm(delta)]
        average = np.average(lengths[::-1], weights=decay ** np.arange(len(lengths)))
        largest = max(largest, average)
        while phase < len(phases) - 1:
            f = fractions[phase]
            if not (len(lengths) > f * total if share else average < f * largest):
                break
            phase += 1
        return ortho_correct(delta, b, *RULES[phases[phase]], groups), (phase, lengths, largest)

    return correct
