"""A rule with server parts, as a spec made of specs."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from fedjax_async import check, registry
from fedjax_async.server import PARTS, Part, with_parts
from fedjax_async.spec import Spec
from fedjax_async.types import ServerAlgorithm


def with_server_parts(rule: Spec, texts: Iterable[str]) -> Spec:
    """The spec of a rule with the server parts that these texts name; ``ValueError`` for wrong names and values."""
    found: dict[str, Spec] = {}
    for text in texts:
        registry.bind("part", PARTS, text)()  # checks names and ranges
        name, options = registry.parse_spec("part", text)
        check.require(name not in found, "part", name, "given once")
        found[name] = Spec(registry.find("part", PARTS, name), **options).within(f"{rule.scope}.{name}", name=name)
    return Spec(_with_parts, rule.later(), *found.values(), names=tuple(found))


def _with_parts(rule: functools.partial[ServerAlgorithm], *parts: Part, names: tuple[str, ...]) -> ServerAlgorithm:
    return with_parts(rule.func, dict(zip(names, parts, strict=True)))(**rule.keywords)
