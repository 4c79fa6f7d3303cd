"""Probes of decentralised runs: of chosen events before they mix, and of all nodes at the evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from fedjax_async.base import check
from fedjax_async.engine.probes import COLUMNS, Probes, checked, numbers_of, resolved_probes
from fedjax_async.peers.schedule import PeerSchedule
from fedjax_async.types import Array, FederatedData, Probe, State, Tree

EVENT = "row, inbox, weights, parts"  # the arguments of a probe of events
NODES = "rows, online"  # and of a probe of nodes
OF_NODES = "probe/{}/{}"  # the score that holds a column of a probe of all nodes


class NodesProbe(NamedTuple):
    """``function(rows, online) -> {column: scalar}`` at every evaluation; changes nothing.

    ``rows``: what all nodes keep (``PeerAlgorithm``), [N, ...]; ``online``: bool[N].
    """

    function: Callable[[State, Array], Mapping[str, Array]]


NodesProbes = Mapping[str, NodesProbe]


def split_probes(
    probes: Mapping[str, object] | None, data: FederatedData, events: int
) -> tuple[dict[str, Probe], dict[str, NodesProbe]]:
    """The probes of events, as :class:`~fedjax_async.types.Probe`, and those of nodes; ``ValueError`` for invalid ones.

    A probe of events is a function, or a ``Probe`` of one, ``f(row, inbox, weights, parts) -> {column: scalar}``:
    the node's row before it mixes; the messages of its inbox as they were sent, [L, ...] with L the longest inbox of
    the plan; their weights float[L], 0 where there is no message or it is refused; the node's examples. ``events``:
    how many the plan has.
    """
    check.require(probes is None or isinstance(probes, Mapping), "probes", probes, "a dict of names and probes")
    given = dict(probes or {})
    nodes = {name: probe for name, probe in given.items() if isinstance(probe, NodesProbe)}
    for name, probe in nodes.items():  # only checks their names and functions
        resolved_probes({name: probe.function}, data, events)
    others = {name: probe for name, probe in given.items() if name not in nodes}
    return resolved_probes(others, data, events), nodes


def chosen_events(probes: Probes, schedule: PeerSchedule) -> dict[str, np.ndarray]:
    """Which events each probe sees; bool[E] per probe."""
    found = {}
    for name, probe in probes.items():
        found[name] = np.zeros(len(schedule.client), np.bool_)
        found[name][numbers_of(probe, len(schedule.client))] = True
    return found


def nodes_values(probes: NodesProbes, rows: State, online: Array) -> dict[str, Array]:
    """The columns of all probes of nodes, as scores; ``ValueError`` for a column ``evaluation``."""
    found = {}
    for name, probe in probes.items():
        for column, value in checked(name, probe.function, NODES)(rows, online).items():
            check.require(column != "evaluation", f"column of probes[{name!r}]", column, "named other than evaluation")
            found[OF_NODES.format(name, column)] = value
    return found


def without_probes(scores: Mapping[str, Tree]) -> dict[str, Tree]:
    """The scores without the columns of probes."""
    return {name: values for name, values in scores.items() if not name.startswith("probe/")}


def nodes_tables(
    probes: NodesProbes, scores: Mapping[str, np.ndarray], times: np.ndarray
) -> dict[str, dict[str, np.ndarray]]:
    """The table of each probe of nodes, one row per evaluation, from the scores of a run."""
    found = {}
    for name in probes:
        prefix = OF_NODES.format(name, "")
        own = {key.removeprefix(prefix): values for key, values in scores.items() if key.startswith(prefix)}
        found[name] = {"evaluation": np.arange(len(times)), "time": times, **own}
    return found


def event_table(schedule: PeerSchedule, events: np.ndarray, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The table of a probe of events, one row per event that it has seen."""
    first = (events, schedule.client[events], schedule.mixed_at[events])
    return dict(zip(COLUMNS, first)) | dict(columns)
