"""Defaults of methods that have changed: what a method's spec meant in a folder that an earlier version wrote.

``fedbuff`` alone is another run since its defaults changed. So the settings of such methods are kept with the defaults
that they leave open, under ``defaults`` in ``settings.json``. A file without them was written before the change: then
``CHANGED`` says what they were. Read back, a method that meant something else is an :class:`Earlier` method.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedjax_async.base import registry
from fedjax_async.base.factories import options_of
from fedjax_async.config.names import read

TIMING = "timing"  # among options of rules, none of which has this name
# Method -> the options whose defaults have changed, and its timing, with the values that they had before.
CHANGED: dict[str, dict[str, object]] = {
    "fedbuff": {"server_lr": 1.0, TIMING: "buffer:size=3"},
    "ca2fl": {"server_lr": 1.0, TIMING: "buffer:size=3"},
    "fadas": {"server_lr": 0.01, "adaptation": "inverse", TIMING: "buffer:size=3"},
}


class Earlier(str):
    """A method's spec as its file has it, with the spec that it means; it equals no other text."""

    meaning: str  # the spec with the defaults that it had, written out
    kept: dict[str, object] | None  # the defaults in the file, ``None`` if it has none

    def __new__(cls, spec: str, meaning: str = "", kept: Mapping[str, object] | None = None) -> Earlier:
        made = super().__new__(cls, spec)
        made.meaning, made.kept = meaning, None if kept is None else dict(kept)
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Earlier) and (str(self), self.meaning) == (str(other), other.meaning)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((str(self), self.meaning))

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        """As of a text: the parts are plain texts, also where there is one only."""
        return str(self).partition(sep)


def _left_open(method: object, timing: object) -> dict[str, object]:
    """The present values of defaults that have changed and that these two settings leave to the method."""
    from fedjax_async.base.method import factory_of  # noqa: PLC0415 (imports Spec)
    from fedjax_async.server.methods import METHODS  # noqa: PLC0415 (needs JAX)

    if not isinstance(method, str):
        return {}
    rule, *_ = read("method", method).parts
    if rule.name not in CHANGED:
        return {}
    fixed = {*rule.texts, *([TIMING] if "@" in method or timing is not None else [])}
    usual = METHODS[rule.name]
    present = {option: p.default for option, p in options_of(factory_of(usual.rule)).items()} | {TIMING: usual.timing}
    return {option: present[option] for option in CHANGED[rule.name] if option not in fixed}


def defaults_of(method: object, timing: object) -> dict[str, object] | None:
    """What a file keeps beside these settings: the defaults that they leave open, ``None`` if there are none."""
    return method.kept if isinstance(method, Earlier) else _left_open(method, timing) or None


def as_meant(method: Any, timing: object, kept: Mapping[str, object] | None) -> Any:
    """A method as a file means it that has these settings and ``kept`` as its defaults (``None``: it has none)."""
    present = _left_open(method, timing)
    if not present:
        return method
    names = read("method", method)
    known = CHANGED[names.parts[0].name] if kept is None else kept
    meant = {option: known.get(option, default) for option, default in present.items()}
    if meant == present:
        return method
    if TIMING in meant:
        names = names._replace(clock=registry.read("timing", str(meant.pop(TIMING))))
    rule = names.parts[0]
    for option, value in meant.items():
        rule = rule.put(option, str(value))
    return Earlier(method, str(names.put(0, rule)), kept)
