"""The tables of runs whose plans grow: those that last, and what an extension brings, in one array.

A transfer, and a table that a program is given, cost the host as much as a small program, however few rows they have;
and most looks bring a single arrival. So the columns of an extension are the rows of one array, which programs cut
where they read a column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_async.engine.extension import ExtensionWork
from fedjax_async.engine.layout import Layout
from fedjax_async.engine.stack_facts import StackFacts
from fedjax_async.engine.tables import StackShape, group_end, malicious
from fedjax_async.types import AnyArray, Array, FederatedData

# Columns of ``DeviceTables``, in the order of the rows that hold them.
OF_POSITIONS = ("run", "client", "owner", "offset", "size", "number", "steps", "slot", "version", "staleness",
                "closes", "corrupt", "malicious", "applied")  # fmt: skip
OF_WRITES = ("write_slot", "write_owner", "write_run", "write_version", "write_steps")
OTHERS = ("group_end", "train_order", "row", "ranks", "write_bounds")
ROW = {name: row for row, name in enumerate((*OF_POSITIONS, *OF_WRITES, *OTHERS))}
REAL = ("time", "write_time", "write_weight")  # their bits are in the rows after those, and ``chosen`` comes last
LOGICAL = {"closes", "corrupt", "malicious", "applied"}


class Sizes(NamedTuple):
    """Entries of the columns."""

    positions: int
    writes: int
    probes: tuple[str, ...]
    real: np.dtype  # of real numbers

    @property
    def chosen(self) -> int:
        """The first row of ``chosen``."""
        return len(ROW) + len(REAL) * self.real.itemsize // 4

    @property
    def length(self) -> int:
        """Of all rows."""
        return max(self.positions + 2, self.writes)

    def of(self, name: str) -> int:
        """Entries of a column."""
        if name.startswith("write_") and name != "write_bounds":
            return self.writes
        return self.positions + 2 * (name in ("ranks", "write_bounds"))


@jax.tree_util.register_pytree_node_class
class GrowingTables:
    """In place of ``DeviceTables``, with the same columns.

    ``rows``: int32[columns, length]; ``lasting``: the other tables by name.
    """

    def __init__(self, lasting: Mapping[str, object], rows: AnyArray, sizes: Sizes) -> None:
        self.lasting, self.rows, self.sizes = lasting, rows, sizes

    def tree_flatten(self) -> tuple[tuple[Mapping[str, object], AnyArray], Sizes]:
        """For JAX."""
        return (self.lasting, self.rows), self.sizes

    @classmethod
    def tree_unflatten(cls, sizes: Sizes, parts: tuple[Mapping[str, object], AnyArray]) -> GrowingTables:
        """For JAX."""
        return cls(*parts, sizes)

    def __getattr__(self, name: str) -> Any:
        if name in ROW:
            column = self.rows[ROW[name], : self.sizes.of(name)]
            return column != 0 if name in LOGICAL else column
        if name in REAL:
            return self._real(REAL.index(name))[: self.sizes.of(name)]
        if name == "chosen":
            chosen = self.rows[self.sizes.chosen :, : self.sizes.positions] != 0
            return {probe: chosen[k] for k, probe in enumerate(self.sizes.probes)}
        if name.startswith("__") or name not in self.lasting:
            raise AttributeError(name)
        return self.lasting[name]

    def _real(self, k: int) -> Array:
        parts = self.sizes.real.itemsize // 4
        bits = self.rows[len(ROW) + parts * k : len(ROW) + parts * (k + 1)]
        whole = bits[0] if parts == 1 else bits.reshape(-1, parts)
        real: Array = jax.lax.bitcast_convert_type(whole, self.sizes.real)
        return real


class Clients(NamedTuple):
    """What the tables say of the clients of a run, one entry per client."""

    offset: np.ndarray  # in the pooled ``order``
    size: np.ndarray
    malicious: np.ndarray


def clients_of(data: Sequence[FederatedData], begins: Sequence[int]) -> list[Clients]:
    """Per run; ``begins``: see ``tables.of_runs``."""
    return [Clients(d.offset.astype(np.int64) + first, d.size, malicious(d)) for d, first in zip(data, begins)]


def extension_rows(
    layout: Layout, sizes: Sizes, shape: StackShape, facts: StackFacts, clients: Sequence[Clients]
) -> np.ndarray:
    """The ``rows`` of an extension, on the host."""
    works, source = layout.schedules, list(zip(layout.run.tolist(), layout.source.tolist()))
    rows = np.zeros((sizes.chosen + len(sizes.probes), sizes.length), np.int32)
    real = rows[len(ROW) : sizes.chosen].reshape(len(REAL), -1).view(sizes.real)
    rows[ROW["applied"]] = 1
    # slots are those of the runs that there are: a stack may have fewer than the programs, which a longer one also uses
    of_positions = [
        _of_position(works[r], r, k, works[r].slot[k] * len(works) + r, shape, clients[r]) for r, k in source
    ]
    _fill(rows, real, "run", "time", of_positions)
    of_writes = [
        ((slot, r * shape.num_clients + one.client, r, one.version, one.steps), one.time)
        for r, one, slot in layout.slots.writes
    ]
    _fill(rows, real, "write_slot", "write_time", of_writes)
    weights = [clients[r].size.item(one.client) for r, one, _ in layout.slots.writes]
    real[REAL.index("write_weight"), : len(weights)] = weights
    columns = {"train_order": layout.dealt.train_order, "row": layout.dealt.row}
    if facts.grouped:
        closes = rows[ROW["closes"], : len(source)] != 0
        columns["group_end"] = group_end(layout, None if facts.every_closes else closes)
    for name, values in columns.items():
        rows[ROW[name], : len(values)] = values
    for name, bounds in (("ranks", layout.slots.ranks), ("write_bounds", layout.slots.write_bounds)):
        rows[ROW[name]] = bounds[-1]
        rows[ROW[name], : len(bounds)] = bounds
    for work, own in zip(works, layout.positions):
        for name, seen in work.seen.items():  # empty for runs that have gained nothing
            rows[sizes.chosen + sizes.probes.index(name), own[[work.at[number] for number in seen]]] = 1
    return rows


def _of_position(
    work: ExtensionWork, r: int, k: int, slot: int, shape: StackShape, clients: Clients
) -> tuple[tuple[int, ...], float]:
    """The entries of position ``k`` of run ``r``, which starts from ``slot``, in ``OF_POSITIONS``, and its time."""
    one, number, applied = work.jobs[k], work.arrival[k], work.applied[k]
    who, version = one.client, one.version
    closes, step, time = False, version, 0.0
    if number >= 0:
        closes, step, time = work.closes[number], work.step[number], work.time[number]
    of_data = clients.offset.item(who), clients.size.item(who)
    of_job = one.number, one.steps, slot, version
    of_upload = step - version, closes, one.corrupt and applied, clients.malicious.item(who), applied
    return (r, who, r * shape.num_clients + who, *of_data, *of_job, *of_upload), time


def _fill(
    rows: np.ndarray, real: np.ndarray, first: str, times: str, entries: Sequence[tuple[tuple[int, ...], float]]
) -> None:
    """Write entries into the columns from ``first`` on, and their times."""
    if entries:
        columns = np.array([each for each, _ in entries], np.int32).T
        rows[ROW[first] : ROW[first] + len(columns), : len(entries)] = columns
        real[REAL.index(times), : len(entries)] = [time for _, time in entries]
