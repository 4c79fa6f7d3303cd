"""Input checks: each raises a one-line ``ValueError`` that names field, value and allowed range."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def require(condition: bool, field: str, value: Any, allowed: str) -> None:
    """Raise ``ValueError("{field} = {value}: must be {allowed}")`` unless ``condition``."""
    if not condition:
        raise ValueError(f"{field} = {value!r}: must be {allowed}")


def positive(field: str, value: Any) -> None:
    """A finite number > 0 (values that are not plain numbers, such as tracers, pass)."""
    if _is_number(value):
        require(math.isfinite(value) and value > 0, field, value, "a finite number > 0")


def non_negative(field: str, value: Any) -> None:
    """A finite number >= 0 (tracers pass)."""
    if _is_number(value):
        require(math.isfinite(value) and value >= 0, field, value, "a finite number >= 0")


def in_range(field: str, value: Any, low: float, high: float) -> None:
    """A number in the closed range [low, high] (tracers pass)."""
    if _is_number(value):
        require(low <= value <= high, field, value, f"between {low} and {high}")


def whole(field: str, value: Any, low: int = 1, high: float = math.inf) -> None:
    """An integer in [low, high]."""
    try:
        is_whole = int(value) == value and not isinstance(value, bool)
    except (TypeError, ValueError, OverflowError):
        is_whole = False
    allowed = f"a whole number >= {low}" if high == math.inf else f"a whole number from {low} to {high}"
    require(is_whole and low <= value <= high, field, value, allowed)


def one_of(field: str, value: Any, allowed: Iterable[Any]) -> None:
    """One of the listed values."""
    allowed = list(allowed)
    require(value in allowed, field, value, "one of " + ", ".join(map(str, allowed)))
