"""From an engine's result of a decentralised run to the tables of a :class:`~fedjax_async.types.Run`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedjax_async.base.tree import Columns
from fedjax_async.clock import at_or_before
from fedjax_async.clock.record import SLACK
from fedjax_async.engine.client_scores import client_columns
from fedjax_async.engine.evaluation import EvaluationPoints
from fedjax_async.engine.peer_points import online
from fedjax_async.engine.record import EngineResult, too_large
from fedjax_async.peers import Delivery, PeerSchedule, ages, masses
from fedjax_async.peers.schedule import first_masses
from fedjax_async.peers.statistics import readers
from fedjax_async.peers.triggering import WITHHELD
from fedjax_async.types import FederatedData, Run

ROUNDING = 1e-12  # share of all mass; a smaller loss is a rounding error of sums


def planned_columns(schedule: PeerSchedule, points: EvaluationPoints) -> dict[str, np.ndarray]:
    """The columns of the evaluations that follow from the plan alone, if no message is withheld; [V] each.

    ``online``: how many nodes have joined and not left. Where there are masses: ``smallest_mass`` and ``largest_mass``
    of a node online (NaN without any), ``total_mass`` of nodes, buffers and messages on their way, and ``lost_mass``.
    ``bytes_up``: bytes that the nodes have handed to their links, which may send them later. ``bytes_down``: bytes that
    have reached the nodes.
    """
    there = online(schedule, points.time)
    found = {"online": there.sum(axis=1)}
    if schedule.sent_mass.any():
        held, whole = _masses_of_nodes(schedule, points.time), masses(schedule, points.time)
        found |= {
            "smallest_mass": np.where(there, held, np.inf).min(axis=1, initial=np.inf),
            "largest_mass": np.where(there, held, -np.inf).max(axis=1, initial=-np.inf),
            "total_mass": whole.nodes + whole.on_the_way + whole.buffered,
            "lost_mass": np.where(np.abs(whole.lost) > ROUNDING * schedule.num_clients, whole.lost, 0.0),
        }
        nobody = found["online"] == 0
        for name in ("smallest_mass", "largest_mass"):
            found[name][nobody] = np.nan
    return found | _bytes(schedule, points, np.ones(len(schedule.receiver), np.bool_))


def _bytes(schedule: PeerSchedule, points: EvaluationPoints, sent: np.ndarray) -> dict[str, np.ndarray]:
    """The bytes of the pushes that are ``sent`` (bool[P]) by each evaluation."""
    left, arrived = schedule.end[schedule.push_event[sent]], np.sort(schedule.arrival[sent])
    size = schedule.message_bytes
    return {"bytes_up": at_or_before(left, points.time) * size, "bytes_down": at_or_before(arrived, points.time) * size}


def _masses_of_nodes(schedule: PeerSchedule, times: np.ndarray) -> np.ndarray:
    """The mass of each node after its last event by each time, float64[V, N]; what it begins with before its first."""
    order = np.argsort(schedule.end, kind="stable")
    visible = at_or_before(schedule.end[order], times)
    held, done = np.empty((len(times), schedule.num_clients)), 0
    now = first_masses(schedule.joined, schedule.late_mass)
    for row, count in enumerate(visible.tolist()):
        events = order[done:count]
        now[schedule.client[events]] = schedule.mass[events]  # a node's last event counts: it is written last
        held[row], done = now, max(done, count)
    return held


def scores_of_nodes(scores: Mapping[str, np.ndarray], there: np.ndarray, data: FederatedData) -> dict[str, np.ndarray]:
    """The scores of one or several evaluations: means over the nodes online (``there``, bool[..., N]).

    ``loss`` and ``accuracy`` are those of each node's model on its own tests, or on the global test set if no node has
    tests of its own; all nodes weigh the same. ``validation_...``: likewise on the validation parts. ``global_...``: on
    the global test set. ``client_own_loss`` and ``client_own_accuracy`` [..., N] are the scores of single nodes.
    """
    own = _held_by(data.test_size, there)
    parts = {
        "": own,
        "validation_": _held_by(data.validation_size, there),
        "global_": there,
    }
    found: dict[str, np.ndarray] = {}
    for start, mask in parts.items():
        for name in (f"{start}loss", f"{start}accuracy"):
            if name in scores:
                found[name] = _mean(scores[name], mask)
    singles = {name: np.asarray(scores[name]) for name in ("loss", "accuracy")}
    if not own.any():
        wanted = {name: scores.get(f"global_{name}", singles[name]) for name in singles}
        found |= {name: _mean(values, there) for name, values in wanted.items()}
        singles = {name: np.asarray(values) for name, values in wanted.items()}
    others = {name: np.asarray(values) for name, values in scores.items() if name not in found and name not in singles}
    return found | others | {f"client_own_{name}": values for name, values in singles.items()}


def _held_by(sizes: np.ndarray | None, there: np.ndarray) -> np.ndarray:
    return np.zeros_like(there) if sizes is None else there & (np.asarray(sizes) > 0)


def _mean(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    values, count = np.asarray(values), mask.sum(axis=-1)
    total = np.where(mask, values, 0).sum(axis=-1, dtype=np.float64)
    return np.asarray(np.where(count > 0, total / np.maximum(count, 1), np.nan).astype(values.dtype))


def record_peers(
    settings: dict[str, object],
    schedule: PeerSchedule,
    points: EvaluationPoints,
    result: EngineResult,
    planned: Mapping[str, np.ndarray],
    data: FederatedData,
    gradients: np.ndarray | None = None,
) -> Run:
    """Join the plan's columns with the engine's. All tables of a run that was stopped end at its last evaluation.

    The updates are compute events, in order of the moments at which they mix. ``staleness`` of an event: how many
    events a sender has completed between sending and mixing, averaged over the messages with the mixing coefficients
    as weights; 0 where the event mixes nothing. ``planned``: see :func:`planned_columns`. ``gradients``: of the loss,
    that each event computes, int64[E]; by default one per local step.

    Messages that are withheld (``PeerAlgorithm.push``) have no bytes, and are counted as ``withheld`` only.
    """
    rows = len(points.time) if result.rows is None else result.rows
    points = EvaluationPoints(*(column[:rows] for column in points))
    there = online(schedule, points.time)
    scores = scores_of_nodes(result.scores, there, data)
    clients = {name.removeprefix("client_"): v for name, v in scores.items() if name.startswith("client_")}
    evaluations = {
        "time": points.time,
        "update": points.position,
        "step": points.position,
        **{name: values for name, values in scores.items() if not name.startswith("client_")},
        **client_columns(clients),
        **{name: column[:rows] for name, column in planned.items()},
    }
    events = result.events
    work = schedule.local_steps if gradients is None else gradients
    updates = {**_events_table(schedule, events, work), **result.records}
    counts = message_counts(schedule, events, float(points.time[-1]))
    if WITHHELD in result.records:
        left_out = np.zeros(len(schedule.client), np.bool_)
        left_out[events] = result.records[WITHHELD]
        updates["sent"] = np.where(result.records[WITHHELD], 0, updates["sent"])
        evaluations |= _bytes(schedule, points, ~left_out[schedule.push_event])
        counts = message_counts(schedule, events, float(points.time[-1]), left_out)
        counts["withheld"] = int(left_out[schedule.push_event].sum())
    rejected = int(np.sum(~result.records["accepted"])) if len(events) else 0
    counters = {
        "updates": len(events),
        "unused": 0,
        "server_steps": 0,
        "local_steps": int(updates["local_steps"].sum(dtype=np.int64)),
        "gradients": int(updates["gradients"].sum(dtype=np.int64)),
        "rejected": rejected,
        "too_large": too_large(result.records) if rejected else 0,
        **counts,
        **result.counters,
    }
    tables = Columns(evaluations), Columns(updates)
    return Run(settings, result.params, *tables, clients, counters, schedule, dict(result.probes))


def _events_table(schedule: PeerSchedule, events: np.ndarray, gradients: np.ndarray) -> dict[str, np.ndarray]:
    """The columns of these events that follow from the plan."""
    count, reader, (_, behind) = len(schedule.client), readers(schedule), ages(schedule)
    weight = np.bincount(reader, schedule.weight, count)
    total = np.bincount(reader, schedule.weight * behind, count)
    columns = {
        "client": schedule.client,
        "job": schedule.number,
        "dispatch_time": schedule.start,
        "arrival_time": schedule.end,
        "mixed_at": schedule.mixed_at,
        "staleness": np.divide(total, weight, out=np.zeros(count), where=weight > 0),
        "local_steps": schedule.local_steps,
        "gradients": gradients,
        "mixed": np.diff(schedule.inbox_bounds),
        "sent": np.bincount(schedule.push_event, minlength=count),
    }
    if schedule.sent_mass.any():
        columns["mass"] = schedule.mass
    return {name: column[events] for name, column in columns.items()}


def message_counts(
    schedule: PeerSchedule, events: np.ndarray, time: float, left_out: np.ndarray | None = None
) -> dict[str, int]:
    """How many messages these events pushed, how many of them are corrupt, and how many had each ``Delivery``.

    The run ends at ``time``, in virtual seconds, with these ``events``. Where the plan goes on, messages that only a
    later event mixes are waiting or in flight; those that a buffer drops count as dropped as soon as they have come.
    ``left_out``, bool[E]: events whose messages do not count.
    """
    done = np.zeros(len(schedule.client) + 1, np.bool_)  # with a last entry for messages that no event mixes
    done[events] = True
    outcome = np.where(
        (schedule.outcome == Delivery.MIXED) & ~done[schedule.mixed_by], Delivery.WAITING, schedule.outcome
    )
    under_way = (outcome != Delivery.LOST) & (schedule.arrival > time * SLACK)
    outcome = np.where(under_way, Delivery.IN_FLIGHT, outcome)
    pushed = done[schedule.push_event] if left_out is None else (done[:-1] & ~left_out)[schedule.push_event]
    counts = np.bincount(outcome[pushed], minlength=len(Delivery))
    named = {kind.name.lower(): int(counts[kind]) for kind in Delivery}
    corrupt = int(np.sum(schedule.corrupt[pushed]))
    return {"messages": int(pushed.sum()), **named, "corrupt": corrupt}
