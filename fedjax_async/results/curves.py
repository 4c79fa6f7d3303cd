"""Curves of several methods: test accuracy or loss against time, updates, server steps or bytes, over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedjax_async.results import figure as canvas
from fedjax_async.results import metrics
from fedjax_async.results.figure import SCREEN, Drawing
from fedjax_async.results.measured import column_title
from fedjax_async.results.metrics import FINAL, Curve, Spread
from fedjax_async.types import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDEST_NAME = 0.4  # share of the figure that names beside the lines may take; longer ones stand below


class Drawn(NamedTuple):
    """What is drawn of one method."""

    curve: Curve  # running mean over as many evaluations as the final value averages
    raw: Curve | None  # without the running mean; None if it is the same
    end: Spread  # the final value, as in the tables


def spread_out(wanted: np.ndarray, gap: float, low: float, high: float) -> np.ndarray:
    """Label positions at least ``gap`` apart within [low, high], as near to ``wanted`` as possible (least squares).

    Subtracting k gaps from the k-th label turns the constraint into an order, so pooling neighbours that violate it
    (isotonic regression) solves the problem. If the labels do not fit into [low, high], they are spread evenly.
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


def accuracy_curve(
    runs: Mapping[str, Sequence[Run]], x: str = "time", *, final: str = FINAL, drawing: Drawing = SCREEN
) -> Figure:
    """Test accuracy against ``x``: ``time`` (virtual), ``update``, ``step`` or ``bytes``.

    ``runs`` maps each name to its runs, one per seed. The bold line is the mean over seeds of the running mean over as
    many evaluations as ``final`` averages (see :func:`fedjax_async.results.metrics.mean_curve`), the faint line the
    mean without it, the band one standard deviation on either side. The marker and the bar at the end are the final
    value and its deviation, as in the tables. A line with steps means that the seeds were evaluated at different
    moments. From the ninth on, lines have markers. Names stand at the lines' ends, or below if they are long.
    """
    figure, axes, drawn = _curves(runs, x, "accuracy", "test accuracy (%)", final, drawing)
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -1.0), min(high, 101.0))
    return _named(figure, axes, drawn, drawing)


def loss_curve(
    runs: Mapping[str, Sequence[Run]], x: str = "time", *, final: str = FINAL, drawing: Drawing = SCREEN
) -> Figure:
    """Test loss against ``x``, drawn as in :func:`accuracy_curve`; for targets without classes too."""
    return _named(*_curves(runs, x, "loss", "test loss", final, drawing), drawing)


def measured_curve(
    runs: Mapping[str, Sequence[Run]], column: str, x: str = "time", *, final: str = FINAL, drawing: Drawing = SCREEN
) -> Figure:
    """Any column of the evaluations against ``x``, drawn as in :func:`accuracy_curve`."""
    title = column_title(column) + (" (%)" if metrics.percent(column) > 1 else "")
    return _named(*_curves(runs, x, column, title, final, drawing), drawing)


def _drawn(seeds: Sequence[Run], x: str, column: str, final: str) -> Drawn:
    factor = metrics.percent(column)
    averaged = any(metrics.window(final, len(run.evaluations[column])) > 1 for run in seeds)
    return Drawn(
        metrics.mean_curve(seeds, x, column, factor, final),
        metrics.mean_curve(seeds, x, column, factor) if averaged else None,
        metrics.spread([factor * metrics.final_value(run, column, final) for run in seeds]),
    )


def _curves(
    runs: Mapping[str, Sequence[Run]], x: str, column: str, title: str, final: str, drawing: Drawing
) -> tuple[Figure, Axes, dict[str, Drawn]]:
    """Means and bands of one column, drawn in the order of ``runs``; without names."""
    metrics.require_runs(runs)
    drawn = {name: _drawn(seeds, x, column, final) for name, seeds in runs.items()}
    longest = max(float(each.curve.at[-1]) for each in drawn.values())
    size, label = canvas.axis(x, longest)
    figure, axes = canvas.new(5.2 + 0.085 * max(map(len, runs)), 3.6, drawing)  # inches; names stand beside the axes
    for index, (curve, _, end) in enumerate(drawn.values()):
        colour, dash = canvas.look(index)
        at, low, high = curve.at / size, curve.mean - curve.std, curve.mean + curve.std
        style = "steps-post" if curve.steps else "default"
        marks: dict[str, Any] = {
            "marker": canvas.marker(index),
            "markevery": (0.02 * (index % 5), 0.1),
            "markersize": 4,
        }
        axes.plot(at, curve.mean, color=colour, linestyle=dash, linewidth=1.6, drawstyle=style, **marks)
        axes.fill_between(at, low, high, step="post" if curve.steps else None, color=colour, alpha=0.15, linewidth=0)
        bar = [end.mean - end.std], [end.mean + end.std]
        axes.vlines(at[-1:], *bar, color=colour, alpha=0.5, linewidth=2, clip_on=False)
    for index, (_, raw, _) in enumerate(drawn.values()):
        if raw is not None:
            colour, _ = canvas.look(index)
            style = "steps-post" if raw.steps else "default"
            axes.plot(raw.at / size, raw.mean, color=colour, linewidth=0.7, alpha=0.35, drawstyle=style, zorder=1.5)
    axes.set_xlim(0, longest / size or 1.0)
    axes.grid(axis="y", color=canvas.GRID, linewidth=0.8)
    canvas.label(axes, label, title)
    return figure, axes, drawn


def _named(figure: Figure, axes: Axes, drawn: Mapping[str, Drawn], drawing: Drawing) -> Figure:
    """Mark the final value of each line, and write the names at the right edge or, if they are long, below."""
    lines = axes.get_lines()[: len(drawn)]
    x = np.array([np.asarray(line.get_xdata())[-1] for line in lines])
    y = np.array([each.end.mean for each in drawn.values()])
    low, high = axes.get_ylim()
    edge = axes.get_xlim()[1]
    points = 9 if drawing.width is None else canvas.PAPER_TEXT
    inches = 0.0075 * points * max(map(len, drawn))  # of the longest name
    beside = inches < WIDEST_NAME * figure.get_figwidth()
    apart = 0.022 * points / figure.get_figheight() * (high - low)
    heights = spread_out(np.nan_to_num(y, nan=low), apart, low, high)
    for name, line, end, value, height in zip(drawn, lines, x, y, heights, strict=True):
        colour = line.get_color()
        axes.plot([end], [value], marker="o", markersize=3, color=colour, clip_on=False)
        axes.plot([end, edge], [value, value], color=colour, linewidth=0.8, linestyle=(0, (1, 3)))  # it ends early
        if beside:
            axes.plot([edge, 1.03 * edge], [value, height], color=colour, linewidth=0.6, clip_on=False)
            place: dict[str, Any] = {
                "xytext": (2, 0),
                "textcoords": "offset points",
                "va": "center",
                "annotation_clip": False,
            }
            axes.annotate(name, (1.03 * edge, height), color=colour, fontsize=points, **place)
    if not beside:
        columns = max(1, int(figure.get_figwidth() / (inches + 0.5)))
        figure.set_figheight(figure.get_figheight() + 0.02 * points * math.ceil(len(drawn) / columns))
        below: dict[str, Any] = {"loc": "outside lower center", "ncols": columns, "frameon": False}
        figure.legend(lines, list(drawn), fontsize=points, labelcolor="linecolor", **below)
    return canvas.finish(figure, drawing)
