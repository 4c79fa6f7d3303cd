"""``execute``: run a prepared experiment on the engine that its settings name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from fedjax_async.base import check
from fedjax_async.config import plugins
from fedjax_async.config.prepared import Experiment
from fedjax_async.config.watching import Watch
from fedjax_async.engine.checkpoint import Keeper
from fedjax_async.engine.devices import naming_remedies, parse_size
from fedjax_async.engine.record import Progress
from fedjax_async.types import Run


@naming_remedies()
def execute(
    experiment: Experiment,
    *,
    progress: Progress | None = None,
    checkpoints: Path | None = None,
    watch: Watch | None = None,
) -> Run:
    """Run a prepared experiment on the engine that its settings name.

    ``checkpoints``: the folder for checkpoints, if the settings ask for them; the run continues from the newest one in
    it. ``watch``: looks at the evaluations, by default for the stopping rules of the settings. Raises ``ValueError``
    for checkpoints without a folder or with several processes.
    """
    e, s = experiment, experiment.settings
    if watch is None and (s.stop_at is not None or s.patience is not None):
        watch = Watch(e)
    options: dict[str, Any] = {"observer": None if watch is None else watch.observer, "progress": progress}
    options["on_bad"] = s.on_bad
    planned = s.policy is None
    if planned:
        options["norm_limit"] = e.norm_limit
    if s.engine == "waves":
        options |= {"max_width": s.max_width, "lanes": s.lanes, "batching": s.batching}
        if planned:
            limit = None if s.memory_limit is None else parse_size("memory_limit", s.memory_limit)
            options |= {"devices": s.devices, "memory_limit": limit}
        if s.checkpoint is not None:
            options["keeper"] = _keeper(e, checkpoints)
    result: Any = e.run(**options)
    return e.recorded(result) if watch is None else watch.finish(e.recorded(result), result)


def _keeper(e: Experiment, folder: Path | None) -> Keeper:
    s = e.settings
    if folder is None or s.checkpoint is None:
        raise ValueError(f"checkpoint = {s.checkpoint}: must be left out without a folder (--out) to keep it in")
    check.require(jax.process_count() == 1, "checkpoint", s.checkpoint, "left out with several processes")
    return Keeper(folder, s.checkpoint, {"settings": e.described, "plugins": plugins.digests()})
