"""What an exchange is given: the scenario of the clock, and how messages travel from node to node."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedjax_async.clock.faults import JobFaults
from fedjax_async.clock.network import Network
from fedjax_async.clock.scenario import Scenario
from fedjax_async.clock.topologies import Topology

# ``draw(position, clients, numbers)``: the faults of the messages that these events send as their ``position``-th.
MessageFaults = Callable[[int, np.ndarray, np.ndarray], JobFaults]


class PeerScenario(NamedTuple):
    """Nodes, durations, budget, seed and conditions (``scenario``), and the ways of messages."""

    scenario: Scenario
    topology: Topology
    message_bytes: int
    network: Network | None = None
    message_faults: MessageFaults | None = None
