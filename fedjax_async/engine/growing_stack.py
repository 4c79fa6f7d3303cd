"""An adaptive run on the device: tables of an extension, compiled programs, and the state between extensions.

Programs are compiled for one size of the tables and slots. If an extension needs more, the size grows to the next power
of two and the programs are compiled again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.data.memmap import spans
from fedjax_async.engine import programs
from fedjax_async.engine.batches import Batch, Lanes
from fedjax_async.engine.devices import to_devices, together
from fedjax_async.engine.evaluation import differs
from fedjax_async.engine.extension import ExtensionWork
from fedjax_async.engine.kernels import Carry, ClientJobs, JobBuffers
from fedjax_async.engine.layout import Layout
from fedjax_async.engine.measures import Inputs, inputs_of
from fedjax_async.engine.outset import Outset
from fedjax_async.engine.probes import Probes
from fedjax_async.engine.scoring import Measuring, evaluated
from fedjax_async.engine.stack import Member, Stack, measured
from fedjax_async.engine.stack_facts import StackFacts, following, power_above
from fedjax_async.engine.stacking import held_out
from fedjax_async.engine.tables import DeviceTables, StackShape, event_columns, make_tables, padded_length
from fedjax_async.engine.trainers import Trainers
from fedjax_async.engine.widths import ladder
from fedjax_async.types import Tree

LEAST = 128  # the tables of an extension have room for at least so many positions and writes
BATCH = 256  # examples that are read at a time for the losses of clients


class Held(NamedTuple):
    """What the device holds between two extensions."""

    carry: Carry
    stores: tuple[JobBuffers, ...]  # trained uploads, one store a lane


class GrowingStack:
    """A run on the device whose plan grows.

    ``rows``: rows of the store of each lane. ``models``: whether to compile the program that copies the model. Call
    :meth:`begin` first.
    """

    def __init__(self, outset: Outset, member: Member, facts: StackFacts, lanes: int, rows: int, models: bool) -> None:
        self._o, self._member, self._facts = outset, member, facts
        self._lanes, self._rows, self._models = lanes, rows, models
        self._trainers: Any = None  # Trainers, once programs are compiled
        self._shape: Any = None  # StackShape, from the first extension on
        self.stack: Any = None
        self.tables: Any = None
        self.held: Any = None

    # --- tables and programs ----------------------------------------------------------------------

    def begin(self, work: ExtensionWork, probes: Probes) -> None:
        """Allocate for the first extension, compile, and send its first messages; ``probes``: see :meth:`put`."""
        o, data = self._o, self._o.components.data
        shape = self._shape = self._needed(work)
        self._facts = following(self._facts, work.layout)
        given = ([data], [o.key], [o.components.hyper], [o.norm_limit], [work.applied], [probes])
        tables = make_tables(work.layout, shape, *given, every_closes=self._facts.every_closes)
        totals = {"updates": o.facts.updates, "server_steps": o.facts.server_steps}
        self.tables = tables._replace(**to_devices({n: np.array([v], np.int32) for n, v in totals.items()}, None))
        own = o.per_client and differs(o.components, o.params)
        tests = held_out([self._member], per_client=o.per_client, own=own, sharding=None)
        inputs: list[Inputs | None] = [None]
        if o.measures.wants_anything():
            inputs = to_devices(inputs_of([data], [o.nominal], [o.measures], o.per_client), None)
        uncompiled: Any = None
        params = to_devices(o.params, None)
        parts = ([self._member], work.layout, shape, self.tables, params, tests, uncompiled)
        self.stack = Stack(*parts, num_bytes=0, inputs=inputs)
        self._compile(work)
        carry = self.stack.programs.start(self.tables, params)
        self.held = Held(carry, tuple(_zeros(self._store) for _ in range(self._lanes)))

    def _compile(self, work: ExtensionWork) -> None:
        o, stack, layout, shape = self._o, self.stack, work.layout, self._shape
        parts = (o.components.rule, o.components.client)
        shapes = programs.shapes_of(*parts, layout, shape, self.tables, stack.params, self._facts)
        scratch = self._store = shapes.buffers
        if not layout.whole:  # vmap writes its i-th job to row i of the buffers, so the results are copied to the store

            def stored(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
                return jax.ShapeDtypeStruct((self._rows, *leaf.shape[1:]), leaf.dtype)

            self._store = jax.tree.map(stored, scratch)._replace(before=(), work=())
        y = o.components.data.test_y
        own, labels = stack.tests[0][3] is not None, bool(np.issubdtype(y.dtype, np.integer))
        compiled = programs.compile_programs(
            *parts,
            o.components.model,
            layout,
            shape,
            self.tables,
            stack.params,
            stack.tests[0],
            stack.inputs[0],
            shapes._replace(buffers=self._store),
            what=Measuring(o.measures._replace(training=None), own, o.per_client, labels, len(y), 1),
            facts=self._facts,
            models=self._models,
        )
        self.stack = stack._replace(programs=compiled, shape=shape)

        def train(width: int, tables: DeviceTables, carry: Carry, buffers: JobBuffers, span: np.ndarray) -> JobBuffers:
            return compiled.train[width](tables, carry.readable, buffers, span)

        self.close()
        empty = [np.zeros(0, np.int32)] * 3
        every = Lanes(np.zeros(1), [[Batch(lane, 0, 0, []) for lane in range(self._lanes)]], *empty)
        self._trainers = Trainers(every, self.tables, train, lambda: _zeros(scratch))
        if self.held is not None and layout.whole:
            self._trainers.buffers = list(self.held.stores)

    def _needed(self, work: ExtensionWork) -> StackShape:
        layout = work.layout
        positions = padded_length(len(layout.run) + max(layout.capacity, self._rows), LEAST)
        writes = padded_length(len(layout.slots.write_slot), LEAST)
        spare = jax.default_backend() != "cpu"  # the last slot, for a message that is sent in vain
        slots = padded_length(layout.slots.count + spare, 1 << (self._o.in_flight + 1).bit_length())
        needed = StackShape(1, len(self._o.local_steps), layout.capacity, positions, slots, writes)
        return needed if self._shape is None else StackShape(*map(max, zip(needed, self._shape)))

    def measure_up(self, work: ExtensionWork) -> None:
        """Record what an extension needs. It is not executed: the checkpoint has its results."""
        self._shape = self._needed(work)
        self._facts = following(self._facts, work.layout)

    def take_over(self, held: Held, work: ExtensionWork, probes: Probes) -> None:
        """Go on from a checkpoint; ``held``: the state after the last extension given to :meth:`measure_up`."""
        self.held = to_devices(held, None)
        self.put(work, probes)
        self._compile(work)

    def fit(self, work: ExtensionWork, probes: Probes) -> None:
        """Put an extension on the device.

        If it needs longer tables, more slots or more messages at a time, the programs are compiled again.
        """
        needed, facts = self._needed(work), following(self._facts, work.layout)
        grows, self._facts = (needed, facts) != (self._shape, self._facts), facts
        if needed != self._shape:
            self._shape = needed
            carry, stores = self.held
            longer = {"slots": needed.slot_count, "records": needed.positions, "probes": needed.positions}
            carry = carry._replace(**{name: _longer(getattr(carry, name), length) for name, length in longer.items()})
            self.held = Held(carry, stores)
        self.put(work, probes)
        if grows:
            self._compile(work)

    def put(self, work: ExtensionWork, probes: Probes) -> None:
        """Move the tables of an extension to the device; ``probes``: their arrivals numbered within the extension."""
        columns = event_columns(
            work.layout,
            self._shape,
            [self._o.components.data],
            [work.applied],
            [probes],
            begins=[0],
            every_closes=self._facts.every_closes,
        )
        self.tables = self.tables._replace(**together(columns))
        if self._trainers is not None:
            self._trainers.on(self.tables)

    # --- calls ------------------------------------------------------------------------------------

    def send(self, work: ExtensionWork, carry: Carry) -> Carry:
        """Send the messages that are due before the first position."""
        known = None if self._facts.messages is None else power_above(work.layout.slots.write_bounds[1:2])
        sent: Carry = programs.send(self._o.components.rule, self._facts, known)(self.tables, carry)
        return sent

    def train(
        self, layout: Layout, turn: list[Batch], carry: Carry, stores: Sequence[JobBuffers]
    ) -> tuple[JobBuffers, ...]:
        """Train the batches of a turn; returns the stores with their uploads."""
        if layout.whole:  # the buffers of the lanes are the stores
            return tuple(self._trainers.train(turn, carry))
        compiled = self.stack.programs.train
        for width in {segment.width for batch in turn for segment in batch.segments} - compiled.keys():
            one = programs.train(ClientJobs(self._o.components.client), width, "vmap", None)
            span, buffers = np.zeros(4, np.int32), self._trainers.buffers[0]
            compiled[width] = one.lower(self.tables, carry.readable, buffers, span).compile()
        left, kept = self._trainers.train(turn, carry), list(stores)
        for batch in turn:
            rows = np.full(layout.capacity, self._rows, np.int32)
            rows[: batch.jobs] = layout.dealt.row[layout.dealt.train_order[batch.first : batch.first + batch.jobs]]
            kept[batch.lane] = programs.keep()(kept[batch.lane], left[batch.lane], rows)
        return tuple(kept)

    def evaluate(self, carry: Carry, now: tuple[float, int]) -> dict[str, Any]:
        """The scores at ``now`` (virtual time, server steps closed)."""
        stack, real = self.stack._replace(tables=self.tables), self.tables.time.dtype
        moment = np.asarray(now[0], real), np.asarray(now[1], np.int32)
        seen = evaluated(carry, stack.tests[0][3] is not None)
        found: dict[str, Any] = stack.programs.evaluate(self.tables, seen, np.int32(0), moment, *stack.tests[0])
        return found | measured(stack, carry, 0, moment)

    def losses(self, clients: np.ndarray) -> np.ndarray:
        """The mean loss of the current model on each client's examples; float64, one for each of ``clients``."""
        components, data = self._o.components, self._o.components.data
        offset, size = (column[clients].astype(np.int64) for column in (data.offset, data.size))
        needed = -(-max(int(size.sum()), 1) // BATCH)
        padded = next(n for n in ladder(2 * needed) if n >= needed)  # few lengths, so few programs
        rows = np.zeros(padded * BATCH, np.int32)
        rows[: size.sum()] = data.order[spans(offset, size)]
        measure = programs.losses(components.model, components.rule)
        each = np.asarray(measure(self.tables, self.held.carry.server, rows.reshape(-1, BATCH)), np.float64).reshape(-1)
        owner = np.repeat(np.arange(len(size)), size)
        total = np.bincount(owner, each[: len(owner)], minlength=len(size))
        return np.divide(total, size, out=np.full(len(size), np.nan), where=size > 0)

    def close(self) -> None:
        """End the host threads."""
        if self._trainers is not None:
            self._trainers.close()


def _zeros(shapes: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _longer(table: Tree, length: int) -> Tree:
    """The table padded with rows of zeros to ``length``."""
    return jax.tree.map(
        lambda leaf: jnp.concatenate([leaf, jnp.zeros((length - len(leaf), *leaf.shape[1:]), leaf.dtype)]), table
    )
