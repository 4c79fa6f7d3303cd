"""The text of a setting: the names in it, in order, each with its options.

``faults="drop:probability=0.1+late:extra=30"`` has two. A method's text has its rule, then server parts after ``+``,
then a timing or, without a server, an exchange of its own after ``@``: ``fedbuff+swa:start=0.5@buffer:size=5``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fedjax_async.base import grammar, registry
from fedjax_async.base.grammar import Name

# settings that may join names by +
JOINED = ("policy", "availability", "faults", "augment", "privacy")


class Names(NamedTuple):
    """What the text of a setting has; ``str()`` is the text."""

    parts: tuple[Name, ...]  # of a method: its rule, then its server parts
    joint: str = "+"
    clock: Name | None = None  # a method's own timing or exchange

    def put(self, index: int, part: Name) -> Names:
        """The same names with another part in this place."""
        return self._replace(parts=(*self.parts[:index], part, *self.parts[index + 1 :]))

    def __str__(self) -> str:
        return self.joint.join(map(str, self.parts)) + ("" if self.clock is None else f"@{self.clock}")


def known_parts() -> dict[str, Callable[..., object]]:
    """The server parts by name, those of plugins too."""
    from fedjax_async.server.parts import PARTS  # noqa: PLC0415 (needs JAX)

    return registry.entries("part", PARTS)


def texts_in(field: str, text: str) -> tuple[list[str], str | None]:
    """The texts of the parts, and of a method's own timing or exchange, as they stand there."""
    if field == "metrics":
        return grammar.listed(text), None
    if field != "method":
        return grammar.joined(text) if field in JOINED else [text], None
    whole, at, clock = str(text).partition("@")
    return grammar.with_parts(whole, known_parts()) if "+" in whole else [whole], clock if at else None


def read(field: str, text: str) -> Names:
    """The names in the text of a setting; ``ValueError`` where options are not written ``key=value``."""
    parts, clock = texts_in(field, text)
    read = tuple(_read("part" if field == "method" and i else field, one) for i, one in enumerate(parts))
    return Names(read, "," if field == "metrics" else "+", None if clock is None else _read("timing", clock))


def _read(kind: str, text: str) -> Name:
    try:
        return registry.read(kind, text)
    except ValueError:
        from fedjax_async.config.registries import REGISTRIES  # noqa: PLC0415 (needs JAX)

        exchange = kind == "timing" and text.partition(":")[0] in registry.entries("exchange", REGISTRIES["exchange"])
        kind = "exchange" if exchange else kind
        return registry.read(kind, text, REGISTRIES[kind])  # says how it is written


def names_in(field: str, text: str) -> list[str]:
    """The names alone; a method's parts start with ``+``, its own timing or exchange with ``@``."""
    parts, clock = texts_in(field, text)
    first, *others = (part.partition(":")[0] for part in parts)
    mark = "+" if field == "method" else ""
    return [first, *(mark + other for other in others), *([] if clock is None else ["@" + clock.partition(":")[0]])]
