"""One run from Python: ``simulate``, in memory or into a folder, and ``resume``, which continues a folder's run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax

from fedjax_async import check
from fedjax_async.config import Settings, execute, prepare
from fedjax_async.config.simulation import settings_from
from fedjax_async.engine.record import Progress
from fedjax_async.results.claim import claimed
from fedjax_async.results.figure import require_matplotlib
from fedjax_async.results.progress import require_progress
from fedjax_async.results.runs import load_plugins, run_into, unfinished
from fedjax_async.types import Run


def simulate(
    settings: Settings | None = None,
    *,
    out: str | Path | None = None,
    plots: bool = True,
    overwrite: bool = False,
    again: bool = False,
    probes: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **changes: Any,
) -> Run:
    """Simulate one asynchronous (or synchronous) federated run.

    Every field of :class:`Settings` is a keyword. An object of your own may stand for the name of a part (``method``,
    ``model``, ``dataset``, ``partition``, ``delay``, ...); ``data`` is ``FederatedData`` that are dealt already.
    ``probes``: see ``config.prepare``; ``Run.probes`` holds what they return.

    Args:
      out: the folder for settings, tables, parameters, schedule and pictures (as ``fedjax-async run --out``). With
        ``checkpoint=N`` a run that was killed continues there: by the same call, or by :func:`resume`. A finished run
        of the same settings is read, not trained again. Objects need a name: ``named("fair", Method(rule))``.
      plots: draw the pictures too (needs matplotlib).
      overwrite: replace results of other settings in ``out``.
      again: train a finished run once more.

    >>> run = simulate(method="fedbuff", dataset="fashion_mnist_6k", model="logistic", clients=4, updates=6)
    >>> run.counters["updates"]
    6

    Raises: ``ValueError`` naming field, value and range, before anything is compiled.
    """
    chosen = settings_from(settings, changes)
    require_progress(progress)
    if out is None:
        for name, value in (("overwrite", overwrite), ("again", again)):
            check.require(not value, name, value, "left out without a folder (out)")
        return execute(prepare(chosen, probes=probes), progress=progress)
    check.path("out", out)
    if plots:
        require_matplotlib()
    with claimed(out):
        options: dict[str, Any] = {"plots": plots, "overwrite": overwrite, "again": again, "progress": progress}
        return run_into(prepare(chosen, probes=probes), Path(out), **options)


def resume(
    folder: str | Path,
    *,
    plots: bool = True,
    probes: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **objects: Any,
) -> Run:
    """Continue the run in ``folder`` that was begun with ``checkpoint=N`` and cut off; it ends with the same files.

    ``objects``: the run's own objects by setting, ``method=Method(rule)``, ``data=...``: a folder keeps no code. Names
    that a plugin registers come back by themselves. ``probes`` as the run was begun with.

    Raises: ``ValueError`` if there is nothing to continue, and naming the object or plugin whose code differs from the
    code that the run began with.
    """
    check.path("folder", folder)
    require_progress(progress)
    folder = Path(folder)
    if "data" in objects:
        objects["dataset"] = objects.pop("data")
    unfinished(folder, objects)  # before the folder is made: the name may be wrong
    if plots:
        require_matplotlib()
    with claimed(folder):
        load_plugins(folder)
        settings = unfinished(folder, objects)
        with precision(settings):
            return run_into(prepare(settings, probes=probes), folder, plots=plots, progress=progress)


def precision(settings: Settings) -> AbstractContextManager[Any]:
    """JAX's 64-bit mode if the run computes in float64."""
    return jax.enable_x64(True) if settings.compute == "float64" else nullcontext()
