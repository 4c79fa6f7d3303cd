"""What accuracy and loss are in a run without a server, where tables and curves show them: scores of the nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fedjax_async.results import metrics
from fedjax_async.types import Run

OF_SERVERS = ("accuracy", "loss")  # columns with another meaning in runs without a server
MOST_NAMES = 5
WHAT = "mean over the nodes of each node's own model on its own test part (on the global test set if no node has one)"


def axis_title(column: str, runs: Iterable[Run], between: str = "\n") -> str:
    """The name of a column at an axis, which says so if it scores the nodes' own models in all or some of the runs.

    ``between``: what separates the two lines.
    """
    title, served = metrics.axis_title(column), {run.has_server for run in runs}
    if column not in OF_SERVERS or served == {True}:
        return title
    return f"{title}{between}" + ("(without a server: nodes' own models)" if True in served else "of nodes' own models")


def note(runs: Mapping[str, Sequence[Run]]) -> str:
    """A sentence for a table of methods if any of them has no server; else empty."""
    without = [name for name, seeds in runs.items() if not seeds[0].has_server]
    if not without:
        return ""
    metric = metrics.main_metric(run for seeds in runs.values() for run in seeds)
    more = f" and {len(without) - MOST_NAMES} more" if len(without) > MOST_NAMES else ""
    of = f" of {', '.join(without[:MOST_NAMES])}{more}" if len(without) < len(runs) else ""
    times = "; the target is of the same accuracy" if metric == "accuracy" else ""
    return f"{metric}{of} (without a server): {WHAT}{times}; global_{metric} is that on the global test set"
