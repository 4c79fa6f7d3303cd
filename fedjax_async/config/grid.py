"""Many runs from one description: every combination of a grid, listed points, and seeds.

Swept settings have their names in :class:`~fedjax_async.config.settings.Settings`: ``lr``, ``delay``, ``seed``; an
option of a spec follows a dot: ``method.mixing``, ``delay.sigma``, ``optimizer.momentum``, ``timing.size``.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fedjax_async.base import check, grammar
from fedjax_async.config.labelling import plain, require_label
from fedjax_async.config.own import ABSENT, Named, named
from fedjax_async.config.paths import DICTS, FIELDS, Fields, changed, checked, flat, refuse_none, values_of
from fedjax_async.config.settings import Settings, fields_of

MOST_RUNS = 100_000  # a larger grid is taken for a mistake
LONGEST_NAME = 120  # characters; file systems take 255 bytes
PLAIN = frozenset(string.ascii_letters + string.digits + "._-=@")  # characters that names keep
SWAPPED = {":": "~", ",": "+"}  # keeps specs readable in a name; other characters become %XX


class GridPoint(NamedTuple):
    """One run of a sweep."""

    name: str  # its folder: "mixing=0.4,exponent=0.5,seed=1"
    values: dict[str, object]  # what the sweep sets, by path: {"method.mixing": 0.4, ..., "seed": 1}
    settings: Settings
    labelled: tuple[str, ...] = ()  # the paths with a label as their value; the settings have what it stands for

    def shown(self, paths: Iterable[str]) -> dict[str, object]:
        """The value of each path as tables show it: a label, or as ``paths.values_of`` says.

        An option of an object is the swept value if a file names the object, because then its options are not known.
        """
        found, fields = values_of(self.settings, paths), fields_of(self.settings)
        absent = [field for field, value in fields.items() if isinstance(value, Named) and value.thing is ABSENT]
        options = [path for path in self.values if "." in path and path.partition(".")[0] in absent]
        return found | {path: self.values[path] for path in (*self.labelled, *options) if path in found}

    def title(self, short: Mapping[str, str]) -> str:
        """A readable title, without the seed."""
        return setting_title(self.values, short, self.labelled)


class Labelled(NamedTuple):
    """A value of a setting, and the label under which it is shown."""

    label: str
    value: object


def labels(paths: Iterable[str]) -> dict[str, str]:
    """Path -> short name: the option alone where it is unambiguous.

    >>> labels(["method.mixing", "decay.steps", "lr"])
    {'method.mixing': 'mixing', 'decay.steps': 'decay.steps', 'lr': 'lr'}
    """
    paths = list(paths)
    ends = [path.rpartition(".")[2] for path in paths]
    alone = [ends.count(end) == 1 and ("." not in path or end not in FIELDS) for path, end in zip(paths, ends)]
    return {path: end if clear else path for path, end, clear in zip(paths, ends, alone)}


def _escaped(value: object) -> str:
    """A value as part of a file name; different values give different texts."""
    text = str(value) if isinstance(value, (str, Named)) else grammar.option_text("value", value)
    return "".join(c if c in PLAIN else SWAPPED.get(c) or "".join(f"%{byte:02X}" for byte in c.encode()) for c in text)


def point_name(values: Mapping[str, object], short: Mapping[str, str]) -> str:
    """The name of a point's folder; different values give different names (long names end in a hash).

    >>> point_name({"method": "fedbuff@buffer:size=5", "seed": 1}, {"method": "method", "seed": "seed"})
    'method=fedbuff@buffer~size=5,seed=1'
    """
    name = ",".join(f"{short[path]}={_escaped(value)}" for path, value in values.items()) or "base"
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 17]}~{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def setting_title(values: Mapping[str, object], short: Mapping[str, str], labelled: Sequence[str] = ()) -> str:
    """A readable title of a point, without the seed: ``mixing=0.4, exponent=0.5``; a label stands alone.

    >>> setting_title({"method": "Ours", "lr": 0.1, "seed": 0}, {"method": "method", "lr": "lr"}, ["method"])
    'Ours, lr=0.1'
    """
    parts = [
        str(value) if path in labelled else f"{short[path]}={value}" for path, value in values.items() if path != "seed"
    ]
    return ", ".join(parts) or "base"


def swept(points: Iterable[GridPoint]) -> list[str]:
    """Every path that some point sets, in order of first use, the seed last."""
    paths = dict.fromkeys(path for point in points for path in point.values)
    return sorted(paths, key=lambda path: path == "seed")


def with_changes(
    base: Settings | Mapping[str, object] | None, changes: Mapping[str, object]
) -> Settings | Mapping[str, object]:
    """The settings that all runs of a sweep share, changed by keywords; a ``base`` in a form of its own is kept."""
    if not changes or not isinstance(base, (Settings, Mapping, type(None))):
        return {} if base is None else base
    return {**(fields_of(base) if isinstance(base, Settings) else base or {}), **changes}


def base_fields(base: Settings | Mapping[str, object]) -> dict[str, Any]:
    """The settings that all runs share, from ``Settings`` or a mapping by path; they may still lack a budget."""
    if isinstance(base, Settings):
        return fields_of(base)
    check.require(isinstance(base, Mapping), "base", base, "Settings or a mapping, setting -> value")
    fields: Fields = {name: field.default for name, field in FIELDS.items()}
    return changed(fields, {path: checked(path, value, fields) for path, value in flat(base).items()})


def _axes(grid: Mapping[str, Any], fields: Fields, lists: bool = False) -> dict[str, list[Any]]:
    """Path -> its values, checked; a single value counts as a list of one, unless only ``lists`` are taken."""
    axes: dict[str, list[Any]] = {}
    named_values = {path: given for path, given in grid.items() if lists and _has_labels(path, given)}
    for path, given in flat({path: None if path in named_values else given for path, given in grid.items()}).items():
        if path in named_values:
            axes[path] = _labelled(path, named_values[path], fields)
            continue
        single = isinstance(given, Mapping) or _is_single(given)
        values = [checked(path, value, fields) for value in ([given] if single else given)]
        check.require(not (single and lists), path, given, "a list of values in a grid, such as [0.01, 0.1]")
        check.require(len(values) > 0, path, values, "at least one value")
        twice = any(value in values[:i] for i, value in enumerate(values))
        check.require(not twice, path, values, "values that are different from each other")
        axes[path] = values
    return axes


def _has_labels(path: str, given: Any) -> bool:
    """Whether a table of a grid has a value for each label; one with lists has values for options of the setting."""
    table = isinstance(given, Mapping) and len(given) > 0 and path in FIELDS and path not in DICTS
    return table and any(map(_is_single, given.values()))


def _is_single(value: object) -> bool:
    """Whether it is one value, and neither a list of them nor a table; a ``Method`` is a tuple, but one value."""
    return isinstance(value, str) or hasattr(value, "_fields") or not isinstance(value, Iterable)


def _labelled(path: str, given: Mapping[str, object], fields: Fields) -> list[Labelled]:
    """The values of a setting with their labels, checked."""
    found = []
    for label, value in given.items():
        require_label(f"label in {path}", label)
        with check.called({path: f"{path}.{label}"}):
            held = checked(path, value, fields)
        nameless = isinstance(held, Named) and not held.given
        found.append(Labelled(label, named(plain(label), value) if nameless else held))
    twice = any(each.value in [other.value for other in found[:i]] for i, each in enumerate(found))
    check.require(not twice, path, dict(given), "a table of labels with values that are different from each other")
    return found


def seeds_of(seeds: int | Iterable[int], first: int) -> list[int]:
    """The list of seeds, or ``seeds`` of them counted from ``first``; ``ValueError`` for equal or invalid seeds."""
    if isinstance(seeds, Iterable) and not isinstance(seeds, str):
        listed = list(seeds)
        for seed in listed:
            check.whole("seeds", seed, low=0, high=2**31 - 1)
        check.require(len(listed) == len(set(listed)) > 0, "seeds", listed, "different seeds, at least one")
        return listed
    check.whole("seeds", seeds, high=MOST_RUNS)
    return list(range(first, first + seeds))


def expand(
    base: Settings | Mapping[str, object],
    grid: Mapping[str, object] | None = None,
    *,
    points: Iterable[Mapping[str, object]] | None = None,
    seeds: int | Iterable[int] | None = None,
) -> list[GridPoint]:
    """The runs of a sweep, in order: the grid's combinations, then the listed points, each with every seed.

    Args:
      base: what all runs share: ``Settings``, or a mapping by path.
      grid: path -> list of values; every combination is a run, and the last path varies fastest. A table of labels
        instead of a list, ``{"method": {"Ours": "fedasync:mixing=0.4", "FedBuff": "fedbuff"}}``, names the values in
        folders, tables and pictures.
      points: further runs, each a mapping path -> value; a list of values makes it a small grid of its own.
      seeds: a number of seeds, counted from the base's, or a list of them.

    Raises: ``ValueError`` for unknown paths (naming the nearest), values of the wrong type, empty lists,
    and two runs with the same settings.

    >>> [point.name for point in expand(Settings(updates=9), {"method.mixing": [0.4, 0.8]}, seeds=2)]
    ['mixing=0.4,seed=0', 'mixing=0.4,seed=1', 'mixing=0.8,seed=0', 'mixing=0.8,seed=1']
    """
    fields = base_fields(base)
    listed = points is None or (isinstance(points, Iterable) and not isinstance(points, (str, Mapping)))
    check.require(listed, "points", points, "a list of mappings, setting -> values")
    entries = [*([grid] if grid else []), *(points or [])]
    for entry in entries:
        check.require(isinstance(entry, Mapping), "grid or point", entry, "a mapping, setting -> values")
    axes = [_axes(entry, fields, lists=entry is grid) for entry in entries]
    check.require(any(axes) or seeds is not None, "grid", grid, "at least one setting with its values")
    if seeds is not None:
        listed = any("seed" in each for each in axes)
        check.require(not listed, "seeds", seeds, "left out if the grid or a point sets seed")
        found = _axes({"seed": seeds_of(seeds, fields["seed"])}, fields)
        axes = [each | found for each in axes or [{}]]
    count = sum(math.prod(map(len, each.values())) for each in axes)
    check.require(count <= MOST_RUNS, "grid", f"{count} runs", f"at most {MOST_RUNS} runs")
    combined = [dict(zip(each, values)) for each in axes for values in itertools.product(*each.values())]
    short = labels(dict.fromkeys(path for each in axes for path in each))
    shared = base if isinstance(base, Mapping) else {}
    absent = {path: None for path, value in shared.items() if isinstance(value, str) and value.lower() == "none"}
    expanded = [_point(values, short, fields, absent) for values in combined]
    _all_different(expanded)
    return expanded


def _point(given: Mapping[str, Any], short: Mapping[str, str], fields: Fields, absent: Fields) -> GridPoint:
    """The run with these values by path, some of them :class:`Labelled`; ``absent``: what all runs have none of."""
    labelled = tuple(path for path, value in given.items() if isinstance(value, Labelled))
    values = {path: value.label if path in labelled else value for path, value in given.items()}
    meant = {path: value.value if path in labelled else value for path, value in given.items()}
    settings = Settings(**changed(fields, meant))
    refuse_none({**absent, **meant}, settings.method)
    return GridPoint(point_name(values, short), values, settings, labelled)


def _all_different(points: Sequence[GridPoint]) -> None:
    """``ValueError`` if two points are the same run, or if their folders' names differ in upper and lower case only."""
    seen: dict[Settings | str, str] = {}
    for point in points:
        for same in (point.settings, point.name.lower()):
            if same in seen:
                raise ValueError(f"points = {seen[same]!r}, {point.name!r}: must be different from each other")
            seen[same] = point.name
