"""Log every evaluation to Weights & Biases while the run trains; offline, nothing leaves the machine.

pip install wandb
WANDB_MODE=offline python notebooks/recipes/track_with_wandb.py
wandb sync runs/tracked/wandb/offline-run-*    # later, from a machine with a network
"""

import os
from pathlib import Path

from fedjax_async import simulate

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_PROJECT", "fedjax-async")


def main() -> None:
    """One run; a tracked run that is resumed goes on in the same curve."""
    out = Path("runs/tracked")
    run = simulate(
        method="fedasync", model="logistic", clients=10, updates=60, out=out, plots=False, stream="wandb",
        progress=False, overwrite=True,
    )  # fmt: skip
    logged = sorted(out.rglob("*.wandb"))
    print(f"accuracy {run.evaluations['accuracy'][-1]:.3f}, {len(run.evaluations['time'])} evaluations in {logged[-1]}")


if __name__ == "__main__":
    main()
