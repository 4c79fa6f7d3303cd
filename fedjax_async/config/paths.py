"""One setting by its path: ``lr``, ``delay``, or an option inside a spec, ``method.mixing``, ``timing.size``.

If a spec joins several models, the path also names the model: ``faults.drop.probability``. Paths of a method's server
parts name the part: ``method.swa.start``.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple, cast

from fedjax_async.base import check, factories, grammar, registry
from fedjax_async.base.grammar import Name
from fedjax_async.config import own, words
from fedjax_async.config.earlier import Earlier
from fedjax_async.config.methods import method_options, usual_of
from fedjax_async.config.names import Names, known_parts, read
from fedjax_async.config.objects import KINDS, SPECS
from fedjax_async.config.of_data import USUAL_PARTITION
from fedjax_async.config.own import Chosen, Named, as_setting, require_fitting, specs_in
from fedjax_async.config.registries import REGISTRIES
from fedjax_async.config.settings import SWEEP_KEYS, Settings, fields_of

Fields = Mapping[str, Any]  # every setting by name; unlike a Settings, not yet checked as a whole

FIELDS: dict[str, dataclasses.Field[object]] = {field.name: field for field in dataclasses.fields(Settings)}
OF_METHODS = (
    "timing",
    "policy",
    "topology",
    "exchange",
    "compress",
    "optimizer",
)  # settings with a default that depends on the method
DICTS = ("metrics", "initial")  # settings that may be a dict: of functions, of parameters
USUAL = {"partition": USUAL_PARTITION}  # the spec that None stands for when an option of it is set


class Address(NamedTuple):
    """The parts of a path."""

    field: str
    name: str  # which of several joined models; "" if there is one model only
    option: str  # "" if the path means the whole setting


def address(path: str) -> Address:
    """Split a path: ``lr``, ``method.mixing``, ``faults.drop.probability``."""
    field, *rest = path.split(".")
    has_options = field in REGISTRIES and field in FIELDS
    fits = not rest or (has_options and len(rest) <= 2 and all(part.isidentifier() for part in rest))
    check.require(fits, "setting", path, "a setting or SPEC.OPTION, such as method.mixing")
    return Address(field, rest[0] if len(rest) == 2 else "", rest[-1] if rest else "")


# --- what a setting holds -----------------------------------------------------------------------------


def _held(field: str, value: Chosen | None) -> Names | Named | None:
    return (
        value
        if value is None or isinstance(value, Named)
        else read(field, value.meaning if isinstance(value, Earlier) else value)
    )


def _brings(fields: Fields, field: str) -> bool:
    """Whether the text of the method has a timing or exchange of its own, and ``field`` is that setting."""
    method = _held("method", fields["method"])
    clock = isinstance(method, Names) and method.clock is not None
    return clock and field == ("timing" if usual_of(fields["method"]).has_server else "exchange")


def _names(fields: Fields, field: str) -> Names | Named | None:
    """The names whose options are those of ``field``, or the object: given, or else the method's or the usual ones."""
    if _brings(fields, field):
        return Names((_held("method", fields["method"]).clock,))  # type: ignore[union-attr, arg-type]
    return _held(
        field, fields[field] or (of_method(fields["method"], field) if field in OF_METHODS else USUAL.get(field))
    )


def of_method(method: Chosen, field: str) -> str | None:
    """The method's default of a setting; None of an object that a file names, of which only the name is known."""
    absent = isinstance(method, Named) and method.thing is own.ABSENT
    return None if absent else getattr(usual_of(method), field, None)


def _with_names(fields: Fields, field: str, names: Names) -> dict[str, Any]:
    """``fields`` with the names written back where :func:`_names` reads them."""
    if not _brings(fields, field):
        return {**fields, field: str(names)}
    method = _held("method", fields["method"])._replace(clock=names.parts[0])  # type: ignore[union-attr]
    return {**fields, "method": str(method)}


def _models(fields: Fields, field: str) -> dict[str, Name | Named]:
    """Each model that a setting names, by its name; empty where it is None."""
    names = _names(fields, field)
    if not isinstance(names, Names):
        return {} if names is None else {str(names): names}
    models: dict[str, Name | Named] = {part.name: part for part in names.parts}
    allowed = "of models that are different, to set an option of one"
    check.require(len(models) == len(names.parts), field, str(names), allowed)
    return models


def _chosen(fields: Fields, where: Address) -> tuple[int, Name | Named]:
    """The model of a setting that a path selects, and its place among the models."""
    models = _models(fields, where.field)
    check.require(len(models) > 0, where.field, fields[where.field], f"given, to set its option {where.option}")
    first = next(iter(models)) if len(models) == 1 or where.field == "method" else ""  # of a method: its rule
    name = where.name or first
    paths = " or ".join(f"{where.field}.{model}.{where.option}" for model in models)
    without = f"{where.field} = {str(fields[where.field])!r} has no {name!r}"
    if where.field == "method" and name in known_parts():
        paths = f"given for a method with this part, {first}+{name}"
    check.require(name in models, "setting", ".".join(filter(None, where)), f"{paths}: {without}")
    how = "give the Spec of a factory, or register one" if where.field in SPECS else "register a factory"
    allowed = f"left out: {name} is an object and has no options ({how})"
    fits = isinstance(models[name], Name) or bool(specs_in(models[name]))
    check.require(fits, "setting", ".".join(filter(None, where)), allowed)
    return list(models).index(name), models[name]


def _options_of(fields: Fields, field: str) -> list[str]:
    """The options of the model that a setting has, by default the method's; none for an object or an unknown name."""
    names = _names(fields, field)
    known = registry.entries(field, REGISTRIES[field])
    name = names.parts[0].name if isinstance(names, Names) else None
    return [*factories.options_of(known[name])] if name in known else []


def _options(field: str, model: Name | Named) -> list[str]:
    """The options that a model takes."""
    if isinstance(model, Named):
        return [option for spec in specs_in(model).values() for option in factories.options_of(spec.factory)]
    if field == "method" and model.name in known_parts():
        return [*factories.options_of(known_parts()[model.name])]
    if field == "method":
        return [*method_options(model.name)]
    return [*factories.options_of(registry.find(field, REGISTRIES[field], model.name))]


# --- paths ------------------------------------------------------------------------------------------


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables by path: TOML reads ``method.mixing = 0.4`` as ``{"method": {"mixing": 0.4}}``."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        path = f"{prefix}{key}"
        nested = isinstance(value, Mapping) and path not in DICTS
        inner = flat(value, f"{path}.") if nested else {path: value}
        for name in inner:
            check.require(name not in found, "setting", name, "given once")
        found |= inner
    return found


def _unknown(path: str, fields: Fields) -> ValueError:
    """The error for a path that is neither a setting nor an option; it names the nearest known path."""
    first = path.partition(".")[0]
    if first in SWEEP_KEYS:
        return ValueError(f"{path}: must stand above the first [table] of a sweep's file, or be an argument of sweep")
    if first in FLAGS:
        return ValueError(f"{path}: is not a setting of a run but a flag of the command, --{first.replace('_', '-')}")
    known = [*FIELDS]
    for field in FIELDS.keys() & REGISTRIES.keys():
        models = _models(fields, field)
        for name, model in models.items():
            start = f"{field}.{name}" if len(models) > 1 else field
            known += [f"{start}.{option}" for option in _options(field, model)]
    near = [name for name in known if name.endswith(f".{path}")]
    everything = "`fedjax-async run --help` shows all"
    hint = f"; did you mean {near[0]!r}?" if near else words.hint(path, known, _in_file, everything)
    return ValueError(f"setting = {path!r}: unknown{hint} (options of a spec are written as in method.mixing)")


def _in_file(name: str) -> str:
    """A setting as a sweep's file has it: ``'lr'``, or with an example ``timing = "cohort:size=5"``."""
    setting, equals, example = name.partition("=")
    return f'{setting} = "{example}"' if equals else repr(setting)


FITS: dict[str, Callable[[object], bool]] = {
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, Integral) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, Real) and not isinstance(value, bool),
}
CONVERT: dict[str, Callable[[Any], object]] = {"str": str, "bool": bool, "int": int, "float": float}
FLAGS = ("out", "overwrite", "again", "quiet", "format", "width", "title", "plugin", "baseline", "stream", "keep_best")
KIND_NAMES = {"str": "a text", "bool": "true or false", "int": "a whole number", "float": "a number", "None": "none"}


def _field_value(field: str, value: object) -> Any:
    """``value`` in the type of the setting's annotation; the text ``none`` stands for None, which TOML lacks.

    Not of a setting that has a value of this name, as ``normalise`` has.
    """
    require_fitting(field, value)
    if field in KINDS and not (value is None or isinstance(value, (str, Real))):
        return as_setting(field, value)
    kinds = [kind for kind in str(FIELDS[field].type).split(" | ") if kind != "Named"]
    if "None" in kinds and (value is None or (isinstance(value, str) and value.lower() == "none")):
        return value if value is not None and _has(field, value) else None
    hint = f"; did you mean {field + 's'!r}?" if f"{field}s" in FIELDS else ""  # client, clients
    hint = " (a list of values to sweep belongs in the grid)" if isinstance(value, list) else hint
    text = kinds[0] == "str" and FIELDS[field].default is None
    allowed = FIELDS[field].metadata["example"] if text else " or ".join(KIND_NAMES[kind] for kind in kinds)
    check.require(FITS[kinds[0]](value), field, value, allowed + hint)
    check.require(
        kinds[0] != "float" or check.is_real(value) or isinstance(value, float), field, value, "a finite number"
    )
    return CONVERT[kinds[0]](value)


def _has(field: str, value: str) -> bool:
    """Whether a text is one of the values that a setting lists."""
    requires = FIELDS[field].metadata["requires"]
    try:
        return requires is not None and requires(field, value) is None
    except ValueError:
        return False


def checked(path: str, value: object, fields: Fields) -> Any:
    """``value`` as the settings hold it; ``ValueError`` if nothing is called ``path``, or the type is wrong."""
    value = check.plain(value)
    if path.partition(".")[0] not in FIELDS:
        raise _unknown(path, fields)
    where = address(path)
    return grammar.parse_value(grammar.option_text(path, value)) if where.option else _field_value(path, value)


def changed(fields: Fields, values: Mapping[str, object]) -> dict[str, Any]:
    """``fields`` with checked ``values`` by path: whole settings first, then the options inside them.

    >>> changed({"method": "fedasync@every", "lr": 0.1}, {"method.mixing": 0.4, "lr": 0.2})
    {'method': 'fedasync:mixing=0.4@every', 'lr': 0.2}
    """
    new = {**fields, **{path: value for path, value in values.items() if "." not in path}}
    for path, value in values.items():
        where = address(path)
        if not where.option:
            continue
        place, model = _chosen(new, where)
        known = _options(where.field, model)
        if where.option not in known:
            name = model.name if isinstance(model, Name) else str(model)
            near = [f"{field}.{where.option}" for field in OF_METHODS if where.option in _options_of(new, field)]
            near = near if where.field == "method" else []
            close = difflib.get_close_matches(where.option, known, n=1, cutoff=0.5)
            near += [path[: -len(where.option)] + option for option in close]
            hint = f"; did you mean {near[0]!r}?" if near else ""
            takes = ", ".join(known) or "none"
            raise ValueError(f"setting = {path!r}: {name} has no option {where.option!r}{hint} (options: {takes})")
        if isinstance(model, Named):
            new = {**new, where.field: own.with_option(model, where.option, value)}
            continue
        names = cast(Names, _names(new, where.field))
        part = model.put(where.option, grammar.option_text(where.option, value))
        new = _with_names(new, where.field, names.put(place, part))
    return new


def refuse_none(given: Fields, method: Chosen) -> None:
    """``ValueError`` for a setting that is given as none where the method has one of its own, which would be taken."""
    for path in ("compress", "policy"):
        usual = of_method(method, path) if path in given and given[path] is None else None
        allowed = f"left out, since none is the method's own, {usual}"
        allowed += " (identity compresses nothing)" if path == "compress" else ""
        check.require(usual is None, path, "none", allowed)


def value_of(settings: Settings, path: str) -> Any:
    """The value of a path in a run: the setting, or the option if its spec gives it, else None.

    >>> run = Settings(updates=9, lr=0.1, method="fedbuff@buffer:size=5")
    >>> value_of(run, "lr"), value_of(run, "timing.size"), value_of(run, "delay.mean")
    (0.1, 5, None)
    """
    where = address(path)
    if not where.option:
        return getattr(settings, where.field)
    models = _models(fields_of(settings), where.field)
    model = models.get(where.name) if where.name else next(iter(models.values()), None)
    if isinstance(model, Name):
        return model.options.get(where.option)
    specs = specs_in(model).values()
    return next((one.options[where.option] for one in specs if where.option in one.given), None)


def values_of(settings: Settings, paths: Iterable[str]) -> dict[str, Any]:
    """``value_of`` each path; a text is shown without the options that have their own path.

    >>> values_of(Settings(updates=9, method="fedasync:mixing=0.4,clip=1"), ["method", "method.mixing"])
    {'method': 'fedasync:clip=1', 'method.mixing': 0.4}
    """
    found = {path: value_of(settings, path) for path in paths}
    addresses = [address(path) for path in found]
    for field in {where.field for where in addresses if where.option} & set(found):
        if found[field] is not None and not isinstance(found[field], Named):
            found[field] = str(_without(field, read(field, found[field]), addresses))
    return found


def _without(field: str, names: Names, addresses: Iterable[Address]) -> Names:
    """The names in the text of a setting without the options that the addresses select."""

    def shown(part: Name, fields: Collection[str], rule: bool = True) -> Name:
        named = ("", part.name) if rule else (part.name,)
        return part.without({where.option for where in addresses if where.field in fields and where.name in named})

    parts = tuple(shown(part, (field,), i == 0 or field != "method") for i, part in enumerate(names.parts))
    clock = None if names.clock is None else shown(names.clock, ("timing", "exchange"))
    return names._replace(parts=parts, clock=clock)
