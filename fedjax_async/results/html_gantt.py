"""Gantt charts of the HTML report, for runs with a server and without."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedjax_async.engine.peer_points import executed
from fedjax_async.peers import PeerSchedule
from fedjax_async.results.absences import absences_of
from fedjax_async.results.figure import INK, PALETTE
from fedjax_async.results.html_figures import Json, Shown, axis, escaped_labels, hover_names, plot
from fedjax_async.results.timeline import (
    BY_STALENESS,
    FAILED,
    OFFLINE,
    REJECTED,
    STATE_COLOURS,
    WAITING,
    away,
    jobs_of,
    lines_of,
)
from fedjax_async.types import Run

MOST_ROWS = 40  # clients of a chart
TICKS: Json = {
    **{"type": "scatter", "mode": "markers", "hoverinfo": "skip"},
    "marker": {"symbol": "line-ns-open", "size": 12, "color": INK},
}


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


def _bars(name: str, begin: np.ndarray, end: np.ndarray, rows: np.ndarray, **more: object) -> Json:
    """Horizontal bars from ``begin`` to ``end``."""
    bars = {"base": begin, "x": np.maximum(end - begin, 0.0), "y": rows, "width": 0.7}
    return {"type": "bar", "orientation": "h", "name": name, "textposition": "none", **bars, **more}


def _offline(name: str, of_rows: Sequence[np.ndarray]) -> list[Json]:
    """A bar behind the others for each interval, float64[M, 2], in which the client or node of a row is away."""
    if not any(map(len, of_rows)):
        return []
    rows, (begin, end) = np.repeat(np.arange(len(of_rows)), [*map(len, of_rows)]), np.concatenate(of_rows).T
    look = {"marker": {"color": OFFLINE}, "hoverinfo": "skip", "width": 0.86}
    return [_bars(f"{name} offline", begin, end, rows, **look)]


def _chart(
    data: list[Json], clients: np.ndarray, names: Sequence[str] | None, until: float, rows: str, bar: str, top: float
) -> Json:
    """The figure.

    ``names``: of all clients; ``rows``: name of its rows; ``bar``: unit of the staleness (colour of bars); ``top``: its
    maximum.
    """
    y = axis(rows, range=[len(clients) - 0.4, -0.6], showgrid=False)
    y |= {"tickvals": list(range(len(clients))), "ticktext": escaped_labels(names, clients)}
    y |= {} if names is None else {"automargin": True}
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


def _failures(end: np.ndarray, waited: np.ndarray, rows: np.ndarray, colours: Sequence[str]) -> list[Json]:
    """A cross where the work of a failed job ended, and an empty bar up to ``waited`` if the server waits longer."""
    if not len(end):
        return []
    waits = np.flatnonzero(waited > end)
    empty = {"color": "white", "line": {"color": [colours[k] for k in waits.tolist()], "width": 1}}
    look = {"marker": empty, "hoverinfo": "skip", "width": 0.3}
    bars = [_bars(WAITING, end[waits], waited[waits], rows[waits], **look)] if len(waits) else []
    cross = {"symbol": "x", "size": 7, "color": list(colours), "line": {"color": "white", "width": 1}}
    name = "upload will never come"
    return [*bars, TICKS | {"name": name, "x": end, "y": rows, "marker": cross}]


def _marker(state: str, staleness: np.ndarray) -> Json:
    """The look of bars in this state: the colour of their staleness or, if it has none, that of the state."""
    if state in STATE_COLOURS:
        return {"color": STATE_COLOURS[state]}
    return {"color": staleness.tolist(), "coloraxis": "coloraxis"}


def gantt(run: Run, most_jobs: int) -> Shown:
    """A row per client, a bar per job from dispatch to upload, coloured by staleness or, if not applied, by its state.

    A tick marks the time at which the server applies an upload. A cross and an empty bar show the end of a failed job
    and how long the server waits in vain. The legend can show the times of server steps. At most
    ``MOST_ROWS`` clients and ``most_jobs`` jobs; the note says what is left out.
    """
    schedule = run.schedule
    begin, finish, waited, staleness, applied, state = jobs_of(
        schedule, run.updates.get("used"), run.updates["accepted"]
    )
    end = max(float(np.max(schedule.time, initial=0.0)), float(run.evaluations["time"][-1]))
    names = ("clients with jobs", "jobs")
    clients, jobs, until, note = _part(schedule.client, begin, end, most_jobs, names)
    finish = np.where(np.isfinite(finish), finish, end)
    rows = np.searchsorted(clients, schedule.client)
    columns = (schedule.client, schedule.number, schedule.version, schedule.local_steps, finish, applied, staleness)
    absences = absences_of(run.settings, schedule.num_clients)
    note = " ".join(filter(None, [note, absences.note and f"{absences.note[0].upper()}{absences.note[1:]}."]))
    who = "%{customdata[0]}" if run.client_names is None else "%{hovertext}"
    data = _offline("client", [] if absences.times is None else [absences.times(int(c), until) for c in clients])
    for name in (*BY_STALENESS, *STATE_COLOURS):
        mine = jobs[state[jobs] == name]
        if not mine.size:
            continue
        text = (
            f"client {who}, job %{{customdata[1]}}: {name}<br>"
            "%{customdata[3]} local steps from version %{customdata[2]}<br>"
            "sent at %{base:,.6~g} s, ends at %{customdata[4]:,.6~g} s"
        )
        if name in (*BY_STALENESS, REJECTED):
            text += "<br>applied at %{customdata[5]:,.6~g} s, staleness %{customdata[6]}"
        about = np.column_stack([column[mine] for column in columns]).astype(np.float32)
        more = {
            "marker": _marker(name, staleness[mine]),
            "customdata": about,
            "hovertemplate": text + "<extra></extra>",
            **hover_names(run.client_names, schedule.client[mine]),
        }
        data.append(_bars(name, begin[mine], finish[mine], rows[mine], **more))
    failed = jobs[np.isin(state[jobs], FAILED) & np.isfinite(waited[jobs])]
    colours = [STATE_COLOURS[each] for each in state[failed]]
    data += _failures(finish[failed], waited[failed], rows[failed], colours)
    came = jobs[np.isfinite(applied[jobs])]
    data.append(TICKS | {"name": "upload applied", "x": applied[came], "y": rows[came]})
    steps = schedule.time[schedule.closes & (schedule.time <= until)][:most_jobs]
    middle = (len(clients) - 1) / 2
    height = {"type": "constant", "value": middle + 0.5, "width": 0, "thickness": 0.6, "color": PALETTE[1]}
    line = TICKS | {"marker": {"opacity": 0, "color": PALETTE[1]}, "error_y": height, "y0": middle, "dy": 0}
    data.append(line | {"name": "server steps", "x": steps, "visible": "legendonly"})
    top = int(staleness[jobs].max(initial=0))
    return Shown("Schedule", _chart(data, clients, run.client_names, until, "client", "server steps", top), note)


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
        f"node {'%{customdata[0]}' if run.client_names is None else '%{hovertext}'}, "
        "event %{customdata[1]}: %{customdata[2]} local steps<br>"
        "from %{base:,.6~g} s to %{customdata[3]:,.6~g} s, sends %{customdata[6]} messages<br>"
        "mixes %{customdata[5]} messages at %{customdata[4]:,.6~g} s, staleness %{customdata[7]:.3~g}<extra></extra>"
    )
    row_of = np.full(plan.num_clients, -1)
    row_of[nodes] = np.arange(len(nodes))
    data = _offline("node", [away(plan, int(node), until) for node in nodes])
    for name, (colour, dotted, time, row) in lines_of(plan, row_of, np.isin(plan.push_event, events)).items():
        gap = np.full(len(time), np.nan)
        x, y = (np.column_stack([ends, gap]).ravel() for ends in (time, row))
        line = {"color": colour, "width": 0.7, "dash": "dot" if dotted else "solid"}
        trace = {"type": "scatter", "mode": "lines", "hoverinfo": "skip", "opacity": 0.7, "name": f"message {name}"}
        data.append(trace | {"x": x, "y": y, "line": line})
    for name, mine in (("trained", accepted), (REJECTED, ~accepted)):
        if mine.any():
            more = {"marker": _marker(name, staleness[mine]), "customdata": about[mine], "hovertemplate": text}
            more |= hover_names(run.client_names, plan.client[events[mine]])
            data.append(_bars(name, plan.start[events[mine]], plan.end[events[mine]], rows[mine], **more))
    mixes = mixed > 0
    data.append(TICKS | {"name": "inbox mixed", "x": plan.mixed_at[events][mixes], "y": rows[mixes]})
    top = float(staleness.max(initial=0.0))
    return Shown("Schedule", _chart(data, nodes, run.client_names, until, "node", "events of the sender", top), note)
