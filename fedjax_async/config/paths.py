"""One setting by its path: ``lr``, ``delay``, or an option inside a spec, ``method.mixing``, ``timing.size``.

If a spec joins several models, the path also names the model: ``faults.drop.probability``. Paths of a method's server
parts name the part: ``method.swa.start``.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple

from fedjax_async import check, factories, grammar, registry
from fedjax_async.config import own, words
from fedjax_async.config.earlier import meaning_of
from fedjax_async.config.methods import method_options, usual_of
from fedjax_async.config.objects import KINDS, SPECS
from fedjax_async.config.of_data import USUAL_PARTITION
from fedjax_async.config.own import Named, as_setting, known_parts, parts_of, require_fitting, specs_in
from fedjax_async.config.plugins import REGISTRIES
from fedjax_async.config.settings import SWEEP_KEYS, Settings, fields_of

Fields = Mapping[str, Any]  # every setting by name; unlike a Settings, not yet checked as a whole

FIELDS: dict[str, dataclasses.Field[Any]] = {field.name: field for field in dataclasses.fields(Settings)}
OF_METHODS = (
    "timing",
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


# --- specs ------------------------------------------------------------------------------------------


def with_option(spec: str, key: str, value: Any) -> str:
    """``spec`` with one option set, the others as they stand.

    >>> with_option("fedasync:mixing=0.6,exponent=0.5", "mixing", 0.4), with_option("constant", "mean", 2.0)
    ('fedasync:mixing=0.4,exponent=0.5', 'constant:mean=2.0')
    """
    name, options = registry.parse_spec("spec", spec)
    texts = (item.partition("=")[2].strip() for item in grammar.items_of(spec))
    merged = dict(zip(options, texts)) | {key: grammar.option_text(key, value)}
    return f"{name}:{','.join(f'{k}={text}' for k, text in merged.items())}"


def _parts(method: str) -> tuple[str, str, str]:
    """A method, ``@``, and its own timing or exchange; the last two are empty if it has none."""
    return (method, "", "") if isinstance(method, Named) else meaning_of(method).partition("@")


def _spec(fields: Fields, field: str) -> str | None:
    """The spec that holds the options of ``field``."""
    rule, _, own_one = _parts(fields["method"])
    if field == "method":
        return rule
    if field not in OF_METHODS:
        return fields[field] or USUAL.get(field)
    usual = usual_of(fields["method"])
    kind = "timing" if usual.has_server else "exchange"
    # in this order: the method's own "@timing", the run's timing, the method's default
    given = own_one if field == kind else ""
    spec: str | None = given or fields[field] or getattr(usual, field, None)
    return spec


def _with_spec(fields: Fields, field: str, spec: str) -> dict[str, Any]:
    """``fields`` with ``spec`` written back where ``_spec`` reads it."""
    rule, at, own_one = _parts(fields["method"])
    changes = {"method": {"method": spec + at + own_one}}
    if at:
        kind = "timing" if usual_of(fields["method"]).has_server else "exchange"
        changes[kind] = {"method": f"{rule}@{spec}"}
    return {**fields, **changes.get(field, {field: spec})}


def _models(fields: Fields, field: str) -> dict[str, str]:
    """Name -> spec of each model that a setting names; empty where it is None."""
    spec = _spec(fields, field)
    if spec is None:
        return {}
    if isinstance(spec, Named):
        return {str(spec): spec}
    specs = parts_of(field, spec)
    models = {one.partition(":")[0]: one for one in specs}
    check.require(len(models) == len(specs), field, spec, "of models that are different, to set an option of one")
    return models


def _chosen(fields: Fields, where: Address) -> tuple[dict[str, str], str]:
    """The models of a setting, and the name of the model that a path selects."""
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
    fits = not isinstance(models[name], Named) or bool(specs_in(models[name]))
    check.require(fits, "setting", ".".join(filter(None, where)), allowed)
    return models, name


def _options_of(fields: Fields, field: str) -> list[str]:
    """The options of the model that a setting has, by default the method's; none for an object or an unknown name."""
    spec = _spec(fields, field)
    name = None if spec is None or isinstance(spec, Named) else spec.partition(":")[0]
    known = registry.entries(field, REGISTRIES[field])
    return [*factories.options_of(known[name])] if name in known else []


def _options(field: str, name: str) -> Iterable[str]:
    """The options that a model called ``name`` takes."""
    if field == "method" and name in known_parts():
        return factories.options_of(known_parts()[name])
    if field == "method":
        return method_options(name)
    return factories.options_of(registry.find(field, REGISTRIES[field], name))


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
        for name in [name for name, spec in models.items() if not isinstance(spec, Named)]:
            start = f"{field}.{name}" if len(models) > 1 else field
            known += [f"{start}.{option}" for option in _options(field, name)]
    near = [name for name in known if name.endswith(f".{path}")]
    everything = "`fedjax-async run --help` shows all"
    hint = f"; did you mean {near[0]!r}?" if near else words.hint(path, known, _in_file, everything)
    return ValueError(f"setting = {path!r}: unknown{hint} (options of a spec are written as in method.mixing)")


def _in_file(name: str) -> str:
    """A setting as a sweep's file has it: ``'lr'``, or with an example ``timing = "cohort:size=5"``."""
    setting, equals, example = name.partition("=")
    return f'{setting} = "{example}"' if equals else repr(setting)


FITS: dict[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, Integral) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, Real) and not isinstance(value, bool),
}
CONVERT: dict[str, Callable[[Any], Any]] = {"str": str, "bool": bool, "int": int, "float": float}
FLAGS = ("out", "overwrite", "again", "quiet", "format", "width", "title", "plugin", "baseline", "stream", "keep_best")
KIND_NAMES = {"str": "a text", "bool": "true or false", "int": "a whole number", "float": "a number", "None": "none"}


def _field_value(field: str, value: Any) -> Any:
    """``value`` in the type of the setting's annotation; the text ``none`` stands for None, which TOML lacks."""
    if field in KINDS and (isinstance(value, Named) or not (value is None or isinstance(value, (str, Real)))):
        require_fitting(field, value)
        return value if isinstance(value, Named) else as_setting(field, value)
    kinds = str(FIELDS[field].type).split(" | ")
    if "None" in kinds and (value is None or (isinstance(value, str) and value.lower() == "none")):
        return None
    hint = f"; did you mean {field + 's'!r}?" if f"{field}s" in FIELDS else ""  # client, clients
    hint = " (a list of values to sweep belongs in the grid)" if isinstance(value, list) else hint
    text = kinds[0] == "str" and FIELDS[field].default is None
    allowed = FIELDS[field].metadata["example"] if text else " or ".join(KIND_NAMES[kind] for kind in kinds)
    check.require(FITS[kinds[0]](value), field, value, allowed + hint)
    check.require(
        kinds[0] != "float" or check.is_real(value) or isinstance(value, float), field, value, "a finite number"
    )
    return CONVERT[kinds[0]](value)


def checked(path: str, value: Any, fields: Fields) -> Any:
    """``value`` as the settings hold it; ``ValueError`` if nothing is called ``path``, or the type is wrong."""
    value = check.plain(value)
    if path.partition(".")[0] not in FIELDS:
        raise _unknown(path, fields)
    where = address(path)
    return grammar.parse_value(grammar.option_text(path, value)) if where.option else _field_value(path, value)


def changed(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    """``fields`` with checked ``values`` by path: whole settings first, then the options inside them.

    >>> changed({"method": "fedasync@every", "lr": 0.1}, {"method.mixing": 0.4, "lr": 0.2})
    {'method': 'fedasync:mixing=0.4@every', 'lr': 0.2}
    """
    new = {**fields, **{path: value for path, value in values.items() if "." not in path}}
    for path, value in values.items():
        where = address(path)
        if not where.option:
            continue
        models, name = _chosen(new, where)
        specs = specs_in(models[name])
        known = list(_options(where.field, name)) if not specs else []
        known += [option for spec in specs.values() for option in factories.options_of(spec.factory)]
        if where.option not in known:
            near = [f"{field}.{where.option}" for field in OF_METHODS if where.option in _options_of(new, field)]
            near = near if where.field == "method" else []
            close = difflib.get_close_matches(where.option, known, n=1, cutoff=0.5)
            near += [path[: -len(where.option)] + option for option in close]
            hint = f"; did you mean {near[0]!r}?" if near else ""
            takes = ", ".join(known) or "none"
            raise ValueError(f"setting = {path!r}: {name} has no option {where.option!r}{hint} (options: {takes})")
        if specs:
            new = {**new, where.field: own.with_option(new[where.field], where.option, value)}
            continue
        models[name] = with_option(models[name], where.option, value)
        new = _with_spec(new, where.field, _joint(where.field).join(models.values()))
    return new


def _joint(field: str) -> str:
    """What joins the specs of a setting."""
    return "," if field == "metrics" else "+"


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
    spec = models.get(where.name) if where.name else next(iter(models.values()), None)
    if specs := specs_in(spec):
        return next((one.options[where.option] for one in specs.values() if where.option in one.given), None)
    return None if spec is None else registry.parse_spec(where.field, spec)[1].get(where.option)


def values_of(settings: Settings, paths: Iterable[str]) -> dict[str, Any]:
    """``value_of`` each path; a spec is shown without the options that have their own path.

    >>> values_of(Settings(updates=9, method="fedasync:mixing=0.4,clip=1"), ["method", "method.mixing"])
    {'method': 'fedasync:clip=1', 'method.mixing': 0.4}
    """
    found = {path: value_of(settings, path) for path in paths}
    addresses = [address(path) for path in found]
    named = {path for path, value in found.items() if isinstance(value, Named)}
    for field in ({where.field for where in addresses if where.option} & set(found)) - named:
        rule, at, timing = str(found[field] or "").partition("@" if field == "method" else "\0")
        specs = parts_of(field, rule)
        of_parts = [
            where for where in addresses if where.name or field != "method"
        ]  # the others are options of the rule
        kept = [_without(one, field, of_parts if i else addresses) for i, one in enumerate(specs)]
        text = _joint(field).join(kept)
        found[field] = text + at + _without(timing, "timing", addresses) if text else found[field]
    return found


def _without(spec: str, field: str, addresses: Iterable[Address]) -> str:
    """A model's spec without the options that the addresses select."""
    name = spec.partition(":")[0]
    without = {where.option for where in addresses if where.field == field and where.name in ("", name)}
    names = {item: item.partition("=")[0].strip().replace("-", "_") for item in grammar.items_of(spec)}
    kept = [item for item, option in names.items() if option not in without]
    return f"{name}:{','.join(kept)}" if kept else name
