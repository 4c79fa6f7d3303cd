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
        part = registry.spec("part", PARTS, text)
        part.make()  # checks the ranges
        check.require(part.name not in found, "part", part.name, "given once")
        found[part.name] = part.within(f"{rule.scope}.{part.name}")
    return Spec(_with_parts, rule.later(), *found.values(), names=tuple(found))


def _with_parts(rule: functools.partial[ServerAlgorithm], *parts: Part, names: tuple[str, ...]) -> ServerAlgorithm:
    return with_parts(rule.func, dict(zip(names, parts, strict=True)))(**rule.keywords)
