"""The accuracy of late nodes after they join, beside that of the nodes that were present from the start.

Runs are those of ``run_task`` in ``study.py``, whose ``per_client`` has ``joined`` (virtual seconds) and
``own_accuracy``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_async.results import figure as canvas
from fedjax_async.types import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def late_nodes(run: Run) -> np.ndarray:
    """The nodes that join after the start and not after the last evaluation; int64."""
    joined = run.per_client["joined"]
    return np.flatnonzero((joined > 0) & (joined <= run.evaluations["time"][-1]))


def since_joining(run: Run, node: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds since a node joined, and its accuracy on its own tests in %, at the evaluations that include it."""
    time = np.asarray(run.evaluations["time"]) - run.per_client["joined"][node]
    accuracy = 100 * np.asarray(run.per_client["own_accuracy"])[:, node]
    seen = (time >= 0) & np.isfinite(accuracy)
    return time[seen], accuracy[seen]


def catching_up(runs: Mapping[str, Sequence[Run]]) -> Iterator[dict[str, Any]]:
    """One row per second since joining: the accuracy of late nodes, and of the others at the same moments.

    ``others``: the mean over the nodes that were present from the start. The means weigh all evaluations of late nodes
    of all seeds within a second equally; ``evaluations`` is their number.
    """
    for name, seeds in runs.items():
        found: dict[int, list[tuple[float, float]]] = {}
        for run in seeds:
            own = 100 * np.asarray(run.per_client["own_accuracy"])
            others = np.nanmean(own[:, run.per_client["joined"] == 0], axis=1)
            moments = np.asarray(run.evaluations["time"])
            for node in map(int, late_nodes(run)):
                for time, accuracy in zip(*since_joining(run, node), strict=True):
                    at = int(np.argmin(np.abs(moments - run.per_client["joined"][node] - time)))
                    found.setdefault(int(time), []).append((accuracy, others[at]))
        for second, pairs in sorted(found.items()):
            late, rest = np.mean(pairs, axis=0)
            yield {
                **{"variant": name, "second": second, "late (%)": late, "others (%)": rest},
                **{"late - others": late - rest, "evaluations": len(pairs)},
            }


def late_curves(runs: Mapping[str, Sequence[Run]]) -> Figure:
    """Each late node's accuracy on its own tests against the time since it joined (thin), and their mean (bold).

    The mean is of the late nodes of all seeds; it ends where the first of them has its last evaluation.
    """
    figure, axes = canvas.new(6.2, 3.6)
    for index, (name, seeds) in enumerate(runs.items()):
        colour, dash = canvas.line_style(index)
        curves = [since_joining(run, int(node)) for run in seeds for node in late_nodes(run)]
        curves = [(time, accuracy) for time, accuracy in curves if len(time) > 1]
        for time, accuracy in curves:
            axes.plot(time, accuracy, color=colour, linewidth=0.6, alpha=0.4)
        if curves:
            grid = np.linspace(max(time[0] for time, _ in curves), min(time[-1] for time, _ in curves), 40)
            mean = np.mean([np.interp(grid, *curve) for curve in curves], axis=0)
            axes.plot(grid, mean, color=colour, linestyle=dash, linewidth=1.8, label=name)
    axes.set_xlim(left=0)
    axes.grid(axis="y", color=canvas.GRID, linewidth=0.8)
    canvas.label(axes, "seconds since joining", "accuracy on own tests (%)")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9, labelcolor="linecolor")
    return figure
