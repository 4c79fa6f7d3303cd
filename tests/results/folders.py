"""What a folder of results holds, and runs that are killed."""

from __future__ import annotations

import contextlib
import csv
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from fedjax_async import Settings, simulate
from fedjax_async.results.store import COMMAND


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path in it, but for the commands, in which folders of equal runs may differ."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != COMMAND]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def rows(path: Path) -> list[dict[str, str]]:
    """The lines of a CSV file: column -> cell."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


class Killed(BaseException):
    """Stands for the end of the process: the package does not catch it, and only files remain."""


def killed_run(folder: Path, at: int, *settings: Settings, **given: object) -> None:
    """Start a run in a folder and kill it at its update ``at``."""

    def kill(done: int, total: int, **status: float) -> None:
        if done >= at:
            raise Killed

    with pytest.raises(Killed):
        simulate(*settings, **given, out=folder, plots=False, progress=kill)


@contextlib.contextmanager
def killed_in(write: int) -> Iterator[list[str]]:
    """Kill the process in a write, after so many; yields the file in a list, which stays empty if it ends before.

    A killed process leaves half a temporary file, which carries its number.
    """
    replace, left, deaths = os.replace, iter(range(write, -1, -1)), []

    def dying(temporary: str, path: str) -> None:
        if not (name := Path(path).name).startswith(".") and next(left, 1) == 0:
            deaths.append(str(path))
            content = Path(temporary).read_bytes()
            Path(path).with_name(f".{name}.1234.tmp").write_bytes(content[: len(content) // 2])
            raise Killed
        replace(temporary, path)

    with mock.patch.object(os, "replace", dying), contextlib.suppress(Killed):
        yield deaths


def ends_the_same(start: Callable[[Path], object], place: Path, least: int, first: int = 0, step: int = 1) -> None:
    """Assert that ``start(folder)`` leaves the files of a whole run if it was killed in any write and started again.

    It is killed ``step`` writes later each time, and makes at least ``least`` writes.
    """

    def left_by(folder: Path) -> dict[str, bytes]:
        return {name: found for name, found in contents(folder).items() if not Path(name).name.startswith(".")}

    start(place / "whole")
    want = left_by(place / "whole")
    for last in itertools.count(first, step):
        with killed_in(last) as deaths:
            start(place / f"cut_{last}")
        if not deaths:
            assert last > least
            return
        start(place / f"cut_{last}")
        assert left_by(place / f"cut_{last}") == want, deaths
