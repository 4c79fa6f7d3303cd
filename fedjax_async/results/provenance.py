"""With what a run was computed: software, device, JAX's settings, plugins. A saved run is compared with this process.

What it was computed from, its input files, is among its settings; they are compared here too.
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax

from fedjax_async.base import identity, notices
from fedjax_async.config import plugins
from fedjax_async.engine.checkpoint import NUMBERS, SAID
from fedjax_async.engine.surroundings import kind_of_device, numerics, package_versions, rounding
from fedjax_async.results import files

VERSIONS = "versions.json"
PACKAGES = ("fedjax-async", "jax", "jaxlib", "flax", "optax", "numpy")


def versions() -> dict[str, str | int | None]:
    """What a run is computed with, as ``versions.json`` holds it: Python, packages, commit, kind of device, and what
    changes numbers in JAX; the digests of loaded plugins.

    It holds neither time nor host name.
    """
    return {
        "python": platform.python_version(),
        **package_versions(PACKAGES),
        "revision": revision(),
        **kind_of_device(),
        "devices": len(jax.devices()),
        **numerics(),
        **rounding(),
        **_of_plugins(),
    }


def _of_plugins() -> dict[str, str]:
    return {f"plugin {name}": found for name, found in plugins.digests().items()}


def revision() -> str | None:
    """The git commit of this package's source, with ``-dirty`` if it was edited since; None outside a repository."""
    folder = Path(__file__).resolve().parent
    # An installed copy may lie inside another project's repository: the commit is ours only if this file is tracked.
    tracked = ["git", "-C", str(folder), "ls-files", "--error-unmatch", Path(__file__).name]
    describe = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        subprocess.run(tracked, capture_output=True, check=True)
        return subprocess.run(describe, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


# --- saved runs ---------------------------------------------------------------------------------------


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


def remarks(folder: Path, settings: Mapping[str, object]) -> list[str]:
    """What to say of a finished run of these settings that is read: what may differ by rounding, or is not known."""
    saved, of_device, of_plugins = _saved(folder), kind_of_device() | rounding(), _of_plugins()
    unknown = identity.unknown_files(json.loads((folder / "settings.json").read_bytes()), _plain(settings))
    found = [notices.unknown_files(unknown)] if unknown else []
    loaded = [name for name in saved if name.startswith("plugin ")]
    for now, names, what in ((of_device, of_device, "rounding"), (of_plugins, loaded, "plugins")):
        before = {name: saved[name] for name in names if name in saved}
        if text := identity.difference(before, _of(now, before)):
            found.append(f"computed with {text} ({SAID[what]})")
    return found


def causes(folder: Path | None, saved: Mapping[str, object], again: Mapping[str, object]) -> str:
    """Why a run that is repeated may end elsewhere, as far as it was recorded; empty if nothing is known.

    ``saved``: the settings of the run; ``again``: those of the repeated one, with the digests of its input files.
    """
    unknown = identity.unknown_files(_plain(saved), _plain(again))
    before = {} if folder is None else _saved(folder)
    text = identity.difference(before, _of(versions(), before))
    return "; ".join([notices.unknown_files(unknown)] * bool(unknown) + [f"it was computed with {text}"] * bool(text))


def _of(values: Mapping[str, object], names: Iterable[str]) -> dict[str, object]:
    """``values`` of the given names, None where there is none."""
    return {name: values.get(name) for name in names}


def _plain(settings: Mapping[str, object]) -> object:
    return json.loads(files.json_bytes(settings))


def _saved(folder: Path) -> dict[str, object]:
    """``versions.json`` of a run; empty if it cannot be read."""
    try:
        content = json.loads((folder / VERSIONS).read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
