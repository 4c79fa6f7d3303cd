"""Families of positive random durations, each parametrised by arrays of means and standard deviations.

A family is ``sample(rng, mean, std, size) -> float64[size]``; ``mean`` and ``std`` broadcast against
``size``. Means must be positive and standard deviations non-negative; the callers check that once.
Families that cannot take every pair (mean, std) say below what they keep: the mean, always, except
for ``normal``, whose truncation raises it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Size = tuple[int, ...]
Distribution = Callable[[Any, np.ndarray, np.ndarray, Size], np.ndarray]

_HALF_NORMAL_MEAN = np.sqrt(2 / np.pi)
_HALF_NORMAL_STD = np.sqrt(1 - 2 / np.pi)


def constant(rng: np.random.Generator, mean: np.ndarray, std: np.ndarray, size: Size) -> np.ndarray:
    """Always the mean; ``std`` is ignored."""
    return np.broadcast_to(np.asarray(mean, np.float64), size).copy()


def normal(rng: np.random.Generator, mean: np.ndarray, std: np.ndarray, size: Size) -> np.ndarray:
    """Gaussian with this mean and std, redrawn while <= 0.

    The law is the Gaussian conditioned on being positive, so its mean is above ``mean`` and its
    deviation below ``std`` (noticeably so from ``std > mean / 2``). Every redraw draws a whole new
    array and uses only the places that need it: one place's value never depends on its neighbours.
    """
    out = mean + std * rng.standard_normal(size)
    while (bad := out <= 0).any():
        out = np.where(bad, mean + std * rng.standard_normal(size), out)
    return out


def lognormal(rng: np.random.Generator, mean: np.ndarray, std: np.ndarray, size: Size) -> np.ndarray:
    """Lognormal with this mean and std: ``s = sqrt(ln(std^2/mean^2 + 1))``, ``m = ln(mean) - s^2/2``."""
    variance = np.log1p(np.square(np.divide(std, mean)))
    return np.exp(np.log(mean) - variance / 2 + np.sqrt(variance) * rng.standard_normal(size))


def half_normal(rng: np.random.Generator, mean: np.ndarray, std: np.ndarray, size: Size) -> np.ndarray:
    """Shifted half-normal ``a + s|Z|`` with this mean and std.

    Matching both moments needs ``s = std / sqrt(1 - 2/pi)`` and ``a = mean - s sqrt(2/pi)``. Where that
    would make ``a`` negative (``std > 0.7555 mean``), ``a`` is 0 and only the mean is matched: the plain
    half-normal, whose std is 0.7555 of its mean.
    """
    scale = np.minimum(np.divide(std, _HALF_NORMAL_STD), np.divide(mean, _HALF_NORMAL_MEAN))
    return mean - scale * _HALF_NORMAL_MEAN + scale * np.abs(rng.standard_normal(size))


def uniform(rng: np.random.Generator, mean: np.ndarray, std: np.ndarray, size: Size) -> np.ndarray:
    """Uniform on ``mean -+ sqrt(3) std``, which matches both moments.

    (The 5th to 95th percentile of a Gaussian would be ``mean -+ 1.645 std``: nearly the same range.)
    Where the lower end would be negative (``std > 0.577 mean``) the range is ``(0, 2 mean)`` and only
    the mean is matched.
    """
    half = np.minimum(np.sqrt(3) * std, mean)
    return mean + half * (1 - 2 * rng.random(size))


def exponential(rng: np.random.Generator, mean: np.ndarray, std: np.ndarray, size: Size) -> np.ndarray:
    """Exponential with this mean (its std is the mean too); ``std`` is ignored."""
    return mean * rng.standard_exponential(size)


def gamma(rng: np.random.Generator, mean: np.ndarray, std: np.ndarray, size: Size) -> np.ndarray:
    """Gamma with this mean and std: shape ``(mean/std)^2``, scale ``std^2/mean``."""
    spread = np.where(np.greater(std, 0), std, 1.0)
    draws = rng.standard_gamma(np.square(np.divide(mean, spread)), size) * np.square(spread) / mean
    return np.where(np.greater(std, 0), draws, mean)


def pareto(rng: np.random.Generator, mean: np.ndarray, std: np.ndarray, size: Size) -> np.ndarray:
    """Pareto type I with this mean and std: tail index ``1 + sqrt(1 + (mean/std)^2)``, always above 2."""
    spread = np.where(np.greater(std, 0), std, 1.0)
    index = 1 + np.sqrt(1 + np.square(np.divide(mean, spread)))
    return np.where(np.greater(std, 0), _pareto(rng, mean, index, size), mean)


def pareto_tail(index: float) -> Distribution:
    """Pareto type I of a fixed tail index > 1; its ``std`` argument is ignored (infinite if index <= 2)."""

    def sample(rng: np.random.Generator, mean: np.ndarray, std: np.ndarray, size: Size) -> np.ndarray:
        return _pareto(rng, mean, index, size)

    return sample


def _pareto(rng: np.random.Generator, mean: np.ndarray, index: np.ndarray | float, size: Size) -> np.ndarray:
    # P(X > x) = (smallest / x)^index and E X = smallest index / (index - 1)
    smallest = mean * (1 - 1 / np.asarray(index))
    return smallest * np.exp(rng.standard_exponential(size) / index)


DISTRIBUTIONS: dict[str, Distribution] = {
    "constant": constant,
    "normal": normal,
    "lognormal": lognormal,
    "half_normal": half_normal,
    "uniform": uniform,
    "exponential": exponential,
    "gamma": gamma,
    "pareto": pareto,
}

# Families that may draw the whole array again: their first rows are not what fewer rows alone would be.
REDRAWING: frozenset[Distribution] = frozenset({normal})
