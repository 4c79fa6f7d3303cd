"""Figure 8: the methods under the measured delays and under three distributions derived from them.

    python experiments/orthofl/figure_8.py --scale laptop

Measured: each client has a profile, and each round draws a Gaussian. The others are pooled, as in appendix B.4: every
round of every client is drawn from one distribution: lognormal with the mean and deviation of the rounds of all
devices, half-normal with their mean (no half-normal without negative delays has this deviation; ours has a smaller
one), or uniform from their 5th to their 95th percentile. The virtual time of all methods is that of an asynchronous
method for the task's number of updates under the same delays; the target, FedAvg's time and ``near best`` are those of
the methods under the same delays, so times can be compared only under the same delays.
"""

from __future__ import annotations

from study import DELAY, METHODS, crossed, rows_by_panel, study

DELAYS = {
    "measured": DELAY,
    **{f: f"rpi:pooled=true,family={f}" for f in ("lognormal", "half_normal", "uniform")},
}
VARIANTS = crossed(list(METHODS), {name: {"delay": delay} for name, delay in DELAYS.items()})

if __name__ == "__main__":
    study(__doc__, "figure_8", ["mnist"], VARIANTS, baseline="fedavg", budget_of=["delay"], rows_of_runs=rows_by_panel)
