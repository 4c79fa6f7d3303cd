"""The report on a sweep: tables, curves, heat maps and the best settings, written into its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedjax_async import disk
from fedjax_async.config.grid import swept
from fedjax_async.config.paths import value_of
from fedjax_async.results import figure as canvas
from fedjax_async.results import tables
from fedjax_async.results.figure import save_figure
from fedjax_async.results.plots import accuracy_curve, loss_curve
from fedjax_async.results.sweep_table import (
    Record,
    by_setting,
    columns_of,
    decimals_of,
    has_accuracy,
    rank,
    records,
    setting_rows,
    spread_of,
    write_tables,
)
from fedjax_async.results.sweeps import Sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 5  # best settings
NO_PARQUET = "no Parquet files: they need pyarrow, pip install 'fedjax-async[sweep]'"
MOST_CURVES = 10  # more cannot be told apart
MOST_CELLS = 400  # more cannot be read
METRICS: dict[str, tuple[str, float, str, int]] = {
    # column, factor, name, decimals
    "accuracy": ("final_accuracy", 100.0, "final test accuracy (%)", 1),
    "loss": ("final_loss", 1.0, "final test loss", 2),
}
DRAW = {"accuracy": accuracy_curve, "loss": loss_curve}


class Cells(NamedTuple):
    """The numbers of a heat map."""

    rows: tuple[str, list[float]]  # name and values of the first swept setting
    columns: tuple[str, list[float]]  # of the second swept setting
    mean: np.ndarray  # float64[rows, columns], NaN where the sweep has no run
    std: np.ndarray  # float64[rows, columns], over seeds; NaN for one seed too


def curves(found: Sequence[Record], metric: str, x: str = "time") -> Figure:
    """Mean and standard deviation over seeds of each setting, or of the best ``MOST_CURVES`` settings."""
    grouped = by_setting(found)
    names = list(grouped)
    ranked = rank(found)
    shown = [names[index] for index in sorted(ranked.order[:MOST_CURVES])]
    figure = DRAW[metric]({name: [each.run for each in grouped[name]] for name in shown}, x)
    if len(shown) < len(names):
        title = f"best {len(shown)} of {len(names)} settings by {ranked.metric.removesuffix(' (%)')}"
        figure.axes[0].set_title(title, loc="left", fontsize=9, color=canvas.INK)
    return figure


def cells(found: Sequence[Record], metric: str) -> Cells | None:
    """The mean final metric for each pair of values; None unless exactly two settings are swept, both numeric."""
    paths = [path for path in swept(each.point for each in found) if path != "seed"]
    values = [[value_of(each.point.settings, path) for path in paths] for each in found]
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for row in values for v in row)
    if len(paths) != 2 or not numeric:
        return None
    first, second = (sorted({row[axis] for row in values}) for axis in (0, 1))
    if len(first) < 2 or len(second) < 2 or len(first) * len(second) > MOST_CELLS:
        return None
    column, factor, _, _ = METRICS[metric]
    mean, std = np.full((2, len(first), len(second)), np.nan)
    for group in by_setting(found).values():
        row, column_value = (value_of(group[0].point.settings, path) for path in paths)
        cell = first.index(row), second.index(column_value)
        spread = spread_of(group, column, factor)
        mean[cell], std[cell] = spread.mean, spread.std
    if not np.isfinite(mean).any():
        return None
    names = columns_of(found)
    return Cells((names[paths[0]], first), (names[paths[1]], second), mean, std)


def heat_map(grid: Cells, metric: str) -> Figure:
    """The mean final metric over two swept numbers; each cell shows its mean and its deviation over seeds."""
    _, _, title, decimals = METRICS[metric]
    (row_name, rows), (column_name, columns) = grid.rows, grid.columns
    figure, axes = canvas.new(1.6 + 0.58 * max(len(columns), 4), 1.1 + 0.42 * max(len(rows), 4))
    image = axes.imshow(np.ma.masked_invalid(grid.mean), cmap="cividis", aspect="auto", origin="lower")
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0)
    axes.set_xticks(range(len(columns)), [f"{value:g}" for value in columns])
    axes.set_yticks(range(len(rows)), [f"{value:g}" for value in rows])
    finite = grid.mean[np.isfinite(grid.mean)]
    middle = (finite.min() + finite.max()) / 2
    for (row, column), value in np.ndenumerate(grid.mean):
        ink = "white" if value < middle else "black"  # cividis goes from dark to light
        text = f"{value:.{decimals}f}" if np.isfinite(value) else "-"
        text += f"\n± {grid.std[row, column]:.{decimals}f}" if np.isfinite(grid.std[row, column]) else ""
        axes.text(column, row, text, ha="center", va="center", fontsize=8, color=ink if text != "-" else canvas.FAINT)
    canvas.label(axes, column_name, row_name)
    bar = figure.colorbar(image, ax=axes)
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.set_label(title, fontsize=10, color=canvas.INK)
    bar.ax.tick_params(labelsize=9, length=0, colors=canvas.INK)
    return figure


def pictures(found: Sequence[Record]) -> Mapping[str, Figure]:
    """File name -> picture: curves of each metric, and heat maps if two numbers were swept."""
    drawn: dict[str, Figure] = {}
    for metric in ("accuracy", "loss") if has_accuracy(found) else ("loss",):
        drawn[f"{metric}.png"] = curves(found, metric)
        grid = cells(found, metric)
        if grid is not None:
            drawn[f"{metric}_map.png"] = heat_map(grid, metric)
    return drawn


def best(found: Sequence[Record], target: float | None = None) -> str:
    """The best settings as a paragraph and a table, with the metric that ranks them."""
    ranked = rank(found)
    rows = setting_rows(found, target)
    chosen = [{"rank": number, **rows[setting]} for number, setting in enumerate(ranked.order[:SHOWN], 1)]
    seeds = sorted({row["seeds"] for row in rows})
    over = f"{seeds[0]} seed{'s' if seeds[0] > 1 else ''}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    head = (
        f"Best of {len(rows)} settings by the mean of the {ranked.metric.removesuffix(' (%)')} over {over}; ties by "
        "the smaller standard deviation.\nThe test data chose them: measure the winner on data that it has not seen."
    )
    return f"{head}\n\n{tables.table(chosen, 'markdown', decimals=decimals_of(chosen))}"


def write_sweep(
    sweep: Sweep, folder: str | Path | None = None, plots: bool = True, *, target: float | None = None
) -> str:
    """Write the tables and pictures of a sweep; returns the best settings as text, to be printed.

    - ``runs.csv``: one row per run; ``evaluations.csv``: one row per evaluation; both also as ``.parquet`` if pyarrow
      is installed.
    - ``settings.csv``, ``settings.md``: mean and standard deviation over seeds, one row per setting; ``best.md``.
    - ``accuracy.png``, ``loss.png``: curves with their deviation; ``accuracy_map.png``, ``loss_map.png`` if exactly two
      numbers were swept.

    The same results give the same bytes. ``folder``: default the sweep's own. ``target``: an accuracy in (0, 1]; adds
    the virtual time, updates and bytes that it took to reach it.
    """
    folder = sweep.folder if folder is None else Path(folder)
    if folder is None:
        raise ValueError("folder = None: must be given for a sweep that was not kept in one")
    if not sweep.points:
        raise ValueError(f"folder = {str(folder)!r}: must hold at least one finished run")
    found = records(sweep, target)
    written = write_tables(found, folder, target)
    text = best(found, target)
    disk.write(folder / "best.md", text.encode())
    if plots:
        for name, figure in pictures(found).items():
            save_figure(figure, folder / name)
    disk.sweep_up(folder)
    return text if "runs.parquet" in written else f"{text}\n{NO_PARQUET}\n"
