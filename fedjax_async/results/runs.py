"""The folders of runs and comparisons with their tables and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedjax_async.base import check, disk
from fedjax_async.results import begun, clients, comparisons, latex, metrics, store, tables
from fedjax_async.results.compared import specs_in, target_method
from fedjax_async.results.curves import accuracy_curve, loss_curve, measured_curve
from fedjax_async.results.figure import SCREEN, Drawing, curve_stem, remove_pictures, save_formats
from fedjax_async.results.measured import curve_columns, measured, validation
from fedjax_async.results.metrics import FINAL
from fedjax_async.results.peer_gantt import age_histogram, mixed_ages, peer_gantt
from fedjax_async.results.plots import gantt, staleness_histogram
from fedjax_async.results.timeline import staleness_of
from fedjax_async.results.worlds import note_on_nodes, warn_of_differences, warn_of_left_out
from fedjax_async.types import Run


def write_run(
    run: Run, folder: str | Path, plots: bool = True, *, overwrite: bool = False, drawing: Drawing = SCREEN
) -> Path:
    """Save ``run`` into ``folder`` (see :func:`fedjax_async.results.store.save`), with pictures; returns the folder.

    Pictures: ``accuracy.png`` against virtual time (``loss.png`` for targets without classes); if any upload arrived,
    ``gantt.png`` and, if any was applied, ``staleness.png``; a curve of the training loss and of each metric. With
    scores of single clients also ``clients.png``, the curve of their worst tenth, and the tables ``clients.csv`` and
    ``clients.md``. ``drawing`` chooses other formats, a width, a title and the axis of the curves. The data are written
    first, so they are saved even if matplotlib is missing; ``ValueError`` then names the extra to install. Tables and
    pictures that an earlier run with other numbers left in the folder are removed.
    """
    before, columns = _numbers_in(check.path("folder", folder))
    folder = store.save(run, folder, overwrite=overwrite)
    if before and before != _numbers_in(folder)[0]:
        remove_pictures(folder, (*columns, "staleness", "gantt", clients.NAME))
        for name in (f"{clients.NAME}.csv", f"{clients.NAME}.md"):
            (folder / name).unlink(missing_ok=True)
    redraw_run(run, folder, plots, drawing=drawing)
    return folder


DRAWN_FROM = ("evaluations.csv", "updates.csv", "per_client.npz", store.SCHEDULE)  # tables and pictures of a run


def _numbers_in(folder: Path) -> tuple[dict[str, object], list[str]]:
    """The digests of the run in a folder, and the columns of its evaluations; both empty without a run."""
    manifest = begun.read(folder / store.MANIFEST)
    digests, types = manifest.get("sha256"), manifest.get("types")
    if not isinstance(digests, dict) or not isinstance(types, dict):
        return {}, []
    return {name: digests.get(name) for name in DRAWN_FROM}, list(types.get("evaluations") or ())


def redraw_run(run: Run, folder: Path, plots: bool = True, *, final: str = FINAL, drawing: Drawing = SCREEN) -> None:
    """Write the tables of the clients and the pictures of a run into its folder."""
    clients.write_clients_of_run(run, folder, final)
    if plots:
        _draw_run(run, folder, drawing, final)


def _draw_run(run: Run, folder: Path, drawing: Drawing, final: str = FINAL) -> None:
    name = str(run.settings.get("method", "run"))
    _draw_curve({name: [run]}, folder, final, drawing)
    if not run.has_server:
        if mixed_ages(run).size:
            save_formats(age_histogram(run, drawing), folder / "staleness", drawing)
        save_formats(peer_gantt(run, drawing=drawing), folder / "gantt", drawing)
    elif len(run.updates["staleness"]):
        if staleness_of(run).size:
            save_formats(staleness_histogram(run, drawing), folder / "staleness", drawing)
        save_formats(gantt(run, drawing=drawing), folder / "gantt", drawing)


def draw_missing(run: Run, folder: Path, drawing: Drawing) -> None:
    """Draw the pictures unless they exist; with any but the default ``drawing``, they are always drawn again."""
    curve = any((folder / name).exists() for name in ("accuracy.png", "loss.png"))
    mixing = staleness_of(run).size if run.has_server else mixed_ages(run).size
    others = (*(("staleness.png",) if mixing else ()), "gantt.png") if len(run.updates["staleness"]) else ()
    if drawing != SCREEN or not curve or not all((folder / name).exists() for name in others):
        _draw_run(run, folder, drawing)


def _draw_curve(runs: Mapping[str, Sequence[Run]], folder: Path, final: str, drawing: Drawing) -> None:
    """Accuracy, or the loss if no run has class labels; then the other measured columns, and the clients."""
    warn_of_differences(runs)
    labelled = any(not np.isnan(run.evaluations["accuracy"]).all() for seeds in runs.values() for run in seeds)
    draw, name = (accuracy_curve, "accuracy") if labelled else (loss_curve, "loss")
    save_formats(draw(runs, final=final, drawing=drawing), folder / curve_stem(name, drawing), drawing)
    for column, having in curve_columns(runs, name).items():
        some = {each: runs[each] for each in having}
        figure = measured_curve(some, column, final=final, drawing=drawing)
        save_formats(figure, folder / curve_stem(column, drawing), drawing)
    clients.draw_clients(runs, folder, drawing)


def write_comparison(
    runs: Mapping[str, Sequence[Run]],
    folder: str | Path,
    plots: bool = True,
    *,
    baseline: str | None = None,
    target: str | float = metrics.TARGET,
    final: str = FINAL,
    columns: Sequence[str] | None = None,
    drawing: Drawing = SCREEN,
) -> str:
    """Compare methods: ``comparison.csv``, ``.md``, ``.tex`` and ``accuracy.png`` in ``folder``.

    Other measured columns have their final values in the tables, and a curve each. With scores of single clients there
    are ``clients.csv``, ``clients.md`` and ``clients.png`` too.

    ``runs`` maps each method to its runs, one per seed, with the seeds in the same order. ``baseline``, ``target``,
    and ``final``: as in :func:`fedjax_async.results.comparisons.comparison`. The CSV also has the target, the mean
    staleness and all three final values. The LaTeX table (``latex.py``) marks the best methods; ``columns`` are the
    short names of its columns, such as ``["accuracy", "time", "staleness"]``, or None for those of the text. From
    three seeds on, ``pairs.csv`` and ``pairs.md`` have paired tests of the final value between the methods. Returns
    the tables as text, with the target above the first one, and what the accuracy is of methods without a server.

    Raises: ``ValueError`` if ``folder`` is a file, or for another wrong argument.
    """
    folder = check.path("folder", folder)
    check.require(folder.is_dir() or not folder.exists(), "folder", str(folder), "a folder, but it is a file")
    rows = comparisons.comparison(runs, baseline, target, final)
    every = [run for seeds in runs.values() for run in seeds]
    latex.require_columns(columns, more=True)
    extended = comparisons.comparison(runs, baseline, target, final, further=True)
    latex.chosen([name for name in extended[0] if name != "method"], columns)  # refuses before anything is written
    decimals = tables.decimals_of(rows)
    if warn_of_left_out(folder, runs):
        remove_pictures(folder, {clients.NAME, *(column for run in every for column in run.evaluations)})
    tables.write(extended, folder / "comparison.csv")
    notes = [note] if (note := note_on_nodes(runs)) else []
    if "target (%)" in extended[0]:
        goal = f"target: {tables.cell(extended[0]['target (%)'])} % ({_described(target, specs_in(runs))})"
        notes = [goal, *notes]
    elif target != metrics.TARGET:
        notes = [f"no times to the target {target}: no run has class labels, so losses are compared", *notes]
    header = "".join(f"{line}\n\n" for line in notes)
    disk.write(folder / "comparison.md", (header + tables.table(rows, "markdown", decimals=decimals)).encode())
    title = next(name for name in rows[0] if name != "method")
    pairs = comparisons.method_pairs(runs, final)
    metric = metrics.main_metric(every)
    scores = [metric, *validation(every, metric), *measured(every)]
    tests = latex.PairedTests(title, latex.p_values(pairs, list(runs)))
    shown = rows if columns is None else extended
    text = latex.latex(shown, ["method"], scores, columns=columns, final=final, tests=tests, notes=notes)
    disk.write(folder / "comparison.tex", text.encode())
    tested = comparisons.write_pairs(pairs, folder, title)
    unequal = clients.write_client_tables(runs, folder, final)
    if plots:
        _draw_curve(runs, folder, final, drawing)
    disk.sweep_up(folder)
    return "\n".join(filter(None, [header + tables.table(rows, decimals=decimals), unequal, tested]))


def _described(target: str | float, methods: Mapping[str, str]) -> str:
    if (method := target_method(target, methods)) is not None:
        return f"the final accuracy of {method}"
    share = str(target).removesuffix("%")
    lowest = f"{share} % of the lowest final accuracy among these methods; with others it may differ, --target fixes it"
    return "as asked for" if share == str(target) else lowest
