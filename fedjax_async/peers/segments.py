"""Rows of unequal length, kept one after the other: row r is ``values[bounds[r]:bounds[r + 1]]``."""

from __future__ import annotations

import numpy as np


def bounds_of(counts: np.ndarray) -> np.ndarray:
    """The bounds of rows with these lengths; int64[rows + 1]."""
    bounds = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=bounds[1:])
    return bounds


def members(bounds: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The positions of all values of these rows, one row after the other; int64.

    >>> members(np.array([0, 2, 5]), np.array([1, 0, 1]))
    array([2, 3, 4, 0, 1, 2, 3, 4])
    """
    counts = bounds[rows + 1] - bounds[rows]
    before = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(bounds[rows] - before, counts)


def search(bounds: np.ndarray, values: np.ndarray, rows: np.ndarray, wanted: np.ndarray, side: str) -> np.ndarray:
    """``np.searchsorted`` in row ``rows[k]`` for ``wanted[k]``, for all k at once; positions in ``values``, int64.

    The values of each row ascend. The position is between ``bounds[row]`` and ``bounds[row + 1]``, both included.

    >>> search(np.array([0, 2, 5]), np.array([1, 4, 0, 2, 4]), np.array([0, 1, 1]), np.array([4, 4, 9]), "left")
    array([1, 4, 5])
    """
    low, high = bounds[rows], bounds[rows + 1]
    if not len(values):
        return low
    longest = int((high - low).max(initial=0))
    last = len(values) - 1
    for _ in range(longest.bit_length()):
        middle = (low + high) >> 1
        found = values[np.minimum(middle, last)]
        later = (found < wanted) if side == "left" else (found <= wanted)
        later &= low < high
        low = np.where(later, middle + 1, low)
        high = np.where(later, high, middle)
    return low
