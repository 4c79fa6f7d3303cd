"""From names to factories: registries are dict literals; this file looks names up and parses their options.

A *spec* is ``NAME`` or ``NAME:key=value,key=value``, such as ``dirichlet:alpha=0.1`` on the command line. A value with
a comma or a ``+`` is quoted: ``parquet:path="a,b.parquet"``.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import itertools
import re
import types
import typing
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from fedjax_async import check

Made = TypeVar("Made")

TRACED = "a number that may be traced"  # the metadata of the annotation ``types.Traced``


class Addition(NamedTuple):
    """A factory that the user registered under a name; see ``config.plugins.register``."""

    entry: Any
    fingerprint: str


# Kind -> name -> what the user registered, beside the package's own registries.
ADDED: dict[str, dict[str, Addition]] = {}
KINDS = {"delays": "delay", "partitioner": "partition"}  # kind of a registry -> kind in the settings
# Kinds that a plugin can register: the keys of ``config.plugins.REGISTRIES``.
OF_PLUGINS = {
    "method", "part", "timing", "policy", "topology", "exchange", "delay", "availability", "faults", "network",
    "dataset", "partition", "augment", "attack", "privacy", "model", "client", "optimizer", "decay", "compress",
    "metrics",
}  # fmt: skip
PLUGIN_ADVICE = "; one of your own needs --plugin FILE.py, in Python register"
_caches: list[Any] = []  # of the functions that ``cached_by_name`` decorates


def entries(kind: str, registry: Mapping[str, Any]) -> dict[str, Any]:
    """The package's registry of a kind, and what the user registered of this kind."""
    own = ADDED.get(KINDS.get(kind, kind), {})
    return {**registry, **{name: addition.entry for name, addition in own.items()}}


def cached_by_name(maxsize: int) -> Callable[[Made], Made]:
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


def find(kind: str, registry: Mapping[str, Any], name: str) -> Any:
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


def is_plain_number(text: str) -> bool:
    """Whether ``text``, if it is a number, is written in ASCII digits; Python also reads ``1_0`` and other scripts."""
    return text.isascii() and "_" not in text


def parse_value(text: str) -> Any:
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

    >>> quoted("a.csv"), quoted("a,b.csv"), parse_spec("delay", "csv:path=" + quoted("a,b.csv"))
    ('a.csv', '"a,b.csv"', ('csv', {'path': 'a,b.csv'}))
    >>> quoted("a+b"), quoted("1e+22")
    ('"a+b"', '1e+22')
    """
    if "," not in text and not re.search(_NEXT_PART, text) and not re.fullmatch(_QUOTED, text):
        return text
    quote = '"' if '"' not in text else "'"
    check.require(quote not in text, "value", text, "without one of the signs , + \" and '")
    return f"{quote}{text}{quote}"


def option_text(path: str, value: Any) -> str:
    """An option's value as a spec holds it: what :func:`parse_value` reads back."""
    if isinstance(value, (bool, type(None))):
        return str(value).lower()
    text = repr(value) if isinstance(value, float) else str(value).strip()
    fits = isinstance(value, (int, float, str)) and text != "" and "@" not in text
    check.require(fits, path, value, "a number, true, false, none, or a text without '@'")
    return quoted(text)


def parse_spec(kind: str, spec: str, registry: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """Split ``"name:key=value,key=value"`` into the name and its options; ``ValueError`` for anything else.

    ``registry``: where the name is, for a message that tells the name of an option.
    """
    name = spec.partition(":")[0]
    options: dict[str, Any] = {}
    for item in items_of(spec):
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise ValueError(
                f"{kind} = {spec!r}: options are written key=value, comma-separated{_hint(kind, spec, registry)}"
            )
        key = key.strip().replace("-", "_")
        if key in options:
            raise ValueError(f"{kind} = {spec!r}: the option {key} must be given once, not twice")
        options[key] = parse_value(value.strip())
    return name, options


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


def _takes(parameter: inspect.Parameter, value: Any) -> bool:
    """Whether an option may have a value, by its annotation and its default."""
    kinds = {*typing.get_args(parameter.annotation), parameter.annotation, type(parameter.default)}
    number = is_traced(parameter) or float in kinds
    if isinstance(value, bool) or not isinstance(value, int | float):
        return type(value) in kinds
    return number or (int in kinds and isinstance(value, int))


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


def options_of(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters of a factory, which a spec may set; their annotations are types, not text."""
    annotations = _annotations(getattr(factory, "func", factory))
    return {
        name: parameter.replace(annotation=annotations.get(name, parameter.annotation))
        for name, parameter in inspect.signature(factory).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


_ANNOTATIONS: weakref.WeakKeyDictionary[Callable[..., Any], dict[str, Any]] = weakref.WeakKeyDictionary()


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """Parameter -> type; remembered, since a sweep asks for each run."""
    try:
        return _ANNOTATIONS[function]
    except KeyError:
        return _ANNOTATIONS.setdefault(function, _read_annotations(function))
    except TypeError:  # a callable object that has no hash or allows no weak references
        return _read_annotations(function)


def _read_annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """Parameter -> type; without types that are imported for type checkers only."""
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError):
        pass
    found: dict[str, Any] = {}
    for name, text in getattr(function, "__annotations__", {}).items():
        alone = types.SimpleNamespace(__annotations__={name: text})
        with contextlib.suppress(NameError, TypeError):
            found |= typing.get_type_hints(alone, getattr(function, "__globals__", {}), include_extras=True)
    return found


def is_traced(parameter: inspect.Parameter) -> bool:
    """Whether an option is a number that sweeps may trace: annotated ``Traced`` or ``Traced | None``."""
    choices = (parameter.annotation, *typing.get_args(parameter.annotation))
    return any(TRACED in getattr(choice, "__metadata__", ()) for choice in choices)


def takes(**groups: Callable[..., Any]) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
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
        def with_groups(**options: Any) -> Made:
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


def regrouped(factory: Callable[..., Made], **groups: Callable[..., Any]) -> Callable[..., Made]:
    """A factory made by ``takes``, with other functions of the same options for some of its groups."""
    return takes(**(factory.groups | groups))(factory.__wrapped__)  # type: ignore[attr-defined]


def bind(kind: str, registry: Mapping[str, Callable[..., Any]], spec: str, **defaults: Any) -> Callable[..., Any]:
    """The factory named by ``spec`` with the spec's options bound; only positional arguments remain.

    ``defaults`` are options for a factory that has them; the spec's options take precedence. ``ValueError`` for an
    unknown option, listing the known ones, and for a missing one.
    """
    name, options = parse_spec(kind, spec, registry)
    factory = find(kind, registry, name)
    known = options_of(factory)
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=check.NEAR)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            options_text = ", ".join(known) or "none"
            raise ValueError(f"{kind} = {spec!r}: {name} has no option {key!r}{hint} (options: {options_text})")
    merged = {k: v for k, v in defaults.items() if k in known} | options
    missing = [k for k, p in known.items() if p.default is inspect.Parameter.empty and k not in merged]
    if missing:
        raise ValueError(f"{kind} = {spec!r}: {name} needs the option {missing[0]}, as in {name}:{missing[0]}=...")

    def call(*args: Any) -> Any:
        with naming(kind, spec, options):
            return made(kind, spec, lambda: factory(*args, **merged))

    return call


@contextlib.contextmanager
def naming(kind: str, spec: str, options: Iterable[str]) -> Iterator[None]:
    """Put the spec before a ``ValueError`` about one of its options, because many settings have options of one name.

    >>> with naming("delay", "lognormal:mean=-1", ["mean"]):
    ...     check.positive("mean", -1)
    Traceback (most recent call last):
    ValueError: delay = 'lognormal:mean=-1': mean = -1: must be a finite number > 0
    """
    try:
        yield
    except ValueError as error:
        if not str(error).startswith(tuple(f"{option} = " for option in options)):
            raise
        raise ValueError(f"{kind} = {spec!r}: {error}") from error


def made(kind: str, spec: str, make: Callable[[], Made]) -> Made:
    """``make()``; another error of a factory that the user registered becomes a ``ValueError`` that names it."""
    try:
        return make()
    except Exception as error:
        name = spec.partition(":")[0]
        if isinstance(error, ValueError) or not any(name in known for known in ADDED.values()):
            raise
        line = " ".join(str(error).split())
        raise ValueError(f"{kind} = {spec!r}: its factory raised {type(error).__name__}: {line}") from error


def summary(entry: Any) -> str:
    """The first line of an entry's docstring."""
    return (inspect.getdoc(entry) or "").split("\n", 1)[0]
