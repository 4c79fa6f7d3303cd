"""Do other buffers and server rates bring the relative times on HAR nearer to the paper's Table 1?

    python experiments/orthofl/times.py --scale laptop

FedAdam's server rate and the buffers of FedBuff and CA2FL are in neither the paper nor its code; ``table_1.py`` uses
the values that ``tuning.py`` chose on MNIST. This script runs each value that ``tuning.py`` tried, on HAR.
``time / fedavg`` is the time to 95 % of FedAvg's final accuracy in the same seed, divided by FedAvg's time; beside it
are the paper's numbers.
"""

from __future__ import annotations

from study import METHODS, Variant, beside_the_paper, rows_against, study
from tuning import OPEN

COMPARED = ("fedadam", "fedbuff", "ca2fl")
VARIANTS = [Variant("fedavg", {"method": METHODS["fedavg"]}, "fedadam")] + [
    Variant(f"{method}, {OPEN[method][0]} {value:g}", {"method": OPEN[method][1].format(f"{value:g}")}, method)
    for method in COMPARED
    for value in OPEN[method][2]
]


if __name__ == "__main__":
    study(
        __doc__,
        "times",
        ["har"],
        VARIANTS,
        baseline="fedavg",
        rows_of_runs=rows_against,
        finish=lambda rows, given: beside_the_paper(rows),
    )
