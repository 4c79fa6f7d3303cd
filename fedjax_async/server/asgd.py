"""ASGD: each arriving delta is added as it is, however stale."""

from __future__ import annotations

import optax

from fedjax_async import check
from fedjax_async.registry import takes
from fedjax_async.server.options import guard_rails
from fedjax_async.server.rule import rule
from fedjax_async.server.transforms import Transform
from fedjax_async.types import ServerAlgorithm, Traced


@takes(guards=guard_rails)
def asgd(*, server_lr: Traced = 1.0, guards: Transform) -> ServerAlgorithm:
    """Add each arriving delta, ``x <- x + eta Delta_i`` (asynchronous SGD with local steps).

    ``server_lr`` is ``eta > 0``. Under a timing policy that gathers several arrivals in a server
    step, their deltas are averaged.
    """
    check.positive("server_lr", server_lr)
    return rule(guards, optimizer=optax.sgd(server_lr))
