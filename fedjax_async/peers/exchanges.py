"""Exchanges: which messages nodes push, which they mix, and with which coefficients. Registry ``EXCHANGES``.

An exchange is ``exchange(setup) -> PeerSchedule``, ``setup`` a ``PeerScenario``. ``aggregate_at`` says when an event
mixes its inbox: at its ``start``, before it trains; or at its ``end``, where all of its training then happens too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedjax_async.base import check
from fedjax_async.peers.exchange_parts import (
    AGGREGATE_AT,
    check_buffer,
    exchange,
    rows_of,
    wanted,
    with_masses,
    without_masses,
)
from fedjax_async.peers.kept_mean import kept_mean
from fedjax_async.peers.schedule import PeerScenario, PeerSchedule
from fedjax_async.peers.swift import swift
from fedjax_async.peers.synchronous import dpsgd, epidemic, overlap, sgp
from fedjax_async.peers.topologies import Topology

Exchange = Callable[[PeerScenario], PeerSchedule]


def push_sum(
    *,
    capacity: int | None = 16,
    newest: bool = True,
    policy: str = "carry",
    aggregate_at: str = "start",
    reference: str = "paper",
    late_mass: int = 1,
) -> Exchange:
    """Push-sum: models carry masses, so that mixing keeps the mass-weighted mean on directed graphs too.

    An event: S = s + sum_j sigma_j; w <- (s w + sum_j sigma_j w_j) / S; training; each of the d receivers and the
    node get S / (d + 1). The buffer keeps the `newest` message of each sender (false: all) and has room for
    `capacity` messages (none: any number). `policy`: `discard` loses the mass of superseded messages and of the
    oldest of a full buffer; `carry` moves the former to the next message of the same sender that stays, and still
    mixes the latter with the others; `merge` mixes every message with its own mass, whatever `newest` and
    `capacity`, see ``inboxes.py``. `reference` = `released`: the mass is divided by the number of wanted receivers
    plus one, even if fewer are online, the first event of a node replaces its model by the plain mean of its
    messages, and simultaneous events come in the order in which they were scheduled (after nodes that come online)
    instead of that of the clients, as in the code released with PushCen-ADFL. `reference` = `baseline`: as
    `released`, but the first event mixes like all others, as in the push-sum baseline of that code. `late_mass`: of
    a node that joins after the start, 1 or 0; in that baseline it is 0, so that the first messages of a late node
    replace its model.

    Source: PushCen-ADFL, Algorithms 1 and 5.
    """
    check_buffer(capacity, newest, policy, aggregate_at)
    check.one_of("reference", reference, ("paper", "released", "baseline"))
    check.one_of("late_mass", late_mass, (0, 1))

    def plan(setup: PeerScenario) -> PeerSchedule:
        ties = "client" if reference == "paper" else "scheduled"
        exchanged = exchange(setup, aggregate_at, capacity=capacity, newest=newest, policy=policy, ties=ties)
        parts = None if reference == "paper" else wanted(setup.topology, exchanged.events) + 1
        schedule = with_masses(setup, exchanged, parts, carries=policy == "carry", late_mass=int(late_mass))
        if reference != "released":
            return schedule
        row = rows_of(schedule.inbox_bounds)
        plain = 1 / np.maximum(1, np.diff(schedule.inbox_bounds))
        return schedule._replace(weight=np.where(schedule.number[row] == 0, plain[row], schedule.weight))

    return plan


def mean(
    *, capacity: int | None = None, newest: bool = True, policy: str = "discard", aggregate_at: str = "start"
) -> Exchange:
    """The plain mean of a node's model and the n messages in its buffer, 1 / (n + 1) each.

    Options as for ``push_sum``; there are no masses to `carry`.
    """
    check_buffer(capacity, newest, policy, aggregate_at)
    check.one_of("policy", policy, ("discard", "merge"))

    def plan(setup: PeerScenario) -> PeerSchedule:
        exchanged = exchange(setup, aggregate_at, capacity=capacity, newest=newest, policy=policy)
        weight = (1 / (1 + np.diff(exchanged.boxes.bounds)))[rows_of(exchanged.boxes.bounds)]
        return without_masses(setup, exchanged, weight)

    return plan


def divshare(*, omega: float = 0.2, aggregate_at: str = "start") -> Exchange:
    """DivShare: models are cut into floor(1 / `omega`) fragments, and each fragment goes to receivers of its own.

    Every coordinate becomes the plain mean of the node's own value and those of the n messages that hold it, 1 / (n +
    1) each. Only the newest message of each sender and fragment counts. On a network with a shared uplink, the pairs of
    fragment and receiver are sent in random order, and those not begun when the next event ends are never sent.

    Source: DivShare, Biswas et al. (2025), as released by its authors.
    """
    check.require(check.is_real(omega) and 0 < omega <= 1, "omega", omega, "above 0 and at most 1")
    check.one_of("aggregate_at", aggregate_at, AGGREGATE_AT)
    fragments = int(1 / omega + 1e-9)  # as ``fragments_of`` of the method

    def plan(setup: PeerScenario) -> PeerSchedule:
        exchanged = exchange(setup, aggregate_at, fragments=fragments, drop_unsent=True)
        boxes = exchanged.boxes
        cell = rows_of(boxes.bounds) * fragments + exchanged.pushes.fragment[boxes.push]
        copies = np.bincount(cell, minlength=1)
        return without_masses(setup, exchanged, 1 / (1 + copies[cell]))

    return plan


@dataclass(frozen=True)
class Alone:
    """The exchange without messages, whatever the topology."""

    aggregate_at: str

    def __call__(self, setup: PeerScenario) -> PeerSchedule:
        nobody = setup._replace(topology=Topology(setup.scenario.num_clients))
        return without_masses(setup, exchange(nobody, self.aggregate_at), np.zeros(0))


def alone(*, aggregate_at: str = "start") -> Exchange:
    """Nodes train alone: no messages, and no topology."""
    check.one_of("aggregate_at", aggregate_at, AGGREGATE_AT)
    return Alone(aggregate_at)


EXCHANGES: dict[str, Callable[..., Exchange]] = {
    "push_sum": push_sum,
    "mean": mean,
    "swift": swift,
    "divshare": divshare,
    "kept_mean": kept_mean,
    "dpsgd": dpsgd,
    "epidemic": epidemic,
    "sgp": sgp,
    "overlap": overlap,
    "alone": alone,
}
