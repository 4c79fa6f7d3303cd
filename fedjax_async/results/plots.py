"""Pictures of a schedule: a histogram of the staleness, and a Gantt chart of the jobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedjax_async import check
from fedjax_async.results import figure as canvas
from fedjax_async.results.figure import SCREEN, Drawing
from fedjax_async.results.metrics import require_run
from fedjax_async.types import Run, Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_STEP_LINES = 60  # more would hide the jobs


def staleness_histogram(run: Run, drawing: Drawing = SCREEN) -> Figure:
    """The share of the updates applied at each staleness (server steps), with mean and maximum."""
    require_run(run)
    staleness = np.asarray(run.updates["staleness"])
    check.require(staleness.size > 0, "run.updates", {}, "a table with at least one arrival")
    return histogram_of(staleness, "staleness (server steps)", "share of updates (%)", drawing)


def histogram_of(staleness: np.ndarray, x: str, y: str, drawing: Drawing = SCREEN) -> Figure:
    """A histogram of these integers, in percent, with mean and maximum; ``x`` and ``y`` name the axes."""
    largest = int(staleness.max())
    width = max(1, math.ceil((largest + 1) / 60))  # staleness values per bar, so that bars stay readable
    edges = np.arange(0, largest + width + 1, width) - 0.5
    share = 100 * np.histogram(staleness, edges)[0] / staleness.size
    figure, axes = canvas.new(5.0, 3.0, drawing)
    axes.bar(edges[:-1] + width / 2, share, width=0.86 * width, color=canvas.PALETTE[0], linewidth=0)
    mean = float(staleness.mean())
    axes.axvline(mean, color=canvas.PALETTE[1], linewidth=1.2)
    axes.set_title(f"mean {mean:.1f}, largest {largest}", loc="left", fontsize=9, color=canvas.PALETTE[1])
    axes.locator_params(axis="x", integer=True)
    axes.grid(axis="y", color=canvas.GRID, linewidth=0.8)
    canvas.label(axes, x, y)
    return canvas.finish(figure, drawing)


def _window(schedule: Schedule, clients: Sequence[int], until: float) -> np.ndarray:
    """The jobs of ``clients`` sent before ``until``."""
    return np.flatnonzero(np.isin(schedule.client, clients) & (schedule.dispatch_time < until))


def gantt(
    schedule: Schedule,
    clients: int | Sequence[int] = 12,
    until: float | None = None,
    *,
    used: np.ndarray | None = None,
    scores: np.ndarray | None = None,
    drawing: Drawing = SCREEN,
) -> Figure:
    """A Gantt chart: one row per client, a bar per job from dispatch to upload, coloured by staleness.

    A tick marks the time at which the server applies the upload; the upload of a grey bar is never applied. A thin line
    is idle time: the client has no job. Marks at the upper edge, and pale lines if there are few, are server steps. If
    only a part of the clients or of the time is shown, the text above says so.

    Args:
      schedule: that of a run is ``run.schedule``.
      clients: how many (the first ones) or which.
      until: virtual seconds shown (default: enough for about eight jobs per client).
      used: bool[E], which arrivals are applied (default: all); for a run ``run.updates["used"]``.
      scores: one number per job, in order of dispatch, written on its bar unless it is NaN; such as the score by which
        a policy chose the job, ``run.probes["chosen"]["score"]``.

    Raises: ``ValueError`` for a schedule without arrivals and for arguments that do not fit it.
    """
    check.kind("schedule", schedule, Schedule, "a Schedule; that of a run is run.schedule")
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
    applied = np.ones(len(schedule.job), bool) if used is None else np.asarray(used, bool)
    check.require(applied.shape == schedule.job.shape, "used", applied.shape, f"bool[{len(schedule.job)}], of arrivals")
    figure, axes = canvas.new(7.0, 1.1 + 0.24 * max(len(rows), 6), drawing)
    grey = _draw_jobs(figure, axes, schedule, rows, until, applied)
    if scores is not None:
        allowed = f"one number per job, [{len(schedule.client)}]"
        check.require(np.shape(scores) == schedule.client.shape, "scores", np.shape(scores), allowed)
        _write_scores(axes, schedule, rows, until, np.asarray(scores))
    idle = _draw_idle(axes, schedule, rows, until)
    steps = _draw_steps(axes, schedule, until)
    shown = {"grey: never applied": grey, "thin line: idle": idle, "marks above: server steps": steps}
    between = "\n" if drawing.width == "column" else "; "  # one line would be wider than a column
    notes = [_left_out(schedule, rows, until), between.join(text for text, any_drawn in shown.items() if any_drawn)]
    axes.set_title("\n".join(filter(None, notes)), loc="left", fontsize=8, color=canvas.FAINT, pad=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [str(row) for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    return canvas.finish(figure, drawing)


def _left_out(schedule: Schedule, rows: list[int], until: float) -> str:
    """What a Gantt chart does not show, as text; empty if it shows everything."""
    parts = [f"{len(rows)} of {schedule.num_clients} clients"] if len(rows) < schedule.num_clients else []
    end = float(schedule.time[-1])
    if until < end:
        size, label = canvas.axis("time", until)
        unit = label.partition("(")[2].removesuffix(")")
        parts.append(f"the first {until / size:,.0f} of {end / size:,.0f} {unit}")
    return ", ".join(parts)


def _draw_jobs(figure: Figure, axes: Axes, schedule: Schedule, rows: list[int], until: float, used: np.ndarray) -> bool:
    """Bars, ticks and the colour scale; returns whether any job is grey."""
    from matplotlib.cm import ScalarMappable  # noqa: PLC0415
    from matplotlib.collections import PatchCollection  # noqa: PLC0415
    from matplotlib.colors import Normalize  # noqa: PLC0415
    from matplotlib.patches import Rectangle  # noqa: PLC0415
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    size, label = canvas.axis("time", until)
    jobs = _window(schedule, rows, until)
    staleness = np.full(schedule.client.size, -1)
    applied = np.full(schedule.client.size, np.nan)
    # In a schedule that was not checked, a job may arrive twice: its first application counts.
    arrived = np.flatnonzero(used)[::-1]
    its_job = schedule.job[arrived]
    staleness[its_job], applied[its_job] = schedule.staleness[arrived], schedule.time[arrived]
    row_of = {client: row for row, client in enumerate(rows)}
    y = np.array([row_of[int(client)] for client in schedule.client[jobs]], np.float64)
    start = schedule.dispatch_time[jobs]
    end = np.minimum(job_ends(schedule)[jobs], until)
    shade = Normalize(0, max(1, int(staleness[jobs].max(initial=0))))
    colours = ScalarMappable(shade, "viridis_r")
    faces = [colours.to_rgba(value) if value >= 0 else "#D9D9D9" for value in staleness[jobs]]
    gap = 0.0015 * until  # a narrow white gap between a client's consecutive jobs
    bars = [
        Rectangle((a / size, row - 0.34), max(b - a - gap, gap) / size, 0.68)
        for a, b, row in zip(start, end, y, strict=True)
    ]
    axes.add_collection(PatchCollection(bars, facecolor=faces, linewidth=0))
    seen = applied[jobs] <= until
    axes.vlines(applied[jobs][seen] / size, y[seen] - 0.45, y[seen] + 0.45, color=canvas.INK, linewidth=0.9)
    axes.set_xlim(0, until / size)
    canvas.label(axes, label, "client")
    ticks = MaxNLocator(nbins=6, integer=True)
    scale = figure.colorbar(colours, ax=axes, ticks=ticks, pad=0.015, aspect=18, shrink=0.9)
    scale.outline.set_visible(False)
    scale.ax.tick_params(labelsize=9, colors=canvas.INK, length=0)
    scale.set_label("staleness (server steps)", fontsize=9, color=canvas.INK)
    return bool(np.any(staleness[jobs] < 0))


def job_ends(schedule: Schedule) -> np.ndarray:
    """When each job ends: at its upload, or at the client's next dispatch if that is earlier; float64[J]."""
    order = np.lexsort((schedule.dispatch_time, schedule.client))
    client, dispatch = schedule.client[order], schedule.dispatch_time[order]
    following = np.full(order.size, math.inf)
    following[:-1] = np.where(client[1:] == client[:-1], dispatch[1:], math.inf)
    ends = np.empty(order.size)
    ends[order] = np.minimum(np.nan_to_num(schedule.upload_time[order], nan=math.inf, posinf=math.inf), following)
    return ends


def idle_time(schedule: Schedule, client: int, until: float) -> np.ndarray:
    """The intervals (begin, end) in which a client has no job, up to ``until``; float64[gaps, 2], in order."""
    jobs = np.flatnonzero(schedule.client == client)
    jobs = jobs[np.argsort(schedule.dispatch_time[jobs], kind="stable")]
    begin = np.concatenate([[0.0], job_ends(schedule)[jobs]])
    end = np.minimum(np.concatenate([schedule.dispatch_time[jobs], [until]]), until)
    gaps = np.stack([begin, end], axis=1)
    return gaps[gaps[:, 1] > gaps[:, 0]]


def _write_scores(axes: Axes, schedule: Schedule, rows: list[int], until: float, scores: np.ndarray) -> None:
    """Write the score of each job at the beginning of its bar."""
    from matplotlib import patheffects  # noqa: PLC0415 (an extra)

    outline = [patheffects.withStroke(linewidth=1.5, foreground="white")]  # readable on dark bars too
    height = {client: row for row, client in enumerate(rows)}
    for job in _window(schedule, rows, until):
        if np.isfinite(scores[job]):
            where = schedule.dispatch_time[job], height[int(schedule.client[job])]
            text = f" {scores[job]:.3g}"
            axes.text(*where, text, fontsize=6, va="center", clip_on=True, path_effects=outline)


def _draw_idle(axes: Axes, schedule: Schedule, rows: list[int], until: float) -> bool:
    """A thin line for each interval of idle time; returns whether there is any."""
    size, _ = canvas.axis("time", until)
    gaps = [(row, *gap) for row, client in enumerate(rows) for gap in idle_time(schedule, client, until) / size]
    y, begin, end = np.reshape(gaps, (-1, 3)).T
    axes.hlines(y, begin, end, color=canvas.FAINT, linewidth=0.8, zorder=0.9)
    return len(gaps) > 0


def _draw_steps(axes: Axes, schedule: Schedule, until: float) -> bool:
    """Marks at the upper edge where a server step closes, and lines if they are few; returns whether there is any."""
    size, _ = canvas.axis("time", until)
    steps = np.unique(schedule.time[schedule.closes & (schedule.time <= until)]) / size
    if len(steps) <= MOST_STEP_LINES:
        axes.vlines(steps, 0, 1, transform=axes.get_xaxis_transform(), color=canvas.GRID, linewidth=0.8, zorder=0.5)
    edge = axes.get_xaxis_transform()
    axes.vlines(steps, 1.0, 1.025, transform=edge, color=canvas.INK, linewidth=0.7, clip_on=False)
    return len(steps) > 0
