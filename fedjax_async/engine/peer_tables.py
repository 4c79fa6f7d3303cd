"""The tables of a decentralised run on the device, which never change: data, key and plan."""

from __future__ import annotations

from collections.abc import Mapping
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
from fedjax_async.engine.tables import padded, padded_length
from fedjax_async.engine.widths import ladder
from fedjax_async.types import Array, FederatedData, Key

# The least number of slots, so that small runs of different methods share programs.
LEAST_SLOTS = 12


class HeldOut(NamedTuple):
    """Examples that are only evaluated, and the nodes that hold them."""

    x: Array  # [T, ...]
    y: Array  # [T, ...]
    test: tuple[Array, Array, Array]  # order (rows of x), offset[N], size[N]
    validation: tuple[Array, Array, Array]  # order (rows of the training pool), offset[N], size[N]


class PeerTables(NamedTuple):
    """Read-only tables on the device. Entries beyond E and D are padding, so that runs share compiled programs.

    E' positions, D' inbox entries, F fragments, N nodes, M training examples, T test examples.
    """

    key: Key  # [1]
    hyper: dict[str, Array]  # float[1] each
    norm_limit: Array  # float[], uploads with a larger norm are rejected
    x: Array  # [M, ...]
    y: Array  # [M, ...]
    order: Array  # int32[M]
    # one entry per position: an executed event, in order of execution
    client: Array  # int32[E']
    number: Array  # int32[E']
    steps: Array  # int32[E']
    offset: Array  # int32[E']  of the client's data
    size: Array  # int32[E']
    mass: Array  # float[E']  of its node after mixing, before the push splits it
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
    """Sizes of a run's tables. Runs of equal shape share compiled programs."""

    nodes: int
    capacity: int
    positions: int
    entries: int
    slot_count: int
    fragments: int


def peer_shape(layout: PeerLayout) -> PeerShape:
    """The sizes that the layout's tables need, rounded up so that similar runs share programs."""
    slots = max(LEAST_SLOTS, layout.slot_count)
    return PeerShape(
        nodes=layout.schedule.num_clients,
        capacity=layout.capacity,
        positions=padded_length(len(layout.order) + layout.capacity),
        entries=padded_length(len(layout.inbox) + 1),
        slot_count=next(s for s in ladder(2 * slots) if s >= slots),
        fragments=layout.schedule.fragments,
    )


def make_peer_tables(
    layout: PeerLayout,
    shape: PeerShape,
    data: FederatedData,
    key: Key,
    hyper: Mapping[str, float],
    norm_limit: float,
    probes: Probes,
    feed: Feed | None = None,
    sharding: NamedSharding | None = None,
) -> PeerTables:
    """Move data and plan to the device. ``feed``: of streamed data, which are sent batch by batch."""
    schedule, order, real = layout.schedule, layout.order, jnp.result_type(float)
    client = schedule.client[order]
    pool = {"x": data.x, "y": data.y, "order": data.order} if feed is None else feed.empty()

    def column(values: np.ndarray, dtype: DTypeLike = np.int32) -> np.ndarray:
        return padded(values, shape.positions, dtype)

    def of_entries(values: np.ndarray, dtype: DTypeLike) -> np.ndarray:
        return padded(values, shape.entries, dtype)

    sent = np.bincount(schedule.push_event, schedule.sent_mass, minlength=len(schedule.client))
    slot = np.full((shape.positions, shape.fragments), -1, np.int32)
    slot[: len(order)] = layout.slot
    columns = {
        "hyper": {name: np.full(1, value, real) for name, value in hyper.items()},
        "norm_limit": np.asarray(norm_limit, real),
        "client": column(client),
        "number": column(schedule.number[order]),
        "steps": column(schedule.local_steps[order]),
        "offset": column(data.offset[client] if feed is None else feed.offset),
        "size": column(data.size[client]),
        "mass": column((schedule.mass + sent)[order], real),
        "slot": slot,
        "train_order": column(layout.dealt.train_order),
        "row": column(layout.dealt.row),
        "inbox_bounds": padded(layout.inbox_bounds, shape.positions + 1, np.int32, fill=layout.inbox_bounds[-1]),
        "inbox_slot": of_entries(layout.inbox_slot, np.int32),
        "inbox_weight": of_entries(schedule.weight[layout.inbox], real),
        "inbox_corrupt": of_entries(corrupt_entries(schedule)[layout.inbox], np.bool_),
        "held": HeldOut._make(
            (data.test_x, data.test_y, held_out_rows(data, "test"), held_out_rows(data, "validation"))
        ),
        "chosen": {name: column(seen[order], np.bool_) for name, seen in chosen_events(probes, schedule).items()},
    }
    return PeerTables(**to_devices(columns | pool | {"key": key[None]}, sharding))
