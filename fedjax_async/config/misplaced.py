"""An option of a method that its rule does not take: which other part of the method, or which setting, takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from fedjax_async.base import registry
from fedjax_async.base.factories import options_of
from fedjax_async.base.grammar import Name
from fedjax_async.base.method import Method
from fedjax_async.clock import POLICIES, TIMINGS
from fedjax_async.compress import COMPRESSORS
from fedjax_async.config import words
from fedjax_async.config.names import Names, known_parts
from fedjax_async.local import OPTIMIZERS
from fedjax_async.peers import EXCHANGES, TOPOLOGIES

MOST = 2  # examples of names that take an option
Factories = Mapping[str, Callable[..., object]]
# settings with a default that depends on the method -> their registries
SETTINGS: dict[str, Factories] = {
    "policy": POLICIES,
    "topology": TOPOLOGIES,
    "optimizer": OPTIMIZERS,
    "compress": COMPRESSORS,
}


class Place(NamedTuple):
    """Where an option belongs."""

    owner: str  # "the timing"
    setting: str  # "method", or the setting of which it is an option
    examples: list[str]  # specs of this setting

    def text(self, written: Callable[[str, str], str]) -> str:
        """``the timing, as in EXAMPLE``; ``written(setting, spec)`` is how an example is written."""
        return f"{self.owner}, as in {' or '.join(written(self.setting, each) for each in self.examples)}"


def elsewhere(method: Names, usual: Method, option: str, value: str) -> Place | None:
    """What takes ``option``, which the rule of a method does not take; None if nothing of the method does.

    An option that papers call otherwise is found under its name here first. ``usual``: the method's entry in
    ``METHODS``.
    """
    called = words.OPTION.get(option, option)
    return _elsewhere(method, usual, called, value) or _elsewhere(method, usual, option, value)


def _elsewhere(method: Names, usual: Method, option: str, value: str) -> Place | None:
    for place, part in enumerate(method.parts[1:], 1):
        if _takes(known_parts(), part, option):
            return Place(f"the part {part.name}", "method", [str(method.put(place, part.put(option, value)))])
    kind, clocks = ("timing", TIMINGS) if usual.has_server else ("exchange", EXCHANGES)
    known: Factories = registry.entries(kind, clocks)
    clock = method.clock or registry.read(kind, getattr(usual, kind))
    if _takes(known, clock, option):
        return Place(f"the {kind}", "method", [str(method._replace(clock=clock.put(option, value)))])
    for setting, factories in SETTINGS.items():
        text = getattr(usual, setting, None)
        model = None if text is None else registry.read(setting, text)
        if model is not None and _takes(registry.entries(setting, factories), model, option):
            return Place(f"the setting {setting}", setting, [str(model.put(option, value))])
    others = [Name(name, {option: value}) for name in _takers(known, option)]
    if others:
        examples = [str(method._replace(clock=each)) for each in others]
        return Place(f"the {kind} {' or '.join(each.name for each in others)}", "method", examples)
    for setting, factories in SETTINGS.items():
        names = _takers(registry.entries(setting, factories), option)[:MOST]
        if names and not (setting == "topology" and usual.has_server):
            examples = [str(Name(name, {option: value})) for name in names]
            return Place(f"the setting {setting}", setting, examples)
    return None


def _takers(factories: Factories, option: str) -> list[str]:
    """The names whose factories have the option."""
    return [name for name, factory in factories.items() if option in options_of(factory)]


def in_others(
    registries: Mapping[str, Factories], given: Mapping[str, object], option: str, value: str
) -> Place | None:
    """The first of the ``given`` settings, besides the method, whose spec takes an option; None if none does.

    ``registries``: setting -> name -> factory.
    """
    for setting, text in given.items():
        if setting == "method" or not isinstance(text, str):
            continue
        known = registry.entries(setting, registries.get(setting, {}))
        try:
            part = registry.read(setting, text)
        except ValueError:  # its reader says what is wrong
            continue
        if _takes(known, part, option):
            return Place(f"the setting {setting}", setting, [str(part.put(option, value))])
    return None


def in_spec(setting: str, spec: str) -> str:
    """An example inside a message about a method's spec."""
    return spec if setting == "method" else f"{setting}={spec}"


def _takes(factories: Factories, part: Name, option: str) -> bool:
    """Whether the factory that is named has the option; False for an unknown name."""
    factory = factories.get(part.name)
    return factory is not None and option in options_of(factory)
