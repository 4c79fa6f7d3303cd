"""A method's rule with its server parts, as a function of its traced numbers.

Runs that differ only in these numbers share compiled programs. In ``hyper`` an option of the rule is called
``server.OPTION``, an option of a part ``server.PART.OPTION``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from fedjax_async import check, registry
from fedjax_async.engine.components import Hyper, ServerFamily, split_options
from fedjax_async.server import PARTS, with_parts
from fedjax_async.types import ServerAlgorithm


def server_family(
    factory: Callable[..., ServerAlgorithm], options: Mapping[str, Any], specs: Iterable[str], method: str
) -> tuple[ServerFamily, dict[str, float]]:
    """The rule of ``factory`` with these options and parts, and its traced numbers.

    Equal arguments give the same function. ``ValueError`` for unknown parts and options, values out of range, and
    parts that the rule cannot use, naming the spec ``method``.
    """
    parts, hyper = _parts_of(specs)
    rule, numbers = _split("", factory, options)
    family = _family(rule, parts, repr((rule.static, [part.static for part in parts])))
    hyper |= numbers
    if parts:
        try:
            family(hyper)
        except ValueError as error:
            raise ValueError(f"method = {method!r}: {error}") from error
    return family, hyper


class _Factory(NamedTuple):
    """A factory with its static options and the names of its traced ones; ``name``: the part's, empty for the rule."""

    name: str
    factory: Callable[..., Any]
    static: tuple[tuple[str, Any], ...]
    traced: tuple[str, ...]

    def made(self, hyper: Hyper) -> Any:
        start = f"server.{self.name}." if self.name else "server."
        return self.factory(**dict(self.static), **{option: hyper[start + option] for option in self.traced})


@lru_cache(maxsize=64)
def _family(rule: _Factory, parts: tuple[_Factory, ...], text: str) -> ServerFamily:
    """A rule as a function of its traced options.

    ``text``: the static options as a text, to keep 1, 1.0 and True apart in the cache.
    """

    def server(hyper: Hyper) -> ServerAlgorithm:
        factory = with_parts(rule.factory, {part.name: part.made(hyper) for part in parts}) if parts else rule.factory
        algorithm: ServerAlgorithm = rule._replace(factory=factory).made(hyper)
        return algorithm

    return server


def _split(name: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> tuple[_Factory, dict[str, float]]:
    """A factory with its options split, and the traced numbers by their names in ``hyper``."""
    static, traced = split_options(factory, options)
    start = f"server.{name}." if name else "server."
    return _Factory(name, factory, static, tuple(traced)), {start + option: value for option, value in traced.items()}


def _parts_of(specs: Iterable[str]) -> tuple[tuple[_Factory, ...], dict[str, float]]:
    """The server parts of these specs, and their traced numbers; ``ValueError`` for wrong names, options and values."""
    found: list[_Factory] = []
    hyper: dict[str, float] = {}
    for spec in specs:
        registry.bind("part", PARTS, spec)()  # checks names and ranges
        name, options = registry.parse_spec("part", spec)
        check.require(name not in [part.name for part in found], "part", name, "given once")
        part, numbers = _split(name, registry.find("part", PARTS, name), options)
        found.append(part)
        hyper |= numbers
    return tuple(found), hyper
