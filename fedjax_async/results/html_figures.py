"""Interactive figures of the HTML report: curves over seeds, clients, staleness; ``html_gantt.py`` has the schedules.

Each figure is a dict, ``data`` and ``layout`` in plotly's JSON; plotly checks it here and draws it in the browser. Long
arrays are base64 (``bdata``) in their full precision. plotly comes with the extra ``report`` and is imported only when
a figure is made. Names are escaped, because plotly interprets tags in text.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np

from fedjax_async.base import lazy
from fedjax_async.results import client_names, metrics, nodes_scores
from fedjax_async.results.figure import FAINT, GRID, INK, PALETTE, line_style
from fedjax_async.results.measured import client_scores, of_metric, of_model, shown_unit
from fedjax_async.results.timeline import MOST_BARS, shares
from fedjax_async.types import Run

DASHES = ("solid", "dash", "dot", "dashdot")  # when the colours are used up
MOST_LINES = len(PALETTE) * len(DASHES)  # more lines look alike
MOST_CLIENTS = 400  # with one bar each; more are shown as a histogram
MOST_NAMES = 40  # below the bars
UNITS = {
    "time": "virtual time (s)",
    "update": "client updates applied",
    "step": "server steps",
    "bytes": "sent, both directions (bytes)",
}
BETWEEN = {"bytes_between": "sent between the nodes (bytes)"}  # see ``shown_unit``
Json = dict[str, object]  # of plotly: a figure, or a part of one


class Shown(NamedTuple):
    """A figure, its title, and a note on what it leaves out (empty if it shows everything)."""

    title: str
    figure: Json
    note: str = ""


def require_plotly() -> ModuleType:
    """The package plotly; ``ValueError`` if it is missing."""
    for module in ("plotly.graph_objects", "plotly.offline"):
        lazy.optional(module, "the HTML report")
    return lazy.optional("plotly", "the HTML report")


def axis(title: str, **more: object) -> Json:
    """An axis in plotly's JSON."""
    line = {"showline": True, "linecolor": FAINT, "ticks": "outside", "tickcolor": FAINT, "zeroline": False}
    return {"title": {"text": title}, "gridcolor": GRID, **line, **more}


def plot(data: Sequence[Json], x: Json, y: Json, **layout: object) -> Json:
    """``data`` and ``layout`` as JSON, checked by plotly."""
    make = require_plotly().graph_objects.Figure
    plain = {"template": "none", "font": {"color": INK, "size": 12}, "margin": {"l": 60, "r": 20, "t": 20, "b": 50}}
    figure: Json = json.loads(make(list(data), plain | layout | {"xaxis": x, "yaxis": y}).to_json())
    return figure


# --- curves -----------------------------------------------------------------------------------------


def _thin(size: int, most: int) -> np.ndarray:
    """At most ``most`` positions of ``size``, evenly spread, with the first and the last."""
    return np.arange(size) if size <= most else np.unique(np.linspace(0, size - 1, most).astype(np.int64))


def curves(runs: Mapping[str, Sequence[Run]], x: str, column: str, most_points: int, most_seeds: int) -> Json:
    """One column of the evaluations against ``x``: means over seeds, bands of one standard deviation, every seed.

    ``runs`` maps each group to its runs, one per seed. Means are those of :func:`metrics.mean_curve`: with several
    seeds they are running means, which end at the default final value of the tables; a single run is drawn unchanged.
    ``meta.part`` of a trace is ``mean``, ``band`` or ``seed`` (then ``meta.seed`` is its number); ``legendgroup`` is
    the number of its group. A line of more than ``most_points`` points is thinned evenly; its last point stays. Only
    the first ``most_seeds`` of each group are drawn as single seeds.
    """
    factor = metrics.percent(column)
    data: list[Json] = []
    for index, (name, seeds) in enumerate(runs.items()):
        (colour, _), dash = line_style(index), DASHES[index // len(PALETTE) % len(DASHES)]
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
            low, high = metrics.band(mean, std, column)
            data += [side | {"y": low}, side | {"y": high} | fill]
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
    every = [run for seeds in runs.values() for run in seeds]
    unit, title = shown_unit(x, every), nodes_scores.axis_title(column, every, " ")
    across, up = axis((UNITS | BETWEEN)[unit], rangemode="tozero", **tick), axis(title)
    legend = {"groupclick": "togglegroup", "orientation": "v"}
    return plot(data, across, up, legend=legend, showlegend=True, height=480)


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"


# --- clients ----------------------------------------------------------------------------------------


def _bars(x: np.ndarray, y: np.ndarray, colour: str, name: str = "", **more: object) -> Json:
    return {"type": "bar", "x": x, "y": y, "name": name, "marker": {"color": colour}, **more}


def escaped_labels(names: Sequence[str] | None, clients: Sequence[int] | np.ndarray) -> list[str]:
    """The labels of these clients, for plotly; a long name is cut, and the client's number follows it."""
    return [html.escape(label) for label in client_names.labels(names, clients)]


def hover_names(names: Sequence[str] | None, clients: Sequence[int] | np.ndarray) -> Json:
    """The names of the clients of these bars for the text that appears over them; empty without names."""
    return {} if names is None else {"hovertext": escaped_labels(names, clients)}


def _by_client(title: str, columns: Mapping[str, np.ndarray], mode: str, names: Sequence[str] | None) -> Shown:
    """A bar per client and column; for more than ``MOST_CLIENTS``, a histogram of each column.

    Names of clients appear over the bars; for at most ``MOST_NAMES`` clients also below them.
    """
    colours = (PALETTE[0], PALETTE[4], PALETTE[1])
    count = len(next(iter(columns.values())))
    if count <= MOST_CLIENTS:
        who = np.arange(count)
        data = [_bars(who, v, c, name, **hover_names(names, who)) for c, (name, v) in zip(colours, columns.items())]
        below: Json = {} if names is None or count > MOST_NAMES else {"tickvals": who.tolist(), "automargin": True}
        below |= {"ticktext": escaped_labels(names, who)} if below else {}
        return Shown(title, plot(data, axis("client", **below), axis(title.partition(",")[0]), barmode=mode, **_SMALL))
    found = [column[np.isfinite(column)] for column in columns.values()]
    low, high = min(v.min(initial=math.inf) for v in found), max(v.max(initial=-math.inf) for v in found)
    if not low <= high:
        low, high = 0.0, 1.0
    edges = np.histogram_bin_edges(np.array([low, high]), MOST_BARS)
    data = [
        _bars((edges[:-1] + edges[1:]) / 2, np.histogram(v, edges)[0], c, name, width=np.diff(edges), opacity=0.6)
        for c, name, v in zip(colours, columns, found)
    ]
    figure = plot(data, axis(title), axis("clients"), barmode="overlay", **_SMALL)
    return Shown(
        title, figure, f"{count:,} clients: how many lie in each of {MOST_BARS} intervals, not a bar for each."
    )


_SMALL: Json = {"height": 320, "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom"}}


def clients(run: Run) -> list[Shown]:
    """Scores of each client at the last evaluation, if the run has them; updates of each client; staleness.

    Mean, deviation and worst tenth are written below the scores; they are columns of the last evaluation.
    """
    shown = []
    for column in ("accuracy", "loss"):
        last = {
            of_model(score)[0]: metrics.percent(score) * np.asarray(values[-1], np.float64)
            for score, values in run.per_client.items()
            if len(values) and score in (column, f"own_{column}", f"tuned_{column}")
        }
        if any(np.isfinite(values).any() for values in last.values()):
            title = metrics.axis_title(column).replace("test ", "client test ")
            bars = _by_client(f"{title}, last evaluation", last, "group", run.client_names)
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
    shown.append(_by_client("updates per client", counts, "stack", run.client_names))
    if who.size and run.has_server:
        shown.append(staleness(run))
    return shown


def _spread_note(run: Run, score: str) -> str:
    """Mean, deviation and worst tenth of a client's score at the last evaluation, in words."""
    mean, std, worst = (
        metrics.percent(score) * float(run.evaluations[f"client_{score}{ending}"][-1])
        for ending in ("", "_std", "_worst")
    )
    model, kind = of_model(score)
    decimals, unit = (2, " %") if metrics.percent(score) > 1 else (4, "")
    return (
        f"{model[0].upper()}{model[1:]}: mean {kind} {mean:.{decimals}f}{unit}, deviation between clients "
        f"{std:.{decimals}f}, worst tenth {worst:.{decimals}f}."
    )


def staleness(run: Run) -> Shown:
    """The share of the updates applied at each staleness."""
    values = np.asarray(run.updates["staleness"])
    middle, share, width = shares(values)
    title = f"staleness: mean {values.mean():.2f}, largest {values.max()}"
    data = [_bars(middle, share, PALETTE[0], width=0.86 * width)]
    figure = plot(data, axis("staleness (server steps)"), axis("share of updates (%)"), **_SMALL)
    return Shown(title, figure, f"A bar covers {width} values." if width > 1 else "")
