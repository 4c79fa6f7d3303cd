"""Figures 11 and 12: the delays per client, and the staleness of the updates under them.

    python experiments/orthofl/figure_11_12.py

The table has each client's mean and deviation, measured and drawn, and the staleness of its updates. The paper's own
measurements are not published; the measured delays are the table released with its code.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from study import options, parse, report

from fedjax_async.clock import Until, plan
from fedjax_async.results.figure import new, save_figure

CLIENTS = 10
UPDATES = {"smoke": 200, "laptop": 5000, "paper": 5000}


def main() -> None:
    """Plan, measure, draw and write; nothing is trained."""
    given = parse(options(__doc__, "figure_11_12"))
    schedule = plan("every", "rpi", num_clients=CLIENTS, local_steps=1, until=Until(updates=UPDATES[given.scale]))
    seconds = schedule.upload_time - schedule.dispatch_time
    arrived = schedule.client[schedule.job]
    rows: list[dict[str, Any]] = []
    for client in range(CLIENTS):
        own = seconds[schedule.client == client]
        stale = schedule.staleness[arrived == client]
        rows.append({
            "client": client,
            "jobs": len(own),
            "mean (s)": float(own.mean()),
            "std (s)": float(own.std()),
            "longest (s)": float(own.max()),
            "mean staleness": float(stale.mean()) if len(stale) else float("nan"),
        })  # fmt: skip
    figure, axes = new(8.0, 4.0)
    order = np.argsort([row["mean (s)"] for row in rows])
    axes.boxplot([seconds[schedule.client == client] for client in order], whis=(5, 95), showfliers=False)
    axes.set_xticks(range(1, CLIENTS + 1), [str(client) for client in order])
    axes.set_xlabel("client, by mean delay")
    axes.set_ylabel("seconds a round (quartiles; 5 % to 95 %)")
    save_figure(figure, given.out / "figure_11_12.png")
    report(rows, given)


if __name__ == "__main__":
    main()
