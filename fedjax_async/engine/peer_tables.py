"""The tables of decentralised runs on the device, which never change: data, keys and plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from fedjax_async.engine.devices import to_devices
from fedjax_async.engine.layout import Layout
from fedjax_async.engine.members import Member
from fedjax_async.engine.peer_probes import chosen_events
from fedjax_async.engine.streaming import Feed
from fedjax_async.engine.tables import (
    HeldOut,
    Stacked,
    StackShape,
    held_out_tables,
    of_jobs,
    of_runs,
    padded,
)
from fedjax_async.peers.statistics import corrupt_entries, mass_after_mixing
from fedjax_async.types import Array, Key


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
