"""Wrong input as a table: every call is refused by a ``ValueError`` of one line that says why."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.told import refusal


def called(call: Callable[[], object]) -> object:
    """The result of a call without arguments."""
    return call()


def refusals(
    *cases: tuple[Any, ...], by: Callable[..., object] = called, folder: bool = False, begins: bool = False
) -> Callable[..., None]:
    """A test of a table ``(*arguments, says)``: ``by(*arguments)`` is refused, and the error says so.

    ``says`` is a part of the error's text, or a pattern that it has. ``folder``: the first argument of ``by`` is a
    new folder. ``begins``: the error's text begins with ``says``.
    """

    def check(says: str, *arguments: Any) -> None:
        text = refusal(by, *arguments)
        assert text.startswith(says) if begins else says in text or re.search(says, text), text

    def test(arguments: tuple[Any, ...], says: str) -> None:
        check(says, *arguments)

    def test_in_folder(tmp_path: Path, arguments: tuple[Any, ...], says: str) -> None:
        check(says, tmp_path, *arguments)

    table = pytest.mark.parametrize(("arguments", "says"), [(case[:-1], case[-1]) for case in cases])
    return table(test_in_folder if folder else test)


def last_options(specs: str) -> list[tuple[str, str]]:
    """Rows of specs, separated by spaces: the last option of each is refused, by its name and its value."""
    pairs = [(spec, *spec.replace(":", ",").rpartition(",")[2].split("=")) for spec in specs.split()]
    return [(spec, rf"{name} = '?{re.escape(value)}\b") for spec, name, value in pairs]
