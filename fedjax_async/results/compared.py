"""The methods of a comparison: their names, the folders of their runs, and the one to which times are relative."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedjax_async.base import check
from fedjax_async.config import own
from fedjax_async.config.kinds import require_kind
from fedjax_async.config.names import read
from fedjax_async.config.own import Chosen

BASELINE = "fedavg"  # the rule of the method to which times are relative by default, if it is compared


def folder_name(method: str) -> str:
    """The name of a method's folder in a comparison.

    >>> folder_name("fedbuff@buffer:size=5")
    'fedbuff_buffer_size_5'
    """
    return re.sub(r"[^\w.-]+", "_", method)


def methods_by_name(methods: Any) -> dict[str, Chosen]:
    """Name of a row -> spec or named object, from a list of both, or from a dict of names and objects."""
    listed = isinstance(methods, (Sequence, Mapping)) and not isinstance(methods, str)
    allowed = "a list of methods, such as ['fedavg', 'fedasync'], or a dict such as {'mine': Method(rule)}"
    check.require(listed, "methods", methods, allowed)
    check.require(len(methods) > 0, "methods", list(methods), "at least one method")
    if isinstance(methods, Mapping):
        for name, one in methods.items():
            allowed = "a Method or a Spec; a text names itself, so give a list: ['fedavg', named('mine', Method(rule))]"
            chosen = isinstance(one, (str, own.Named))
            check.require(not chosen or str(one) == name, f"methods[{name!r}]", one, allowed)
            with check.called({"method": f"methods[{name!r}]"}):
                if not chosen:
                    require_kind("method", one)
        methods = [one if isinstance(one, (str, own.Named)) else own.named(name, one) for name, one in methods.items()]
    given = [method if isinstance(method, str) else own.as_setting("method", method) for method in methods]
    for one in given:
        own.require_names({"method": one}, "its row of a comparison")
    by_name = {str(method): method for method in given}
    names = list(by_name)
    check.require(len(by_name) == len(methods), "methods", list(map(str, given)), "different from each other")
    parsed = [_parsed(one) for one in names]
    distinct = all(one not in parsed[:i] for i, one in enumerate(parsed))
    check.require(distinct, "methods", names, "different from each other, but two have the same name and options")
    return by_name


def _parsed(method: str) -> Any:
    """A method's text with its options read; one that cannot be read as it stands, for ``prepare`` to refuse."""
    try:
        names = read("method", method)
    except ValueError:
        return method
    clock = names.clock
    return [(part.name, part.options) for part in (*names.parts, *([] if clock is None else [clock]))]


def _rule(method: str) -> str:
    """The name of a method's rule, without options, parts and timing."""
    return re.split("[:+@]", str(method))[0]


def method_in(name: object, methods: Iterable[str]) -> str | None:
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
