"""The command ``explain``: which arrivals of a saved run moved the loss up or down."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedjax_async.cli.runs import drawing_of
from fedjax_async.results import table
from fedjax_async.results.explaining import TABLES, Explanation, decimals_of, explain
from fedjax_async.results.figure import require_matplotlib

VISIBLE = 1e-3  # relative distance of parameters that is more than rounding


def explained(arguments: argparse.Namespace) -> None:
    """Attribute, write into ``arguments.out`` and print the tables."""
    drawing = drawing_of(arguments)
    require_matplotlib()
    out = arguments.out or str(Path(arguments.folder) / "explain")
    found = explain(
        arguments.folder,
        part=arguments.part,
        examples=arguments.examples,
        out=out,
        overwrite=arguments.overwrite,
        drawing=drawing,
        progress=False if arguments.quiet else None,
    )
    _print(found)
    print(f"written: {out}")


def _print(found: Explanation) -> None:
    """The whole change, then the tables."""
    exact, first = found.arrivals["change"], found.arrivals["first_order"]
    end, moved = float(found.arrivals["loss"][-1]), int(((exact != 0) | (first != 0)).sum())
    arrivals = f"{moved} arrivals" if moved == len(exact) else f"{moved} of {len(exact)} arrivals moved the model and"
    print(
        f"{found.part} loss {found.start[0]:.4f} at the start, {end:.4f} at the end: {arrivals} "
        f"changed it by {exact.sum():+.4f}, to first order by {first.sum():+.4f}"
    )
    if found.drift > VISIBLE:
        print(
            f"the repeated run ends {100 * found.drift:.2g} % away from the saved parameters: it was made on another "
            "machine or with other versions (versions.json), and the tables are of the repeated one"
        )
    for name, rows_of in TABLES.items():
        rows = rows_of(found)
        if rows:
            print(f"\n{name}\n{table(rows, decimals=decimals_of(rows))}", end="")
    print()
