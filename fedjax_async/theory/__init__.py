"""Theory: convergence bounds, for comparison with runs.

Start with :func:`compare` (``comparison.py``): the rates of ten analyses. ``rates.py`` has the bounds of the AsynFLC
paper as functions of a problem's constants, ``orders.py`` the terms inside the O of its corollaries,
``asynchronous_rates.py`` the bounds of FedBuff and FedAsync. ``estimate.py`` measures these constants on a model and
its data.

``vector_fields.py`` measures how far an iterated map, such as local training, is from the gradient of a loss; start
with :func:`antisymmetry`. ``fedavg_dynamics.py`` has FedAvg's server field, its iterates and orbits, ``surrogate.py``
the loss that FedAvg minimises if its field is a gradient, ``closed_forms.py`` and ``field_examples.py`` fields that are
known exactly, and ``field_rates.py`` the rates of FedAvg and FedAvgM towards the fixed point; ``fixed_points.py``
finds this point and its distance to the minimiser. ``training_field.py`` measures the antisymmetry of the clients' real
local training, at a model and as a probe along a run.

``landscape.py`` has the loss on a grid in a plane and along curves, and barriers between models; ``connectivity.py``
learns a curve of low loss between two of them. ``asyncmanifold_rate.py`` has AsyncManifold's bound and rate,
``curve_quality.py`` estimates its constants along a run. ``pushcen_rate.py`` has PushCen-ADFL's bound.

The bounds, all for smooth losses. A run or :func:`estimate` measures the constants, except those marked with a star:

| bound | of | assumes | constants |
| --- | --- | --- | --- |
| ``asynfl_bound`` | mean squared gradient | eta up to ``largest_lr_asynfl`` | gap*, L, sigma, sigma_g, delays |
| ``asynflc_bound`` | same, compressed | ``largest_lr_asynflc``, ``smallest_gamma_asynflc`` | as above, gamma |
| ``asynflc_ef_bound`` | same, error feedback | eta up to ``largest_lr_asynflc_ef`` | as above, gamma |
| ``fedbuff_bound`` | mean squared gradient | G finite, clients equally likely | as ``asynfl_bound``, G |
| ``fedasync_gap_bound`` | F - F* | one strongly convex loss for all | gap*, mu*, L, sigma, S |
| ``manifold_bound`` | mean squared gradient | G finite, equal participation | gap*, L, G, sigma, S, Q, D |
| ``pushcen_bound`` | mean squared gradient | G finite, no lost mass, no mask | gap*, L, G, zeta, eps_c, shares |
| ``fedavg_distance_bound`` | distance to x_s* | k-conservative, strongly convex | alpha*, beta, k, distance |
| ``fedavg_gap_bound`` | f_s - f_s(x_s*) | k-conservative, convex, x_s* exists | distance |
| ``fedavgm_distance_bound`` | distance to x_s* | quadratic clients | alpha*, beta, k, distance |

Bounds raise ``ValueError`` for learning rates that their theorems do not admit, and name the largest one.
``beyond=True`` computes the formula for larger ones too; the theorem claims nothing there.

Estimates are local values at some points; the suprema of the theorems are at least as large. So a bound with estimated
constants is no guarantee.

- L, beta: :func:`smoothness`, :func:`smoothness_between`. sigma: :func:`gradient_variance`. sigma_g, zeta:
  :func:`heterogeneity`; G: the largest norm of :func:`client_gradients` (fields ``squared_gradient`` take G^2).
- Delays, staleness S, participation: ``clock.delay_statistics`` and ``Run.updates``, exactly, before training.
- Q, D: :func:`curve_probe`. gamma and eps_c: the compressor's and the centroids' own errors.
- k-conservatism: :func:`training_curl` and :func:`curl_probe`, 0 where it holds. The distance to x_s*:
  :func:`fixed_point`.
- The gap needs the lowest loss. Where a loss is never negative, the loss itself is an upper bound of the gap.
- alpha and mu: a weight decay is a lower bound of both for convex losses. There is no such bound for networks.

The orders of ``compare`` and of the corollaries have hidden constants, here 1. Use them only to compare methods.
"""

from fedjax_async.theory.asynchronous_rates import (
    BufferedConstants,
    fedasync_factor,
    fedasync_gap_bound,
    fedbuff_bound,
    largest_lr_fedbuff,
)
from fedjax_async.theory.asyncmanifold_rate import (
    ManifoldBound,
    ManifoldConstants,
    fedasync_bound,
    largest_lr_manifold,
    manifold_bound,
    manifold_rate,
    quality_term,
)
from fedjax_async.theory.closed_forms import (
    ClosedForm,
    affine_iterate,
    elementwise_iterate,
    glm_displacement,
    glm_iterate,
    glm_loss,
    quadratic_displacement,
    quadratic_fixed_point,
)
from fedjax_async.theory.comparison import TABLE_2, Analysis, Setting, compare
from fedjax_async.theory.connectivity import batch_loss, learned_control_point
from fedjax_async.theory.curve_quality import curve_probe, divergence, quality
from fedjax_async.theory.estimate import (
    Estimates,
    client_gradients,
    estimate,
    gradient_variance,
    heterogeneity,
    smoothness,
    smoothness_between,
)
from fedjax_async.theory.fedavg_dynamics import Orbit, mean_displacement, orbit, server_field, server_iterates
from fedjax_async.theory.field_examples import EXAMPLES, ClosedOrbit, Example, closed_orbit
from fedjax_async.theory.field_rates import (
    HeavyBall,
    Spectrum,
    fedavg_client_lr,
    fedavg_distance_bound,
    fedavg_gap_bound,
    fedavgm_distance_bound,
    fedavgm_parameters,
    iterate_spectrum,
    surrogate_constants,
)
from fedjax_async.theory.fixed_points import Found, fixed_point, fixed_point_shift, minimiser
from fedjax_async.theory.landscape import barrier, loss_along, loss_surface, scores
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
from fedjax_async.theory.pushcen_rate import (
    PushCenBound,
    PushCenConstants,
    largest_lr_pushcen,
    pushcen_bound,
    shares_of_masses,
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
from fedjax_async.theory.surrogate import Surrogate, surrogate_loss
from fedjax_async.theory.training_field import curl_probe, local_displacement, training_curl
from fedjax_async.theory.vector_fields import (
    Conservatism,
    CurlEstimate,
    Field,
    Loss,
    MeanCurl,
    antisymmetric_part,
    antisymmetry,
    curl,
    displacement,
    estimate_antisymmetry,
    estimate_curl,
    estimate_mean_curl,
    gradient_map,
    is_k_conservative,
    iterate,
)

__all__ = [
    "EXAMPLES",
    "TABLE_2",
    "Analysis",
    "Bound",
    "BufferedConstants",
    "ClosedForm",
    "ClosedOrbit",
    "Conservatism",
    "Constants",
    "CurlEstimate",
    "Estimates",
    "Example",
    "Field",
    "Found",
    "HeavyBall",
    "LearningRates",
    "Loss",
    "ManifoldBound",
    "ManifoldConstants",
    "MeanCurl",
    "Orbit",
    "PushCenBound",
    "PushCenConstants",
    "Setting",
    "Spectrum",
    "Surrogate",
    "affine_iterate",
    "antisymmetric_part",
    "antisymmetry",
    "asynfl_bound",
    "asynflc_bound",
    "asynflc_ef_bound",
    "barrier",
    "batch_loss",
    "client_gradients",
    "closed_orbit",
    "compare",
    "compression_factor",
    "constant_delays",
    "corollary_1",
    "corollary_2",
    "corollary_3",
    "corollary_4",
    "curl",
    "curl_probe",
    "curve_probe",
    "displacement",
    "divergence",
    "elementwise_iterate",
    "estimate",
    "estimate_antisymmetry",
    "estimate_curl",
    "estimate_mean_curl",
    "fast_lrs",
    "fedasync_bound",
    "fedasync_factor",
    "fedasync_gap_bound",
    "fedavg_client_lr",
    "fedavg_distance_bound",
    "fedavg_gap_bound",
    "fedavgm_distance_bound",
    "fedavgm_parameters",
    "fedbuff_bound",
    "fixed_point",
    "fixed_point_shift",
    "glm_displacement",
    "glm_iterate",
    "glm_loss",
    "gradient_map",
    "gradient_variance",
    "heterogeneity",
    "is_k_conservative",
    "iterate",
    "iterate_spectrum",
    "largest_lr_asynfl",
    "largest_lr_asynflc",
    "largest_lr_asynflc_ef",
    "largest_lr_fedbuff",
    "largest_lr_manifold",
    "largest_lr_pushcen",
    "learned_control_point",
    "local_displacement",
    "loss_along",
    "loss_surface",
    "manifold_bound",
    "manifold_rate",
    "mean_displacement",
    "minimiser",
    "orbit",
    "pushcen_bound",
    "quadratic_displacement",
    "quadratic_fixed_point",
    "quality",
    "quality_term",
    "residual_order",
    "scores",
    "server_field",
    "server_iterates",
    "shares_of_masses",
    "slow_lrs",
    "smallest_gamma_asynflc",
    "smoothness",
    "smoothness_between",
    "surrogate_constants",
    "surrogate_loss",
    "training_curl",
]
