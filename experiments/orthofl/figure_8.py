"""Figure 8: other distributions of the delays, with the means and deviations of the measured ones.

    python experiments/orthofl/figure_8.py --scale laptop

Each job draws from a Gaussian, lognormal, half-normal or uniform distribution that matches its client's profile.
"""

from __future__ import annotations

from study import crossed, study

FAMILIES = ("normal", "lognormal", "half_normal", "uniform")
COMPARED = ("fedavg", "fedasync", "fedbuff", "orthofl")
VARIANTS = crossed(COMPARED, {family: {"delay": f"rpi:family={family}"} for family in FAMILIES})

if __name__ == "__main__":
    study(__doc__, "figure_8", ["mnist"], VARIANTS, baseline="fedavg, normal", budget_of=["delay"])
