"""The folder of a run: everything that a :class:`~fedjax_async.types.Run` holds, in files that other tools can read."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from fedjax_async.base import check, disk, identity
from fedjax_async.base.tree import Columns
from fedjax_async.clock.trace import load_schedule, save_schedule
from fedjax_async.engine.record import REAL_TIMES
from fedjax_async.models.weights import arrays_of, nested
from fedjax_async.peers import is_peer_schedule, load_peer_schedule, save_peer_schedule
from fedjax_async.results import files
from fedjax_async.results.client_names import shown_name, with_names
from fedjax_async.results.provenance import VERSIONS, versions
from fedjax_async.types import Best, Params, Run, Stopped

FORMAT = "fedjax_async run 1"
MANIFEST = "manifest.json"
FILES = (
    "settings.json",
    VERSIONS,
    "counters.json",
    "evaluations.csv",
    "updates.csv",
    "per_client.npz",
    "params.npz",
)
PROBES = "probes.npz"  # only in the folder of a run with probes: arrays named probe/column
STOPPED = "stopped.json"  # only if the run ended before its budget: by what, why, at which evaluation
BEST = "best.npz"  # only with keep_best: the parameters of the best model, in the format of params.npz
BEST_ABOUT = "best.json"  # its evaluation, what is compared, and its value
CLIENT_NAMES = "client_names.json"  # only if the data name their clients: a list
OPTIONAL = (PROBES, STOPPED, BEST, BEST_ABOUT, CLIENT_NAMES)
SCHEDULE = "schedule.npz"  # written by the clock, in its own format
SWEEP = "sweep.json"  # the definition of a sweep, in its folder, see ``sweep_folder.py``
CHECKPOINTS = "checkpoints"  # only while the run is not finished; in a comparison, those of its stacks
LABELS, COMMAND = BESIDE = ("labels.json", "command.txt")  # beside results, see ``beside.py``
MEMBERS = "members.json"  # among the checkpoints of a comparison: the settings of the runs that it has begun, by name


class NotSaved(OSError):
    """A run was not saved completely, as on a full disk. ``run`` is the whole run, which is still in memory."""

    def __init__(self, run: Run, message: str) -> None:
        super().__init__(message)
        self.run = run


def flatten(params: Params) -> dict[str, np.ndarray]:
    """``{"a": {"b": {"kernel": K}}}`` -> ``{"a/b/kernel": K}``, on the host; names as in ``models.arrays_of``."""
    return {name: np.asarray(array) for name, array in arrays_of(params).items()}


def _quoted(name: str) -> str:
    """A name of a probe or of its column in an archive, whose entries ``/`` and ``:`` would divide."""
    return name.replace("%", "%25").replace("/", "%2F").replace(":", "%3A")


def _probes_of(flat: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """The tables of the probes from ``probe/column`` -> array."""
    tables: dict[str, dict[str, np.ndarray]] = {}
    for path, values in flat.items():
        name, _, column = path.rpartition("/")
        tables.setdefault(unquote(name), {})[unquote(column)] = values
    return tables


def _contents(run: Run) -> dict[str, bytes]:
    # on one line each, so that no name can make the table unreadable; client_names.json has them as they are
    names = (
        None if run.client_names is None else [shown_name(run.client_names, k) for k in range(len(run.client_names))]
    )
    contents = (
        files.json_bytes(run.settings),
        files.json_bytes(versions()),
        files.json_bytes({name: count for name, count in run.counters.items() if name not in REAL_TIMES}),
        files.csv_bytes(files.applicable(run.evaluations)),
        files.csv_bytes(with_names(run._replace(client_names=names), run.updates)),
        disk.npz_bytes(run.per_client),
        disk.npz_bytes(flatten(run.params)),
    )
    tables = {
        f"{_quoted(name)}/{_quoted(column)}": v for name, table in run.probes.items() for column, v in table.items()
    }
    found = dict(zip(FILES, contents, strict=True)) | ({PROBES: disk.npz_bytes(tables)} if tables else {})
    if run.stopped is not None:
        found[STOPPED] = files.json_bytes(run.stopped)
    if run.best is not None:
        about = {name: value for name, value in run.best._asdict().items() if name != "params"}
        found |= {BEST: disk.npz_bytes(flatten(run.best.params)), BEST_ABOUT: files.json_bytes(about)}
    if run.client_names is not None:
        found[CLIENT_NAMES] = files.json_bytes(run.client_names)
    return found


def _types(columns: Mapping[str, np.ndarray]) -> dict[str, str]:
    return {name: np.asarray(column).dtype.str for name, column in columns.items()}


class Occupied(ValueError):
    """A folder that holds other results; they are kept."""


def numbered(folder: str | Path) -> Iterator[Path]:
    """``runs/compare``, ``runs/compare_2``, ``runs/compare_3``, ... without end."""
    first = Path(folder)
    yield first
    for number in itertools.count(2):
        yield first.with_name(f"{first.name}_{number}")


def require_folder(folder: str | Path) -> Path:
    """``ValueError`` if ``folder``, or a path above it, is a file."""
    folder = check.path("folder", folder)
    if any(parent.exists() and not parent.is_dir() for parent in (folder, *folder.parents)):
        raise ValueError(f"folder = {str(folder)!r}: must be a folder, not a file")
    return folder


def require_room(
    folder: str | Path, settings: Mapping[str, object], *, overwrite: bool = False, again: bool = False
) -> Path:
    """Check, before a run, that it may be saved in ``folder``; returns the folder.

    It may if the folder is missing, is empty or holds a run of the same settings, finished or not, or if
    ``overwrite`` is set; with ``again`` input files may have another content. Files that a killed process left behind
    do not count. Otherwise :class:`Occupied`, a ``ValueError``.
    """
    folder = require_folder(folder)
    if again:  # input files count by their names
        settings = {name: value for name, value in settings.items() if name != identity.FILES}
    if not overwrite and not _is_bare(folder):
        paths = (folder / "settings.json", folder / CHECKPOINTS / "settings.json")
        saved = [path for path in paths if path.is_file()]
        others = [found for path in saved if (found := differing(path.read_bytes(), settings, path.name))]
        if not saved or others:
            found = others[0] if others else "other files"
            raise Occupied(
                f"folder = {str(folder)!r}: must be empty or hold a run of the same settings (or overwrite), but it "
                f"holds {found}"
            )
    return folder


def differing(content: bytes, settings: Mapping[str, object], name: str = "settings.json") -> str:
    """How the saved settings in the file ``name`` differ from ``settings``, in a few words; empty if they do not."""
    wanted = files.json_bytes(settings)
    if content == wanted:
        return ""
    try:
        found = identity.difference(json.loads(content), json.loads(wanted))
    except ValueError:
        return f"{name} that is damaged"
    return found and f"another run: {found}"


def require_comparison(folder: str | Path, *, overwrite: bool = False) -> Path:
    """Check that a comparison may be saved in ``folder``; returns the folder.

    It may if the folder is missing, is empty or holds a comparison, finished or not, or if ``overwrite`` is set.
    Otherwise :class:`Occupied`, a ``ValueError``: a run or a sweep would lose its tables and pictures. The folders of
    the single runs are checked by :func:`require_room`.
    """
    folder = require_folder(folder)
    if overwrite or _is_bare(folder):
        return folder
    others = {SWEEP: "a sweep", MANIFEST: "a run", f"{CHECKPOINTS}/settings.json": "a run"}
    others["settings.json"] = "a run"
    found = next((kind for name, kind in others.items() if (folder / name).exists()), None)
    left = [path.name for path in folder.iterdir() if not _is_beside(path)]
    if found is None and "runs" not in left and left != [CHECKPOINTS]:
        found = "other files"
    if found is not None:
        allowed = f"empty or hold a comparison, but it holds {found} (choose another folder)"
        raise Occupied(f"folder = {str(folder)!r}: must be {allowed}")
    return folder


def become_comparison(folder: Path) -> None:
    """Remove the files by which a folder that is overwritten is one of a run or of a sweep, and tables of methods."""
    tables = ("comparison.csv", "comparison.md", "comparison.tex", "pairs.csv", "pairs.md", "clients.csv", "clients.md")
    for name in (SWEEP, MANIFEST, "settings.json", f"{CHECKPOINTS}/settings.json", *tables):
        (folder / name).unlink(missing_ok=True)


def _is_beside(path: Path) -> bool:
    """Whether a file is no result: its labels or command, or what a killed process has left."""
    return path.name in BESIDE or disk.is_leftover(path)


def _is_bare(folder: Path) -> bool:
    """Whether the folder is missing, or holds only what a process wrote that was killed before its first file."""
    if not folder.exists():
        return True
    left = [path for path in folder.iterdir() if not _is_beside(path)]
    return not left or (left == [folder / CHECKPOINTS] and left[0].is_dir() and _is_bare(left[0]))


def save(run: Run, folder: str | Path, *, overwrite: bool = False) -> Path:
    """Write ``run`` into ``folder`` (made if missing) and return the folder.

    - ``settings.json``, ``versions.json``, ``counters.json``;
    - ``evaluations.csv`` (without accuracies if targets are not classes) and ``updates.csv``, floats with every digit;
    - ``params.npz`` (arrays named by their path, such as ``conv/kernel``), ``per_client.npz``, ``schedule.npz`` and,
      for a run with probes, ``probes.npz`` (arrays named ``probe/column``), all readable by ``numpy.load``;
    - ``stopped.json`` of a run that ended before its budget; ``best.npz`` and ``best.json`` with ``keep_best``;
    - ``client_names.json``, a list, if the data name their clients; then ``updates.csv`` has them in a column too;
    - ``manifest.json`` with column types and checksums, written last.

    The same run gives the same bytes: no file holds a wall-clock time or a host name. Temporary files of killed
    processes are removed; other files in the folder stay.

    Raises: ``ValueError`` as in ``require_room``; :class:`NotSaved` naming the files that cannot be written. The
    settings are written first, so that a process that is killed leaves a folder of this run, then the small files. One
    that fails does not keep the others from being written.
    """
    check.require(isinstance(run, Run), "run", run, "a Run, as simulate returns it")
    folder = require_room(folder, run.settings, overwrite=overwrite)
    contents = _contents(run)
    folder.mkdir(parents=True, exist_ok=True)
    for name in {*OPTIONAL, *((SWEEP,) if overwrite else ())} - set(contents):  # of earlier results
        (folder / name).unlink(missing_ok=True)
    by_size = sorted(contents, key=lambda name: (name != "settings.json", len(contents[name])))
    writers: dict[str, Callable[[], object]] = {n: partial(disk.write, folder / n, contents[n]) for n in by_size}
    save_plan: Callable[..., object] = save_schedule if run.has_server else save_peer_schedule
    _write_all(run, folder, writers | {SCHEDULE: partial(save_plan, folder / SCHEDULE, run.schedule)})
    contents[SCHEDULE] = (folder / SCHEDULE).read_bytes()
    manifest = {
        "format": FORMAT,
        "types": {"evaluations": _types(run.evaluations), "updates": _types(run.updates)},
        "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
    }
    disk.write(folder / MANIFEST, files.json_bytes(manifest))
    disk.sweep_up(folder)
    return folder


def _write_all(run: Run, folder: Path, writers: Mapping[str, Callable[[], object]]) -> None:
    """Call every writer, in order, also after one that fails; :class:`NotSaved` at the end if any failed."""
    failed: dict[str, str] = {}
    for name, write in writers.items():
        try:
            write()
        except OSError as error:
            failed[name] = error.strerror or str(error)
    if failed:
        kept = ", ".join(name for name in writers if name not in failed) or "nothing"
        raise NotSaved(
            run,
            f"folder = {str(folder)!r}: the run is not saved, because {', '.join(failed)} cannot be written "
            f"({', '.join(dict.fromkeys(failed.values()))}); written: {kept}",
        )


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of the run saved in ``folder``; ``ValueError`` if there is none."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["format"] == FORMAT and set(manifest["sha256"]) - set(OPTIONAL) == {*FILES, SCHEDULE}:
            return manifest
        found = f"its {MANIFEST} is of another format: {check.shown(manifest['format'])}"
    except FileNotFoundError:
        found = f"it has no {MANIFEST}{runs_inside(folder)}" if folder.is_dir() else "there is no such folder"
    except NotADirectoryError:
        found = "it is a file"
    except (ValueError, KeyError, TypeError, OSError):
        found = f"its {MANIFEST} is damaged or of another program"
    raise ValueError(f"folder = {str(folder)!r}: must hold a saved run, as --out or out= writes it, but {found}")


def runs_inside(folder: Path, file: str = MANIFEST) -> str:
    """For a message: the first runs below ``folder``, as in a comparison or sweep; empty if there are none.

    ``file``: a file that each of them has, by its path in the folder of the run.
    """
    places = ("*", "*/*", "*/*/*", "*/*/*/*")
    depth = len(Path(file).parts)
    found = sorted(path.parents[depth - 1] for place in places for path in folder.glob(f"{place}/{file}"))
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"; the runs in it are {', '.join(map(str, found[:3]))}{more}" if found else ""


def _read_checked(folder: Path, name: str, digest: str) -> bytes:
    """The content of a saved run's file; ``ValueError`` if it is missing or has another checksum than ``digest``."""
    try:
        content = (folder / name).read_bytes()
    except OSError as error:
        raise ValueError(f"folder = {str(folder)!r}: {name} is missing") from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError(f"folder = {str(folder)!r}: {name} is truncated or was changed after it was saved")
    return content


def is_finished(folder: Path, settings: Mapping[str, object]) -> bool:
    """Whether ``folder`` holds a complete run of ``settings``: every file, with the checksum in the manifest."""
    if not (folder / MANIFEST).is_file():
        return False
    try:
        digests = _read_manifest(folder)["sha256"]
        contents = {name: _read_checked(folder, name, digest) for name, digest in digests.items()}
    except ValueError:  # incomplete, changed or foreign
        return False
    return not differing(contents["settings.json"], settings)


def load(folder: str | Path) -> Run:
    """The run that ``save`` wrote; all arrays are NumPy arrays, bit for bit and with their types.

    Settings and counters are as in JSON: tuples are lists, non-finite numbers None.
    ``ValueError`` naming the file if the folder is missing, foreign, incomplete, truncated or edited.
    """
    folder = check.path("folder", folder)
    manifest = _read_manifest(folder)
    content = {name: _read_checked(folder, name, digest) for name, digest in manifest["sha256"].items()}
    updates = Columns(files.csv_columns(content["updates.csv"], manifest["types"]["updates"]))
    probes = disk.read_npz(io.BytesIO(content[PROBES])) if PROBES in content else {}
    stopped = Stopped(**json.loads(content[STOPPED])) if STOPPED in content else None
    best = None
    if BEST in content:
        best = Best(nested(disk.read_npz(io.BytesIO(content[BEST]))), **json.loads(content[BEST_ABOUT]))
    return Run(
        settings=json.loads(content["settings.json"]),
        params=nested(disk.read_npz(io.BytesIO(content["params.npz"]))),
        evaluations=Columns(files.csv_columns(content["evaluations.csv"], manifest["types"]["evaluations"])),
        updates=updates,
        per_client=disk.read_npz(io.BytesIO(content["per_client.npz"])),
        counters=counters_in(content["counters.json"], updates),
        schedule=(load_peer_schedule if is_peer_schedule(folder / SCHEDULE) else load_schedule)(folder / SCHEDULE),
        probes=_probes_of(probes),
        stopped=stopped,
        best=best,
        client_names=tuple(json.loads(content[CLIENT_NAMES])) if CLIENT_NAMES in content else None,
    )


def counters_in(content: bytes, updates: Mapping[str, np.ndarray]) -> dict[str, object]:
    """The counters of a saved run, in today's words: earlier versions had others.

    They counted uploads that were too stale among the ``rejected`` ones too, and ``num_bytes`` was the device memory
    of a run without a server.
    """
    counters: dict[str, object] = json.loads(content)
    if counters.get("dropped_stale"):
        counters["rejected"] = int(np.sum(~np.asarray(updates["accepted"], bool)))
    names = {"num_bytes": "device_memory_bytes"}
    return {names.get(name, name): count for name, count in counters.items()}
