"""Draw the client updates a second of this package beside other simulators, from ``results/simulators.csv``.

    python experiments/benchmarks/simulators.py

It measures nothing: the other programs need environments of their own. It writes the picture of README, and prints how
many times as fast this package was as each program.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fedjax_async.results import save_figure, table, write
from fedjax_async.results.figure import FAINT, INK, PALETTE

FOLDER = Path(__file__).resolve().parent
OURS = "fedjax_async"


def read() -> list[dict[str, str]]:
    """The rows of the measured table: one per program and model."""
    with (FOLDER / "results" / "simulators.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def label(row: dict[str, str]) -> str:
    """Program and method."""
    return row["program"] + (f", {row['method']}" if row["method"] else "")


def draw(rows: list[dict[str, str]]) -> Figure:
    """A panel per model, a bar per program; grey where the program has no asynchronous server."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(10, 3.4), facecolor="white", layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), sharey=True), models, strict=True):
        of_model = [row for row in rows if row["model"] == model]
        rates = [float(row["best (1/s)"]) for row in of_model]
        colours = [PALETTE[1] if row["program"] == OURS else PALETTE[0] for row in of_model]
        colours = [c if row["asynchronous"] == "yes" else "#BBBBBB" for c, row in zip(colours, of_model, strict=True)]
        bars = axes.barh([label(row) for row in of_model], rates, color=colours)
        axes.bar_label(bars, [f"{rate:,.0f}" for rate in rates], padding=3, fontsize=9, color=INK)
        axes.set_title(model, fontsize=10, color=INK)
        axes.set_xlim(0, 1.2 * max(rates))
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.spines["left"].set_color(FAINT)
        axes.tick_params(colors=INK, labelsize=9, length=0)
    figure.axes[0].invert_yaxis()
    figure.supxlabel("client updates per second; grey: no asynchronous server", fontsize=10, color=INK)
    return figure


def main() -> None:
    """Draw, and write how many times as fast this package was."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=FOLDER / "simulators.svg", help="[simulators.svg beside this]")
    parser.add_argument("--out", type=Path, default=None, help="CSV of the ratios [only printed]")
    parser.add_argument("--smoke", action="store_true", help="do not write the picture")
    a = parser.parse_args()
    rows = read()
    figure = draw(rows)
    if not a.smoke:
        save_figure(figure, a.picture)
    ours = {row["model"]: float(row["best (1/s)"]) for row in rows if row["program"] == OURS}
    ratios: list[dict[str, Any]] = [
        {
            "program": label(row),
            "model": row["model"],
            "times as fast": ours[row["model"]] / float(row["best (1/s)"]),
            "hardware": row["hardware"],
        }
        for row in rows
        if row["program"] != OURS
    ]
    print(table(ratios))
    if a.out is not None:
        write(ratios, a.out)


if __name__ == "__main__":
    main()
