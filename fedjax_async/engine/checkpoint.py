"""Checkpoints of an unfinished stack of runs: exact, atomic, one ``.npz`` each, without pickling.

A checkpoint is taken between two turns, or in an adaptive run between two extensions. It holds the carry, the
evaluations so far, the models that observers keep, and the number of turns or extensions done. In an adaptive run it
also holds the trained uploads and what the planner was told. Everything else (schedule, layout, random numbers) follows
from the settings, so a resumed run gives the same result bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_async.base import check, disk, identity, notices
from fedjax_async.engine.surroundings import numerics, rounding, surroundings
from fedjax_async.types import AnyArray, Tree

FORMAT = "fedjax_async checkpoint 3"
ABOUT = "about"  # the array that holds the description, JSON in UTF-8
KEEP = 2  # checkpoints that are kept: the newest and the one before
NUMBERS = "JAX settings"
# Parts of the identity that may differ, with what that means for the run.
SAID = {
    "rounding": "the same numbers to rounding, not bit for bit",
    "plugins": "the parts that the run uses have the same code",
}
OLDER = (
    "goes on from a checkpoint of an older version, with today's rules: where centroids of PushCen are equal, or a "
    "batch of one example meets running statistics, the numbers are those of neither version"
)


class Snapshot(NamedTuple):
    """What a checkpoint holds of a stack."""

    turns: int  # turns done; in an adaptive run: extensions done
    leaves: list[np.ndarray]  # of ``Carry``; in an adaptive run also of the stores and of ``Told.content``
    scores: dict[tuple[int, int], dict[str, np.ndarray]]  # (run, its arrivals) -> evaluation
    models: Mapping[tuple[int, int], list[np.ndarray]] = MappingProxyType({})  # leaves of models that observers keep


class Keeper:
    """The checkpoints of one stack in one folder, taken every ``every`` updates; ``identity`` tells runs apart.

    The settings that are under ``settings`` in it are compared with those of a checkpoint as
    ``base.identity.difference`` does: input files by their content.
    ``seconds``: a checkpoint is also taken when this much real time has passed since the last one. This is only for
    runs of a single process: several processes would not agree on the moment. Raises ``ValueError`` unless ``every`` is
    a whole number >= 1.
    """

    def __init__(self, folder: Path, every: int, identity: Mapping[str, object], seconds: float = math.inf) -> None:
        check.whole("checkpoint", every)
        self.folder, self._every = Path(folder), every
        self._seconds, self._saved = seconds, time.monotonic()
        around = {"surroundings": surroundings(), NUMBERS: numerics(), "rounding": rounding()}
        self._identity = json.loads(json.dumps({**identity, **around}, default=str))
        self._last = 0

    def identify(self, name: str, value: object) -> None:
        """Add to the identity; a run can resume only from a checkpoint with the same identity."""
        self._identity[name] = json.loads(json.dumps(value, default=str))

    def due(self, position: int) -> bool:
        """Whether ``every`` updates, or ``seconds`` and any update, have passed since the last checkpoint."""
        late = position > self._last and time.monotonic() - self._saved >= self._seconds
        return late or position - self._last >= self._every

    def save(self, position: int, snapshot: Snapshot) -> None:
        """Write a checkpoint; once it is complete, remove all but the newest ``KEEP``.

        Raises ``OSError`` if it cannot be written, such as on a full disk.
        """
        arrays = _named(snapshot)
        about = {
            "format": FORMAT,
            "turns": snapshot.turns,
            "updates": position,
            "identity": self._identity,
            "sha256": {name: _digest(array) for name, array in arrays.items()},
        }
        text = np.frombuffer(json.dumps(about).encode(), np.uint8)
        path = _file(self.folder, position)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with disk.replacing(path) as file:
                disk.write_npz(file, {ABOUT: text} | arrays)
            for step in completed(self.folder)[:-KEEP]:
                _file(self.folder, step).unlink(missing_ok=True)
            disk.sweep_up(self.folder)
        except OSError as error:
            raise OSError(
                f"checkpoint = {str(path)!r}: could not be written ({_first_line(error)}); "
                "earlier checkpoints are intact"
            ) from error
        self._last, self._saved = position, time.monotonic()

    def fitted(self, saved: Sequence[AnyArray], wanted: Tree, more: int = 0) -> Tree:
        """The first of the ``saved`` leaves in place of those of ``wanted``.

        ``ValueError`` unless there are ``more`` leaves than ``wanted`` has, since another version may have another
        state, and unless they have its dtypes, which 64-bit mode changes.
        """
        leaves, structure = jax.tree.flatten(wanted)
        if len(saved) != len(leaves) + more:
            raise ValueError(
                f"checkpoint = {str(self.folder)!r}: must be of a version with the same state, but it has "
                f"{len(saved)} arrays and this run {len(leaves) + more}: remove the folder to start again, or use the "
                "version that wrote it"
            )
        for have, want in zip(saved, leaves):
            if have.dtype != want.dtype:
                raise ValueError(
                    f"checkpoint = {str(self.folder)!r}: must be of this run, but it has numbers of {have.dtype} and "
                    f"this process {want.dtype}: set JAX_ENABLE_X64 as when the run began, or remove the folder to "
                    "start again"
                )
        return jax.tree.unflatten(structure, saved[: len(leaves)])

    def clear(self) -> None:
        """Remove the folder: the run is finished and saved."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def restore(self) -> Snapshot | None:
        """The newest checkpoint, ``None`` if there is none yet.

        Raises ``ValueError`` if it is damaged or belongs to other settings, input files, versions, JAX settings or
        another device. Warns (``base.notices.RunWarning``) of what can only change the rounding, of an older version,
        and of input files that it kept no digests of.
        """
        steps = completed(self.folder)
        if not steps:
            return None
        position = steps[-1]
        about, arrays = _read(self.folder, position)
        self._compare(about["identity"])
        self._last = position
        leaves = [arrays[name] for name in sorted(arrays) if name.startswith("leaf")]
        scores: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        for name in sorted(arrays):
            if name.startswith("score"):
                _, run, local, column = name.split(" ", 3)
                scores.setdefault((int(run), int(local)), {})[column] = arrays[name]
        models: dict[tuple[int, int], list[np.ndarray]] = {}
        for name in sorted(arrays):
            if name.startswith("model"):
                _, run, local, _ = name.split(" ")
                models.setdefault((int(run), int(local)), []).append(arrays[name])
        return Snapshot(about["turns"], leaves, scores, models)

    def _compare(self, saved: Mapping[str, Any]) -> None:
        """``ValueError`` unless ``saved``, the identity in a checkpoint, is of this run; warnings as in ``restore``."""
        unknown = identity.unknown_files(saved.get("settings"), self._identity.get("settings"))
        if unknown:
            self._say(notices.unknown_files(unknown))
        if NUMBERS not in saved:
            self._say(OLDER)
        for name, have in self._identity.items():
            if name not in saved and name in (NUMBERS, *SAID):  # an older checkpoint
                continue
            found = identity.difference(saved.get(name), have)
            if found and name in SAID:
                self._say(f"goes on with other {name}: {found} ({SAID[name]})")
            elif found:
                also = f", or an input file has changed ({', '.join(unknown)})" if unknown else ""
                raise ValueError(
                    f"checkpoint = {str(self.folder)!r}: must be of this run, but its {name} differ{also}: {found}; "
                    "remove the folder to start again"
                )

    def _say(self, text: str) -> None:
        warnings.warn(f"{self.folder}: {text}", notices.RunWarning, stacklevel=2)


def completed(folder: Path) -> list[int]:
    """Updates at which complete checkpoints in ``folder`` were taken, in order."""
    return sorted(int(path.stem) for path in Path(folder).glob("*.npz") if path.stem.isdecimal())


def _file(folder: Path, position: int) -> Path:
    return folder / f"{position}.npz"


def _read(folder: Path, position: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The description and the arrays of a checkpoint; raises ``ValueError`` with one line that says what to do."""
    path = _file(folder, position)
    try:
        arrays = disk.read_npz(path)
        about = json.loads(arrays.pop(ABOUT).tobytes())
        if about["format"] != FORMAT:
            raise ValueError(f"its format is {about['format']!r}")
        if {name: _digest(array) for name, array in arrays.items()} != about["sha256"]:
            raise ValueError("its check sums differ")
    except (OSError, ValueError, KeyError, TypeError) as error:
        others = [step for step in completed(folder) if step != position]
        advice = f"remove that file to go on from update {others[-1]}" if others else "remove it to start again"
        raise ValueError(
            f"checkpoint = {str(path)!r}: is damaged or of another format ({_first_line(error)}); {advice}"
        ) from error
    return about, arrays


def _named(snapshot: Snapshot) -> dict[str, np.ndarray]:
    leaves = {f"leaf {i:08}": leaf for i, leaf in enumerate(snapshot.leaves)}
    scores = {
        f"score {run} {local} {name}": np.asarray(value)
        for (run, local), columns in snapshot.scores.items()
        for name, value in columns.items()
    }
    models = {
        f"model {run} {local} {i:08}": leaf
        for (run, local), found in snapshot.models.items()
        for i, leaf in enumerate(found)
    }
    return leaves | scores | models


def _digest(array: np.ndarray) -> str:
    kind = f"{array.dtype} {array.shape} ".encode()
    total = hashlib.sha256(kind)
    total.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def _first_line(error: Exception) -> str:
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return line if len(line) <= 200 else f"{line[:90]} ... {line[-90:]}"  # the reason is at the end
