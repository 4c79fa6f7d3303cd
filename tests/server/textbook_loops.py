"""The rules that remember each client, the delay-corrected ones, AsyncCurve and FedMRUR once more: float64 NumPy.

Written from the papers' formulas, as what they do otherwise than ``textbook.Rule``.

The delay-corrected rules and AsyncCurve are in the pseudo-gradients of AsyncManifold (2025), eq. 15 and Algorithm 1
with its errors corrected: ``Delta = Theta^t - Theta_i``, ``b = Theta^t - Theta^tau``, step ``Theta^tau - eta
mean(Delta_hat)``. AsyncCurve is in points of curves instead of steps along them. FedMRUR: An et al. (2023).
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np

from tests.geometry import textbook as geometry
from tests.server.textbook import CLIENTS, Rule, Upload, add, polynomial

LAYERS = [slice(0, 8), slice(8, 9)]  # of the vector of nine numbers: a kernel with its bias, and a scalar
TENSORS = [slice(0, 6), slice(6, 8), slice(8, 9)]
WHOLE = [slice(0, 9)]


def ca2fl(lr: float = 1.0, beta: float = 1.0) -> Rule:
    """Wang et al. (2024), Algorithm 2: the caches are kept, and their mean is computed anew at every step.

    With ``beta``: FedStale, Rodio and Neglia (2024).
    """

    class Cached(Rule):
        def begin(self, x, uploads):
            self.cache, self.at_step = np.zeros((2, CLIENTS, len(x)))

        def taken(self, x, u, client, direction, scale):
            self.cache[client] = direction
            return direction - beta * self.at_step[client]

        def step(self, x, waiting):
            x = x + lr * (beta * self.at_step.mean(axis=0) + np.mean(waiting, axis=0))
            self.at_step = self.cache.copy()
            return x

    return Cached(add(lr))


def mifa(lr: float = 1.0, *, wait: bool = False) -> Rule:
    """Gu et al. (2021), Algorithm 1, and ACE, Chang et al. (2025): the mean of a table of last updates."""

    class Remembering(Rule):
        def begin(self, x, uploads):
            self.table, self.heard = np.zeros((CLIENTS, len(x))), set()

        def taken(self, x, u, client, direction, scale):
            self.table[client] = direction
            self.heard.add(client)
            return client

        def step(self, x, waiting):
            return x if wait and len(self.heard) < CLIENTS else x + lr * self.table.mean(axis=0)

    return Remembering(add())


def area() -> Rule:
    """Iakovidou and Kim (2024): every K arrivals, the mean of a table of all clients' last models."""

    class Averaging(Rule):
        def begin(self, x, uploads):
            self.models = np.tile(x, (CLIENTS, 1))

        def taken(self, x, u, client, direction, scale):
            self.models[client] = u.start + direction
            return client

        def step(self, x, waiting):
            return self.models.mean(axis=0)

    return Averaging(add())


def malenia(lr: float = 1.0) -> Rule:
    """Tyurin and Richtarik (2023): ``(1/n) sum_i (1/B_i) sum_j Delta_ij`` over the clients of a step."""

    class OfMeans(Rule):
        def taken(self, x, u, client, direction, scale):
            return client, direction

        def step(self, x, waiting):
            of_client = [[d for who, d in waiting if who == i] for i in sorted({who for who, _ in waiting})]
            return x + lr * np.mean([np.mean(each, axis=0) for each in of_client], axis=0)

    return OfMeans(add())


def adpsgd(lr: float = 1.0, drawn: Callable[[int, int], int] = lambda e, node: node) -> Rule:
    """Lian et al. (2018), Algorithm 1: ``X <- X W_k``, then ``x_i <- x_i - gamma g(x_hat)``; the mean is evaluated.

    ``drawn(e, node)``: the node with which ``node`` averages at arrival e.
    """

    class Pairs(Rule):
        at_once = True

        def begin(self, x, uploads):
            self.models, self.e = np.tile(x, (CLIENTS, 1)), -1

        def seen(self, u, client):
            self.e += 1
            return u

        def taken(self, x, u, client, direction, scale):
            return client, direction

        def step(self, x, waiting):
            ((i, direction),) = waiting
            j, mixing = drawn(self.e, i), np.eye(CLIENTS)
            if j != i:
                mixing[[i, i, j, j], [i, j, i, j]] = 0.5
            self.models = mixing @ self.models
            self.models[i] = self.models[i] + lr * direction
            return self.models.mean(axis=0)

    return Pairs(add())


def ringleader(lr: float = 1.0) -> Rule:
    """Maranjyan and Richtarik (2025): lists of deltas; a client's turn is an upload that closes a step."""

    class InTurn(Rule):
        def begin(self, x, uploads):
            self.now, self.early, self.had_turn, self.closing = {}, {}, set(), None

        def seen(self, u, client):
            if self.closing is not None:  # what the arrival before leaves behind, also if it was rejected
                self.had_turn.add(self.closing)
                if len(self.had_turn) == CLIENTS:
                    self.now, self.early, self.had_turn = self.early, {}, set()
            self.closing, self.accepted = client if u.closes else None, False
            return u

        def taken(self, x, u, client, direction, scale):
            self.accepted = True
            table = self.early if client in self.had_turn and not u.closes else self.now
            table.setdefault(client, []).append(direction)
            return direction

        def step(self, x, waiting):
            means = [np.mean(deltas, axis=0) for deltas in self.now.values()]
            return x + lr * np.mean(means, axis=0) if self.accepted else x

    return InTurn(add())


def quafl(size: int = 10) -> Rule:
    """Zakerinia et al. (2024), the server's side: ``x <- x / (s + 1) + s / (s + 1) mean_i y_i``."""

    class Polling(Rule):
        def taken(self, x, u, client, direction, scale):
            return u.start + direction

        def step(self, x, waiting):
            return x / (size + 1) + size / (size + 1) * np.mean(waiting, axis=0)

    return Polling(add())


def port(lr: float = 1.0, a: float = 1.0, b: float = 3.0, bound: float = 10.0) -> Rule:
    """Su and Li (2022), with the weights of the authors' code."""

    class Alike(Rule):
        def direction(self, x, u):
            way, delta = x - u.start, u.delta
            lengths = np.linalg.norm(way) * np.linalg.norm(delta)
            self.cosine = way @ delta / lengths if u.staleness > 0 and lengths > 0 else 1.0
            return delta

        def share(self, u):
            return u.examples * (a * (self.cosine + 1) / 2 + b * bound / (u.staleness + bound))

    return Alike(add(lr))


def delay_adaptive(tolerated: float, lr: float = 1.0, *, drop: bool = False) -> Rule:
    """Koloskova et al. (2022), eq. 11: a late gradient has the step of Mishchenko et al. (2022), or none."""

    class Late(Rule):
        def taken(self, x, u, client, direction, scale):
            return [scale * direction] if scale > 0 else []

        def step(self, x, waiting):
            directions = [direction for taken in waiting for direction in taken]
            return x + lr * np.mean(directions, axis=0) if directions else x

    return Late(add(), s=lambda tau: 1.0 if tau <= tolerated else 0.0 if drop else tolerated / tau)


def fadas(lr=0.01, b1=0.9, b2=0.99, eps=1e-8, adaptation="inverse", tolerated=1.0) -> Rule:
    """Wang et al. (2024), Algorithm 1 and its delay-adaptive rate."""

    class Adaptive(Rule):
        def begin(self, x, uploads):
            self.m = self.v = self.largest = np.zeros(len(x))

        def taken(self, x, u, client, direction, scale):
            return direction, u.staleness

        def step(self, x, waiting):
            directions, stale = zip(*waiting)
            mean, oldest = np.mean(directions, axis=0), max(stale)
            self.m, self.v = b1 * self.m + (1 - b1) * mean, b2 * self.v + (1 - b2) * mean**2
            self.largest = np.maximum(self.largest, self.v)
            late = max(oldest, 1)
            rates = {"inverse": min(lr, 1 / late), "scaled": lr / late, "off": lr}
            rate = rates[adaptation] if oldest > tolerated else lr
            return x + rate * self.m / (np.sqrt(self.largest) + eps)

    return Adaptive(add())


def perpendicular(vector: np.ndarray, direction: np.ndarray, groups: list[slice]) -> np.ndarray:
    out = vector.copy()
    for g in groups:
        square = direction[g] @ direction[g]
        if square > 0:
            out[g] = vector[g] - (vector[g] @ direction[g]) / square * direction[g]
    return out


def outside(vector: np.ndarray, rows: np.ndarray, groups: list[slice]) -> np.ndarray:
    """The part of ``vector`` outside the span of ``rows``, by least squares."""
    out = vector.copy()
    for g in groups:
        out[g] = vector[g] - rows[:, g].T @ np.linalg.lstsq(rows[:, g].T, vector[g], rcond=1e-10)[0]
    return out


def orthofl(a=0.6, s=polynomial, first_counts_whole=False) -> Rule:
    """OrthoFL's moving average for given starts; the messages to clients are tested in ``test_orthofl.py``."""

    class Average(Rule):
        begun = False

        def scale(self, u, client):
            whole, self.begun = first_counts_whole and not self.begun, True
            return 1.0 if whole else super().scale(u, client)

    return Average(add(), s=s, a=a, towards=True)


def orthofl_released(a=0.6, s=polynomial) -> Rule:
    """The average of OrthoFL's released code: the first weight is 1, tau counts others' updates since the own last."""

    class Released(Rule):
        def begin(self, x, uploads):
            self.accepted, self.own_last = 0, [0] * CLIENTS

        def seen(self, u, client):
            return u._replace(staleness=self.accepted - self.own_last[client])

        def scale(self, u, client):
            return super().scale(u, client) if self.accepted else 1.0

        def taken(self, x, u, client, direction, scale):
            self.accepted += 1
            self.own_last[client] = self.accepted
            return super().taken(x, u, client, direction, scale)

    return Released(add(), s=s, a=a, towards=True)


def fednova(lr: float = 1.0, by_examples: bool = True) -> Rule:
    """Wang et al. (2020), eq. 6; an upload of n examples took ``1 + n mod 3`` local steps."""

    class Nova(Rule):
        def taken(self, x, u, client, direction, scale):
            return direction, self.share(u), 1 + int(u.examples) % 3

        def step(self, x, waiting):
            total = sum(n for _, n, _ in waiting)
            steps = sum(n / total * tau for _, n, tau in waiting)
            return x + lr * steps * sum(n / total * d / tau for d, n, tau in waiting)

    return Nova(add(), by_examples=by_examples)


def feddyn(alpha: float) -> Rule:
    """Acar et al. (2021), Algorithm 1, the server's side; guard rails bound the step to the client's model."""

    class Shifted(Rule):
        h = 0.0

        def taken(self, x, u, client, direction, scale):
            return direction, u.delta

        def step(self, x, waiting):
            ways, deltas = zip(*waiting)
            self.h = self.h - alpha / CLIENTS * sum(deltas)
            return x + np.mean(ways, axis=0) - self.h / alpha

    return Shifted(add(), towards=True)


def handed_on(groups: list[slice]) -> Rule:
    """OrthoFL without moving average: ``W <- w_m + (W - start_m)_perp`` at every arrival."""

    class HandedOn(Rule):
        at_once = True

        def taken(self, x, u, client, direction, scale):
            return u.start, direction, u.delta

        def step(self, x, waiting):
            ((start, direction, delta),) = waiting
            return start + direction + perpendicular(x - start, delta, groups)

    return HandedOn(add())


Correction = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (Delta, b) -> Delta_hat; an object may have a memory


class Corrected(Rule):
    """Each delta is corrected against the model at its arrival; the mean is subtracted when the step closes."""

    def __init__(self, correct: Correction, lr: float = 1.0):
        super().__init__(add(-lr))
        self.correct = correct

    def begin(self, x, uploads):
        self.correct.total = len(uploads)  # for OrthoDyn, which may switch after a share of the run

    def direction(self, x, u):
        self.after = copy.deepcopy(self.correct)
        return self.after(-u.delta, u.start - x)

    def taken(self, x, u, client, direction, scale):
        self.correct = self.after
        return super().taken(x, u, client, direction, scale)


def dc_asgd(lam: float = 0.04) -> Correction:
    """Zheng et al. (2017), eq. 10."""
    return lambda delta, b: geometry.corrected(delta, b, lam, np.diag(delta * delta))


def dc_asgd_a(*options: float) -> Correction:
    """Zheng et al. (2017), eq. 14."""
    return geometry.DCASGDa(9, *options)


def ortho(alpha: float, threshold: float, groups: list[slice] = WHOLE) -> Correction:
    """OrthoCorrect(alpha, theta_0), group by group."""
    return lambda delta, b: np.concatenate([geometry.ortho_correct(delta[g], b[g], alpha, threshold) for g in groups])


RULES = {"asgd": (0.0, -2.0), "fedasync": (1.0, -2.0), "orthograd": (0.0, 0.0), "orthopos": (1.0, 0.0)}


def orthodyn(
    fractions: tuple[float, ...] = (0.5,),
    phases: tuple[str, ...] = ("orthograd", "orthopos"),
    decay: float = 0.99,
    groups: list[slice] = WHOLE,
    *,
    share: bool = False,
) -> Correction:
    """OrthoDyn with either switch."""
    return geometry.OrthoDyn(fractions, [ortho(*RULES[phase], groups) for phase in phases], decay, share=share)


def offset_of(delta: np.ndarray, j: int = 0) -> np.ndarray:
    """The offsets of inner points that ``made_up.uploading`` makes up."""
    return 0.5 * np.sin((3.0 + j) * delta)


def geodesic(x: np.ndarray, y: np.ndarray, s: float) -> np.ndarray:
    """A geodesic of the hyperboloid of curvature -1, by interpolation with hyperbolic sines."""
    p, q = geometry.lift(x), geometry.lift(y)
    d = np.arccosh(max(1.0, -geometry.lorentz_product(p, q)))
    return ((np.sinh((1 - s) * d) * p + np.sinh(s * d) * q) / np.sinh(d))[1:] if d > 1e-9 else x


def asynccurve(
    server_lr: float = 0.6,
    lowest: float = 0.2,
    swa: float = 0.75,
    momentum: float = 0.0,
    correct: Correction | None = None,
    *,
    cycle: int = 10,
    dominance: bool = True,
    control: str = "rotation",
    step: str = "curve",
    momentum_on: str = "curve",
    overwrite: int | None = None,
    curve: Callable[[list[np.ndarray], float], np.ndarray] = geometry.bezier,
    inner: int = 1,
    by_examples: bool = False,
) -> Rule:
    """Algorithm 1; ``curve`` through ``inner`` points beside its ends."""

    class Curve(Corrected):
        def begin(self, x, uploads):
            super().begin(x, uploads)
            self.counts, self.average, self.models, self.tau = np.zeros(CLIENTS), x, 0, 0
            self.sizes: dict[int, float] = {}
            self.velocity = self.along = np.zeros_like(x)
            self.begins = swa * sum(u.closes for u in uploads)

        def scale(self, u, client):
            """The position on the curve."""
            accepted = self.counts.sum()
            eta = server_lr * (1 + (lowest - 1) * (accepted % cycle) / max(cycle - 1, 1))
            self.counts[client] += 1
            self.sizes[client] = u.examples
            if by_examples:  # eq. 32, times N
                eta *= u.examples / np.mean([size for size in self.sizes.values() if size > 0])
            return min(1.0, eta / (CLIENTS * self.counts[client] / (accepted + 1)) if dominance else eta)

        def taken(self, x, u, client, direction, scale):
            super().taken(x, u, client, direction, scale)
            change = -direction
            if momentum_on == "curve":
                self.along = change = change + momentum * self.along
            return moved(x, u, change, scale, control, step, curve, inner) - x

        def step(self, x, waiting):
            self.velocity = np.mean(waiting, axis=0) + momentum * self.velocity * (momentum_on == "space")
            x = x + self.velocity
            if self.tau >= self.begins and self.tau % cycle == 0:
                self.average = (self.average * self.models + x) / (self.models + 1)
                self.models += 1
            if overwrite is not None and self.models and self.tau % overwrite == 0:
                x = self.average
            self.tau += 1
            return x

        def shown(self, x):
            return self.average if self.models else x

    return Curve(correct or orthodyn())


def moved(
    x: np.ndarray,
    u: Upload,
    change: np.ndarray,
    position: float,
    control: str,
    step: str,
    curve: Callable[[list[np.ndarray], float], np.ndarray] = geometry.bezier,
    inner: int = 1,
) -> np.ndarray:
    """Theta^{tau+1} for a single client, from points: the old curve, the corrected end, the turned control point."""
    end, points = x + change, []
    if step == "geodesic":
        return geodesic(x, end, position)
    for j in range(inner):
        share = (j + 1) / (inner + 1)
        phi = u.start + share * u.delta + offset_of(u.delta, j)
        offset = phi - ((1 - share) * u.start + share * (u.start + u.delta))
        turned = geometry.rotation(u.delta, change) @ offset if control == "rotation" else offset
        points.append(x + share * change + (turned if step == "curve" else 0.0))
    return curve([x, *points, end], position)


def reaggregated(directions: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """An et al. (2023): the mean, at the mean length."""
    p = shares / shares.sum()
    mean = p @ directions
    return mean * (p @ np.linalg.norm(directions, axis=1)) / np.linalg.norm(mean)
