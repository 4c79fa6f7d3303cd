"""Figure 4: AsynFLC-EF with windows of 300 to 1,000 s, beside FedBuff and AsynFL (500 s).

    python experiments/asynfl/figure_4.py --scale laptop --tasks mnist

A window of 1,000 s is nearly synchronous, because almost every client returns within it. The compressor is top 3 %.
The paper suggests to adapt the window in each round and gives no rule: the row ``growing`` has the policy
``adaptive_window`` from 300 to 1,000 s, with the losses of as many uploads as there are clients.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from study import Rows, Variant, asynfl, draw, fedbuff, study

from fedjax_async.results import tables
from fedjax_async.types import Run

WINDOWS = (300, 500, 700, 900, 1000)


def variants(task: str, setting: dict[str, Any]) -> list[Variant]:
    """FedBuff, AsynFL and AsynFLC-EF with each window, and with one that grows."""
    recent, first, most = setting["clients"], min(WINDOWS), max(WINDOWS)
    growing = {"policy": f"adaptive_window:length={first},most={most},recent={recent}"}
    return [
        Variant("fedbuff", fedbuff(setting["clients"])),
        Variant("asynfl, 500 s", asynfl()),
        *[Variant(f"asynflc_ef, {w} s", asynfl("c_ef", "topk:ratio=0.03", w)) for w in WINDOWS],
        Variant("asynflc_ef, growing", asynfl("c_ef", "topk:ratio=0.03", first) | growing),
    ]


def clients(run: Run) -> dict[str, np.ndarray]:
    """The number of uploads and the sum of their staleness, of each client; without those of an incomplete step."""
    count, used = run.schedule.num_clients, run.updates["used"]
    client, staleness = run.updates["client"][used], run.updates["staleness"][used]
    uploads = np.bincount(client, minlength=count)
    return {"uploads": uploads, "staleness": np.bincount(client, staleness, count).astype(np.int64)}


def finish(task: str, runs: dict[str, list[Run]], rows: Rows, given: argparse.Namespace) -> None:
    """Add the uploads per server step and their mean staleness; draw the figure."""
    for row in rows:
        seeds = runs[row["variant"]]
        uploads = [run.per_client["uploads"].sum() for run in seeds]
        steps = [run.evaluations["step"][-1] for run in seeds]
        staleness = [run.per_client["staleness"].sum() for run in seeds]
        row["uploads a step"] = tables.spread([u / s for u, s in zip(uploads, steps)])
        row["mean staleness"] = tables.spread([s / u for s, u in zip(staleness, uploads)])
    draw(runs, given, "figure_4", task)


if __name__ == "__main__":
    study(__doc__, "figure_4", variants, finish, clients=clients)
