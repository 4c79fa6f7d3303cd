"""The jobs of a sweep by number, for schedulers that start one command many times, such as a cloud's batch service.

``jobs.json`` in the sweep's folder lists the calls. Index k of the array makes call k, on any machine that sees the
folder or a copy of it. An array with the same indices may be started again; it trains what is missing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from fedjax_async.base import check, disk
from fedjax_async.results import files, sweep_folder

FILE = "jobs.json"
FORMAT = "fedjax_async jobs 1"
Call = tuple[str, ...]


def _fingerprint(folder: Path) -> str:
    """A hash of the sweep's definition in the folder."""
    return hashlib.sha256((folder / sweep_folder.DEFINITION).read_bytes()).hexdigest()


def listed(folder: Path, calls: Sequence[Call]) -> list[int]:
    """Write the calls; returns the index of each. If all are listed for the same sweep already, the list stays."""
    known = _read(folder) or []
    if not set(calls) <= set(known):
        known = list(calls)
        content = {"format": FORMAT, "sweep": _fingerprint(folder), "calls": known}
        disk.write(folder / FILE, files.json_bytes(content))
    return [known.index(call) for call in calls]


def _read(folder: Path) -> list[Call] | None:
    """The calls that are listed for the folder's sweep; ``None`` without a list of this sweep."""
    try:
        content = json.loads((folder / FILE).read_bytes())
        if content["format"] == FORMAT and content["sweep"] == _fingerprint(folder):
            return [tuple(map(str, call)) for call in content["calls"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def call_of(folder: str | Path, index: int) -> Call:
    """The arguments of call ``index``; ``ValueError`` for a folder without such calls and for an index out of range."""
    calls = _read(Path(folder))
    if calls is None:
        how = "hold a sweep that was submitted with --submit array"
        raise ValueError(f"folder = {str(folder)!r}: must {how}, but it has no {FILE} of its sweep")
    check.whole("index", index, 0, len(calls) - 1)
    return calls[index]
