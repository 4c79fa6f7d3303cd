"""Interactive figures of the HTML report: the pictures of the folders, with text over their parts, and the clients.

:func:`interactive` turns a picture into plotly's JSON, ``data`` and ``layout``; plotly checks it here and draws it in
the browser. Long arrays are base64 (``bdata``) in their full precision. plotly comes with the extra ``report`` and is
imported only when a figure is made. Names are escaped, because plotly interprets tags in text.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedjax_async.base import lazy
from fedjax_async.results import client_names, metrics
from fedjax_async.results.curves import measured_curve
from fedjax_async.results.figure import DASHES, FAINT, GRID, INK, PALETTE, marked, note_of
from fedjax_async.results.measured import client_scores, of_metric, of_model
from fedjax_async.results.peer_gantt import peer_gantt
from fedjax_async.results.plots import gantt, staleness_histogram
from fedjax_async.results.timeline import MOST_BARS
from fedjax_async.types import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LINES = len(PALETTE) * len(DASHES)  # more lines look alike
MOST_CLIENTS = 400  # with one bar each; more are shown as a histogram
MOST_NAMES = 40  # below the bars
MOST_ROWS = 40  # clients of a Gantt chart
DASH_NAMES = {"-": "solid", ":": "dot"}
PIXELS = 90  # of the page for an inch of a picture's height
Json = dict[str, Any]  # of plotly: a figure, or a part of one


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


# --- pictures -----------------------------------------------------------------------------------------


def interactive(picture: Figure, most_points: int | None = None, **layout: object) -> Json:
    """What :func:`fedjax_async.results.figure.mark` has marked in a picture, on its axes, with its limits.

    A line of more than ``most_points`` points is thinned evenly; its last point stays. ``layout``: of plotly.
    """
    axes = picture.axes[0]
    data = []
    for artist, about in marked(picture):
        trace = _trace(axes, artist, about.get("only", slice(None))) | {"name": html.escape(about["name"])}
        trace |= {name: value for name, value in about.items() if name not in ("name", "hovertext", "dash", "only")}
        if "hovertext" in about:
            trace["hovertext"] = [*map(html.escape, about["hovertext"])]
        if "dash" in about:
            trace["line"] |= {"dash": _dash(about["dash"])}
        data.append(trace if most_points is None else _thinned(trace, most_points))
    legend = {"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0}
    usual = {"barmode": "overlay", "legend": legend, "height": round(PIXELS * picture.get_figheight())}
    across, up = _axis(axes, "x"), _axis(axes, "y")
    return plot(data, across, up, **usual | layout)


def _axis(axes: Axes, name: str) -> Json:
    """One of the axes: its title, limits and, where the rows of a chart have names, these."""
    from matplotlib.ticker import FixedLocator  # noqa: PLC0415 (an extra)

    of: Any = getattr(axes, f"{name}axis")
    title = html.escape(of.label.get_text()).replace("\n", "<br>")
    more: Json = {"range": [float(end) for end in of.get_view_interval()], "tickformat": ",~g"}
    if isinstance(of.get_major_locator(), FixedLocator):
        names = [html.escape(each.get_text().replace(r"\$", "$")) for each in of.get_ticklabels()]
        places = [float(at) for at in of.get_ticklocs()]
        more |= {"tickvals": places, "ticktext": names, "automargin": True, "showgrid": False}
    return axis(title, **more)


def _colours(colours: Any) -> Any:
    """Colours of matplotlib as text: one for all if they are equal."""
    from matplotlib.colors import to_hex, to_rgba_array  # noqa: PLC0415 (an extra)

    found = [
        to_hex(each) if each[3] == 1 else f"rgba({','.join(str(round(255 * part)) for part in each[:3])},{each[3]:.3g})"
        for each in to_rgba_array(colours)
    ]
    return found[0] if len(set(found)) == 1 else found


def _dash(style: Any) -> str:
    """The dashes of a line of matplotlib, as plotly has them."""
    return DASH_NAMES.get(style) or ",".join(f"{2 * size:g}px" for size in style[1])


def _trace(axes: Axes, artist: Any, only: Any) -> Json:
    """A part of a picture as a trace of plotly, at the same place of the axes; ``only``: some of its patches."""
    from matplotlib.collections import LineCollection, PatchCollection, PolyCollection  # noqa: PLC0415 (an extra)
    from matplotlib.lines import Line2D  # noqa: PLC0415

    if isinstance(artist, Line2D):
        shape = "hv" if artist.get_drawstyle() == "steps-post" else "linear"
        look = {"color": _colours(artist.get_color()), "width": artist.get_linewidth(), "shape": shape}
        return _line(np.stack([np.asarray(each, np.float64) for each in artist.get_data()], axis=1), line=look)
    if isinstance(artist, PolyCollection):
        outline = _joined([np.asarray(path.vertices) for path in artist.get_paths()])
        fill = {"fill": "toself", "fillcolor": _colours(artist.get_facecolor())}
        return _line(outline, line={"width": 0}, hoverinfo="skip", **fill)
    if isinstance(artist, LineCollection):
        to_data = artist.get_transform() - axes.transData
        points = _joined([to_data.transform(segment) for segment in artist.get_segments()])
        look = {"color": _colours(artist.get_colors()), "width": float(np.max(artist.get_linewidth()))}
        return _line(points, line=look, hoverinfo="skip")
    if isinstance(artist, PatchCollection):
        corners = np.array([path.get_extents().extents for path in artist.get_paths()])
        return _rectangles(corners[only], {"color": _colours(np.asarray(artist.get_facecolor())[only])})
    return _other_trace(artist)


def _other_trace(artist: Any) -> Json:
    """The parts that have no line: bars, a scale of colours, crosses."""
    from matplotlib.colorbar import Colorbar  # noqa: PLC0415 (an extra)
    from matplotlib.container import BarContainer  # noqa: PLC0415

    if isinstance(artist, BarContainer):
        edges = {"color": _colours([bar.get_edgecolor() for bar in artist]), "width": artist[0].get_linewidth()}
        marker = {"color": _colours([bar.get_facecolor() for bar in artist]), "line": edges}
        return _rectangles(np.array([bar.get_bbox().extents for bar in artist]), marker)
    if isinstance(artist, Colorbar):
        shares, (low, high) = np.linspace(0, 1, 11), artist.ax.get_ylim()
        scale = {"colorscale": [*zip(shares.tolist(), _colours(artist.cmap(shares)))], "color": [low]}
        scale |= {"cmin": low, "cmax": high, "showscale": True}
        title = {"text": artist.ax.get_ylabel().replace(" (", "<br>(")}
        marker = scale | {"colorbar": {"title": title, "thickness": 12, "outlinewidth": 0}}
        return _line(np.full((1, 2), np.nan), mode="markers", marker=marker, showlegend=False)
    look = {"symbol": "x", "size": 7, "color": _colours(artist.get_facecolors())}
    look["line"] = {"color": "white", "width": 1}
    return _line(np.asarray(artist.get_offsets()), mode="markers", marker=look, hoverinfo="skip")


def _line(points: np.ndarray, **look: object) -> Json:
    """A line through the points, float64[points, 2], with a gap at each NaN."""
    return {"type": "scatter", "mode": "lines", "x": points[:, 0], "y": points[:, 1], **look}


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Lines or outlines, float64[points, 2] each, as one with gaps between them."""
    gap = np.full((1, 2), np.nan)
    return np.concatenate([np.zeros((0, 2)), *(each for part in parts for each in (part, gap))])


def _rectangles(corners: np.ndarray, marker: Json) -> Json:
    """Bars with these lower left and upper right corners, float64[bars, 4]."""
    left, low, right, high = corners.T
    bars = {"base": left, "x": right - left, "y": (low + high) / 2, "width": high - low}
    return {"type": "bar", "orientation": "h", "textposition": "none", "marker": marker, **bars}


def _thinned(trace: Json, most: int) -> Json:
    """The trace with at most so many points, evenly spread, with the first and the last."""
    size = len(trace["x"])
    kept = np.unique(np.linspace(0, size - 1, most).astype(np.int64)) if size > most else slice(None)
    return trace | {name: np.asarray(trace[name])[kept] for name in ("x", "y", "customdata") if name in trace}


def curves(runs: Mapping[str, Sequence[Run]], x: str, column: str, most_points: int, most_seeds: int) -> Json:
    """:func:`measured_curve` with the curve of every seed, or of the first ``most_seeds`` of a method.

    ``meta.part`` of a trace is ``mean``, ``band`` or ``seed`` (then ``meta.seed`` is its number); ``legendgroup`` is
    the number of its method.
    """
    picture = measured_curve(runs, column, x, most_seeds=most_seeds)
    legend = {"groupclick": "togglegroup", "orientation": "v"}
    return interactive(picture, most_points, legend=legend, showlegend=True, height=480)


def schedule(run: Run, most: int) -> Shown:
    """The Gantt chart of the first clients or nodes, with at most ``most`` jobs, or events and messages together."""
    plan = run.schedule
    begin = plan.dispatch_time if run.has_server else plan.start
    if not run.has_server:
        most = max(1, most * len(begin) // (len(begin) + len(plan.push_event)))
    rows = np.unique(plan.client)[:MOST_ROWS]
    mine = np.sort(begin[np.isin(plan.client, rows)])
    until = float(mine[most]) if len(mine) > most else float(run.evaluations["time"][-1])
    picture = (gantt if run.has_server else peer_gantt)(run, rows.tolist(), until)
    return Shown("Schedule", interactive(picture, height=150 + 20 * max(len(rows), 6)), note_of(picture))


def staleness(run: Run) -> Shown:
    """The share of the updates applied at each staleness."""
    picture = staleness_histogram(run)
    return Shown(f"staleness: {picture.axes[0].get_title(loc='left')}", interactive(picture, **_SMALL))


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
