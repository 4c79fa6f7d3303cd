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


class Guards(NamedTuple):
    """Clip to a norm, then multiply uploads staler than ``overstale_after`` by ``overstale``."""

    clip: float = np.inf
    overstale_after: float = np.inf
    overstale: float = 0.0

    def factor(self, direction: np.ndarray, u: Upload) -> float:
        length = np.sqrt((direction**2).sum())
        clipped = self.clip / length if length > self.clip else 1.0
        return clipped * (self.overstale if u.staleness > self.overstale_after else 1.0)


def weighted_mean(directions: np.ndarray, shares: np.ndarray) -> np.ndarray:
    return sum(p * d for p, d in zip(shares / shares.sum(), directions))


class Rule(NamedTuple):
    """``scale(u)``, ``share(u)``, ``direction(x, u)``, ``combine(directions, shares)``, ``step(x, d, state)``."""

    scale: Callable[[Upload], float]  # the staleness weight times the mixing rate
    share: Callable[[Upload], float]  # weight in the mean over one server step
    direction: Callable[[np.ndarray, Upload], np.ndarray]
    step: Callable[[np.ndarray, np.ndarray, Any], tuple[np.ndarray, Any]]
    state: Any = None
    combine: Callable[[np.ndarray, np.ndarray], np.ndarray] = weighted_mean


NO_GUARDS = Guards()


Path = tuple[np.ndarray, np.ndarray]
Loop = Callable[[np.ndarray, list[Upload], Guards], Path]  # the whole loop of a rule that remembers each client


def play(x: np.ndarray, uploads: list[Upload], rule: Rule | Loop, guards: Guards = NO_GUARDS) -> Path:
    """Params after every arrival [E, D] and effective weights [E]: accumulate until ``closes``, then step."""
    if callable(rule):
        return rule(x, uploads, guards)
    accumulated: list[tuple[np.ndarray, float]] = []
    path, weights, state = [], [], rule.state
    for u in uploads:
        direction = rule.direction(x, u)
        factor = guards.factor(direction, u) * rule.scale(u) if u.examples > 0 else 0.0
        weights.append(rule.share(u) * factor)
        if factor > 0:
            accumulated.append((factor * direction, rule.share(u)))
        if u.closes:
            if accumulated:
                directions, shares = (np.array(column) for column in zip(*accumulated))
                x, state = rule.step(x, rule.combine(directions, shares), state)
            accumulated = []
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

    return Rule(lambda u: s(u.staleness), share, lambda x, u: u.delta, step, state)


def over_all(n: int, lr: float = 1.0) -> Rule:
    """AsynFL, eq. 7 without its C: ``x <- x + (lr / n) sum Delta_i`` over the clients of the step."""
    return averaging(add(lr))._replace(combine=lambda directions, shares: directions.sum(axis=0) / n)


def robust(combine: Any, lr: float = 1.0, s: Any = None) -> Rule:
    """``x <- x + lr combine(s(tau_i) Delta_i)``."""
    return averaging(add(lr), s=s or polynomial)._replace(combine=lambda directions, shares: combine(directions))


def median(directions: np.ndarray) -> np.ndarray:
    return np.median(directions, axis=0)


def trimmed_mean(directions: np.ndarray, trim: float = 0.2) -> np.ndarray:
    """Yin et al. (2018), Definition 2, coordinate by coordinate; ``trim`` has at most two decimals."""
    n = len(directions)
    k = round(100 * trim) * n // 100
    return np.array([np.mean(sorted(column)[k : n - k]) for column in directions.T])


def krum(directions: np.ndarray, f: int = 1, m: int = 1) -> np.ndarray:
    """Blanchard et al. (2017), section 4: sum over the n - f - 2 nearest others; of equal scores the first wins."""
    n = len(directions)
    while f > 0 and n < 2 * f + 3:
        f -= 1
    scores = []
    for i in range(n):
        others = sorted(((directions[i] - directions[j]) ** 2).sum() for j in range(n) if j != i)
        scores.append(sum(others[: max(n - f - 2, 0)]))
    best = sorted(range(n), key=lambda i: (scores[i], i))[: min(m, n - f)]
    return np.mean(directions[best], axis=0)


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
    """FedAsync: ``x <- x + a_t (x_i - x)``; with several arrivals in a server step, the mean of their mixing steps."""

    def step(x: np.ndarray, way: np.ndarray, state: Any) -> tuple[np.ndarray, Any]:
        return x + way, state

    return Rule(lambda u: a * s(u.staleness), lambda u: 1.0, lambda x, u: u.start + u.delta - x, step)
