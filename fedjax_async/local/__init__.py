"""The client: minibatches, local training, one job, compressed uploads.

Start with :func:`local_training` (``training.py``): any optax optimiser. ``batches.py`` draws its minibatches,
``job.py`` runs one job, ``feedback.py`` compresses what is uploaded, ``private.py`` keeps some of the parameters on
the client, ``parts.py`` takes means over a client's data, ``optimizers.py`` names optimisers and learning rate
decays.
"""

from collections.abc import Callable
from functools import partial

from fedjax_async.local.batches import batch, permute
from fedjax_async.local.feedback import ef21, feedback
from fedjax_async.local.job import job_key, local_steps, run_job, run_steps
from fedjax_async.local.optimizers import DECAYS, OPTIMIZERS
from fedjax_async.local.parts import mean_loss, part_mean
from fedjax_async.local.private import keeping
from fedjax_async.local.training import local_training
from fedjax_async.types import ClientAlgorithm

# What a client does about what the compressor of its uploads loses.
FEEDBACKS: dict[str, Callable[..., ClientAlgorithm]] = {
    "off": partial(feedback, error_feedback=False),
    "ef": feedback,
    "ef21": ef21,
}

__all__ = [
    "DECAYS",
    "FEEDBACKS",
    "OPTIMIZERS",
    "batch",
    "ef21",
    "feedback",
    "job_key",
    "keeping",
    "local_steps",
    "local_training",
    "mean_loss",
    "part_mean",
    "permute",
    "run_job",
    "run_steps",
]
