"""Runs whose plans grow, on the device: the stack of the newest extension, and the state between extensions.

Programs are compiled for one size of the tables and slots. If an extension needs more, the size grows to the next power
of two and the programs are compiled again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.base import tree
from fedjax_async.data.memmap import spans
from fedjax_async.engine import programs
from fedjax_async.engine.devices import from_bytes, to_devices
from fedjax_async.engine.growing_layout import Room
from fedjax_async.engine.growing_tables import GrowingTables, Sizes, clients_of, extension_rows
from fedjax_async.engine.kernels import Carry, ClientJobs, JobBuffers
from fedjax_async.engine.layout import Layout
from fedjax_async.engine.loop import advance
from fedjax_async.engine.members import Member
from fedjax_async.engine.scores import Scores
from fedjax_async.engine.stack import Stack
from fedjax_async.engine.stack_facts import StackFacts, following, power_above
from fedjax_async.engine.stacking import placed
from fedjax_async.engine.tables import StackShape, lasting_tables, padded_length
from fedjax_async.engine.trainers import Trainers
from fedjax_async.engine.watching import Watcher
from fedjax_async.engine.widths import ladder
from fedjax_async.types import Array, Tree

LEAST = 128  # the tables of an extension have room for at least so many positions and writes
BATCH = 256  # examples that are read at a time for the losses of clients


class Held(NamedTuple):
    """What the device holds between two extensions."""

    carry: Carry
    stores: tuple[JobBuffers, ...]  # trained uploads, one store a lane


class GrowingStack:
    """Runs on the device whose plans grow. Call :meth:`begin` first.

    ``facts``: as far as they are known. ``in_flight``: the most jobs that are expected to be under way at a time.
    ``least``: the least sizes of the tables. ``models``: whether to compile the program that copies a model.
    """

    def __init__(
        self, facts: StackFacts, room: Room, in_flight: int, least: StackShape, *, per_client: bool, models: bool
    ) -> None:
        self._facts, self._room, self._in_flight, self._least = facts, room, in_flight, least
        self._per_client, self._models = per_client, models
        self.stack: Any = None  # Stack, from the first extension on, as the next two
        self._trainers: Any = None  # Trainers
        self._carry: Any = None  # Carry
        self._shown: Array | None = None  # records and probes as bytes; None before the first arrival of an extension

    @property
    def held(self) -> Held:
        """What the device holds."""
        return Held(self._carry, tuple(self._trainers.buffers))

    # --- tables and programs ----------------------------------------------------------------------

    def begin(self, layout: Layout, members: Sequence[Member]) -> None:
        """Allocate for the first extension, compile, and send its first messages.

        ``members``: the runs, with what is applied of the extension, and their nominal schedules.
        """
        shape, facts = self._needed(layout)
        lasting, begins = lasting_tables(shape, members)
        self._lasting = to_devices(lasting, None)
        self._clients = clients_of([m.components.data for m in members], begins)
        tables = self._tables_of(layout, shape, facts)
        stack = placed(members, layout, shape, facts, per_client=self._per_client, tables=tables)
        self.stack = stack._replace(grows=True)
        self._compile()
        self._carry = self.stack.programs.start(self.stack.tables, self.stack.params)
        stores = None
        if not layout.whole:
            stores = programs.zeros(tree.frozen(self._store), None).lower().compile()
        self._trainers = Trainers(self._room.lanes, self.stack.programs, self.stack.tables, stores=stores)

    def _needed(self, layout: Layout) -> tuple[StackShape, StackFacts]:
        """The sizes and facts of the extensions so far and of this one."""
        least, facts = (self._least, self._facts) if self.stack is None else (self.stack.shape, self.stack.facts)
        spare = jax.default_backend() != "cpu"  # the last slot, for a message that is sent in vain
        needed = StackShape(
            runs=len(layout.schedules),
            num_clients=facts.num_clients,
            capacity=layout.capacity,
            positions=padded_length(max(len(layout.source), LEAST) + max(layout.capacity, self._room.rows), 1),
            slot_count=padded_length(layout.slots.count + spare, 1 << (self._in_flight + 1).bit_length()),
            writes=padded_length(len(layout.slots.writes), LEAST),
        )
        shape = StackShape(*map(max, zip(needed, least)))
        return shape, following(facts, layout, shape)

    def _tables_of(self, layout: Layout, shape: StackShape, facts: StackFacts) -> GrowingTables:
        """The tables of an extension, on the device."""
        names, real = tuple(name for name, _ in facts.probes), self._lasting["norm_limit"].dtype
        sizes = Sizes(shape.positions, shape.writes, names, real)
        rows = extension_rows(layout, sizes, shape, facts, self._clients)
        if jax.default_backend() != "cpu":  # to a CPU's programs a call brings them in less time
            rows = to_devices(rows, None)
        return GrowingTables(self._lasting, rows, sizes)

    def _compile(self) -> None:
        """All programs but those that train at once: see :meth:`_compile_widths`."""
        shapes = programs.shapes_of(self.stack)
        if not self.stack.layout.whole:

            def stored(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
                return jax.ShapeDtypeStruct((self._room.rows, *leaf.shape[1:]), leaf.dtype)

            self._store = jax.tree.map(stored, shapes.buffers)._replace(before=(), work=())
            shapes = shapes._replace(store=self._store)
        self._shapes = shapes
        compiled = programs.compile_programs(self.stack, shapes, models=self._models)
        self.stack = self.stack._replace(programs=compiled._replace(receive=partial(self._receive, compiled.receive)))

    def _receive(
        self, receive: Callable[..., tuple[Carry, tuple[Array, Array]]], *given: object
    ) -> tuple[Carry, Array]:
        """Call the program that receives, and keep what it shows."""
        carry, (rejected, self._shown) = receive(*given)
        return carry, rejected

    def _compile_widths(self) -> None:
        """The widths of batches that no program has yet."""
        batches = [batch for turn in self.stack.layout.dealt.turns for batch in turn]
        widths = {segment.width for batch in batches for segment in batch.segments} - self.stack.programs.train.keys()
        kind, batching = ClientJobs(self.stack.members[0].components.client), self._room.batching
        if widths:
            given = self.stack.tables, self._shapes.carry, self._shapes.buffers
            self.stack.programs.train.update(programs.compiled_training(kind, sorted(widths), batching, *given))

    def measure_up(self, layout: Layout) -> None:
        """Record what an extension needs. It is not executed: the checkpoint has its results."""
        shape, facts = self._needed(layout)
        self.stack = self.stack._replace(shape=shape, facts=facts)

    def fit(self, layout: Layout, members: Sequence[Member], held: Held | None = None) -> None:
        """Put an extension on the device.

        If it needs longer tables, more slots or more messages at a time, the programs are compiled again. ``held``: the
        state of a checkpoint that was taken after this extension, and after those given to :meth:`measure_up`.
        """
        shape, facts, before = *self._needed(layout), self.stack
        self.stack = before._replace(shape=shape, facts=facts)
        if held is not None:
            self._carry, stores = to_devices(held, None)
            self._trainers.go_on(stores)
        elif shape != before.shape:
            longer = {"slots": shape.slot_count, "records": shape.positions, "probes": shape.positions}
            lengthened = {name: _longer(getattr(self._carry, name), length) for name, length in longer.items()}
            self._carry = self._carry._replace(**lengthened)
        self._put(layout, members)
        if held is not None or (shape, facts) != (before.shape, before.facts):
            self._compile()

    def _put(self, layout: Layout, members: Sequence[Member]) -> None:
        """Move the tables of an extension to the device."""
        tables = self._tables_of(layout, self.stack.shape, self.stack.facts)
        self.stack = self.stack._replace(layout=layout, members=members, tables=tables)

    # --- calls ------------------------------------------------------------------------------------

    def execute(
        self, scores: Scores, watcher: Watcher, on_bad: str, *, sends: bool
    ) -> tuple[dict[str, np.ndarray], Mapping[str, dict[str, np.ndarray]]]:
        """Train, receive and evaluate the extension that was put.

        Waits for what is recorded, and returns it: the columns ``records`` and ``probes`` of the carry, on the host.
        ``sends``: whether the messages that are due before the first position are still to be sent.
        """
        self._compile_widths()
        self._shown = None
        stack: Stack = self.stack
        self._trainers.on(stack.programs, stack.tables)
        evaluate = stack.evaluator(watcher, self._trainers)
        carry = self._sent(self._carry) if sends else self._carry
        scores.evaluate(0, partial(evaluate, carry))
        self._carry = advance(stack, evaluate, carry, self._trainers, scores, watcher, on_bad=on_bad)
        found: tuple[dict[str, np.ndarray], Mapping[str, dict[str, np.ndarray]]] = from_bytes(
            self._shown, (self._shapes.carry.records, self._shapes.carry.probes)
        )
        return found

    def _sent(self, carry: Carry) -> Carry:
        due, facts = self.stack.layout.slots.write_bounds[1:2], self.stack.facts
        if not due[0]:
            return carry
        known = None if facts.messages is None else power_above(due)
        sent: Carry = programs.send(self.stack.members[0].components.rule, facts, known)(self.stack.tables, carry)
        return sent

    def losses(self, run: int, clients: np.ndarray) -> np.ndarray:
        """The mean loss of a run's model on each client's examples; float64, one for each of ``clients``."""
        components = self.stack.members[run].components
        data = components.data
        offset, size = (column[clients].astype(np.int64) for column in (data.offset, data.size))
        needed = -(-max(int(size.sum()), 1) // BATCH)
        padded = next(n for n in ladder(2 * needed) if n >= needed)  # few lengths, so few programs
        rows = np.zeros(padded * BATCH, np.int32)
        rows[: size.sum()] = data.order[spans(offset, size)]
        measure = programs.losses(components.model, components.rule)
        found = measure(self.stack.tables, self._carry.server, np.int32(run), rows.reshape(-1, BATCH))
        each = np.asarray(found, np.float64).reshape(-1)
        owner = np.repeat(np.arange(len(size)), size)
        total = np.bincount(owner, each[: len(owner)], minlength=len(size))
        return np.divide(total, size, out=np.full(len(size), np.nan), where=size > 0)

    def close(self) -> None:
        """End the host threads."""
        if self._trainers is not None:
            self._trainers.close()


def _longer(table: Tree, length: int) -> Tree:
    """The table padded with rows of zeros to ``length``."""
    return jax.tree.map(
        lambda leaf: jnp.concatenate([leaf, jnp.zeros((length - len(leaf), *leaf.shape[1:]), leaf.dtype)]), table
    )
