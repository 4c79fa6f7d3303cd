"""The commands about saved runs, except ``landscape``: ``report``, ``redraw``, ``privacy``, ``export``, ``explain``."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedjax_async.base import check
from fedjax_async.bridges.exporting import export
from fedjax_async.cli.parsing import in_free_folder
from fedjax_async.cli.runs import drawing_of, plots_of
from fedjax_async.models import layer_names, read_arrays
from fedjax_async.results import table
from fedjax_async.results.client_names import titled
from fedjax_async.results.explaining import TABLES, Explanation, decimals_of, explain
from fedjax_async.results.figure import Drawing, require_matplotlib
from fedjax_async.results.html_report import write_report
from fedjax_async.results.metrics import FINAL
from fedjax_async.results.privacy import guarantees
from fedjax_async.results.redrawing import redraw
from fedjax_async.results.store import load

VISIBLE = 1e-3  # a larger relative distance of parameters is more than rounding


def report(arguments: argparse.Namespace) -> None:
    """Write one HTML page about folders of results, and print its path and size."""
    folders = arguments.folders
    beside = Path(folders[0]) if len(folders) == 1 else Path()
    path = write_report(folders, arguments.out or beside / "report.html")
    print(f"written: {path} ({path.stat().st_size / 1e6:.1f} MB), open it in any browser")


def redrawn(arguments: argparse.Namespace) -> None:
    """Write the tables and pictures of a folder again, and print the tables."""
    options = {name: getattr(arguments, name) for name in ("baseline", "target", "columns")}
    final = arguments.final or FINAL
    print(redraw(arguments.folder, plots_of(arguments), final=final, drawing=drawing_of(arguments), **options), end="")
    print(f"written: {arguments.folder}")


def privacy(arguments: argparse.Namespace) -> None:
    """Print epsilon of each folder's run."""
    for folder in arguments.folders:
        run = load(folder)
        for one in guarantees(run, delta=arguments.delta):
            bound = "epsilon: none" if one.epsilon is None else f"epsilon = {one.epsilon:.4g}"
            print(f"{folder}: {one.unit}: {bound} at delta = {one.delta:.3g} ({one.delta_of})")
            print(f"  runs compared: {one.neighbours}")
            if one.client is not None:
                print(
                    f"  largest for {titled(run.client_names, one.client)}, which took part {one.participations} times"
                )
            print(f"  how: {one.how}")


def exported(arguments: argparse.Namespace) -> None:
    """Write the model of a run as a file of weights, and print its arrays."""
    renamed = arguments.rename
    check.require(arguments.names == "torch" or renamed is None, "rename", renamed, "left out without --names torch")
    options = {name: getattr(arguments, name) for name in ("names", "best", "node", "overwrite")}
    with check.called({"modules": "rename"}):
        path = export(arguments.folder, arguments.to, modules=layer_names("rename", renamed), **options)
    arrays = read_arrays(path)
    for name, array in arrays.items():
        print(f"{name:<40} {array.dtype.name:<10} {list(array.shape)}")
    print(f"written: {path}, {sum(array.size for array in arrays.values()):,} numbers")


def explained(arguments: argparse.Namespace) -> None:
    """Attribute the change of the loss to arrivals; write tables into ``arguments.out`` and print them."""
    drawing = drawing_of(arguments)
    require_matplotlib()
    in_free_folder(arguments.out, Path(arguments.folder) / "explain", lambda out: _explain_in(out, arguments, drawing))


def _explain_in(out: str, arguments: argparse.Namespace, drawing: Drawing) -> None:
    found = explain(
        arguments.folder,
        part=arguments.part,
        examples=arguments.examples,
        out=out,
        overwrite=arguments.overwrite,
        drawing=drawing,
        progress=False if arguments.quiet else None,
    )
    _print_explanation(found)
    print(f"written: {out}")


def _print_explanation(found: Explanation) -> None:
    """Print the whole change of the loss, then the tables."""
    exact, first = found.arrivals["change"], found.arrivals["first_order"]
    end, moved = float(found.arrivals["loss"][-1]), int(((exact != 0) | (first != 0)).sum())
    arrivals = f"{moved} arrivals" if moved == len(exact) else f"{moved} of {len(exact)} arrivals moved the model and"
    print(
        f"{found.part} loss {found.start[0]:.4f} at the start, {end:.4f} at the end: {arrivals} "
        f"changed it by {exact.sum():+.4f}, to first order by {first.sum():+.4f}"
    )
    if found.drift > VISIBLE:
        print(
            f"the repeated run ends {100 * found.drift:.2g} % away from the saved parameters: of the saved run, "
            f"{found.why or 'nothing that was recorded differs'}; the tables describe the repeated run"
        )
    for name, rows_of in TABLES.items():
        rows = rows_of(found)
        if rows:
            print(f"\n{name}\n{table(rows, decimals=decimals_of(rows))}", end="")
    print()
