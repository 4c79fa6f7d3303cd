"""Pictures of runs: accuracy and loss against time, updates or bytes; staleness; the schedule as a Gantt chart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedjax_async import check
from fedjax_async.results import figure as canvas
from fedjax_async.results import metrics
from fedjax_async.types import Run, Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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


def _name_lines(axes: Axes, names: Iterable[str]) -> None:
    """Write each line's name at the right edge, joined to the line's last point."""
    lines = axes.get_lines()
    ends = np.array([np.asarray(line.get_xydata())[-1] for line in lines])
    low, high = axes.get_ylim()
    edge = axes.get_xlim()[1]
    start = 1.03 * edge
    heights = spread_out(np.nan_to_num(ends[:, 1], nan=low), 0.055 * (high - low), low, high)
    for name, line, (x, y), height in zip(names, lines, ends, heights, strict=True):
        colour = line.get_color()
        axes.plot([x], [y], marker="o", markersize=3, color=colour, clip_on=False)
        axes.plot([x, edge], [y, y], color=colour, linewidth=0.8, linestyle=(0, (1, 3)))  # for lines that end early
        axes.plot([edge, start], [y, height], color=colour, linewidth=0.6, clip_on=False)
        axes.annotate(
            name,
            (start, height),
            (2, 0),
            textcoords="offset points",
            color=colour,
            fontsize=9,
            va="center",
            annotation_clip=False,
        )


def accuracy_curve(runs: Mapping[str, Sequence[Run]], x: str = "time") -> Figure:
    """Test accuracy against ``x``: ``time`` (virtual), ``update``, ``step`` or ``bytes``.

    ``runs`` maps each name to its runs, one per seed. The line is their mean (see
    :func:`fedjax_async.results.metrics.mean_curve`), the band one standard deviation on either side; a bar shows the
    deviation at the end. A line with steps means that the seeds were evaluated at different moments. Each line's name
    stands at its end instead of in a legend.
    """
    figure, axes = _curves(runs, x, "accuracy", "test accuracy (%)", 100.0)
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -1.0), min(high, 101.0))
    _name_lines(axes, runs)
    return figure


def loss_curve(runs: Mapping[str, Sequence[Run]], x: str = "time") -> Figure:
    """Test loss against ``x``, drawn as in :func:`accuracy_curve`; for targets without classes too."""
    figure, axes = _curves(runs, x, "loss", "test loss", 1.0)
    _name_lines(axes, runs)
    return figure


def _curves(runs: Mapping[str, Sequence[Run]], x: str, column: str, title: str, factor: float) -> tuple[Figure, Axes]:
    """Means and bands of one column, drawn in the order of ``runs``."""
    check.require(len(runs) > 0 and all(len(seeds) > 0 for seeds in runs.values()), "runs", list(runs), "not empty")
    curves = [metrics.mean_curve(seeds, x, column, factor) for seeds in runs.values()]
    longest = max(float(curve.at[-1]) for curve in curves)
    size, label = canvas.axis(x, longest)
    figure, axes = canvas.new(5.2 + 0.085 * max(map(len, runs)), 3.6)  # inches; the names stand beside the axes
    for index, curve in enumerate(curves):
        colour, dash = canvas.look(index)
        at, low, high = curve.at / size, curve.mean - curve.std, curve.mean + curve.std
        style = "steps-post" if curve.steps else "default"
        axes.plot(at, curve.mean, color=colour, linestyle=dash, linewidth=1.6, drawstyle=style)
        axes.fill_between(at, low, high, step="post" if curve.steps else None, color=colour, alpha=0.15, linewidth=0)
        axes.vlines(at[-1:], low[-1:], high[-1:], color=colour, alpha=0.5, linewidth=2, clip_on=False)
    axes.set_xlim(0, longest / size or 1.0)
    axes.grid(axis="y", color=canvas.GRID, linewidth=0.8)
    canvas.label(axes, label, title)
    return figure, axes


def staleness_histogram(run: Run) -> Figure:
    """The share of the updates applied at each staleness (server steps), with mean and maximum."""
    staleness = np.asarray(run.updates["staleness"])
    check.require(staleness.size > 0, "run.updates", {}, "a table with at least one arrival")
    largest = int(staleness.max())
    width = max(1, math.ceil((largest + 1) / 60))  # staleness values per bar, so that bars stay readable
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


def _window(schedule: Schedule, clients: Sequence[int], until: float) -> np.ndarray:
    """The jobs of ``clients`` sent before ``until``."""
    return np.flatnonzero(np.isin(schedule.client, clients) & (schedule.dispatch_time < until))


def gantt(schedule: Schedule, clients: int | Sequence[int] = 12, until: float | None = None) -> Figure:
    """Who trains when: one row per client, a bar per job from dispatch to upload, coloured by staleness.

    A tick marks the moment at which the server applies the upload; the upload of a grey bar is never applied. If only a
    part of the clients or of the time is shown, the title says so.
    ``clients``: how many (the first ones) or which. ``until``: virtual seconds shown (default: enough for about eight
    jobs per client).
    """
    rows = list(range(min(clients, schedule.num_clients))) if isinstance(clients, int) else list(clients)
    check.require(
        len(rows) > 0 and all(0 <= row < schedule.num_clients for row in rows),
        "clients",
        clients,
        f"a number >= 1 or client numbers below {schedule.num_clients}",
    )
    check.require(schedule.job.size > 0, "schedule", "no arrivals", "a schedule with at least one arrival")
    if until is None:
        durations = (schedule.upload_time - schedule.dispatch_time)[_window(schedule, rows, math.inf)]
        durations = durations[np.isfinite(durations)]
        until = min(float(schedule.time[-1]), 8 * float(np.median(durations)) if durations.size else math.inf)
    check.positive("until", until)
    figure, axes = canvas.new(7.0, 0.9 + 0.24 * max(len(rows), 6))
    _draw_jobs(figure, axes, schedule, rows, until)
    axes.set_title(_left_out(schedule, rows, until), loc="left", fontsize=8, color=canvas.FAINT)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [str(row) for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    return figure


def _left_out(schedule: Schedule, rows: list[int], until: float) -> str:
    """What a Gantt chart does not show, as text; empty if it shows everything."""
    parts = [f"{len(rows)} of {schedule.num_clients} clients"] if len(rows) < schedule.num_clients else []
    end = float(schedule.time[-1])
    if until < end:
        size, label = canvas.axis("time", until)
        unit = label.partition("(")[2].removesuffix(")")
        parts.append(f"the first {until / size:,.0f} of {end / size:,.0f} {unit}")
    return ", ".join(parts)


def _draw_jobs(figure: Figure, axes: Axes, schedule: Schedule, rows: list[int], until: float) -> None:
    from matplotlib.cm import ScalarMappable  # noqa: PLC0415
    from matplotlib.collections import PatchCollection  # noqa: PLC0415
    from matplotlib.colors import Normalize  # noqa: PLC0415
    from matplotlib.patches import Rectangle  # noqa: PLC0415
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    size, label = canvas.axis("time", until)
    jobs = _window(schedule, rows, until)
    staleness = np.full(schedule.client.size, -1)
    applied = np.full(schedule.client.size, np.nan)
    # A job may arrive twice (a late duplicate): its first application counts.
    staleness[schedule.job[::-1]], applied[schedule.job[::-1]] = schedule.staleness[::-1], schedule.time[::-1]
    row_of = {client: row for row, client in enumerate(rows)}
    y = np.array([row_of[int(client)] for client in schedule.client[jobs]], np.float64)
    start = schedule.dispatch_time[jobs]
    end = np.minimum(np.nan_to_num(schedule.upload_time[jobs], nan=until, posinf=until), until)
    shade = Normalize(0, max(1, int(staleness[jobs].max(initial=0))))
    colours = ScalarMappable(shade, "viridis_r")
    faces = [colours.to_rgba(value) if value >= 0 else "#D9D9D9" for value in staleness[jobs]]
    gap = 0.0015 * until  # a sliver of white between a client's consecutive jobs
    bars = [
        Rectangle((a / size, row - 0.34), max(b - a - gap, gap) / size, 0.68)
        for a, b, row in zip(start, end, y, strict=True)
    ]
    axes.add_collection(PatchCollection(bars, facecolor=faces, linewidth=0))
    if np.any(staleness[jobs] < 0):
        axes.set_title("grey: never applied", loc="right", fontsize=8, color=canvas.FAINT)
    seen = applied[jobs] <= until
    axes.vlines(applied[jobs][seen] / size, y[seen] - 0.45, y[seen] + 0.45, color=canvas.INK, linewidth=0.9)
    axes.set_xlim(0, until / size)
    canvas.label(axes, label, "client")
    ticks = MaxNLocator(nbins=6, integer=True)
    scale = figure.colorbar(colours, ax=axes, ticks=ticks, pad=0.015, aspect=18, shrink=0.9)
    scale.outline.set_visible(False)
    scale.ax.tick_params(labelsize=9, colors=canvas.INK, length=0)
    scale.set_label("staleness (server steps)", fontsize=9, color=canvas.INK)
