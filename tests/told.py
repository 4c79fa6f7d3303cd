"""What calls say, and equal results: helpers that most test files share."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest


def refusal(call: Callable[..., object], *given: Any, **options: Any) -> str:
    """The message of the ``ValueError`` that a call must raise, which is one line."""
    with pytest.raises(ValueError) as error:
        call(*given, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def is_refused(match: str, call: Callable[..., object], *given: Any, **options: Any) -> None:
    """Assert that a call raises a ``ValueError`` of one line that has the pattern ``match``."""
    assert re.search(match, text := refusal(call, *given, **options)), text


def warned(
    call: Callable[..., Any], *given: Any, kind: type[Warning] = Warning, **options: Any
) -> tuple[Any, list[str]]:
    """What a call returns, and the texts of its warnings of this kind."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = call(*given, **options)
    return result, [str(one.message) for one in found if issubclass(one.category, kind)]


def same(one: Any, other: Any) -> None:
    """Assert that two trees have equal leaves, bit for bit."""
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(x, y)
