"""Curves of several methods: test accuracy or loss against time, updates, server steps or bytes, over seeds."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from fedjax_async.base import check
from fedjax_async.results import figure as canvas
from fedjax_async.results import metrics
from fedjax_async.results.comparisons import finals_of
from fedjax_async.results.figure import SCREEN, Drawing
from fedjax_async.results.measured import shown_unit
from fedjax_async.results.metrics import FINAL, SeedCurve, Spread
from fedjax_async.results.worlds import axis_title, differences
from fedjax_async.types import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDEST_NAME = 0.4  # share of the figure's width for names beside the lines; longer names go below
OVER = (0, (3, 5))  # dashes of a curve that lies on another one
MOST_DOTS = 100  # points of a line that the page shows as dots
MOST_TITLE = 58  # characters in a line above the curves
MOST_BANDS = 6  # methods; the bands of more would cover each other


class _Drawn(NamedTuple):
    """The curves and the final value of one method."""

    curve: SeedCurve  # running mean over as many evaluations as the final value averages
    raw: SeedCurve | None  # without the running mean; None if it is the same
    end: Spread  # the final value, as in the tables


def spread_out(wanted: np.ndarray, gap: float, low: float, high: float) -> np.ndarray:
    """Label positions at least ``gap`` apart within [low, high], as near to ``wanted`` as possible (least squares).

    After subtracting k gaps from the k-th label, the labels need only be in order, as isotonic regression makes them.
    If they do not fit into [low, high], they are spread evenly.
    """
    gap = min(gap, (high - low) / max(len(wanted) - 1, 1))
    from scipy.optimize import isotonic_regression  # noqa: PLC0415 (a quarter of a second)

    order = np.argsort(wanted, kind="stable")
    offsets = gap * np.arange(len(wanted))
    placed = isotonic_regression(wanted[order] - offsets).x
    result = np.empty(len(wanted))
    result[order] = np.clip(placed, low, high - offsets[-1]) + offsets
    return result


def accuracy_curve(
    runs: Mapping[str, Sequence[Run]], x: str | None = None, *, final: str = FINAL, drawing: Drawing = SCREEN
) -> Figure:
    """Test accuracy against ``x``: ``time`` (virtual), ``update``, ``step``, ``bytes`` or ``energy``.

    By default that of ``drawing``, which is the time.

    ``runs`` maps each name to its runs, one per seed. The bold line is the mean over seeds of the running mean over as
    many evaluations as ``final`` averages (see :func:`fedjax_async.results.metrics.mean_curve`). The faint line is the
    mean without the running mean; the band is one standard deviation on either side. The marker and the bar at the end
    are the final value and its deviation, as in the tables. A curve that equals an earlier one is dashed, so that both
    are seen. Bands and bars of accuracies end at 0 and 100 %. A line with steps means that the seeds were evaluated at
    different times. Names are at the ends of the lines, where thin lines lead to them, or below the axes if they are
    long.

    With more than six methods there are no bands and faint lines; the bars are side by side at the right edge, in the
    order of the final values. Lines have dashes from the eighth on and markers from the ninth on; beside each name is
    then a sample of its line.
    """
    return measured_curve(runs, "accuracy", x, final=final, drawing=drawing)


def loss_curve(
    runs: Mapping[str, Sequence[Run]], x: str | None = None, *, final: str = FINAL, drawing: Drawing = SCREEN
) -> Figure:
    """Test loss against ``x``, drawn as in :func:`accuracy_curve`; also for targets without classes."""
    return measured_curve(runs, "loss", x, final=final, drawing=drawing)


def _drawn(seeds: Sequence[Run], x: str, column: str, final: str) -> _Drawn:
    factor = metrics.percent(column)
    averaged = any(metrics.window(final, len(run.evaluations[column])) > 1 for run in seeds)
    return _Drawn(
        metrics.mean_curve(seeds, x, column, factor, final),
        metrics.mean_curve(seeds, x, column, factor) if averaged else None,
        metrics.spread(finals_of(seeds, column, final)),
    )


@np.errstate(over="ignore", invalid="ignore")  # losses of a diverged run, as far as they can be drawn
def measured_curve(
    runs: Mapping[str, Sequence[Run]],
    column: str,
    x: str | None = None,
    *,
    final: str = FINAL,
    drawing: Drawing = SCREEN,
    most_seeds: int = 0,
) -> Figure:
    """Any column of the evaluations against ``x``, drawn as in :func:`accuracy_curve`.

    ``most_seeds``: for the HTML report, draw the curves of so many single seeds of each name too, and all bands.
    """
    metrics.require_runs(runs)
    x = drawing.x if x is None else x
    with check.called({"unit": "x"}):
        drawn = {name: _drawn(seeds, x, column, final) for name, seeds in runs.items()}
    longest = max(float(each.curve.at[-1]) for each in drawn.values())
    every = [run for seeds in runs.values() for run in seeds]
    size, label = canvas.axis(shown_unit(x, every), longest)
    few = len(drawn) <= MOST_BANDS
    banded = few or most_seeds > 0
    names = 0.085 * max(map(len, runs)) + (0.0 if few else 0.8)  # inches for names and bars beside the axes
    figure, axes = canvas.new(5.2 + names, 3.6, drawing)
    covered = _covering(drawn) if few else []
    for index, (name, (curve, _, _)) in enumerate(drawn.items()):
        at, style, colour = curve.at / size, "steps-post" if curve.steps else "default", canvas.line_style(index)[0]
        marks: dict[str, Any] = {"markevery": (0.02 * (index % 5), 0.1), "linewidth": 1.6 if few else 1.3}
        look = _line_style(index) | ({"linestyle": OVER, "linewidth": 2.2} if index in covered else {})
        (line,) = axes.plot(at, curve.mean, drawstyle=style, **(marks | look))
        group = {"name": name, "legendgroup": str(index)}
        several = len(runs[name]) > 1
        text = {"hovertemplate": "%{y:.4g}" + (" ± %{customdata:.3g}" if several else "") + " at %{x:,.6~g}"}
        more = {"customdata": curve.std, "dash": look["linestyle"], "meta": {"part": "mean"}}
        more |= {"mode": "lines+markers", "marker": {"size": 4 if len(at) <= MOST_DOTS else 1}}
        canvas.mark(axes, line, **group, **text, **more)
        if banded:
            low, high = metrics.band(curve.mean, curve.std, column)
            step: Literal["post"] | None = "post" if curve.steps else None
            area = axes.fill_between(at, low, high, color=colour, step=step, alpha=0.15, linewidth=0)
            if several:
                canvas.mark(axes, area, **group, showlegend=False, meta={"part": "band"})
    for index, (name, (_, raw, _)) in enumerate(drawn.items()):
        if raw is not None and few:
            colour, style = canvas.line_style(index)[0], "steps-post" if raw.steps else "default"
            (line,) = axes.plot(
                raw.at / size, raw.mean, color=colour, drawstyle=style, linewidth=0.7, alpha=0.35, zorder=1.5
            )
            about = {"opacity": 0.35, "showlegend": False, "hovertemplate": "%{y:.4g} at %{x:,.6~g}"}
            canvas.mark(axes, line, name=name, legendgroup=str(index), meta={"part": "raw"}, **about)
        if len(runs[name]) > 1:
            _draw_seeds(axes, runs[name][:most_seeds], (x, column, size), index, name)
    axes.set_xlim(0, longest / size or 1.0)
    axes.grid(axis="y", color=canvas.GRID, linewidth=0.8)
    canvas.label(axes, label, axis_title(column, every))
    bars_at = _final_values(axes, drawn, column)
    (lowest, highest), (low, high) = metrics.limits(column), axes.get_ylim()
    axes.set_ylim(max(low, lowest - 1.0), min(high, highest + 1.0))
    _names(figure, axes, drawn, bars_at, drawing)
    if different := differences(runs):
        lines = canvas.verbatim(textwrap.wrap(different, MOST_TITLE))
        axes.set_title("\n".join(lines), loc="left", fontsize=8, color=canvas.PALETTE[1])
    if not few:  # bars and names beside the axes are in data units: the layout needs a second pass
        figure.draw_without_rendering()
    return canvas.finish(figure, drawing)


def _draw_seeds(axes: Axes, seeds: Sequence[Run], axis: tuple[str, str, float], index: int, name: str) -> None:
    """The curve of each of these seeds, for the page alone; ``axis``: unit, column, and divisor of the unit."""
    x, column, size = axis
    colour, dash = canvas.line_style(index)
    for run in seeds:
        values = metrics.percent(column) * np.asarray(run.evaluations[column], np.float64)
        at, number = metrics.progress_in(run, x) / size, str(run.settings.get("seed", ""))
        (line,) = axes.plot(at, values, color=colour, linestyle=dash, linewidth=0.8)
        about = {"name": f"{name}, seed {number}", "meta": {"part": "seed", "seed": number}, "dash": dash}
        hover = {"hovertemplate": "%{y:.4g} at %{x:,.6~g}", "opacity": 0.6, "showlegend": False}
        canvas.mark(axes, line, legendgroup=str(index), **about, **hover)


def _covering(drawn: Mapping[str, _Drawn]) -> list[int]:
    """The curves that equal an earlier one in every point: drawn with gaps, through which the earlier one is seen."""
    curves = [each.curve for each in drawn.values()]

    def same(one: SeedCurve, other: SeedCurve) -> bool:
        return np.array_equal(one.at, other.at) and np.array_equal(one.mean, other.mean, equal_nan=True)

    return [k for k, curve in enumerate(curves) if any(same(curve, earlier) for earlier in curves[:k])]


def _line_style(index: int) -> dict[str, Any]:
    """Colour, dash and marker of the ``index``-th line."""
    colour, dash = canvas.line_style(index)
    return {"color": colour, "linestyle": dash, "marker": canvas.marker(index), "markersize": 4}


def _final_values(axes: Axes, drawn: Mapping[str, _Drawn], column: str) -> np.ndarray:
    """Marker and bar of each final value: at its line's end or, for many, side by side; returns x, float64[names]."""
    lines = axes.get_lines()[: len(drawn)]
    ends = np.array([np.asarray(line.get_xdata())[-1] for line in lines])
    y = np.array([each.end.mean for each in drawn.values()])
    edge, x = axes.get_xlim()[1], ends
    if len(drawn) > MOST_BANDS:
        rank = np.argsort(np.argsort(-y, kind="stable"), kind="stable")
        x = edge * (1.015 + min(0.012, 0.2 / len(drawn)) * rank)
    for line, end, at, each in zip(lines, ends, x, drawn.values(), strict=True):
        colour, value = line.get_color(), each.end.mean
        low, high = metrics.band(value, each.end.std, column)
        axes.vlines([at], [low], [high], color=colour, alpha=0.5, linewidth=2, clip_on=False)
        axes.plot([at], [value], marker="o", markersize=3, color=colour, clip_on=False)
        until = max(at, edge)  # a dotted line where a curve ends early
        axes.plot([end, until], [value, value], color=colour, linewidth=0.8, linestyle=(0, (1, 3)), clip_on=False)
    return x


def _names(figure: Figure, axes: Axes, drawn: Mapping[str, _Drawn], bars_at: np.ndarray, drawing: Drawing) -> None:
    """Write the names at the right edge or, if they are long, below; with a sample of each line if colours repeat."""
    lines = axes.get_lines()[: len(drawn)]
    y = np.array([each.end.mean for each in drawn.values()])
    low, high = axes.get_ylim()
    edge = axes.get_xlim()[1]
    points = 9 if drawing.width is None else canvas.PAPER_TEXT
    inches = 0.0075 * points * max(map(len, drawn))  # of the longest name
    if inches >= WIDEST_NAME * figure.get_figwidth():
        columns = max(1, int(figure.get_figwidth() / (inches + 0.5)))
        figure.set_figheight(figure.get_figheight() + 0.02 * points * math.ceil(len(drawn) / columns))
        canvas.legend_below(figure, lines, list(drawn), drawing, columns, labelcolor="linecolor")
        return
    apart = 0.022 * points / figure.get_figheight() * (high - low)
    heights = spread_out(np.nan_to_num(y, nan=low), apart, low, high)
    start = max(edge, float(bars_at.max())) + 0.03 * edge
    piece = 0.07 * edge if len(drawn) > len(canvas.PALETTE) else 0.0
    for index, (name, at, value, height) in enumerate(zip(drawn, np.maximum(bars_at, edge), y, heights, strict=True)):
        line_style = _line_style(index)
        axes.plot([at, start], [value, height], color=line_style["color"], linewidth=0.6, clip_on=False)
        if piece:
            across = start + piece * np.array([0.0, 0.5, 1.0])
            axes.plot(across, np.full(3, height), **line_style, markevery=[1], clip_on=False, linewidth=1.6)
        axes.annotate(
            canvas.verbatim([name])[0],
            (start + piece, height),
            xytext=(2, 0),
            textcoords="offset points",
            va="center",
            annotation_clip=False,
            fontsize=points,
            color=line_style["color"],
        )
