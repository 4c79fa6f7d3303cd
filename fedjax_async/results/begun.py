"""What a folder was begun with, so that it goes on as that: its settings, its plugins, the meaning of its method.

A method whose defaults have changed since is, in its folder, the one that the folder was begun with.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedjax_async.base import check, disk, registry
from fedjax_async.config import plugins
from fedjax_async.config.earlier import Earlier, as_meant
from fedjax_async.config.settings import Settings, from_dict
from fedjax_async.results import files, store
from fedjax_async.results.store import CHECKPOINTS, MANIFEST

PLUGINS = "plugins.json"  # beside the settings of a run that is not finished, and in a sweep's folder

# --- an unfinished run ---------------------------------------------------------------------------------


def save_plugins(folder: Path) -> None:
    """Write the names of the loaded plugins into ``folder``, if there are any."""
    if plugins.LOADED:
        disk.write(folder / PLUGINS, files.json_bytes(list(plugins.LOADED)))


def load_plugins(folder: Path) -> None:
    """Load the plugins of the unfinished run or the sweep in ``folder``; ``ValueError`` naming a missing file.

    A missing file may have moved: it is skipped if the user has registered parts already. Whether these have the same
    code is checked when the settings are read.
    """
    for path in (folder / CHECKPOINTS / PLUGINS, folder / PLUGINS):
        if path.is_file():
            saved = json.loads(path.read_bytes())
            gone = [source for source in saved if source.endswith(".py") and not Path(source).exists()]
            moved = not gone or any(registry.ADDED.values())
            allowed = "a Python file, but there is no such file any more; if it has moved: --plugin FILE.py"
            check.require(moved, "plugin", (gone or [""])[0], allowed)
            plugins.load([source for source in saved if source not in gone])


def unfinished(folder: Path, objects: Mapping[str, object] | None = None) -> Settings:
    """The settings of the unfinished run in ``folder``; ``ValueError`` if the folder holds no checkpoints.

    ``objects``: the run's own objects by setting, as in ``config.settings.from_dict``.
    """
    saved = folder / CHECKPOINTS / "settings.json"
    if not saved.is_file():
        finished = (folder / MANIFEST).is_file()
        longer = "a longer budget makes a run of its own, and initial=FOLDER starts it from these weights"
        state = f"the run in it is finished ({longer})" if finished else f"it has no {CHECKPOINTS}/settings.json"
        state = state if folder.is_dir() else "there is no such folder"
        if saved.parent.is_dir() and not finished:
            state = "the run in it was cut off before it began: give the command that began it once more"
        if any((folder / name).exists() for name in ("sweep.json", "runs")):
            state = "a sweep or comparison goes on when its command is given once more"
        inside = store.runs_inside(folder, f"{CHECKPOINTS}/settings.json")
        allowed = "must hold an unfinished run that was begun with --checkpoint"
        raise ValueError(f"folder = {str(folder)!r}: {allowed}, but {state}{inside}")
    try:
        return from_dict(json.loads(saved.read_bytes()), objects)
    except (TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{saved}: is not the settings of a run ({error})") from None


# --- a method whose defaults have changed -------------------------------------------------------------


def as_begun(settings: Settings, folders: Iterable[str | Path | None]) -> Settings:
    """The settings as the first folder with a run of this method means them, finished or not; a line says so."""
    for folder in folders:
        for path in () if folder is None else (Path(folder, CHECKPOINTS), Path(folder)):
            found = with_method(settings, read(path / "settings.json"))
            if isinstance(found.method, Earlier):
                say(str(folder), found.method)
                return found
    return settings


def read(path: Path) -> dict[str, Any]:
    """The content of a JSON file; nothing if it is missing or damaged, which is said where the folder is checked."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def with_method(settings: Settings, saved: object) -> Settings:
    """The settings with the method of a file, if it is the same text with the same timing and meant something else.

    ``saved``: the settings in the file. If they are damaged, these stay as they are: the check of the folder says so.
    """
    timing = None if settings.timing is None else str(settings.timing)
    if not isinstance(saved, dict) or settings.method != saved.get("method") or timing != saved.get("timing"):
        return settings
    kept = saved.get("defaults")
    method = as_meant(saved["method"], timing, kept) if kept is None or isinstance(kept, dict) else None
    return dataclasses.replace(settings, method=method) if isinstance(method, Earlier) else settings


def say(folder: str, method: Earlier) -> None:
    """Print what the method means in this folder."""
    print(f"{folder}: {method} means {method.meaning} here, its defaults when the folder was begun")
