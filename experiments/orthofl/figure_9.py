"""Figure 9: from nearly one class a client to nearly IID, Dirichlet(alpha) with four values of alpha.

python experiments/orthofl/figure_9.py --scale laptop
"""

from __future__ import annotations

from study import crossed, study

ALPHAS = (0.01, 0.1, 0.5, 1e4)
COMPARED = ("fedavg", "fedasync", "ca2fl", "orthofl")
VARIANTS = crossed(COMPARED, {f"alpha {alpha:g}": {"partition": f"dirichlet:alpha={alpha:g}"} for alpha in ALPHAS})

if __name__ == "__main__":
    study(__doc__, "figure_9", ["mnist"], VARIANTS, baseline="fedavg, alpha 0.1")
