"""From an engine's outcome to the tables of a :class:`~fedjax_async.types.Run`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedjax_async.clock import fault_counts
from fedjax_async.engine.evaluation import Points
from fedjax_async.types import Params, Run, Schedule

# Of the clock's counts, those that every run reports.
FAULTS = ("lost", "late", "duplicates", "corrupt", "crashed", "interrupted", "dropped_late", "dropped_stale")


class Outcome(NamedTuple):
    """What either engine returns."""

    params: Params
    scores: dict[str, np.ndarray]  # one row an evaluation
    records: dict[str, np.ndarray]  # one row an arrival
    counters: dict[str, Any]


class Traffic(NamedTuple):
    """Bytes of one message in each direction."""

    down: int
    up: int


def make_run(settings: dict[str, Any], schedule: Schedule, points: Points, outcome: Outcome, traffic: Traffic) -> Run:
    """Join the schedule's columns with the engine's."""
    sent = np.sort(schedule.dispatch_time)
    copies = schedule.copies if len(schedule.copies) else 0  # a further copy of an upload is traffic too
    uploaded = np.sort(np.repeat(schedule.upload_time, 1 + copies))
    closed = np.concatenate([[0], np.cumsum(schedule.closes)])
    scores = {name: values for name, values in outcome.scores.items() if not name.startswith("client_")}
    clients = {name.removeprefix("client_"): v for name, v in outcome.scores.items() if name.startswith("client_")}
    evaluations = {
        "time": points.time,
        "update": points.position,
        "step": closed[points.position],
        **scores,
        "bytes_up": np.searchsorted(uploaded, points.time, side="right") * traffic.up,
        "bytes_down": np.searchsorted(sent, points.time, side="right") * traffic.down,
    }
    job = schedule.job
    updates = {
        "client": schedule.client[job],
        "job": schedule.number[job],
        "dispatch_time": schedule.dispatch_time[job],
        "arrival_time": schedule.time,
        "step": schedule.step,
        "staleness": schedule.staleness,
        "local_steps": schedule.local_steps[job],
        "closes": schedule.closes,
        **outcome.records,
    }
    faults = fault_counts(schedule)
    counters = {
        "updates": len(job),
        "server_steps": int(closed[-1]),
        "rejected": int(np.sum(~outcome.records["accepted"])) + faults["dropped_stale"],
        **{name: faults[name] for name in FAULTS},
        **outcome.counters,
    }
    return Run(settings, outcome.params, evaluations, updates, clients, counters, schedule)
