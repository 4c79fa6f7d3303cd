"""With what a saved run was computed, compared with this process: JAX's settings, device, input files, plugins."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from fedjax_async import identity, notices
from fedjax_async.engine.checkpoint import NUMBERS, SAID
from fedjax_async.engine.numerics import numerics, rounding
from fedjax_async.results import files

VERSIONS = "versions.json"
DEVICE = ("backend", "device")  # what VERSIONS says about the kind of device


def has_numbers(folder: Path, *, overwrite: bool = False) -> bool:
    """Whether the finished run in ``folder`` was computed with JAX settings that give the numbers of this process.

    ``ValueError`` if not, unless ``overwrite``.
    """
    saved, now = _saved(folder), numerics()
    known = [name for name in now if name in saved]
    found = identity.difference(_of(saved, known), _of(now, known))
    if found and not overwrite:
        raise ValueError(
            f"folder = {str(folder)!r}: must hold a run with the {NUMBERS} of this process, but they differ: {found} "
            "(--again, in Python again=True, trains it once more; of a sweep, remove this folder)"
        )
    return not found


def remarks(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """What to say of a finished run of these settings that is read: what may differ by rounding, or is not known."""
    saved, device = _saved(folder), jax.devices()[0]
    now = {"backend": device.platform, "device": device.device_kind, **rounding(), **files.of_plugins()}
    unknown = identity.unknown_files(json.loads((folder / "settings.json").read_bytes()), _plain(settings))
    found = [notices.unknown_files(unknown)] if unknown else []
    loaded = [name for name in saved if name.startswith("plugin ")]
    for names, meaning in (([*DEVICE, *rounding()], SAID["rounding"]), (loaded, SAID["plugins"])):
        before = {name: saved[name] for name in names if name in saved}
        if text := identity.difference(before, _of(now, before)):
            found.append(f"computed with {text} ({meaning})")
    return found


def causes(folder: Path | None, saved: Mapping[str, Any], again: Mapping[str, Any]) -> str:
    """Why a run that is repeated may end elsewhere, as far as it was recorded; empty if nothing is known.

    ``saved``: the settings of the run; ``again``: those of the repeated one, with the digests of its input files.
    """
    unknown = identity.unknown_files(_plain(saved), _plain(again))
    before = {} if folder is None else _saved(folder)
    text = identity.difference(before, _of(files.versions(), before))
    return "; ".join([notices.unknown_files(unknown)] * bool(unknown) + [f"it was computed with {text}"] * bool(text))


def _of(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """``values`` of the given names, None where there is none."""
    return {name: values.get(name) for name in names}


def _plain(settings: Mapping[str, Any]) -> Any:
    return json.loads(files.json_bytes(settings))


def _saved(folder: Path) -> dict[str, Any]:
    """``versions.json`` of a run; empty if it cannot be read."""
    try:
        content = json.loads((folder / VERSIONS).read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
