"""Input checks of the clock, stricter than ``check``: nothing here may be a tracer or a word."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from fedjax_async import check


def is_real(value: Any) -> bool:
    """Whether ``value`` is a finite real number (truth values are none)."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def positive(field: str, value: Any) -> None:
    """A finite real number > 0; words (from a mistyped spec) are refused too."""
    check.require(is_real(value) and value > 0, field, value, "a finite number > 0")


def non_negative(field: str, value: Any) -> None:
    """A finite real number >= 0."""
    check.require(is_real(value) and value >= 0, field, value, "a finite number >= 0")


def optional_positive(field: str, value: Any) -> None:
    """``None`` or a finite real number > 0."""
    if value is not None:
        positive(field, value)


def optional_whole(field: str, value: Any, low: int = 1) -> None:
    """``None`` or a whole number >= ``low``."""
    if value is not None:
        check.whole(field, value, low=low)


def share(field: str, value: Any) -> None:
    """A finite real number in [0, 1]."""
    check.require(is_real(value) and 0 <= value <= 1, field, value, "between 0 and 1")
