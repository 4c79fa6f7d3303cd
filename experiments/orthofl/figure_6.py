"""Figure 6: what OrthoFL's parts contribute, and which reference its released code uses.

    python experiments/orthofl/figure_6.py --scale laptop

Without calibration (that is FedAsync), without moving average, with the client's change instead of the others' shift
projected, with one projection for the whole vector instead of one a layer, and with the released code's reference.
"""

from __future__ import annotations

from study import METHODS, Variant, study

VARIANTS = [
    Variant("orthofl", {"method": METHODS["orthofl"]}),
    Variant("without calibration", {"method": METHODS["fedasync"]}),
    Variant("without moving average", {"method": "orthofl_no_average"}),
    Variant("pairwise projection", {"method": "orthofl_pairwise"}),
    Variant("whole vector", {"method": "orthofl:per=whole"}),
    Variant("shared reference", {"method": "orthofl:reference=shared"}),
]

if __name__ == "__main__":
    study(__doc__, "figure_6", ["mnist"], VARIANTS, baseline="orthofl")
