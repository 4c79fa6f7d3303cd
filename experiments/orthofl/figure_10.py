"""Figure 10: the effect of the mixing rate on OrthoFL, and of the number of local epochs on OrthoFL and FedAvg.

    python experiments/orthofl/figure_10.py --scale laptop

(a) Mixing rates, all methods with the paper's number of epochs. (b) Numbers of epochs, with a mixing rate of 0.6. At
every scale batches and learning rate are the paper's, because they decide what an epoch does; ``laptop`` has fewer
updates. A round's compute time grows with its epochs; the measured compute time is taken as that of five epochs.
``time / fedavg`` is the time to 95 % of FedAvg's accuracy divided by FedAvg's, in (a) FedAvg with as many epochs, in
(b) with five, as in the paper. ``near best`` is among the rows of (a), or of (b).
"""

from __future__ import annotations

import functools
from typing import Any

from study import METHODS, TASKS, Variant, rows_against, rows_by_panel, study

RATES = (0.2, 0.4, 0.6, 0.8)
EPOCHS = (1.0, 5.0, 10.0)
RULES = ("orthofl", "orthofl_released")


def variants(task: str, scale: str) -> list[Variant]:
    """FedAvg and OrthoFL with each mixing rate, then the methods with each number of epochs."""
    usual = {key: TASKS[task].setting[key] for key in ("batch_size", "lr", "epochs")}
    measured = 5 * TASKS[task].examples / usual["batch_size"]  # local steps in the measured compute time
    delay = f"{TASKS[task].setting['delay']},reference_steps={measured:g}"

    def variant(name: str, method: str, epochs: float, picture: str) -> Variant:
        work = {**usual, "epochs": epochs, "steps": None}
        return Variant(f"{name}, {picture}", {"method": method, "delay": delay, **work}, picture)

    rates = {f"{rule} {rate:g}": f"{rule}:mixing={rate:g},exponent=0.5" for rule in RULES for rate in RATES}
    by_rate = {"fedavg": METHODS["fedavg"]} | rates
    return [variant(name, method, usual["epochs"], "mixing") for name, method in by_rate.items()] + [
        variant(name, METHODS[name], epochs, f"epochs {epochs:g}") for epochs in EPOCHS for name in ("fedavg", *RULES)
    ]


def baseline_of(picture: str) -> str:
    """The FedAvg row with which a picture is compared."""
    return "fedavg, mixing" if picture == "mixing" else "fedavg, epochs 5"


if __name__ == "__main__":
    bands = ["fedavg", *(f"orthofl {rate:g}" for rate in RATES)]
    rows: Any = functools.partial(rows_by_panel, baseline_of=baseline_of, rows=rows_against)
    study(__doc__, "figure_10", ["mnist"], variants, baseline="fedavg", rows_of_runs=rows, bands=bands)
