"""Pictures of a decentralised plan: a Gantt chart of events and messages, and the ages of the mixed messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedjax_async.base import check
from fedjax_async.peers import PeerSchedule, ages
from fedjax_async.results import figure as canvas
from fedjax_async.results.figure import SCREEN, Drawing
from fedjax_async.results.plots import draw_absences, histogram_of, label_rows, left_out, rows_of, window
from fedjax_async.results.timeline import Lines, away, lines_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

BARS = "#BFD7EA"
EVENTS_SHOWN = 5  # per node, about


def peer_gantt(
    schedule: PeerSchedule,
    clients: int | Sequence[int] = 12,
    until: float | None = None,
    *,
    since: float = 0.0,
    names: Sequence[str] | None = None,
    drawing: Drawing = SCREEN,
) -> Figure:
    """A Gantt chart: a row per node, a bar per compute event, a line per message from its sender to its receiver.

    A line begins where its sender has trained and ends where the message arrives; the line of a lost message ends on
    the way. The colour shows the outcome (``timeline.MESSAGES``). A tick marks the time at which an event mixes its
    inbox. Where a node has not joined yet, or has left, its row is pale. Messages to and from nodes that are not shown
    are left out; the text above says how many nodes are shown. ``clients``: how many (the first ones) or which.
    ``since`` and ``until``: the virtual times, in seconds, at which the chart begins and ends (default: enough for
    about five events per node). ``names``: one per node, ``run.client_names``; long ones are cut, as in :func:`gantt`.
    """
    check.kind("schedule", schedule, PeerSchedule, "a PeerSchedule; that of a run without a server is run.schedule")
    rows = rows_of(clients, schedule.num_clients)
    check.require(schedule.client.size > 0, "schedule", "no events", "a schedule with at least one event")
    end = float(schedule.end.max())
    mine = np.isin(schedule.client, rows)
    length = (schedule.end - schedule.start)[mine if mine.any() else slice(None)]
    asked = window(since, until, EVENTS_SHOWN * float(np.median(length)), end)
    until = min(asked, end)
    figure, axes = canvas.new(7.0, 1.1 + 0.3 * max(len(rows), 6), drawing)
    size, _ = canvas.axis("time", until)
    row_of = np.full(schedule.num_clients, -1)
    row_of[rows] = np.arange(len(rows))
    _draw_events(axes, schedule, row_of, until, size)
    kinds = _draw_messages(axes, lines_of(schedule, row_of, schedule.end[schedule.push_event] <= until), size)
    draw_absences(axes, [away(schedule, node, until) for node in rows], until)
    shown = left_out(rows, schedule.num_clients, "node", since, asked, end)
    axes.set_title(shown, loc="left", fontsize=8, color=canvas.FAINT, pad=9)
    label_rows(axes, rows, names, since, until, "node")
    if kinds:
        texts = [f"message {name}" for name in kinds]
        canvas.legend_below(figure, list(kinds.values()), texts, drawing, columns=4, fontsize=8)
    return canvas.finish(figure, drawing)


def _draw_events(axes: Axes, schedule: PeerSchedule, row_of: np.ndarray, until: float, size: float) -> None:
    """A bar per event, and a tick where it mixes messages."""
    shown = np.flatnonzero((row_of[schedule.client] >= 0) & (schedule.start < until))
    y = row_of[schedule.client[shown]].astype(float)
    begin, end = schedule.start[shown] / size, np.minimum(schedule.end[shown], until) / size
    gap = 0.0015 * until / size
    axes.barh(y, np.maximum(end - begin - gap, gap), left=begin, height=0.5, color=BARS, linewidth=0)
    mixes = (np.diff(schedule.inbox_bounds)[shown] > 0) & (schedule.mixed_at[shown] <= until)
    axes.vlines(schedule.mixed_at[shown][mixes] / size, y[mixes] - 0.34, y[mixes] + 0.34, canvas.INK, linewidth=0.9)


def _draw_messages(axes: Axes, lines: Mapping[str, Lines], size: float) -> dict[str, Line2D]:
    """A line per message; returns a line for the legend of each of their fates."""
    from matplotlib.collections import LineCollection  # noqa: PLC0415
    from matplotlib.lines import Line2D  # noqa: PLC0415

    kinds = {}
    for name, (colour, dotted, time, row) in lines.items():
        dash, ends = ":" if dotted else "-", list(np.stack([time / size, row], axis=2))
        axes.add_collection(LineCollection(ends, colors=colour, linestyles=[dash], linewidths=0.7, alpha=0.8))
        kinds[name] = Line2D([], [], color=colour, ls=dash, linewidth=1.2)
    return kinds


def age_histogram(schedule: PeerSchedule, drawing: Drawing = SCREEN) -> Figure:
    """The share of mixed messages at each age (events that the sender has completed since), with mean and maximum."""
    check.kind("schedule", schedule, PeerSchedule, "a PeerSchedule; that of a run without a server is run.schedule")
    behind = ages(schedule)[1]
    check.require(behind.size > 0, "schedule", "no mixed messages", "a schedule with at least one")
    return histogram_of(behind, "staleness (events of the sender since)", "share of messages (%)", drawing)
