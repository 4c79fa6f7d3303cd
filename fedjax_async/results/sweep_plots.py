"""Pictures of a sweep: a curve a setting with its band over seeds, and a heat map of two swept numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedjax_async.config.grid import swept
from fedjax_async.config.paths import value_of
from fedjax_async.results import figure as canvas
from fedjax_async.results.plots import accuracy_curve, loss_curve
from fedjax_async.results.sweep_table import Record, by_setting, columns_of, has_accuracy, rank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_CURVES = 10  # more cannot be told apart
MOST_CELLS = 400  # more cannot be read
METRICS: dict[str, tuple[str, float, str, int]] = {
    # column, factor, name, decimals
    "accuracy": ("final_accuracy", 100.0, "final test accuracy (%)", 1),
    "loss": ("final_loss", 1.0, "final test loss", 2),
}
DRAW = {"accuracy": accuracy_curve, "loss": loss_curve}


class Cells(NamedTuple):
    """A heat map's numbers."""

    rows: tuple[str, list[float]]  # name and values of the first swept number
    columns: tuple[str, list[float]]  # of the second
    mean: np.ndarray  # float64[rows, columns], NaN where the sweep has no such setting


def curves(found: Sequence[Record], metric: str, x: str = "time") -> Figure:
    """Mean and standard deviation over seeds of each setting; of many settings, the best ``MOST_CURVES``."""
    grouped = by_setting(found)
    names = list(grouped)
    order = rank(found)
    shown = sorted(order.order[:MOST_CURVES])
    figure = DRAW[metric]({names[place]: [each.run for each in grouped[names[place]]] for place in shown}, x)
    if len(shown) < len(names):
        title = f"best {len(shown)} of {len(names)} settings by {order.metric.removesuffix(' (%)')}"
        figure.axes[0].set_title(title, loc="left", fontsize=9, color=canvas.INK)
    return figure


def cells(found: Sequence[Record], metric: str) -> Cells | None:
    """The mean final metric by the two swept numbers; None unless just two settings are swept, both numbers."""
    paths = [path for path in swept(each.point for each in found) if path != "seed"]
    values = [[value_of(each.point.settings, path) for path in paths] for each in found]
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for row in values for v in row)
    if len(paths) != 2 or not numeric:
        return None
    first, second = (sorted({row[axis] for row in values}) for axis in (0, 1))
    if len(first) < 2 or len(second) < 2 or len(first) * len(second) > MOST_CELLS:
        return None
    column, factor, _, _ = METRICS[metric]
    mean = np.full((len(first), len(second)), np.nan)
    for group in by_setting(found).values():
        place = tuple(value_of(group[0].point.settings, path) for path in paths)
        where = first.index(place[0]), second.index(place[1])
        mean[where] = factor * np.mean([each.numbers[column] for each in group])
    if not np.isfinite(mean).any():
        return None
    names = columns_of(found)
    return Cells((names[paths[0]], first), (names[paths[1]], second), mean)


def heat_map(grid: Cells, metric: str) -> Figure:
    """Final metric over two swept numbers, means over seeds; each cell says its number."""
    _, _, title, decimals = METRICS[metric]
    (row_name, rows), (column_name, columns) = grid.rows, grid.columns
    figure, axes = canvas.new(1.6 + 0.55 * max(len(columns), 4), 1.1 + 0.36 * max(len(rows), 4))
    image = axes.imshow(np.ma.masked_invalid(grid.mean), cmap="cividis", aspect="auto", origin="lower")
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0)
    axes.set_xticks(range(len(columns)), [f"{value:g}" for value in columns])
    axes.set_yticks(range(len(rows)), [f"{value:g}" for value in rows])
    finite = grid.mean[np.isfinite(grid.mean)]
    middle = (finite.min() + finite.max()) / 2
    for (row, column), value in np.ndenumerate(grid.mean):
        ink = "white" if value < middle else "black"  # cividis runs from dark to light
        text = f"{value:.{decimals}f}" if np.isfinite(value) else "-"
        axes.text(column, row, text, ha="center", va="center", fontsize=8, color=ink if text != "-" else canvas.FAINT)
    canvas.label(axes, column_name, row_name)
    bar = figure.colorbar(image, ax=axes)
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.set_label(title, fontsize=10, color=canvas.INK)
    bar.ax.tick_params(labelsize=9, length=0, colors=canvas.INK)
    return figure


def pictures(found: Sequence[Record]) -> Mapping[str, Figure]:
    """File name -> picture: curves a metric, and heat maps where two numbers were swept."""
    drawn: dict[str, Figure] = {}
    for metric in ("accuracy", "loss") if has_accuracy(found) else ("loss",):
        drawn[f"{metric}.png"] = curves(found, metric)
        grid = cells(found, metric)
        if grid is not None:
            drawn[f"{metric}_map.png"] = heat_map(grid, metric)
    return drawn
