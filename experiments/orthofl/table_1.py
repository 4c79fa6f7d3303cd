"""Table 1 and Figure 5: seven methods on five tasks, the same virtual time for all, ours beside the paper's.

    python experiments/orthofl/table_1.py --scale laptop --tasks mnist har     # three seeds, see the README
    python experiments/orthofl/table_1.py --scale paper --tasks har --seeds 1 --variants fedavg

``orthofl`` is the rule of the paper's text; an eighth row is the rule of its released code. ``--variants`` runs some
rows; finished runs in the same ``--out`` are used again. Table and target have the rows of the last command only.
Relative time: virtual time to 95 % of the lowest final accuracy among the methods, divided by FedAvg's. The picture of
each task is Figure 5, accuracy against virtual time.
"""

from __future__ import annotations

import argparse
from typing import Any

from study import METHODS, TASKS, Variant, beside_the_paper, setting_of, shared, study

from fedjax_async.results import tables
from fedjax_async.results.metrics import FINAL, final_accuracy

VARIANTS = [Variant(name, {"method": spec}) for name, spec in METHODS.items()]


def ceiling(task: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for 20 Newsgroups: the same encoder and adapters trained on all documents, with as many local steps."""
    if not task.startswith("20newsgroups"):
        return []
    setting, updates = setting_of(TASKS[task], given.scale)
    alone = setting | {"clients": 1, "partition": "iid", "method": "fedasync:mixing=1,staleness=constant"}
    if alone["epochs"] is not None:  # jobs as long as a federated client's
        alone["epochs"] /= setting["clients"]
    base = {**alone, "updates": updates, "eval_updates": updates}
    name = "centralised (ceiling)"
    runs = shared.run_variants(f"{task}-ceiling", base, [Variant(name, {"method": base["method"]})], given)[name]
    accuracy = tables.spread([100 * final_accuracy(run, FINAL) for run in runs])
    return [{"task": task, "variant": name, "accuracy (%)": accuracy, "seeds": given.seeds}]


if __name__ == "__main__":
    study(
        __doc__,
        "table_1",
        [task for task in TASKS if task not in ("smoke", "20newsgroups_long")],
        VARIANTS,
        baseline="fedavg",
        more=ceiling,
        finish=lambda rows, given: beside_the_paper(rows),
    )
