"""Labels: the names under which a user shows methods or other values, ``Ours`` for ``fedasync:mixing=0.4``."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fedjax_async.base import check

LONGEST = 60  # characters of a label
RESERVED = "=:@+/\\"  # what separates the parts of a spec or of a path
ALLOWED = f"1 to {LONGEST} printable characters, the first a letter or digit, without any of {' '.join(RESERVED)}"


def require_label(field: str, label: object) -> None:
    """``ValueError`` for a text that cannot be a label."""
    text = label if isinstance(label, str) else ""
    fits = 0 < len(text) <= LONGEST and text[0].isalnum() and text.isprintable() and text.strip() == text
    check.require(fits and not set(text) & set(RESERVED), field, label, ALLOWED)


def plain(label: str) -> str:
    """A label as the name of an object, as ``own.named`` takes it."""
    return re.sub(r"[^\w.-]+", "_", label, flags=re.ASCII)


def split(word: str) -> tuple[str, str]:
    """The label of ``LABEL=SPEC`` and its spec; no label for a spec alone, whose ``=`` follows a ``:``, ``@`` or ``+``.

    >>> split("Ours=fedasync:mixing=0.4"), split("fedasync:mixing=0.4")
    (('Ours', 'fedasync:mixing=0.4'), ('', 'fedasync:mixing=0.4'))
    """
    options = min((at for at in map(word.find, ":@+") if at >= 0), default=len(word))
    equals = word.rfind("=", 0, options)  # of several the last one, so that a "=" in a label is told
    if equals < 0:
        return "", word
    label, spec = word[:equals].strip(), word[equals + 1 :].strip()
    require_label("label", label)
    check.require(bool(spec), "method", word, "LABEL=METHOD, such as Ours=fedasync:mixing=0.4")
    return label, spec


def by_label(words: Iterable[str]) -> dict[str, str]:
    """The methods of a command line by the names of their rows: their labels, or the specs themselves."""
    words = list(words)
    found = {label or spec: spec for label, spec in map(split, words)}
    names = [label or spec for label, spec in map(split, words)]
    twice = ", ".join(dict.fromkeys(name for name in names if names.count(name) > 1))
    check.require(not twice, "methods", words, f"different from each other, but {twice} is there twice")
    return found
