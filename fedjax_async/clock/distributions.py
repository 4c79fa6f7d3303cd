"""Families of positive random durations, each parametrised by arrays of means and standard deviations.

A family is ``sample(draws, mean, std) -> float64``, one number for each place of ``draws`` (see
``chance.Draws``), against whose shape ``mean`` and ``std`` broadcast. Means must be positive and standard
deviations non-negative; the callers check that once. Families that cannot take every pair (mean, std)
say below what they keep: the mean, always, except for ``normal``, whose truncation raises it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedjax_async.clock.chance import Draws

Distribution = Callable[[Draws, np.ndarray, np.ndarray], np.ndarray]

_HALF_NORMAL_MEAN = np.sqrt(2 / np.pi)
_HALF_NORMAL_STD = np.sqrt(1 - 2 / np.pi)


def constant(draws: Draws, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Always the mean; ``std`` is ignored."""
    return mean * np.ones(draws.shape)


def normal(draws: Draws, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Gaussian with this mean and std, redrawn while <= 0.

    The law is the Gaussian conditioned on being positive, so its mean is above ``mean`` and its
    deviation below ``std`` (noticeably so from ``std > mean / 2``).
    """
    draws = draws.apart()
    out = mean + std * draws.standard_normal()
    mean, std = np.broadcast_to(mean, out.shape), np.broadcast_to(std, out.shape)
    while (bad := out <= 0).any():
        out[bad] = mean[bad] + std[bad] * draws.standard_normal(bad)
    return out


def lognormal(draws: Draws, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Lognormal with this mean and std: ``s = sqrt(ln(std^2/mean^2 + 1))``, ``m = ln(mean) - s^2/2``."""
    variance = np.log1p(np.square(np.divide(std, mean)))
    return np.exp(np.log(mean) - variance / 2 + np.sqrt(variance) * draws.standard_normal())


def half_normal(draws: Draws, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Shifted half-normal ``a + s|Z|`` with this mean and std.

    Matching both moments needs ``s = std / sqrt(1 - 2/pi)`` and ``a = mean - s sqrt(2/pi)``. Where that
    would make ``a`` negative (``std > 0.7555 mean``), ``a`` is 0 and only the mean is matched: the plain
    half-normal, whose std is 0.7555 of its mean.
    """
    scale = np.minimum(np.divide(std, _HALF_NORMAL_STD), np.divide(mean, _HALF_NORMAL_MEAN))
    return mean - scale * _HALF_NORMAL_MEAN + scale * np.abs(draws.standard_normal())


def uniform(draws: Draws, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Uniform on ``mean -+ sqrt(3) std``, which matches both moments.

    (The 5th to 95th percentile of a Gaussian would be ``mean -+ 1.645 std``: nearly the same range.)
    Where the lower end would be negative (``std > 0.577 mean``) the range is ``(0, 2 mean)`` and only
    the mean is matched.
    """
    half = np.minimum(np.sqrt(3) * std, mean)
    return mean + half * (1 - 2 * draws.random())


def exponential(draws: Draws, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Exponential with this mean (its std is the mean too); ``std`` is ignored."""
    return mean * draws.standard_exponential()


def gamma(draws: Draws, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Gamma with this mean and std: shape ``(mean/std)^2``, scale ``std^2/mean``."""
    spread = np.where(np.greater(std, 0), std, 1.0)
    drawn = draws.standard_gamma(np.square(np.divide(mean, spread))) * np.square(spread) / mean
    return np.where(np.greater(std, 0), drawn, mean)


def pareto(draws: Draws, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Pareto type I with this mean and std: tail index ``1 + sqrt(1 + (mean/std)^2)``, always above 2."""
    spread = np.where(np.greater(std, 0), std, 1.0)
    index = 1 + np.sqrt(1 + np.square(np.divide(mean, spread)))
    return np.where(np.greater(std, 0), _pareto(draws, mean, index), mean)


def pareto_tail(index: float) -> Distribution:
    """Pareto type I of a fixed tail index > 1; its ``std`` argument is ignored (infinite if index <= 2)."""

    def sample(draws: Draws, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
        return _pareto(draws, mean, index)

    return sample


def _pareto(draws: Draws, mean: np.ndarray, index: np.ndarray | float) -> np.ndarray:
    # P(X > x) = (smallest / x)^index and E X = smallest index / (index - 1)
    smallest = mean * (1 - 1 / np.asarray(index))
    return smallest * np.exp(draws.standard_exponential() / index)


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
