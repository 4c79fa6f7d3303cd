"""What an adaptive run has recorded and told its planner; the planner, the results and checkpoints read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_async.base import check
from fedjax_async.clock.decisions import GrowingTable
from fedjax_async.engine.extension import ExtensionWork
from fedjax_async.engine.outset import OBSERVED
from fedjax_async.engine.probes import Probes, numbers_of, probe_table
from fedjax_async.engine.stack import Recorded
from fedjax_async.types import Schedule

_OF_JOBS = ("job", "applied")  # columns of the log besides those that programs record
_NOT_TOLD = (*_OF_JOBS, "values_bits")


class Told:
    """Records and answers so far, and those of a checkpoint, which are told to the planner again."""

    def __init__(self, probes: Probes) -> None:
        self._probes = probes
        self._log, self._probed = GrowingTable(), {name: GrowingTable() for name in probes}
        self._losses, self._finished = list[np.ndarray](), list[tuple[float, int]]()
        self._rows, self._probed_rows = 0, 0  # how many the planner knows
        self._clients: Sequence[int] = ()
        self._closes, self._times, self._repeated = np.zeros(0, np.bool_), np.zeros(0), 0
        self._past: dict[str, Any] = {}

    # --- what is recorded -------------------------------------------------------------------------

    def decided(self, clients: Sequence[int], closes: np.ndarray, times: np.ndarray) -> None:
        """Keep the plan so far: the client of each job, which arrivals close their server step, and when they come."""
        self._clients, self._closes, self._times = clients, closes, times

    def note(self, work: ExtensionWork, rows: Mapping[str, np.ndarray], probed: Mapping[str, Any]) -> None:
        """Keep the records of the received positions of an extension, and the columns of its probes."""
        self._log.append({**rows, "job": work.jobs, "applied": work.applied[: work.received]})
        for name in self._probes:
            numbers = self._numbers(name, work)
            at = work.at[numbers - work.first]
            self._probed[name].append({key: column[at] for key, column in probed[name].items()} | {"number": numbers})

    def _numbers(self, name: str, work: ExtensionWork) -> np.ndarray:
        """The numbers of the arrivals of an extension that a probe sees."""
        numbers = numbers_of(self._probes[name], work.first + len(work.at) - 1)
        return numbers[(numbers >= work.first) & (numbers < work.first + len(work.at) - 1)]

    def local_probes(self, work: ExtensionWork) -> dict[str, Any]:
        """The probes with the numbers of their arrivals within an extension."""
        return {
            name: probe._replace(every=1, at=tuple((self._numbers(name, work) - work.first).tolist()))
            for name, probe in self._probes.items()
        }

    @property
    def sizes_differ(self) -> bool:
        """Whether uploads differ in size."""
        return "bits" in self._log.names

    # --- what the planner is told -----------------------------------------------------------------

    def new_rows(self) -> dict[str, np.ndarray]:
        """The observed columns of the arrivals since the last call."""
        columns = {name: column[self._rows :] for name, column in self._log.columns().items()}
        self._rows += len(columns["applied"])
        found = {name: column[columns["applied"]] for name, column in columns.items() if name not in _NOT_TOLD}
        found["accepted"] = found["accepted"] & (found["weight"] != 0)
        if OBSERVED in self._probed:
            seen = self._probed[OBSERVED].columns()
            found |= {name: column[self._probed_rows :] for name, column in seen.items() if name != "number"}
            self._probed_rows += int(columns["applied"].sum())
        return found

    def losses(self, found: np.ndarray) -> np.ndarray:
        """Keep losses that the planner is told, and return them."""
        self._losses.append(found)
        return found

    def finished(self, found: tuple[float, int]) -> tuple[float, int]:
        """Keep the norm and bits of a finished job that the planner is told, and return them."""
        self._finished.append(found)
        return found

    # --- checkpoints ------------------------------------------------------------------------------

    def content(self) -> dict[str, Any]:
        """All arrays that a checkpoint keeps."""
        return {
            "records": self._log.columns(),
            "probes": {name: table.columns() for name, table in self._probed.items()},
            "losses": np.concatenate([np.zeros(0), *self._losses]),
            "finished": np.array(self._finished, np.float64).reshape(-1, 2),
            "clients": np.array(self._clients, np.int64),
            "closes": self._closes,
            "times": self._times,
        }

    def structure(self, records: Mapping[str, Any], probes: Mapping[str, Any]) -> Any:
        """That of a checkpoint's content; ``records`` and ``probes``: dicts of the columns that programs record."""
        content = self.content() | {"records": dict.fromkeys([*records, *_OF_JOBS], 0)}
        content["probes"] = {name: dict.fromkeys([*columns, "number"], 0) for name, columns in probes.items()}
        return jax.tree.structure(content)

    def read(self, structure: Any, leaves: list[np.ndarray]) -> None:
        """Read the content of a checkpoint."""
        self._past = jax.tree.unflatten(structure, leaves)

    def repeat(self, work: ExtensionWork) -> None:
        """As :meth:`note`, with the records of the checkpoint.

        ``ValueError`` if the plan differs from the checkpoint's, because the saved records would not fit this plan.
        """
        begin = len(self._log)
        jobs, arrivals, first = len(self._clients), len(self._closes), self._repeated
        pairs = (
            (self._past["records"]["job"][begin : begin + work.received], work.jobs),
            (self._past["clients"][first:jobs], self._clients[first:]),
            (self._past["closes"][work.first : arrivals], self._closes[work.first :]),
            (self._past["times"][work.first : arrivals], self._times[work.first :]),
        )
        self._repeated = jobs
        alike = all(np.array_equal(before, now) for before, now in pairs)
        allowed = "deterministic, so that the run can be resumed (draw random numbers from prior.seed)"
        check.require(alike, "policy", "decisions that differ from those before the checkpoint", allowed)
        self._log.append(
            {name: column[begin : begin + work.received] for name, column in self._past["records"].items()}
        )
        for name, held in self._past["probes"].items():
            known, count = len(self._probed[name]), len(self._numbers(name, work))
            self._probed[name].append({key: column[known : known + count] for key, column in held.items()})

    def past_losses(self, count: int) -> np.ndarray | None:
        """The next ``count`` losses of the checkpoint, if it has them."""
        known = sum(map(len, self._losses))
        held: np.ndarray = self._past.get("losses", np.zeros(0))
        return held[known : known + count] if known < len(held) else None

    def past_finished(self) -> tuple[float, int] | None:
        """Norm and bits of the next finished job of the checkpoint, if it has them."""
        held, known = self._past.get("finished", np.zeros((0, 2))), len(self._finished)
        return (float(held[known][0]), int(held[known][1])) if known < len(held) else None

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
