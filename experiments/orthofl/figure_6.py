"""Figure 6: the contribution of OrthoFL's parts, in the rule of the paper and in that of its released code.

    python experiments/orthofl/figure_6.py --scale laptop

The variants: without calibration (FedAsync); without moving average; the client's change projected instead of the
others' shift; one projection for the whole vector instead of one per layer; the released code's rule (clients share one
calibrated state, each tensor is projected separately); the paper's rule with only the shared state of the released
code.
"""

from __future__ import annotations

from study import METHODS, Variant, study

VARIANTS = [
    Variant("orthofl", {"method": METHODS["orthofl"]}),
    Variant("orthofl_released", {"method": METHODS["orthofl_released"]}),
    Variant("without calibration", {"method": METHODS["fedasync"]}),
    Variant("without moving average", {"method": "orthofl_no_average"}),
    Variant("pairwise projection", {"method": "orthofl_pairwise"}),
    Variant("whole vector", {"method": "orthofl:per=whole"}),
    Variant("shared reference", {"method": "orthofl:reference=shared"}),
]

if __name__ == "__main__":
    bands = [variant.name for variant in VARIANTS if variant.name != "orthofl_released"]  # on MNIST as the last one
    study(__doc__, "figure_6", ["mnist"], VARIANTS, baseline="orthofl", bands=bands)
