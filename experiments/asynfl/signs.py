"""Signs without error feedback: does the server's rate decide whether they converge?

    python experiments/asynfl/signs.py --scale laptop --tasks cifar10_cnn cifar10_alexnet

The paper gives no server rate for signs. Figure 5 uses the local learning rate (0.05 at ``laptop`` scale). This script
compares smaller server rates than 0.05, on IID and on non-IID data.
"""

from __future__ import annotations

import argparse
from typing import Any

from study import Rows, Variant, asynfl, draw, study

from fedjax_async.types import Run

RATES = (0.01, 0.003, 0.001, 0.0003)


def variants(task: str, setting: dict[str, Any]) -> list[Variant]:
    """Each rate on each kind of data; one rate at the smallest scale."""
    data = {"iid": "iid", "non-iid": setting["partition"]}
    return [
        Variant(f"{rate:g}, {kind}", asynfl("c", "sign", server_lr=rate) | {"partition": partition}, kind)
        for rate in (RATES[:1] if task == "smoke" else RATES)
        for kind, partition in data.items()
    ]


def finish(task: str, runs: dict[str, list[Run]], rows: Rows, given: argparse.Namespace) -> None:
    """Draw the curves."""
    draw(runs, given, "signs", task)


if __name__ == "__main__":
    study(__doc__, "signs", variants, finish)
