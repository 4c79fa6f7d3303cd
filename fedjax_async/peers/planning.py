"""``plan_peers``: from an exchange, a topology and a delay model to a ``PeerSchedule``."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from fedjax_async.base import check, registry
from fedjax_async.clock import delays as delay_models
from fedjax_async.clock import network as networks
from fedjax_async.clock import scenario as scenarios
from fedjax_async.clock.availability import AvailabilityModel
from fedjax_async.clock.budget import Until, budget_text
from fedjax_async.clock.durations import DelayModel
from fedjax_async.clock.faults import FAULTS, DrawFaults, FaultModel, JobFaults, job_faults
from fedjax_async.clock.network import NetworkModel
from fedjax_async.clock.planning import NothingArrives, check_until, per_client
from fedjax_async.clock.scenario import NO_LIMITS, Scenario
from fedjax_async.peers import topologies
from fedjax_async.peers.exchanges import EXCHANGES, Exchange
from fedjax_async.peers.schedule import MessageFaults, PeerScenario, PeerSchedule

_PARTS = 1000  # the most models of one name in a spec: messages at each position have parts of their own


def plan_peers(
    exchange: Exchange | str,
    delays: DelayModel | str,
    *,
    num_clients: int,
    local_steps: int | np.ndarray,
    until: Until,
    seed: int = 0,
    topology: topologies.GivenTopology = "gossip",
    message_bytes: int = 0,
    availability: AvailabilityModel | str | None = None,
    faults: FaultModel | str | None = None,
    network: NetworkModel | str | None = None,
    progress: Callable[[float], None] | None = None,
) -> PeerSchedule:
    """Decide when every node trains, to which nodes it pushes, and what it mixes with which coefficients.

    ``exchange`` and ``delays`` are specs (``"push_sum:policy=merge"``, ``"lognormal:sigma=0.5"``) or what the factories
    in ``EXCHANGES`` and ``DELAYS`` return; ``topology`` is a spec, a model, a networkx graph with the nodes 0..N-1 or a
    list of graphs, used in turn. ``local_steps``: of one event, a number or one per node. ``message_bytes``: of one
    message, for the ``network``; without a network, messages arrive when they are sent. Delay models with a bandwidth
    take ``message_bytes`` as the bytes that an event uploads.

    ``availability``: late joins, leaving, absences; a node that joins late begins with mass 1. ``faults``: crashes and
    delays of compute events, lost and corrupt messages. ``until``: virtual seconds (``time``) or compute events
    (``updates``). Only events that end within the budget are planned. ``progress(share)`` is called now and then.

    Raises ``ValueError`` for invalid settings and for a plan that does not fit the machine's memory, and
    ``NothingArrives`` if no compute event fits into the budget.

    >>> plan = plan_peers("push_sum", "constant:mean=10", num_clients=3, local_steps=5, until=Until(updates=6),
    ...     topology="ring")
    >>> plan.client.tolist(), plan.mixed_at.tolist()
    ([0, 1, 2, 0, 1, 2], [0.0, 0.0, 0.0, 10.0, 10.0, 10.0])
    >>> plan.source.tolist(), plan.mass.round(3).tolist()
    ([1, 2, 0, 2, 0, 1], [0.333, 0.333, 0.333, 0.333, 0.333, 0.333])
    """
    check_until(until)
    check.require(
        until.steps is None, "until.steps", until.steps, "left out: there are no server steps without a server"
    )
    for field, value, kinds in (("exchange", exchange, "EXCHANGES"), ("delays", delays, "DELAYS")):
        check.require(isinstance(value, str) or callable(value), field, value, f"a name of {kinds} or a model")
    check.whole("num_clients", num_clients)
    check.whole("seed", seed, low=0)
    check.whole("message_bytes", message_bytes, low=0)
    num_clients, seed = int(num_clients), int(seed)
    steps = per_client("local_steps", local_steps, num_clients, low=1, high=scenarios.MOST_STEPS)
    scenario = Scenario(
        num_clients,
        steps.astype(np.int64, copy=False),
        delay_models.bind(delays, num_clients, seed),
        until,
        seed,
        0,
        message_bytes,
        scenarios.bind(availability, faults, NO_LIMITS, num_clients, seed),
        progress,
    )
    bound = None if network is None else networks.bind(network, num_clients, seed)
    if bound is not None and bound.between is None:
        raise ValueError("network: must give the time of messages between nodes, see clock.Network")
    setup = PeerScenario(
        scenario,
        topologies.bind(topology, num_clients, seed),
        int(message_bytes),
        bound,
        _message_faults(faults, scenario),
    )
    policy = registry.spec("exchange", EXCHANGES, exchange).make() if isinstance(exchange, str) else exchange
    schedule = policy(setup)
    check.kind("exchange", schedule, PeerSchedule, "an exchange, exchange(setup) -> peers.PeerSchedule")
    if not len(schedule.client):
        raise NothingArrives(f"{budget_text(until)}: no compute event ends in time")
    return schedule


def _message_faults(faults: FaultModel | str | None, scenario: Scenario) -> MessageFaults | None:
    """The faults of messages: those of jobs, drawn anew for each position among the messages of an event."""
    if any(source.draw_copies is not None for source in scenario.conditions.faults):
        raise ValueError("faults: must not duplicate messages: a node recognises a message that it already has")
    models = scenarios.models_of("faults", FAULTS, faults)
    if not any(source.draw is not None for source in scenario.conditions.faults):
        return None

    @lru_cache(maxsize=64)
    def at(position: int) -> list[DrawFaults | None]:
        parts = [(model, part + _PARTS * position) for model, part in models]
        return [model(scenario.num_clients, scenario.seed, part).draw for model, part in parts]

    def draw(position: int, clients: np.ndarray, numbers: np.ndarray) -> JobFaults:
        return job_faults(at(position), clients, numbers)

    return draw
