"""The client: minibatches, local training, one job, compressed uploads.

Start with :func:`local_training` (``training.py``): minibatch steps of any optax optimiser. ``batches.py`` draws the
minibatches, ``job.py`` runs one job. Four files wrap a client algorithm: ``private.py`` keeps some params on the
client, ``feedback.py`` compresses uploads, ``ditto.py`` also trains a personal model, and ``going_on.py`` mixes a
second message into an unfinished model. ``optimizers.py`` holds optimisers and learning rate decays by name,
``sharpness.py`` SAM and ASAM, ``proximal_metrics.py`` the metrics of proximal terms. ``curve.py`` trains a model and a
curve to it from the start model (AsyncCurve); its Adam starts from the moments of ``warm.py``. ``anchored.py`` trains
near centroids (PushCen-ADFL), ``dp_sgd.py`` clips the gradient of each example and adds noise.
"""

from collections.abc import Callable
from functools import partial

# fmt: off
from fedjax_async.base import lazy
from fedjax_async.local.anchored import anchored_training as anchored_training
from fedjax_async.local.batches import (batch as batch, mean_loss as mean_loss, part_mean as part_mean,
    permute as permute, rows_at_a_time as rows_at_a_time)
from fedjax_async.local.curve import Curve as Curve, curve_training as curve_training
from fedjax_async.local.feedback import ef21 as ef21, feedback as feedback
from fedjax_async.local.going_on import (MidJob as MidJob,
    going_on as going_on, going_on_training as going_on_training)
from fedjax_async.local.job import (arrival_key as arrival_key, job_key as job_key, local_steps as local_steps,
    run_job as run_job, run_steps as run_steps)
from fedjax_async.local.optimizers import DECAYS as DECAYS, OPTIMIZERS as OPTIMIZERS
from fedjax_async.local.private import keeping as keeping, wrapping as wrapping
from fedjax_async.local.proximal_metrics import (PROXIMAL_METRICS as PROXIMAL_METRICS, euclidean as euclidean,
    hyperbolic as hyperbolic, metric_of as metric_of)
from fedjax_async.local.sharpness import (nearby as nearby, nearby_in_scale as nearby_in_scale,
    sharpness_aware as sharpness_aware)
from fedjax_async.local.training import (Scale as Scale, WithinJob as WithinJob, decay_factor as decay_factor,
    local_training as local_training, without_statistics as without_statistics)
from fedjax_async.local.warm import warmed as warmed
from fedjax_async.types import ClientAlgorithm
# fmt: on

# What a client does with the compression error of its uploads.
FEEDBACKS: dict[str, Callable[..., ClientAlgorithm]] = {
    "off": partial(feedback, error_feedback=False),
    "ef": feedback,
    "ef21": ef21,
}

lazy.set_all(__name__)
