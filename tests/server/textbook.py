"""Every server rule once more: float64 NumPy on flat vectors, written from the papers' formulas."""

from __future__ import annotations

import copy
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


NO_GUARDS = Guards()
CLIENTS = 7  # upload ``e`` comes from client ``e mod CLIENTS``
Path = tuple[np.ndarray, np.ndarray]


class Rule:
    """``move(x, d, state)`` at the close of a step, d the mean of ``a s(tau) Delta``, uniform or by examples.

    ``towards``: a direction leads from x to the client's model, and is not its delta.
    """

    at_once = False  # whether every arrival closes a step

    def __init__(
        self, move: Any, state: Any = None, *, by_examples: bool = False, s: Any = None, a: float = 1.0,
        towards: bool = False, combine: Callable[[np.ndarray, np.ndarray], np.ndarray] = weighted_mean,
    ):  # fmt: skip
        self.move, self.state, self.s, self.a, self.combine = move, state, s or constant, a, combine
        self.by_examples, self.towards = by_examples, towards

    def begin(self, x: np.ndarray, uploads: list[Upload]) -> None:
        """Make the memory of a run."""

    def seen(self, u: Upload, client: int) -> Upload:
        """The upload as the rule sees it."""
        return u

    def direction(self, x: np.ndarray, u: Upload) -> np.ndarray:
        return u.start + u.delta - x if self.towards else u.delta

    def scale(self, u: Upload, client: int) -> float:
        return self.a * self.s(u.staleness)

    def share(self, u: Upload) -> float:
        """Weight in the mean over one server step."""
        return u.examples if self.by_examples else 1.0

    def taken(self, x: np.ndarray, u: Upload, client: int, direction: np.ndarray, scale: float) -> Any:
        """What waits for the close after an accepted arrival; ``direction`` is within the guard rails."""
        return scale * direction, self.share(u)

    def step(self, x: np.ndarray, waiting: list[Any]) -> np.ndarray:
        directions, shares = (np.array(column) for column in zip(*waiting))
        x, self.state = self.move(x, self.combine(directions, shares), self.state)
        return x

    def shown(self, x: np.ndarray) -> np.ndarray:
        """The params that are evaluated."""
        return x


def play(x: np.ndarray, uploads: list[Upload], rule: Rule, guards: Guards = NO_GUARDS) -> Path:
    """Params after every arrival [E, D] and effective weights [E]: accumulate until ``closes``, then step."""
    rule, waiting, path, weights = copy.deepcopy(rule), [], [], []
    rule.begin(x, uploads)
    for e, upload in enumerate(uploads):
        client = e % CLIENTS
        u = rule.seen(upload, client)
        direction = rule.direction(x, u)
        factor = guards.factor(direction, u) if u.examples > 0 else 0.0
        scale = rule.scale(u, client) if factor > 0 else 0.0
        weights.append(rule.share(u) * factor * scale)
        if factor > 0:
            waiting.append(rule.taken(x, u, client, factor * direction, scale))
        if (u.closes or rule.at_once) and waiting:
            x, waiting = rule.step(x, waiting), []
        path.append(rule.shown(x))
    return np.array(path), np.array(weights)


def constant(tau: int) -> float:
    return 1.0


def hinge(tau: int, a: float = 10.0, b: float = 4.0) -> float:
    return 1.0 if tau <= b else 1.0 / (a * (tau - b) + 1.0)


def polynomial(tau: int, p: float = 0.5) -> float:
    return (1.0 + tau) ** -p


def over_all(n: int, lr: float = 1.0, s: Any = None) -> Rule:
    """AsynFL, eq. 7 without its C: ``x <- x + (lr / n) sum Delta_i`` over the clients of the step.

    With ``s``: FedCompass, Li et al. (2024), ``x <- x + lr sum s(tau_i) p_i Delta_i`` with equal weights p_i.
    """
    return Rule(add(lr), s=s, combine=lambda directions, shares: directions.sum(axis=0) / n)


def robust(combine: Any, lr: float = 1.0, s: Any = None) -> Rule:
    """``x <- x + lr combine(s(tau_i) Delta_i)``."""
    return Rule(add(lr), s=s or polynomial, combine=lambda directions, shares: combine(directions))


def mixing(a: float = 0.6, s: Any = None) -> Rule:
    """FedAsync: ``x <- x + a_t (x_i - x)``; with several arrivals in a server step, the mean of their mixing steps."""
    return Rule(add(), s=s or polynomial, a=a, towards=True)


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
