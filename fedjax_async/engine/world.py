"""The tables of one run that live on the device and never change: data, key and schedule."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.engine.plan import Plan
from fedjax_async.types import Array, ClientData, FederatedData, Key


class World(NamedTuple):
    """Read-only device tables. Entries beyond E are padding, so that runs share compiled programs."""

    key: Key
    x: Array  # [M, ...]
    y: Array  # [M, ...]
    order: Array  # int32[M]
    offset: Array  # int32[N]
    size: Array  # int32[N]
    # one entry an arrival, in order of application
    client: Array  # int32[E']
    number: Array  # int32[E']
    steps: Array  # int32[E']
    slot: Array  # int32[E']
    version: Array  # int32[E']
    staleness: Array  # int32[E']
    time: Array  # float[E']
    closes: Array  # bool[E']
    train_order: Array  # int32[E']
    row: Array  # int32[E']
    # messages to write at position p: write_bounds[p] .. write_bounds[p+1]-1
    write_bounds: Array  # int32[E' + 2]
    write_slot: Array  # int32[E'']
    write_client: Array  # int32[E'']


def padded_length(length: int, least: int = 4096) -> int:
    """The next power of two, at least ``least``: few distinct shapes, so runs share programs."""
    return max(least, 1 << max(length - 1, 0).bit_length())


def _padded(values: np.ndarray, length: int, dtype: Any, fill: Any = 0) -> np.ndarray:
    table = np.full(length, fill, dtype)
    table[: len(values)] = values
    return table


def make_world(plan: Plan, data: FederatedData, key: Key) -> World:
    """Move data and schedule to the device; one transfer each."""
    schedule, slots = plan.schedule, plan.slots
    length = padded_length(len(schedule.job) + plan.capacity)
    writes = padded_length(len(slots.write_slot))
    job = schedule.job
    time_dtype = jnp.result_type(float)

    def arrivals(values: np.ndarray, dtype: Any = np.int32) -> np.ndarray:
        return _padded(values, length, dtype)

    bounds = _padded(slots.write_bounds, length + 2, np.int32, fill=slots.write_bounds[-1])
    tables = {
        "x": data.x,
        "y": data.y,
        "order": data.order,
        "offset": data.offset,
        "size": data.size,
        "client": arrivals(schedule.client[job]),
        "number": arrivals(schedule.number[job]),
        "steps": arrivals(schedule.local_steps[job]),
        "slot": arrivals(slots.start_slot[job]),
        "version": arrivals(schedule.version[job]),
        "staleness": arrivals(schedule.staleness),
        "time": arrivals(schedule.time, time_dtype),
        "closes": arrivals(schedule.closes, np.bool_),
        "train_order": arrivals(plan.train_order),
        "row": arrivals(plan.row),
        "write_bounds": bounds,
        "write_slot": _padded(slots.write_slot, writes, np.int32),
        "write_client": _padded(slots.write_client, writes, np.int32),
    }
    return World(key=key, **jax.device_put(tables))


def client_data(world: World, client: Array) -> ClientData:
    """The view of ``client`` (a scalar, or an array for a batch of clients)."""
    return ClientData(world.x, world.y, world.order, world.offset[client], world.size[client])
