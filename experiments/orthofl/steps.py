"""Is CIFAR-10's distance from the paper's accuracy due to the small number of local steps at ``laptop`` scale?

    python experiments/orthofl/steps.py --scale laptop --seeds 1

OrthoFL's row of Table 1 with longer jobs; the arrivals and their times stay the same. The paper trains five epochs a
job, 160 steps of up to 128 examples, for 500 arrivals.
"""

from __future__ import annotations

from study import METHODS, Variant, beside_the_paper, study

STEPS = (10, 30, 90)  # 10 as in Table 1 at ``laptop`` scale
VARIANTS = [
    Variant(f"orthofl, {steps} steps", {"method": METHODS["orthofl"], "epochs": None, "steps": steps})
    for steps in STEPS
]

if __name__ == "__main__":
    study(
        __doc__,
        "steps",
        ["cifar10"],
        VARIANTS,
        baseline="",  # no row to which times are relative
        finish=lambda rows, given: beside_the_paper(rows),
    )
