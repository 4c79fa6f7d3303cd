"""The rules that remember each client, the delay-corrected ones, AsyncCurve and FedMRUR once more: float64 NumPy.

Loops over the arrivals, written from the papers' formulas; upload ``e`` comes from client ``e mod CLIENTS``.

The delay-corrected rules and AsyncCurve are in the pseudo-gradients of AsyncManifold (2025), eq. 15 and Algorithm 1
with its errors corrected: ``Delta = Theta^t - Theta_i``, ``b = Theta^t - Theta^tau``, step ``Theta^tau - eta
mean(Delta_hat)``. AsyncCurve is in points of curves instead of steps along them. FedMRUR: An et al. (2023).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.server.textbook import Guards, Loop, Path, Upload, polynomial

CLIENTS = 7
LAYERS = [slice(0, 8), slice(8, 9)]  # of the vector of nine numbers: a kernel with its bias, and a scalar
TENSORS = [slice(0, 6), slice(6, 8), slice(8, 9)]
WHOLE = [slice(0, 9)]


def ca2fl(lr: float = 1.0, clients: int = CLIENTS) -> Loop:
    """Wang et al. (2024), Algorithm 2: the caches are kept, and their mean is computed anew at every step."""

    def loop(x: np.ndarray, uploads: list[Upload], guards: Guards) -> Path:
        cache = np.zeros((clients, len(x)))
        at_step, accumulated, path, weights = cache.copy(), [], [], []
        for e, u in enumerate(uploads):
            factor = guards.factor(u.delta, u) if u.examples > 0 else 0.0
            weights.append(factor)
            if factor > 0:
                accumulated.append(factor * u.delta - at_step[e % CLIENTS])
                cache[e % CLIENTS] = factor * u.delta
            if u.closes:
                if accumulated:
                    x = x + lr * (at_step.mean(axis=0) + np.mean(accumulated, axis=0))
                at_step, accumulated = cache.copy(), []
            path.append(x)
        return np.array(path), np.array(weights)

    return loop


def fadas(lr=0.01, b1=0.9, b2=0.99, eps=1e-8, adaptation="inverse", tolerated=1.0) -> Loop:
    """Wang et al. (2024), Algorithm 1 and its delay-adaptive rate."""

    def loop(x: np.ndarray, uploads: list[Upload], guards: Guards) -> Path:
        m = v = largest = np.zeros(len(x))
        accumulated, oldest, path, weights = [], 0, [], []
        for u in uploads:
            factor = guards.factor(u.delta, u) if u.examples > 0 else 0.0
            weights.append(factor)
            if factor > 0:
                accumulated.append(factor * u.delta)
                oldest = max(oldest, u.staleness)
            if u.closes:
                if accumulated:
                    mean = np.mean(accumulated, axis=0)
                    m, v = b1 * m + (1 - b1) * mean, b2 * v + (1 - b2) * mean**2
                    largest = np.maximum(largest, v)
                    late = max(oldest, 1)
                    rates = {"inverse": min(lr, 1 / late), "scaled": lr / late, "off": lr}
                    rate = rates[adaptation] if oldest > tolerated else lr
                    x = x + rate * m / (np.sqrt(largest) + eps)
                accumulated, oldest = [], 0
            path.append(x)
        return np.array(path), np.array(weights)

    return loop


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


def orthofl(a=0.6, s=polynomial, first_counts_whole=False) -> Loop:
    """OrthoFL's moving average for given starts; the messages to clients are tested in ``test_orthofl.py``."""

    def loop(x: np.ndarray, uploads: list[Upload], guards: Guards) -> Path:
        begun, accumulated, path, weights = False, [], [], []
        for u in uploads:
            way = u.start + u.delta - x
            factor = guards.factor(way, u) if u.examples > 0 else 0.0
            factor *= 1.0 if first_counts_whole and not begun else a * s(u.staleness)
            weights.append(factor)
            if factor > 0:
                accumulated.append(factor * way)
                begun = True
            if u.closes:
                x = x + np.mean(accumulated, axis=0) if accumulated else x
                accumulated = []
            path.append(x)
        return np.array(path), np.array(weights)

    return loop


def orthofl_released(a=0.6, s=polynomial) -> Loop:
    """The average of OrthoFL's released code: the first weight is 1, tau counts others' updates since the own last."""

    def loop(x: np.ndarray, uploads: list[Upload], guards: Guards) -> Path:
        own_last = dict.fromkeys(range(CLIENTS), 0)
        accepted, accumulated, path, weights = 0, [], [], []
        for e, upload in enumerate(uploads):
            u = upload._replace(staleness=accepted - own_last[e % CLIENTS])
            way = u.start + u.delta - x
            factor = guards.factor(way, u) if u.examples > 0 else 0.0
            factor *= a * s(u.staleness) if accepted else 1.0
            weights.append(factor)
            if factor > 0:
                accumulated.append(factor * way)
                accepted += 1
                own_last[e % CLIENTS] = accepted
            if u.closes:
                x = x + np.mean(accumulated, axis=0) if accumulated else x
                accumulated = []
            path.append(x)
        return np.array(path), np.array(weights)

    return loop


def fednova(lr: float = 1.0, by_examples: bool = True) -> Loop:
    """Wang et al. (2020), eq. 6; an upload of n examples took ``1 + n mod 3`` local steps."""

    def loop(x: np.ndarray, uploads: list[Upload], guards: Guards) -> Path:
        accumulated, path, weights = [], [], []
        for u in uploads:
            factor = guards.factor(u.delta, u) if u.examples > 0 else 0.0
            share = u.examples if by_examples else 1.0
            weights.append(share * factor)
            if factor > 0:
                accumulated.append((factor * u.delta, share, 1 + int(u.examples) % 3))
            if u.closes and accumulated:
                total = sum(n for _, n, _ in accumulated)
                steps = sum(n / total * tau for _, n, tau in accumulated)
                x = x + lr * steps * sum(n / total * d / tau for d, n, tau in accumulated)
                accumulated = []
            path.append(x)
        return np.array(path), np.array(weights)

    return loop


def feddyn(alpha: float) -> Loop:
    """Acar et al. (2021), Algorithm 1, the server's side; guard rails bound the step to the client's model."""

    def loop(x: np.ndarray, uploads: list[Upload], guards: Guards) -> Path:
        h, accumulated, path, weights = np.zeros(len(x)), [], [], []
        for u in uploads:
            way = u.start + u.delta - x
            factor = guards.factor(way, u) if u.examples > 0 else 0.0
            weights.append(factor)
            if factor > 0:
                accumulated.append((factor * way, u.delta))
            if u.closes and accumulated:
                h = h - alpha / CLIENTS * sum(delta for _, delta in accumulated)
                x = x + np.mean([way for way, _ in accumulated], axis=0) - h / alpha
                accumulated = []
            path.append(x)
        return np.array(path), np.array(weights)

    return loop


def handed_on(groups: list[slice]) -> Loop:
    """OrthoFL without moving average: ``W <- w_m + (W - start_m)_perp`` at every arrival."""

    def loop(x: np.ndarray, uploads: list[Upload], guards: Guards) -> Path:
        path, weights = [], []
        for u in uploads:
            factor = guards.factor(u.delta, u) if u.examples > 0 else 0.0
            weights.append(factor)
            if factor > 0:
                x = u.start + factor * u.delta + perpendicular(x - u.start, u.delta, groups)
            path.append(x)
        return np.array(path), np.array(weights)

    return loop


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


def offset_of(delta: np.ndarray) -> np.ndarray:
    """The offsets that ``made_up.uploading`` makes up."""
    return 0.5 * np.sin(3.0 * delta)


def rotation(u: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The matrix D x D that turns u to the direction of w in their plane, and keeps everything orthogonal to it."""
    a, b = u / np.linalg.norm(u), w / np.linalg.norm(w)
    across = b - (a @ b) * a
    if np.linalg.norm(across) < 1e-12:
        return np.eye(len(u))
    c, cosine = across / np.linalg.norm(across), a @ b
    sine = np.sqrt(1 - cosine**2)
    plane = cosine * (np.outer(a, a) + np.outer(c, c)) + sine * (np.outer(c, a) - np.outer(a, c))
    return np.eye(len(u)) - np.outer(a, a) - np.outer(c, c) + plane


def bezier(a: np.ndarray, phi: np.ndarray, e: np.ndarray, s: float) -> np.ndarray:
    return (1 - s) ** 2 * a + 2 * s * (1 - s) * phi + s**2 * e


def geodesic(x: np.ndarray, y: np.ndarray, s: float) -> np.ndarray:
    """A geodesic of the hyperboloid of curvature -1, by interpolation with hyperbolic sines."""
    lift = [np.append(np.sqrt(1 + p @ p), p) for p in (x, y)]
    d = np.arccosh(max(1.0, lift[0][0] * lift[1][0] - x @ y))
    if d < 1e-9:
        return x
    return ((np.sinh((1 - s) * d) * lift[0] + np.sinh(s * d) * lift[1]) / np.sinh(d))[1:]


def asynccurve(
    server_lr: float = 0.6,
    lowest: float = 0.2,
    swa: float = 0.75,
    momentum: float = 0.0,
    correct: Corrected | None = None,
    *,
    cycle: int = 10,
    dominance: bool = True,
    control: str = "rotation",
    step: str = "curve",
    momentum_on: str = "curve",
    overwrite: int | None = None,
) -> Loop:
    """Algorithm 1; client ``i % CLIENTS`` uploads arrival i."""
    correct = orthodyn() if correct is None else correct

    def loop(x: np.ndarray, uploads: list[Upload], guards: Guards) -> Path:
        memory: Any = None
        counts, accepted, velocity, along = np.zeros(CLIENTS), 0, np.zeros_like(x), np.zeros_like(x)
        steps, tau, average, models = [], 0, x, 0
        total = sum(u.closes for u in uploads)
        path, weights = [], []
        for i, u in enumerate(uploads):
            factor, position = 0.0, 0.0
            if u.examples > 0:
                delta_hat, after = correct(-u.delta, u.start - x, memory, len(uploads))
                factor = guards.factor(delta_hat, u)
            if factor > 0:
                memory = after
                change = -factor * delta_hat
                if momentum_on == "curve":
                    along = change = change + momentum * along
                eta = server_lr * (1 + (lowest - 1) * (accepted % cycle) / max(cycle - 1, 1))
                accepted += 1
                counts[i % CLIENTS] += 1
                p = counts[i % CLIENTS] / accepted
                position = min(1.0, eta / (CLIENTS * p) if dominance else eta)
                steps.append(moved(x, u, change, position, control, step) - x)
            weights.append(factor * position)
            if u.closes and steps:
                velocity = np.mean(steps, axis=0) + (momentum * velocity if momentum_on == "space" else 0.0)
                x, steps = x + velocity, []
                if tau >= swa * total and tau % cycle == 0:
                    average, models = (average * models + x) / (models + 1), models + 1
                if overwrite is not None and models and tau % overwrite == 0:
                    x = average
                tau += 1
            path.append(average if models else x)
        return np.array(path), np.array(weights)

    return loop


def moved(x: np.ndarray, u: Upload, change: np.ndarray, position: float, control: str, step: str) -> np.ndarray:
    """Theta^{tau+1} for a single client, from points: the old curve, the corrected end, the turned control point."""
    end, middle = x + change, x + change / 2
    if step == "geodesic":
        return geodesic(x, end, position)
    phi = u.start + u.delta / 2 + offset_of(u.delta)
    offset = phi - (u.start + (u.start + u.delta)) / 2
    turned = rotation(u.delta, change) @ offset if control == "rotation" else offset
    return bezier(x, middle + (turned if step == "curve" else 0.0), end, position)


def reaggregated(directions: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """An et al. (2023): the mean, at the mean length."""
    p = shares / shares.sum()
    mean = p @ directions
    return mean * (p @ np.linalg.norm(directions, axis=1)) / np.linalg.norm(mean)
