"""Heat maps of a sweep: the final metric over two swept settings, one map for each combination of the others."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedjax_async.config.grid import swept
from fedjax_async.engine.client_scores import smaller_is_better
from fedjax_async.results import figure as canvas
from fedjax_async.results import metrics, tables, tuning
from fedjax_async.results.figure import SCREEN, Drawing
from fedjax_async.results.metrics import FINAL
from fedjax_async.results.sweep_table import SweptRun, by_setting, columns_of, spread_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar
    from matplotlib.figure import Figure

MOST_CELLS = 400  # more cannot be read
MOST_FACETS = 24
NO_VALUE = "-"
LEGEND = 0.25  # inches, of the marks
LONGEST_LINE = 14  # characters of a name in one line
CHOSEN, BEST, ON_TEST = "chosen on validation", "best on test", "chosen on test: no validation part"
# Mark -> its look in the legend: frames for what was chosen, a star for what only the test set knows.
MARKS: dict[str, dict[str, Any]] = {
    CHOSEN: {"marker": "s", "markerfacecolor": "none", "markeredgecolor": canvas.PALETTE[1], "markersize": 9},
    BEST: {"marker": "*", "markerfacecolor": "white", "markeredgecolor": "black", "markersize": 7},
    ON_TEST: {"marker": "s", "markerfacecolor": "none", "markeredgecolor": canvas.PALETTE[3], "markersize": 9},
}
# The runs of a setting, its values by axis, its marks.
Group = tuple[Sequence[SweptRun], list[object], list[str]]


class Cells(NamedTuple):
    """The numbers of one map. Values of the settings without any run are left out."""

    rows: tuple[str, list[object]]  # name and values of a swept setting
    columns: tuple[str, list[object]]  # of another swept setting
    mean: np.ndarray  # float64[rows, columns], NaN where the sweep has no run
    std: np.ndarray  # float64[rows, columns], over seeds; NaN for one seed too
    title: str = ""  # the values of the other swept settings
    marks: Mapping[str, list[tuple[int, int]]] = {}  # a key of ``MARKS`` -> its cells, row and column


def _ordered(values: Sequence[object]) -> list[object]:
    """Distinct values: numbers by size, others in order of first use, None last."""
    found = [value for value in dict.fromkeys(values) if value is not None]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in found):
        found.sort()
    return found + ([None] if None in values else [])


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return NO_VALUE if value is None else str(value)


def cells(found: Sequence[SweptRun], metric: str, final: str = FINAL, roles: tuning.Roles | None = None) -> list[Cells]:
    """The mean final metric for each pair of values of two swept settings; one map for each combination of the others.

    Rows and columns are the two settings with the most values, in the order in which they are swept. Empty if fewer
    than two settings have several values, or if the maps would have too many cells to be read.

    Marked are, of each tuning (``tuning.tunings`` with these ``roles``), the setting that the validation part chose and
    the setting with the best mean on the test set. Without validation scores the test set chose, and a mark says so.
    """
    paths = [path for path in swept(each.point for each in found) if path != "seed"]
    marks = _marks(found, metric, final, roles)
    groups = [
        (group, list(group[0].point.shown(paths).values()), marks.get(index, []))
        for index, group in enumerate(by_setting(found).values())
    ]
    values = [_ordered([of_setting[axis] for _, of_setting, _ in groups]) for axis in range(len(paths))]
    several = [axis for axis in range(len(paths)) if len(values[axis]) > 1]
    if len(several) < 2:
        return []
    row, column = sorted(sorted(several, key=lambda axis: -len(values[axis]))[:2])
    others = [axis for axis in several if axis not in (row, column)]
    names = columns_of(found)
    combinations: dict[tuple[int, ...], list[Group]] = {}
    for each in groups:
        combinations.setdefault(tuple(values[axis].index(each[1][axis]) for axis in others), []).append(each)
    maps = []
    for chosen, members in sorted(combinations.items()):
        parts = (f"{names[paths[axis]]}={_text(values[axis][index])}" for axis, index in zip(others, chosen))
        edges = names[paths[row]], names[paths[column]]
        maps.append(_map(members, (row, column), values, edges, metric, final, ", ".join(parts)))
    finite = any(np.isfinite(each.mean).any() for each in maps)
    fits = sum(each.mean.size for each in maps) <= MOST_CELLS and len(maps) <= MOST_FACETS
    return maps if finite and fits else []


def _marks(found: Sequence[SweptRun], metric: str, final: str, roles: tuning.Roles | None) -> dict[int, list[str]]:
    """Index of a setting, as in ``by_setting`` -> its marks."""
    groups, marks = list(by_setting(found).values()), dict[int, list[str]]()
    for each in tuning.tunings(found, final, roles):
        if each.trials == 1:
            continue
        means = {index: spread_of(groups[index], metric, final).mean for index in each.order}
        known = {index: mean for index, mean in means.items() if np.isfinite(mean)}
        if each.part != "validation":
            marks.setdefault(each.order[0], []).append(ON_TEST)
        elif known:
            marks.setdefault(each.order[0], []).append(CHOSEN)
            best = (min if smaller_is_better(metric) else max)(known.values())
            for index in (index for index, mean in known.items() if mean == best):
                marks.setdefault(index, []).append(BEST)
    return marks


def _map(
    groups: Sequence[Group],
    axes: tuple[int, int],
    values: Sequence[list[object]],
    names: tuple[str, str],
    metric: str,
    final: str,
    title: str,
) -> Cells:
    """One map of these settings."""
    rows, columns = (
        [value for value in values[axis] if any(own[axis] == value for _, own, _ in groups)] for axis in axes
    )
    mean, std = np.full((2, len(rows), len(columns)), np.nan)
    marks: dict[str, list[tuple[int, int]]] = {}
    for group, own, its_marks in groups:
        cell = rows.index(own[axes[0]]), columns.index(own[axes[1]])
        mean[cell], std[cell], _ = spread_of(group, metric, final)
        for mark in its_marks:
            marks.setdefault(mark, []).append(cell)
    return Cells((names[0], rows), (names[1], columns), mean, std, title, marks)


class _FigureLayout(NamedTuple):
    """How a figure of several maps is laid out, in inches unless said otherwise."""

    across: int  # maps side by side
    width: float
    height: float
    text: float  # points, in the cells
    below: bool  # whether the colour scale is below the maps


def heat_map(maps: Sequence[Cells], metric: str, final: str = FINAL, *, drawing: Drawing = SCREEN) -> Figure:
    """All maps of :func:`cells`, with one colour scale; a cell shows its mean and its deviation over seeds.

    A frame is around the setting that was chosen on validation, a star in the one that is best on test.
    If neighbouring maps have the same rows (or columns), the names are written only at the leftmost (lowest) map.
    """
    finite = np.concatenate([each.mean[np.isfinite(each.mean)] for each in maps])
    decimals = 1 if metric == "accuracy" else tables.two_digits(finite, 2)
    sizes = _sizes(maps, drawing, max(decimals, 2))
    across, down = sizes.across, math.ceil(len(maps) / sizes.across)
    figure = canvas.require_matplotlib()(
        figsize=(sizes.width, sizes.height), dpi=200, facecolor="white", layout="constrained"
    )
    grid = figure.subplots(down, across, squeeze=False)
    low, high = finite.min(), finite.max()
    low, high = (low - 0.5, high + 0.5) if low == high else (low, high)  # one colour in all maps, too
    for index, (axes, each) in enumerate(itertools.zip_longest(grid.ravel(), maps)):
        if each is None:
            axes.remove()
            continue
        shown = np.ma.masked_invalid(each.mean)
        image = axes.imshow(shown, cmap="cividis", aspect="auto", origin="lower", vmin=low, vmax=high)
        _number_cells(axes, each, decimals, (low + high) / 2, sizes.text)
        _mark_cells(axes, each)
        beside = index % across > 0 and maps[index - 1].rows == each.rows
        above = index + across < len(maps) and maps[index + across].columns == each.columns
        _name_edges(axes, each, rows=not beside, columns=not above)
    every = [axes for axes in grid.ravel() if axes.figure is not None]
    style: dict[str, Any] = {"aspect": sizes.height / 0.15}
    if sizes.below:  # 0.1 inches high, 0.1 below the maps
        style = {"location": "bottom", "fraction": 0.1 / sizes.height, "pad": 0.1 / sizes.height, "aspect": 30}
    bar = figure.colorbar(image, ax=every, **style)
    bar.outline.set_visible(False)
    title = f"test {metrics.final_title(metric, final)}"
    bar.set_label(title if sizes.below else title.replace(", ", ",\n"), fontsize=10, color=canvas.INK)
    bar.ax.tick_params(labelsize=9, length=0, colors=canvas.INK)
    marks = [mark for mark in MARKS if any(mark in each.marks for each in maps)]
    if marks:
        from matplotlib.lines import Line2D  # noqa: PLC0415 (an extra)

        handles = [Line2D([], [], linestyle="none", markeredgewidth=_width(mark), **MARKS[mark]) for mark in marks]
        canvas.legend_below(figure, handles, [_named(mark, metric) for mark in marks], drawing, len(marks), fontsize=8)
        figure.set_figheight(figure.get_figheight() + LEGEND)
    canvas.finish(figure, drawing)
    if not sizes.below:
        _fit_label(figure, bar)
    return figure


def _fit_label(figure: Figure, bar: Colorbar) -> None:
    """Make the figure higher if long names below the maps leave a colour scale that is shorter than its label."""
    figure.draw_without_rendering()
    missing = bar.ax.yaxis.label.get_window_extent().height - bar.ax.get_window_extent().height
    if missing > 0:
        figure.set_figheight(figure.get_figheight() + missing / figure.dpi)


def _sizes(maps: Sequence[Cells], drawing: Drawing, decimals: int) -> _FigureLayout:
    """As many maps side by side as fit into 12 inches or a paper's width, at most ceil(sqrt(number of maps))."""
    rows, columns = (max(each.mean.shape[axis] for each in maps) for axis in (0, 1))
    paper = drawing.width is not None
    cell, letter = (0.42, 0.058) if paper else (0.58, 0.07)
    below = drawing.width == "column"
    lines = [line for each in maps for value in each.rows[1] for line in _wrapped(_text(value)).split("\n")]
    names = 0.45 + letter * max(map(len, lines))
    once = all(each.rows == maps[0].rows for each in maps)
    titles = [line for each in maps for line in each.title.split(", ")]
    one = max(cell * max(columns, 1 if paper else 3), 0.062 * max(map(len, titles))) + 0.1
    bar = 0.1 if below else 1.2
    limit = canvas.WIDTHS[drawing.width] if drawing.width is not None else 13.2

    def width(across: int) -> float:
        return bar + across * one + (1 if once else across) * names

    most = min(len(maps), math.ceil(math.sqrt(len(maps))))
    across = next((count for count in range(most, 0, -1) if width(count) <= limit), 1)
    down = math.ceil(len(maps) / across)
    total = limit if paper else width(across)
    of_cell = (total - bar - (1 if once else across) * names) / across / columns
    texts = [_cell_text(each, (row, column), decimals) for each in maps for row, column in np.ndindex(each.mean.shape)]
    longest = max(len(line) for text in texts for line in text.split("\n")) + 1
    text = min(8.0, max(3.5, 72 * of_cell / (0.62 * longest)))
    high = 0.7 + 0.15 * len(maps[0].title.split(", ")) * bool(maps[0].title) + 0.42 * max(rows, 1 if paper else 3)
    return _FigureLayout(across, total, down * high + (0.9 if below else 0.5), text, below)


def _wrapped(name: str) -> str:
    """A long name in several lines, broken after ``@``, ``:``, ``,`` or ``+``.

    >>> _wrapped("fedavg"), _wrapped("fedbuff@buffer:size=3")
    ('fedavg', 'fedbuff@\\nbuffer:size=3')
    """
    parts, lines = re.findall(r"[^@:,+]*[@:,+]?", name), [""]
    for part in parts:
        if lines[-1] and len(lines[-1] + part) > LONGEST_LINE:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _cell_text(each: Cells, cell: tuple[int, int], decimals: int) -> str:
    mean, std = each.mean[cell], each.std[cell]
    if not np.isfinite(mean):
        return NO_VALUE
    return f"{mean:.{decimals}f}" + (f"\n± {std:.{decimals}f}" if np.isfinite(std) else "")


def _number_cells(axes: Axes, each: Cells, decimals: int, middle: float, size: float) -> None:
    """Write the numbers into the cells of one map; ``middle``: of the colour scale, ``size``: in points."""
    for cell, value in np.ndenumerate(each.mean):
        text = _cell_text(each, (cell[0], cell[1]), decimals)
        ink = "white" if value < middle else "black"  # cividis goes from dark to light
        colour = canvas.FAINT if text == NO_VALUE else ink
        axes.text(cell[1], cell[0], text, ha="center", va="center", fontsize=size, color=colour)


def _named(mark: str, metric: str) -> str:
    return f"{mark} ({metric})" if mark == BEST else mark


def _width(mark: str) -> float:
    """Points of a mark's edge."""
    return 0.7 if mark == BEST else 2.0


def _mark_cells(axes: Axes, each: Cells) -> None:
    """Frames and stars; a star is at the upper right corner of its cell, beside the number."""
    from matplotlib.patches import Rectangle  # noqa: PLC0415 (an extra)

    for mark, places in each.marks.items():
        look = MARKS[mark]
        for row, column in places:
            if mark == BEST:
                axes.plot(column + 0.36, row + 0.33, linestyle="none", markeredgewidth=_width(mark), **look)
                continue
            corner, edge = (column - 0.47, row - 0.46), look["markeredgecolor"]
            axes.add_patch(Rectangle(corner, 0.94, 0.92, fill=False, edgecolor=edge, linewidth=_width(mark)))


def _name_edges(axes: Axes, each: Cells, *, rows: bool, columns: bool) -> None:
    """Write the title of one map and, if ``rows`` or ``columns``, the values of the settings at its edges."""
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0, labelsize=9, colors=canvas.INK)
    labels = [_text(value) for value in each.columns[1]]
    tilt: dict[str, Any] = {"rotation": 30, "ha": "right"} if max(map(len, labels)) > 7 else {}
    axes.set_xticks(range(len(labels)), canvas.verbatim(labels) if columns else [""] * len(labels), **tilt)
    names = [_wrapped(_text(value)) if rows else "" for value in each.rows[1]]
    axes.set_yticks(range(len(names)), canvas.verbatim(names))
    axes.set_title("\n".join(canvas.verbatim(each.title.split(", "))), fontsize=8, color=canvas.INK)
    canvas.label(axes, each.columns[0] if columns else "", each.rows[0] if rows else "")
