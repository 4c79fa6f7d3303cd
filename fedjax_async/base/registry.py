"""From names to specs: registries are dict literals; this file looks names up and reads their options.

The text of a spec is ``NAME`` or ``NAME:key=value,key=value``, such as ``dirichlet:alpha=0.1`` on the command line. A
value with a comma or a ``+`` is quoted: ``parquet:path="a,b.parquet"``.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from fedjax_async.base import check
from fedjax_async.base.factories import is_traced, options_of
from fedjax_async.base.grammar import Name, items_of, parse_value, quoted
from fedjax_async.base.spec import Spec, require_option

Entry = TypeVar("Entry")
Function = TypeVar("Function")


class Addition(NamedTuple):
    """A factory that the user registered under a name; see ``config.plugins.register``."""

    entry: Any
    fingerprint: str


# Kind -> name -> what the user registered, beside the package's own registries.
ADDED: dict[str, dict[str, Addition]] = {}
KINDS = {"delays": "delay", "partitioner": "partition"}  # kind of a registry -> kind in the settings
# Kinds that a plugin can register: the keys of ``config.registries.REGISTRIES``.
OF_PLUGINS = {
    "method", "part", "timing", "policy", "topology", "exchange", "delay", "availability", "faults", "network",
    "dataset", "partition", "augment", "attack", "privacy", "model", "client", "optimizer", "decay", "compress",
    "metrics",
}  # fmt: skip
PLUGIN_ADVICE = "; one of your own needs --plugin FILE.py, in Python register"
_caches: list[Any] = []  # of the functions that ``cached_by_name`` decorates


def entries(kind: str, registry: Mapping[str, Entry]) -> dict[str, Entry]:
    """The package's registry of a kind, and what the user registered of this kind."""
    own = ADDED.get(KINDS.get(kind, kind), {})
    return {**registry, **{name: addition.entry for name, addition in own.items()}}


def cached_by_name(maxsize: int) -> Callable[[Function], Function]:
    """``functools.lru_cache`` for functions of names; :func:`forget` empties it when a name is registered anew."""

    def decorate(function: Any) -> Any:
        cached = functools.lru_cache(maxsize)(function)
        _caches.append(cached)
        return cached

    return decorate


def forget() -> None:
    """Empty the caches of all functions that :func:`cached_by_name` decorates."""
    for cached in _caches:
        cached.cache_clear()


def find(kind: str, registry: Mapping[str, Entry], name: str) -> Entry:
    """The entry called ``name``; if there is none, ``ValueError`` with the nearest names."""
    if name in registry:
        return registry[name]
    registry = entries(kind, registry)
    if name in registry:
        return registry[name]
    several = str(name).split(",")
    allowed = "without commas between names: methods are given one by one, models of one setting joined by +"
    check.require(len(several) == 1 or not set(several) <= set(registry), kind, name, allowed)
    key, equals, value = str(name).partition("=")
    takers = [
        f"{each}:{key}={value}"
        for each, entry in registry.items()
        if equals and callable(entry) and key in options_of(entry)
    ]
    if takers:
        raise ValueError(f"{kind} = {check.shown(name)}: must begin with a name, as in {' or '.join(takers[:3])}")
    of_plugin = PLUGIN_ADVICE if KINDS.get(kind, kind) in OF_PLUGINS else ""
    raise ValueError(f"{kind} = {check.shown(name)}: unknown{check.near_to(name, registry)}{of_plugin}")


def read(kind: str, text: str, registry: Mapping[str, object] | None = None) -> Name:
    """The name and the options of ``"name:key=value,key=value"``; ``ValueError`` for anything else.

    ``registry``: where the name is, for a message that tells the name of an option.
    """
    texts: dict[str, str] = {}
    for item in items_of(text):
        key, equals, value = item.partition("=")
        if not equals or not key:
            hint = _hint(kind, text, registry)
            raise ValueError(f"{kind} = {text!r}: options are written key=value, comma-separated{hint}")
        key = key.strip().replace("-", "_")
        if key in texts:
            raise ValueError(f"{kind} = {text!r}: the option {key} must be given once, not twice")
        texts[key] = value.strip()
    return Name(text.partition(":")[0], texts)


def _hint(kind: str, spec: str, registry: Mapping[str, Any] | None) -> str:
    """How the first option without a name is written: quoted if it continues a text, else with the name that fits.

    >>> _hint("delay", "csv:path=a,b.csv", None)
    '; a value that has a comma is quoted: path="a,b.csv"'
    """
    items = items_of(spec)
    first = next(i for i, item in enumerate(items) if item.startswith("=") or "=" not in item)
    given = [item.partition("=") for item in items[:first]]
    if given and items[first][:1] != "=" and isinstance(parse_value(given[-1][2]), str):
        return f"; a value that has a comma is quoted: {given[-1][0]}={quoted(f'{given[-1][2]},{items[first]}')}"
    name, value = spec.partition(":")[0], items[first].lstrip("=").strip()
    known = {} if registry is None else entries(kind, registry)
    if name not in known:
        return ""
    entry = known[name]  # of a method: a Method with the factory of its rule
    factory = getattr(entry, "rule", entry)
    options = options_of(factory)
    free = [option for option in options if option not in [key.strip().replace("-", "_") for key, _, _ in given]]
    if value in free:
        return f", as in {name}:{','.join([*items[:first], f'{value}=...'])} (options: {', '.join(options)})"
    near = next((option for option in free if _takes(options[option], parse_value(value))), None)
    if entry is not factory and near is not None and is_traced(options[near]) and value.isdecimal():
        near = None  # fedbuff:10 asks for a buffer of ten, not for a server_lr of ten
    example = "" if near is None else f", as in {name}:{','.join([*items[:first], f'{near}={value}'])}"
    return f"{example} (options: {', '.join(options) or 'none'})"


def _takes(parameter: inspect.Parameter, value: object) -> bool:
    """Whether an option may have a value, by its annotation and its default."""
    kinds = {*typing.get_args(parameter.annotation), parameter.annotation, type(parameter.default)}
    number = is_traced(parameter) or float in kinds
    if isinstance(value, bool) or not isinstance(value, int | float):
        return type(value) in kinds
    return number or (int in kinds and isinstance(value, int))


def spec(kind: str, registry: Mapping[str, Callable[..., object]], text: str, **defaults: object) -> Spec:
    """The spec that a text names, ``NAME:key=value,key=value``; its ``make`` calls the factory.

    ``defaults`` are options for a factory that has them; the text's options take precedence. ``ValueError`` for an
    unknown option, listing the known ones, and for a missing one. Errors of ``make`` name kind and text.
    """
    part = read(kind, text, registry)
    name, options = part.name, part.options
    factory = find(kind, registry, name)
    known = options_of(factory)
    for key in options:
        require_option(name, key, known, before=f"{kind} = {text!r}: ")
    merged = {key: value for key, value in defaults.items() if key in known} | options
    missing = [key for key, p in known.items() if p.default is inspect.Parameter.empty and key not in merged]
    if missing:
        raise ValueError(f"{kind} = {text!r}: {name} needs the option {missing[0]}, as in {name}:{missing[0]}=...")
    own = name in ADDED.get(KINDS.get(kind, kind), {})
    for key, value in options.items():
        field = f"{kind} = {text!r}: {key}"
        switch = known[key].annotation is bool
        check.require(isinstance(value, bool) or not switch, field, value, "true or false")
        if own:  # the package's factories check their numbers
            require_kind(field, value, known[key])
    return Spec(factory, **merged).but(name=name, kind=kind, text=text, own=own, given=tuple(options))


def require_kind(field: str, value: object, parameter: inspect.Parameter) -> None:
    """``ValueError`` for a text where an option is annotated as a number, and for a fraction where it is whole."""
    kinds = {parameter.annotation, *typing.get_args(parameter.annotation)}
    number = is_traced(parameter) or bool(kinds & {int, float})
    check.require(not (number and isinstance(value, str) and str not in kinds), field, value, "a number")
    whole = int in kinds and float not in kinds and not is_traced(parameter)
    check.require(not (whole and isinstance(value, float)), field, value, "a whole number")
