"""The client: minibatches, local training, one job, compressed uploads.

Start with :func:`local_training` (``training.py``): minibatch steps of any optax optimiser. ``batches.py`` draws the
minibatches, ``job.py`` runs one job. Three files wrap a client algorithm: ``private.py`` keeps some params on the
client, ``feedback.py`` compresses uploads, ``ditto.py`` also trains a personal model. ``optimizers.py`` holds
optimisers and learning rate decays by name, ``sharpness.py`` SAM and ASAM, ``proximal_metrics.py`` the metrics of
proximal terms. ``curve.py`` trains a model and a curve to it from the start model (AsyncCurve); its Adam starts from
the moments of ``warm.py``. ``anchored.py`` trains near centroids (PushCen-ADFL), ``dp_sgd.py`` clips the gradient of
each example and adds noise.
"""

from collections.abc import Callable
from functools import partial

from fedjax_async.local.anchored import anchored_training
from fedjax_async.local.batches import batch, mean_loss, part_mean, permute
from fedjax_async.local.curve import Curve, curve_training
from fedjax_async.local.feedback import ef21, feedback
from fedjax_async.local.job import arrival_key, job_key, local_steps, run_job, run_steps
from fedjax_async.local.optimizers import DECAYS, OPTIMIZERS
from fedjax_async.local.private import keeping, wrapping
from fedjax_async.local.proximal_metrics import PROXIMAL_METRICS, euclidean, hyperbolic, metric_of
from fedjax_async.local.sharpness import nearby, nearby_in_scale, sharpness_aware
from fedjax_async.local.training import Scale, WithinJob, decay_factor, local_training, without_statistics
from fedjax_async.local.warm import warmed
from fedjax_async.types import ClientAlgorithm

# What a client does with the compression error of its uploads.
FEEDBACKS: dict[str, Callable[..., ClientAlgorithm]] = {
    "off": partial(feedback, error_feedback=False),
    "ef": feedback,
    "ef21": ef21,
}

__all__ = [
    "DECAYS",
    "FEEDBACKS",
    "OPTIMIZERS",
    "PROXIMAL_METRICS",
    "Curve",
    "Scale",
    "WithinJob",
    "anchored_training",
    "arrival_key",
    "batch",
    "curve_training",
    "decay_factor",
    "ef21",
    "euclidean",
    "feedback",
    "hyperbolic",
    "job_key",
    "keeping",
    "local_steps",
    "local_training",
    "mean_loss",
    "metric_of",
    "nearby",
    "nearby_in_scale",
    "part_mean",
    "permute",
    "run_job",
    "run_steps",
    "sharpness_aware",
    "warmed",
    "without_statistics",
    "wrapping",
]
