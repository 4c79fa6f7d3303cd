"""The examples in docstrings are executed."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(path for path in (ROOT / "fedjax_async").rglob("*.py") if ">>> " in path.read_text(encoding="utf-8"))
MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in SOURCES]


def test_there_are_examples():
    assert len(MODULES) > 10


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    # from the module table: a function of the same name may hide the module in its package
    module = importlib.import_module(name)
    results = doctest.testmod(module, optionflags=doctest.FAIL_FAST)
    assert results.attempted > 0 and results.failed == 0
