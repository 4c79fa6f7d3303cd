"""Pictures of loss landscapes: contours in a plane with models and paths, and the loss along paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from fedjax_async.base import check
from fedjax_async.results import figure as canvas
from fedjax_async.results.figure import SCREEN, Drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEVELS = 14  # colours between the lowest and the highest loss that is shown
SHOWN = 0.9  # share of the grid within the levels; all higher losses have the last colour
DARK = "#1A1A1A"


def levels_of(loss: np.ndarray, models: np.ndarray) -> np.ndarray:
    """Increasing levels for the contours of a loss [Y, X], evenly spaced on a logarithmic scale if it is positive.

    They reach from the lowest loss to that of ``SHOWN`` of the grid, or to the highest of the ``models`` [M] if that
    is higher. ``ValueError`` if no value is finite.
    """
    finite = loss[np.isfinite(loss)].astype(np.float64)
    check.require(finite.size > 0, "loss", "no finite value", "finite somewhere on the grid")
    known = models[np.isfinite(models)].astype(np.float64)
    low = float(min([finite.min(), *known]))
    high = float(max([np.quantile(finite, SHOWN), *known]))
    if not high > low + 1e-12 * abs(low):  # flat
        high = low + max(abs(low), 1.0) * 1e-6
    return np.geomspace(low, high, LEVELS) if low > 0 else np.linspace(low, high, LEVELS)


def plane_picture(
    x: np.ndarray,
    y: np.ndarray,
    loss: np.ndarray,
    models: Mapping[str, tuple[float, float, float]],
    paths: Mapping[str, tuple[np.ndarray, np.ndarray]],
    *,
    title: str = "test loss",
    drawing: Drawing = SCREEN,
) -> Figure:
    """The loss in a plane as coloured contours, with models as points and paths as lines.

    Args:
      x, y: coordinates of the columns [X] and rows [Y], distances in the space of the parameters.
      loss: [Y, X]; where it is not finite the plane is left white.
      models: name -> (x, y, loss there).
      paths: name -> (x [P], y [P]); drawn in this order, named in a legend.
      title: of the colour scale.
    """
    from matplotlib.colors import BoundaryNorm  # noqa: PLC0415
    from matplotlib.patheffects import withStroke  # noqa: PLC0415
    from matplotlib.ticker import FuncFormatter  # noqa: PLC0415

    figure, axes = canvas.new(5.6, 4.4, drawing)
    levels = levels_of(loss, np.array([height for _, _, height in models.values()]))
    shown = np.ma.masked_invalid(loss)
    norm = BoundaryNorm(levels, 256, extend="max")
    filled = axes.contourf(x, y, shown, levels=levels, norm=norm, cmap="cividis", extend="max")
    axes.contour(x, y, shown, levels=levels, colors="white", linewidths=0.3, alpha=0.6)
    for index, (name, (xs, ys)) in enumerate(paths.items()):
        _, dash = canvas.line_style(len(canvas.PALETTE) * (index % len(canvas.DASHES)))
        axes.plot(xs, ys, color="white", linestyle=dash, linewidth=1.8, label=name)
    for name, (right, up, _) in models.items():
        axes.plot([right], [up], marker="o", markersize=5, color="white", markeredgecolor=DARK, linestyle="")
        axes.annotate(
            name,
            (right, up),
            xytext=(5, 5),
            textcoords="offset points",
            color="white",
            fontsize=10,
            fontweight="bold",
            path_effects=[withStroke(linewidth=2, foreground=DARK)],  # readable on yellow too
        )
    canvas.label(axes, "distance in the plane", "distance in the plane")
    bar = figure.colorbar(filled, ax=axes, format=FuncFormatter(lambda value, _: f"{value:.3g}"))
    bar.outline.set_visible(False)
    bar.set_label(title, fontsize=10, color=canvas.INK)
    bar.ax.tick_params(labelsize=8, length=0, colors=canvas.INK)
    if paths:
        _legend(figure, axes, drawing)
    return canvas.finish(figure, drawing)


def _legend(figure: Figure, axes: Axes, drawing: Drawing) -> None:
    """Names of the paths below the picture; their lines are dark there, because white ones would be invisible."""
    lines, names = axes.get_legend_handles_labels()
    legend = canvas.legend_below(
        figure, lines, names, drawing, columns=len(names), labelcolor=canvas.INK, handlelength=3
    )
    for line in legend.get_lines():
        line.set_color(DARK)


def path_picture(
    paths: Mapping[str, tuple[np.ndarray, np.ndarray]], *, title: str = "test loss", drawing: Drawing = SCREEN
) -> Figure:
    """The loss along paths from one model to another.

    Args:
      paths: name -> (position [P], 0 to 1; loss [P]).
      title: of the vertical axis, which is logarithmic if all losses are positive and differ tenfold.
    """
    figure, axes = canvas.new(5.2, 3.6, drawing)
    for index, (name, (s, loss)) in enumerate(paths.items()):
        colour, dash = canvas.line_style(index)
        axes.plot(s, loss, color=colour, linestyle=dash, linewidth=1.6, label=name, marker=canvas.marker(index))
    every = np.concatenate([loss for _, loss in paths.values()])
    finite = every[np.isfinite(every)]
    if finite.size and finite.min() > 0 and finite.max() > 10 * finite.min():
        axes.set_yscale("log")
    axes.set_xlim(0.0, 1.0)
    axes.grid(axis="y", color=canvas.GRID, linewidth=0.8)
    canvas.label(axes, "position on the path", title)
    canvas.legend_below(figure, axes.get_lines(), list(paths), drawing, columns=2, labelcolor="linecolor")
    return canvas.finish(figure, drawing)
