"""Client side: minibatches, local training, one job."""

from fedjax_async.local.batches import batch, permute
from fedjax_async.local.job import job_key, run_job, run_steps
from fedjax_async.local.optimizers import DECAYS, OPTIMIZERS
from fedjax_async.local.private import keeping
from fedjax_async.local.sgd import sgd
from fedjax_async.local.steps import local_steps

__all__ = [
    "DECAYS",
    "OPTIMIZERS",
    "batch",
    "job_key",
    "keeping",
    "local_steps",
    "permute",
    "run_job",
    "run_steps",
    "sgd",
]
