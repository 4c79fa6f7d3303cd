"""A folder keeps its meaning: a method whose defaults have changed since is the one that the folder was begun with."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedjax_async.config.earlier import Earlier, as_meant
from fedjax_async.config.settings import Settings
from fedjax_async.results.store import CHECKPOINTS


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


def with_method(settings: Settings, saved: Any) -> Settings:
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
