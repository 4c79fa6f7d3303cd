"""Figure 9: from nearly one class a client to nearly IID, Dirichlet(alpha) with four values of alpha.

python experiments/orthofl/figure_9.py --scale laptop
"""

from __future__ import annotations

from study import METHODS, Variant, study

ALPHAS = (0.01, 0.1, 0.5, 1e4)
COMPARED = ("fedavg", "fedasync", "ca2fl", "orthofl")
VARIANTS = [
    Variant(f"{method}, alpha {alpha:g}", {"method": METHODS[method], "partition": f"dirichlet:alpha={alpha:g}"})
    for alpha in ALPHAS
    for method in COMPARED
]

if __name__ == "__main__":
    study(__doc__, "figure_9", ["mnist"], VARIANTS, baseline="fedavg, alpha 0.1")
