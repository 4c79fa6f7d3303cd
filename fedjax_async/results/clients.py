"""Scores of single clients: tables, and a picture of their distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedjax_async.base import check, disk
from fedjax_async.engine.client_scores import smaller_is_better
from fedjax_async.results import figure as canvas
from fedjax_async.results import files, metrics, tables
from fedjax_async.results.client_names import COLUMN, labels, markdown_rows, shown_name, titled, with_names
from fedjax_async.results.comparisons import finals_of
from fedjax_async.results.figure import SCREEN, Drawing, save_formats
from fedjax_async.results.measured import MODELS, client_scores, meanings, of_metric, of_model
from fedjax_async.results.metrics import FINAL
from fedjax_async.results.tables import Cell
from fedjax_async.types import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Runs = Mapping[str, Sequence[Run]]
NAME = "clients"  # file name without its ending
MOST_NAMED = 50  # clients with a line of their own in clients.md
MOST_COLUMNS = 12  # methods and models in their table


def _every(runs: Runs) -> list[Run]:
    return [run for seeds in runs.values() for run in seeds]


def _client_rows(runs: Runs, final: str = FINAL, what: str = "method", *, every: bool = False) -> list[dict[str, Cell]]:
    """One row per method and model (global, own, fine-tuned): mean, deviation and worst tenth over the clients.

    Each is the ``final`` value of a column of the evaluations (``engine/client_scores.py``), averaged over the seeds as
    all final values are. Accuracies are in percent; losses replace them if no run has class labels. ``every``: all
    scores, with a column for their names. Runs without scores of single clients have no rows.
    """
    metric = metrics.main_metric(_every(runs))
    unit = "" if every else f", {metric}" + (" (%)" if metric == "accuracy" else "")
    columns = {
        f"mean over clients{unit}": "",
        f"deviation between clients{unit}": "_std",
        f"worst tenth{unit}": "_worst",
    }
    rows = []
    for name, seeds in runs.items():
        scores = client_scores(seeds)
        for score in scores if every else of_metric(scores, metric):
            model, kind = of_model(score)
            row: dict[str, Cell] = {what: name, "model": model, **({"score": kind} if every else {})}
            for title, ending in columns.items():
                column = f"client_{score}{ending}"
                row[title] = metrics.spread(finals_of(seeds, column, final))
            rows.append(row)
    return rows


def write_client_tables(runs: Runs, folder: Path, final: str = FINAL, what: str = "method") -> str:
    """Write ``clients.csv``, with every score, and ``clients.md``; returns the rows of ``clients.md`` as aligned text.

    If the data name their clients, ``clients.md`` ends with :func:`worst_rows`, and ``clients.csv`` has a column
    ``worst client``, at the last evaluation. If no run has scores of single clients, the files are removed, and the
    text is empty.
    """
    rows = _client_rows(runs, final, what)
    if not rows:
        for ending in ("csv", "md"):
            (folder / f"{NAME}.{ending}").unlink(missing_ok=True)  # an earlier call's files may hold other runs
        return ""
    scored = []
    for row in _client_rows(runs, final, what, every=True):
        means = [value.mean for value in row.values() if isinstance(value, metrics.Spread)]
        scored += [row] if files.applicable({str(row["score"]): means}) else []
    tables.write([row | _worst(runs[str(row[what])], row) for row in scored], folder / f"{NAME}.csv")
    decimals = dict.fromkeys(rows[0], 2 if metrics.main_metric(_every(runs)) == "accuracy" else 4)
    about = meanings(f"client_{score}" for seeds in runs.values() for score in client_scores(seeds))
    about += f" Final values: {metrics.way_of(final)}."
    text = f"{tables.table(rows, 'markdown', decimals=decimals)}\n{about}\n{_named_table(runs)}"
    disk.write(folder / f"{NAME}.md", text.encode())
    return f"{tables.table(rows, decimals=decimals)}{about}\n"


def _worst(seeds: Sequence[Run], row: Mapping[str, Cell]) -> dict[str, Cell]:
    """The client with the worst score of a row of ``clients.csv``, if the clients have names."""
    prefix = next(prefix for prefix, model in MODELS.items() if model == row["model"])
    names, score = seeds[0].client_names, f"{prefix}{row['score']}"
    if names is None or not all(score in run.per_client for run in seeds):
        return {}
    tested = _tested(seeds, score)
    found = int(_worst_first(_at_the_end(seeds, score), score, tested)[0])
    return {"worst client": titled(names, found)} if tested[found] else {}


def _at_the_end(seeds: Sequence[Run], score: str) -> np.ndarray:
    """A score of each client at the last evaluation, the mean over the seeds; float64[N], accuracies in percent."""
    return np.mean(
        [metrics.percent(score) * np.asarray(run.per_client[score][-1], np.float64) for run in seeds], axis=0
    )


def _tested(seeds: Sequence[Run], score: str) -> np.ndarray:
    """Which clients have test rows: a value at some evaluation; bool[N]."""
    return np.any([~np.isnan(np.asarray(run.per_client[score])).all(axis=0) for run in seeds], axis=0)


def _worst_first(values: np.ndarray, score: str, tested: np.ndarray | None = None) -> np.ndarray:
    """The clients from the worst value of a score to the best; NaN comes last.

    ``tested``: the clients with test rows; if they are given, their NaN, of a model that diverged, comes first.
    """
    key = -values if smaller_is_better(score) else values
    if tested is not None:
        key = np.where(np.isnan(values) & tested, -np.inf, key)
    return np.argsort(key, kind="stable")


def _named_table(runs: Runs) -> str:
    """:func:`worst_rows` with its title, for ``clients.md``."""
    rows = worst_rows(runs)
    if not rows:
        return ""
    decimals = dict.fromkeys(rows[0], 2 if metrics.main_metric(_every(runs)) == "accuracy" else 4)
    count = len(_every(runs)[0].client_names or ())
    title = f"The {len(rows)} worst of {count} clients" if len(rows) < count else "All clients, the worst first"
    return f"\n{title}, at the last evaluation:\n\n{tables.table(markdown_rows(rows), 'markdown', decimals=decimals)}"


def write_clients_of_run(run: Run, folder: Path, final: str = FINAL) -> None:
    """Write the tables of one run's clients, if it has their scores; ``final``: of the means in ``clients.md``.

    ``clients.csv``: one row per client with its scores at the last evaluation, NaN for a client without test rows, and
    its name in the column ``client_name`` if it has one; ``clients.md``: as :func:`write_client_tables` writes it.
    """
    if not client_scores([run]) or not run.per_client:
        return
    write_client_tables({str(run.settings.get("method", "run")): [run]}, folder, final)
    last = {name: np.asarray(values[-1]) for name, values in run.per_client.items()}
    count = len(next(iter(last.values())))
    columns = with_names(run, {"client": np.arange(count)} | files.applicable(last))
    disk.write(folder / f"{NAME}.csv", files.csv_bytes(columns))


def worst_rows(runs: Runs, most: int = MOST_NAMED) -> list[dict[str, Cell]]:
    """The clients with the worst scores at the last evaluation, by number and name, the worst first; at most ``most``.

    A column for each method and model, the mean over the seeds. The clients are ordered by the mean over the methods
    of the score of the first model. Clients without test rows come last. Empty if the runs have no names of clients,
    or not all the same, or too many methods for one table.
    """
    metric, every = metrics.main_metric(_every(runs)), _every(runs)
    names = every[0].client_names
    drawn = [(name, score) for name, seeds in runs.items() for score in _drawn(seeds, metric)]
    alike = all(run.client_names == names for run in every)
    if names is None or not alike or not 0 < len(drawn) <= MOST_COLUMNS:
        return []
    unit = f", {metric}" + (" (%)" if metric == "accuracy" else "")
    values: dict[str, np.ndarray] = {}
    for name, score in drawn:
        model = of_model(score)[0]
        title = model if len(runs) == 1 else name if len(drawn) == len(runs) else f"{name}, {model}"
        values[f"{title}{unit}"] = _at_the_end(runs[name], score)
    first = drawn[0][1]
    ordering = [_at_the_end(runs[name], score) for name, score in drawn if score == first]
    tested = np.any([_tested(seeds, first) for seeds in runs.values()], axis=0)
    order = _worst_first(np.mean(ordering, axis=0), first, tested)[:most]
    rows: list[dict[str, Cell]] = []
    for client in order.tolist():
        row: dict[str, Cell] = {"client": client, COLUMN: shown_name(names, client)}
        rows.append(row | {title: float(column[client]) for title, column in values.items()})
    return rows


def _ordered_clients(run: Run, score: str) -> np.ndarray:
    """The clients with test rows, from the worst score at the last evaluation to the best; int64."""
    values = np.asarray(run.per_client[score][-1], np.float64)
    return _worst_first(values, score)[: np.count_nonzero(~np.isnan(values))]


def ordered_scores(run: Run, score: str) -> np.ndarray:
    """The scores of :func:`_ordered_clients`; float64, accuracies in percent."""
    return metrics.percent(score) * np.asarray(run.per_client[score][-1], np.float64)[_ordered_clients(run, score)]


def distribution(runs: Runs, *, drawing: Drawing = SCREEN) -> Figure:
    """The clients' scores at the last evaluation, from the worst client to the best: one line per method and model.

    Each line has one step per client. With several seeds it is the mean of the seeds' ordered scores if all seeds have
    equally many clients with test rows; if not, it is that of the first seed.
    """
    metric = metrics.main_metric(_every(runs))
    drawn = [(name, score) for name, seeds in runs.items() for score in _drawn(seeds, metric)]
    check.require(len(drawn) > 0, "runs", list(runs), "runs with scores of single clients")
    figure, axes = canvas.new(5.2, 3.6, drawing)
    names: list[str] = []
    for name, score in drawn:
        each = [ordered_scores(run, score) for run in runs[name]]
        alike = all(len(one) == len(each[0]) for one in each)
        mean, _ = metrics.mean_and_std(np.stack(each if alike else each[:1], axis=-1))
        model = of_model(score)[0]
        names.append(name if score == metric and len(drawn) == len(runs) else f"{name}, {model}")
        alone = runs[name][0] if len(each) == 1 else None
        _draw_steps(axes, mean, names, alone, None if alone is None else _ordered_clients(alone, score))
    _label_steps(figure, axes, names, f"client {metrics.axis_title(metric)}", drawing)
    return canvas.finish(figure, drawing)


def updates_per_client(run: Run, *, drawing: Drawing = SCREEN) -> Figure:
    """The accepted updates of each client, and the rejected ones if there are any, from the fewest to the most."""
    who, accepted = np.asarray(run.updates["client"]), np.asarray(run.updates["accepted"], bool)
    figure, axes = canvas.new(5.2, 3.6, drawing)
    names: list[str] = []
    for name, chosen in (("accepted", accepted), ("rejected", ~accepted)):
        if name == "accepted" or chosen.any():
            counts = np.bincount(who[chosen], minlength=run.schedule.num_clients)
            order = np.argsort(counts, kind="stable")
            names.append(name)
            _draw_steps(axes, counts[order], names, run, order)
    _label_steps(figure, axes, names, "updates", drawing)
    return canvas.finish(figure, drawing)


def _draw_steps(
    axes: Axes, values: np.ndarray, names: Sequence[str], run: Run | None, clients: np.ndarray | None
) -> None:
    """A line with a step per client, named by the last of ``names``; ``clients`` of a single run have names."""
    colour, dash = canvas.line_style(len(names) - 1)
    edges = np.linspace(0, 100, len(values) + 1)
    line = axes.stairs(values, edges, baseline=None, color=colour, linestyle=dash, linewidth=1.6)
    who = [] if run is None or clients is None else labels(run.client_names, clients)
    text = {"hovertext": who, "hovertemplate": "client %{hovertext}: %{y:.4g}"} if who else {}
    canvas.mark(axes, line, name=names[-1], dash=dash, **text)


def _label_steps(figure: Figure, axes: Axes, names: Sequence[str], what: str, drawing: Drawing) -> None:
    axes.set_xlim(0, 100)
    axes.grid(axis="y", color=canvas.GRID, linewidth=0.8)
    canvas.label(
        axes, f"clients, from the {'fewest to the most' if what == 'updates' else 'worst to the best'} (%)", what
    )
    canvas.legend_below(figure, axes.patches[: len(names)], names, drawing, columns=2)


def has_scores(run: Run) -> bool:
    """Whether :func:`distribution` can draw the scores of the clients of a run."""
    return bool(_drawn([run], metrics.main_metric([run])))


def _drawn(seeds: Sequence[Run], metric: str) -> list[str]:
    """The clients' scores that are drawn for these runs."""
    scores = of_metric(client_scores(seeds), metric)
    return [score for score in scores if all(score in run.per_client for run in seeds)]


def draw_clients(runs: Runs, folder: Path, drawing: Drawing = SCREEN) -> None:
    """Save the picture ``clients`` if any runs have scores of single clients."""
    metric = metrics.main_metric(_every(runs))
    if any(_drawn(seeds, metric) for seeds in runs.values()):
        save_formats(distribution(runs, drawing=drawing), folder / NAME, drawing)
