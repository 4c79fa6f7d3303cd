"""Figure 9: from nearly one class per client to nearly IID, Dirichlet(alpha) with four values of alpha.

    python experiments/orthofl/figure_9.py --scale laptop

The paper has MNIST and CIFAR-10 (``--tasks mnist cifar10``).
"""

from __future__ import annotations

from study import METHODS, TASKS, Variant, crossed, study

ALPHAS = (0.01, 0.1, 0.5, 1e4)


def variants(task: str, scale: str) -> list[Variant]:
    """Every method at every alpha; clients draw in turns as in the task's own partition."""
    drawing = TASKS[task].setting["partition"].rpartition(",")[2]
    partitions = {f"alpha {alpha:g}": f"dirichlet_balanced:alpha={alpha:g},{drawing}" for alpha in ALPHAS}
    return crossed(list(METHODS), {title: {"partition": partition} for title, partition in partitions.items()})


if __name__ == "__main__":
    study(__doc__, "figure_9", ["mnist"], variants, baseline="fedavg, alpha 0.1")
