"""Objects of the user's own in place of names: ``named`` gives one a name, its fingerprint tells it from others.

A setting holds such an object as a :class:`Named`, with the name that tables, folders and files show. ``own_parts``
lists the fingerprints of all own parts of a run, both objects and registered names. They are kept in ``settings.json``
under ``own``, so that two runs are the same only if the code of their own parts is the same.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

from fedjax_async.base import check, registry
from fedjax_async.base.factories import options_of
from fedjax_async.base.spec import Spec
from fedjax_async.config.names import names_in
from fedjax_async.config.objects import KINDS, PLAIN, SPECS, is_params, shown

ABSENT = object()  # stands for an object that a file names and that is not loaded
SHOWN = 12  # characters of a fingerprint in a text


class Named:
    """An object of the user's own in a setting, under the name that ``str()`` gives and results show.

    Two are equal if name and fingerprint are; one without a fingerprint equals only itself.
    """

    __slots__ = ("fingerprint", "given", "name", "parts", "thing")

    def __init__(
        self,
        name: str,
        thing: Any,
        fingerprint: str | None,
        given: bool = True,
        parts: Mapping[str, str | None] | None = None,
    ) -> None:
        """``given``: whether the user gave the name. ``parts``: name -> fingerprint of several, as of metrics."""
        self.name, self.thing, self.fingerprint, self.given = name, thing, fingerprint, given
        self.parts = {name: fingerprint} if parts is None else parts

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Named) or self.name != other.name:
            return False
        return self.thing is other.thing if self.fingerprint is None else self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash((self.name, self.fingerprint or id(self.thing)))

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return repr(self.name)

    def __deepcopy__(self, memo: object) -> Named:
        return self


Chosen = str | Named  # what a setting holds that names a part of the run


def named(name: str, thing: object) -> Named:
    """Give an object of your own the name under which results keep it: ``method=named("fair", Method(rule))``.

    ``thing``: a ``Method``, ``Model`` or flax module, ``FederatedData`` or ``Dataset``, ``ClientAlgorithm``, delay
    model, timing, partitioner, ... Results hold the name and a fingerprint of the object's code and numbers, so
    another object under the same name makes another run. ``name``: letters, digits, ``_``, ``-`` and ``.``.

    Raises ``ValueError`` for other names, for objects that no setting takes, and for an object without a fingerprint,
    naming its part (``base.fingerprints.fingerprint``).
    """
    from fedjax_async.base.fingerprints import fingerprint  # noqa: PLC0415 (needs NumPy)
    from fedjax_async.config.kinds import require_some_kind  # noqa: PLC0415 (needs JAX)

    fits = isinstance(name, str) and re.fullmatch(r"[\w.-]*\w[\w.-]*", name, re.ASCII) is not None
    check.require(fits, "name", name, "of letters, digits, '_', '-' and '.', and not only of '.'")
    thing = thing.thing if isinstance(thing, Named) else thing
    if isinstance(thing, (list, tuple)) and not hasattr(thing, "_fields") and not is_params(thing):
        from fedjax_async.peers import topologies  # noqa: PLC0415 (needs NumPy)

        thing = topologies.of_graphs(thing) if topologies.is_graphs(thing) else thing
    plain = isinstance(thing, (str, *PLAIN)) and not is_params(thing)
    check.require(thing is not None and not plain, "object", thing, "an object of your own")
    require_some_kind(thing)
    return Named(name, thing, fingerprint(thing))


def as_setting(field: str, value: object) -> Named:
    """An object as a setting holds it: under its name (data sets have one), else as ``(object: ...)``.

    ``ValueError`` for an object of another type than the setting takes.
    """
    if isinstance(value, Named):
        require_fitting(field, value)
        return value
    from fedjax_async.base.fingerprints import fingerprint  # noqa: PLC0415 (needs NumPy)
    from fedjax_async.config.kinds import require_kind  # noqa: PLC0415 (needs JAX)

    if field == "metrics" and isinstance(value, Mapping):
        return _metrics(value)
    if field in SPECS and isinstance(value, Spec):
        return Named(str(value), value, fingerprint(value))
    if field == "topology" and not callable(value):
        from fedjax_async.peers import topologies  # noqa: PLC0415 (needs NumPy)

        value = topologies.of_graphs(value)
    plain = isinstance(value, PLAIN) and not (field == "initial" and is_params(value))
    check.require(not plain, field, value, f"a text, or {KINDS[field]}")
    require_kind(field, value)
    own_name = getattr(value, "name", None) if field == "dataset" else None
    if isinstance(own_name, str):
        return Named(own_name, value, fingerprint(value))
    try:
        found = fingerprint(value)
    except ValueError:
        return Named("(object)", value, None, given=False)
    return Named(f"(object: {found[:SHOWN]})", value, found, given=False)


def require_fitting(field: str, value: object) -> None:
    """``ValueError`` for an object with a name, as :func:`named` makes it, that the setting does not take."""
    if isinstance(value, Named) and value.thing is not ABSENT:
        from fedjax_async.config.kinds import require_kind  # noqa: PLC0415 (needs JAX)

        if field not in KINDS:
            check.require(False, field, shown(value.thing), "a text: this setting takes no object")
        require_kind(field, value.thing)


def _metrics(given: Mapping[str, object]) -> Named:
    """A dict of metrics as a setting holds it: its names joined by commas, each with a fingerprint of its own."""
    from fedjax_async.base.fingerprints import fingerprint  # noqa: PLC0415 (needs NumPy)

    check.require(len(given) > 0, "metrics", dict(given), "at least one name and metric")
    for name in given:
        fits = isinstance(name, str) and re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) is not None
        check.require(fits, "name of a metric", name, "letters, digits and '_', not starting with a digit")
    things = dict(given)
    return Named(
        ",".join(given), things, fingerprint(things), parts={name: fingerprint(m) for name, m in given.items()}
    )


def thing_of(field: str, value: object) -> Any:
    """The object that a setting holds, ``None`` if it is a name; ``ValueError`` for an object that is not loaded.

    A ``Spec`` gives what its factory makes, but for a method, a client or an optimiser, whose numbers are traced.
    """
    if not isinstance(value, Named):
        return None
    if value.thing is ABSENT:
        raise ValueError(
            f"{field} = {str(value)!r}: is a part of your own; give it again ({field}=...), or load the plugin that "
            "registers it (--plugin FILE.py)"
        )
    if isinstance(value.thing, Spec) and field not in ("method", "client", "optimizer"):
        return value.thing.but(kind=field, own=True).make()
    return value.thing


def specs_in(value: object) -> dict[str, Spec]:
    """The specs whose options may be set and swept in an object: the object itself, or a method's rule and client."""
    thing = value.thing if isinstance(value, Named) else None
    found = {name: getattr(thing, name, None) for name in ("rule", "client")} | {"": thing}
    return {name: spec for name, spec in found.items() if isinstance(spec, Spec)}


def with_option(value: Named, option: str, new: object) -> Named:
    """An object with one option of its spec set, of a method's rule or else its client; it keeps its given name."""
    from fedjax_async.base.fingerprints import fingerprint  # noqa: PLC0415 (needs NumPy)

    name, spec = next((name, spec) for name, spec in specs_in(value).items() if option in options_of(spec.factory))
    changed = spec.put(option, new)
    thing = value.thing._replace(**{name: changed}) if name else changed
    found = fingerprint(thing)
    if not value.given:
        return Named(f"(object: {found[:SHOWN]})", thing, found, given=False)
    return Named(str(changed) if not name and str(value) == str(spec) else str(value), thing, found)


def object_or_spec(field: str, value: object) -> Any:
    """The object that a setting holds, else its spec: what other packages take."""
    thing = thing_of(field, value)
    return value if thing is None else thing


def _registered(field: str, name: str) -> str | None:
    """The fingerprint of a registered name, ``None`` if it is not registered."""
    kinds = {"@": ("timing", "exchange"), "+": ("part",)}.get(name[:1], (field,))
    additions = (registry.ADDED.get(kind, {}).get(name.lstrip("@+")) for kind in kinds)
    return next((addition.fingerprint for addition in additions if addition is not None), None)


def own_parts(fields: Mapping[str, object]) -> dict[str, dict[str, str | None]]:
    """Setting -> name -> fingerprint of the parts that are objects or registered by the user."""
    found: dict[str, dict[str, str | None]] = {}
    for field, value in fields.items():
        if isinstance(value, Named):
            found[field] = dict(value.parts)
        elif isinstance(value, str) and registry.ADDED:
            known = {name: _registered(field, name) for name in names_in(field, value)}
            if own := {name: one for name, one in known.items() if one is not None}:
                found[field] = dict(own)
    return found


def is_own(settings: object, *fields: str) -> bool:
    """Whether one of these settings is an object, or a name that the user registered."""
    return bool(own_parts({field: getattr(settings, field) for field in fields}))


def require_names(field_values: Mapping[str, object], purpose: str) -> None:
    """``ValueError`` unless each object among the settings has a name; the message says what to write, of all."""
    lacking = [field for field, value in field_values.items() if isinstance(value, Named) and not value.given]
    if lacking:
        first, others = lacking[0], "".join(f", and {field}" for field in lacking[1:])
        raise ValueError(
            f"{first} = {str(field_values[first])!r}: must have a name for {purpose}; write "
            f'{first}=fedjax_async.named("NAME", ...) around the object{others}'
        )


def restored(content: Mapping[str, Any], objects: Mapping[str, object]) -> dict[str, Any]:
    """The fields of settings from a file, with own parts: the given objects, or placeholders that only have a name.

    An object takes the name that the file has for it. Raises ``ValueError`` naming the part if a given object or a
    registered name has another fingerprint than in the file.
    """
    fields = dict(content)
    saved: Mapping[str, Mapping[str, str | None]] = fields.pop("own", {})
    for field, parts in saved.items():
        for name, want in parts.items():
            have = _registered(field, name) or want
            if field in objects:
                fields[field] = _under(content[field] if field == "metrics" else name, field, objects[field])
                have = fields[field].parts.get(name)
            spec = getattr(fields[field], "thing", None)
            options = f", or its options have: {spec}" if isinstance(spec, Spec) else ""
            allowed = f"the code that the run began with, but it has changed{options}"
            check.require(have == want, field, name, allowed)
        if field not in objects and any(_registered(field, name) is None for name in parts):
            fields[field] = Named(fields[field], ABSENT, next(iter(parts.values())), parts=parts)
    for field in objects:
        check.require(field in saved, field, shown(objects[field]), "left out: the run has no object of your own there")
    return fields


def _under(name: str, field: str, thing: object) -> Named:
    """An object under the name that a file has for it; ``ValueError`` if it has another name."""
    held = thing if isinstance(thing, Named) else as_setting(field, thing)
    other = (isinstance(thing, Named) or field == "metrics") and str(held) != name
    check.require(not other, field, str(held), f"named {name!r}, as when the run began")
    return held if field == "metrics" else Named(name, held.thing, held.fingerprint)


# --- compiled programs ------------------------------------------------------------------------------

MOST_FUNCTIONS = 512  # kept in _seen
_seen: dict[
    int, tuple[object, dict[str | None, Callable[..., object]]]
] = {}  # id -> (function, fingerprint -> the function to use)


def lasting(thing: object) -> Any:
    """``thing`` with functions that can be keys of compiled programs: they are equal only if they do the same.

    Compiled programs are looked up by the functions that they were made from. But two callable objects may be equal and
    do different things, and a function changes when a variable that it reads changes. Such functions are replaced by
    wrappers that equal only themselves; everything else is returned unchanged.
    """
    if isinstance(thing, Spec):
        return thing.with_functions(lasting)
    if isinstance(thing, tuple) and hasattr(thing, "_replace"):
        fields = zip(thing._fields, thing)  # type: ignore[attr-defined]
        changed = {
            name: lasting(value) for name, value in fields if callable(value) or isinstance(value, (tuple, Spec))
        }
        return thing._replace(**changed)
    return _lasting_function(thing) if callable(thing) else thing


def lasting_part(field: str, value: object, thing: object) -> Any:
    """:func:`lasting` for a part of the user's own that a setting holds or names; the package's functions last."""
    return lasting(thing) if own_parts({field: value}) else thing


def _lasting_function(function: Callable[..., object]) -> Callable[..., object]:
    from fedjax_async.base.fingerprints import fingerprint  # noqa: PLC0415 (needs NumPy)

    try:
        found = fingerprint(function)
    except ValueError:
        found = None
    if id(function) not in _seen and len(_seen) >= MOST_FUNCTIONS:
        del _seen[next(iter(_seen))]
    _, known = _seen.setdefault(id(function), (function, {}))
    if found not in known:
        plain = isinstance(function, (types.FunctionType, types.BuiltinFunctionType, functools.partial))
        known[found] = function if plain and not known else _another(function)
    return known[found]


def _another(function: Callable[..., object]) -> Callable[..., object]:
    """A function that does the same and equals only itself."""

    @functools.wraps(function, updated=())
    def call(*args: object, **options: object) -> object:
        return function(*args, **options)

    return call
