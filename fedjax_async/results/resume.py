"""Runs that survive: a folder that holds a run, or what is needed to go on with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from fedjax_async import disk
from fedjax_async.config import Experiment, Settings, execute
from fedjax_async.config.settings import as_dict
from fedjax_async.engine.record import Progress
from fedjax_async.results import files
from fedjax_async.results.claim import claimed
from fedjax_async.results.report import write_run
from fedjax_async.results.store import CHECKPOINTS, MANIFEST, require_room
from fedjax_async.types import Run


def run_into(
    experiment: Experiment,
    folder: Path,
    *,
    plots: bool = True,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Run an experiment and save it in ``folder``; killed and called again, it goes on from its last checkpoint.

    Checkpoints (``settings.checkpoint``) are kept in ``folder/checkpoints`` until the results are
    complete. The folder is locked meanwhile.

    Raises: ``ValueError`` as in :func:`claimed` and :func:`require_room`, before anything is compiled, and for
    checkpoints of other settings.
    """
    settings = as_dict(experiment.settings)
    with claimed(folder):
        folder = require_room(folder, settings, overwrite=overwrite)
        kept = folder / CHECKPOINTS
        if overwrite and not _same(kept / "settings.json", settings):
            shutil.rmtree(kept, ignore_errors=True)
        if experiment.settings.checkpoint is not None:
            kept.mkdir(parents=True, exist_ok=True)
            disk.write(kept / "settings.json", files.json_bytes(settings))
        run = execute(experiment, progress=progress, checkpoints=kept)
        write_run(run, folder, plots=plots, overwrite=overwrite)
        shutil.rmtree(kept, ignore_errors=True)
    return run


def _same(path: Path, settings: dict[str, object]) -> bool:
    return path.is_file() and path.read_bytes() == files.json_bytes(settings)


def unfinished(folder: Path) -> Settings:
    """The settings of the run whose checkpoints ``folder`` holds.

    ``ValueError`` if there is nothing to go on with.
    """
    saved = folder / CHECKPOINTS / "settings.json"
    if not saved.is_file():
        finished = (folder / MANIFEST).is_file()
        state = "the run in it is finished" if finished else f"it has no {CHECKPOINTS}/settings.json"
        raise ValueError(f"folder = {str(folder)!r}: must hold a run that was begun with --checkpoint, but {state}")
    try:
        return Settings(**json.loads(saved.read_bytes()))
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{saved}: is not the settings of a run ({error})") from None
