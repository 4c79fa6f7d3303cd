"""Figure 4: AsynFLC-EF with windows of 300 to 1,000 s, beside FedBuff and AsynFL (500 s).

    python experiments/asynfl/figure_4.py --scale laptop --tasks mnist

A window of 1,000 s is nearly synchronous, because almost every client returns within it. The compressor is top 3 %.
The paper suggests to adapt the window in each round and gives no rule: the row ``growing`` has the policy
``adaptive_window`` from 300 to 1,000 s, with the losses of as many uploads as there are clients.
"""

from __future__ import annotations

import argparse
from typing import Any

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


def finish(task: str, runs: dict[str, list[Run]], rows: Rows, given: argparse.Namespace) -> None:
    """Add the uploads per server step, their mean staleness and the last window that was decided; draw the figure."""
    for row in rows:
        seeds = runs[row["variant"]]
        each = [run.counters["updates"] / run.counters["server_steps"] for run in seeds]
        row["uploads a step"] = tables.spread(each)
        row["mean staleness"] = tables.spread([run.updates["staleness"].mean() for run in seeds])
        if all("window" in run.probes for run in seeds):
            row["last window (s)"] = tables.spread([float(run.probes["window"]["length"][-1]) for run in seeds])
    draw(runs, given, "figure_4", task)


if __name__ == "__main__":
    study(__doc__, "figure_4", variants, finish)
