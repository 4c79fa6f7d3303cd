"""Pictures of a decentralised plan: a Gantt chart of events and messages, and the ages of the mixed messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_async.base import check
from fedjax_async.clock.absences import OfflineTimes
from fedjax_async.engine.peer_points import executed
from fedjax_async.peers import PeerSchedule, ages
from fedjax_async.peers.statistics import readers
from fedjax_async.peers.triggering import WITHHELD
from fedjax_async.results import figure as canvas
from fedjax_async.results.client_names import labels
from fedjax_async.results.figure import SCREEN, Drawing
from fedjax_async.results.plots import histogram_of
from fedjax_async.results.timeline import (
    OFFLINE,
    REJECTED,
    STATE_COLOURS,
    UNAPPLIED,
    Absences,
    Lines,
    absences_of,
    away,
    draw_absences,
    idle_time,
    label_rows,
    left_out,
    lines_of,
    rows_of,
    staleness_colours,
    window,
)
from fedjax_async.types import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

BARS = "#BFD7EA"
EVENTS_SHOWN = 5  # per node, about


def peer_gantt(
    schedule: PeerSchedule | Run,
    clients: int | Sequence[int] = 12,
    until: float | None = None,
    *,
    since: float = 0.0,
    offline: OfflineTimes | None = None,
    names: Sequence[str] | None = None,
    drawing: Drawing = SCREEN,
) -> Figure:
    """A Gantt chart: a row per node, a bar per compute event, a line per message from its sender to its receiver.

    A line begins where its sender has trained and ends where the message arrives; the line of a lost message ends on
    the way. The colour shows the outcome (``timeline.MESSAGES``). A tick marks the time at which an event mixes its
    inbox. Where a node is offline, its row is pale. In a gap it waits, or works on an event that fails: a plan
    keeps no failed events. Messages to and from nodes that are not shown are left out; the text above says how
    many nodes are shown. ``schedule``: a plan, or a run without a server, which brings its names and times offline. A
    run's events have the colour of the staleness of what they mix, those that withhold their
    messages, or are rejected, a colour of their own; withheld messages have no lines. ``clients``: how many (the first
    ones) or which. ``since`` and ``until``: the virtual times, in seconds, at which the chart begins and ends (default:
    enough for about five events per node). ``names``: one per node, ``run.client_names``; long ones are cut, as in
    :func:`gantt`. ``offline``: when nodes are offline, as ``clock.offline_times`` tells it; without it, a plan knows
    only when they join and leave.
    """
    run = schedule if isinstance(schedule, Run) else None
    schedule = schedule.schedule if isinstance(schedule, Run) else schedule
    names = run.client_names if run is not None and names is None else names
    absences = Absences(offline)
    if run is not None and offline is None:
        absences = absences_of(run.settings, schedule.num_clients)
    check.kind("schedule", schedule, PeerSchedule, "a PeerSchedule, or a run without a server; gantt draws the others")
    rows = rows_of(clients, schedule.num_clients)
    check.require(schedule.client.size > 0, "schedule", "no events", "a schedule with at least one event")
    end = float(schedule.end.max())
    if run is not None and run.stopped is not None:  # its plan goes on
        end = min(end, float(run.evaluations["time"][-1])) or end
    mine = np.isin(schedule.client, rows)
    length = (schedule.end - schedule.start)[mine if mine.any() else slice(None)]
    asked = window(since, until, EVENTS_SHOWN * float(np.median(length)), end)
    until = min(asked, end)
    figure, axes = canvas.new(7.0, 1.1 + 0.3 * max(len(rows), 6), drawing)
    size, _ = canvas.axis("time", until)
    row_of = np.full(schedule.num_clients, -1)
    row_of[rows] = np.arange(len(rows))
    gone = [(absences.times or partial(away, schedule))(node, until) for node in rows]
    absent = draw_absences(axes, [times[times[:, 1] > since] for times in gone], until, "node")
    events = np.flatnonzero((row_of[schedule.client] >= 0) & (schedule.start < until))
    quiet = np.zeros(len(schedule.client), bool) if run is None else _quiet(run)
    sent = ~quiet[schedule.push_event]
    states = {"event": (events, BARS)} if run is None else _states(figure, axes, run, events, quiet)
    _draw_events(axes, schedule, row_of, until, states, names, sent)
    mixing = events[(np.diff(schedule.inbox_bounds)[events] > 0) & (schedule.mixed_at[events] <= until)]
    at, y = schedule.mixed_at[mixing] / size, row_of[schedule.client[mixing]]
    ticks = axes.vlines(at, y - 0.34, y + 0.34, canvas.INK, linewidth=0.9)
    canvas.mark(axes, ticks, name="inbox mixed")
    kinds = _draw_messages(axes, lines_of(schedule, row_of, sent & (schedule.end[schedule.push_event] <= until)), size)
    first, last = left_out(rows, schedule.num_clients, "node", since, asked, end), absences.note
    canvas.note(axes, first, last)
    busy = [(schedule.start[its], schedule.end[its]) for its in (schedule.client == node for node in rows)]
    gaps = any(len(idle_time(*its, until, times)) for its, times in zip(busy, gone, strict=True))
    marks = {"black tick: inbox mixed": len(mixing) > 0, "gap: no event, or one that fails": gaps}
    marked = ("\n" if drawing.width == "column" else "; ").join(filter(marks.get, marks))  # a column is narrow
    above = "\n".join(filter(None, [first, marked, last]))
    axes.set_title(above, loc="left", fontsize=8, color=canvas.FAINT, pad=9)
    label_rows(axes, rows, names, since, until, "node")
    legend = {f"message {name}": line for name, line in kinds.items()} | _patches(states, absent)
    if legend:
        canvas.legend_below(figure, list(legend.values()), list(legend), drawing, columns=4, fontsize=8)
    return canvas.finish(figure, drawing)


def _done(run: Run) -> np.ndarray:
    """The events in the rows of ``run.updates``."""
    return executed(run.schedule, np.asarray(run.evaluations["time"]))


def _quiet(run: Run) -> np.ndarray:
    """Which events of the plan have withheld their messages; bool[E]."""
    quiet = np.zeros(len(run.schedule.client), bool)
    if WITHHELD in run.updates:
        quiet[_done(run)] = run.updates[WITHHELD]
    return quiet


def _states(
    figure: Figure, axes: Axes, run: Run, events: np.ndarray, quiet: np.ndarray
) -> dict[str, tuple[np.ndarray, Any]]:
    """State -> those of the ``events`` that have it, and their colours; a scale of the staleness beside the axes."""
    plan, done = run.schedule, _done(run)
    staleness = np.full(len(plan.client), np.nan)
    staleness[done] = run.updates["staleness"]
    accepted = np.zeros(len(plan.client), bool)
    accepted[done] = run.updates["accepted"]
    ended = np.isfinite(staleness[events])
    known = staleness[events][ended]
    colours = staleness_colours(figure, axes, known, "events of the sender", white=0.5)  # messages are drawn over bars
    trained, silent = (events[accepted[events] & kind] for kind in (~quiet[events], quiet[events]))
    rejected, left = events[ended & ~accepted[events]], events[~ended]
    return {
        "trained": (trained, colours.to_rgba(staleness[trained])),
        WITHHELD: (silent, STATE_COLOURS[WITHHELD]),
        REJECTED: (rejected, STATE_COLOURS[REJECTED]),
        "under way": (left, UNAPPLIED),
    }


def _draw_events(
    axes: Axes,
    schedule: PeerSchedule,
    row_of: np.ndarray,
    until: float,
    states: Mapping[str, tuple[np.ndarray, Any]],
    names: Sequence[str] | None,
    pushed: np.ndarray,
) -> None:
    """A bar per event; ``states``: name -> events and their colours; ``pushed``: which messages are sent, bool[M]."""
    size, _ = canvas.axis("time", until)
    gap = 0.0015 * until / size
    mixed = np.diff(schedule.inbox_bounds)
    sent = np.bincount(schedule.push_event[pushed], minlength=len(schedule.client))
    columns = (schedule.client, schedule.number, schedule.local_steps, schedule.start, schedule.end, schedule.mixed_at)
    about = np.stack([*columns, mixed, sent], axis=1).astype(np.float32)
    for state, (mine, colours) in states.items():
        if not len(mine):
            continue
        begin, end = schedule.start[mine] / size, np.minimum(schedule.end[mine], until) / size
        y = row_of[schedule.client[mine]].astype(float)
        bars = axes.barh(y, np.maximum(end - begin - gap, gap), left=begin, height=0.5, color=colours, linewidth=0)
        who = {} if names is None else {"hovertext": labels(names, schedule.client[mine])}
        text = (
            f"node {'%{hovertext}' if who else '%{customdata[0]}'}, event %{{customdata[1]}}: {state}<br>"
            "%{customdata[2]} local steps from %{customdata[3]:,.6~g} s to %{customdata[4]:,.6~g} s, sends "
            "%{customdata[7]} messages<br>mixes %{customdata[6]} messages at %{customdata[5]:,.6~g} s<extra></extra>"
        )
        canvas.mark(axes, bars, name=state, customdata=about[mine], hovertemplate=text, **who)


def _patches(states: Mapping[str, tuple[np.ndarray, Any]], absent: bool) -> dict[str, Patch]:
    """For the legend, the states of events that have a colour of their own, and times offline."""
    from matplotlib.patches import Patch  # noqa: PLC0415

    shown = {state: states[state] for state in (WITHHELD, REJECTED) if state in states}
    found = {f"event {state}": Patch(color=colour) for state, (mine, colour) in shown.items() if len(mine)}
    return found | ({"node offline": Patch(color=OFFLINE)} if absent else {})


def _draw_messages(axes: Axes, lines: Mapping[str, Lines], size: float) -> dict[str, Line2D]:
    """A line per message; returns a line for the legend of each of their ends."""
    from matplotlib.collections import LineCollection  # noqa: PLC0415
    from matplotlib.lines import Line2D  # noqa: PLC0415

    kinds = {}
    for name, (colour, dotted, time, row) in lines.items():
        dash, ends = ":" if dotted else "-", list(np.stack([time / size, row], axis=2))
        drawn = LineCollection(ends, colors=colour, linestyles=[dash], linewidths=0.7, alpha=0.8)
        canvas.mark(axes, axes.add_collection(drawn), name=f"message {name}", dash=dash)
        kinds[name] = Line2D([], [], color=colour, ls=dash, linewidth=1.2)
    return kinds


def age_histogram(schedule: PeerSchedule | Run, drawing: Drawing = SCREEN) -> Figure:
    """The share of mixed messages at each age (events that the sender has completed since), with mean and maximum.

    Those of a plan, or those that a run without a server has mixed, as its counter ``mixed``.
    """
    behind = mixed_ages(schedule)
    check.require(behind.size > 0, "schedule", "no mixed messages", "a schedule with at least one")
    return histogram_of(behind, "staleness (events of the sender since)", "share of messages (%)", drawing)


def mixed_ages(schedule: PeerSchedule | Run) -> np.ndarray:
    """The age of each message of :func:`age_histogram`; int64."""
    plan = schedule.schedule if isinstance(schedule, Run) else schedule
    check.kind("schedule", plan, PeerSchedule, "a PeerSchedule, or a run without a server")
    behind = ages(plan)[1]
    if not isinstance(schedule, Run):
        return behind
    done = np.zeros(len(plan.client), bool)
    done[_done(schedule)] = True  # a run may have stopped earlier, and withholds messages of its plan
    return behind[done[readers(plan)] & ~_quiet(schedule)[plan.source]]
