"""AsyncCurve and FedMRUR once more: float64 NumPy, with points of curves instead of steps along them.

Source: AsyncManifold (2025), Algorithm 1 with the corrections of its errors; An et al. (2023).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.server.textbook import Guards, Loop, Path, Upload
from tests.server.textbook_delay import Corrected, orthodyn
from tests.server.textbook_memory import CLIENTS


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
