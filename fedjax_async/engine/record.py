"""From an engine's outcome to the tables of a :class:`~fedjax_async.types.Run`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedjax_async.engine.evaluation import Points
from fedjax_async.types import Params, Run, Schedule


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
    uploaded = np.sort(schedule.upload_time)
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
    rejected = int(np.sum(~outcome.records["accepted"]))
    counters = {"updates": len(job), "server_steps": int(closed[-1]), "rejected": rejected, **outcome.counters}
    return Run(settings, outcome.params, evaluations, updates, clients, counters, schedule)
