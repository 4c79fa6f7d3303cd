"""The commands ``list`` and ``data``: names with their options; data sets, listed, fetched and verified."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from fedjax_async import registry

# Kind -> module and name of its registry. Most need JAX, so they are imported when they are listed.
REGISTRIES: dict[str, tuple[str, str]] = {
    "methods": ("config.methods", "METHODS"),
    "parts": ("server", "PARTS"),
    "timings": ("clock", "TIMINGS"),
    "topologies": ("clock", "TOPOLOGIES"),
    "exchanges": ("clock", "EXCHANGES"),
    "delays": ("clock", "DELAYS"),
    "availability": ("clock", "AVAILABILITY"),
    "faults": ("clock", "FAULTS"),
    "networks": ("clock", "NETWORKS"),
    "partitions": ("data", "PARTITIONERS"),
    "datasets": ("data", "DATASETS"),
    "augmentations": ("data", "AUGMENTATIONS"),
    "models": ("models", "MODELS"),
    "clients": ("config.plugins", "CLIENTS"),
    "optimizers": ("local", "OPTIMIZERS"),
    "decays": ("local", "DECAYS"),
    "compressors": ("compress", "COMPRESSORS"),
    "metrics": ("models", "METRICS"),
    "staleness": ("server", "STALENESS"),
    "sampling": ("clock", "SUCCESSORS"),
}


def entries(kind: str) -> dict[str, Any]:
    """The names of ``kind``, those of plugins too; ``ValueError`` naming the nearest kind if there is none."""
    module, name = registry.find("what", REGISTRIES, kind)
    builtin: dict[str, Any] = getattr(importlib.import_module(f"fedjax_async.{module}"), name)
    same = ("availability", "faults", "staleness", "sampling", "metrics")
    singular = kind if kind in same else kind.removesuffix("s")
    irregular = {"compressors": "compress", "topologies": "topology", "augmentations": "augment"}
    return registry.entries(irregular.get(kind, singular), builtin)


def _options(entry: Any, name: str) -> dict[str, Any]:
    """Option -> default of an entry; ``...`` for an option that must be given."""
    if not callable(entry):
        from fedjax_async.config.methods import method_options  # noqa: PLC0415 (needs JAX)

        return method_options(name)
    options = registry.options_of(entry)
    return {key: "..." if p.default is p.empty else p.default for key, p in options.items()}


def list_names(arguments: argparse.Namespace) -> None:
    """Print the names of one kind, or of all kinds."""
    chosen = [arguments.what] if arguments.what else list(REGISTRIES)
    for kind in chosen:
        found = entries(kind)
        print(f"{kind}:" if found else f"{kind}:\n  (none; a plugin may register some)")
        for name, entry in found.items():
            about = entry.about if hasattr(entry, "about") else registry.summary(entry)
            print(f"  {name:<20} {about or '(its factory has no docstring)'}")
            options = _options(entry, name)
            if arguments.options and options:
                shown = ", ".join(f"{key}={value}" for key, value in options.items())
                print(f"  {'':<20}   options: {shown}")
        print()


def list_data(arguments: argparse.Namespace) -> None:
    """Print every data set and its state on this machine."""
    from fedjax_async.data import list_datasets  # noqa: PLC0415 (needs JAX, as below)
    from fedjax_async.results import table  # noqa: PLC0415

    print(table([entry._asdict() for entry in list_datasets(arguments.data_dir)]), end="")


def fetch_data(arguments: argparse.Namespace) -> None:
    """Fetch the named data sets, one after the other."""
    from fedjax_async.data import fetch  # noqa: PLC0415

    for name in arguments.names:
        fetch(name, arguments.data_dir, source=arguments.source, progress=print)


def verify_data(arguments: argparse.Namespace) -> None:
    """Compare the hashes of the named data sets; ``ValueError`` if any differs."""
    from fedjax_async.data import verify  # noqa: PLC0415

    failed = 0
    for name in arguments.names:
        for item in verify(name, arguments.data_dir):
            failed += not item.ok
            print(
                f"{name}: {item.what}: {'ok' if item.ok else f'WRONG (expected {item.expected}, found {item.found})'}"
            )
    if failed:
        raise ValueError(f"{failed} hashes differ: fetch the data again with `fedjax-async data fetch NAME`")
