"""The server: one rule a file, made of small transforms.

Start with :func:`rule` (``rule.py``): a chain of transforms on each arriving delta (``transforms.py``), an aggregate
over the arrivals of a server step (``aggregate.py``) and an optax optimiser. Read ``averaging.py`` for the simplest
rules (FedAvg, FedBuff, FedAsync), ``ca2fl.py`` for a rule that remembers its clients, ``scaffold.py`` for one with a
client of its own. ``methods.py`` gives every method its name; ``options.py`` and ``staleness.py`` hold what rules
share.
"""

from fedjax_async.server.aggregate import Aggregate, buffered, check_capacity, mean
from fedjax_async.server.methods import *  # noqa: F403 (every rule by its name)
from fedjax_async.server.methods import METHODS, SERVERS, Preset
from fedjax_async.server.options import discount, guard_rails
from fedjax_async.server.rule import closed, known, rule
from fedjax_async.server.staleness import STALENESS, staleness_weight
from fedjax_async.server.transforms import (
    Transform,
    chain,
    clip_by_norm,
    scale_by,
    scale_by_staleness,
    scale_overstale,
    stateless,
    towards_client,
)

__all__ = [
    "METHODS",
    "SERVERS",
    "STALENESS",
    "Aggregate",
    "Preset",
    "Transform",
    "buffered",
    "chain",
    "check_capacity",
    "clip_by_norm",
    "closed",
    "discount",
    "guard_rails",
    "known",
    "mean",
    "rule",
    "scale_by",
    "scale_by_staleness",
    "scale_overstale",
    "staleness_weight",
    "stateless",
    "towards_client",
]
__all__ += list(SERVERS)
