"""Server side: rules made of small transforms, one algorithm a file."""

from collections.abc import Callable

from fedjax_async.server.asgd import asgd
from fedjax_async.server.fedasync import fedasync
from fedjax_async.server.fedavg import fedavg
from fedjax_async.server.fedbuff import fedbuff
from fedjax_async.server.fedopt import fedadagrad, fedadam, fedavgm, fedyogi
from fedjax_async.server.rule import rule
from fedjax_async.server.staleness import STALENESS, staleness_weight
from fedjax_async.server.transforms import Transform, chain, scale_by, scale_by_staleness, stateless, towards_client
from fedjax_async.types import ServerAlgorithm

SERVERS: dict[str, Callable[..., ServerAlgorithm]] = {
    "fedavg": fedavg,
    "fedavgm": fedavgm,
    "fedadagrad": fedadagrad,
    "fedadam": fedadam,
    "fedyogi": fedyogi,
    "fedasync": fedasync,
    "asgd": asgd,
    "fedbuff": fedbuff,
}

__all__ = [
    "SERVERS",
    "STALENESS",
    "Transform",
    "asgd",
    "chain",
    "fedadagrad",
    "fedadam",
    "fedasync",
    "fedavg",
    "fedavgm",
    "fedbuff",
    "fedyogi",
    "rule",
    "scale_by",
    "scale_by_staleness",
    "staleness_weight",
    "stateless",
    "towards_client",
]
