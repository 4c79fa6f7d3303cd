"""Streams: each evaluation is written as soon as it is computed, so that other programs can follow a run.

A stream is called at every evaluation, and closed at the end. After a run was killed and continued, a stream finds what
it wrote before and writes nothing twice. ``STREAMS`` has all of them by name.

- ``csv``: one line per evaluation in ``stream.csv``.
- ``tensorboard``: event files in the folder ``tensorboard``, with the number of updates as the step and virtual seconds
  as the wall time (extra ``tensorboard``).
- ``wandb``: a run of Weights & Biases (extra ``wandb``) in the project ``WANDB_PROJECT``, by default ``fedjax-async``.
  Its own environment variables set the rest: with ``WANDB_MODE=offline`` nothing leaves the machine.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from fedjax_async.base import check, disk, lazy, registry
from fedjax_async.results import files
from fedjax_async.types import Evaluation

CSV = "stream.csv"
EVENTS = "tensorboard"
LEDGER = "wandb.json"  # the id of the run at Weights & Biases, and how many evaluations were logged


class Stream(Protocol):
    """Called with each evaluation in order; ``close(complete)``: whether the run is finished or was interrupted."""

    def __call__(self, evaluation: Evaluation) -> None: ...

    def close(self, complete: bool) -> None: ...


def _scalars(evaluation: Evaluation) -> dict[str, float]:
    """The scores that are single numbers, sorted by name."""
    return {
        name: evaluation.scores[name] for name in sorted(evaluation.scores) if np.ndim(evaluation.scores[name]) == 0
    }


# --- CSV ----------------------------------------------------------------------------------------------


class CsvStream:
    """Lines ``evaluation,time,update,step`` and the scores, each appended to a file by one system call.

    Lines that the file has already are kept up to the first one that differs or that a killed process left unfinished.
    """

    def __init__(self, folder: Path | None, name: str) -> None:
        self._path = _require_place("csv", folder) / CSV
        self._lines = _whole_lines(self._path)  # with the header
        self._count = 0  # how many of them belong to this run

    def __call__(self, evaluation: Evaluation) -> None:
        columns = {"evaluation": evaluation.number, "time": evaluation.time, "update": evaluation.update}
        columns |= {"step": evaluation.step, **_scalars(evaluation)}
        header, line = files.csv_bytes({name: np.array([v]) for name, v in columns.items()}).splitlines(keepends=True)
        for each in (header, line)[0 if evaluation.number == 0 else 1 :]:
            self._put(each)

    def _put(self, line: bytes) -> None:
        if self._lines[self._count : self._count + 1] != [line]:
            self._end_here()
            with disk.naming(self._path):
                opened = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                try:
                    if os.write(opened, line) < len(line):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                finally:
                    os.close(opened)
            self._lines.append(line)
        self._count += 1

    def _end_here(self) -> None:
        """Remove from the file all but the lines of this run."""
        del self._lines[self._count :]
        if self._path.exists():
            os.truncate(self._path, sum(map(len, self._lines)))

    def close(self, complete: bool) -> None:
        """Remove lines of an earlier run after the last line, if the run is finished."""
        if complete:
            self._end_here()


def _whole_lines(path: Path) -> list[bytes]:
    found = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    return [line for line in found if line.endswith(b"\n")]


# --- TensorBoard --------------------------------------------------------------------------------------


class TensorBoardStream:
    """A scalar for each score of an evaluation; evaluations that earlier processes wrote are not written again."""

    def __init__(self, folder: Path | None, name: str) -> None:
        self._folder = _require_place("tensorboard", folder) / EVENTS
        self._writer: Any = None
        self._written: set[tuple[int, float]] = set()

    def __call__(self, evaluation: Evaluation) -> None:
        if self._writer is None:
            self._written = written_events(self._folder)
            self._writer = package("tensorboard", "tensorboard.summary").Writer(str(self._folder))
        if (evaluation.update, evaluation.time) in self._written:
            return
        for name, value in _scalars(evaluation).items():
            self._writer.add_scalar(name, float(value), evaluation.update, wall_time=evaluation.time)
        self._writer.flush()

    def close(self, complete: bool) -> None:
        """Close the event file."""
        del complete
        if self._writer is not None:
            self._writer.close()


def written_events(folder: Path) -> set[tuple[int, float]]:
    """Steps and wall times of the scalars in a folder's event files."""
    if not folder.is_dir():
        return set()
    loader = package("tensorboard", "tensorboard.backend.event_processing.event_file_loader").EventFileLoader
    events = [event for path in sorted(folder.glob("*tfevents*")) for event in loader(str(path)).Load()]
    return {(int(event.step), float(event.wall_time)) for event in events if event.HasField("summary")}


# --- Weights & Biases ---------------------------------------------------------------------------------


class WandbStream:
    """Logs each evaluation with its number as the step; with a folder, a continued run keeps its id."""

    def __init__(self, folder: Path | None, name: str) -> None:
        self._folder, self._name = folder, name
        self._run: Any = None
        self._ledger: dict[str, Any] = {"id": None, "evaluations": 0}
        if folder is not None and (folder / LEDGER).is_file():
            self._ledger = json.loads((folder / LEDGER).read_bytes())

    def __call__(self, evaluation: Evaluation) -> None:
        if evaluation.number < self._ledger["evaluations"]:
            return
        if self._run is None:
            self._run = self._begun(dict(evaluation.settings))
        position = {"time": evaluation.time, "update": evaluation.update, "server_step": evaluation.step}
        self._run.log(position | {n: float(v) for n, v in _scalars(evaluation).items()}, step=evaluation.number)
        self._ledger["evaluations"] = evaluation.number + 1
        if self._folder is not None:
            disk.write(self._folder / LEDGER, files.json_bytes(self._ledger))

    def _begun(self, settings: dict[str, object]) -> Any:
        wandb = package("wandb", "wandb")
        begun = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedjax-async"),
            name=self._name,
            id=self._ledger["id"],
            resume=None if self._ledger["id"] is None else "allow",
            dir=None if self._folder is None else str(self._folder),
            config=files.plain(settings),
            reinit="create_new",  # the runs of a sweep are open side by side
        )
        self._ledger["id"] = begun.id
        return begun

    def close(self, complete: bool) -> None:
        """Tell Weights & Biases whether the run was completed."""
        if self._run is not None:
            self._run.finish(exit_code=0 if complete else 1)


# --- by name ------------------------------------------------------------------------------------------

# Name -> what makes a stream of the folder of a run, or None, and the name of the run.
STREAMS: dict[str, Callable[[Path | None, str], Stream]] = {
    "csv": CsvStream,
    "tensorboard": TensorBoardStream,
    "wandb": WandbStream,
}
PACKAGES = {"tensorboard": "tensorboard.summary", "wandb": "wandb"}  # stream -> the module that it needs
OF_FOLDERS = ("csv", "tensorboard")


def package(stream: str, module: str) -> ModuleType:
    """A module of the package that a stream needs; ``ValueError`` if it is not installed."""
    return lazy.optional(module, f"the stream {stream!r}")


def _require_place(name: str, folder: Path | None) -> Path:
    """The folder; ``ValueError`` for a stream that writes files if there is none."""
    check.require(folder is not None or name not in OF_FOLDERS, "stream", name, "left out without a folder (out)")
    return Path(folder or "")


def require_streams(names: Sequence[str], folder: Path | None) -> None:
    """``ValueError`` for an unknown stream, a missing package, or no folder; called before anything is compiled."""
    for name in names:
        registry.find("stream", STREAMS, name)
        _require_place(name, folder)
        if name in PACKAGES:
            package(name, PACKAGES[name])


def clear(folder: Path) -> None:
    """Remove what the streams of another run wrote into ``folder``."""
    for name in (CSV, LEDGER):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / EVENTS, ignore_errors=True)
