"""Callbacks at evaluations: functions of your own, streams, the best model; for runs, comparisons and sweeps alike.

A callback changes no number of a run. If it returns ``Stop(why)``, the run ends at this evaluation; its results are
those of the longer run up to there. ``stop_at`` and ``patience`` are settings, because they define the run. Callbacks
are not settings: a finished run is read whatever its callbacks were, unless one stopped it or would stop it now.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_async.base import check, disk
from fedjax_async.config import Experiment
from fedjax_async.config.watching import Callback, Watch, asked, name_of
from fedjax_async.engine.client_scores import client_columns, without_accuracies
from fedjax_async.results import files, streams
from fedjax_async.results.store import BEST, CHECKPOINTS, load
from fedjax_async.types import Evaluation, Run

SAVED = "callbacks.json"  # beside the settings of a run that is not finished
PLACES = (
    "time",
    "update",
    "step",
    "bytes_up",
    "bytes_down",
    "values_bytes_up",
    "energy",
    "carbon",
)  # columns of the evaluations that are not scores


class Callbacks(NamedTuple):
    """What gets the evaluations of a run, besides the stopping rules of its settings."""

    functions: tuple[Callback, ...] = ()
    streams: tuple[str, ...] = ()
    keep_best: bool = False

    @property
    def names(self) -> dict[str, Any]:
        """The content of ``callbacks.json``."""
        functions = [name_of(function) for function in self.functions]
        return {"functions": functions, "stream": list(self.streams), "keep_best": self.keep_best}


NO_CALLBACKS = Callbacks()


def as_callbacks(
    callbacks: Iterable[Callback] | None, stream: str | Iterable[str] | None, keep_best: bool, folder: Path | None
) -> Callbacks:
    """Check the arguments of ``simulate`` before anything is compiled, and join them.

    Raises ``ValueError`` for a callback that cannot be called, an unknown stream, a missing package of a stream, and a
    stream that writes files if there is no ``folder``.
    """
    listed = callbacks is None or (isinstance(callbacks, Iterable) and not isinstance(callbacks, (str, Mapping)))
    check.require(listed and not callable(callbacks), "callbacks", callbacks, "a list of functions f(evaluation)")
    functions = tuple(callbacks or ())
    for function in functions:
        check.require(callable(function), "callbacks", function, "functions f(evaluation) -> None or Stop(why)")
    check.require(isinstance(keep_best, bool), "keep_best", keep_best, "True or False")
    several = stream is None or (isinstance(stream, Iterable) and not isinstance(stream, Mapping))
    check.require(several, "stream", stream, "'csv', 'tensorboard' or 'wandb', or a list of them")
    names = stream.split(",") if isinstance(stream, str) else list(stream or ())
    check.require(len(names) == len(set(map(str, names))), "stream", stream, "different streams")
    streams.require_streams(names, folder)
    return Callbacks(functions, tuple(dict.fromkeys(names)), keep_best)


def watch_of(callbacks: Callbacks, experiment: Experiment, folder: Path | None, name: str | None = None) -> Watch:
    """The :class:`Watch` of one run; ``folder``: where its streams write. Close it at the end."""
    shown = str(experiment.settings.method) if name is None else name
    if folder is not None and callbacks.streams:
        folder.mkdir(parents=True, exist_ok=True)
    opened = [streams.STREAMS[each](folder, shown) for each in callbacks.streams]
    return Watch(
        experiment, name=shown, callbacks=callbacks.functions, streams=opened, keep_best=callbacks.keep_best
    )  # fmt: skip


# --- finished runs ------------------------------------------------------------------------------------


def _evaluations_of(run: Run, name: str) -> Iterable[Evaluation]:
    """The evaluations of a finished run, as callbacks get them, with ``again`` set."""
    table, last = run.evaluations, len(run.evaluations["time"]) - 1
    derived = client_columns(run.per_client)  # made of the clients' scores at the end of a run
    scores = {column: values for column, values in table.items() if column not in PLACES and column not in derived}
    scores |= {f"client_{column}": values for column, values in run.per_client.items()}
    for row in range(last + 1):
        time, update, step = (table[column][row].item() for column in ("time", "update", "step"))
        values = {column: np.array(found[row])[()] for column, found in scores.items()}
        ends = row == last and run.stopped is None
        yield Evaluation(name, row, time, update, step, values, run.settings, ends, True)


def is_covered(run: Run, callbacks: Callbacks, name: str) -> bool:
    """Whether a finished run would be the same with these callbacks, so that it need not be trained again.

    The functions are called with its evaluations. The run must end where the first of them stops it; if none does, no
    callback may have stopped it before. With ``keep_best`` it must have its best model.
    """
    if callbacks.keep_best and run.best is None:
        return False
    by_function = run.stopped is not None and run.stopped.by.startswith("callback ")
    if not callbacks.functions:
        return not by_function
    last = len(run.evaluations["time"]) - 1
    for evaluation in _evaluations_of(run, name):
        if [found for function in callbacks.functions if (found := asked(function, evaluation)) is not None]:
            return evaluation.number == last
    return not by_function


def stream_again(run: Run, callbacks: Callbacks, folder: Path, name: str) -> None:
    """Write the evaluations of a finished run to the streams that lack them."""
    labelled = "accuracy" in files.applicable(run.evaluations)
    for each in callbacks.streams:
        stream = streams.STREAMS[each](folder, name)
        for evaluation in _evaluations_of(run, name):
            scores = evaluation.scores if labelled else without_accuracies(evaluation.scores)
            asked(stream, evaluation._replace(scores=scores))
        stream.close(True)


def is_covered_in(folder: Path, callbacks: Callbacks, name: str) -> bool:
    """:func:`is_covered` of the finished run in ``folder``, which is read only where it has to be."""
    if callbacks.functions or (folder / "stopped.json").is_file():
        return is_covered(load(folder), callbacks, name)
    return not callbacks.keep_best or (folder / BEST).is_file()


# --- unfinished runs ----------------------------------------------------------------------------------


def save_callbacks(callbacks: Callbacks, checkpoints: Path) -> None:
    """Save the names of the callbacks of a run that begins."""
    if callbacks != NO_CALLBACKS:
        disk.write(checkpoints / SAVED, files.json_bytes(callbacks.names))
    else:
        (checkpoints / SAVED).unlink(missing_ok=True)


def resumed(folder: Path, callbacks: Iterable[Callback] | None) -> Callbacks:
    """The callbacks that the unfinished run in ``folder`` began with; the functions must be given again.

    ``ValueError`` unless their names are the same as before.
    """
    path = folder / CHECKPOINTS / SAVED
    saved = json.loads(path.read_bytes()) if path.is_file() else NO_CALLBACKS.names
    found = as_callbacks(callbacks, saved["stream"], saved["keep_best"], folder)
    names, have = saved["functions"], found.names["functions"]
    wanted = f"the functions that the run began with, {', '.join(names)}: give them again, resume(..., callbacks=[...])"
    check.require(not names or names == have, "callbacks", have, wanted)
    return found
