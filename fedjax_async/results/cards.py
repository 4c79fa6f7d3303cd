"""Cards: what notebooks show of a run, a comparison or a sweep: settings, final numbers and a small curve.

The module sets ``_repr_html_`` of these classes, which IPython calls for the last value of a cell; ``types.py``, where
``Run`` is, cannot import results. The curve is drawn without matplotlib.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from fedjax_async.base import check
from fedjax_async.config.settings import DEFAULTS
from fedjax_async.results import metrics, tables
from fedjax_async.results.compared import Comparison
from fedjax_async.results.comparisons import finals_of
from fedjax_async.results.figure import FAINT, PALETTE, axis
from fedjax_async.results.sweep_table import setting_rows, swept_runs
from fedjax_async.results.sweeps import Sweep
from fedjax_async.types import Run

MOST_SETTINGS, MOST_LINES, MOST_RUNS = 14, 7, 60  # in a card; a sweep of more runs is not read for it
MOST_POINTS = 200  # of a curve
WIDTH, HEIGHT, LEFT = 300, 110, 34  # pixels of the curve, and of the numbers beside it
EXECUTION = ("memory_limit", "lanes", "devices", "checkpoint", "engine", "files", "own", "defaults")


def card(results: Run | Comparison | Sweep) -> str:
    """The HTML of a card about a run, what ``compare`` returns, or a sweep."""
    if isinstance(results, Run):
        return _run(results)
    if isinstance(results, Sweep):
        return _sweep(results)
    metrics.require_runs(results)
    check.kind("results", results, Mapping, "a Run, what compare returns, or a Sweep")
    return _comparison(results)


def changed(settings: Mapping[str, object]) -> dict[str, object]:
    """The settings of a run that differ from their defaults, without those of the execution."""
    return {
        name: value
        for name, value in settings.items()
        if name not in EXECUTION and value is not None and value != DEFAULTS.get(name)
    }


def _run(run: Run) -> str:
    metric = metrics.main_metric([run])
    scores = [metric, "loss"] if metric != "loss" else ["loss"]
    found = {metrics.final_title(name): finals_of([run], name)[0] for name in scores}
    rows = [{"": name, " ": f"{value:.4g}"} for name, value in found.items()]
    rows += [{"": name, " ": f"{run.counters[name]:,}"} for name in ("updates", "server_steps") if name in run.counters]
    end = run.evaluations["time"][-1]
    rows += [{"": "virtual seconds", " ": f"{end:{',.0f' if end >= 10 else '.3g'}}"}]
    rows += [{"": "stopped", " ": run.stopped.why}] if run.stopped is not None else []
    title = f"Run: {run.settings.get('method', '')}"
    return _page(title, changed(run.settings), _table(rows), curve({"": [run]}, metric))


def _comparison(runs: Mapping[str, Sequence[Run]]) -> str:
    every = [run for seeds in runs.values() for run in seeds]
    metric = metrics.main_metric(every)
    rows = [
        {"method": name, metrics.final_title(metric): metrics.spread(finals_of(seeds, metric))}
        | {"updates": metrics.spread([metrics.progress_in(run, "update")[-1] for run in seeds])}
        for name, seeds in runs.items()
    ]
    settings = [changed(run.settings) for run in every]
    common = {key: value for key, value in settings[0].items() if all(each.get(key) == value for each in settings)}
    counts = sorted(map(len, runs.values()))
    several = f"{counts[0]} to {counts[-1]}" if counts[0] < counts[-1] else counts[0]
    title = f"Comparison: {len(runs)} methods, {several} seed(s)"
    return _page(title, common, _table(_texts(rows)), curve(runs, metric))


def _sweep(sweep: Sweep) -> str:
    values: dict[str, list[str]] = {}
    for point in sweep.points:
        for path, value in point.values.items():
            values.setdefault(path, []).append(str(value))
    axes = {path: ", ".join(dict.fromkeys(found)) for path, found in values.items()}
    title = f"Sweep: {len(sweep.points)} runs" + ("" if sweep.folder is None else f" in {sweep.folder}")
    if not 0 < len(sweep.points) <= MOST_RUNS:
        return _page(title, axes, "", "")
    return _page(title, axes, _table(_texts(setting_rows(swept_runs(sweep)))), "")


# --- parts of a card ----------------------------------------------------------------------------------


def curve(runs: Mapping[str, Sequence[Run]], metric: str) -> str:
    """The mean over seeds of a metric against virtual time, as an SVG picture; the first ``MOST_LINES`` methods.

    The names of the methods are below it, in the colours of their lines.
    """
    drawn = {
        name: metrics.mean_curve(seeds, "time", metric, metrics.percent(metric))
        for name, seeds in itertools.islice(runs.items(), MOST_LINES)
    }
    finite = {name: np.isfinite(each.mean) for name, each in drawn.items()}
    every = np.concatenate([each.mean[finite[name]] for name, each in drawn.items()])
    if every.size == 0:
        return ""
    low, high, end = float(every.min()), float(every.max()), max(float(each.at[-1]) for each in drawn.values())
    size, label = axis("time", end)
    parts = []
    for index, (name, each) in enumerate(drawn.items()):
        if not finite[name].any():  # it has no line
            continue
        kept = np.unique(np.linspace(0, finite[name].sum() - 1, MOST_POINTS).astype(int))
        x = LEFT + (WIDTH - LEFT - 4) * each.at[finite[name]][kept] / (end or 1.0)
        y = HEIGHT - 18 - (HEIGHT - 26) * (each.mean[finite[name]][kept] - low) / ((high - low) or 1.0)
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y))
        tip = f"<title>{html.escape(name)}</title>" if name else ""
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{PALETTE[index]}" stroke-width="1.5">{tip}</polyline>'
        )
    texts = [
        (0, 12, f"{high:.4g}"),
        (0, HEIGHT - 18, f"{low:.4g}"),
        (LEFT, HEIGHT - 4, f"{metric}, {label}, to {end / size:.4g}"),
    ]
    parts += [f'<text x="{x}" y="{y}" font-size="10" fill="{FAINT}">{text}</text>' for x, y, text in texts]
    names = [
        f'<span style="color:{colour}">{html.escape(name)}</span>'
        for name, colour in zip(drawn, PALETTE)
        if len(runs) > 1
    ]
    picture = f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{"".join(parts)}</svg>'
    return f"<div>{picture}</div><small>{' &#183; '.join(names)}</small>"


def _texts(rows: Sequence[tables.Row]) -> list[dict[str, str]]:
    """The cells as the tables of results show them."""
    decimals = tables.decimals_of(rows)
    return [{name: tables.cell(cell, decimals.get(name, 2)) for name, cell in row.items()} for row in rows]


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names) if "".join(names).strip() else ""
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(row.get(name, '')))}</td>" for name in names) + "</tr>" for row in rows
    )
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def _page(title: str, settings: Mapping[str, object], table: str, picture: str) -> str:
    """The card; ``settings`` by name, the first ``MOST_SETTINGS`` of them."""
    shown = [f"{name} = {value}" for name, value in itertools.islice(settings.items(), MOST_SETTINGS)]
    shown += ["..."] if len(settings) > MOST_SETTINGS else []
    about = html.escape("; ".join(shown))
    return f"<div><b>{html.escape(title)}</b><div><small>{about}</small></div>{table}{picture}</div>"


for _kind in (Run, Comparison, Sweep):
    _kind._repr_html_ = card  # type: ignore[union-attr]
