"""The paper's processing of losses (smooth, normalise, average), and a search for the phase change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

Losses = Mapping[str, np.ndarray]  # method -> loss at each measured arrival, [P]


def smoothed(values: np.ndarray, sigma: float, truncate: float = 2.0) -> np.ndarray:
    """Convolution with a Gaussian of ``sigma`` points that is cut off ``truncate * sigma`` from its middle; float64[P].

    Near the ends the weights inside are normalised, so that a constant is unchanged.
    """
    values = np.asarray(values, np.float64)
    reach = int(truncate * sigma + 0.5)
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    middle = slice(reach, reach + len(values))
    inside = np.convolve(np.ones(len(values)), weights)[middle]
    return np.asarray(np.convolve(values, weights)[middle] / inside)


def normalised(losses: Losses) -> dict[str, np.ndarray]:
    """Relative losses in [0, 1]: at each point 0 for the best method and 1 for the worst; 0 where all are equal."""
    values = np.stack([np.asarray(each, np.float64) for each in losses.values()])
    low, high = values.min(axis=0), values.max(axis=0)
    width = np.where(high > low, high - low, 1.0)
    return dict(zip(losses, (values - low) / width, strict=True))


def averaged(runs: Sequence[Losses]) -> dict[str, np.ndarray]:
    """The mean over runs, for the methods that all of them have."""
    names = [name for name in runs[0] if all(name in run for run in runs)]
    return {name: np.mean([run[name] for run in runs], axis=0) for name in names}


def relative(runs: Sequence[Losses], sigma: float) -> dict[str, np.ndarray]:
    """Smoothed, normalised and averaged over ``runs``, as for the paper's Figures 1 and 3."""
    return averaged([normalised({name: smoothed(loss, sigma) for name, loss in run.items()}) for run in runs])


class Change(NamedTuple):
    """The point at which the better family of methods changes."""

    point: int  # the first point of the second phase
    before: float  # share of the earlier points at which the first family is better
    after: float  # share of the later points at which the second family is better
    found: bool  # whether both shares are high and both phases long enough


def phase_change(first: np.ndarray, second: np.ndarray, *, share: float = 0.8, least: float = 0.1) -> Change:
    """The point that best divides ``first < second`` (losses, [P]) from ``first > second``.

    It maximises the number of points on the expected side. A change is ``found`` if on each side at least ``share`` of
    the points are as expected, and each side has at least ``least`` of all points.
    """
    early = np.asarray(first, np.float64) < np.asarray(second, np.float64)
    late = np.asarray(first, np.float64) > np.asarray(second, np.float64)
    count = len(early)
    agree = np.concatenate([[0], np.cumsum(early)]) + np.concatenate([np.cumsum(late[::-1])[::-1], [0]])
    point = int(np.argmax(agree))
    before = float(early[:point].mean()) if point else 0.0
    after = float(late[point:].mean()) if point < count else 0.0
    long_enough = least * count <= point <= (1 - least) * count
    return Change(point, before, after, bool(long_enough and before >= share and after >= share))


def interval(values: np.ndarray, z: float = 2.5758) -> tuple[float, float]:
    """Mean and half-width of its Gaussian interval, by default 99 %; the half-width of a single value is NaN."""
    values = np.asarray(values, np.float64)
    spread = np.std(values, ddof=1) if len(values) > 1 else np.nan
    return float(np.mean(values)), float(z * spread / np.sqrt(len(values)))
