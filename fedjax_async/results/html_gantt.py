"""Gantt charts of the HTML report, for runs with a server and without."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedjax_async.clock import Outcome, PeerSchedule, with_derived_columns
from fedjax_async.engine.peer_result import executed
from fedjax_async.results.figure import INK, PALETTE
from fedjax_async.results.html_figures import Figure, Shown, axis, plot
from fedjax_async.results.peer_gantt import MESSAGE_STYLES
from fedjax_async.types import Run, Schedule

MOST_ROWS = 40  # clients of a chart
REJECTED = "rejected"  # arrived in time, but the server rule gave it no weight
UNUSED = "unused"  # arrived for a server step that was not complete at the end
APPLIED = ("applied", "late")  # states with a staleness, which gives their colour
STATE_COLOURS = dict(
    zip(
        ("under way", "called off", "lost", "crashed", "interrupted", "dropped late", "dropped stale", "given up"),
        ("#D9D9D9", "#BDBDBD", "#D55E00", "#8B1A1A", "#CC79A7", "#E69F00", "#B8860B", "#9C8AA5"),
        strict=True,
    )
) | {REJECTED: "#000000", UNUSED: "#A6CEE3"}
TICKS: dict[str, Any] = {
    **{"type": "scatter", "mode": "markers", "hoverinfo": "skip"},
    "marker": {"symbol": "line-ns-open", "size": 12, "color": INK},
}


def job_states(run: Run, schedule: Schedule) -> np.ndarray:
    """The state of each job: its :class:`~fedjax_async.clock.Outcome` as text, ``rejected`` or ``unused``; str[J]."""
    names = np.array([outcome.name.lower().replace("_", " ") for outcome in Outcome], dtype=object)
    states = names[schedule.outcome]
    states[schedule.job[~np.asarray(run.updates["accepted"], bool)]] = REJECTED
    if "used" in run.updates:
        states[schedule.job[~np.asarray(run.updates["used"], bool)]] = UNUSED
    return states


def _part(
    client: np.ndarray, begin: np.ndarray, end: float, most: int, names: tuple[str, str]
) -> tuple[np.ndarray, np.ndarray, float, str]:
    """The clients and bars of a chart, the end of its time axis, and a note on what it leaves out.

    ``client`` and ``begin``: of each bar; ``names``: of the rows and of the bars, in the plural.
    """
    there = np.unique(client)
    clients = there[:MOST_ROWS]
    bars = np.flatnonzero(np.isin(client, clients))
    bars = bars[np.argsort(begin[bars], kind="stable")]
    until = max(end, float(begin[bars].max(initial=0.0)))
    parts = []
    if len(clients) < len(there):
        parts.append(f"the first {len(clients)} of {len(there):,} {names[0]}")
    if len(bars) > most:
        until = float(begin[bars[most]])
        bars = bars[:most]
        parts.append(f"{names[1]} begun in the first {until:,.6g} of {end:,.6g} s")
    note = f"Shows {len(bars):,} of {len(client):,} {names[1]}: {', '.join(parts)}." if parts else ""
    return clients, bars, until, note


def _bars(name: str, begin: np.ndarray, end: np.ndarray, rows: np.ndarray, **more: Any) -> dict[str, Any]:
    """Horizontal bars from ``begin`` to ``end``."""
    bars = {"base": begin, "x": np.maximum(end - begin, 0.0), "y": rows, "width": 0.7}
    return {"type": "bar", "orientation": "h", "name": name, "textposition": "none", **bars, **more}


def _chart(data: list[dict[str, Any]], clients: np.ndarray, until: float, rows: str, bar: str, top: float) -> Figure:
    """The figure. ``rows``: name of its rows; ``bar``: unit of the staleness (colour of bars); ``top``: its maximum."""
    y = axis(rows, range=[len(clients) - 0.4, -0.6], showgrid=False)
    y |= {"tickvals": list(range(len(clients))), "ticktext": [str(client) for client in clients]}
    scale = {"title": {"text": f"staleness<br>({bar})"}, "thickness": 12, "outlinewidth": 0}
    return plot(
        data,
        axis("virtual time (s)", range=[0.0, until or 1.0], tickformat=",~g"),
        y,
        barmode="overlay",
        coloraxis={"colorscale": "Viridis", "reversescale": True, "cmin": 0, "cmax": max(1, top), "colorbar": scale},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0},
        height=150 + 20 * max(len(clients), 6),
    )


def gantt(run: Run, most_jobs: int) -> Shown:
    """A row per client, a bar per job from dispatch to upload, coloured by staleness or, if not applied, by its state.

    A tick marks the time at which the server applies an upload. The legend can show the times of server steps. At most
    ``MOST_ROWS`` clients and ``most_jobs`` jobs; the note says what is left out.
    """
    schedule = with_derived_columns(run.schedule)
    end = max(float(np.max(schedule.time, initial=0.0)), float(run.evaluations["time"][-1]))
    names = ("clients with jobs", "jobs")
    clients, jobs, until, note = _part(schedule.client, schedule.dispatch_time, end, most_jobs, names)
    staleness = np.full(schedule.client.size, -1)
    applied = np.full(schedule.client.size, np.nan)
    # In reverse order, as in plots.py: the first application of a job would count.
    staleness[schedule.job[::-1]], applied[schedule.job[::-1]] = schedule.staleness[::-1], schedule.time[::-1]
    finish = np.where(np.isfinite(schedule.upload_time), schedule.upload_time, schedule.freed_time)
    finish = np.where(np.isfinite(finish), finish, end)
    rows = np.searchsorted(clients, schedule.client)
    states = job_states(run, schedule)
    applied[states == UNUSED] = np.nan
    data: list[dict[str, Any]] = []
    for state in dict.fromkeys((*APPLIED, REJECTED, *STATE_COLOURS)):
        mine = jobs[states[jobs] == state]
        if not mine.size:
            continue
        columns = (schedule.client, schedule.number, schedule.version, schedule.local_steps, finish, applied, staleness)
        came = state in (*APPLIED, REJECTED)
        text = (
            f"client %{{customdata[0]}}, job %{{customdata[1]}}: {state}<br>"
            "%{customdata[3]} local steps from version %{customdata[2]}<br>"
            "sent at %{base:,.6~g} s, ends at %{customdata[4]:,.6~g} s"
        )
        text += "<br>applied at %{customdata[5]:,.6~g} s, staleness %{customdata[6]}" if came else ""
        colour = {"color": staleness[mine].tolist(), "coloraxis": "coloraxis"} if state in APPLIED else {}
        data.append(
            _bars(
                state,
                schedule.dispatch_time[mine],
                finish[mine],
                rows[mine],
                marker=colour or {"color": STATE_COLOURS[state]},
                customdata=np.column_stack([column[mine] for column in columns]).astype(np.float32),
                hovertemplate=text + "<extra></extra>",
            )
        )
    came = jobs[np.isfinite(applied[jobs])]
    data.append(TICKS | {"name": "upload applied", "x": applied[came], "y": rows[came]})
    steps = schedule.time[schedule.closes & (schedule.time <= until)][:most_jobs]
    middle = (len(clients) - 1) / 2
    height = {"type": "constant", "value": middle + 0.5, "width": 0, "thickness": 0.6, "color": PALETTE[1]}
    line = TICKS | {"marker": {"opacity": 0, "color": PALETTE[1]}, "error_y": height, "y0": middle, "dy": 0}
    data.append(line | {"name": "server steps", "x": steps, "visible": "legendonly"})
    top = int(staleness[jobs].max(initial=0))
    return Shown("Schedule", _chart(data, clients, until, "client", "server steps", top), note)


def peer_gantt(run: Run, most_drawn: int) -> Shown:
    """A row per node, a bar per compute event, coloured by the staleness of what it mixes; a line per message.

    A tick marks the time at which an event mixes its inbox. The legend can hide messages by their outcome. Messages to
    and from nodes or events that are not shown are left out. At most ``MOST_ROWS`` nodes, and ``most_drawn``
    events and messages together; the note says what is left out.
    """
    plan: PeerSchedule = run.schedule
    end = float(run.evaluations["time"][-1])
    most = max(1, most_drawn * len(plan.client) // (len(plan.client) + len(plan.push_event)))
    chosen = executed(plan, np.asarray(run.evaluations["time"]))
    names = ("nodes with events", "events")
    nodes, shown, until, note = _part(plan.client[chosen], plan.start[chosen], end, most, names)
    staleness, accepted = np.asarray(run.updates["staleness"])[shown], np.asarray(run.updates["accepted"], bool)[shown]
    events = chosen[shown]
    rows = np.searchsorted(nodes, plan.client[events])
    mixed, sent = np.diff(plan.inbox_bounds)[events], np.bincount(plan.push_event, minlength=len(plan.client))[events]
    columns = (plan.number[events], plan.local_steps[events], plan.end[events], plan.mixed_at[events], mixed, sent)
    about = np.column_stack([plan.client[events], *columns, staleness]).astype(np.float32)
    text = (
        "node %{customdata[0]}, event %{customdata[1]}: %{customdata[2]} local steps<br>"
        "from %{base:,.6~g} s to %{customdata[3]:,.6~g} s, sends %{customdata[6]} messages<br>"
        "mixes %{customdata[5]} messages at %{customdata[4]:,.6~g} s, staleness %{customdata[7]:.3~g}<extra></extra>"
    )
    data = _messages(plan, nodes, events)
    for name, mine in (("trained", accepted), (REJECTED, ~accepted)):
        if mine.any():
            colour = {"color": staleness[mine].tolist(), "coloraxis": "coloraxis"} if name != REJECTED else {}
            coordinates = (plan.start[events[mine]], plan.end[events[mine]], rows[mine])
            more = {"marker": colour or {"color": STATE_COLOURS[REJECTED]}, "customdata": about[mine]}
            data.append(_bars(name, *coordinates, **more, hovertemplate=text))
    mixes = mixed > 0
    data.append(TICKS | {"name": "inbox mixed", "x": plan.mixed_at[events][mixes], "y": rows[mixes]})
    top = float(staleness.max(initial=0.0))
    return Shown("Schedule", _chart(data, nodes, until, "node", "events of the sender", top), note)


def _messages(plan: PeerSchedule, nodes: np.ndarray, events: np.ndarray) -> list[dict[str, Any]]:
    """A line from each of these events to each receiver that is shown, one trace per outcome of the messages."""
    pushes = np.flatnonzero(np.isin(plan.push_event, events) & np.isin(plan.receiver, nodes))
    sent = plan.end[plan.push_event]
    data: list[dict[str, Any]] = []
    for name, (outcomes, colour, dash) in MESSAGE_STYLES.items():
        mine = pushes[np.isin(plan.outcome[pushes], outcomes)]
        if not mine.size:
            continue
        arrival = np.where(np.isfinite(plan.arrival[mine]), plan.arrival[mine], sent[mine])
        gap = np.full(mine.size, np.nan)
        at, ends = plan.client[plan.push_event[mine]], plan.receiver[mine]
        x = np.column_stack([sent[mine], arrival, gap]).ravel()
        y = np.column_stack([np.searchsorted(nodes, at), np.searchsorted(nodes, ends), gap]).ravel()
        line = {"color": colour, "width": 0.7, "dash": "solid" if dash == "-" else "dot"}
        trace = {"type": "scatter", "mode": "lines", "hoverinfo": "skip", "opacity": 0.7, "name": f"message {name}"}
        data.append(trace | {"x": x, "y": y, "line": line})
    return data
