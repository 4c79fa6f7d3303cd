"""Table II: the rates claimed by ten analyses of asynchronous learning, as formulas, numbers and curves.

    python experiments/asynfl/table_2.py

Nothing is trained. The delays come from a schedule with the paper's clients and window. Hidden constants, sigma^2,
sigma_g^2 and G^2 are 1. The numbers compare how the claims depend on the server steps T; they do not compare
algorithms.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from study import TASKS, WINDOW, options, parse, report

from fedjax_async.clock import Until, delay_statistics, plan
from fedjax_async.results.figure import GRID, label, line_style, new, save_figure
from fedjax_async.theory import TABLE_2, Setting, compare

STEPS = {"smoke": 100, "laptop": 2000, "paper": 2000}  # server steps of the planned schedule
SERVER_STEPS = (3, 5, 7)  # T = 10^3, 10^5, 10^7
ASSUMES = ("non_iid", "quantization", "sparsification", "error_feedback", "unbounded_gradient")


def measured(scale: str) -> tuple[Setting, dict[str, float]]:
    """The setting of the paper's experiments (with ``server_steps`` 1), and the columns of its delays."""
    s = TASKS["mnist"].setting
    schedule = plan(
        f"window:length={WINDOW}",
        s["delay"],
        num_clients=s["clients"],
        local_steps=s["steps"],
        until=Until(steps=STEPS[scale]),
    )
    d = delay_statistics(schedule, fresh=1)
    participants = len(schedule.job) / d.server_steps
    highest = max(d.tau_avgm0, d.tau_avgm1)
    setting = Setting(1, s["steps"], s["clients"], participants, 1.0, 1.0, 1.0, d.tau_max, highest, d.tau_max)
    shown = {"m": participants, "tau_max": int(d.tau_max), "tau_avgm": highest}
    return setting, shown


def draw(setting: Setting, given: argparse.Namespace) -> None:
    """Draw each claimed rate against the number of server steps."""
    steps = np.logspace(2, 7, 60)
    figure, axes = new(7.6, 4.2)
    claims = compare(setting._replace(server_steps=steps))
    same: dict[bytes, list[str]] = {}  # claims with the same curve share one line
    for name, rate in claims.items():
        same.setdefault(rate.tobytes(), []).append(name)
    for index, names in enumerate(same.values()):
        colour, dash = line_style(index)
        axes.loglog(steps, claims[names[0]], color=colour, linestyle=dash, linewidth=1.5, label=",\n".join(names))
    axes.grid(color=GRID, linewidth=0.8)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    label(axes, "server steps T", "claimed rate, constants 1")
    save_figure(figure, given.out / "table_2.png")


def main() -> None:
    """Plan, evaluate, draw and write."""
    given = parse(options(__doc__, "table_2"))
    setting, delays = measured(given.scale)
    found = {power: compare(setting._replace(server_steps=10.0**power)) for power in SERVER_STEPS}
    rows: list[dict[str, Any]] = []
    for name, row in TABLE_2.items():
        assumes = {what.replace("_", " "): "yes" if getattr(row, what) else "no" for what in ASSUMES}
        assumes["any participation"] = "yes" if row.nonuniform_participation else "no"
        numbers = {f"T = 1e{power}": float(rates[name]) for power, rates in found.items()}
        rows.append({"analysis": name, "source": row.source} | assumes | {"rate (paper)": row.formula} | numbers)
    draw(setting, given)
    report([row | delays for row in rows], given, decimals={f"T = 1e{power}": 6 for power in SERVER_STEPS})


if __name__ == "__main__":
    main()
