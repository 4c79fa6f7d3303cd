"""The rules whose weights depend on more than one upload's staleness once more: float64 NumPy, from their sources."""

from __future__ import annotations

import numpy as np

from tests.server.textbook import CLIENTS, Rule, add


def fedstaleweight(lr: float = 1.0, window: int = 5) -> Rule:
    """Ma et al. (2024): updates weighted by their client's mean staleness, over the sum of the weights."""

    class Fair(Rule):
        def begin(self, x, uploads):
            self.tracked = [[] for _ in range(CLIENTS)]

        def scale(self, u, client):
            self.tracked[client].append(u.staleness)
            return float(np.mean(self.tracked[client][-window:]))

        def taken(self, x, u, client, direction, scale):
            return scale, direction

        def step(self, x, waiting):
            total = sum(weight for weight, _ in waiting)
            weights = [weight / total if total > 0 else 0.0 for weight, _ in waiting]
            return x + lr * sum(weight * direction for weight, (_, direction) in zip(weights, waiting))

    return Fair(add())
