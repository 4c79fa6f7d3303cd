"""Compressors in NumPy, float64, written from their definitions; and vectors to try them on."""

from __future__ import annotations

import numpy as np

MAKERS = {
    "gaussian": lambda rng, size: rng.normal(size=size),
    "heavy tails": lambda rng, size: rng.standard_t(2, size=size),
    "ties": lambda rng, size: rng.integers(-2, 3, size=size).astype(float),
    "constant": lambda rng, size: np.full(size, -0.75),
    "one spike": lambda rng, size: np.where(np.arange(size) == size // 2, 5.0, 0.0),
    "zeros": lambda rng, size: np.where(np.arange(size) % 2 == 0, 0.0, -0.0),
}


def vector(kind, size, seed=0):
    return MAKERS[kind](np.random.default_rng(seed), size).astype(np.float32)


def largest(x, k):
    """Ascending indices of the k largest |x|, of equals the first."""
    return np.sort(np.argsort(-np.abs(np.asarray(x, np.float64)), kind="stable")[:k])


def topk(x, k):
    out = np.zeros(len(x))
    index = largest(x, k)
    out[index] = x[index]
    return out


def sign(x):
    return np.where(np.asarray(x) >= 0, 1.0, -1.0)


def scaled_sign(x):
    x = np.asarray(x, np.float64)
    return np.abs(x).sum() / max(1, len(x)) * sign(x)


def square(x):
    return float(np.sum(np.asarray(x, np.float64) ** 2))


def beta(size, steps):
    """Bound on the relative variance of QSGD."""
    return min(size / steps**2, size**0.5 / steps)
