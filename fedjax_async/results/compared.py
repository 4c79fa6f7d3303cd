"""The methods of a comparison: their names, and the folders of their runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_async import check, registry
from fedjax_async.config import own
from fedjax_async.config.kinds import require_kind


def folder_name(method: str) -> str:
    """The name of a method's folder in a comparison.

    >>> folder_name("fedbuff@buffer:size=5")
    'fedbuff_buffer_size_5'
    """
    return re.sub(r"[^\w.-]+", "_", method)


def methods_by_name(methods: Any) -> dict[str, str]:
    """Name of a row -> spec or named object, from a list of both, or from a dict of names and objects."""
    listed = isinstance(methods, (Sequence, Mapping)) and not isinstance(methods, str)
    allowed = "a list of methods, such as ['fedavg', 'fedasync'], or a dict such as {'mine': Method(rule)}"
    check.require(listed, "methods", methods, allowed)
    check.require(len(methods) > 0, "methods", list(methods), "at least one method")
    if isinstance(methods, Mapping):
        for name, one in methods.items():
            allowed = "a Method; a spec is its own name, so give a list: ['fedavg', named('mine', Method(rule))]"
            check.require(not isinstance(one, str) or one == name, f"methods[{name!r}]", one, allowed)
            with check.called({"method": f"methods[{name!r}]"}):
                if not isinstance(one, str):
                    require_kind("method", one)
        methods = [one if isinstance(one, str) else own.named(name, one) for name, one in methods.items()]
    given = [method if isinstance(method, str) else own.as_setting("method", method) for method in methods]
    for one in given:
        own.require_fitting("method", one)
        own.require_names({"method": one}, "its row of a comparison")
    by_name = {str(method): method for method in given}
    names = list(by_name)
    check.require(len(by_name) == len(methods), "methods", list(map(str, given)), "different from each other")
    parsed = [_parsed(one) for one in names]
    distinct = all(one not in parsed[:i] for i, one in enumerate(parsed))
    check.require(distinct, "methods", names, "different from each other, but two have the same name and options")
    return by_name


def _parsed(method: str) -> Any:
    """A method's spec with its options read; a spec that cannot be read as it stands, for ``prepare`` to refuse."""
    try:
        return tuple(map(registry.parse_spec, ("method", "timing"), method.split("@")))
    except ValueError:
        return method
