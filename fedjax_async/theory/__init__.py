"""Theory: convergence bounds, to compare with what a run does.

Start with :func:`compare` (``comparison.py``): the rates of ten analyses. ``rates.py`` has the bounds of the AsynFLC
paper as functions of a problem's constants, ``orders.py`` the terms inside the O of its corollaries. ``estimate.py``
measures these constants on a model and its data.
"""

from fedjax_async.theory.comparison import TABLE_2, Row, Setting, compare
from fedjax_async.theory.estimate import (
    Estimates,
    client_gradients,
    estimate,
    gradient_variance,
    heterogeneity,
    smoothness,
    smoothness_between,
)
from fedjax_async.theory.orders import (
    LearningRates,
    corollary_1,
    corollary_2,
    corollary_3,
    corollary_4,
    fast_lrs,
    residual_order,
    slow_lrs,
)
from fedjax_async.theory.rates import (
    Bound,
    Constants,
    asynfl_bound,
    asynflc_bound,
    asynflc_ef_bound,
    compression_factor,
    constant_delays,
    largest_lr_asynfl,
    largest_lr_asynflc,
    largest_lr_asynflc_ef,
    smallest_gamma_asynflc,
)

__all__ = [
    "TABLE_2",
    "Bound",
    "Constants",
    "Estimates",
    "LearningRates",
    "Row",
    "Setting",
    "asynfl_bound",
    "asynflc_bound",
    "asynflc_ef_bound",
    "client_gradients",
    "compare",
    "compression_factor",
    "constant_delays",
    "corollary_1",
    "corollary_2",
    "corollary_3",
    "corollary_4",
    "estimate",
    "fast_lrs",
    "gradient_variance",
    "heterogeneity",
    "largest_lr_asynfl",
    "largest_lr_asynflc",
    "largest_lr_asynflc_ef",
    "residual_order",
    "slow_lrs",
    "smallest_gamma_asynflc",
    "smoothness",
    "smoothness_between",
]
