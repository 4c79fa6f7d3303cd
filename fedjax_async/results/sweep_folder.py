"""The folder of a sweep: its definition (``sweep.json``), ``roles.json``, one folder per run (``runs/NAME/``)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_async.base import check, disk, identity
from fedjax_async.config.earlier import Earlier
from fedjax_async.config.grid import GridPoint, swept
from fedjax_async.config.own import Named
from fedjax_async.config.roles import roles_of
from fedjax_async.config.settings import as_dict, from_dict, require_named
from fedjax_async.results import begun, files, store
from fedjax_async.results.begun import save_plugins
from fedjax_async.results.beside import commanded
from fedjax_async.results.figure import remove_pictures
from fedjax_async.results.runs import write_run
from fedjax_async.types import Probe, Run

FORMAT = "fedjax_async sweep 1"
DEFINITION = store.SWEEP
NAMELESS = "fedjax_async.config.own.Named"  # a value that is an object, as earlier versions wrote it
# What ``sweep_report.py`` writes beside the runs of every sweep, and its pictures without their endings.
REPORT = (
    *(f"{name}.{ending}" for name in ("settings", "best") for ending in ("csv", "md", "tex")),
    *(f"{name}.{ending}" for name in ("pairs", "clients") for ending in ("csv", "md")),
    *(f"{name}.{ending}" for name in ("runs", "evaluations") for ending in ("csv", "parquet")),
)
PICTURES = ("accuracy", "loss", "accuracy_map", "loss_map")
ROLES = "roles.json"  # not in the definition, because roles change how results are read, not the runs


def run_folder(folder: Path, point: GridPoint) -> Path:
    """Where the run of ``point`` is kept."""
    return folder / "runs" / point.name


def definition(points: Sequence[GridPoint], probes: Mapping[str, Any] | None = None) -> bytes:
    """The content of ``sweep.json``: name, swept values (in order) and settings of each run; the probes, if any."""
    runs = [
        {"name": p.name, "values": _named_values(p), "settings": as_dict(p.settings)}
        | ({"labelled": list(p.labelled)} if p.labelled else {})
        for p in points
    ]
    chosen = {name: p if isinstance(p, Probe) else Probe(p) for name, p in (probes or {}).items()}
    about = {name: {"every": p.every, "at": None if p.at is None else np.asarray(p.at)} for name, p in chosen.items()}
    return files.json_bytes({"format": FORMAT, "runs": runs} | ({"probes": about} if about else {}))


def _named_values(point: GridPoint) -> list[tuple[str, object]]:
    """The swept values in order, objects by their names."""
    return [(path, str(value) if isinstance(value, Named) else value) for path, value in point.values.items()]


def _values_of(run: Mapping[str, Any]) -> dict[str, object]:
    """The swept values of a run in ``sweep.json``. Earlier versions did not keep the names of objects there."""
    settings = run["settings"]
    return {path: settings.get(path, value) if value == NAMELESS else value for path, value in run["values"]}


def is_defined(folder: Path, points: Sequence[GridPoint], probes: Mapping[str, object] | None = None) -> bool:
    """Whether the folder holds the definition of this sweep."""
    return (folder / DEFINITION).is_file() and not _differing(folder, definition(points, probes))


def read_definition(folder: str | Path) -> list[GridPoint]:
    """The points of the sweep in ``folder``; ``ValueError`` if it holds no sweep."""
    path = check.path("folder", folder) / DEFINITION
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        return [
            GridPoint(run["name"], _values_of(run), from_dict(run["settings"]), tuple(run.get("labelled", ())))
            for run in content["runs"]
        ]
    except FileNotFoundError:
        raise ValueError(f"folder = {str(folder)!r}: must hold a sweep, but it has no {DEFINITION}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        found = f"folder = {str(folder)!r}: must hold a sweep ({FORMAT!r}), but {DEFINITION} does not"
        raise ValueError(f"{found}: {error}") from error


def as_begun(points: Sequence[GridPoint], folder: str | Path) -> list[GridPoint]:
    """The points of a sweep as its folder means them; a line for each method says so."""
    try:
        saved = {run["name"]: run["settings"] for run in begun.read(Path(folder) / DEFINITION)["runs"]}
    except (KeyError, TypeError):  # missing or damaged: require_room says so
        saved = {}
    found = [point._replace(settings=begun.with_method(point.settings, saved.get(point.name))) for point in points]
    for method in dict.fromkeys(point.settings.method for point in found):
        if isinstance(method, Earlier):
            begun.say(str(folder), method)
    return found


def require_room(
    folder: str | Path,
    points: Sequence[GridPoint],
    probes: Mapping[str, object] | None = None,
    *,
    overwrite: bool = False,
) -> Path:
    """Check that the sweep may use ``folder``; returns the folder.

    It may if the folder is missing, is empty or holds the same definition, or if ``overwrite`` is set. Files that a
    killed process left behind do not count. ``ValueError`` otherwise.
    """
    for point in points:
        require_named(point.settings)
    folder = store.require_folder(folder)
    if overwrite or not folder.exists():
        return folder
    left = [path for path in folder.iterdir() if path.name not in store.BESIDE and not disk.is_leftover(path)]
    if left and not is_defined(folder, points, probes):
        found = _differing(folder, definition(points, probes)) if (folder / DEFINITION).is_file() else "other files"
        raise ValueError(
            f"folder = {str(folder)!r}: must be empty or hold the same sweep, but it holds {found} "
            "(choose another folder, or overwrite: finished runs with the same settings are kept)"
        )
    return folder


def _differing(folder: Path, wanted: bytes) -> str:
    """How the sweep in the folder differs from the wanted definition, in a few words; empty if it does not."""
    content = (folder / DEFINITION).read_bytes()
    if content == wanted:
        return ""
    try:
        sweeps = [json.loads(text) for text in (content, wanted)]
        saved, new = ({run["name"]: run["settings"] for run in sweep["runs"]} for sweep in sweeps)
        values = [[[*_values_of(run).items()] for run in sweep["runs"]] for sweep in sweeps]
    except (ValueError, KeyError, TypeError):
        return f"{DEFINITION} that is damaged"
    both = [name for name in new if name in saved]
    compared = {f"of {name}, ": (saved[name], new[name]) for name in both} | {"runs ": (list(saved), list(new))}
    for what in ("probes", "format"):
        compared[f"{what} "] = (sweeps[0].get(what), sweeps[1].get(what))
    compared["values "] = (values[0], values[1])
    found = [f"another sweep: {what}{text}" for what, pair in compared.items() if (text := identity.difference(*pair))]
    return next(iter(found), "")


def save_roles(folder: Path, roles: Mapping[str, str]) -> None:
    """Write the roles that are not the default; without any, remove the file."""
    if roles:
        disk.write(folder / ROLES, files.json_bytes(roles))
    else:
        (folder / ROLES).unlink(missing_ok=True)


def read_roles(folder: Path, points: Sequence[GridPoint]) -> dict[str, str]:
    """The roles that :func:`save_roles` wrote, ``{}`` without a file; ``ValueError`` naming a file that is damaged."""
    path = folder / ROLES
    if not path.is_file():
        return {}
    try:
        roles = dict(json.loads(path.read_bytes()))
        roles_of(swept(points), roles)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: must hold the roles of the sweep's settings; {error}") from error
    return roles


def begin(
    folder: Path,
    points: Sequence[GridPoint],
    probes: Mapping[str, object] | None = None,
    roles: Mapping[str, str] | None = None,
) -> None:
    """Write the definition and the roles; called before the first run is saved. The report on another sweep is removed.

    Else a sweep that replaces it and is killed would have the tables of the other one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    anew = not is_defined(folder, points, probes)
    if anew:
        remove_pictures(folder, PICTURES)
        for name in REPORT:
            (folder / name).unlink(missing_ok=True)
    disk.write(folder / DEFINITION, definition(points, probes))
    save_roles(folder, roles or {})
    save_plugins(folder)
    with commanded(folder, anew=anew):
        disk.sweep_up(folder)


def save_run(run: Run, folder: Path, point: GridPoint) -> None:
    """Write one finished run, its manifest last."""
    write_run(run, run_folder(folder, point), plots=False, overwrite=True)


def saved_counters(folder: Path, point: GridPoint) -> dict[str, object]:
    """The counters of a finished run."""
    counters: dict[str, object] = json.loads((run_folder(folder, point) / "counters.json").read_bytes())
    return load_run(folder, point).counters if counters.get("dropped_stale") else counters  # see ``counters_in``


def load_run(folder: Path, point: GridPoint) -> Run:
    """Load a finished run."""
    return store.load(run_folder(folder, point))
