"""What a folder of results holds, and runs that are killed."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from fedjax_async import simulate
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


def killed_run(folder: Path, at: int, **given: object) -> None:
    """Start a run in a folder and kill it at its update ``at``."""

    def kill(done: int, total: int, **status: float) -> None:
        if done >= at:
            raise Killed

    with pytest.raises(Killed):
        simulate(**given, out=folder, plots=False, progress=kill)
