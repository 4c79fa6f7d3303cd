"""Every server rule once more: float64 NumPy on flat vectors, written from the papers' formulas."""

import copy
from typing import NamedTuple

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

    def factor(self, direction, u):
        length = np.sqrt((direction**2).sum())
        clipped = self.clip / length if length > self.clip else 1.0
        return clipped * (self.overstale if u.staleness > self.overstale_after else 1.0)


class Taken(NamedTuple):
    """An accepted upload that waits for the close of its step."""

    u: Upload
    client: int
    direction: np.ndarray  # within the guard rails
    scale: float
    share: float


NO_GUARDS = Guards()
CLIENTS = 7  # upload ``e`` comes from client ``e mod CLIENTS``


def hinge(tau, a=10.0, b=4.0):
    return 1.0 if tau <= b else 1.0 / (a * (tau - b) + 1.0)


def polynomial(tau, p=0.5):
    return (1.0 + tau) ** -p


class Rule:
    """``x <- x + server_lr d`` or ``move(x, d, state)`` at the close of a step, d the mean of ``mixing s(tau) Delta``.

    The mean is uniform or by examples. ``towards``: a direction leads from x to the client's model, and is not its
    delta. Options have the names of the package.
    """

    server_lr, mixing, weighting, towards = 1.0, 1.0, "uniform", False
    staleness, exponent, slope, threshold = "constant", 0.5, 10.0, 4.0
    move, state = None, None
    at_once = False  # whether every arrival closes a step

    def __init__(self, **options):
        vars(self).update({"waiting": []} | options)

    def s(self, tau):
        """The weight of an upload by its staleness."""
        if self.staleness == "hinge":
            return hinge(tau, self.slope, self.threshold)
        return polynomial(tau, self.exponent) if self.staleness == "polynomial" else 1.0

    def begin(self, x, uploads):
        """Make the memory of a run."""

    def seen(self, u, client):
        """The upload as the rule sees it."""
        return u

    def direction(self, x, u):
        return u.start + u.delta - x if self.towards else u.delta

    def scale(self, u, client):
        return self.mixing * self.s(u.staleness)

    def share(self, u):
        """Weight in the mean over one server step."""
        return u.examples if self.weighting == "examples" else 1.0

    def taken(self, x, t):
        """What waits for the close after an accepted arrival."""
        return t

    def combine(self, directions, shares):
        return sum(p * d for p, d in zip(shares / shares.sum(), directions))

    def close(self, x, waiting):
        directions, shares = [t.scale * t.direction for t in waiting], [t.share for t in waiting]
        mean = self.combine(np.array(directions), np.array(shares))
        if self.move is None:
            return x + self.server_lr * mean
        x, self.state = self.move(x, mean, self.state)
        return x

    def shown(self, x):
        """The params that are evaluated."""
        return x

    def sent(self, x, client):
        """What a client is sent after a step with an upload of its own."""
        return x

    def arrive(self, x, upload, client, guards=NO_GUARDS):
        """The params after an arrival and its effective weight: accumulate until ``closes``, then step."""
        u = self.seen(upload, client)
        direction = self.direction(x, u)
        factor = guards.factor(direction, u) if u.examples > 0 else 0.0
        scale = self.scale(u, client) if factor > 0 else 0.0
        weight = self.share(u) * factor * scale
        if factor > 0:
            self.waiting.append(self.taken(x, Taken(u, client, factor * direction, scale, self.share(u))))
        if (u.closes or self.at_once) and self.waiting:
            x, self.waiting = self.close(x, self.waiting), []
        return x, weight


def play(x, uploads, rule, guards=NO_GUARDS):
    """Params after every arrival [E, D] and effective weights [E]."""
    rule, path, weights = copy.deepcopy(rule), [], []
    rule.begin(x, uploads)
    for e, upload in enumerate(uploads):
        x, weight = rule.arrive(x, upload, e % CLIENTS, guards)
        path.append(rule.shown(x))
        weights.append(weight)
    return np.array(path), np.array(weights)


class OverAll(Rule):
    """AsynFL, eq. 7 without its C: ``x <- x + (eta / N) sum Delta_i`` over the clients of the step.

    With staleness weights: FedCompass, Li et al. (2024), ``x <- x + eta sum s(tau_i) p_i Delta_i``, equal weights p_i.
    """

    def combine(self, directions, shares):
        return directions.sum(axis=0) / CLIENTS


class FedAsync(Rule):
    """``x <- x + a_t (x_i - x)``; with several arrivals in a server step, the mean of their mixing steps."""

    mixing, staleness, towards = 0.6, "polynomial", True


class Median(Rule):
    staleness = "polynomial"

    def combine(self, directions, shares):
        return np.median(directions, axis=0)


class TrimmedMean(Median):
    """Yin et al. (2018), Definition 2, coordinate by coordinate; ``trim`` has at most two decimals."""

    trim = 0.2

    def combine(self, directions, shares):
        n = len(directions)
        k = round(100 * self.trim) * n // 100
        return np.array([np.mean(sorted(column)[k : n - k]) for column in directions.T])


class Krum(Median):
    """Blanchard et al. (2017), section 4: sum over the n - f - 2 nearest others; of equal scores the first wins."""

    byzantine, select = 1, 1

    def combine(self, directions, shares=None):
        n, f = len(directions), self.byzantine
        while f > 0 and n < 2 * f + 3:
            f -= 1
        scores = []
        for i in range(n):
            others = sorted(((directions[i] - directions[j]) ** 2).sum() for j in range(n) if j != i)
            scores.append(sum(others[: int(max(n - f - 2, 0))]))
        best = sorted(range(n), key=lambda i: (scores[i], i))[: int(min(self.select, n - f))]
        return np.mean(directions[best], axis=0)


# --- optimisers: ``move`` and its state at the start ----------------------------------------------


def add(lr=1.0):
    """FedAvg, ASGD, FedBuff: ``x <- x + lr mean``."""
    return lambda x, mean, state: (x + lr * mean, state)


def momentum(lr=1.0, beta=0.9):
    """FedAvgM: ``m <- beta m + mean``, ``x <- x + lr m``."""

    def step(x, mean, m):
        m = beta * m + mean
        return x + lr * m, m

    return step, 0.0


def adagrad(lr=0.03, eps=1e-3, initial=1e-6):
    """``v <- v + mean^2``, ``x <- x + lr mean / sqrt(v + eps)``."""

    def step(x, mean, v):
        v = v + mean**2
        return x + lr * mean / np.sqrt(v + eps), v

    return step, initial


def moments(second, m, v, lr=0.01, b1=0.9, b2=0.99, eps=1e-3):
    """Adam or Yogi with corrected bias; the state is (m, v, t)."""

    def step(x, mean, state):
        m, v, t = state
        m, v, t = b1 * m + (1 - b1) * mean, second(v, mean**2, b2), t + 1
        return x + lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps), (m, v, t)

    return step, (m, v, 0)


def adam(**options):
    return moments(lambda v, square, b2: b2 * v + (1 - b2) * square, 0.0, 0.0, **options)


def yogi(**options):
    """The paper starts m at 0; optax starts both moments at 1e-6, its m in the direction of the negative mean."""
    return moments(lambda v, square, b2: v - (1 - b2) * square * np.sign(v - square), -1e-6, 1e-6, **options)
