"""Pictures of runs: accuracy against time, updates or bytes, and how stale the updates were."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedjax_async import check
from fedjax_async.results import figure as canvas
from fedjax_async.results import metrics
from fedjax_async.types import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def _steps(at: np.ndarray, values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """The last value at or before each grid point; NaN before the first."""
    index = np.searchsorted(at, grid, side="right") - 1
    return np.where(index >= 0, values[np.maximum(index, 0)], np.nan)


def band(runs: Sequence[Run], unit: str, column: str = "accuracy") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean and standard deviation over seeds of a column as a step function: (grid, mean, std).

    The grid holds every seed's evaluations from where all have begun to where the first one ends.
    """
    curves = [(metrics.progress_in(run, unit), np.asarray(run.evaluations[column], np.float64)) for run in runs]
    start, end = max(at[0] for at, _ in curves), min(at[-1] for at, _ in curves)
    grid = np.unique(np.concatenate([at for at, _ in curves]))
    grid = grid[(grid >= start) & (grid <= end)]
    stack = np.stack([_steps(at, values, grid) for at, values in curves])
    return grid, stack.mean(0), stack.std(0, ddof=1) if len(curves) > 1 else np.zeros(grid.size)


def spread_out(wanted: np.ndarray, gap: float, low: float, high: float) -> np.ndarray:
    """Label positions ``gap`` apart within [low, high], as near to ``wanted`` as that allows (least squares).

    With the k-th label moved by k gaps the constraint is an order, so that pooling neighbours that
    violate it solves the problem; labels closer than fit in [low, high] share the room evenly.
    """
    gap = min(gap, (high - low) / max(len(wanted) - 1, 1))
    order = np.argsort(wanted, kind="stable")
    offsets = gap * np.arange(len(wanted))
    pools: list[tuple[float, int]] = []  # mean and size
    for value in wanted[order] - offsets:
        mean, size = float(value), 1
        while pools and pools[-1][0] > mean:
            other, count = pools.pop()
            mean, size = (mean * size + other * count) / (size + count), size + count
        pools.append((mean, size))
    placed = np.concatenate([np.full(size, mean) for mean, size in pools])
    result = np.empty(len(wanted))
    result[order] = np.clip(placed, low, high - offsets[-1]) + offsets
    return result


def _name_lines(axes: Axes, names: Iterable[str]) -> None:
    """Write each line's name at the right edge, led to the line's last point."""
    lines = axes.get_lines()
    ends = np.array([np.asarray(line.get_xydata())[-1] for line in lines])
    low, high = axes.get_ylim()
    edge = axes.get_xlim()[1]
    start = 1.03 * edge
    places = spread_out(np.nan_to_num(ends[:, 1], nan=low), 0.055 * (high - low), low, high)
    for name, line, (x, y), place in zip(names, lines, ends, places, strict=True):
        colour = line.get_color()
        axes.plot([x], [y], marker="o", markersize=3, color=colour, clip_on=False)
        axes.plot([x, edge], [y, y], color=colour, linewidth=0.8, linestyle=(0, (1, 3)))  # a line that ends early
        axes.plot([edge, start], [y, place], color=colour, linewidth=0.6, clip_on=False)
        axes.annotate(
            name,
            (start, place),
            (2, 0),
            textcoords="offset points",
            color=colour,
            fontsize=9,
            va="center",
            annotation_clip=False,
        )


def accuracy_curve(runs: Mapping[str, Sequence[Run]], x: str = "time") -> Figure:
    """Test accuracy against ``x``: ``time`` (virtual), ``update``, ``step`` or ``bytes``.

    ``runs`` maps a name to its runs, one a seed: the line is their mean, the band one standard deviation
    either side, both of step functions. Lines are named at their ends, in place of a legend.
    """
    figure, axes = _curves(runs, x, "accuracy", "test accuracy (%)", 100.0)
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -1.0), min(high, 101.0))
    _name_lines(axes, runs)
    return figure


def loss_curve(runs: Mapping[str, Sequence[Run]], x: str = "time") -> Figure:
    """Test loss against ``x``, as :func:`accuracy_curve`; for targets without classes."""
    figure, axes = _curves(runs, x, "loss", "test loss", 1.0)
    _name_lines(axes, runs)
    return figure


def _curves(runs: Mapping[str, Sequence[Run]], x: str, column: str, title: str, factor: float) -> tuple[Figure, Axes]:
    """Means and bands of one column, drawn in the order of ``runs``."""
    check.require(len(runs) > 0 and all(len(seeds) > 0 for seeds in runs.values()), "runs", list(runs), "not empty")
    bands = [band(seeds, x, column) for seeds in runs.values()]
    longest = max(float(grid[-1]) for grid, _, _ in bands)
    size, label = canvas.axis(x, longest)
    figure, axes = canvas.new(5.2 + 0.085 * max(map(len, runs)), 3.6)  # inches; names stand beside the axes
    for index, (grid, mean, std) in enumerate(bands):
        colour, dash = canvas.look(index)
        axes.plot(grid / size, factor * mean, color=colour, linestyle=dash, linewidth=1.6)
        low, high = factor * (mean - std), factor * (mean + std)
        axes.fill_between(grid / size, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlim(0, longest / size or 1.0)
    axes.grid(axis="y", color=canvas.GRID, linewidth=0.8)
    canvas.label(axes, label, title)
    return figure, axes


def staleness_histogram(run: Run) -> Figure:
    """How many updates were applied at each staleness (server steps), with mean and maximum."""
    staleness = np.asarray(run.updates["staleness"])
    check.require(staleness.size > 0, "run.updates", {}, "a table with at least one arrival")
    largest = int(staleness.max())
    width = max(1, math.ceil((largest + 1) / 60))  # whole numbers a bar, so that bars stay readable
    edges = np.arange(0, largest + width + 1, width) - 0.5
    share = 100 * np.histogram(staleness, edges)[0] / staleness.size
    figure, axes = canvas.new(5.0, 3.0)
    axes.bar(edges[:-1] + width / 2, share, width=0.86 * width, color=canvas.PALETTE[0], linewidth=0)
    mean = float(staleness.mean())
    axes.axvline(mean, color=canvas.PALETTE[1], linewidth=1.2)
    axes.set_title(f"mean {mean:.1f}, largest {largest}", loc="left", fontsize=9, color=canvas.PALETTE[1])
    axes.locator_params(axis="x", integer=True)
    axes.grid(axis="y", color=canvas.GRID, linewidth=0.8)
    canvas.label(axes, "staleness (server steps)", "share of updates (%)")
    return figure
