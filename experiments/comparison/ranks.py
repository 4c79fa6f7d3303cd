"""Ranks of methods over blocks: Friedman's test, Nemenyi's critical difference, paired tests against one method.

Source: Demsar, "Statistical comparisons of classifiers over multiple data sets", 2006, sections 3.1.3 and 3.2.2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy import stats

from fedjax_async.base import check
from fedjax_async.results.significance import holm, paired

LEVEL = 0.05


class Friedman(NamedTuple):
    """Friedman's statistic and Iman and Davenport's F of the hypothesis that all methods are equal; p is that of F."""

    chi_square: float
    f: float
    p: float


def ranked(scores: np.ndarray, *, larger_is_better: bool = True) -> np.ndarray:
    """Ranks of each block's scores [blocks, methods]: 1 is the best, equal ones share their mean; NaN is the worst.

    >>> ranked(np.array([[0.5, 0.9, 0.9], [0.1, float("nan"), 0.3]])).tolist()
    [[3.0, 1.5, 1.5], [2.0, 3.0, 1.0]]
    """
    array = np.asarray(scores, np.float64)
    check.require(array.ndim == 2 and array.size > 0, "scores", array.shape, "of shape [blocks, methods]")
    keys = np.where(np.isnan(array), np.inf, -array if larger_is_better else array)
    return np.asarray(stats.rankdata(keys, axis=1))


def friedman(ranks: np.ndarray) -> Friedman:
    """The tests of ranks [N blocks, k methods], corrected for ties.

    chi^2 = (k - 1) sum_j (R_j - N (k + 1) / 2)^2 / sum_ij (r_ij - (k + 1) / 2)^2, with R_j the sum of the ranks of
    method j; F = (N - 1) chi^2 / (N (k - 1) - chi^2) has k - 1 and (k - 1)(N - 1) degrees of freedom. Where all blocks
    agree, F is infinite, and p is that of chi^2: exactly, k! ^ (1 - N), if no ranks are tied. One block says nothing:
    p is NaN.
    """
    blocks, methods = _shape(ranks)
    if blocks == 1:
        return Friedman(math.nan, math.nan, math.nan)
    middle = (methods + 1) / 2
    spread = float(np.sum((ranks - middle) ** 2))
    if spread == 0:
        return Friedman(0.0, 0.0, 1.0)
    chi_square = (methods - 1) * float(np.sum((ranks.sum(axis=0) - blocks * middle) ** 2)) / spread
    left = blocks * (methods - 1) - chi_square
    if left <= 1e-9 * chi_square:  # all blocks agree
        orders = sum(math.lgamma(1 + methods) - sum(map(math.lgamma, 1.0 + _ties(row))) for row in ranks[1:])
        return Friedman(chi_square, math.inf, math.exp(-orders))
    f = (blocks - 1) * chi_square / left
    return Friedman(chi_square, f, float(stats.f.sf(f, methods - 1, (methods - 1) * (blocks - 1))))


def _ties(row: np.ndarray) -> np.ndarray:
    """How many methods share each of the ranks of a block."""
    return np.unique(row, return_counts=True)[1].astype(np.float64)


def critical_difference(methods: int, blocks: int, level: float = LEVEL) -> float:
    """Nemenyi's: mean ranks of two of ``methods`` that are further apart differ at ``level``.

    q sqrt(k (k + 1) / (6 N)), with q the quantile of the Studentised range of k values, divided by sqrt(2).

    >>> round(critical_difference(4, 14), 2)  # Demsar's example
    1.25
    """
    check.whole("methods", methods, 2)
    check.whole("blocks", blocks)
    check.in_range("level", level, 1e-6, 0.5)
    quantile = float(stats.studentized_range.ppf(1 - level, methods, np.inf)) / math.sqrt(2)
    return quantile * math.sqrt(methods * (methods + 1) / (6 * blocks))


def standardised(scores: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Scores [blocks, methods], divided by the deviation between the methods' means in their group of blocks.

    ``groups`` [blocks]: the world and task of each block, which makes scores of different tasks comparable. A group
    whose methods are all equal becomes zero. A method with NaN in a group does not count in its deviation.
    """
    found = np.zeros_like(scores, dtype=np.float64)
    for group in np.unique(groups):
        rows = groups == group
        means = scores[rows].mean(axis=0)
        deviation = np.std(means[~np.isnan(means)]) if not np.isnan(means).all() else 0.0
        found[rows] = np.where(np.isnan(scores[rows]), np.nan, scores[rows] / deviation if deviation > 0 else 0.0)
    return found


class Against(NamedTuple):
    """A method against the one that all are compared with: positive differences are better."""

    difference: float  # mean over the blocks, in deviations between methods
    p: float  # Wilcoxon's signed-rank test, two-sided
    corrected: float  # by Holm, over all methods


def against(scores: np.ndarray, groups: np.ndarray, control: int) -> list[Against]:
    """Every method against method ``control``; scores [blocks, methods], larger is better. The control has NaN."""
    blocks, methods = _shape(scores)
    check.whole("control", control, 0, methods - 1)
    check.require(len(groups) == blocks, "groups", len(groups), f"{blocks} entries")
    values = standardised(scores, groups)
    differences = values - values[:, [control]]
    p = [math.nan if k == control else paired(differences[:, k]).wilcoxon for k in range(methods)]
    return [
        Against(float(difference), float(one), float(all_of_them))
        for difference, one, all_of_them in zip(differences.mean(axis=0), p, holm(p), strict=True)
    ]


def _shape(array: np.ndarray) -> tuple[int, int]:
    check.require(np.ndim(array) == 2 and array.shape[1] > 1, "methods", np.shape(array), "at least two")
    return array.shape[0], array.shape[1]
