"""The file of ``--config``: settings by name in TOML, or the ``settings.json`` of a saved run."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedjax_async.base import check
from fedjax_async.config.settings import SWEEP_KEYS

CONFIG_EPILOG = """a FILE for --config: settings by the names of their flags, with _ for -; flags that are given win
  dataset = "fashion_mnist_6k"
  clients = 20
  delay = "lognormal:mean=60,sigma=0.5"
  updates = 500
"""

ALONE_EPILOG = """  method.mixing = 0.4              # an option of a name follows a dot

The settings.json of a saved run is such a file, too: fedjax-async run --config runs/one/settings.json --seed 1
"""

METHODS_EPILOG = """
The methods may stand in it as a list, or as a table with their labels:
  methods = ["fedavg", "Ours=fedasync:mixing=0.4"]
or
  [methods]
  FedAvg = "fedavg"
  "Our method" = "fedasync:mixing=0.4"
Methods on the command line replace them.
"""


def content(path: str) -> dict[str, Any]:
    """The names and values in a file; ``ValueError`` if it is neither TOML nor, by its ending, JSON."""
    file = check.path("config", path)
    allowed = "a TOML file of settings, or the settings.json of a saved run"
    there = file.is_file()
    check.require(there, "config", path, f"{allowed}; {'it is a folder' if file.is_dir() else 'there is no such file'}")
    try:
        text = file.read_text(encoding="utf-8-sig")
        found = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"config = {path!r}: must be {allowed}; {error}") from None
    check.require(isinstance(found, dict), "config", path, allowed)
    for name in found:  # both are names of one setting
        check.require("-" not in name or name.replace("-", "_") not in found, name, found[name], "given once")
    return {name.replace("-", "_"): value for name, value in found.items()}


def dataset_in(path: str | None) -> str | None:
    """The data set in a file, if it names one."""
    found = None if path is None else content(path).get("dataset")
    return found if isinstance(found, str) else None


def methods_in(path: str | None) -> dict[str, str]:
    """The methods in a file for ``compare``: their labels or specs, and specs; empty without any."""
    found = {} if path is None else content(path).get("methods", {})
    listed = isinstance(found, (list, dict))
    texts = [*(found.values() if isinstance(found, dict) else found)] if listed else []
    allowed = 'a list of methods, such as ["fedavg", "fedasync"], or a table of labels and methods'
    check.require(listed and all(isinstance(text, str) for text in texts), "methods", found, allowed)
    if isinstance(found, dict):
        return found
    from fedjax_async.config.labelling import by_label  # noqa: PLC0415 (config imports JAX)

    return by_label(found)


def settings_in(path: str, base: dict[str, object], *, compares: bool) -> dict[str, Any]:
    """The settings in a file, checked, by name; ``base``: what stands for those that it leaves out.

    ``compares``: whether methods stand in place of the setting ``method``. ``ValueError`` for unknown names, with the
    nearest, and for values of the wrong type.
    """
    found = content(path)
    if compares:
        found.pop("methods", None)
        own = next((name for name in found if name.partition(".")[0] == "method"), "")
        allowed = "left out in a file for compare, which has methods"
        check.require(not own, "method", found.get(own), allowed)
    for name in found:
        _require_setting(name, path)
    if Path(path).suffix == ".json":
        from fedjax_async.config.settings import fields_of, from_dict  # noqa: PLC0415

        return fields_of(from_dict(found))
    from fedjax_async.config.paths import FIELDS, changed, checked, flat  # noqa: PLC0415 (needs JAX)

    fields = {name: field.default for name, field in FIELDS.items()} | base
    values = {name: checked(name, value, fields) for name, value in flat(found).items()}
    new = changed(fields, values)
    return {name: new[name] for name in new if name in found or new[name] != fields[name]}


def refuse_none(path: str, values: Mapping[str, object], methods: Iterable[str]) -> None:
    """``ValueError`` for ``none`` in a TOML file where one of the methods has a value of its own."""
    if Path(path).suffix == ".json":
        return
    from fedjax_async.config import paths  # noqa: PLC0415 (needs JAX)

    for method in methods:
        paths.refuse_none(values, method)


def _require_setting(name: str, path: str) -> None:
    """``ValueError`` for names that belong to a comparison or to a sweep."""
    file = Path(path).name
    if name == "methods":
        raise ValueError(f"methods: must be left out in {file}, because only compare has several methods")
    if name in ("base", "grid", "points", "roles"):
        raise ValueError(f"{name}: is a table of a sweep; train {file} with: fedjax-async sweep {path}")
    if name in SWEEP_KEYS:
        raise ValueError(f"{name}: is not a setting of a run but a flag of the command, --{name}")
