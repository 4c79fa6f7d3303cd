"""Heat maps of a sweep: the final metric over two swept settings, one map for each combination of the others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedjax_async.config.grid import swept
from fedjax_async.config.paths import values_of
from fedjax_async.results import figure as canvas
from fedjax_async.results import metrics
from fedjax_async.results.figure import SCREEN, Drawing
from fedjax_async.results.metrics import FINAL
from fedjax_async.results.sweep_table import Record, by_setting, columns_of, spread_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_CELLS = 400  # more cannot be read
MOST_FACETS = 24
DECIMALS = {"accuracy": 1, "loss": 2}
NO_VALUE = "-"


class Cells(NamedTuple):
    """The numbers of one map. Values without a run in it are left out."""

    rows: tuple[str, list[Any]]  # name and values of a swept setting
    columns: tuple[str, list[Any]]  # of another swept setting
    mean: np.ndarray  # float64[rows, columns], NaN where the sweep has no run
    std: np.ndarray  # float64[rows, columns], over seeds; NaN for one seed too
    title: str = ""  # the values of the other swept settings


def _ordered(values: Sequence[Any]) -> list[Any]:
    """Different values: numbers by size, texts in order of first use, None last."""
    found = [value for value in dict.fromkeys(values) if value is not None]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in found):
        found.sort()
    return found + ([None] if None in values else [])


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return NO_VALUE if value is None else str(value)


def cells(found: Sequence[Record], metric: str, final: str = FINAL) -> list[Cells]:
    """The mean final metric for each pair of values of two swept settings, a map for each combination of the others.

    Rows and columns are the two settings with the most values, in the order in which they are swept. Empty if fewer
    than two settings have several values, or if the maps would have too many cells to be read.
    """
    paths = [path for path in swept(each.point for each in found) if path != "seed"]
    grouped = by_setting(found).values()
    groups = [(group, list(values_of(group[0].point.settings, paths).values())) for group in grouped]
    values = [_ordered([of_setting[axis] for _, of_setting in groups]) for axis in range(len(paths))]
    several = [axis for axis in range(len(paths)) if len(values[axis]) > 1]
    if len(several) < 2:
        return []
    row, column = sorted(sorted(several, key=lambda axis: -len(values[axis]))[:2])
    others = [axis for axis in several if axis not in (row, column)]
    names = columns_of(found)
    combinations: dict[tuple[int, ...], list[tuple[Sequence[Record], list[Any]]]] = {}
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


def _map(
    groups: Sequence[tuple[Sequence[Record], list[Any]]],
    axes: tuple[int, int],
    values: Sequence[list[Any]],
    names: tuple[str, str],
    metric: str,
    final: str,
    title: str,
) -> Cells:
    """One map of the settings ``groups``, each with its values by axis."""
    rows, columns = ([value for value in values[axis] if any(own[axis] == value for _, own in groups)] for axis in axes)
    mean, std = np.full((2, len(rows), len(columns)), np.nan)
    for group, own in groups:
        cell = rows.index(own[axes[0]]), columns.index(own[axes[1]])
        mean[cell], std[cell], _ = spread_of(group, metric, final)
    return Cells((names[0], rows), (names[1], columns), mean, std, title)


def heat_map(maps: Sequence[Cells], metric: str, final: str = FINAL, *, drawing: Drawing = SCREEN) -> Figure:
    """Each map of :func:`cells` with one scale of colours; a cell shows its mean and its deviation over seeds."""
    across = max(1, min(len(maps), math.ceil(math.sqrt(len(maps))), int(12 / _inches(maps)[0])))
    down = math.ceil(len(maps) / across)
    width, height = _inches(maps)
    figure = canvas.empty(1.2 + across * width, 0.5 + down * height, drawing)
    grid = figure.subplots(down, across, squeeze=False)
    finite = np.concatenate([each.mean[np.isfinite(each.mean)] for each in maps])
    low, high = finite.min(), finite.max()
    for axes, each in itertools.zip_longest(grid.ravel(), maps):
        if each is None:
            axes.remove()
            continue
        shown = np.ma.masked_invalid(each.mean)
        image = axes.imshow(shown, cmap="cividis", aspect="auto", origin="lower", vmin=low, vmax=high)
        _label_cells(axes, each, DECIMALS[metric], (low + high) / 2)
    bar = figure.colorbar(image, ax=[axes for axes in grid.ravel() if axes.figure is not None])
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.set_label(f"test {metrics.final_title(metric, final)}".replace(", ", ",\n"), fontsize=10, color=canvas.INK)
    bar.ax.tick_params(labelsize=9, length=0, colors=canvas.INK)
    return canvas.finish(figure, drawing)


def _inches(maps: Sequence[Cells]) -> tuple[float, float]:
    """The width and height that the largest map needs."""
    rows, columns = (max(each.mean.shape[axis] for each in maps) for axis in (0, 1))
    names = max(len(_text(value)) for each in maps for value in each.rows[1])
    lines = maps[0].title.count(", ") + bool(maps[0].title)
    return 0.6 + 0.07 * names + 0.58 * max(columns, 3), 0.7 + 0.15 * lines + 0.42 * max(rows, 3)


def _label_cells(axes: Axes, each: Cells, decimals: int, middle: float) -> None:
    """The values of the settings at the edges and the numbers in the cells of one map."""
    (row_name, rows), (column_name, columns) = each.rows, each.columns
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0, labelsize=9, colors=canvas.INK)
    labels = [_text(value) for value in columns]
    tilt: dict[str, Any] = {"rotation": 30, "ha": "right"} if max(map(len, labels)) > 7 else {}
    axes.set_xticks(range(len(columns)), labels, **tilt)
    axes.set_yticks(range(len(rows)), [_text(value) for value in rows])
    for (row, column), value in np.ndenumerate(each.mean):
        ink = "white" if value < middle else "black"  # cividis goes from dark to light
        text = f"{value:.{decimals}f}" if np.isfinite(value) else NO_VALUE
        text += f"\n± {each.std[row, column]:.{decimals}f}" if np.isfinite(each.std[row, column]) else ""
        colour = canvas.FAINT if text == NO_VALUE else ink
        axes.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
    axes.set_title(each.title.replace(", ", "\n"), fontsize=8, color=canvas.INK)
    canvas.label(axes, column_name, row_name)
