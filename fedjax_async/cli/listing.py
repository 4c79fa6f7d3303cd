"""The command ``list``: all names, with their options, or all that is documented of some names."""

from __future__ import annotations

import argparse
import importlib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from fedjax_async.base import factories, registry

# Kind -> module and name of its registry. Most need JAX, so they are imported when they are listed.
REGISTRIES: dict[str, tuple[str, str]] = {
    "methods": ("config.registries", "METHODS"),
    "parts": ("server", "PARTS"),
    "timings": ("clock", "TIMINGS"),
    "policies": ("clock", "POLICIES"),
    "topologies": ("peers", "TOPOLOGIES"),
    "exchanges": ("peers", "EXCHANGES"),
    "delays": ("clock", "DELAYS"),
    "availability": ("clock", "AVAILABILITY"),
    "faults": ("clock", "FAULTS"),
    "networks": ("clock", "NETWORKS"),
    "energy": ("clock", "ENERGY"),
    "partitions": ("data", "PARTITIONERS"),
    "datasets": ("data", "DATASETS"),
    "augmentations": ("data", "AUGMENTATIONS"),
    "attacks": ("server", "ATTACKS"),
    "privacy": ("server", "PRIVACY"),
    "models": ("models", "MODELS"),
    "clients": ("config.registries", "CLIENTS"),
    "optimizers": ("local", "OPTIMIZERS"),
    "decays": ("local", "DECAYS"),
    "compressors": ("compress", "COMPRESSORS"),
    "metrics": ("models", "METRICS"),
    "staleness": ("server", "STALENESS"),
    "sampling": ("clock", "SUCCESSORS"),
}


def entries(kind: str) -> dict[str, object]:
    """The names of ``kind``, those of plugins too; ``ValueError`` naming the nearest kind if there is none."""
    kind = next((each for each in REGISTRIES if _singular(each) == kind), kind)
    module, name = registry.find("what", REGISTRIES, kind)
    builtin: dict[str, object] = getattr(importlib.import_module(f"fedjax_async.{module}"), name)
    return registry.entries(_singular(kind), builtin)


def _singular(kind: str) -> str:
    """The name of a kind in the settings."""
    same = ("availability", "faults", "energy", "staleness", "sampling", "metrics", "privacy")
    irregular = {"compressors": "compress", "topologies": "topology", "policies": "policy", "augmentations": "augment"}
    return irregular.get(kind, kind if kind in same else kind.removesuffix("s"))


def _options(entry: object, name: str) -> dict[str, object]:
    """Option -> default of an entry; ``...`` for an option that must be given."""
    if not callable(entry):
        from fedjax_async.config.methods import method_options  # noqa: PLC0415 (needs JAX)

        return method_options(name)
    options = factories.options_of(entry)
    return {key: "..." if p.default is p.empty else p.default for key, p in options.items()}


def _about(entry: object) -> str:
    """An entry in one line."""
    about: str = entry.about if hasattr(entry, "about") else factories.summary(entry)
    return about or "(its factory has no docstring)"


# Fields of a method that are specs of other kinds -> the kind. An option of the clock is set after an @.
CLOCKS = {"timing": "timings", "exchange": "exchanges"}
SETTINGS = {"policy": "policies", "topology": "topologies", "compress": "compressors", "optimizer": "optimizers"}


def _of_others(entry: object, name: str) -> dict[str, str]:
    """For a method, how options of its timing, its optimiser, ... are set -> these options with their defaults."""
    found = {}
    for field, kind in (CLOCKS | SETTINGS).items() if not callable(entry) else ():
        if (spec := getattr(entry, field, None)) is not None:
            part = registry.read(field, spec)
            options = _options(entries(kind)[part.name], part.name) | part.options
            set_by = f"{name}@{part.name}:" if field in CLOCKS else f"--{field} {part.name}:"
            found[set_by] = _text(options)
    return found


def _text(options: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={value}" for key, value in options.items()) or "none"


def _documented(entry: Any) -> list[Callable[..., object]]:
    """The functions whose docstrings explain an entry and its options; for a method, also those of its clock."""
    made: list[Any] = [entry]
    clocks: list[Any] = []
    if not callable(entry):
        from fedjax_async.base.method import factory_of  # noqa: PLC0415 (needs JAX)

        made = [factory_of(entry.rule), factory_of(entry.client)]
        specs = {kind: getattr(entry, field, None) for field, kind in (CLOCKS | {"policy": "policies"}).items()}
        clocks = [entries(kind)[spec.partition(":")[0]] for kind, spec in specs.items() if spec is not None]
    groups = [group for factory in made for group in getattr(factory, "groups", {}).values()]
    found = [getattr(each, "func", each) for each in made + groups + clocks]
    return list({(each.__module__, each.__name__): each for each in found}.values())  # a delay has a group of its name


def explain(kind: str, name: str) -> str:
    """All that is documented of one name: its options with their defaults, then the docstrings that explain them."""
    entry = registry.find(_singular(kind), entries(kind), name)
    lines = [f"{name}: {_about(entry)}", ""]
    fields = (*CLOCKS, "policy", "topology", "compress", "feedback", "optimizer", "lr")
    usual = {field: getattr(entry, field, None) for field in fields}
    if any(usual.values()):
        lines += ["usually: " + ", ".join(f"{key} {value}" for key, value in usual.items() if value is not None), ""]
    lines += [f"options: {_text(_options(entry, name))}"]
    lines += [f"options after {set_by} {options}" for set_by, options in _of_others(entry, name).items()]
    for function in _documented(entry):
        lines += ["", f"{function.__name__}", textwrap.indent(inspect.getdoc(function) or "(no docstring)", "  ")]
    return "\n".join(lines)


def list_names(arguments: argparse.Namespace) -> None:
    """Print the names of one kind, or of all kinds; or explain some names of one kind."""
    if arguments.names:
        print("\n\n".join([explain(arguments.what, name) for name in arguments.names]))
        return
    chosen = [arguments.what] if arguments.what else list(REGISTRIES)
    for kind in chosen:
        found = entries(kind)
        print(f"{kind}:" if found else f"{kind}:\n  (none; a plugin may register some)")
        for name, entry in found.items():
            print(f"  {name:<20} {_about(entry)}")
            options = _options(entry, name)
            if arguments.options and options:
                print(f"  {'':<20}   options: {_text(options)}")
            clock = {set_by: text for set_by, text in _of_others(entry, name).items() if "@" in set_by}
            for set_by, text in clock.items() if arguments.options else ():
                print(f"  {'':<20}   options after {set_by} {text}")
        print()
