"""A factory with its options, as a value: ``Spec(fedasync, mixing=0.4)`` is ``fedasync:mixing=0.4``.

Specs are equal and hashed by value, and nest: an option, or a positional argument, may be a spec. ``tree.py`` makes
them pytrees: the leaves are the options that are annotated ``types.Traced``, defaults included, unless they are zero,
which may switch a term off. So runs whose specs have one structure share compiled programs, a sweep stacks leaves, and
a gradient by a spec is a spec.

A rule could be a frozen dataclass that is a pytree instead. Three rules were written so: they stack, are traced once
and have gradients alike. But the options that rules share (guard rails, the discount of stale updates) become objects
inside objects. Every field says whether it is static. A rule in a notebook is a class where a function is enough.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from fedjax_async.base import check
from fedjax_async.base.factories import is_traced, options_of
from fedjax_async.base.grammar import option_text

_EMPTY = inspect.Parameter.empty
_FIELDS = ("factory", "args", "options", "given", "traced", "scope", "late", "name", "kind", "text", "own")


class Spec:
    """A factory and what it will be called with; :meth:`make` calls it.

    Args:
      factory: a function of keyword-only options, after the positional arguments that are given here (a method's rule
        and client get theirs from the run).
      options: some of its options; the others keep their defaults.

    Raises: ``ValueError`` for an option that the factory does not have, with the nearest name.

    >>> from fedjax_async.server import fedasync
    >>> spec = Spec(fedasync, mixing=0.4)
    >>> spec, spec == Spec(fedasync, mixing=0.4), spec.put("exponent", 1)
    (fedasync:mixing=0.4, True, fedasync:mixing=0.4,exponent=1)
    """

    __slots__ = _FIELDS

    factory: Callable[..., Any]
    args: tuple[object, ...]
    options: dict[str, Any]  # all options with their values, defaults included, in the order of the factory
    given: tuple[str, ...]  # the options that do not have their defaults
    traced: tuple[str, ...]  # the options that are leaves
    scope: str  # the leaf ``mixing`` of the scope ``server`` is called ``server.mixing``
    late: bool  # make() returns the factory with its options bound, for a caller that has more to give
    name: str  # what it is called in a text
    kind: str  # the setting that it is for, and the text that named it, for messages
    text: str
    own: bool  # whether the user registered the factory

    def __new__(cls, factory: Callable[..., object], /, *args: object, **options: object) -> Spec:
        try:
            known, name = options_of(factory), _name(factory)
        except (TypeError, ValueError):  # it cannot be called, or its parameters cannot be read
            given = _name(factory) if callable(factory) else f"a {type(factory).__name__}"
            allowed = "a function of keyword-only options: the factory itself, not its name and not what it returns"
            raise ValueError(f"factory = {check.shown(given)}: must be {allowed}") from None
        for option, value in options.items():
            if option not in known and option in inspect.signature(factory).parameters:
                check.require(False, f"option {option} of {name}", value, f"keyword-only: def {name}(*, {option}=...)")
            require_option(name, option, known)
        filled = {key: options.get(key, parameter.default) for key, parameter in known.items()}
        filled = {key: value for key, value in filled.items() if value is not _EMPTY}
        traced = tuple(key for key in filled if is_traced(known[key]) and _is_leaf(filled[key]))
        return _of_fields(factory, args, filled, tuple(options), traced, "", False, name, "", "", False)

    def __copy__(self) -> Spec:
        return self

    def __deepcopy__(self, memo: object) -> Spec:
        return self

    def __reduce__(self) -> tuple[Callable[..., Spec], tuple[object, ...]]:
        return _of_fields, tuple(getattr(self, field) for field in _FIELDS)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: a Spec does not change; put(option, value) gives another one")

    def but(self, **fields: object) -> Spec:
        """The same spec with other fields, the options excepted: ``put`` and ``later`` change these."""
        return _of_fields(*(fields.get(field, getattr(self, field)) for field in _FIELDS))

    def later(self, *open_options: str) -> Spec:
        """The same spec, whose ``make`` binds the options and does not call the factory yet.

        ``open_options``: options that it does not bind, because the caller gives them.
        """
        kept = {option: value for option, value in self.options.items() if option not in open_options}
        traced, given = (tuple(name for name in names if name in kept) for names in (self.traced, self.given))
        return self.but(late=True, options=kept, traced=traced, given=given)

    def with_numbers(self, **numbers: object) -> Spec:
        """The same spec of a factory of any keywords, with these numbers, all of them leaves."""
        return self.but(options=numbers, given=tuple(numbers), traced=tuple(numbers))

    def with_functions(self, change: Callable[[Any], object]) -> Spec:
        """The same spec with ``change`` applied to its factory, its arguments and its options, which may be specs."""
        args = tuple(change(value) for value in self.args)
        options = {option: change(value) for option, value in self.options.items()}
        return self.but(factory=change(self.factory), args=args, options=options)

    def options_given(self) -> dict[str, object]:
        """The options that do not have their defaults, by name."""
        return {option: self.options[option] for option in self.given}

    def put(self, path: str, value: object) -> Spec:
        """The same spec with one option set: ``put("mixing", 0.4)``, of a nested spec ``put("swa.start", 0.25)``."""
        check.kind("option", path, str, "the name of an option")
        option, _, rest = path.partition(".")
        require_option(self.name, option, options_of(self.factory))
        if rest:
            inner = self.options.get(option)
            check.require(isinstance(inner, Spec), "option", path, f"{option}: it is no spec with options of its own")
            value = inner.put(rest, value)  # type: ignore[union-attr]
        changed = Spec(self.factory, *self.args, **{**self.options_given(), option: value})
        return changed.but(scope=self.scope, late=self.late, name=self.name, kind=self.kind, own=self.own)

    def make(self, *more: object) -> Any:
        """What the factory returns; nested specs are made first. ``more``: further positional arguments.

        Raises ``ValueError`` naming the setting and the text for a value that the factory refuses.
        """
        args = [*map(made, self.args), *more]
        options = {option: made(value) for option, value in self.options.items()}
        if self.late:
            return functools.partial(self.factory, *args, **options)
        if not self.kind:
            return self.factory(*args, **options)
        with naming(self.kind, self, self.given):
            try:
                return self.factory(*args, **options)
            except Exception as error:
                if isinstance(error, ValueError) or not self.own:
                    raise
                line = " ".join(str(error).split())
                says = f"its factory raised {type(error).__name__}: {line}"
                raise ValueError(f"{self.kind} = {str(self)!r}: {says}") from error

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Spec):
            return NotImplemented
        (mine, static), (its, same) = flatten(self), flatten(other)
        return static == same and len(mine) == len(its) and all(map(_same, mine, its))

    def __hash__(self) -> int:
        leaves, static = flatten(self)
        host = all(isinstance(leaf, (float, Spec)) for leaf in leaves)
        if not host:
            raise TypeError(f"unhashable: {self.name} has arrays among its numbers")
        return hash((static, tuple(repr(leaf) if isinstance(leaf, float) else leaf for leaf in leaves)))

    def __repr__(self) -> str:
        if self.text:
            return self.text
        options = ",".join(f"{option}={_text(self.options[option])}" for option in self.given)
        return f"{self.name}:{options}" if options else self.name


@contextlib.contextmanager
def naming(kind: str, spec: Spec | str, options: Iterable[str]) -> Iterator[None]:
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
        raise ValueError(f"{kind} = {str(spec)!r}: {error}") from error


def _text(value: object) -> str:
    try:
        return option_text("option", value)
    except ValueError:  # no text of a spec has this value
        return check.shown(value)


def _name(factory: object) -> str:
    function = getattr(factory, "func", factory)  # of a functools.partial
    return str(getattr(function, "__name__", type(function).__name__))


def _of_fields(*values: object) -> Spec:
    made = object.__new__(Spec)
    for field, value in zip(_FIELDS, values, strict=True):
        object.__setattr__(made, field, value)
    return made


def require_option(name: str, option: str, known: Mapping[str, object], before: str = "") -> None:
    """``ValueError`` unless ``option`` is among the ``known`` ones; ``before``: the beginning of the message."""
    if option not in known:
        near = difflib.get_close_matches(option, known, n=1, cutoff=check.NEAR)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{before}{name} has no option {option!r}{hint} (options: {', '.join(known) or 'none'})")


def made(value: object) -> Any:
    """What a spec makes; anything else is returned as it is."""
    return value.make() if isinstance(value, Spec) else value


def _is_leaf(value: object) -> bool:
    """Whether the value of a traced option is a number that may vary: zero, None and texts decide what is computed."""
    if isinstance(value, numbers.Real):
        return not isinstance(value, bool) and value != 0
    return hasattr(value, "dtype")  # an array, or a tracer


def _same(mine: object, its: object) -> bool:
    """Whether two leaves are equal: numbers by value, NaN included, arrays and tracers only if they are the same."""
    if isinstance(mine, float) and isinstance(its, float):
        return repr(mine) == repr(its)
    return mine == its if isinstance(mine, Spec) else mine is its


# --- as a pytree --------------------------------------------------------------------------------------


class _Held(NamedTuple):
    """A value as it is now, with its type: 1, 1.0 and True are equal in Python, and lists and arrays may change."""

    value: object
    key: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self.key == other.key

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.key)


class Static(NamedTuple):
    """A spec without its leaves: equal if the factory, the positional arguments and all other options are."""

    factory: Callable[..., object]
    positional: int  # how many of the values are positional arguments
    options: tuple[str, ...]  # the names of the other values
    values: tuple[_Held, ...]  # ``LEAF`` in place of each leaf
    traced: tuple[str, ...]
    scope: str
    late: bool


def _frozen(value: Any) -> object:
    """What two values have in common if they mean the same; it has a hash unless the value is of an unknown kind."""
    kind = type(value)
    if isinstance(value, numbers.Number):
        return kind, repr(value)
    if kind in (list, tuple):
        return kind, tuple(map(_frozen, value))
    if kind is dict:
        return kind, tuple((_frozen(key), _frozen(each)) for key, each in value.items())
    if kind in (set, frozenset):
        return kind, frozenset(map(_frozen, value))
    if hasattr(value, "__array__") and hasattr(value, "dtype"):
        return _frozen_array(value)
    return kind, value


def _frozen_array(array: object) -> object:
    import numpy as np  # noqa: PLC0415 (the command line shows its help without it)

    try:
        plain = np.asarray(array)
    except Exception:  # a tracer, or a random key: equal only to itself
        return type(array), id(array)
    return "array", str(plain.dtype), plain.shape, plain.tobytes()


LEAF = _Held("a leaf", object)


def flatten(spec: Spec) -> tuple[list[object], Static]:
    """Its leaves and nested specs, in order, and the rest."""
    leaves: list[object] = []
    values: list[_Held] = []
    for name, value in [*enumerate(spec.args), *spec.options.items()]:
        if name in spec.traced or isinstance(value, Spec):
            leaves.append(float(value) if isinstance(value, numbers.Real) else value)
            values.append(LEAF)
        else:
            values.append(_Held(value, _frozen(value)))
    structure = (len(spec.args), tuple(spec.options), tuple(values), spec.traced, spec.scope, spec.late)
    return leaves, Static(spec.factory, *structure)


def unflatten(static: Static, leaves: Iterable[object]) -> Spec:
    """The inverse of :func:`flatten`; the leaves may be anything."""
    left = iter(leaves)
    values = [next(left) if held is LEAF else held.value for held in static.values]
    args, options = tuple(values[: static.positional]), dict(zip(static.options, values[static.positional :]))
    name, given = _name(static.factory), static.options
    return _of_fields(
        static.factory, args, options, given, static.traced, static.scope, static.late, name, "", "", False
    )


def leaf_names(spec: Spec, scope: str = "") -> Iterator[str]:
    """The names of all leaves, nested ones included, in their order: ``server.mixing``, ``server.swa.start``.

    ``scope``: of a spec that has none of its own.
    """
    scope = spec.scope or scope
    start = f"{scope}." if scope else ""
    for value in spec.args:
        if isinstance(value, Spec):
            yield from leaf_names(value)
    for option, value in spec.options.items():
        if isinstance(value, Spec):
            yield from leaf_names(value, f"{start}{option}")
        elif option in spec.traced:
            yield f"{start}{option}"
