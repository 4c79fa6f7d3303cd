"""What there is by name."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from fedjax_async import registry

# Kind -> module and name of its registry, imported when it is listed: most need JAX.
REGISTRIES: dict[str, tuple[str, str]] = {
    "methods": ("config.methods", "METHODS"),
    "timings": ("clock", "TIMINGS"),
    "delays": ("clock", "DELAYS"),
    "availability": ("clock", "AVAILABILITY"),
    "faults": ("clock", "FAULTS"),
    "networks": ("clock", "NETWORKS"),
    "partitions": ("data", "PARTITIONERS"),
    "datasets": ("data", "DATASETS"),
    "models": ("models", "MODELS"),
    "optimizers": ("local", "OPTIMIZERS"),
    "decays": ("local", "DECAYS"),
    "compressors": ("compress", "COMPRESSORS"),
    "staleness": ("server", "STALENESS"),
    "sampling": ("clock", "SUCCESSORS"),
}


def entries(kind: str) -> dict[str, Any]:
    """The registry of a kind."""
    module, name = registry.find("what", REGISTRIES, kind)
    found: dict[str, Any] = getattr(importlib.import_module(f"fedjax_async.{module}"), name)
    return found


def _options(entry: Any, name: str) -> dict[str, Any]:
    """Option -> default of a registry's entry; ``...`` where an option must be given."""
    if not callable(entry):
        from fedjax_async.config.methods import method_options  # noqa: PLC0415 (needs JAX)

        return method_options(name)
    options = registry.options_of(entry)
    return {key: "..." if p.default is p.empty else p.default for key, p in options.items()}


def list_names(arguments: argparse.Namespace) -> None:
    """One kind, or all of them."""
    chosen = [arguments.what] if arguments.what else list(REGISTRIES)
    for kind in chosen:
        found = entries(kind)
        print(f"{kind}:")
        for name, entry in found.items():
            about = getattr(entry, "about", None) or registry.summary(entry)
            print(f"  {name:<20} {about}")
            options = _options(entry, name)
            if arguments.options and options:
                shown = ", ".join(f"{key}={value}" for key, value in options.items())
                print(f"  {'':<20}   options: {shown}")
        print()
