"""Server side: rules made of small transforms, one algorithm a file."""

from collections.abc import Callable

from fedjax_async.server.aggregate import Aggregate, buffered, check_capacity, mean
from fedjax_async.server.asgd import asgd
from fedjax_async.server.asynfl import asynfl
from fedjax_async.server.ca2fl import ca2fl
from fedjax_async.server.fadas import fadas
from fedjax_async.server.fedasync import fedasync
from fedjax_async.server.fedavg import fedavg
from fedjax_async.server.fedbuff import fedbuff
from fedjax_async.server.fedmedian import fedmedian
from fedjax_async.server.fedopt import fedadagrad, fedadam, fedavgm, fedyogi
from fedjax_async.server.krum import krum
from fedjax_async.server.options import discount, guard_rails
from fedjax_async.server.orthofl import orthofl
from fedjax_async.server.orthofl_ablations import orthofl_no_average, orthofl_pairwise
from fedjax_async.server.rule import rule
from fedjax_async.server.staleness import STALENESS, staleness_weight
from fedjax_async.server.transforms import (
    Transform,
    chain,
    clip_by_norm,
    limit_staleness,
    scale_by,
    scale_by_staleness,
    stateless,
    towards_client,
)
from fedjax_async.server.trimmed_mean import trimmed_mean
from fedjax_async.types import ServerAlgorithm

SERVERS: dict[str, Callable[..., ServerAlgorithm]] = {
    "fedavg": fedavg,
    "fedavgm": fedavgm,
    "fedadagrad": fedadagrad,
    "fedadam": fedadam,
    "fedyogi": fedyogi,
    "fedasync": fedasync,
    "asgd": asgd,
    "asynfl": asynfl,
    "fedbuff": fedbuff,
    "ca2fl": ca2fl,
    "fadas": fadas,
    "orthofl": orthofl,
    "orthofl_no_average": orthofl_no_average,
    "orthofl_pairwise": orthofl_pairwise,
    "fedmedian": fedmedian,
    "trimmed_mean": trimmed_mean,
    "krum": krum,
}

__all__ = [
    "SERVERS",
    "STALENESS",
    "Aggregate",
    "Transform",
    "asgd",
    "asynfl",
    "buffered",
    "ca2fl",
    "chain",
    "check_capacity",
    "clip_by_norm",
    "discount",
    "fadas",
    "fedadagrad",
    "fedadam",
    "fedasync",
    "fedavg",
    "fedavgm",
    "fedbuff",
    "fedmedian",
    "fedyogi",
    "guard_rails",
    "krum",
    "limit_staleness",
    "mean",
    "orthofl",
    "orthofl_no_average",
    "orthofl_pairwise",
    "rule",
    "scale_by",
    "scale_by_staleness",
    "staleness_weight",
    "stateless",
    "towards_client",
    "trimmed_mean",
]
