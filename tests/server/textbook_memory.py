"""The rules that remember each client, once more: float64 NumPy loops written from the papers' formulas.

Upload ``e`` comes from client ``e mod CLIENTS``.
"""

from __future__ import annotations

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
