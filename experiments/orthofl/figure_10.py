"""Figure 10: the effect of the mixing rate on OrthoFL, and of the number of local epochs on OrthoFL and FedAvg.

    python experiments/orthofl/figure_10.py --scale laptop

A round's compute time grows with its epochs; the measured compute time is taken as that of five epochs. The time to 95
% of the accuracy of FedAvg with five epochs is divided by FedAvg's, as in the paper.
"""

from __future__ import annotations

from study import METHODS, TASKS, Variant, rows_against, setting_of, study

RATES = (0.2, 0.4, 0.6, 0.8)
EPOCHS = (1.0, 5.0, 10.0)
COMPARED = ("fedavg", "orthofl", "orthofl_released")
BASELINE = "fedavg, epochs 5"


def variants(task: str, scale: str) -> list[Variant]:
    """OrthoFL with each mixing rate and the scale's number of epochs, then the methods with each number of epochs."""
    setting, _ = setting_of(TASKS[task], scale)
    # local steps of an average client in five epochs: the measured compute time is taken for them
    usual = 5 * (500 if task == "smoke" else 6000) / setting["batch_size"]
    delay = f"{setting['delay']},reference_steps={usual:g}"

    def variant(name: str, method: str, epochs: float, picture: str) -> Variant:
        return Variant(f"{name}, {picture}", {"method": method, "epochs": epochs, "delay": delay}, picture)

    rates = [
        variant(f"{name} {rate:g}", f"{name}:mixing={rate:g},exponent=0.5", setting["epochs"], "mixing")
        for name in COMPARED[1:]
        for rate in RATES
        if rate != 0.6  # the default, among the rows by epochs
    ]
    return rates + [variant(name, METHODS[name], e, f"epochs {e:g}") for e in EPOCHS for name in COMPARED]


if __name__ == "__main__":
    study(__doc__, "figure_10", ["mnist"], variants, baseline=BASELINE, rows_of_runs=rows_against)
