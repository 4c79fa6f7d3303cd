"""Statistics over seeds: 95 % intervals of means, and paired tests between methods that ran with the same seeds."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_async.base import check
from fedjax_async.results.metrics import mean_and_std, numbers_in

LEVEL = 0.95
FEWEST = 3  # seeds for paired tests
LEAST = 0.0001  # smaller p values are printed as such
DECIMALS = 4  # of differences in percent: accuracies are float32, whose rounding errors would rank equal ones


class Interval(NamedTuple):
    """The 95 % interval of a mean; NaN for a single seed."""

    low: float
    high: float


ANY = (-math.inf, math.inf)
INTERVAL = "95% interval (t)"  # the column of the tables


@np.errstate(over="ignore", invalid="ignore")  # losses of a diverged run: the ends are infinite or NaN
def interval(values: Sequence[float] | np.ndarray, limits: tuple[float, float] = ANY) -> Interval:
    """The 95 % interval of the mean of one value per seed; NaN for one value.

    It is mean ± t s / sqrt(n), with Student's t at n - 1 degrees of freedom and the sample standard deviation s.
    ``limits``: the range that the mean cannot leave, such as ``metrics.limits`` of the column; the interval is cut off
    there.

    >>> [round(end, 2) for end in interval([74.0, 75.0, 76.0])]
    [72.52, 77.48]
    >>> [round(end, 2) for end in interval([97.0, 98.0, 99.9], limits=(0.0, 100.0))]
    [94.64, 100.0]
    """
    from scipy import stats  # noqa: PLC0415

    array = numbers_in("values", values)
    if array.size == 1:
        return Interval(math.nan, math.nan)
    mean, std = mean_and_std(array)
    half = stats.t.ppf((1 + LEVEL) / 2, array.size - 1) * std / math.sqrt(array.size)
    return Interval(*(float(end) for end in np.clip([mean - half, mean + half], *limits)))


class PValue(float):
    """A p value: a number whose text is never zero.

    >>> f"p = {PValue(0.0002)}, p = {PValue(0.0)}"
    'p = 0.0002, p = <0.0001'
    """

    def __str__(self) -> str:
        """Four decimals, or that it is smaller."""
        return f"<{LEAST}" if self < LEAST else f"{float(self):.4f}"

    def __format__(self, how: str) -> str:
        """The text, unless a format is given."""
        return format(float(self), how) if how else str(self)


class Paired(NamedTuple):
    """Two-sided p values of the hypothesis that two methods do not differ; NaN if a difference is not finite."""

    t: float
    wilcoxon: float


@np.errstate(over="ignore", invalid="ignore")
def paired(differences: Sequence[float] | np.ndarray) -> Paired:
    """Paired t test and Wilcoxon's signed-rank test of one difference per seed.

    Zero differences are left out of the signed ranks. Wilcoxon's p is exact, also with ties; with n differences that
    are not zero it is at least 2^(1-n). If all differences are zero, both p are 1.
    """
    from scipy import stats  # noqa: PLC0415

    array = numbers_in("differences", differences, least=2)
    if not np.isfinite(array).all():
        return Paired(math.nan, math.nan)
    if not array.any():
        return Paired(1.0, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # equal differences: t is infinite and p is zero
        t = float(stats.ttest_1samp(array, 0.0).pvalue)
    return Paired(t, _wilcoxon(array))


def _wilcoxon(differences: np.ndarray) -> float:
    """The share of all combinations of signs with a rank sum at least as far from its mean as the observed one."""
    from scipy import stats  # noqa: PLC0415

    # rounded, so that rounding errors do not rank differences that are equal
    differences = np.round(differences / np.max(np.abs(differences)), 9)
    differences = differences[differences != 0]
    twice = np.rint(2 * stats.rankdata(np.abs(differences))).astype(np.int64)  # whole numbers, also of tied ranks
    share = np.ones(1)  # of the combinations of the signs so far, by the sum of the ranks with a plus
    for rank in twice:
        share = (np.append(share, np.zeros(rank)) + np.append(np.zeros(rank), share)) / 2
    away = np.abs(2 * np.arange(share.size) - twice.sum())  # of each sum from the mean
    return float(min(1.0, share[away >= abs(2 * twice[differences > 0].sum() - twice.sum())].sum()))


def holm(p_values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Holm's step-down correction of the p values of several tests; float64[tests]. NaN is no test and stays NaN.

    The k-th smallest of m is multiplied by m - k + 1, then raised to the one before it and limited to 1.

    Source: Holm, "A simple sequentially rejective multiple test procedure", 1979.

    >>> holm([0.01, 0.04, 0.03]).tolist()
    [0.03, 0.06, 0.06]
    """
    values = numbers_in("p_values", p_values, least=0)
    possible = bool(np.all(np.isnan(values) | ((values >= 0) & (values <= 1))))
    check.require(possible, "p_values", p_values, "numbers in [0, 1], or NaN")
    adjusted = np.full_like(values, math.nan)
    tests = np.flatnonzero(~np.isnan(values))
    order = tests[np.argsort(values[tests], kind="stable")]
    scaled = values[order] * np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return adjusted


@np.errstate(over="ignore", invalid="ignore")
def pairs(
    groups: Mapping[str, Mapping[str, Mapping[int, float]]],
    *,
    larger_is_better: bool = True,
    limits: tuple[float, float] = ANY,
) -> list[dict[str, object]]:
    """One row per pair of methods of a group: mean difference over the seeds that both have, interval, p values.

    Args:
      groups: name -> method -> seed -> value. Within a group, runs with the same seed must have the same data and
        delays. Pairs with fewer than three common seeds are left out.
      limits: the range of the values; intervals of differences are cut off at its length. Differences of values with
        such a range, which are accuracies in percent, are rounded to four decimals.
      larger_is_better: whether a positive difference means that the first method is better.

    Returns: rows for a table. Holm's correction is over all rows.
    """
    rows: list[dict[str, Any]] = []
    widest = limits[1] - limits[0]
    for where, group in groups.items():
        for first, second in itertools.combinations(group, 2):
            seeds = [seed for seed in group[first] if seed in group[second]]
            if len(seeds) < FEWEST:
                continue
            differences = np.array([group[first][seed] - group[second][seed] for seed in seeds])
            differences = differences if math.isinf(widest) else np.round(differences, DECIMALS)
            mean = float(mean_and_std(differences)[0])
            better = "-" if not mean or math.isnan(mean) else first if (mean > 0) == larger_is_better else second
            found = paired(differences)
            rows.append(
                {
                    **({"where": where} if where else {}),
                    "first": first,
                    "second": second,
                    "seeds": len(seeds),
                    "first - second": mean,
                    INTERVAL: interval(differences, (-widest, widest)),
                    "better": better,
                    "p (t)": PValue(found.t),
                    "p (Wilcoxon)": PValue(found.wilcoxon),
                }
            )
    for name in ("p (t)", "p (Wilcoxon)"):
        for row, p in zip(rows, holm([row[name] for row in rows]), strict=True):
            row[f"{name[:-1]}, Holm)"] = PValue(p)
    return rows


def explained(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    """The text above the table of :func:`pairs`; ``title``: the name of the compared number."""
    fewest = min(row["seeds"] for row in rows)
    tests = sum(not math.isnan(row["p (t)"]) for row in rows)
    lost = f" ({len(rows) - tests} without p: a value is not finite)" if tests < len(rows) else ""
    return (
        f"Paired differences over seeds: {title}.\n"
        "p: two-sided paired t test and Wilcoxon signed-rank test; Holm: corrected for "
        f"{tests} comparison{'' if tests == 1 else 's'}{lost}.\n"
        f"With {fewest} seeds, Wilcoxon's p is never below {2.0 ** (1 - fewest):.2g}."
    )
