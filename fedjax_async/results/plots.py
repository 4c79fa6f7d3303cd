"""Pictures of a schedule: a histogram of the staleness, and a Gantt chart of the jobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from fedjax_async.base import check
from fedjax_async.clock.absences import OfflineTimes
from fedjax_async.results import figure as canvas
from fedjax_async.results.client_names import labels
from fedjax_async.results.figure import SCREEN, Drawing
from fedjax_async.results.metrics import require_run
from fedjax_async.results.timeline import (
    BY_STALENESS,
    FAILED,
    OFFLINE,
    REJECTED,
    STATE_COLOURS,
    WAITING,
    Absences,
    Jobs,
    absences_of,
    draw_absences,
    idle_time,
    jobs_of,
    label_rows,
    left_out,
    rows_of,
    shares,
    staleness_colours,
    staleness_of,
    window,
)
from fedjax_async.types import Run, Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_STEP_LINES = 60  # more would hide the jobs
NEVER = np.zeros((0, 2))  # no interval


def staleness_histogram(run: Run, drawing: Drawing = SCREEN) -> Figure:
    """The share of the updates applied at each staleness (server steps), with mean and maximum."""
    require_run(run)
    staleness = staleness_of(run)
    check.require(staleness.size > 0, "run.updates", {}, "a table with at least one arrival that was applied")
    return histogram_of(staleness, "staleness (server steps)", "share of updates (%)", drawing)


def histogram_of(staleness: np.ndarray, x: str, y: str, drawing: Drawing = SCREEN) -> Figure:
    """A histogram of these integers, in percent, with mean and maximum; ``x`` and ``y`` name the axes."""
    middle, share, width = shares(staleness)
    mean = float(staleness.mean())
    figure, axes = canvas.new(5.0, 3.0, drawing)
    bars = axes.bar(middle, share, width=0.86 * width, color=canvas.PALETTE[0], linewidth=0)
    about = np.stack([middle - (width - 1) / 2, middle + (width - 1) / 2, share], axis=1)
    values = "%{customdata[0]}" if width == 1 else "%{customdata[0]} to %{customdata[1]}"
    text = f"%{{customdata[2]:.3g}} % at {values}<extra></extra>"
    canvas.mark(axes, bars, name=y, showlegend=False, customdata=about, hovertemplate=text)
    axes.axvline(mean, color=canvas.PALETTE[1], linewidth=1.2)
    axes.set_title(f"mean {mean:.1f}, largest {staleness.max()}", loc="left", fontsize=9, color=canvas.PALETTE[1])
    axes.locator_params(axis="x", integer=True)
    axes.grid(axis="y", color=canvas.GRID, linewidth=0.8)
    canvas.label(axes, x, y)
    return canvas.finish(figure, drawing)


# --- jobs -----------------------------------------------------------------------------------------------


def gantt(
    schedule: Schedule | Run,
    clients: int | Sequence[int] = 12,
    until: float | None = None,
    *,
    since: float = 0.0,
    offline: OfflineTimes | None = None,
    used: np.ndarray | None = None,
    accepted: np.ndarray | None = None,
    scores: np.ndarray | None = None,
    names: Sequence[str] | None = None,
    drawing: Drawing = SCREEN,
) -> Figure:
    """A Gantt chart: one row per client, a bar per job from dispatch to upload, coloured by staleness.

    A tick marks the time at which the server applies the upload. A job whose upload is never applied has the colour of
    its reason, which the legend below names: lost, crashed, interrupted, called off, rejected ... A job that crashed or
    was interrupted ends where that happened, and a lost one where its upload was due. A cross marks this end, and an
    empty bar follows while the server waits in vain, up to the timeout. A thin line is idle time: the client has no job
    (without ``offline``, it may also be away). Marks at the upper edge, and pale lines if there are few, are server
    steps. If only a part of the clients or of the time is shown, the text above says so.

    Args:
      schedule: a plan, or a run, which brings its names, its times offline and which arrivals were used and accepted.
      clients: how many (the first ones) or which.
      since, until: the virtual times, in seconds, at which the chart begins and ends (default: from the beginning, or
        from ``since``, enough for about eight jobs per client). The chart ends with the schedule: if that is earlier,
        the text above says so.
      offline: when clients are offline, as ``clock.offline_times`` tells it; drawn behind the bars.
      used, accepted: bool[E], which arrivals are applied and accepted (default: all); for a run
        ``run.updates["used"]`` and ``run.updates["accepted"]``.
      scores: one number per job, in order of dispatch, written on its bar unless it is NaN; such as the score by which
        a policy chose the job, ``run.probes["chosen"]["score"]``.
      names: one per client, ``run.client_names``, in place of numbers. A name of more than 24 characters is cut, and
        the client's number follows it.

    Raises: ``ValueError`` for a schedule without jobs and for arguments that do not fit it.
    """
    known = _known_of(schedule, _Known(cast(Schedule, schedule), offline, used, accepted, names))
    schedule = known.schedule
    rows = rows_of(clients, schedule.num_clients)
    check.require(schedule.client.size > 0, "schedule", "no jobs", "a schedule with at least one job")
    mine = np.isin(schedule.client, rows)
    end = max(float(schedule.time.max(initial=0.0)), float(schedule.dispatch_time[-1])) or _longest(schedule)
    asked = window(since, until, _usual_window(schedule, mine), end)
    until = min(asked, end)
    _check_columns(schedule, known.used, known.accepted, scores)
    figure, axes = canvas.new(7.0, 1.1 + 0.24 * max(len(rows), 6), drawing)
    jobs = jobs_of(schedule, known.used, known.accepted)
    shown = np.flatnonzero(mine & (jobs.begin < until) & (jobs.waited >= since))
    row_of = {client: row for row, client in enumerate(rows)}
    y = np.array([row_of[int(client)] for client in schedule.client[shown]], np.float64)
    drawn = Jobs(*(column[shown] for column in jobs))
    about = _told_of(schedule, jobs, end)[shown]
    who = None if known.names is None else np.array(labels(known.names, schedule.client[shown]), object)
    absences = [NEVER if known.offline is None else known.offline(client, until) for client in rows]
    absences = [gone[gone[:, 1] > since] for gone in absences]
    away = draw_absences(axes, absences, until, "client")
    _draw_jobs(figure, axes, drawn, y, until, about, who)
    failed = _draw_failures(axes, drawn, y, until)
    if scores is not None:
        _write_scores(axes, drawn.begin / canvas.axis("time", until)[0], y, np.asarray(scores)[shown])
    busy = [(jobs.begin[its], jobs.waited[its]) for its in (schedule.client == client for client in rows)]
    gaps = [idle_time(*its, until, gone) for its, gone in zip(busy, absences, strict=True)]
    idle = _draw_idle(axes, [each[each[:, 1] > since] for each in gaps], until)
    steps = _draw_steps(axes, schedule, since, until)
    marks = {
        "black tick: applied": bool((drawn.applied <= until).any()),
        "thin line: idle": idle,
        "marks above: server steps": steps,
        "cross: upload will never come": failed,
    }
    marked = ("\n" if drawing.width == "column" else "; ").join(filter(marks.get, marks))  # a column is narrow
    first, last = left_out(rows, schedule.num_clients, "client", since, asked, end), known.unknown
    canvas.note(axes, first, last)
    above = "\n".join(filter(None, [first, marked, last]))
    axes.set_title(above, loc="left", fontsize=8, color=canvas.FAINT, pad=9)
    label_rows(axes, rows, known.names, since, until, "client")
    _name_colours(figure, drawn, until, drawing, away=away)
    return canvas.finish(figure, drawing)


def _told_of(schedule: Schedule, jobs: Jobs, end: float) -> np.ndarray:
    """Of each bar: client, job, version, steps, begin, end, application, staleness; float32[J, 8]."""
    finish = np.where(np.isfinite(jobs.end), jobs.end, end)
    plan = [schedule.client, schedule.number, schedule.version, schedule.local_steps]
    return np.stack([*plan, jobs.begin, finish, jobs.applied, jobs.staleness], axis=1).astype(np.float32)


class _Known(NamedTuple):
    """A schedule, and what is known about it: see :func:`gantt`; ``unknown`` says why times offline are not known."""

    schedule: Schedule
    offline: OfflineTimes | None
    used: np.ndarray | None
    accepted: np.ndarray | None
    names: Sequence[str] | None
    unknown: str = ""


def _known_of(schedule: Schedule | Run, given: _Known) -> _Known:
    """What is ``given``, and the rest from the run, if ``schedule`` is one; ``ValueError`` for anything else."""
    plan = cast(Schedule, getattr(schedule, "schedule", schedule))
    check.kind("schedule", plan, Schedule, "a Schedule, or a run with a server; peer_gantt draws those without")
    if not isinstance(schedule, Run):
        return given._replace(schedule=plan)
    absences = Absences(given.offline)
    if given.offline is None:
        absences = absences_of(schedule.settings, plan.num_clients)
    used, accepted = (
        schedule.updates.get(name) if column is None else column
        for name, column in (("used", given.used), ("accepted", given.accepted))
    )
    names = schedule.client_names if given.names is None else given.names
    return _Known(plan, absences.times, used, accepted, names, absences.note)


def _longest(schedule: Schedule) -> float:
    """Virtual seconds of the longest job, for a schedule in which all begin at 0 and none arrives."""
    return float(np.max(schedule.upload_time, where=np.isfinite(schedule.upload_time), initial=1.0))


def _usual_window(schedule: Schedule, mine: np.ndarray) -> float:
    """Virtual seconds for about eight of the jobs bool[J] in ``mine``."""
    durations = (schedule.upload_time - schedule.dispatch_time)[mine]
    durations = durations[np.isfinite(durations)]
    return 8 * float(np.median(durations)) if durations.size else math.inf


def _check_columns(
    schedule: Schedule, used: np.ndarray | None, accepted: np.ndarray | None, scores: np.ndarray | None
) -> None:
    """``ValueError`` for columns that do not have an entry for each arrival or, ``scores``, for each job."""
    for name, chosen in (("used", used), ("accepted", accepted)):
        expected = f"bool[{len(schedule.job)}], of arrivals"
        shape = schedule.job.shape if chosen is None else np.shape(chosen)
        check.require(shape == schedule.job.shape, name, shape, expected)
    expected = f"one number per job, [{len(schedule.client)}]"
    shape = schedule.client.shape if scores is None else np.shape(scores)
    check.require(shape == schedule.client.shape, "scores", shape, expected)


def _text_over(state: str, about: np.ndarray, who: np.ndarray | None) -> dict[str, object]:
    """What the page writes over jobs in this state.

    ``about``, float32[J, 8]: client, number, version, local steps; begin, end and application in seconds; staleness;
    ``who``: the names of their clients, if they have some.
    """
    name = "%{customdata[0]}" if who is None else "%{hovertext}"
    text = (
        f"client {name}, job %{{customdata[1]}}: {state}<br>%{{customdata[3]}} local steps from version "
        "%{customdata[2]}<br>sent at %{customdata[4]:,.6~g} s, ends at %{customdata[5]:,.6~g} s"
    )
    if state in (*BY_STALENESS, REJECTED):
        text += "<br>applied at %{customdata[6]:,.6~g} s, staleness %{customdata[7]}"
    names = {} if who is None else {"hovertext": who.tolist()}
    return {"customdata": about, "hovertemplate": f"{text}<extra></extra>", **names}


def _draw_jobs(
    figure: Figure, axes: Axes, jobs: Jobs, y: np.ndarray, until: float, about: np.ndarray, who: np.ndarray | None
) -> None:
    """Bars in the rows ``y``, ticks and the colour scale; ``about`` and ``who``: as in :func:`_text_over`, per job."""
    from matplotlib.collections import PatchCollection  # noqa: PLC0415
    from matplotlib.patches import Rectangle  # noqa: PLC0415

    size, _ = canvas.axis("time", until)
    colours = staleness_colours(figure, axes, jobs.staleness, "server steps")
    faces = [
        colours.to_rgba(value) if state not in STATE_COLOURS else STATE_COLOURS[state]
        for value, state in zip(jobs.staleness, jobs.state, strict=True)
    ]
    gap = 0.0015 * until  # a narrow white gap between a client's consecutive jobs
    boxes = [
        Rectangle((a / size, row - 0.34), max(b - a - gap, gap) / size, 0.68)
        for a, b, row in zip(jobs.begin, np.minimum(jobs.end, until), y, strict=True)
    ]
    bars = axes.add_collection(PatchCollection(boxes, facecolor=faces, linewidth=0))
    for state in (*BY_STALENESS, *STATE_COLOURS):
        if len(mine := np.flatnonzero(jobs.state == state)):
            over = _text_over(state, about[mine], None if who is None else who[mine])
            canvas.mark(axes, bars, name=state, only=mine, **over)
    seen = jobs.applied <= until
    came = axes.vlines(jobs.applied[seen] / size, y[seen] - 0.45, y[seen] + 0.45, color=canvas.INK, linewidth=0.9)
    canvas.mark(axes, came, name="upload applied")


def _draw_failures(axes: Axes, jobs: Jobs, y: np.ndarray, until: float) -> bool:
    """A cross where the work of a failed job ended, and an empty bar while the server waits in vain for its upload.

    Returns whether there is any cross: it also shows a job that failed at its start, whose bar has no width.
    """
    size, _ = canvas.axis("time", until)
    failed = np.isin(jobs.state, FAILED) & (jobs.end <= until)
    colours = [STATE_COLOURS[state] for state in jobs.state[failed]]
    if not colours:
        return False
    end, waited = jobs.end[failed] / size, np.minimum(jobs.waited[failed], until) / size
    waits = np.flatnonzero(waited > end)
    bars = axes.barh(
        y[failed][waits],
        (waited - end)[waits],
        left=end[waits],
        height=0.3,
        facecolor="white",
        edgecolor=[colours[k] for k in waits],
        linewidth=0.8,
        zorder=0.95,
    )
    if len(bars):
        canvas.mark(axes, bars, name=WAITING, hoverinfo="skip")
    crosses = axes.scatter(end, y[failed], s=30, marker="X", c=colours, edgecolors="white", linewidths=0.6, zorder=2.5)
    canvas.mark(axes, crosses, name="upload will never come")
    return True


def _name_colours(figure: Figure, jobs: Jobs, until: float, drawing: Drawing, *, away: bool) -> None:
    """The legend: a colour for each state of jobs that are never applied, the empty bars, times offline."""
    from matplotlib.patches import Patch  # noqa: PLC0415 (an extra)

    patches = {state: Patch(color=colour) for state, colour in STATE_COLOURS.items() if state in jobs.state}
    if ((jobs.waited > jobs.end) & (jobs.end < until)).any():
        patches[WAITING] = Patch(facecolor="white", edgecolor=canvas.INK, linewidth=0.8)
    if away:
        patches["client offline"] = Patch(color=OFFLINE)
    if patches:
        canvas.legend_below(figure, list(patches.values()), list(patches), drawing, len(patches))


def _write_scores(axes: Axes, begin: np.ndarray, y: np.ndarray, scores: np.ndarray) -> None:
    """Write the score of each job at the beginning of its bar."""
    from matplotlib import patheffects  # noqa: PLC0415 (an extra)

    outline = [patheffects.withStroke(linewidth=1.5, foreground="white")]  # readable on dark bars too
    for at, row, score in zip(begin, y, scores, strict=True):
        if np.isfinite(score):
            axes.text(at, row, f" {score:.3g}", fontsize=6, va="center", clip_on=True, path_effects=outline)


def _draw_idle(axes: Axes, of_rows: Sequence[np.ndarray], until: float) -> bool:
    """A thin line for each interval of idle time in each row; returns whether there is any."""
    begin, end = np.concatenate(of_rows).T / canvas.axis("time", until)[0]
    y = np.repeat(np.arange(len(of_rows)), [len(gaps) for gaps in of_rows])
    lines = axes.hlines(y, begin, end, color=canvas.FAINT, linewidth=0.8, zorder=0.9)
    canvas.mark(axes, lines, name="idle")
    return len(y) > 0


def _draw_steps(axes: Axes, schedule: Schedule, since: float, until: float) -> bool:
    """Marks at the upper edge where a server step closes, and lines if they are few; returns whether there is any."""
    size, _ = canvas.axis("time", until)
    seen = schedule.closes & (schedule.time >= since) & (schedule.time <= until)
    steps = np.unique(schedule.time[seen]) / size
    edge = axes.get_xaxis_transform()
    few = len(steps) <= MOST_STEP_LINES
    lines = axes.vlines(steps, 0, 1, transform=edge, color=canvas.GRID, linewidth=0.8, zorder=0.5, visible=few)
    canvas.mark(axes, lines, name="server steps", visible="legendonly", line={"color": canvas.PALETTE[1], "width": 0.6})
    axes.vlines(steps, 1.0, 1.025, transform=edge, color=canvas.INK, linewidth=0.7, clip_on=False)
    return len(steps) > 0
