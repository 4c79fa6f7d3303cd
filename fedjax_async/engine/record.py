"""From an engine's result to the tables of a :class:`~fedjax_async.types.Run`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from fedjax_async.base.tree import Columns
from fedjax_async.clock import Outcome, at_or_before, cut, fault_counts, used_arrivals, with_derived_columns
from fedjax_async.clock.energy import Devices, energy_until, job_energy
from fedjax_async.engine.client_scores import client_columns
from fedjax_async.engine.evaluation import EvaluationPoints
from fedjax_async.geometry import PHASE_COLUMN
from fedjax_async.types import Params, Run, Schedule

# The counts of faults that every run reports.
FAULTS = ("lost", "late", "duplicates", "corrupt", "crashed", "interrupted", "dropped_late", "dropped_stale")

# Counters in real seconds. They differ between two equal runs, so no file has them.
REAL_TIMES = frozenset(("look_seconds",))

# Columns of the table of updates that rules and clients may not record.
RESERVED = (
    "client", "job", "time", "dispatch_time", "arrival_time", "step", "staleness", "local_steps", "gradients", "closes",
    "weight", "upload_norm", "accepted", "step_changed", "used", "upload_bytes", "upload_values_bytes",
    "energy", "carbon",
)  # fmt: skip

Progress = Callable[..., None]  # progress(arrivals so far, arrivals in total, time=, staleness=, accuracy=)


class EngineResult(NamedTuple):
    """What an engine returns, of runs with and without a server.

    Without a server ``scores`` has ``loss`` and ``accuracy`` [V, N] of each node's model on its own tests, NaN without
    any; ``global_loss`` and ``global_accuracy`` [V, N] on the global test set, NaN where they are not evaluated;
    ``average_loss`` and ``average_accuracy`` [V] of the mean model of the nodes online, likewise; ``consensus`` [V],
    the mean over the nodes online of ``||w_i - mean||^2``, without running statistics. The last three are NaN while
    no node is online. Under ``global_tests = "never"`` the ``global`` and ``average`` columns are left out. The wave
    engine adds ``validation_loss`` and ``validation_accuracy`` [V, N] where clients hold validation parts out.
    """

    params: Params  # without a server all nodes' models, [N, ...]
    scores: dict[str, np.ndarray]  # one row per evaluation
    records: dict[str, np.ndarray]  # one row per arrival, or per executed event in order of their numbers
    counters: dict[str, object]
    in_vain: np.ndarray = np.zeros(0, np.int64)  # jobs that were trained although the server never applies them
    in_vain_records: Mapping[str, np.ndarray] = MappingProxyType({})  # one row each
    probes: Mapping[str, dict[str, np.ndarray]] = MappingProxyType({})  # one table each
    rows: int | None = None  # evaluations that were made, fewer than planned in a run that was stopped; None: all
    kept: tuple[int, Params] | None = None  # the row and the model that an observer wanted kept
    events: np.ndarray = np.zeros(0, np.int64)  # of nodes, the events that were executed: those seen by an evaluation


class Traffic(NamedTuple):
    """Bytes of one message in each direction."""

    down: int
    up: int  # with compressed uploads: of the longest possible one
    values: int | None = None  # of the values of the longest compressed upload; None without compression


def refuse(rejected: int, on_bad: str) -> None:
    """Raise ``ValueError`` if uploads were rejected and ``on_bad`` is ``"raise"``."""
    if rejected and on_bad == "raise":
        raise ValueError(
            f"uploads rejected so far = {rejected}: must be 0 under on_bad='raise' (a client diverged: lower the "
            "learning rate, or let the run go on with on_bad='reject')"
        )


def make_run(
    settings: dict[str, object],
    schedule: Schedule,
    points: EvaluationPoints,
    result: EngineResult,
    traffic: Traffic,
    *,
    gradients: np.ndarray | None = None,
    waits: bool = True,
    devices: Devices | None = None,
    attackers: int | None = None,
) -> Run:
    """Join the schedule's columns with the engine's. All tables of a run that was stopped end at its last evaluation.

    ``bytes_up`` counts all uploads that have reached the server by an evaluation, also rejected ones, and those that
    are never applied (too late, or after the last step). An upload that was lost on its way counts from the moment on
    at which the server notices the loss. A further copy counts with its upload, if it comes before the end of the run;
    so a longer run may have more bytes at the same moment. With compressed uploads it is the sum of the recorded
    sizes; an upload that was not trained, as nothing depends on it, counts as the longest.

    ``bytes_down`` counts all messages that the server has sent by an evaluation, also at that very moment: the replies
    to its uploads. So it depends neither on how much longer the run goes on nor on what its budget counts.

    ``accepted`` is also false where the rule gave the upload weight 0. ``step_changed``: whether the arrival's server
    step, as far as the run goes, has an accepted upload.

    ``gradients``: of the loss, that each job computes, int64[J]; by default one per local step.
    ``waits``: whether uploads change the model only when their server step is completed. If the run then ends within a
    step, the uploads of that step are not ``used``: ``unused`` counts them, ``updates`` does not.
    ``devices``: adds ``energy`` (J) and ``carbon`` (g CO2e), of each arrival's job, and of all clients so far.
    ``attackers``: how many clients attack; adds the counters ``attackers`` and ``malicious`` (their uploads).
    """
    sent, whole = np.sort(schedule.dispatch_time), schedule
    records, up, values_up = _uploads(schedule, result, traffic)
    if result.rows is not None and result.rows < len(points.time):
        points = EvaluationPoints(*(column[: result.rows] for column in points))
        schedule = cut(schedule, int(points.position[-1]), float(points.time[-1]))
        records = {name: column[: len(schedule.job)] for name, column in records.items()}
    used = used_arrivals(schedule) if waits else len(schedule.job)
    scores = {name: values for name, values in result.scores.items() if not name.startswith("client_")}
    clients = {name.removeprefix("client_"): v for name, v in result.scores.items() if name.startswith("client_")}
    evaluations = {
        "time": points.time,
        "update": np.minimum(points.position, used),
        "step": points.steps,
        **scores,
        **client_columns(clients),
        "bytes_up": _uploaded(whole, points, up),
        "bytes_down": at_or_before(sent, points.time) * traffic.down,
        **({} if values_up is None else {"values_bytes_up": _uploaded(whole, points, values_up)}),
        **_costs(devices, whole, energy_until, points.time, traffic.down, up),
    }
    costs = _costs(devices, whole, job_energy, traffic.down, up)
    updates = _updates(schedule, records, schedule.local_steps if gradients is None else gradients, costs, used)
    counters = {
        **_counters(schedule, records, updates, used),
        "trained_in_vain": _followed(schedule, result.in_vain),
        **{name: fault_counts(schedule)[name] for name in FAULTS},
        **_phase_changes(records),
        **({} if attackers is None else {"attackers": attackers, "malicious": int(records["malicious"].sum())}),
        **result.counters,
    }
    tables = Columns(evaluations), Columns(updates)
    return Run(settings, result.params, *tables, clients, counters, schedule, dict(result.probes))


def _updates(
    schedule: Schedule,
    records: Mapping[str, np.ndarray],
    gradients: np.ndarray,
    costs: Mapping[str, np.ndarray],
    used: int,
) -> dict[str, np.ndarray]:
    """The table of the updates; ``gradients`` and ``costs``: of each job, ``used``: how many uploads are."""
    job = schedule.job
    accepted = records["accepted"] & (records["weight"] != 0)
    counted = np.bincount(schedule.step, weights=accepted) > 0
    return {
        "client": schedule.client[job],
        "job": schedule.number[job],
        "dispatch_time": schedule.dispatch_time[job],
        "arrival_time": schedule.time,
        "step": schedule.step,
        "staleness": schedule.staleness,
        "local_steps": schedule.local_steps[job],
        "gradients": gradients[job],
        "closes": schedule.closes,
        **records,
        **{name: column[job] for name, column in costs.items()},
        "accepted": accepted,
        "step_changed": counted[schedule.step],
        "used": np.arange(len(job)) < used,
    }


def _counters(
    schedule: Schedule, records: Mapping[str, np.ndarray], updates: Mapping[str, np.ndarray], used: int
) -> dict[str, int]:
    """What the table of the updates adds up to; ``records``: what the engine noted of the arrivals."""
    changed = updates["step_changed"][schedule.closes]
    return {
        "updates": used,
        "unused": len(schedule.job) - used,
        "server_steps": int(schedule.closes.sum()),
        "local_steps": int(updates["local_steps"].sum(dtype=np.int64)),
        "gradients": int(updates["gradients"].sum(dtype=np.int64)),
        "unchanged_steps": int(np.sum(~changed)),
        "rejected": int(np.sum(~updates["accepted"])),
        "too_large": too_large(records),
        "zero_weight": int(np.sum(records["accepted"] & ~updates["accepted"])),
    }


def too_large(records: Mapping[str, np.ndarray]) -> int:
    """How many uploads the engine rejected for their norm; it notes the norm 0 of those that are not finite."""
    return int(np.sum(~records["accepted"] & (records["upload_norm"] > 0)))


def _phase_changes(records: Mapping[str, np.ndarray]) -> dict[str, int]:
    """How often a delay correction with phases (OrthoDyn) changed its phase; nothing for other rules."""
    phase = records.get(PHASE_COLUMN)
    return {} if phase is None else {"phase_changes": int(np.count_nonzero(np.diff(phase, prepend=0)))}


def _uploads(
    schedule: Schedule, result: EngineResult, traffic: Traffic
) -> tuple[dict[str, np.ndarray], np.ndarray | int, np.ndarray | int | None]:
    """Columns of the arrivals, and bytes of each job's upload: all, and of its values (None without compression)."""
    records = result.records
    if traffic.values is None:
        return records, traffic.up, None
    count, job = len(schedule.client), schedule.job[: len(records["bits"])]
    sizes = {"bits": traffic.up, "values_bits": traffic.values}
    jobs = {name: np.full(count, size, np.int64) for name, size in sizes.items()}
    for name, column in jobs.items():
        column[job] = -(-records[name].astype(np.int64) // 8)
        if len(result.in_vain):
            column[result.in_vain] = -(-result.in_vain_records[name].astype(np.int64) // 8)
    kept = {name: column for name, column in records.items() if name not in sizes}
    columns = {"upload_bytes": jobs["bits"][job], "upload_values_bytes": jobs["values_bits"][job]}
    return kept | columns, jobs["bits"], jobs["values_bits"]


def _costs(
    devices: Devices | None, schedule: Schedule, spent: Callable[..., Iterable[np.ndarray]], *given: object
) -> dict[str, np.ndarray]:
    """The columns ``energy`` and ``carbon``, which ``spent(devices, schedule, ...)`` returns, if devices are given."""
    if devices is None:
        return {}
    return dict(zip(("energy", "carbon"), spent(devices, with_derived_columns(schedule), *given)))


def _followed(schedule: Schedule, jobs: np.ndarray) -> int:
    """How many of ``jobs`` are followed by another job of the same client in the schedule."""
    latest = np.full(schedule.num_clients, -1)
    latest[schedule.client] = np.arange(len(schedule.client))
    jobs = jobs[jobs < len(schedule.client)]
    return int(np.sum(jobs < latest[schedule.client[jobs]]))


def _uploaded(schedule: Schedule, points: EvaluationPoints, size: np.ndarray | int) -> np.ndarray:
    """Bytes that the clients have sent by each evaluation; ``size``: bytes of every upload, or of each job's."""
    whole = with_derived_columns(schedule)
    lost = whole.outcome == Outcome.LOST
    moment = np.where(lost, whole.freed_time, whole.upload_time)
    order = np.argsort(moment, kind="stable")
    sent = (1 + whole.copies) * (whole.outcome != Outcome.WITHHELD)  # a further copy of an upload is traffic too
    each = np.broadcast_to(sent * np.asarray(size, np.int64), len(order))[order]
    total = np.concatenate([[0], np.cumsum(each)])
    return total[at_or_before(moment[order], points.time)]
