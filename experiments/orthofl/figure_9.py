"""Figure 9: from skewed to nearly IID clients, Dirichlet(alpha) with four values of alpha.

    python experiments/orthofl/figure_9.py --scale laptop

The paper has MNIST and CIFAR-10 (``--tasks mnist cifar10``). With the released partition alpha 0.01 is far from one
class per client; ``partitions.py`` measures the skew. The target, FedAvg's time and ``near best`` are those of the
methods at the same alpha.
"""

from __future__ import annotations

import sys

from study import METHODS, TASKS, Variant, crossed, rows_by_panel, study

ALPHAS = (0.01, 0.1, 0.5, 1e4)


def variants(task: str, scale: str) -> list[Variant]:
    """Every method at every alpha; clients draw in turns as in the task's own partition."""
    drawing = TASKS[task].setting["partition"].rpartition(",")[2]
    if not drawing.startswith("at_a_time="):
        sys.exit(f"--tasks {task}: its clients are given by the data set, so there is no alpha to change")
    partitions = {f"alpha {alpha:g}": f"dirichlet_balanced:alpha={alpha:g},{drawing}" for alpha in ALPHAS}
    return crossed(list(METHODS), {title: {"partition": partition} for title, partition in partitions.items()})


if __name__ == "__main__":
    study(__doc__, "figure_9", ["mnist"], variants, baseline="fedavg", rows_of_runs=rows_by_panel)
