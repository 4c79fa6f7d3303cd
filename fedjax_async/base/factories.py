"""Factories: functions whose keyword-only parameters are the options of a name, and groups of options they share."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import typing
import weakref
from collections.abc import Callable
from typing import TypeVar

Made = TypeVar("Made")

TRACED = "a number that may be traced"  # the metadata of the annotation ``types.Traced``


def options_of(factory: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters of a factory, which a spec may set; their annotations are types, not text."""
    try:
        return _OPTIONS[factory]
    except KeyError:
        return _OPTIONS.setdefault(factory, _read_options(factory))
    except TypeError:  # a callable object that has no hash or allows no weak references
        return _read_options(factory)


# Remembered, since a sweep asks for each run.
_OPTIONS: weakref.WeakKeyDictionary[Callable[..., object], dict[str, inspect.Parameter]] = weakref.WeakKeyDictionary()


def _read_options(factory: Callable[..., object]) -> dict[str, inspect.Parameter]:
    annotations = _read_annotations(getattr(factory, "func", factory))
    return {
        name: parameter.replace(annotation=annotations.get(name, parameter.annotation))
        for name, parameter in inspect.signature(factory).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def _read_annotations(function: Callable[..., object]) -> dict[str, object]:
    """Parameter -> type; without types that are imported for type checkers only."""
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError):
        pass
    found: dict[str, object] = {}
    for name, text in getattr(function, "__annotations__", {}).items():
        alone = types.SimpleNamespace(__annotations__={name: text})
        with contextlib.suppress(NameError, TypeError):
            found |= typing.get_type_hints(alone, getattr(function, "__globals__", {}), include_extras=True)
    return found


def is_traced(parameter: inspect.Parameter) -> bool:
    """Whether an option is a number that sweeps may trace: annotated ``Traced`` or ``Traced | None``."""
    choices = (parameter.annotation, *typing.get_args(parameter.annotation))
    return any(TRACED in getattr(choice, "__metadata__", ()) for choice in choices)


def asks_for(function: Callable[..., object], name: str) -> bool:
    """Whether a function takes a second argument: a parameter called ``name``, or any that has no default.

    A second parameter of another name with a default is an option of the function's own.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # not callable, or without a signature
        return False
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return True
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(places) > 1 and (places[1].name == name or places[1].default is places[1].empty)


def takes(**groups: Callable[..., object]) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    """Add the options of ``groups``, each a function of keyword-only options, to a factory.

    ``@takes(guards=guard_rails)`` turns ``f(*, server_lr, guards)`` into ``f(*, server_lr, clip, ...)``, which calls
    ``guard_rails(clip=...)`` and passes the result as ``guards``. So factories share options without repeating them,
    and the signature that registry, command line and sweeps read lists each option in the group's position. To give an
    option another default: ``takes(guards=functools.partial(guard_rails, clip=1.0))``.
    """
    group_options = {name: options_of(group) for name, group in groups.items()}

    def decorate(factory: Callable[..., Made]) -> Callable[..., Made]:
        expanded = (group_options.get(name, {name: p}) for name, p in options_of(factory).items())
        parameters = [p for options in expanded for p in options.values()]

        @functools.wraps(factory)
        def with_groups(**options: object) -> Made:
            built = {
                name: group(**{key: options.pop(key) for key in group_options[name] if key in options})
                for name, group in groups.items()
            }
            return factory(**options, **built)

        made = inspect.signature(factory).return_annotation
        with_groups.__signature__ = inspect.Signature(parameters, return_annotation=made)  # type: ignore[attr-defined]
        with_groups.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": made}
        with_groups.groups = groups  # type: ignore[attr-defined]
        return with_groups

    return decorate


def regrouped(factory: Callable[..., Made], **groups: Callable[..., object]) -> Callable[..., Made]:
    """A factory made by ``takes``, with other functions of the same options for some of its groups."""
    return takes(**(factory.groups | groups))(factory.__wrapped__)  # type: ignore[attr-defined]


def summary(entry: object) -> str:
    """The first line of an entry's docstring."""
    return (inspect.getdoc(entry) or "").split("\n", 1)[0]
