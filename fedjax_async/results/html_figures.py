"""Interactive figures of the HTML report: curves over seeds, Gantt chart, clients, staleness.

Each figure is a dict, ``data`` and ``layout`` in plotly's JSON; plotly checks it here and draws it in the browser. Long
arrays are base64 (``bdata``) in their full precision. plotly comes with the extra ``report`` and is imported only when
a figure is made. A name may be any text: it is escaped, because plotly reads tags in the texts that it draws.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from fedjax_async.clock import Outcome, PeerSchedule, with_derived_columns
from fedjax_async.results import metrics
from fedjax_async.results.figure import FAINT, GRID, INK, PALETTE
from fedjax_async.results.measured import client_scores, column_title, of_metric, of_model
from fedjax_async.types import Run, Schedule

DASHES = ("solid", "dash", "dot", "dashdot")  # once the colours are used up
MOST_LINES = len(PALETTE) * len(DASHES)  # more cannot be told apart
MOST_ROWS = 40  # clients of a Gantt chart
MOST_BARS = 400  # clients with a bar each; more become a histogram
BINS = 60
UNITS = {
    "time": "virtual time (s)",
    "update": "client updates applied",
    "step": "server steps",
    "bytes": "sent, both directions (bytes)",
}
# column of the evaluations -> factor, title
METRICS = {"accuracy": (100.0, "test accuracy (%)"), "loss": (1.0, "test loss")}
REJECTED = "rejected"  # came in time, but the server rule gave it no weight
UNUSED = "unused"  # came for a server step that was not complete at the end
APPLIED = ("applied", "late")  # states with a staleness: their colour
STATE_COLOURS = dict(
    zip(
        ("under way", "called off", "lost", "crashed", "interrupted", "dropped late", "dropped stale", "given up"),
        ("#D9D9D9", "#BDBDBD", "#D55E00", "#8B1A1A", "#CC79A7", "#E69F00", "#B8860B", "#9C8AA5"),
        strict=True,
    )
) | {REJECTED: "#000000", UNUSED: "#A6CEE3"}

Figure = dict[str, Any]


class Shown(NamedTuple):
    """A figure, its title, and what it leaves out (empty if it shows everything)."""

    title: str
    figure: Figure
    note: str = ""


def require_plotly() -> ModuleType:
    """The package plotly; ``ValueError`` naming the extra to install where it is missing."""
    try:
        import plotly.graph_objects  # noqa: PLC0415
        import plotly.offline  # noqa: PLC0415
    except ImportError as error:
        raise ValueError("the HTML report needs plotly: pip install 'fedjax-async[report]'") from error
    return plotly


def _axis(title: str, **more: Any) -> dict[str, Any]:
    line = {"showline": True, "linecolor": FAINT, "ticks": "outside", "tickcolor": FAINT, "zeroline": False}
    return {"title": {"text": title}, "gridcolor": GRID, **line, **more}


def _figure(data: Sequence[Mapping[str, Any]], x: Mapping[str, Any], y: Mapping[str, Any], **layout: Any) -> Figure:
    """``data`` and ``layout`` as JSON, checked by plotly."""
    make = require_plotly().graph_objects.Figure
    plain = {"template": "none", "font": {"color": INK, "size": 12}, "margin": {"l": 60, "r": 20, "t": 20, "b": 50}}
    figure: Figure = json.loads(make(list(data), plain | layout | {"xaxis": x, "yaxis": y}).to_json())
    return figure


# --- curves -----------------------------------------------------------------------------------------


def _thin(size: int, most: int) -> np.ndarray:
    """At most ``most`` positions of ``size``, evenly spread, with the first and the last."""
    return np.arange(size) if size <= most else np.unique(np.linspace(0, size - 1, most).astype(np.int64))


def curves(runs: Mapping[str, Sequence[Run]], x: str, column: str, most_points: int, most_seeds: int) -> Figure:
    """One column of the evaluations against ``x``: means over seeds, bands of one standard deviation, every seed.

    ``runs`` maps each group to its runs, one per seed. Means are those of :func:`metrics.mean_curve`: over several
    seeds running means, which end at the default number of the tables; a single run is drawn as it is. ``meta.part`` of
    a trace is ``mean``, ``band`` or ``seed`` (then ``meta.seed`` is its number); ``legendgroup`` numbers its group. A
    line of more than ``most_points`` points is thinned evenly; its last point stays. Single seeds: the first
    ``most_seeds`` of each group.
    """
    factor = metrics.percent(column)
    title = METRICS[column][1] if column in METRICS else column_title(column) + (" (%)" if factor > 1 else "")
    data: list[dict[str, Any]] = []
    for index, (name, seeds) in enumerate(runs.items()):
        colour, dash = PALETTE[index % len(PALETTE)], DASHES[index // len(PALETTE) % len(DASHES)]
        several = len(seeds) > 1
        curve = metrics.mean_curve(seeds, x, column, factor, metrics.FINAL if several else "last")
        kept = _thin(len(curve.at), most_points)
        at, mean, std = curve.at[kept], curve.mean[kept], curve.std[kept]
        look = {"color": colour, "shape": "hv" if curve.steps else "linear"}
        group = {"type": "scatter", "mode": "lines", "legendgroup": str(index), "name": html.escape(name)}
        if several:
            side = group | {"x": at, "line": look | {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
            side |= {"meta": {"part": "band"}}
            fill = {"fill": "tonexty", "fillcolor": _faint(colour)}
            data += [side | {"y": mean - std}, side | {"y": mean + std} | fill]
        template = "%{y:.4g}" + (" ± %{customdata:.3g}" if several else "") + " at %{x:,.6~g}"
        mark = {"mode": "lines+markers", "marker": {"size": 4 if len(at) <= 100 else 1}}
        mean_line = group | mark | {"x": at, "y": mean, "customdata": std, "line": look | {"width": 2, "dash": dash}}
        data.append(mean_line | {"hovertemplate": template, "meta": {"part": "mean"}})
        for run in seeds[:most_seeds] if several else ():
            amounts = metrics.progress_in(run, x)
            kept = _thin(len(amounts), most_points)
            values = factor * np.asarray(run.evaluations[column], np.float64)
            number = str(run.settings.get("seed", ""))
            line = {"x": amounts[kept], "y": values[kept], "line": {"color": colour, "width": 0.8, "dash": dash}}
            about = {"name": html.escape(f"{name}, seed {number}"), "meta": {"part": "seed", "seed": number}}
            hover = {"hovertemplate": "%{y:.4g} at %{x:,.6~g}", "opacity": 0.6, "showlegend": False}
            data.append(group | line | about | hover)
    tick = {"tickformat": "~s"} if x == "bytes" else {"tickformat": ",~g"}
    legend = {"groupclick": "togglegroup", "orientation": "v"}
    return _figure(
        data, _axis(UNITS[x], rangemode="tozero", **tick), _axis(title), legend=legend, showlegend=True, height=480
    )


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"


# --- schedule ---------------------------------------------------------------------------------------


def job_states(run: Run, schedule: Schedule) -> np.ndarray:
    """Each job's end, as text: its :class:`~fedjax_async.clock.Outcome`, ``rejected`` or ``unused``; str[J]."""
    names = np.array([outcome.name.lower().replace("_", " ") for outcome in Outcome], dtype=object)
    states = names[schedule.outcome]
    states[schedule.job[~np.asarray(run.updates["accepted"], bool)]] = REJECTED
    if "used" in run.updates:
        states[schedule.job[~np.asarray(run.updates["used"], bool)]] = UNUSED
    return states


def _part(schedule: Schedule, end: float, most_jobs: int) -> tuple[np.ndarray, np.ndarray, float, str]:
    """The clients and jobs of a Gantt chart, the end of its time, and what it leaves out."""
    with_jobs = np.unique(schedule.client)
    clients = with_jobs[:MOST_ROWS]
    jobs = np.flatnonzero(np.isin(schedule.client, clients))
    jobs = jobs[np.argsort(schedule.dispatch_time[jobs], kind="stable")]
    until = max(end, float(schedule.dispatch_time[jobs].max(initial=0.0)))
    parts = []
    if len(clients) < len(with_jobs):
        parts.append(f"the first {len(clients)} of {len(with_jobs):,} clients with jobs")
    if len(jobs) > most_jobs:
        until = float(schedule.dispatch_time[jobs[most_jobs]])
        jobs = jobs[:most_jobs]
        parts.append(f"jobs sent in the first {until:,.6g} of {end:,.6g} s")
    note = f"Shows {len(jobs):,} of {len(schedule.client):,} jobs: {', '.join(parts)}." if parts else ""
    return clients, jobs, until, note


def gantt(run: Run, most_jobs: int) -> Shown:
    """A row per client, a bar per job from dispatch to upload: coloured by staleness, or by what became of it.

    A tick marks the moment at which the server applies an upload. The moments of server steps can be switched on in
    the legend. At most ``MOST_ROWS`` clients and ``most_jobs`` jobs; the note says what is left out.
    """
    schedule = with_derived_columns(run.schedule)
    end = max(float(np.max(schedule.time, initial=0.0)), float(run.evaluations["time"][-1]))
    clients, jobs, until, note = _part(schedule, end, most_jobs)
    staleness = np.full(schedule.client.size, -1)
    applied = np.full(schedule.client.size, np.nan)
    # A job may arrive twice (a late duplicate): its first application counts.
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
            {
                "type": "bar",
                "orientation": "h",
                "name": state,
                "base": schedule.dispatch_time[mine],
                "x": np.maximum(finish[mine] - schedule.dispatch_time[mine], 0.0),
                "y": rows[mine],
                "width": 0.7,
                "textposition": "none",
                "marker": colour or {"color": STATE_COLOURS[state]},
                "customdata": np.column_stack([column[mine] for column in columns]).astype(np.float32),
                "hovertemplate": text + "<extra></extra>",
            }
        )
    came = jobs[np.isfinite(applied[jobs])]
    tick = {"symbol": "line-ns-open", "size": 12, "color": INK}
    points = {"type": "scatter", "mode": "markers", "marker": tick, "hoverinfo": "skip"}
    data.append(points | {"name": "upload applied", "x": applied[came], "y": rows[came]})
    steps = schedule.time[schedule.closes & (schedule.time <= until)][:most_jobs]
    middle = (len(clients) - 1) / 2
    height = {"type": "constant", "value": middle + 0.5, "width": 0, "thickness": 0.6, "color": PALETTE[1]}
    line = points | {"marker": {"opacity": 0, "color": PALETTE[1]}, "error_y": height, "y0": middle, "dy": 0}
    data.append(line | {"name": "server steps", "x": steps, "visible": "legendonly"})
    bar = {"title": {"text": "staleness<br>(server steps)"}, "thickness": 12, "outlinewidth": 0}
    top = max(1, int(staleness[jobs].max(initial=0)))
    y = _axis("client", range=[len(clients) - 0.4, -0.6], showgrid=False)
    y |= {"tickvals": list(range(len(clients))), "ticktext": [str(client) for client in clients]}
    legend = {"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0}
    figure = _figure(
        data,
        _axis("virtual time (s)", range=[0.0, until or 1.0], tickformat=",~g"),
        y,
        barmode="overlay",
        coloraxis={"colorscale": "Viridis", "reversescale": True, "cmin": 0, "cmax": top, "colorbar": bar},
        legend=legend,
        height=150 + 20 * max(len(clients), 6),
    )
    return Shown("Schedule", figure, note)


# --- clients ----------------------------------------------------------------------------------------


def _bars(x: np.ndarray, y: np.ndarray, colour: str, name: str = "", **more: Any) -> dict[str, Any]:
    return {"type": "bar", "x": x, "y": y, "name": name, "marker": {"color": colour}, **more}


def _by_client(title: str, columns: Mapping[str, np.ndarray], mode: str) -> Shown:
    """A bar per client and column; for more than ``MOST_BARS`` clients, a histogram of each column."""
    colours = (PALETTE[0], PALETTE[4], PALETTE[1])
    count = len(next(iter(columns.values())))
    if count <= MOST_BARS:
        data = [_bars(np.arange(count), v, c, name) for c, (name, v) in zip(colours, columns.items())]
        return Shown(title, _figure(data, _axis("client"), _axis(title.partition(",")[0]), barmode=mode, **_SMALL))
    found = [column[np.isfinite(column)] for column in columns.values()]
    low, high = min(v.min(initial=math.inf) for v in found), max(v.max(initial=-math.inf) for v in found)
    if not low <= high:
        low, high = 0.0, 1.0
    edges = np.histogram_bin_edges(np.array([low, high]), BINS)
    data = [
        _bars((edges[:-1] + edges[1:]) / 2, np.histogram(v, edges)[0], c, name, width=np.diff(edges), opacity=0.6)
        for c, name, v in zip(colours, columns, found)
    ]
    figure = _figure(data, _axis(title), _axis("clients"), barmode="overlay", **_SMALL)
    return Shown(title, figure, f"{count:,} clients: how many lie in each of {BINS} intervals, not a bar for each.")


_SMALL: dict[str, Any] = {"height": 320, "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom"}}


def clients(run: Run) -> list[Shown]:
    """Scores of each client at the last evaluation, if the run has them; updates of each client; staleness.

    Mean, deviation and worst tenth below the scores are columns of the last evaluation.
    """
    shown = []
    for column, (factor, title) in METRICS.items():
        names = {"global model": column, "own model": f"own_{column}", "fine-tuned model": f"tuned_{column}"}
        last = {
            name: factor * np.asarray(run.per_client[key][-1], np.float64)
            for name, key in names.items()
            if key in run.per_client and len(run.per_client[key])
        }
        if any(np.isfinite(values).any() for values in last.values()):
            bars = _by_client(f"{title.replace('test ', 'client test ')}, last evaluation", last, "group")
            notes = [bars.note, *(_spread_note(run, score) for score in of_metric(client_scores([run]), column))]
            shown.append(bars._replace(note=" ".join(filter(None, notes))))
            break  # the loss only where no client has class labels
    who = np.asarray(run.updates["client"])
    accepted = np.asarray(run.updates["accepted"], bool)
    counts = {
        name: np.bincount(who[chosen], minlength=run.schedule.num_clients).astype(np.float64)
        for name, chosen in (("accepted", accepted), ("rejected", ~accepted))
        if name == "accepted" or chosen.any()
    }
    shown.append(_by_client("updates per client", counts, "stack"))
    if who.size and not isinstance(run.schedule, PeerSchedule):
        shown.append(staleness(run))
    return shown


def _spread_note(run: Run, score: str) -> str:
    """Mean, deviation and worst tenth of a client's score at the last evaluation, in words."""
    mean, std, worst = (
        metrics.percent(score) * float(run.evaluations[f"client_{score}{ending}"][-1])
        for ending in ("", "_std", "_worst")
    )
    model, kind = of_model(score)
    places, unit = (2, " %") if metrics.percent(score) > 1 else (4, "")
    return (
        f"{model[0].upper()}{model[1:]}: mean {kind} {mean:.{places}f}{unit}, deviation between clients "
        f"{std:.{places}f}, worst tenth {worst:.{places}f}."
    )


def staleness(run: Run) -> Shown:
    """The share of the updates applied at each staleness."""
    values = np.asarray(run.updates["staleness"])
    width = max(1, math.ceil((int(values.max()) + 1) / BINS))  # staleness values per bar
    share = 100 * np.bincount(values // width) / values.size
    title = f"staleness: mean {values.mean():.2f}, largest {int(values.max())}"
    x = np.arange(len(share)) * width + (width - 1) / 2
    y = _axis("share of updates (%)")
    figure = _figure([_bars(x, share, PALETTE[0], width=0.86 * width)], _axis("staleness (server steps)"), y, **_SMALL)
    return Shown(title, figure, f"A bar covers {width} values." if width > 1 else "")
