"""Evaluations of a stack of runs as they come: device values, fetched at the end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_async.engine.evaluation import Points


class Scores:
    """Which run is evaluated after which position, and what came out.

    ``place``: per run, the positions of its arrivals. ``rounds``: bounds that the program receiving
    uploads does not cut; an evaluation then happens at the end of its round, in which the run has no
    other arrival.
    """

    def __init__(self, points: Sequence[Points], place: Sequence[np.ndarray], rounds: np.ndarray | None = None) -> None:
        self._points = points
        self._due: dict[int, list[tuple[int, int]]] = {}
        for run, (own, positions) in enumerate(zip(points, place)):
            for local in np.unique(own.position).tolist():
                stop = int(positions[local - 1]) + 1 if local else 0
                if rounds is not None:
                    stop = int(rounds[np.searchsorted(rounds, stop)])
                self._due.setdefault(stop, []).append((run, local))
        self.stops = np.array(sorted(self._due), np.int64)
        self.at: dict[tuple[int, int], dict[str, Any]] = {}

    def cuts(self, low: int, high: int) -> list[tuple[int, int]]:
        """Split the positions ``low .. high-1`` so that every evaluation falls between two pieces."""
        inner = self.stops[np.searchsorted(self.stops, low, "right") : np.searchsorted(self.stops, high, "left")]
        return list(itertools.pairwise([low, *inner.tolist(), high]))

    def take(self, position: int, evaluate: Callable[[int, int], dict[str, Any]]) -> None:
        """Evaluate every run that is due after ``position`` arrivals: ``evaluate(run, its own arrivals)``."""
        for run, local in self._due.get(position, ()):
            self.at[run, local] = evaluate(run, local)

    def latest(self) -> float:
        """The newest accuracy that the device has finished, NaN if none; never waits."""
        for scores in reversed(self.at.values()):
            if getattr(scores["accuracy"], "is_ready", lambda: True)():
                return float(scores["accuracy"])
        return float("nan")

    def columns(self, run: int) -> dict[str, np.ndarray]:
        """All evaluations of a run, one row a point: arrays [V] and, per client, [V, N]."""
        fetched = {local: jax.device_get(scores) for (r, local), scores in self.at.items() if r == run}
        names = next(iter(fetched.values()))
        return {name: np.stack([fetched[int(p)][name] for p in self._points[run].position]) for name in names}
