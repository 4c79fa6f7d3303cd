"""A method of a comparison by its name or by its rule alone; the one to which times are relative."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from fedjax_async import check

BASELINE = "fedavg"  # the rule of the method to which times are relative by default, if it is compared


def _rule(method: str) -> str:
    """The name of a method's rule, without options, parts and timing."""
    return re.split("[:+@]", str(method))[0]


def method_in(name: Any, methods: Iterable[str]) -> str | None:
    """The method called ``name``, or else the only one with this rule, whatever its options, parts and timing.

    >>> method_in("fedavg", ["asgd", "fedavg@cohort:size=10"]), method_in("0.7", ["asgd"])
    ('fedavg@cohort:size=10', None)
    """
    methods = list(methods)
    if name in methods:
        return str(name)
    like = [method for method in methods if _rule(method) == name]
    return like[0] if len(like) == 1 else None


def baseline_of(methods: Iterable[str], given: str | None = None) -> str:
    """The method to which times are relative: the ``given`` one, else ``fedavg``, else the first.

    ``fedavg`` also stands for ``fedavg@cohort:size=10``; by default, of several the bare one, else the first.
    ``ValueError`` if the given one is not among the methods, or could be several of them.
    """
    methods = list(methods)
    if given is not None:
        found = method_in(given, methods)
        check.require(found is not None, "baseline", given, "one of " + ", ".join(methods))
        return str(found)
    like = [method for method in methods if _rule(method) == BASELINE]
    return BASELINE if BASELINE in methods else [*like, *methods][0]
