"""Gantt chart of a schedule: who trains when, and how stale it is when the server applies it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedjax_async import check
from fedjax_async.results import figure as canvas
from fedjax_async.types import Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def _window(schedule: Schedule, clients: Sequence[int], until: float) -> np.ndarray:
    """The jobs of ``clients`` sent before ``until``."""
    return np.flatnonzero(np.isin(schedule.client, clients) & (schedule.dispatch_time < until))


def gantt(schedule: Schedule, clients: int | Sequence[int] = 12, until: float | None = None) -> Figure:
    """Who trains when: one row a client, a bar from dispatch to upload, coloured by staleness.

    A tick marks the moment the server applies the upload; grey bars are jobs it never applied.
    ``clients``: how many (the first ones) or which; ``until``: virtual seconds shown, unless told long
    enough for about eight jobs a client.
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
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [str(row) for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    return figure


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
    place = {client: row for row, client in enumerate(rows)}
    y = np.array([place[int(client)] for client in schedule.client[jobs]], np.float64)
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
