"""What an adaptive run has recorded and told its planner; the planner, the results and checkpoints read it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from fedjax_async.base import check
from fedjax_async.clock.decisions import GrowingTable
from fedjax_async.engine.extension import ExtensionWork
from fedjax_async.engine.outset import OBSERVED, GrowingPoints
from fedjax_async.engine.probes import Probes, probe_table
from fedjax_async.engine.stack import Recorded
from fedjax_async.types import Schedule, Structure

_OF_JOBS = ("job", "applied")  # columns of the log besides those that programs record
ANSWERS = {"losses": (-1,), "finished": (-1, 2)}  # losses of clients; norm and bits of finished jobs
_NOT_TOLD = (*_OF_JOBS, "values_bits")

Answers = TypeVar("Answers", bound=Iterable[object])


class Told:
    """Records and answers so far, and those of a checkpoint, which are told to the planner again."""

    def __init__(self, probes: Probes) -> None:
        self._probes = probes
        self._log, self._probed = GrowingTable(), {name: GrowingTable() for name in probes}
        self._answers: dict[str, list[object]] = {name: [] for name in ANSWERS}
        self._new: list[dict[str, np.ndarray]] = []  # columns of arrivals that the planner does not know
        self._clients: Sequence[int] = ()
        self._evaluations: GrowingPoints | None = None
        self._repeated = 0
        self._past: dict[str, Any] = {}

    # --- what is recorded -------------------------------------------------------------------------

    def decided(self, clients: Sequence[int], evaluations: GrowingPoints) -> None:
        """Keep the plan so far: the client of each job, and the arrivals."""
        self._clients, self._evaluations = clients, evaluations

    def note(
        self, work: ExtensionWork, rows: Mapping[str, np.ndarray], probed: Mapping[str, Mapping[str, np.ndarray]]
    ) -> None:
        """Keep the records of the received positions of an extension, and the columns of its probes."""
        received = work.received
        job, applied = [one.job for one in work.jobs[:received]], work.applied[:received]
        seen = {}
        for name, own in work.seen.items():
            at, number = [work.at[one] for one in own], np.array(own, np.int64) + work.first
            seen[name] = {key: column[at] for key, column in probed[name].items()} | {"number": number}
        self._keep({**rows, "job": np.array(job, np.int64), "applied": np.array(applied, np.bool_)}, seen)

    def _keep(self, rows: dict[str, np.ndarray], seen: Mapping[str, dict[str, np.ndarray]]) -> None:
        self._log.append(rows)
        for name, table in seen.items():
            self._probed[name].append(table)
        found = {name: column for name, column in rows.items() if name not in _NOT_TOLD}
        if not rows["applied"].all():
            found = {name: column[rows["applied"]] for name, column in found.items()}
        observed = {name: column for name, column in seen.get(OBSERVED, {}).items() if name != "number"}
        self._new.append({**found, "accepted": found["accepted"] & (found["weight"] != 0), **observed})

    def seen_of(self, work: ExtensionWork) -> dict[str, range | list[int]]:
        """Which arrivals of an extension each probe sees, by their number in the extension."""
        first, count = work.first, len(work.time)
        found: dict[str, range | list[int]] = {}
        for name, probe in self._probes.items():
            if probe.at is None:
                found[name] = range(-first % probe.every, count, probe.every)
            else:
                low, high = bisect_left(probe.at, first), bisect_left(probe.at, first + count)
                found[name] = [number - first for number in probe.at[low:high]]
        return found

    @property
    def sizes_differ(self) -> bool:
        """Whether uploads differ in size."""
        return "bits" in self._log.names

    # --- what the planner is told -----------------------------------------------------------------

    def new_rows(self) -> dict[str, np.ndarray]:
        """The observed columns of the arrivals since the last call."""
        first, *others = self._new
        self._new = []
        if not others:
            return first
        return {name: np.concatenate([column, *(other[name] for other in others)]) for name, column in first.items()}

    def tell(self, name: str, found: Answers) -> Answers:
        """Keep answers that the planner is told, and return them; ``name``: one of ``ANSWERS``."""
        self._answers[name].extend(found)
        return found

    def again(self, name: str, count: int = 1) -> np.ndarray | None:
        """The next ``count`` answers of the checkpoint, if it has them."""
        known, held = len(self._answers[name]), self._past.get(name, np.zeros(0))
        return held[known : known + count] if known < len(held) else None

    # --- checkpoints ------------------------------------------------------------------------------

    def content(self) -> dict[str, object]:
        """All arrays that a checkpoint keeps."""
        return {
            "records": self._log.columns(),
            "probes": {name: table.columns() for name, table in self._probed.items()},
            **{name: np.array(self._answers[name], np.float64).reshape(shape) for name, shape in ANSWERS.items()},
            "clients": np.array(self._clients, np.int64),
            "closes": np.zeros(0, np.bool_) if self._evaluations is None else self._evaluations.closes,
            "times": np.zeros(0) if self._evaluations is None else self._evaluations.times,
        }

    def structure(self, records: Iterable[str], probes: Mapping[str, Iterable[str]]) -> Structure:
        """That of a checkpoint's content; ``records`` and ``probes``: dicts of the columns that programs record."""
        content = self.content() | {"records": dict.fromkeys([*records, *_OF_JOBS], 0)}
        content["probes"] = {name: dict.fromkeys([*columns, "number"], 0) for name, columns in probes.items()}
        return jax.tree.structure(content)

    def read(self, structure: Structure, leaves: list[np.ndarray]) -> None:
        """Read the content of a checkpoint."""
        self._past = jax.tree.unflatten(structure, leaves)

    def repeat(self, work: ExtensionWork) -> None:
        """As :meth:`note`, with the records of the checkpoint.

        ``ValueError`` if the plan differs from the checkpoint's, because the saved records would not fit this plan.
        """
        begin = len(self._log)
        jobs, arrivals, first = len(self._clients), work.first + len(work.time), self._repeated
        pairs = (
            (
                self._past["records"]["job"][begin : begin + work.received],
                [one.job for one in work.jobs[: work.received]],
            ),
            (self._past["clients"][first:jobs], self._clients[first:]),
            (self._past["closes"][work.first : arrivals], work.closes),
            (self._past["times"][work.first : arrivals], work.time),
        )
        self._repeated = jobs
        alike = all(np.array_equal(before, now) for before, now in pairs)
        allowed = "deterministic, so that the run can be resumed (draw random numbers from prior.seed)"
        check.require(alike, "policy", "decisions that differ from those before the checkpoint", allowed)
        rows = {name: column[begin : begin + work.received] for name, column in self._past["records"].items()}
        seen = {}
        for name, held in self._past["probes"].items():
            known, count = len(self._probed[name]), len(work.seen[name])
            seen[name] = {key: column[known : known + count] for key, column in held.items()}
        self._keep(rows, seen)

    # --- results ----------------------------------------------------------------------------------

    def recorded(self, schedule: Schedule, until: int) -> Recorded:
        """What a run has recorded; ``schedule``: the whole plan, ``until``: arrivals that belong to the result.

        The jobs trained in vain come in the order of a planned run.
        """
        columns, seen = self._log.columns(), {}
        order = np.lexsort((np.where(columns["applied"], 0, columns["job"]), np.cumsum(columns["applied"])))
        columns = {name: column[order] for name, column in columns.items()}
        job, applied = (columns.pop(name) for name in _OF_JOBS)
        for name, table in self._probed.items():
            found = {key: column[table.columns()["number"] < until] for key, column in table.columns().items()}
            number = found.pop("number")
            seen[name] = probe_table(schedule, number, number, found)
        return Recorded(columns, job, applied, seen)
