"""Names to factories: registries are dict literals, and this file reads them.

A *spec* is ``NAME`` or ``NAME:key=value,key=value``, as typed on the command line, for example
``dirichlet:alpha=0.1`` or ``buffer:size=10,concurrency=20``.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Made = TypeVar("Made")

TRACED = "a number that may be traced"  # in the metadata of such an annotation: ``types.Traced``


def find(kind: str, registry: Mapping[str, Any], name: str) -> Any:
    """The entry called ``name``; a ``ValueError`` with the nearest match if there is none."""
    if name in registry:
        return registry[name]
    near = difflib.get_close_matches(str(name), registry, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{kind} = {name!r}: unknown{hint} (known: {', '.join(registry)})")


def parse_value(text: str) -> Any:
    """``"3"`` -> 3, ``"0.5"`` -> 0.5, ``"true"`` -> True, ``"none"`` -> None, else the text itself."""
    plain = {"true": True, "false": False, "none": None}
    if text.lower() in plain:
        return plain[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def parse_spec(kind: str, spec: str) -> tuple[str, dict[str, Any]]:
    """Split ``"name:key=value,key=value"`` into the name and its options."""
    name, _, tail = spec.partition(":")
    options: dict[str, Any] = {}
    for item in filter(None, tail.split(",")):
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise ValueError(f"{kind} = {spec!r}: options are written key=value, comma-separated")
        options[key.strip().replace("-", "_")] = parse_value(value.strip())
    return name, options


def options_of(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters of a factory, what a spec may set; their annotations are types, not text."""
    types = typing.get_type_hints(getattr(factory, "func", factory), include_extras=True)
    return {
        name: parameter.replace(annotation=types.get(name, parameter.annotation))
        for name, parameter in inspect.signature(factory).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def is_traced(parameter: inspect.Parameter) -> bool:
    """Whether an option is a number that sweeps may trace: annotated ``Traced`` or ``Traced | None``."""
    choices = (parameter.annotation, *typing.get_args(parameter.annotation))
    return any(TRACED in getattr(choice, "__metadata__", ()) for choice in choices)


def takes(**groups: Callable[..., Any]) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    """Let a factory take over the options of ``groups``, each a function of keyword-only options.

    ``@takes(guards=guard_rails)`` makes ``f(*, server_lr, guards)`` an ``f(*, server_lr, clip, ...)``
    that hands the result of ``guard_rails(clip=...)`` on as ``guards``. So factories share options without
    repeating them, and whoever asks for the signature (registry, command line, sweeps) sees each, where the
    group stood. Another default for one of them: ``takes(guards=functools.partial(guard_rails, clip=1.0))``.
    """
    taken = {name: options_of(group) for name, group in groups.items()}

    def decorate(factory: Callable[..., Made]) -> Callable[..., Made]:
        places = (taken.get(name, {name: p}) for name, p in options_of(factory).items())
        parameters = [p for options in places for p in options.values()]

        @functools.wraps(factory)
        def taking(**options: Any) -> Made:
            built = {
                name: group(**{key: options.pop(key) for key in taken[name] if key in options})
                for name, group in groups.items()
            }
            return factory(**options, **built)

        made = inspect.signature(factory).return_annotation
        taking.__signature__ = inspect.Signature(parameters, return_annotation=made)  # type: ignore[attr-defined]
        taking.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": made}
        return taking

    return decorate


def bind(kind: str, registry: Mapping[str, Callable[..., Any]], spec: str, **defaults: Any) -> Callable[..., Any]:
    """The factory named by ``spec`` with the spec's options bound; only positional arguments remain.

    ``defaults`` are options that yield to the spec's, and are passed only where the factory takes
    them. Unknown options raise ``ValueError`` listing the known ones, missing ones by name.
    """
    name, options = parse_spec(kind, spec)
    factory = find(kind, registry, name)
    known = options_of(factory)
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            takes = ", ".join(known) or "none"
            raise ValueError(f"{kind} = {spec!r}: {name} has no option {key!r}{hint} (options: {takes})")
    merged = {k: v for k, v in defaults.items() if k in known} | options
    missing = [k for k, p in known.items() if p.default is inspect.Parameter.empty and k not in merged]
    if missing:
        raise ValueError(f"{kind} = {spec!r}: {name} needs the option {missing[0]}, as in {name}:{missing[0]}=...")

    def call(*args: Any) -> Any:
        return factory(*args, **merged)

    return call


def summary(entry: Any) -> str:
    """First line of an entry's docstring."""
    return (inspect.getdoc(entry) or "").split("\n", 1)[0]
