"""Theory: convergence bounds, for comparison with runs.

Start with :func:`compare` (``comparison.py``): the rates of ten analyses. ``rates.py`` has the bounds of the AsynFLC
paper as functions of a problem's constants, ``orders.py`` the terms inside the O of its corollaries,
``asynchronous_rates.py`` the bounds of FedBuff and FedAsync. ``estimate.py`` measures these constants on a model and
its data.

``vector_fields.py`` measures how far an iterated map, such as local training, is from the gradient of a loss; start
with :func:`antisymmetry`. ``fedavg_dynamics.py`` has FedAvg's server field, its iterates and orbits, ``surrogate.py``
the loss that FedAvg minimises if its field is a gradient, ``closed_forms.py`` and ``field_examples.py`` fields that are
known exactly, and ``field_rates.py`` the rates of FedAvg and FedAvgM towards the fixed point. ``lifting.py`` says which
properties of the clients' losses the surrogate loss has; ``fixed_points.py`` finds the fixed point and its distance to
the minimiser. ``training_field.py`` measures the antisymmetry of the clients' real local training, at a model and as a
probe along a run.

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
| ``manifold_bound`` | mean squared gradient | G finite, equal participation | gap*, L, G, sigma, S, Q, D, C |
| ``pushcen_bound`` | mean squared gradient | G finite, no lost mass, no mask | gap*, L, G, zeta, eps_c, shares |
| ``fedavg_distance_bound`` | distance to x_s* | k-conservative, strongly convex | alpha*, beta, k, distance |
| ``fedavg_sharp_gap_bound`` | f_s - f_s(x_s*) | k-conservative, convex, x_s* exists | distance |
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

# fmt: off
from fedjax_async.base import lazy
from fedjax_async.theory.asynchronous_rates import (BufferedConstants as BufferedConstants,
    fedasync_factor as fedasync_factor, fedasync_gap_bound as fedasync_gap_bound, fedbuff_bound as fedbuff_bound,
    largest_lr_fedbuff as largest_lr_fedbuff)
from fedjax_async.theory.asyncmanifold_rate import (ManifoldBound as ManifoldBound,
    ManifoldConstants as ManifoldConstants, fedasync_bound as fedasync_bound,
    largest_lr_manifold as largest_lr_manifold, manifold_bound as manifold_bound, manifold_rate as manifold_rate,
    quality_term as quality_term)
from fedjax_async.theory.closed_forms import (ClosedForm as ClosedForm, affine_iterate as affine_iterate,
    elementwise_iterate as elementwise_iterate, glm_displacement as glm_displacement, glm_iterate as glm_iterate,
    glm_loss as glm_loss, quadratic_displacement as quadratic_displacement,
    quadratic_fixed_point as quadratic_fixed_point)
from fedjax_async.theory.comparison import (TABLE_2 as TABLE_2, Analysis as Analysis, Setting as Setting,
    compare as compare)
from fedjax_async.theory.connectivity import batch_loss as batch_loss, learned_control_point as learned_control_point
from fedjax_async.theory.curve_quality import curve_probe as curve_probe, divergence as divergence, quality as quality
from fedjax_async.theory.estimate import (Estimates as Estimates, client_gradients as client_gradients,
    estimate as estimate, gradient_variance as gradient_variance, heterogeneity as heterogeneity,
    smoothness as smoothness, smoothness_between as smoothness_between)
from fedjax_async.theory.fedavg_dynamics import (Orbit as Orbit, mean_displacement as mean_displacement, orbit as orbit,
    server_field as server_field, server_iterates as server_iterates)
from fedjax_async.theory.field_examples import (EXAMPLES as EXAMPLES, ClosedOrbit as ClosedOrbit, Example as Example,
    closed_orbit as closed_orbit)
from fedjax_async.theory.field_rates import (HeavyBall as HeavyBall, Spectrum as Spectrum,
    fedavg_client_lr as fedavg_client_lr, fedavg_distance_bound as fedavg_distance_bound,
    fedavg_gap_bound as fedavg_gap_bound, fedavg_hardest_threshold as fedavg_hardest_threshold,
    fedavg_quadratic_gap_bound as fedavg_quadratic_gap_bound, fedavg_sharp_gap_bound as fedavg_sharp_gap_bound,
    fedavgm_distance_bound as fedavgm_distance_bound, fedavgm_parameters as fedavgm_parameters,
    iterate_spectrum as iterate_spectrum, surrogate_constants as surrogate_constants)
from fedjax_async.theory.fixed_points import (Found as Found, fixed_point as fixed_point,
    fixed_point_shift as fixed_point_shift, minimiser as minimiser)
from fedjax_async.theory.landscape import (barrier as barrier, loss_along as loss_along, loss_surface as loss_surface,
    scores as scores)
from fedjax_async.theory.lifting import (drifting_loss as drifting_loss,
    surrogate_pl_constant as surrogate_pl_constant)
from fedjax_async.theory.orders import (LearningRates as LearningRates, corollary_1 as corollary_1,
    corollary_2 as corollary_2, corollary_3 as corollary_3, corollary_4 as corollary_4, fast_lrs as fast_lrs,
    residual_order as residual_order, slow_lrs as slow_lrs)
from fedjax_async.theory.pushcen_rate import (PushCenBound as PushCenBound, PushCenConstants as PushCenConstants,
    largest_lr_pushcen as largest_lr_pushcen, pushcen_bound as pushcen_bound, shares_of_masses as shares_of_masses)
from fedjax_async.theory.rates import (Bound as Bound, Constants as Constants, asynfl_bound as asynfl_bound,
    asynflc_bound as asynflc_bound, asynflc_ef_bound as asynflc_ef_bound, compression_factor as compression_factor,
    constant_delays as constant_delays, largest_lr_asynfl as largest_lr_asynfl,
    largest_lr_asynflc as largest_lr_asynflc, largest_lr_asynflc_ef as largest_lr_asynflc_ef,
    smallest_gamma_asynflc as smallest_gamma_asynflc)
from fedjax_async.theory.surrogate import Surrogate as Surrogate, surrogate_loss as surrogate_loss
from fedjax_async.theory.training_field import (curl_probe as curl_probe, local_displacement as local_displacement,
    training_curl as training_curl)
from fedjax_async.theory.vector_fields import (Conservatism as Conservatism, CurlEstimate as CurlEstimate,
    Field as Field, Loss as Loss, MeanCurl as MeanCurl, antisymmetric_part as antisymmetric_part,
    antisymmetry as antisymmetry, curl as curl, displacement as displacement,
    estimate_antisymmetry as estimate_antisymmetry, estimate_curl as estimate_curl,
    estimate_mean_curl as estimate_mean_curl, gradient_map as gradient_map, is_k_conservative as is_k_conservative,
    iterate as iterate)

lazy.set_all(__name__)
