"""Top 3 % with QSGD and error feedback: one norm or buckets, Euclidean or maximum norm, scaled or not.

    python experiments/asynfl/quantisers.py --scale paper --tasks mnist --seeds 3

The paper's composition, unscaled with the Euclidean norm of all kept entries, diverges at 2 and 4 bits. This script
compares remedies: scale it, which makes it a contraction (the rows of Table III), or reduce the quantiser's error by
one norm for every 64 kept entries, the maximum norm, or both, which does not always have a bound below 1. "less" is
FedBuff's traffic divided by the row's; ``values up`` counts no norms, ``wire up`` counts all of them.
"""

from __future__ import annotations

import argparse
from typing import Any

from study import Rows, Variant, add_reductions, asynfl, draw, fedbuff, study

from fedjax_async.compress import levels_of
from fedjax_async.types import Run

BUCKET = 64
WAYS = {
    "whole, scaled": "scaled=true",
    "whole": "scaled=false",
    "maximum norm": "scaled=false,norm=max",
    f"buckets of {BUCKET}": f"scaled=false,bucket={BUCKET}",
    f"buckets of {BUCKET}, maximum norm": f"scaled=false,bucket={BUCKET},norm=max",
}
WIDTHS = (4, 2)


def variants(task: str, setting: dict[str, Any]) -> list[Variant]:
    """FedBuff, then every quantiser at each number of bits; at the smallest scale two of them."""
    quantised = {
        f"{width} bits, {name}": f"topk_qsgd:ratio=0.03,levels={levels_of(width)},{how}"
        for width in WIDTHS
        for name, how in WAYS.items()
    }
    if task == "smoke":
        quantised = dict(list(quantised.items())[3:5])
    rows = [Variant(name, asynfl("c_ef", compress)) for name, compress in quantised.items()]
    return [Variant("fedbuff", fedbuff(setting["clients"])), *rows]


def finish(task: str, runs: dict[str, list[Run]], rows: Rows, given: argparse.Namespace) -> None:
    """Add the reductions against FedBuff; draw the curves."""
    if "fedbuff" in runs:
        add_reductions(runs, rows)
    draw(runs, given, "quantisers", task)


if __name__ == "__main__":
    study(__doc__, "quantisers", variants, finish)
