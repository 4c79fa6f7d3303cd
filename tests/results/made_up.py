"""Runs made by hand, without training; every table is filled as the engine fills it."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedjax_async.config import Experiment, Settings, prepare
from fedjax_async.types import Run, Schedule


def make_schedule(num_clients: int = 3, jobs: int = 4) -> Schedule:
    """Client c takes c + 1 seconds per job, every arrival closes a step, the last job of client 0 is lost."""
    finish = np.array([(c + 1) * (n + 1) for c in range(num_clients) for n in range(jobs)], np.float64)
    client = np.repeat(np.arange(num_clients, dtype=np.int32), jobs)
    begin = finish - (client + 1)
    sent = np.lexsort((client, begin))  # jobs are numbered in order of dispatch
    client, begin, finish = client[sent], begin[sent], finish[sent]
    arrived = np.lexsort((client, finish))
    arrived = arrived[arrived != np.flatnonzero(client == 0)[-1]]
    time = finish[arrived]
    before = np.searchsorted(time, begin, side="right")
    return Schedule(
        num_clients=num_clients,
        client=client,
        number=(begin / (client + 1)).astype(np.int32),
        local_steps=np.full(client.size, 5, np.int32),
        dispatch_time=begin,
        upload_time=finish,
        dispatched_after=before,
        version=before,
        job=arrived,
        time=time,
        closes=np.ones(arrived.size, bool),
        step=np.arange(arrived.size),
        outcome=np.where(np.isin(np.arange(client.size), arrived), 0, 1).astype(np.int8),
        freed_time=finish,
        corrupt=np.zeros(client.size, bool),
        copies=np.zeros(client.size, np.int8),
    )


def make_run(
    accuracy: list[float] | None = None,
    time: list[float] | None = None,
    method: str = "fedasync:mixing=0.6",
    **columns: np.ndarray,
) -> Run:
    """``columns``: of the evaluations, in place of or beside the usual ones."""
    schedule = make_schedule()
    scores = np.array([0.1, 0.4, 0.7] if accuracy is None else accuracy, np.float32)
    at = np.linspace(0.0, 12.0, scores.size) if time is None else np.array(time)
    position = np.searchsorted(schedule.time, at, side="right")
    job = schedule.job
    return Run(
        settings={"method": method, "seed": 0, "time": 12.0, "limit": np.inf, "sizes": (8, 4)},
        params={
            "conv": {"kernel": np.arange(12, dtype=np.float32).reshape(3, 4), "bias": np.zeros(4, np.float32)},
            "dense": np.float32([np.pi]),
        },
        evaluations={
            "time": at,
            "update": position,
            "step": position,
            "loss": -np.log(scores),
            "accuracy": scores,
            "bytes_up": 100 * position,
            "bytes_down": 100 * (position + 3),
            **columns,
        },
        updates={
            "client": schedule.client[job],
            "job": schedule.number[job],
            "dispatch_time": schedule.dispatch_time[job],
            "arrival_time": schedule.time,
            "step": schedule.step,
            "staleness": schedule.staleness,
            "weight": np.full(job.size, 1 / 3),
            "upload_norm": np.where(np.arange(job.size) == 2, np.nan, 0.1).astype(np.float32),
            "accepted": np.arange(job.size) != 2,
            "closes": schedule.closes,
        },
        per_client={"accuracy": np.full((scores.size, 3), 0.25, np.float32)},
        counters={"waves": np.int64(4), "mean_width": 2.75, "ratio": float("nan")},
        schedule=schedule,
    )


def of_group(experiments: Any, group: Any, *, on_finished: Any, **options: object) -> None:
    """Stands in for ``execute_group``: made-up runs."""
    for i in group.members:
        given = experiments[i]
        on_finished(i, of_settings(prepare(given) if isinstance(given, Settings) else given))


def of_settings(experiment: Experiment) -> Run:
    """The made-up run with the settings of the experiment."""
    run = make_run()
    counts = dict.fromkeys(("updates", "server_steps", "local_steps", "gradients"), len(run.updates["client"]))
    return run._replace(settings=experiment.described, counters=run.counters | counts | {"rejected": 1})
