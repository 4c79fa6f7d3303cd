"""Draw how many examples of each class every client gets, from given class mixes: all at once, or in turns."""

from __future__ import annotations

import numpy as np


def draw_at_once(mixes: np.ndarray, need: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Counts int[N, C] with row sums ``need`` [N] and column sums ``sizes`` [C], rows drawn from ``mixes`` [N, C]."""
    counts = np.zeros(mixes.shape, np.int64)
    left = sizes.astype(np.int64)
    while left.any():
        short = need - counts.sum(axis=1)
        wish = mixes * (left > 0)
        total = wish.sum(axis=1, keepdims=True)
        wish = np.where(total > 1e-12, wish / np.maximum(total, 1e-12), left / left.sum())
        demand = rng.multinomial(short, wish)
        for c in np.flatnonzero(demand.sum(axis=0)):
            supply = min(int(left[c]), int(demand[:, c].sum()))
            # the "marginals" method is exact at any size; "count" would list every example
            given = rng.multivariate_hypergeometric(demand[:, c], supply, method="marginals")
            counts[:, c] += given
            left[c] -= supply
    return counts


def draw_in_turns(
    mixes: np.ndarray, need: np.ndarray, sizes: np.ndarray, at_a_time: int, rng: np.random.Generator
) -> np.ndarray:
    """Counts int[N, C] as in :func:`draw_at_once`; one random client at a time draws up to ``at_a_time`` of a class."""
    counts = np.zeros(mixes.shape, np.int64)
    left, short, ends = sizes.astype(np.int64), need.astype(np.int64), np.cumsum(mixes, axis=1)
    while len(waiting := np.flatnonzero(short)) > 0:
        client = waiting[rng.integers(len(waiting))]
        classes = np.flatnonzero(left)
        wished = np.searchsorted(ends[client], rng.random())
        c = classes[np.searchsorted(classes, wished) % len(classes)]
        drawn = min(at_a_time, short[client], left[c])
        counts[client, c] += drawn
        left[c] -= drawn
        short[client] -= drawn
    return counts
