"""The methods of a comparison: their names, the folders of their runs, and the one to which times are relative."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

import jax

from fedjax_async.base import check
from fedjax_async.base.spec import Spec
from fedjax_async.config import own
from fedjax_async.config.kinds import require_kind
from fedjax_async.config.labelling import plain, require_label
from fedjax_async.config.names import read
from fedjax_async.config.own import Chosen
from fedjax_async.types import Run

BASELINE = "fedavg"  # the rule of the method to which times are relative by default, if it is compared


def folder_name(method: str) -> str:
    """The name of a method's folder in a comparison.

    >>> folder_name("fedbuff@buffer:size=5")
    'fedbuff_buffer_size_5'
    """
    return re.sub(r"[^\w.-]+", "_", method)


def methods_by_name(methods: Sequence[object] | Mapping[str, object]) -> dict[str, Chosen]:
    """Name of a row -> spec or named object, from a list of both, or from a dict of labels and texts or objects."""
    listed = isinstance(methods, (Sequence, Mapping)) and not isinstance(methods, str)
    allowed = "a list of methods, such as ['fedavg', 'fedasync'], or a dict such as {'Ours': 'fedasync:mixing=0.4'}"
    check.require(listed, "methods", methods, allowed)
    check.require(len(methods) > 0, "methods", list(methods), "at least one method")
    if isinstance(methods, Mapping):
        by_name = {label: _labelled(label, one) for label, one in methods.items()}
    else:
        given = [method if isinstance(method, str) else own.as_setting("method", method) for method in methods]
        for one in given:
            own.require_names({"method": one}, "its row of a comparison")
        by_name = {str(method): method for method in given}
        check.require(len(by_name) == len(given), "methods", list(map(str, given)), "different from each other")
    parsed = [_identity(one) for one in by_name.values()]
    distinct = all(one not in parsed[:i] for i, one in enumerate(parsed))
    allowed = "different from each other, but two have the same name and options"
    check.require(distinct, "methods", list(by_name), allowed)
    _require_folders(by_name)
    return by_name


def _labelled(label: str, method: object) -> Chosen:
    """The method that a dict has under a label; ``ValueError`` for a label or a method that cannot be used."""
    if isinstance(method, (str, own.Named)) and str(method) == label:
        return method
    require_label("label", label)
    if isinstance(method, (str, own.Named)):
        return method
    with check.called({"method": f"methods[{label!r}]"}):
        if isinstance(method, Spec):
            return own.as_setting("method", method)
        require_kind("method", method)
    return own.named(plain(label), method)


def _identity(method: Chosen) -> object:
    """What two methods that are the same have in common: names and options; of an object its code too."""
    is_object = isinstance(method, own.Named) and not isinstance(method.thing, Spec)
    return method if is_object else _parsed(str(method))


def _require_folders(names: Iterable[str]) -> None:
    """``ValueError`` if two rows would have the same folder, also where case does not count."""
    seen: dict[str, str] = {}
    for name in names:
        folder = folder_name(name)
        other = seen.setdefault(folder.casefold(), name)
        allowed = f"names of different folders, but both would have runs/{folder} (upper and lower case count as one)"
        check.require(other == name, "methods", [other, name], allowed)


def _parsed(method: str) -> object:
    """A method's text with its options read; one that cannot be read as it stands, for ``prepare`` to refuse."""
    try:
        names = read("method", method)
    except ValueError:
        return method
    clock = names.clock
    return [(part.name, part.options) for part in (*names.parts, *([] if clock is None else [clock]))]


# --- what compare returns -----------------------------------------------------------------------------


@jax.tree_util.register_pytree_with_keys_class
class Comparison(dict[str, list[Run]]):
    """Method or label -> its runs, one per seed; notebooks show it as a card (``cards.py``)."""

    def __repr__(self) -> str:
        """The last loss and accuracy of each run, a line a method."""
        runs = "\n".join(f"  {name}: {', '.join(map(repr, seeds))}" for name, seeds in self.items())
        return f"<Comparison of {len(self)} methods:\n{runs}>"

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[jax.tree_util.DictKey, list[Run]], ...], tuple[str, ...]]:
        """Runs with their keys, and names, for JAX."""
        return tuple((jax.tree_util.DictKey(name), runs) for name, runs in self.items()), tuple(self)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], runs: Iterable[list[Run]]) -> Comparison:
        """The inverse of :meth:`tree_flatten_with_keys`."""
        return cls(zip(names, runs, strict=True))


# --- finding one of the methods -----------------------------------------------------------------------


def specs_in(runs: Mapping[str, Sequence[Run]]) -> dict[str, str]:
    """Name of a row -> the spec of its runs, as their settings have it."""
    return {name: str(seeds[0].settings.get("method", name)) for name, seeds in runs.items()}


def _rule(method: str) -> str:
    """The name of a method's rule, without options, parts and timing."""
    return re.split("[:+@]", str(method))[0]


def method_in(name: object, methods: Mapping[str, str] | Iterable[str]) -> str | None:
    """The row called ``name``, or else the only one with this spec, or this rule, whatever its options and timing.

    ``methods``: name of a row -> spec, or the specs, which then are the names.

    >>> method_in("fedavg", ["asgd", "fedavg@cohort:size=10"]), method_in("0.7", ["asgd"])
    ('fedavg@cohort:size=10', None)
    >>> method_in("fedasync", {"Ours": "fedasync:mixing=0.4", "FedAvg": "fedavg"})
    'Ours'
    """
    specs = _specs(methods)
    if name in specs:
        return str(name)
    for like in ([row for row in specs if specs[row] == name], _with_rule(specs, name)):
        if len(like) == 1:
            return like[0]
    return None


def _with_rule(specs: Mapping[str, str], rule: object) -> list[str]:
    """The rows whose spec, or name, has this rule."""
    return [row for row in specs if rule in (_rule(specs[row]), _rule(row))]


def _specs(methods: Mapping[str, str] | Iterable[str]) -> dict[str, str]:
    return dict(methods) if isinstance(methods, Mapping) else {method: method for method in methods}


def target_method(target: str | float, methods: Mapping[str, str] | Iterable[str]) -> str | None:
    """The method whose final accuracy is the target; None for an accuracy or a share, also if a label is like it.

    >>> target_method("fedavg", ["fedavg", "95%"]), target_method("95%", ["fedavg", "95%"])
    ('fedavg', None)
    """
    return None if 0 < target_number(target) <= 1 else method_in(target, methods)


def target_number(target: str | float | None) -> float:
    """The accuracy or the share that a target is; NaN for None and for other text, such as a method's name.

    >>> target_number("0.7"), target_number("95%"), target_number("fedavg")
    (0.7, 0.95, nan)
    """
    text = str(target)
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return math.nan


def baseline_of(methods: Mapping[str, str] | Iterable[str], given: str | None = None) -> str:
    """The row to which times are relative: the ``given`` one, else that of ``fedavg``, else the first.

    ``methods`` as in :func:`method_in`. ``fedavg`` also stands for ``fedavg@cohort:size=10``; by default, of several
    the bare one, else the first. ``ValueError`` if the given one is not among the methods, or could be several of them.
    """
    specs = _specs(methods)
    if given is not None:
        found = method_in(given, specs)
        check.require(found is not None, "baseline", given, "one of " + ", ".join(specs))
        return str(found)
    like = _with_rule(specs, BASELINE)
    bare = [row for row in like if BASELINE in (specs[row], row)]
    return [*bare, *like, *specs][0]
