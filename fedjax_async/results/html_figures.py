"""Interactive figures of the HTML report: the pictures of the folders, with text over their parts.

:func:`interactive` turns a picture into plotly's JSON, ``data`` and ``layout``; plotly checks it here and draws it in
the browser. Long arrays are base64 (``bdata``) in their full precision. plotly comes with the extra ``report`` and is
imported only when a figure is made. Names are escaped, because plotly interprets tags in text.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedjax_async.base import lazy
from fedjax_async.results.clients import distribution, has_scores, updates_per_client
from fedjax_async.results.curves import measured_curve
from fedjax_async.results.figure import DASHES, FAINT, GRID, INK, PALETTE, marked, note_of
from fedjax_async.results.peer_gantt import peer_gantt
from fedjax_async.results.plots import gantt, staleness_histogram
from fedjax_async.results.timeline import staleness_of
from fedjax_async.types import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

MOST_LINES = len(PALETTE) * len(DASHES)  # more lines look alike
MOST_CLIENTS = 400  # points of their curves
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


def _plot(data: Sequence[Json], x: Json, y: Json, **layout: object) -> Json:
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
    return _plot(data, across, up, **usual | layout)


def _axis(axes: Axes, name: str) -> Json:
    """One of the axes: its title, limits and, where the rows of a chart have names, these."""
    from matplotlib.ticker import FixedLocator  # noqa: PLC0415 (an extra)

    of: Axis = getattr(axes, f"{name}axis")
    title = html.escape(of.label.get_text()).replace("\n", "<br>")
    more: Json = {"range": [float(end) for end in of.get_view_interval()], "tickformat": ",~g"}
    if isinstance(of.get_major_locator(), FixedLocator):
        names = [html.escape(each.get_text().replace(r"\$", "$")) for each in of.get_ticklabels()]
        places = [float(at) for at in of.get_ticklocs()]
        more |= {"tickvals": places, "ticktext": names, "automargin": True, "showgrid": False}
    return axis(title, **more)


def _colours(colours: Any) -> str | list[str]:
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


def _trace(axes: Axes, artist: object, only: slice | np.ndarray) -> Json:
    """A part of a picture as a trace of plotly, at the same place of the axes; ``only``: some of its patches."""
    from matplotlib.collections import LineCollection, PatchCollection, PolyCollection  # noqa: PLC0415 (an extra)
    from matplotlib.lines import Line2D  # noqa: PLC0415
    from matplotlib.patches import StepPatch  # noqa: PLC0415

    if isinstance(artist, Line2D):
        shape = "hv" if artist.get_drawstyle() == "steps-post" else "linear"
        look = {"color": _colours(artist.get_color()), "width": artist.get_linewidth(), "shape": shape}
        return _line(np.stack([np.asarray(each, np.float64) for each in artist.get_data()], axis=1), line=look)
    if isinstance(artist, StepPatch):  # a point in the middle of each step
        values, edges, _ = artist.get_data()
        look = {"color": _colours(artist.get_edgecolor()), "width": artist.get_linewidth(), "shape": "hvh"}
        return _line(np.stack([(edges[:-1] + edges[1:]) / 2, values], axis=1), line=look, mode="lines+markers")
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
        edges: Json = {"color": _colours([bar.get_edgecolor() for bar in artist]), "width": artist[0].get_linewidth()}
        marker = {"color": _colours([bar.get_facecolor() for bar in artist]), "line": edges}
        return _rectangles(np.array([bar.get_bbox().extents for bar in artist]), marker)
    if isinstance(artist, Colorbar):
        shares, (low, high) = np.linspace(0, 1, 11), artist.ax.get_ylim()
        scale: Json = {"colorscale": [*zip(shares.tolist(), _colours(artist.cmap(shares)))], "color": [low]}
        scale |= {"cmin": low, "cmax": high, "showscale": True}
        title = {"text": artist.ax.get_ylabel().replace(" (", "<br>(")}
        marker = scale | {"colorbar": {"title": title, "thickness": 12, "outlinewidth": 0}}
        return _line(np.full((1, 2), np.nan), mode="markers", marker=marker, showlegend=False)
    look: Json = {"symbol": "x", "size": 7, "color": _colours(artist.get_facecolors())}
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
    columns = [name for name in ("x", "y", "customdata", "hovertext") if name in trace]
    return trace | {name: np.asarray(trace[name])[kept] for name in columns}


def curves(runs: Mapping[str, Sequence[Run]], x: str, column: str, most_points: int, most_seeds: int) -> Json:
    """:func:`measured_curve` with the curve of every seed, or of the first ``most_seeds`` of a method.

    ``meta.part`` of a trace is ``mean``, ``band`` or ``seed`` (then ``meta.seed`` is its number); ``legendgroup`` is
    the number of its method.
    """
    picture = measured_curve(runs, column, x, most_seeds=most_seeds)
    legend = {"groupclick": "togglegroup", "orientation": "v"}
    return interactive(picture, most_points, legend=legend, showlegend=True, height=480)


def schedule(run: Run, most: int) -> Shown:
    """The Gantt chart of the first clients or nodes, with about ``most`` jobs, or events and messages together."""
    plan = run.schedule
    begin = plan.dispatch_time if run.has_server else plan.start
    if not run.has_server:
        most = max(1, most * len(begin) // (len(begin) + len(plan.push_event)))
    rows = np.unique(plan.client)[:MOST_ROWS]
    mine = np.sort(begin[np.isin(plan.client, rows)])
    end = float(run.evaluations["time"][-1])
    until = end if len(mine) <= most else float(mine[most])
    until = until or float(np.min(mine, where=mine > 0, initial=end))  # those that begin at 0 are always shown
    picture = (gantt if run.has_server else peer_gantt)(run, rows.tolist(), until or None)
    return Shown("Schedule", interactive(picture, height=150 + 20 * max(len(rows), 6)), note_of(picture))


def clients(run: Run) -> list[Shown]:
    """Scores of the clients at the last evaluation, if the run has them; updates of each client; staleness."""
    found = {}
    if has_scores(run):
        found["clients, last evaluation"] = distribution({str(run.settings.get("method", "run")): [run]})
    found["updates per client"] = updates_per_client(run)
    if run.has_server and staleness_of(run).size:
        picture = staleness_histogram(run)
        found[f"staleness: {picture.axes[0].get_title(loc='left')}"] = picture
    count = run.schedule.num_clients
    note = f"{MOST_CLIENTS} of {count:,} clients, evenly spread." if count > MOST_CLIENTS else ""
    return [
        Shown(title, interactive(picture, MOST_CLIENTS, height=320), "" if title.startswith("staleness") else note)
        for title, picture in found.items()
    ]
