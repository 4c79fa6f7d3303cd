"""Checkpoints of an unfinished stack of runs: exact, atomic, readable without unpickling (orbax).

A checkpoint is taken between two groups of batches: what the server changes, the evaluations so far
and the number of groups done. Everything else (schedule, plan, chance) follows from the settings, so a
resumed run continues bit for bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_async import check

FORMAT = "fedjax_async checkpoint 1"
KEEP = 2  # the newest and the one before
PACKAGES = ("fedjax-async", "jax", "jaxlib", "numpy")


class Snapshot(NamedTuple):
    """What a checkpoint holds of a stack."""

    groups: int  # of batches that are done
    leaves: list[np.ndarray]  # of ``Live``
    scores: dict[tuple[int, int], dict[str, np.ndarray]]  # (run, its arrivals) -> evaluation


def surroundings() -> dict[str, str | int]:
    """Versions and device: a run is exact only on what it began with."""
    device = jax.devices()[0]
    versions = {name: metadata.version(name) for name in PACKAGES if _installed(name)}
    # how a wave is cut into batches follows from the cores
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {**versions, "backend": device.platform, "device": device.device_kind, "cores": cores}


def _installed(name: str) -> bool:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return bool(metadata.version(name))
    return False


class Keeper:
    """The checkpoints of one stack in one folder, taken every ``every`` updates; ``identity`` says whose they are."""

    def __init__(self, folder: Path, every: int, identity: Mapping[str, Any]) -> None:
        check.whole("checkpoint", every)
        self.folder, self._every = Path(folder), every
        self._identity = json.loads(json.dumps({**identity, "surroundings": surroundings()}, default=str))
        self._last = 0

    def identify(self, name: str, value: Any) -> None:
        """Add to what a checkpoint must have in common with the run that goes on from it."""
        self._identity[name] = json.loads(json.dumps(value, default=str))

    def due(self, position: int) -> bool:
        """Whether ``every`` updates have passed since the last checkpoint."""
        return position - self._last >= self._every

    def save(self, position: int, snapshot: Snapshot) -> None:
        """Write a checkpoint; the one before stays until this one is complete."""
        import orbax.checkpoint as ocp  # noqa: PLC0415 (slow to import)

        arrays = _named(snapshot)
        about = {
            "format": FORMAT,
            "groups": snapshot.groups,
            "updates": position,
            "identity": self._identity,
            "sha256": {name: _digest(array) for name, array in arrays.items()},
        }
        items = ocp.args.Composite(state=ocp.args.StandardSave(arrays), about=ocp.args.JsonSave(about))
        try:
            with _quiet(), _manager(self.folder) as manager:
                manager.save(position, args=items, force=True)
        except Exception as error:  # tensorstore's own exceptions are of many kinds
            raise OSError(
                f"checkpoint = {str(self.folder / str(position))!r}: could not be written ({_first_line(error)}); "
                "earlier checkpoints are intact"
            ) from error
        self._last = position

    def clear(self) -> None:
        """Remove the folder: the run is finished and saved."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def restore(self) -> Snapshot | None:
        """The newest checkpoint, ``None`` if there is none yet.

        ``ValueError`` if it belongs to another configuration or software, or is damaged.
        """
        steps = completed(self.folder)
        if not steps:
            return None
        position = steps[-1]
        about = read_about(self.folder, position)
        for name, have in self._identity.items():
            if (want := about["identity"].get(name)) != have:
                raise ValueError(
                    f"checkpoint = {str(self.folder)!r}: must be of this run, but its {name} differ: "
                    f"{_difference(want, have)}; remove the folder to start again"
                )
        with _reading(self.folder, position):
            arrays = _read_state(self.folder, position, about)
        self._last = position
        leaves = [arrays[name] for name in sorted(arrays) if name.startswith("leaf")]
        scores: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        for name in sorted(arrays):
            if name.startswith("score"):
                _, run, local, column = name.split(" ")
                scores.setdefault((int(run), int(local)), {})[column] = arrays[name]
        return Snapshot(about["groups"], leaves, scores)


def completed(folder: Path) -> list[int]:
    """Updates at which complete checkpoints in ``folder`` were taken, in order."""
    if not Path(folder).is_dir():
        return []
    return sorted(int(path.name) for path in Path(folder).iterdir() if path.name.isdigit() and path.is_dir())


def read_about(folder: Path, position: int) -> dict[str, Any]:
    """A checkpoint's own description, checked."""
    with _reading(folder, position):
        about = json.loads((Path(folder) / str(position) / "about" / "metadata").read_text(encoding="utf-8"))
        if about["format"] != FORMAT:
            raise ValueError(f"its format is {about['format']!r}")
        return about


def _read_state(folder: Path, position: int, about: dict[str, Any]) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp  # noqa: PLC0415 (slow to import)

    with _quiet(), ocp.StandardCheckpointer() as reader:
        restored = reader.restore((Path(folder) / str(position) / "state").absolute())
    arrays = {name: np.asarray(array) for name, array in restored.items()}
    if {name: _digest(array) for name, array in arrays.items()} != about["sha256"]:
        raise ValueError("its check sums differ")
    return arrays


@contextlib.contextmanager
def _reading(folder: Path, position: int) -> Iterator[None]:
    """Whatever goes wrong while reading is a one-line error that says what to do."""
    try:
        yield
    except Exception as error:  # a damaged file can make tensorstore raise anything
        place = Path(folder) / str(position)
        others = [step for step in completed(folder) if step != position]
        advice = f"remove that folder to go on from update {others[-1]}" if others else "remove it to start again"
        raise ValueError(
            f"checkpoint = {str(place)!r}: is damaged or foreign ({_first_line(error)}); {advice}"
        ) from error


def _manager(folder: Path) -> Any:
    import orbax.checkpoint as ocp  # noqa: PLC0415 (slow to import)

    folder.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=KEEP, enable_async_checkpointing=False, cleanup_tmp_directories=True
    )
    return ocp.CheckpointManager(folder.absolute(), options=options)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the library prints: how its defaults will change, and every error that it also raises.

    Where one array cannot be read or written, the failures of the others come sooner or later, from tensorstore's
    threads to an event loop that is closed by then, or as tasks that nobody awaits. So after an error the hook and
    the filter, which hold back nothing else, stay.
    """
    absl, tasks, hook = logging.getLogger("absl"), logging.getLogger("asyncio"), sys.unraisablehook
    level = absl.level

    def unraisable(what: Any) -> None:
        if not _is_late_report(what.exc_value, what.exc_traceback):
            hook(what)

    absl.setLevel(logging.CRITICAL)
    tasks.addFilter(_is_no_late_task)
    sys.unraisablehook = unraisable
    try:
        yield
        tasks.removeFilter(_is_no_late_task)
        sys.unraisablehook = hook
    finally:
        absl.setLevel(level)


def _is_no_late_task(record: logging.LogRecord) -> bool:
    """Whether a message of asyncio is not that of a task in which tensorstore failed."""
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    return "never retrieved" not in record.getMessage() or "[tensorstore_spec=" not in str(error)


def _is_late_report(error: BaseException | None, trace: TracebackType | None) -> bool:
    """Whether an event loop was called from outside Python, as tensorstore does, after it was closed."""
    closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    return closed and trace is not None and trace.tb_frame.f_code.co_name == "call_soon_threadsafe"


def _named(snapshot: Snapshot) -> dict[str, np.ndarray]:
    leaves = {f"leaf {i:04}": leaf for i, leaf in enumerate(snapshot.leaves)}
    scores = {
        f"score {run} {local} {name}": np.asarray(value)
        for (run, local), columns in snapshot.scores.items()
        for name, value in columns.items()
    }
    return leaves | scores


def _digest(array: np.ndarray) -> str:
    kind = f"{array.dtype} {array.shape} ".encode()
    return hashlib.sha256(kind + np.ascontiguousarray(array).tobytes()).hexdigest()


def _difference(want: Any, have: Any) -> str:
    """What differs, in a few words."""
    if isinstance(want, dict) and isinstance(have, dict):
        keys = [k for k in want | have if want.get(k) != have.get(k)]
        return ", ".join(f"{k} = {have.get(k)!r}, saved {want.get(k)!r}" for k in keys[:3])
    return f"{have!r}, saved {want!r}"


def _first_line(error: Exception) -> str:
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return line if len(line) <= 200 else f"{line[:90]} ... {line[-90:]}"  # the reason stands at the end
