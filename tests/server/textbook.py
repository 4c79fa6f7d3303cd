"""Every server rule once more: float64 NumPy on flat vectors, written from the papers' formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Upload(NamedTuple):
    """One arrival; ``delta`` and ``start`` are flat vectors, ``examples`` 0 means that it was rejected."""

    delta: np.ndarray
    start: np.ndarray
    staleness: int
    examples: float
    closes: bool


class Rule(NamedTuple):
    """``weight(upload)``, ``share(upload)``, ``move(x, upload)``, and ``step(x, mean, state) -> (x, state)``."""

    weight: Callable[[Upload], float]  # the effective weight that a run records
    share: Callable[[Upload], float]  # of the mean over one server step
    move: Callable[[np.ndarray, Upload], np.ndarray]  # what is averaged
    step: Callable[[np.ndarray, np.ndarray, Any], tuple[np.ndarray, Any]]
    state: Any = None


def play(x: np.ndarray, uploads: list[Upload], rule: Rule) -> tuple[np.ndarray, np.ndarray]:
    """Params after every arrival [E, D] and effective weights [E]: gather until ``closes``, then step."""
    gathered: list[Upload] = []
    path, weights, state = [], [], rule.state
    for upload in uploads:
        accepted = upload.examples > 0
        weights.append(rule.weight(upload) if accepted else 0.0)
        gathered += [upload] if accepted else []
        if upload.closes:
            if gathered:
                total = sum(rule.share(u) for u in gathered)
                mean = sum(rule.share(u) / total * rule.move(x, u) for u in gathered)
                x, state = rule.step(x, mean, state)
            gathered = []
        path.append(x)
    return np.array(path), np.array(weights)


def constant(tau: int) -> float:
    return 1.0


def hinge(tau: int, a: float = 10.0, b: float = 4.0) -> float:
    return 1.0 if tau <= b else 1.0 / (a * (tau - b) + 1.0)


def polynomial(tau: int, p: float = 0.5) -> float:
    return (1.0 + tau) ** -p


def averaging(step: Any, state: Any = None, *, by_examples: bool = False, s: Any = constant) -> Rule:
    """``step`` on the mean of ``s(tau) Delta``, uniform or by examples."""

    def share(u: Upload) -> float:
        return u.examples if by_examples else 1.0

    return Rule(lambda u: share(u) * s(u.staleness), share, lambda x, u: s(u.staleness) * u.delta, step, state)


def add(lr: float = 1.0) -> Any:
    """FedAvg, ASGD, FedBuff: ``x <- x + lr mean``."""
    return lambda x, mean, state: (x + lr * mean, state)


def momentum(lr: float = 1.0, beta: float = 0.9) -> tuple[Any, Any]:
    """FedAvgM: ``m <- beta m + mean``, ``x <- x + lr m``; the step and m at the start."""

    def step(x, mean, m):
        m = beta * m + mean
        return x + lr * m, m

    return step, 0.0


def adagrad(lr: float = 0.03, eps: float = 1e-3, initial: float = 1e-6) -> tuple[Any, Any]:
    """``v <- v + mean^2``, ``x <- x + lr mean / sqrt(v + eps)``; the step and v at the start."""

    def step(x, mean, v):
        v = v + mean**2
        return x + lr * mean / np.sqrt(v + eps), v

    return step, initial


def adam_v(v: Any, square: Any, b2: float) -> Any:
    return b2 * v + (1 - b2) * square


def yogi_v(v: Any, square: Any, b2: float) -> Any:
    return v - (1 - b2) * square * np.sign(v - square)


def moments(
    second: Any, m: float, v: float, lr: float = 0.01, b1: float = 0.9, b2: float = 0.99, eps: float = 1e-3
) -> tuple[Any, Any]:
    """Adam or Yogi with corrected bias; the step and (m, v, t) at the start."""

    def step(x, mean, state):
        m, v, t = state
        m, v, t = b1 * m + (1 - b1) * mean, second(v, mean**2, b2), t + 1
        return x + lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps), (m, v, t)

    return step, (m, v, 0)


def adam(*options: float) -> tuple[Any, Any]:
    return moments(adam_v, 0.0, 0.0, *options)


def yogi(*options: float) -> tuple[Any, Any]:
    """The paper starts m at 0; optax starts both moments at 1e-6, its m in the direction of the negative mean."""
    return moments(yogi_v, -1e-6, 1e-6, *options)


def mixing(a: float = 0.6, s: Any = polynomial) -> Rule:
    """FedAsync: ``x <- (1 - a_t) x + a_t x_i``; several in one server step: the mean of their mixing steps."""

    def weight(u: Upload) -> float:
        return a * s(u.staleness)

    def move(x: np.ndarray, u: Upload) -> np.ndarray:
        return (1 - weight(u)) * x + weight(u) * (u.start + u.delta)

    return Rule(weight, lambda u: 1.0, move, lambda x, mean, state: (mean, state))
