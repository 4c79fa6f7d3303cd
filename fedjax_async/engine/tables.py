"""The tables of a stack of runs on the device, which never change: data, keys and plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from fedjax_async.engine.devices import to_devices
from fedjax_async.engine.layout import Layout
from fedjax_async.engine.members import Member
from fedjax_async.engine.peer_probes import chosen_events
from fedjax_async.engine.probes import held_out_rows, numbers_of
from fedjax_async.engine.streaming import Feed
from fedjax_async.peers.statistics import corrupt_entries, mass_after_mixing
from fedjax_async.types import Array, ClientData, DataParts, FederatedData, Key


class HeldOut(NamedTuple):
    """Examples that are only evaluated or probed, and the clients that hold them."""

    x: Array  # [T, ...], the test sets of all runs one after the other
    y: Array  # [T, ...]
    begin: Array  # int32[R], where the test set of each run begins
    test: tuple[Array, Array, Array]  # order (rows of x), offset[R * N], size[R * N]
    validation: tuple[Array, Array, Array]  # order (rows of the training pool), offset[R * N], size[R * N]


class DeviceTables(NamedTuple):
    """Read-only tables of R runs on the device. Entries beyond E are padding, so that runs share compiled programs.

    E' positions and E'' messages, both with padding.
    """

    key: Key  # [R]
    hyper: dict[str, Array]  # float[R] each
    norm_limit: Array  # float[R], uploads with a larger norm are rejected
    updates: Array  # int32[R], arrivals in total
    server_steps: Array  # int32[R], server steps in total
    x: Array  # [M, ...]
    y: Array  # [M, ...]
    order: Array  # int32[M]; those of several runs one after the other
    # one entry per position: an arrival of one of the runs, in order of application
    run: Array  # int32[E']
    client: Array  # int32[E']
    owner: Array  # int32[E']  run * N + client: its row in tables of clients
    offset: Array  # int32[E']  of the client's data
    size: Array  # int32[E']
    number: Array  # int32[E']
    steps: Array  # int32[E']
    slot: Array  # int32[E']  of the message that its job starts from
    version: Array  # int32[E']
    staleness: Array  # int32[E']
    time: Array  # float[E']
    closes: Array  # bool[E']
    # int32[E'], one past the last arrival of its group: after that one the server closes a step or sends messages,
    # between them it only receives
    group_end: Array
    corrupt: Array  # bool[E'], whether the upload is all NaN; false where it is not applied
    malicious: Array  # bool[E'], whether the arriving client attacks
    applied: Array  # bool[E'], false: the job is trained, but its upload never reaches the server
    train_order: Array  # int32[E'], positions, batch by batch
    row: Array  # int32[E'], in the buffers of its lane
    ranks: Array  # int32[E' + 2]: ranks[k] .. ranks[k+1]-1 are arrivals of different runs
    # the messages due after p arrivals: write_bounds[p] .. write_bounds[p+1]-1
    write_bounds: Array  # int32[E' + 2]
    write_slot: Array  # int32[E'']
    write_owner: Array  # int32[E'']
    write_run: Array  # int32[E'']
    write_time: Array  # float[E'']
    write_version: Array  # int32[E'']
    write_steps: Array  # int32[E'']
    write_weight: Array  # float[E'']
    chosen: dict[str, Array]  # bool[E'] per probe: the arrivals that it sees
    held: HeldOut | tuple[()]  # () where there are no probes


class StackShape(NamedTuple):
    """Sizes of a stack's tables. Stacks of equal shape share compiled programs."""

    runs: int
    num_clients: int
    capacity: int  # rows of a lane's buffers
    positions: int
    slot_count: int
    writes: int = 0  # messages of a server; 0 without one
    entries: int = 0  # of the inboxes of nodes; 0 with a server, as the next
    fragments: int = 0  # of a node's message
    rows: int = 0  # of ``order``, at least


def padded_length(length: int, least: int = 4096) -> int:
    """The next power of two, at least ``least``: few distinct shapes, so runs share programs."""
    return max(least, 1 << max(length - 1, 0).bit_length())


def padded(values: np.ndarray, length: int, dtype: DTypeLike, fill: float = 0) -> np.ndarray:
    """``values``, extended with ``fill`` to ``length`` entries."""
    table = np.full(length, fill, dtype)
    table[: len(values)] = values
    return table


def pooled(arrays: Sequence[Any]) -> tuple[Any, list[int]]:
    """One array for all runs, and the row at which each run's part begins; an array that runs share is stored once."""
    if all(one is arrays[0] for one in arrays):
        return arrays[0], [0] * len(arrays)
    begins: dict[int, int] = {}
    distinct, total = [], 0
    for one in arrays:
        if id(one) not in begins:
            begins[id(one)] = total
            distinct.append(one)
            total += len(one)
    return np.concatenate(distinct), [begins[id(one)] for one in arrays]


def rows_of(data: Sequence[FederatedData]) -> int:
    """The rows of the pooled ``order`` of several runs; 0 for streamed data, which have none on the device."""
    return 0 if data[0].streamed else len(pooled([one.order for one in data])[0])


class Stacked(NamedTuple):
    """Puts values of jobs into the order of positions. ``source``: see ``Layout``; ``length``: with padding."""

    source: np.ndarray
    length: int

    def __call__(self, values: Sequence[np.ndarray], dtype: DTypeLike = np.int32) -> np.ndarray:
        """The column of ``values``, which are given run by run."""
        return padded(np.concatenate(values)[self.source], self.length, dtype)


def of_runs(shape: StackShape, members: Sequence[Member], feed: Feed | None) -> tuple[dict[str, object], list[int]]:
    """The tables of examples, keys and numbers of all runs, and where the clients' rows of each begin in ``order``.

    ``feed``: of streamed data, which are sent batch by batch.
    """
    data, hyper = [m.components.data for m in members], [m.components.hyper for m in members]
    order, begins = pooled([d.order for d in data])
    order = order if len(order) >= shape.rows else padded(order, shape.rows, order.dtype)
    found: dict[str, object] = {"x": data[0].x, "y": data[0].y, "order": order} if feed is None else feed.empty()
    real = jnp.result_type(float)

    def per_run(values: Sequence[float]) -> np.ndarray:
        return padded(np.asarray(values), shape.runs, real, fill=1)

    numbers = {name: per_run([h[name] for h in hyper]) for name in hyper[0]}
    found |= {"key": joined_keys([m.key for m in members], shape.runs), "hyper": numbers}
    found["norm_limit"] = per_run([m.norm_limit for m in members])
    return found, begins


def of_jobs(
    column: Stacked,
    shape: StackShape,
    layout: Layout,
    members: Sequence[Member],
    jobs: tuple[Sequence[np.ndarray], Sequence[np.ndarray], Sequence[np.ndarray]],
    begins: Sequence[int],
    feed: Feed | None,
) -> dict[str, np.ndarray]:
    """The columns of jobs that local training reads, one entry per position.

    ``jobs``: client, number and local steps of the jobs of each run; ``begins``: see :func:`of_runs`.
    """
    client, number, steps = jobs
    data, length = [m.components.data for m in members], shape.positions
    offset = column([d.offset[c].astype(np.int64) + first for d, c, first in zip(data, client, begins)])
    return {
        "run": padded(layout.run, length, np.int32),
        "client": column(client),
        "owner": column([np.int64(r) * shape.num_clients + c for r, c in enumerate(client)]),
        "offset": offset if feed is None else padded(feed.offset, length, np.int32),
        "size": column([d.size[c] for d, c in zip(data, client)]),
        "number": column(number),
        "steps": column(steps),
        "train_order": padded(layout.dealt.train_order, length, np.int32),
        "row": padded(layout.dealt.row, length, np.int32),
    }


def held_out_tables(members: Sequence[Member], shape: StackShape) -> HeldOut:
    """The held-out examples of all runs."""
    data = [m.components.data for m in members]
    x, begins = pooled([d.test_x for d in data])
    y, _ = pooled([d.test_y for d in data])

    def parts(kind: str, shift: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        each = [held_out_rows(d, kind) for d in data]
        order, first = pooled([part[0] + np.int32(by) if by else part[0] for part, by in zip(each, shift)])
        offset = np.concatenate([part[1] + np.int32(by) for part, by in zip(each, first)])
        size, total = np.concatenate([part[2] for part in each]), shape.runs * shape.num_clients
        return order, padded(offset, total, np.int32), padded(size, total, np.int32)

    begin = padded(np.asarray(begins), shape.runs, np.int32)
    return HeldOut._make((x, y, begin, parts("test", begins), parts("validation", [0] * len(data))))


def lasting_tables(
    shape: StackShape, members: Sequence[Member], feed: Feed | None = None
) -> tuple[dict[str, object], list[int]]:
    """The tables without those of positions and messages, on the host; also the second result of :func:`of_runs`."""
    found, begins = of_runs(shape, members, feed)
    for name in ("updates", "server_steps"):
        found[name] = padded(np.array([getattr(m.facts, name) for m in members]), shape.runs, np.int32, fill=1)
    probed = any(m.probes for m in members)
    return found | {"held": held_out_tables(members, shape) if probed else ()}, begins


def joined_keys(keys: Sequence[Key], runs: int) -> Key:
    """The keys of all runs as one array [R]; the first one again for runs that do not exist.

    Joined on the host: ``jnp.stack`` would compile a program for each number of runs.
    """
    every = [jax.random.key_data(key) for key in [*keys, *[keys[0]] * (runs - len(keys))]]
    return jax.random.wrap_key_data(jax.device_put(np.stack(every)), impl=jax.random.key_impl(keys[0]))


def event_columns(
    layout: Layout, shape: StackShape, members: Sequence[Member], begins: Sequence[int], feed: Feed | None
) -> dict[str, object]:
    """The columns of the tables that follow from the schedules, one entry per position or message, on the host.

    ``begins``: per run, where its clients' rows begin in the pooled ``order``.
    """
    slots, real = layout.slots, jnp.result_type(float)
    column, data = Stacked(layout.source, shape.positions), [m.components.data for m in members]
    applied = [m.applied for m in members]

    def of_arrivals(name: str) -> list[np.ndarray]:
        return [getattr(s, name)[s.job] for s in layout.schedules]

    def of_writes(values: Sequence[np.ndarray], dtype: DTypeLike) -> np.ndarray:
        first_job = np.cumsum([0, *(len(one) for one in values[:-1])])
        return padded(np.concatenate(values)[first_job[slots.write_run] + slots.write_job], shape.writes, dtype)

    client = of_arrivals("client")
    jobs = client, of_arrivals("number"), of_arrivals("local_steps")
    return of_jobs(column, shape, layout, members, jobs, begins, feed) | {
        "slot": padded(slots.start_slot, shape.positions, np.int32),
        "version": column(of_arrivals("version")),
        "staleness": column([s.staleness for s in layout.schedules]),
        "time": column([s.time for s in layout.schedules], real),
        "closes": column([s.closes for s in layout.schedules], np.bool_),
        "group_end": padded(group_end(layout, closing(layout, members)), shape.positions, np.int32),
        "corrupt": column([s.corrupt[s.job] & one for s, one in zip(layout.schedules, applied)], np.bool_),
        "malicious": column([malicious(d)[c] for d, c in zip(data, client)], np.bool_),
        "applied": padded(np.concatenate(applied)[layout.source], shape.positions, np.bool_, fill=True),
        "ranks": padded(slots.ranks, shape.positions + 2, np.int32, fill=slots.ranks[-1]),
        "write_bounds": padded(slots.write_bounds, shape.positions + 2, np.int32, fill=slots.write_bounds[-1]),
        "write_slot": padded(slots.write_slot, shape.writes, np.int32),
        "write_owner": padded(slots.write_run * shape.num_clients + slots.write_client, shape.writes, np.int32),
        "write_run": padded(slots.write_run, shape.writes, np.int32),
        "write_time": of_writes([s.dispatch_time for s in layout.schedules], real),
        "write_version": of_writes([s.version for s in layout.schedules], np.int32),
        "write_steps": of_writes([s.local_steps for s in layout.schedules], np.int32),
        "write_weight": of_writes([d.size[s.client] for d, s in zip(data, layout.schedules)], real),
        "chosen": {name: column(_chosen(name, members), np.bool_) for name in members[0].probes},
    }


def _chosen(name: str, members: Sequence[Member]) -> list[np.ndarray]:
    """Which arrivals a probe sees; per run, bool[E_r]."""
    marked = [np.zeros(len(m.applied), np.bool_) for m in members]
    for row, m in zip(marked, members):
        position = np.flatnonzero(m.applied)
        row[position[numbers_of(m.probes[name], len(position))]] = True
    return marked


def closing(layout: Layout, members: Sequence[Member]) -> np.ndarray | None:
    """Which positions close their server step, bool[E]; None if every arrival of the runs does."""
    if all(m.facts.every_closes for m in members):
        return None
    return np.concatenate([m.schedule.closes & m.applied for m in members])[layout.source]


def group_end(layout: Layout, closes: np.ndarray | None) -> np.ndarray:
    """The column ``group_end`` of ``DeviceTables``, int64[E]; ``closes``: see :func:`closing`.

    If every arrival closes its step, only messages end a group.
    """
    ends = np.diff(layout.slots.write_bounds)[1:] > 0
    if closes is not None:
        ends |= closes
    ends[-1:] = True
    after = np.flatnonzero(ends) + 1
    return after[np.searchsorted(after, np.arange(len(ends)), "right")]


def malicious(data: FederatedData) -> np.ndarray:
    """Which clients attack; bool[N]."""
    return np.zeros(len(data.size), np.bool_) if data.malicious is None else data.malicious


def client_data(tables: Any, position: Array) -> ClientData:
    """The data of the client whose upload arrives at ``position`` (a scalar, or an array for a batch)."""
    return ClientData(tables.x, tables.y, tables.order, tables.offset[position], tables.size[position])


def held_parts(tables: Any, who: Array) -> tuple[ClientData, ClientData]:
    """The test and the validation part of a client; ``who``: its row in tables of clients."""
    held = tables.held

    def part(x: Array, y: Array, rows: tuple[Array, Array, Array]) -> ClientData:
        return ClientData(x, y, rows[0], rows[1][who], rows[2][who])

    return part(held.x, held.y, held.test), part(tables.x, tables.y, held.validation)


def parts_at(tables: Any, position: Array) -> DataParts:
    """The examples, held-out ones too, of the client whose job is at ``position``."""
    test, validation = held_parts(tables, tables.owner[position])
    return DataParts(client_data(tables, position), validation, test)


# --- runs without a server ----------------------------------------------------------------------------
class PeerTables(NamedTuple):
    """Read-only tables of R runs on the device. Entries beyond E and D are padding: runs share compiled programs.

    E' positions, D' inbox entries, F fragments, N nodes, M training examples, T test examples.
    """

    key: Key  # [R]
    hyper: dict[str, Array]  # float[R] each
    norm_limit: Array  # float[R], uploads with a larger norm are rejected
    x: Array  # [M, ...]
    y: Array  # [M, ...]
    order: Array  # int32[M]
    # one entry per position: an executed event of one of the runs, in order of execution
    run: Array  # int32[E']
    client: Array  # int32[E']
    owner: Array  # int32[E']  run * N + client: its row in tables of nodes
    number: Array  # int32[E']
    steps: Array  # int32[E']
    offset: Array  # int32[E']  of the client's data
    size: Array  # int32[E']
    mass: Array  # float[E']  see ``peers.statistics.mass_after_mixing``
    kept: Array  # float[E']  the node's part of it
    slot: Array  # int32[E', F]  where its messages are written; -1: nobody reads them
    train_order: Array  # int32[E']
    row: Array  # int32[E']
    # the inbox of position p: entries inbox_bounds[p] .. inbox_bounds[p+1]-1
    inbox_bounds: Array  # int32[E' + 1]
    inbox_slot: Array  # int32[D']
    inbox_weight: Array  # float[D']
    inbox_corrupt: Array  # bool[D']
    chosen: dict[str, Array]  # bool[E'] per probe: the events that it sees
    held: HeldOut


def make_peer_tables(
    layout: Layout, shape: StackShape, members: Sequence[Member], feed: Feed | None, sharding: NamedSharding | None
) -> PeerTables:
    """Move data and plans to the device. ``feed``: of streamed data, sent batch by batch."""
    schedules, source, real = layout.schedules, layout.source, jnp.result_type(float)
    column = Stacked(source, shape.positions)

    def of_entries(values: Sequence[np.ndarray], dtype: DTypeLike) -> np.ndarray:
        return padded(np.concatenate(values)[layout.slots.entry], shape.entries, dtype)

    slot = np.full((shape.positions, shape.fragments), -1, np.int32)
    slot[: len(source)] = layout.slots.slot
    jobs = [s.client for s in schedules], [s.number for s in schedules], [s.local_steps for s in schedules]
    found, begins = of_runs(shape, members, feed)
    found |= of_jobs(column, shape, layout, members, jobs, begins, feed)
    found |= {
        "mass": column([mass_after_mixing(s) for s in schedules], real),
        "kept": column([s.mass for s in schedules], real),
        "slot": slot,
        "inbox_bounds": padded(layout.slots.bounds, shape.positions + 1, np.int32, fill=layout.slots.bounds[-1]),
        "inbox_slot": padded(layout.slots.entry_slot, shape.entries, np.int32),
        "inbox_weight": of_entries([s.weight for s in schedules], real),
        "inbox_corrupt": of_entries([corrupt_entries(s) for s in schedules], np.bool_),
        "held": held_out_tables(members, shape),
        "chosen": {
            name: column([chosen_events(m.probes, m.schedule)[name] for m in members], np.bool_)
            for name in members[0].probes
        },
    }
    return PeerTables(**to_devices(found, sharding))
