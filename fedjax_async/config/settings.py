"""All settings of a run, as plain values: the command line sets them, ``settings.json`` keeps them.

They are in groups, a class each; a new setting is a field of a class in one of the files ``of_*.py``, with its default,
help, check and where it has an effect, and a line for type checkers below it.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import warnings
from collections.abc import Mapping
from typing import Any

from fedjax_async.base import check, inputs
from fedjax_async.base.identity import GONE
from fedjax_async.base.notices import RunWarning
from fedjax_async.base.spec import Spec
from fedjax_async.config import concerns, earlier, objects, own, words
from fedjax_async.config.of_data import OfData, OfSecurity
from fedjax_async.config.of_evaluation import OfBudget, OfMeasures
from fedjax_async.config.of_execution import OfExecution
from fedjax_async.config.of_method import OfConditions, OfMethod
from fedjax_async.config.of_training import OfCompression, OfPersonalisation, OfTraining

SWEEP_KEYS = ("base", "grid", "points", "roles", "seeds", "target", "final")  # keys of a sweep's file
EVALUATIONS = ("eval_time", "eval_updates", "eval_steps", "eval_at")


@dataclasses.dataclass(frozen=True)
class Settings(
    OfExecution, OfMeasures, OfBudget, OfCompression, OfPersonalisation, OfTraining, OfSecurity, OfData, OfConditions,
    OfMethod,
):  # fmt: skip
    """The settings of one run. A name with options is a spec, ``NAME:key=value,key=value``; see ``fedjax-async list``.

    A setting that names a part of the run also takes an object of your own (``config.own``).

    Raises: ``ValueError`` for values out of range, settings that exclude each other, and a run without an end.
    """

    def __new__(cls, *values: object, **given: object) -> Settings:
        """Refuse an unknown name with the nearest ones; ``__init__`` would only say that it is unexpected."""
        for name in given:
            if name not in cls.__dataclass_fields__:
                words.require("setting", name, cls.__dataclass_fields__)
        return super().__new__(cls)

    def __repr__(self) -> str:
        """The settings that differ from their defaults."""
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in given_in(self).items())})"

    def __post_init__(self) -> None:
        """Check what needs no other package; names are checked where they are resolved."""
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _held(field, getattr(self, field.name)))
        for field in dataclasses.fields(self):
            value, requires = getattr(self, field.name), field.metadata["requires"]
            if requires is not None and value is not field.default:
                requires(field.name, value)
        if self.engine == "reference":
            concerns.refuse("reference", given_in(self))
        check.require(self.late == "apply" or self.timeout is not None, "late", self.late, "left out without a timeout")
        renames = self.initial_rename is None or self.initial is not None
        check.require(renames, "initial_rename", self.initial_rename, "left out without initial")
        alone = self.eval_examples is None or (self.test_fraction is None and not self.per_client)
        check.require(alone, "eval_examples", self.eval_examples, "left out where clients have tests of their own")
        for rivals in (("epochs", "steps"), EVALUATIONS):
            given = [f"{name} = {getattr(self, name)}" for name in rivals if getattr(self, name) is not None]
            if len(given) > 1:
                raise ValueError(f"{', '.join(given)}: give at most one of the {'two' if len(rivals) == 2 else 'four'}")
        if self.time is None and self.updates is None and self.server_steps is None:
            raise ValueError(
                "time, updates, server_steps = None: give at least one, or the run has no end (only the command line "
                "has a default, updates = 200)"
            )
        for name in FLOATS:  # at the end, so that messages show what was given
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else float(value))


def _held(field: dataclasses.Field[object], value: object) -> object:
    """What a setting holds of a value that was given; ``ValueError`` for one of another type."""
    takes_text = str(field.type).startswith("str")
    if isinstance(value, (str, os.PathLike)) or not takes_text:  # not an object
        value = check.plain(value)
    if takes_text and not (value is None and "None" in str(field.type)):
        if field.name in objects.KINDS and value is not None and not isinstance(value, str):
            return own.as_setting(field.name, value)
        if not isinstance(value, str) or (value == "" and field.default is None):
            own.require_fitting(field.name, value)
            check.require(False, field.name, value, field.metadata["example"])
    if field.type == "bool":
        check.require(isinstance(value, bool), field.name, value, "True or False")
    return value


# What notebooks complete from; the constructor itself takes any name, to refuse a wrong one with the nearest.
Settings.__signature__ = inspect.signature(Settings.__init__)  # type: ignore[attr-defined]


# Settings that files leave out where they have their default.
RARE = tuple(field.name for field in dataclasses.fields(Settings) if field.metadata["rare"])
FLOATS = tuple(field.name for field in dataclasses.fields(Settings) if str(field.type).startswith("float"))
DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Settings)}


def fields_of(settings: Settings) -> dict[str, Any]:
    """The settings by name, with the objects that they hold."""
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}


def given_in(settings: Settings) -> dict[str, Any]:
    """The settings that differ from their defaults, by name."""
    return {name: value for name, value in fields_of(settings).items() if value != DEFAULTS[name]}


def as_dict(settings: Settings) -> dict[str, object]:
    """The settings as a JSON-ready dict: objects by their names.

    ``own`` has the fingerprints of own parts and, in a prepared run, ``files`` the digests of input files
    (``config.inputs``). They are left out if they are empty, a ``RARE`` setting if it is None or False. Settings
    that a client algorithm of the user's own does not take are None. ``defaults`` has what a method whose defaults have
    changed leaves open.
    """
    fields = fields_of(settings)
    parts = own.own_parts(fields)
    plain = {name: str(value) if isinstance(value, (str, own.Named)) else value for name, value in fields.items()}
    unused = [name for name in RARE if plain[name] is None or plain[name] is False]
    plain = {name: value for name, value in plain.items() if name not in unused}
    if _trains_by_itself(settings):
        plain |= {name: None for name in concerns.without_effect("own_client") if plain.get(name)}
    files = inputs.described(fields)
    left = earlier.defaults_of(settings.method, settings.timing)
    plain |= {"defaults": left} if left is not None else {}
    return plain | ({"own": parts} if parts else {}) | ({"files": files} if files else {})


def _trains_by_itself(settings: Settings) -> bool:
    """Whether the client is an algorithm with its own optimiser, and neither a name nor a factory."""
    client = settings.client
    if not isinstance(client, own.Named):
        return False
    if client.thing is own.ABSENT:  # read from a file, where a factory has its optimiser or rate
        return settings.optimizer is None and settings.lr is None
    return not callable(client.thing) and not isinstance(client.thing, Spec)


def require_named(settings: Settings) -> None:
    """``ValueError`` unless each object of the user's own has a name that a folder can keep."""
    own.require_names(fields_of(settings), "a folder of results")


def from_dict(content: Mapping[str, Any], objects: Mapping[str, object] | None = None) -> Settings:
    """The settings that :func:`as_dict` wrote; ``objects``: own parts by setting, to replace their names.

    Defaults of methods are those of the version that wrote them. Settings that no longer exist are left out, with a
    warning (``base.notices.RunWarning``).

    Raises ``ValueError`` for an own part with other code than the file says, and for values out of range.
    """
    content = dict(content)
    gone = [name for name in GONE if content.pop(name, None) is not None]
    if gone:
        text = f"{' and '.join(gone)} of an earlier version: left out; the results do not depend on it"
        warnings.warn(text, RunWarning, stacklevel=2)
    files = content.pop("files", {})
    fields = own.restored(content, objects or {})
    absent = [field for field, value in fields.items() if isinstance(value, own.Named)]
    fields = inputs.restored(fields, {field: files[field] for field in files if field not in absent})
    kept = fields.pop("defaults", None)
    fields["method"] = earlier.as_meant(fields.get("method", Settings.method), fields.get("timing"), kept)
    brought = concerns.without_effect("own_client")
    return Settings(**{name: value for name, value in fields.items() if not (name in brought and value is None)})
