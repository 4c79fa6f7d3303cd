"""The input of an exchange, and its output: the plan of a decentralised run.

The plan says which node trains when, which messages it mixes, and with which coefficients.

What nodes exchange does not depend on the weights that they learn. So all of it is decided here, in float64, before
any training. The engine then executes a linear mixing with known coefficients.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from fedjax_async.clock.faults import JobFaults
from fedjax_async.clock.network import Network
from fedjax_async.clock.scenario import Scenario
from fedjax_async.peers.topologies import Topology

# ``draw(position, clients, numbers)``: the faults of the ``position``-th message of each of these events.
MessageFaults = Callable[[int, np.ndarray, np.ndarray], JobFaults]


class PeerScenario(NamedTuple):
    """Nodes, durations, budget, seed and conditions (``scenario``), and how messages travel."""

    scenario: Scenario
    topology: Topology
    message_bytes: int
    network: Network | None = None
    message_faults: MessageFaults | None = None


class Delivery(IntEnum):
    """What became of a message on its way to one receiver."""

    MIXED = 0  # mixed by an event of the receiver
    WAITING = 1  # in the receiver's buffer when the run ended
    IN_FLIGHT = 2  # under way when the run ended
    SUPERSEDED = 3  # replaced in the buffer by a newer message of the same sender
    OVERFLOWED = 4  # dropped from a full buffer
    LOST = 5  # never reached the receiver


class PeerSchedule(NamedTuple):
    """When everything happens in a decentralised run; ``peers.plan_peers`` computes it before any training.

    A *compute event* of a node mixes the messages of its inbox into the node's model, trains it, and pushes messages.
    Events are numbered in order of the moment at which they mix, simultaneous ones by client unless the exchange has
    another order. The messages of an event are its fragments ``0 .. fragments-1`` (one for all algorithms but those
    that cut the model). Every push sends one fragment to one receiver.

    Event ``e`` replaces the node's model ``w`` by ``w + sum_d weight[d] (message_d - w)`` over the entries
    ``inbox_bounds[e] <= d < inbox_bounds[e + 1]`` of its inbox; ``message_d`` is fragment ``fragment[d]`` of event
    ``source[d]``, on the coordinates that the fragment holds. A message may stand in several inboxes.

    Letters: N nodes, E events, D inbox entries, P pushes. Times are virtual seconds.
    """

    num_clients: int
    # one entry per event
    client: np.ndarray  # int32[E]
    number: np.ndarray  # int32[E]  earlier events of this node
    local_steps: np.ndarray  # int32[E]
    start: np.ndarray  # float64[E]
    end: np.ndarray  # float64[E]  when the node has its new model, and pushes
    mixed_at: np.ndarray  # float64[E]  when it mixes its inbox: at its start or at its end
    mass: np.ndarray  # float64[E]  push-sum mass of the node after the event; 1 where an algorithm has no masses
    unsent_mass: np.ndarray  # float64[E]  what it splits off for receivers that are not online, and does not send
    # inboxes
    inbox_bounds: np.ndarray  # int64[E + 1]
    source: np.ndarray  # int64[D]  the event that sent the message, < the event that reads it
    fragment: np.ndarray  # int32[D]
    weight: np.ndarray  # float64[D]  its mixing coefficient >= 0; at most 1 in sum for each coordinate of an event
    # one entry per push, in order of sending
    push_event: np.ndarray  # int64[P]
    push_fragment: np.ndarray  # int32[P]
    receiver: np.ndarray  # int32[P]
    sent_mass: np.ndarray  # float64[P]
    arrival: np.ndarray  # float64[P]  when it reaches the receiver; inf: never
    outcome: np.ndarray  # int8[P]  ``Delivery``
    mixed_by: np.ndarray  # int64[P]  the event that mixed it first; -1: none
    corrupt: np.ndarray  # bool[P]  arrives as NaN: the receiver mixes its own model in its place
    # one entry per node: online in [joined, left)
    joined: np.ndarray  # float64[N]  0: from the beginning; inf: never
    left: np.ndarray  # float64[N]  inf: never
    fragments: int = 1
    message_bytes: int = 0  # of one message (of one fragment), as the plan timed it
    carries: bool = False  # whether the mass of a superseded message moves to the newer one; else it is lost
    late_mass: int = 1  # push-sum mass of nodes that join after the start
    exhausted: bool = False  # as in ``Schedule``: the budget is not spent, but no node can train until the end


def first_masses(joined: np.ndarray, late_mass: int) -> np.ndarray:
    """The push-sum mass with which each node begins, float64[N]: 1, or ``late_mass`` if it joins after the start."""
    return np.where(joined > 0, late_mass, 1.0)
