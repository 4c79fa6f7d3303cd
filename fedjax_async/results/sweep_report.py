"""Everything about a finished sweep into its folder: tables, pictures, and the best settings as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedjax_async import disk
from fedjax_async.results import tables
from fedjax_async.results.figure import save_figure
from fedjax_async.results.sweep_plots import pictures
from fedjax_async.results.sweep_table import Record, decimals_of, rank, records, setting_rows, write_tables
from fedjax_async.results.sweeps import Sweep

SHOWN = 5  # best settings
NO_PARQUET = "no Parquet files: they need pyarrow, pip install 'fedjax-async[sweep]'"


def best(found: Sequence[Record], target: float | None = None) -> str:
    """The best settings as a paragraph and a table, with the metric they were ranked by."""
    ranked = rank(found)
    rows = setting_rows(found, target)
    chosen = [{"rank": place + 1, **rows[setting]} for place, setting in enumerate(ranked.order[:SHOWN])]
    seeds = sorted({row["seeds"] for row in rows})
    over = f"{seeds[0]} seed{'s' if seeds[0] > 1 else ''}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    head = (
        f"Best of {len(rows)} settings by the mean of the {ranked.metric.removesuffix(' (%)')} over {over}; ties by "
        "the smaller standard deviation.\nThe test data chose them: measure the winner on data that it has not seen."
    )
    return f"{head}\n\n{tables.table(chosen, 'markdown', decimals=decimals_of(chosen))}"


def write_sweep(
    sweep: Sweep, folder: str | Path | None = None, plots: bool = True, *, target: float | None = None
) -> str:
    """Write the tables and pictures of a sweep; returns the best settings as text, to be printed.

    ``runs.csv``: one row a run. ``evaluations.csv``: one row an evaluation. Both as ``.parquet`` too, where
    pyarrow is installed. ``settings.csv``, ``settings.md``: mean and standard deviation over seeds, one row
    a setting. ``best.md``. ``accuracy.png`` and ``loss.png``: curves with their spread; ``accuracy_map.png``
    and ``loss_map.png`` where just two numbers were swept. The same results give the same bytes.

    ``folder``: the sweep's own unless given. ``target``: an accuracy in (0, 1]; adds how much virtual time,
    how many updates and bytes it took to get there.
    """
    place = sweep.folder if folder is None else Path(folder)
    if place is None:
        raise ValueError("folder = None: must be given for a sweep that was not kept in one")
    if not sweep.points:
        raise ValueError(f"folder = {str(place)!r}: must hold at least one finished run")
    found = records(sweep, target)
    written = write_tables(found, place, target)
    text = best(found, target)
    disk.write(place / "best.md", text.encode())
    if plots:
        for name, figure in pictures(found).items():
            save_figure(figure, place / name)
    disk.sweep_up(place)
    return text if "runs.parquet" in written else f"{text}\n{NO_PARQUET}\n"
