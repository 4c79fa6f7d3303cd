"""Figure 10: how OrthoFL depends on the mixing rate and on the number of local epochs.

    python experiments/orthofl/figure_10.py --scale laptop

A round's compute time grows with its epochs: the delays' compute part is that of the task's usual number.
"""

from __future__ import annotations

from typing import Any

from study import METHODS, TASKS, Variant, study

RATES = (0.2, 0.4, 0.6, 0.8)
EPOCHS = (1.0, 5.0, 10.0)


def variants(task: str) -> list[Variant]:
    """FedAvg, then each mixing rate, then each number of epochs with work-dependent delays."""
    setting: dict[str, Any] = TASKS[task].setting
    # steps of a client of average size in the usual number of epochs: what the measured compute time stands for
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
