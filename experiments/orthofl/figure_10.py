"""Figure 10: the effect of the mixing rate on OrthoFL, and of the number of local epochs on OrthoFL and FedAvg.

    python experiments/orthofl/figure_10.py --scale laptop

(a) Mixing rates, all methods with the scale's number of epochs. (b) Numbers of epochs, with a mixing rate of 0.6. A
round's compute time grows with its epochs; the measured compute time is taken as that of five epochs. ``time / fedavg``
is the time to 95 % of FedAvg's accuracy divided by FedAvg's, in (a) FedAvg with as many epochs, in (b) with five, as in
the paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from study import METHODS, TASKS, Variant, rows_against, rows_of, setting_of, study

from fedjax_async.types import Run

RATES = (0.2, 0.4, 0.6, 0.8)
EPOCHS = (1.0, 5.0, 10.0)
RULES = ("orthofl", "orthofl_released")
BASELINES = {"mixing": "fedavg, mixing", "epochs": "fedavg, epochs 5"}  # first word of a picture -> variant


def variants(task: str, scale: str) -> list[Variant]:
    """FedAvg and OrthoFL with each mixing rate, then the methods with each number of epochs."""
    setting, _ = setting_of(TASKS[task], scale)
    measured = 5 * TASKS[task].examples / setting["batch_size"]  # local steps in the measured compute time
    delay = f"{setting['delay']},reference_steps={measured:g}"

    def variant(name: str, method: str, work: dict[str, Any], picture: str) -> Variant:
        return Variant(f"{name}, {picture}", {"method": method, "delay": delay, **work}, picture)

    rates = {f"{rule} {rate:g}": f"{rule}:mixing={rate:g},exponent=0.5" for rule in RULES for rate in RATES}
    by_rate = {"fedavg": METHODS["fedavg"]} | rates
    usual_work = {key: setting.get(key) for key in ("epochs", "steps")}
    return [variant(name, method, usual_work, "mixing") for name, method in by_rate.items()] + [
        variant(name, METHODS[name], {"epochs": epochs, "steps": None}, f"epochs {epochs:g}")
        for epochs in EPOCHS
        for name in ("fedavg", *RULES)
    ]


def rows_by_panel(task: str, runs: Mapping[str, Sequence[Run]], name: str) -> list[dict[str, Any]]:
    """The rows of both panels, each against its own baseline; the column of the times is ``time / NAME``.

    Without its baseline (``--variants``) a panel has no times.
    """
    rows = []
    for panel, baseline in BASELINES.items():
        own = {variant: seeds for variant, seeds in runs.items() if variant.partition(", ")[2].startswith(panel)}
        found = rows_against(task, own, baseline) if baseline in own else rows_of(task, own, baseline) if own else []
        for row in found:
            rows.append({column.replace(baseline, name): value for column, value in row.items()})
    return rows


if __name__ == "__main__":
    bands = ["fedavg", *(f"orthofl {rate:g}" for rate in RATES)]
    study(__doc__, "figure_10", ["mnist"], variants, baseline="fedavg", rows_of_runs=rows_by_panel, bands=bands)
