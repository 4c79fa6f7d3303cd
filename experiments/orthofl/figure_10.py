"""Figure 10: how OrthoFL depends on the mixing rate and on the number of local epochs.

    python experiments/orthofl/figure_10.py --scale laptop

A round's compute time grows with its epochs. The measured compute time is taken as that of the task's default number.
"""

from __future__ import annotations

from typing import Any

from study import METHODS, TASKS, Variant, study

RATES = (0.2, 0.4, 0.6, 0.8)
EPOCHS = (1.0, 5.0, 10.0)


def variants(task: str) -> list[Variant]:
    """FedAvg, then each mixing rate, then each number of epochs with work-dependent delays."""
    setting: dict[str, Any] = TASKS[task].setting
    # local steps of the measured compute time: those of an average client in the default number of epochs
    share = 600 if task == "smoke" else 6000
    usual = setting["epochs"] * share / setting["batch_size"]
    delay = f"rpi:reference_steps={usual:g}"
    return [
        Variant("fedavg", {"method": METHODS["fedavg"]}),
        *[Variant(f"mixing {rate:g}", {"method": f"orthofl:mixing={rate:g}"}) for rate in RATES],
        *[Variant(f"local epochs {e:g}", {"method": METHODS["orthofl"], "epochs": e, "delay": delay}) for e in EPOCHS],
    ]


if __name__ == "__main__":
    study(__doc__, "figure_10", ["mnist"], variants, baseline="fedavg")
