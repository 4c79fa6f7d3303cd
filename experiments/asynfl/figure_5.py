"""Figure 5: AsynFLC without error feedback, with signs and with top 3 %, on IID and on non-IID data.

    python experiments/asynfl/figure_5.py --scale laptop --tasks mnist

Signs have no magnitude, so the server's rate sets the length of the step. It equals the local learning rate, as in
signSGD. The paper has no scaled signs (times the mean magnitude, server rate 1); we added them.
"""

from __future__ import annotations

import argparse
from typing import Any

from study import Rows, Variant, asynfl, draw, study

from fedjax_async.types import Run


def variants(task: str, setting: dict[str, Any]) -> list[Variant]:
    """Each compressor on each kind of data."""
    compressed = {
        "sign": asynfl("c", "sign", server_lr=setting["lr"]),
        "top3": asynfl("c", "topk:ratio=0.03"),
        "scaled sign": asynfl("c", "scaled_sign"),
    }
    data = {"iid": "iid", "non-iid": setting["partition"]}
    return [
        Variant(f"{name}, {kind}", changes | {"partition": partition})
        for name, changes in compressed.items()
        for kind, partition in data.items()
    ]


def finish(task: str, runs: dict[str, list[Run]], rows: Rows, given: argparse.Namespace) -> None:
    """Draw the figure."""
    draw(runs, given, "figure_5", task)


if __name__ == "__main__":
    study(__doc__, "figure_5", variants, finish)
