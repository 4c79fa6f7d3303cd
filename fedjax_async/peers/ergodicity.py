"""How fast a plan's mixing alone brings the nodes' models together: Dobrushin's coefficient over windows of events."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedjax_async.base import check
from fedjax_async.peers.schedule import PeerSchedule
from fedjax_async.peers.statistics import corrupt_entries, readers


class Contraction(NamedTuple):
    """Of each window: events ``begin .. begin + window - 1``."""

    begin: np.ndarray  # int64[V]
    coefficient: np.ndarray  # float64[V], in [0, 1]; below 1: the window contracts
    rate: float  # rho of the largest coefficient, per event: its ``window``-th root


def contraction(schedule: PeerSchedule, window: int) -> Contraction:
    """By which factor the disagreement of all models falls at least in each window of events, without training.

    Models after a window are averages of those before it: of the nodes, and of the messages sent before the window and
    mixed in it. ``tau = max_{p,q} sum_k |A_pk - A_qk| / 2`` over the rows of these coefficients. The largest distance
    between two nodes' models after the window is at most tau times that between any two models before it. p and q are
    the nodes that are online when the window begins and when it ends. Only whole windows count. In place of a corrupt
    message, a node mixes its own model.

    Args:
      window: events, at least 1 (B of the paper's assumption A5).

    Raises: ``ValueError`` if the plan has fewer events, or is one of fragments.

    Source: PushCen-ADFL (2026), eqs. 78 and 79, which it states for column-stochastic matrices of masses; these are the
    coefficients of the models themselves, rows that sum to 1.
    """
    check.kind("schedule", schedule, PeerSchedule, "a PeerSchedule; that of a run is run.schedule")
    check.whole("window", window)
    events, nodes = len(schedule.client), schedule.num_clients
    check.require(schedule.fragments == 1, "schedule", "a plan of fragments", "one of whole models")
    check.require(window <= events, "window", window, f"at most {events}, the events of the plan")
    begins = np.arange(0, events - window + 1, window)
    reader, weight = readers(schedule), np.where(corrupt_entries(schedule), 0.0, schedule.weight)
    found = []
    for begin in begins:
        low, high = schedule.inbox_bounds[begin], schedule.inbox_bounds[begin + window]
        sources = schedule.source[low:high]
        old = np.unique(sources[sources < begin])  # messages from before the window
        rows = np.eye(nodes, nodes + len(old))
        sent = {int(event): np.eye(1, nodes + len(old), nodes + k)[0] for k, event in enumerate(old)}
        entry = low
        for event in range(begin, begin + window):
            node = schedule.client[event]
            mixed = rows[node].copy()
            while entry < high and reader[entry] == event:
                mixed += weight[entry] * (sent[int(schedule.source[entry])] - rows[node])
                entry += 1
            rows[node] = sent[event] = mixed
        first, last = schedule.mixed_at[[begin, begin + window - 1]]
        there = rows[(schedule.joined <= first) & (schedule.left > last)]
        found.append(max((_distance(there, row) for row in there), default=0.0))
    coefficient = np.minimum(found, 1.0)  # above by rounding only
    return Contraction(begins, coefficient, float(coefficient.max() ** (1 / window)))


def _distance(rows: np.ndarray, one: np.ndarray) -> float:
    """The largest total variation between one row and another."""
    return float(np.abs(rows - one).sum(axis=1).max() / 2)
