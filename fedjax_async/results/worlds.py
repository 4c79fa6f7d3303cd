"""What readers of tables and curves must know, in words: other worlds, what is left out, scores of nodes, and ends."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_async.base import identity
from fedjax_async.base.notices import ENDED_EARLY
from fedjax_async.results import metrics, store
from fedjax_async.results.compared import folder_name
from fedjax_async.types import Run

# The settings that make the world of a run: its data, clients, delays and budget, and what may fail.
WORLD = (
    "dataset", "partition", "clients", "test_fraction", "validation_fraction", "delay", "network", "availability",
    "faults", "time", "updates", "server_steps", "max_staleness", "timeout",
)  # fmt: skip
MOST = 3  # settings that a line names
LONGEST = 24  # characters of a value in it
# Counter of jobs -> how a summary calls them; crashed and interrupted ones are among the lost.
FAULTS = {
    "lost": "lost", "crashed": "crashed", "interrupted": "interrupted", "dropped_late": "dropped as late",
    "dropped_stale": "dropped as stale", "corrupt": "corrupt", "duplicates": "duplicates",
}  # fmt: skip


def differences(runs: Mapping[str, Sequence[Run]]) -> str:
    """How the worlds of the runs differ, in a line; empty if all share one.

    Settings that a run does not say are not compared.
    """
    every = [run.settings for seeds in runs.values() for run in seeds]
    found = []
    for name in WORLD:
        values: list[object] = []
        for each in every:
            if name in each and all(identity.difference(each[name], value) for value in values):
                values.append(each[name])
        if len(values) > 1:
            found.append(f"{name} ({', '.join(_texts(values[:MOST]))}{', ...' if len(values) > MOST else ''})")
    more = f" and {len(found) - MOST} more" if len(found) > MOST else ""
    return f"different worlds: {', '.join(found[:MOST])}{more}" if found else ""


def _texts(values: Sequence[object]) -> list[str]:
    """The values in at most ``LONGEST`` characters each: their beginnings or, where these are equal, their ends."""
    whole = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
    cut, dots = LONGEST - 1, "\N{HORIZONTAL ELLIPSIS}"
    found = [text if len(text) <= LONGEST else text[:cut] + dots for text in whole]
    if len({*found}) == len(found):
        return found
    return [text if len(text) <= LONGEST else dots + text[-cut:] for text in whole]


def warn_of_differences(runs: Mapping[str, Sequence[Run]]) -> None:
    """Say on standard error that the runs are of different worlds, if they are."""
    if found := differences(runs):
        print(f"warning: {found}; curves and tables of them are no comparison of methods", file=sys.stderr)


def listed_in(path: Path, names: Collection[str]) -> list[str]:
    """Those of ``names`` that the table of the comparison in ``path`` lists, in its order."""
    return [name for name in _rows_in(path) if name in names]


def _rows_in(path: Path) -> list[str]:
    """The methods of the table of the comparison in ``path``; none without a table."""
    file = path / "comparison.csv"
    text = file.read_text(encoding="utf-8-sig", errors="replace") if file.is_file() else ""
    header, *lines = list(csv.reader(io.StringIO(text))) or [[]]
    return [line[0] for line in lines if line] if header[:1] == ["method"] else []


def warn_of_left_out(path: Path, runs: Mapping[str, Sequence[Run]]) -> bool:
    """Say on standard error what tables of ``runs`` will lack of the comparison in ``path``.

    Returns whether the tables there are of other methods.
    """
    before = _rows_in(path)
    if methods := [name for name in before if name not in runs]:
        print(
            f"warning: {path}: its tables and pictures had also {', '.join(methods)}, which is not compared now (its "
            "finished runs stay; one call with all methods compares them all)",
            file=sys.stderr,
        )
    for name, group in runs.items():
        finished = path.glob(f"runs/{folder_name(name)}/seed_*/{store.MANIFEST}")
        there = {manifest.parent.name.removeprefix("seed_") for manifest in finished}
        others = there - {str(run.settings.get("seed", 0)) for run in group}
        if others:
            seeds = ", ".join(sorted(others, key=lambda seed: (len(seed), seed)))  # of copied folders too
            print(
                f"warning: {path}: the tables leave out seed {seeds} of {name}, which an earlier call finished",
                file=sys.stderr,
            )
    return bool(before) and {*before} != {*runs}


def faults_text(counters: Mapping[str, Any]) -> str:
    """How many jobs failed, and how, in a line; empty if none did. Nodes without a server lose messages.

    >>> faults_text({"lost": 3, "crashed": 1, "updates": 9}), faults_text({"messages": 40, "lost": 1})
    ('faults: 3 jobs lost (1 crashed)', 'faults: 1 message lost')
    """
    count = {name: counters.get(name, 0) for name in FAULTS}
    within = ", ".join(f"{count[name]} {name}" for name in ("crashed", "interrupted") if count[name])
    what = "message" if "messages" in counters else "job"
    jobs = f"{count['lost']} {what}{'s' if count['lost'] > 1 else ''} lost" + (f" ({within})" if within else "")
    others = [f"{count[name]} {text}" for name, text in list(FAULTS.items())[3:] if count[name]]
    parts = ([jobs] if count["lost"] else []) + others
    return f"faults: {', '.join(parts)}" if parts else ""


def end_text(run: Run) -> str:
    """That and why a run ended before its budget, in a line; empty if it did not."""
    if run.stopped is not None:
        return f"ended before its budget: stopped by {run.stopped.by} at evaluation {run.stopped.evaluation}: " + (
            run.stopped.why
        )
    return str(run.counters.get(ENDED_EARLY, ""))  # ended after U of B updates because ...


# --- runs without a server ----------------------------------------------------------------------------

OF_SERVERS = ("accuracy", "loss")  # columns with another meaning in runs without a server
MOST_NAMES = 5
WHAT = "mean over the nodes of each node's own model on its own test part (on the global test set if no node has one)"


def axis_title(column: str, runs: Iterable[Run]) -> str:
    """The name of a column at an axis, which says so if it scores the nodes' own models in all or some of the runs."""
    title, served = metrics.axis_title(column), {run.has_server for run in runs}
    if column not in OF_SERVERS or served == {True}:
        return title
    return f"{title}\n" + ("(without a server: nodes' own models)" if True in served else "of nodes' own models")


def note_on_nodes(runs: Mapping[str, Sequence[Run]]) -> str:
    """A sentence for a table of methods if any of them has no server; else empty."""
    without = [name for name, seeds in runs.items() if not seeds[0].has_server]
    if not without:
        return ""
    metric = metrics.main_metric(run for seeds in runs.values() for run in seeds)
    more = f" and {len(without) - MOST_NAMES} more" if len(without) > MOST_NAMES else ""
    of = f" of {', '.join(without[:MOST_NAMES])}{more}" if len(without) < len(runs) else ""
    times = "; the target is of the same accuracy" if metric == "accuracy" else ""
    return f"{metric}{of} (without a server): {WHAT}{times}; global_{metric} is that on the global test set"
