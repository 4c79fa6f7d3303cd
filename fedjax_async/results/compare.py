"""The same experiment with several methods and seeds: the same world, time budget and client order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedjax_async import check
from fedjax_async.config import Settings, execute, prepare
from fedjax_async.config.settings import as_dict
from fedjax_async.results.claim import claimed
from fedjax_async.results.progress import bar
from fedjax_async.results.resume import run_into
from fedjax_async.results.store import require_room
from fedjax_async.types import Run


def compare(
    methods: Sequence[str],
    settings: Settings,
    *,
    seeds: int = 1,
    folder: str | Path | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> dict[str, list[Run]]:
    """Run every method with the seeds ``settings.seed, settings.seed + 1, ...``.

    The delays of a client's n-th job, the partition and the minibatches depend on the seed alone, so
    the methods see the same world. Every setting is checked, every schedule planned and every folder
    checked, made and proven writable before the first run starts. ``folder`` is locked until the end.

    Args:
      methods: specs such as ``"fedasync:mixing=0.4"`` or, with a timing of its own,
        ``"fedbuff@buffer:size=5"``; they name the rows.
      folder: if given, each run is saved at once under ``folder/runs/METHOD/seed_K``.
      progress: show a bar per run (default: on a terminal).

    Returns: method -> its runs, one a seed.
    """
    check.whole("seeds", seeds)
    check.require(len(methods) > 0, "methods", list(methods), "at least one method")
    check.require(len(set(methods)) == len(methods), "methods", list(methods), "different from each other")

    def one(method: str, seed: int) -> Settings:
        return replace(settings, method=method, seed=seed)

    def place(method: str, seed: int) -> Path:
        return Path(folder or "") / "runs" / re.sub(r"[^\w.-]+", "_", method) / f"seed_{seed}"

    def look_at(method: str, seed: int) -> None:
        with claimed(None if folder is None else place(method, seed)):
            experiment = prepare(one(method, seed))
            if folder is not None:
                require_room(place(method, seed), as_dict(experiment.settings), overwrite=overwrite)

    def train(method: str, seed: int) -> Run:
        experiment = prepare(one(method, seed))
        meter = bar(len(experiment.schedule.job), progress, label=f"{method} seed {seed}")
        try:
            if folder is None:
                return execute(experiment, progress=meter.report)
            home = place(method, seed)
            return run_into(experiment, home, plots=False, overwrite=overwrite, progress=meter.report)
        finally:
            meter.close()

    all_seeds = range(settings.seed, settings.seed + seeds)
    with claimed(folder):
        for method in methods:
            for seed in all_seeds:
                look_at(method, seed)
        runs: dict[str, list[Run]] = {method: [] for method in methods}
        for seed in all_seeds:
            for method in methods:
                runs[method].append(train(method, seed))
    return runs
