"""An option of a method that its rule does not take: which other part of the method, or which setting, takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedjax_async import grammar, registry
from fedjax_async.clock import EXCHANGES, TIMINGS, TOPOLOGIES
from fedjax_async.compress import COMPRESSORS
from fedjax_async.config import own, words
from fedjax_async.factories import options_of
from fedjax_async.local import OPTIMIZERS

MOST = 2  # examples of names that take an option
Factories = Mapping[str, Callable[..., Any]]
# settings with a default that depends on the method -> their registries
SETTINGS: dict[str, Factories] = {"topology": TOPOLOGIES, "optimizer": OPTIMIZERS, "compress": COMPRESSORS}


class Place(NamedTuple):
    """Where an option belongs."""

    owner: str  # "the timing"
    setting: str  # "method", or the setting of which it is an option
    examples: list[str]  # specs of this setting

    def text(self, written: Callable[[str, str], str]) -> str:
        """``the timing, as in EXAMPLE``; ``written(setting, spec)`` is how an example is written."""
        return f"{self.owner}, as in {' or '.join(written(self.setting, each) for each in self.examples)}"


def elsewhere(spec: str, usual: Any, option: str, value: str) -> Place | None:
    """What takes ``option``, which the rule of a method's spec does not take; None if nothing of the method does.

    An option that papers call otherwise is found under its name here first. ``usual``: the method's entry in
    ``METHODS``.
    """
    called = words.OPTION.get(option, option)
    return _elsewhere(spec, usual, called, value) or _elsewhere(spec, usual, option, value)


def _elsewhere(spec: str, usual: Any, option: str, value: str) -> Place | None:
    (rule, *parts), (_, at, own_clock) = own.parts_of("method", spec.partition("@")[0]), spec.partition("@")
    for place, part in enumerate(parts):
        if _takes(own.known_parts(), part, option):
            there = "+".join([rule, *parts[:place], _with(part, option, value), *parts[place + 1 :]])
            return Place(f"the part {part.partition(':')[0]}", "method", [there + at + own_clock])
    kind, clocks = ("timing", TIMINGS) if usual.has_server else ("exchange", EXCHANGES)
    known: Factories = registry.entries(kind, clocks)
    clock, whole = own_clock or getattr(usual, kind), "+".join([rule, *parts])
    if _takes(known, clock, option):
        return Place(f"the {kind}", "method", [f"{whole}@{_with(clock, option, value)}"])
    for setting, factories in SETTINGS.items():
        model = getattr(usual, setting, None)
        if model is not None and _takes(registry.entries(setting, factories), model, option):
            return Place(f"the setting {setting}", setting, [_with(model, option, value)])
    others = _takers(known, option)
    if others:
        examples = [f"{whole}@{each}:{option}={value}" for each in others]
        return Place(f"the {kind} {' or '.join(others)}", "method", examples)
    for setting, factories in SETTINGS.items():
        others = _takers(registry.entries(setting, factories), option)[:MOST]
        if others and not (setting == "topology" and usual.has_server):
            return Place(f"the setting {setting}", setting, [f"{each}:{option}={value}" for each in others])
    return None


def _takers(factories: Factories, option: str) -> list[str]:
    """The names whose factories have the option."""
    return [name for name, factory in factories.items() if option in options_of(factory)]


def in_others(registries: Mapping[str, Factories], given: Mapping[str, Any], option: str, value: str) -> Place | None:
    """The first of the ``given`` settings, besides the method, whose spec takes an option; None if none does.

    ``registries``: setting -> name -> factory.
    """
    for setting, spec in given.items():
        known = registry.entries(setting, registries.get(setting, {}))
        plain = setting != "method" and isinstance(spec, str) and not isinstance(spec, own.Named)
        if plain and _takes(known, spec, option):
            return Place(f"the setting {setting}", setting, [_with(spec, option, value)])
    return None


def without(spec: str, option: str) -> tuple[str, str]:
    """A method's spec without one option of its rule, and the text of this option.

    >>> without("fedbuff:k=5,clip=1+swa", "k")
    ('fedbuff:clip=1+swa', '5')
    """
    rule = own.parts_of("method", spec.partition("@")[0])[0]
    texts = _texts(rule)
    text = texts.pop(option)
    return _spec(rule.partition(":")[0], texts) + spec[len(rule) :], text


def with_text(spec: str, option: str, value: str) -> str:
    """A method's spec with one option of its rule set.

    >>> with_text("fedasync:mixing=0.4+swa@every", "mixing", "0.2")
    'fedasync:mixing=0.2+swa@every'
    """
    rule = own.parts_of("method", spec.partition("@")[0])[0]
    return _with(rule, option, value) + spec[len(rule) :]


def in_spec(setting: str, spec: str) -> str:
    """An example inside a message about a method's spec."""
    return spec if setting == "method" else f"{setting}={spec}"


def _takes(factories: Factories, spec: str, option: str) -> bool:
    """Whether the factory that a spec names has the option; False for an unknown name."""
    factory = factories.get(spec.partition(":")[0])
    return factory is not None and option in options_of(factory)


def _texts(spec: str) -> dict[str, str]:
    """Option -> its text, as a spec has them."""
    items = (item.partition("=") for item in grammar.items_of(spec))
    return {key.strip().replace("-", "_"): text.strip() for key, _, text in items}


def _spec(name: str, options: Mapping[str, str]) -> str:
    return f"{name}:{','.join(f'{key}={text}' for key, text in options.items())}" if options else name


def _with(spec: str, option: str, value: str) -> str:
    """A spec with one option set.

    >>> _with("buffer:size=3", "size", "5"), _with("cohort", "size", "5")
    ('buffer:size=5', 'cohort:size=5')
    """
    return _spec(spec.partition(":")[0], _texts(spec) | {option: value})
