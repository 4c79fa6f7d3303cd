"""Wrong input as a table: every call is refused by a ``ValueError`` of one line that says why."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest


def called(call: Callable[[], object]) -> object:
    """The result of a call without arguments."""
    return call()


def refusals(*cases: tuple[Any, ...], by: Callable[..., object] = called) -> Callable[..., None]:
    """A test of a table ``(*arguments, says)``: ``by(*arguments)`` is refused, and the error says so.

    ``says`` is a part of the error's text, or a pattern that it has.
    """

    @pytest.mark.parametrize(("arguments", "says"), [(case[:-1], case[-1]) for case in cases])
    def test(arguments: tuple[Any, ...], says: str) -> None:
        with pytest.raises(ValueError) as error:
            by(*arguments)
        text = str(error.value)
        assert says in text or re.search(says, text), text
        assert "\n" not in text

    return test
