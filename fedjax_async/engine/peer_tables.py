"""The tables of decentralised runs on the device, which never change: data, keys and plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from fedjax_async.engine.devices import to_devices
from fedjax_async.engine.peer_layout import PeerLayout, corrupt_entries
from fedjax_async.engine.peer_probes import chosen_events
from fedjax_async.engine.probes import Probes, held_out_rows
from fedjax_async.engine.streaming import Feed
from fedjax_async.engine.tables import joined_keys, padded, padded_length, pooled
from fedjax_async.engine.widths import ladder
from fedjax_async.peers.schedule import PeerSchedule
from fedjax_async.types import Array, FederatedData, Key

# The least number of slots, so that small runs of different methods share programs.
LEAST_SLOTS = 12


class HeldOut(NamedTuple):
    """Examples that are only evaluated, and the nodes that hold them."""

    x: Array  # [T, ...], the test sets of all runs one after the other
    y: Array  # [T, ...]
    begin: Array  # int32[R], where the test set of each run begins
    test: tuple[Array, Array, Array]  # order (rows of x), offset[R * N], size[R * N]
    validation: tuple[Array, Array, Array]  # order (rows of the training pool), offset[R * N], size[R * N]


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
    mass: Array  # float[E']  see _mass_after_mixing
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


class PeerShape(NamedTuple):
    """Sizes of the tables of a stack. Stacks of equal shape share compiled programs."""

    runs: int
    nodes: int
    capacity: int
    positions: int
    entries: int
    slot_count: int
    fragments: int
    rows: int = 0  # of ``order``, at least


def peer_shape(layout: PeerLayout) -> PeerShape:
    """The sizes that the layout's tables need, rounded up so that similar runs share programs."""
    slots = max(LEAST_SLOTS, layout.slot_count)
    return PeerShape(
        runs=len(layout.schedules),
        nodes=layout.schedules[0].num_clients,
        capacity=layout.capacity,
        positions=padded_length(len(layout.source) + layout.capacity),
        entries=padded_length(len(layout.inbox) + 1),
        slot_count=next(s for s in ladder(2 * slots) if s >= slots),
        fragments=layout.schedules[0].fragments,
    )


def make_peer_tables(
    layout: PeerLayout,
    shape: PeerShape,
    data: Sequence[FederatedData],
    keys: Sequence[Key],
    hyper: Sequence[Mapping[str, float]],
    norm_limit: Sequence[float],
    probes: Sequence[Probes],
    feed: Feed | None = None,
    sharding: NamedSharding | None = None,
) -> PeerTables:
    """Move data and plans to the device; one entry per run. ``feed``: of streamed data, sent batch by batch."""
    schedules, source, real = layout.schedules, layout.source, jnp.result_type(float)
    order, begins = pooled([d.order for d in data])
    order = order if len(order) >= shape.rows else padded(order, shape.rows, order.dtype)
    pool = {"x": data[0].x, "y": data[0].y, "order": order} if feed is None else feed.empty()

    def column(values: Sequence[np.ndarray], dtype: DTypeLike = np.int32) -> np.ndarray:
        return padded(np.concatenate(values)[source], shape.positions, dtype)

    def of_entries(values: Sequence[np.ndarray], dtype: DTypeLike) -> np.ndarray:
        return padded(np.concatenate(values)[layout.inbox], shape.entries, dtype)

    def per_run(values: Sequence[float], dtype: DTypeLike) -> np.ndarray:
        return padded(np.asarray(values), shape.runs, dtype, fill=1)

    slot = np.full((shape.positions, shape.fragments), -1, np.int32)
    slot[: len(source)] = layout.slot
    offset = column([d.offset[s.client] + begin for d, s, begin in zip(data, schedules, begins)])
    columns = {
        "hyper": {name: per_run([h[name] for h in hyper], real) for name in hyper[0]},
        "norm_limit": per_run(norm_limit, real),
        "run": padded(layout.run, shape.positions, np.int32),
        "client": column([s.client for s in schedules]),
        "owner": column([np.int64(r) * shape.nodes + s.client for r, s in enumerate(schedules)]),
        "number": column([s.number for s in schedules]),
        "steps": column([s.local_steps for s in schedules]),
        "offset": offset if feed is None else padded(feed.offset, shape.positions, np.int32),
        "size": column([d.size[s.client] for d, s in zip(data, schedules)]),
        "mass": column([_mass_after_mixing(s) for s in schedules], real),
        "slot": slot,
        "train_order": padded(layout.dealt.train_order, shape.positions, np.int32),
        "row": padded(layout.dealt.row, shape.positions, np.int32),
        "inbox_bounds": padded(layout.inbox_bounds, shape.positions + 1, np.int32, fill=layout.inbox_bounds[-1]),
        "inbox_slot": padded(layout.inbox_slot, shape.entries, np.int32),
        "inbox_weight": of_entries([s.weight for s in schedules], real),
        "inbox_corrupt": of_entries([corrupt_entries(s) for s in schedules], np.bool_),
        "held": _held_out(data, shape),
        "chosen": {
            name: column([chosen_events(p, s)[name] for p, s in zip(probes, schedules)], np.bool_) for name in probes[0]
        },
    }
    return PeerTables(**to_devices(columns | pool | {"key": joined_keys(keys, shape.runs)}, sharding))


def _mass_after_mixing(schedule: PeerSchedule) -> np.ndarray:
    """The mass of each event's node after mixing, before the push splits it; float64[E]."""
    sent = np.bincount(schedule.push_event, schedule.sent_mass, minlength=len(schedule.client))
    found: np.ndarray = schedule.mass + sent
    return found


def _held_out(data: Sequence[FederatedData], shape: PeerShape) -> HeldOut:
    """The held-out examples of all runs."""
    x, begins = pooled([d.test_x for d in data])
    y, _ = pooled([d.test_y for d in data])

    def parts(kind: str, shift: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        each = [held_out_rows(d, kind) for d in data]
        order, first = pooled([part[0] + np.int32(by) if by else part[0] for part, by in zip(each, shift)])
        offset = np.concatenate([part[1] + np.int32(by) for part, by in zip(each, first)])
        size, total = np.concatenate([part[2] for part in each]), shape.runs * shape.nodes
        return order, padded(offset, total, np.int32), padded(size, total, np.int32)

    begin = padded(np.asarray(begins), shape.runs, np.int32)
    return HeldOut._make((x, y, begin, parts("test", begins), parts("validation", [0] * len(data))))
