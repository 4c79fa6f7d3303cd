"""The text of specs: ``NAME:key=value,key=value``, joined by ``+`` or commas, quoted where a value has one of these.

``registry.py`` turns a text into a ``Spec``, whose text is written here too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection
from typing import Any, NamedTuple

from fedjax_async.base import check


def is_plain_number(text: str) -> bool:
    """Whether ``text``, if it is a number, is written in ASCII digits; Python also reads ``1_0`` and other scripts."""
    return text.isascii() and "_" not in text


def parse_value(text: str) -> str | float | None:
    """``"3"`` -> 3, ``"0.5"`` -> 0.5, ``"true"`` -> True, ``"none"`` -> None, else the text without its quotes."""
    if re.fullmatch(_QUOTED, text):
        return text[1:-1]
    plain = {"true": True, "false": False, "none": None}
    if text.lower() in plain:
        return plain[text.lower()]
    if not is_plain_number(text):
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


_NEXT_PART = r"\+(?=[a-z_]*(?::|\+|$))"
_QUOTED = r"\"[^\"]*\"|'[^']*'"
_QUOTED_VALUE = re.compile(rf"(?<==)\s*(?:{_QUOTED})(?=\s*(?:[,+]|$))")


def split(spec: str, separator: str) -> list[str]:
    """``re.split`` of a spec, or of several, except within quoted values.

    >>> split("csv:path='a,b',repeat=5", ",")
    ["csv:path='a,b'", 'repeat=5']
    """
    plain = _QUOTED_VALUE.sub(lambda found: "q" * len(found[0]), spec)
    cuts = [(0, 0), *(found.span() for found in re.finditer(separator, plain)), (len(spec), len(spec))]
    return [spec[end:start] for (_, end), (start, _) in itertools.pairwise(cuts)]


def items_of(spec: str) -> list[str]:
    """The options of a spec as they stand there: ``["key=value", ...]``."""
    return [item for item in split(spec.partition(":")[2], ",") if item]


def quoted(text: str) -> str:
    """A text as the value of an option, in quotes if a comma or ``+`` in it would end it.

    ``ValueError`` if it has both kinds of quotes too.

    >>> quoted("a.csv"), quoted("a,b.csv")
    ('a.csv', '"a,b.csv"')
    >>> quoted("a+b"), quoted("1e+22")
    ('"a+b"', '1e+22')
    """
    if "," not in text and not re.search(_NEXT_PART, text) and not re.fullmatch(_QUOTED, text):
        return text
    quote = '"' if '"' not in text else "'"
    check.require(quote not in text, "value", text, "without one of the signs , + \" and '")
    return f"{quote}{text}{quote}"


class Name(NamedTuple):
    """One name with its options as a text has them.

    >>> part = Name("buffer", {"size": "3"})
    >>> str(part), part.options, str(part.put("size", "5").put("concurrency", "20"))
    ('buffer:size=3', {'size': 3}, 'buffer:size=5,concurrency=20')
    """

    name: str
    texts: dict[str, str]  # option -> the text of its value

    @property
    def options(self) -> dict[str, Any]:
        """Option -> its value."""
        return {option: parse_value(text) for option, text in self.texts.items()}

    def put(self, option: str, text: str) -> Name:
        """The same part with one option set."""
        return Name(self.name, {**self.texts, option: text})

    def without(self, options: Collection[str]) -> Name:
        """The same part without these options."""
        return Name(self.name, {option: text for option, text in self.texts.items() if option not in options})

    def __str__(self) -> str:
        return self.name + ":" * bool(self.texts) + ",".join(f"{key}={text}" for key, text in self.texts.items())


def option_text(path: str, value: object) -> str:
    """An option's value as a spec holds it: what :func:`parse_value` reads back."""
    if isinstance(value, (bool, type(None))):
        return str(value).lower()
    text = repr(value) if isinstance(value, float) else str(value).strip()
    fits = isinstance(value, (int, float, str)) and text != "" and "@" not in text
    check.require(fits, path, value, "a number, true, false, none, or a text without '@'")
    return quoted(text)


def joined(spec: str) -> list[str]:
    """The parts of a spec such as ``drop:probability=0.1+late:extra=30``.

    A ``+`` separates two parts only if a name follows it, and after the name the end, options or another ``+``:
    ``csv:path=a+b.csv`` is one part.
    """
    return split(spec, _NEXT_PART)


def with_parts(spec: str, known: Collection[str]) -> list[str]:
    """Split a method's spec into the specs of its rule and of its parts; ``known``: the names of all parts.

    A ``+`` may also be in the value of an option: it begins a part only if the name of a part follows, or if the spec
    before it has no options.

    >>> with_parts("fedbuff+swa:start=0.5+dominance", ["swa", "dominance"])
    ['fedbuff', 'swa:start=0.5', 'dominance']
    >>> with_parts("orthodyn:phases=orthograd+orthopos+swa", ["swa"])
    ['orthodyn:phases=orthograd+orthopos', 'swa']
    """
    found: list[str] = []
    for text in joined(spec):
        part = not found or ":" not in found[-1] or text.partition(":")[0] in known
        found = [*found, text] if part else [*found[:-1], f"{found[-1]}+{text}"]
    return found


def listed(spec: str) -> list[str]:
    """The specs in a comma-separated list; a comma before ``key=value`` belongs to the options of a spec.

    >>> listed("top:k=3,macro_f1,f:beta=2,weighted=true")
    ['top:k=3', 'macro_f1', 'f:beta=2,weighted=true']
    """
    return split(spec, r",(?=[^,:=]*(?::|,|$))")
