"""AsynFL: the deltas of whoever has finished, summed and divided by the number of all clients."""

from __future__ import annotations

import optax

from fedjax_async import check
from fedjax_async.registry import takes
from fedjax_async.server.aggregate import mean
from fedjax_async.server.options import guard_rails
from fedjax_async.server.rule import rule
from fedjax_async.server.transforms import Transform
from fedjax_async.types import ServerAlgorithm, Traced


@takes(guards=guard_rails)
def asynfl(*, server_lr: Traced = 1.0, num_clients: int = 10, guards: Transform) -> ServerAlgorithm:
    """Sum of the deltas of whoever finished, divided by the number of all clients (AsynFL 2025).

    ``x <- x + (eta_g / n) sum_{i in S_t} Delta_i``, where ``S_t`` are the clients of the server step, however many;
    n divides, not ``|S_t|``: who takes part more often counts more. With compressed uploads (``Delta_i`` as it is
    decoded) this is AsynFLC, with error feedback AsynFLC-EF. When a step closes is the timing policy's affair:
    ``window:length=W``, or ``participation``, Algorithm 1 of the paper to the letter.

    Args:
      server_lr: ``eta_g > 0``.
      num_clients: n; a run by name fills it in.
    """
    check.positive("server_lr", server_lr)
    check.whole("num_clients", num_clients)
    return rule(guards, optimizer=optax.sgd(server_lr), aggregate=mean(divisor=num_clients))
