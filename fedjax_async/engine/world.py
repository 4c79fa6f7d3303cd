"""The tables of a stack of runs that live on the device and never change: data, keys and schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedjax_async.clock import with_outcomes
from fedjax_async.engine.devices import place
from fedjax_async.engine.plan import Plan
from fedjax_async.engine.streaming import Feed
from fedjax_async.types import Array, ClientData, FederatedData, Key, Schedule


class World(NamedTuple):
    """Read-only device tables of R runs. Entries beyond E are padding, so that runs share compiled programs."""

    key: Key  # [R]
    hyper: dict[str, Array]  # float[R] each
    norm_limit: Array  # float[R], uploads with a larger norm are rejected
    updates: Array  # int32[R], arrivals in all
    server_steps: Array  # int32[R], server steps that will be closed
    x: Array  # [M, ...]
    y: Array  # [M, ...]
    order: Array  # int32[M], of several runs one after the other
    # one entry a position: an arrival of one of the runs, in order of application
    run: Array  # int32[E']
    client: Array  # int32[E']
    owner: Array  # int32[E']  run * N + client: its row in tables of clients
    offset: Array  # int32[E']  of the client's data
    size: Array  # int32[E']
    number: Array  # int32[E']
    steps: Array  # int32[E']
    slot: Array  # int32[E']
    version: Array  # int32[E']
    staleness: Array  # int32[E']
    time: Array  # float[E']
    closes: Array  # bool[E']
    corrupt: Array  # bool[E']
    applied: Array  # bool[E'], false: the job is trained, but its upload never reaches the server
    train_order: Array  # int32[E']
    row: Array  # int32[E']
    rounds: Array  # int32[E' + 2]: rounds[k] .. rounds[k+1]-1 are arrivals of different runs
    # messages to write at position p: write_bounds[p] .. write_bounds[p+1]-1
    write_bounds: Array  # int32[E' + 2]
    write_slot: Array  # int32[E'']
    write_owner: Array  # int32[E'']
    write_run: Array  # int32[E'']
    write_time: Array  # float[E'']
    write_version: Array  # int32[E'']
    write_steps: Array  # int32[E'']
    write_weight: Array  # float[E'']


class Shape(NamedTuple):
    """Sizes of a stack's tables. Stacks of equal shape share compiled programs."""

    runs: int
    num_clients: int
    capacity: int
    positions: int
    writes: int
    slots: int


def padded_length(length: int, least: int = 4096) -> int:
    """The next power of two, at least ``least``: few distinct shapes, so runs share programs."""
    return max(least, 1 << max(length - 1, 0).bit_length())


def _padded(values: np.ndarray, length: int, dtype: Any, fill: Any = 0) -> np.ndarray:
    table = np.full(length, fill, dtype)
    table[: len(values)] = values
    return table


def pooled(data: Sequence[FederatedData]) -> tuple[Any, list[int]]:
    """One ``order`` for all runs, and where each run's begins; a run's own where there is only one."""
    if all(one.order is data[0].order for one in data):
        return data[0].order, [0] * len(data)
    begins: dict[int, int] = {}
    orders, total = [], 0
    for one in data:
        if id(one.order) not in begins:
            begins[id(one.order)] = total
            orders.append(one.order)
            total += len(one.order)
    return np.concatenate(orders), [begins[id(one.order)] for one in data]


def make_world(
    plan: Plan,
    shape: Shape,
    data: Sequence[FederatedData],
    keys: Sequence[Key],
    hyper: Sequence[Mapping[str, float]],
    norm_limit: Sequence[float],
    applied: Sequence[np.ndarray],
    feed: Feed | None = None,
    sharding: Any = None,
) -> World:
    """Move data and schedules to the device; one transfer each.

    ``applied``: per run, which arrivals are; bool[E_r]. ``feed``: of data that are shipped batch by batch.
    """
    slots, real = plan.slots, jnp.result_type(float)
    order, begins = pooled(data)
    pool = {"x": data[0].x, "y": data[0].y, "order": order} if feed is None else feed.empty()
    first = np.repeat(np.asarray(begins, np.int64), [len(s.job) for s in plan.schedules])

    def column(values: Sequence[np.ndarray], dtype: Any = np.int32) -> np.ndarray:
        return _padded(np.concatenate(values)[plan.source], shape.positions, dtype)

    def of_jobs(name: str) -> list[np.ndarray]:
        return [getattr(s, name)[s.job] for s in plan.schedules]

    def per_run(values: Sequence[float], dtype: Any = real) -> np.ndarray:
        return _padded(np.asarray(values), shape.runs, dtype, fill=1)

    def of_writes(values: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
        first_job = np.cumsum([0, *(len(one) for one in values[:-1])])
        return _padded(np.concatenate(values)[first_job[slots.write_run] + slots.write_job], shape.writes, dtype)

    client = of_jobs("client")
    offset = column([d.offset[c] for d, c in zip(data, client)]).astype(np.int64)
    offset[: len(plan.run)] += first[plan.source]
    if feed is not None:
        offset = _padded(feed.offset, shape.positions, np.int64)
    owner = [np.int64(r) * shape.num_clients + c for r, c in enumerate(client)]
    tables = {
        "hyper": {name: per_run([h[name] for h in hyper]) for name in hyper[0]},
        "norm_limit": per_run(norm_limit),
        "updates": per_run([int(one.sum()) for one in applied], np.int32),
        "server_steps": per_run([int(s.closes.sum()) for s in plan.schedules], np.int32),
        "run": _padded(plan.run, shape.positions, np.int32),
        "client": column(client),
        "owner": column(owner),
        "offset": offset.astype(np.int32),
        "size": column([d.size[c] for d, c in zip(data, client)]),
        "number": column(of_jobs("number")),
        "steps": column(of_jobs("local_steps")),
        "slot": _padded(slots.start_slot, shape.positions, np.int32),
        "version": column(of_jobs("version")),
        "staleness": column([s.staleness for s in plan.schedules]),
        "time": column([s.time for s in plan.schedules], real),
        "closes": column([s.closes for s in plan.schedules], np.bool_),
        "corrupt": column([corrupt(s) for s in plan.schedules], np.bool_),
        "applied": _padded(np.concatenate(applied)[plan.source], shape.positions, np.bool_, fill=True),
        "train_order": _padded(plan.train_order, shape.positions, np.int32),
        "row": _padded(plan.row, shape.positions, np.int32),
        "rounds": _padded(plan.rounds, shape.positions + 2, np.int32, fill=plan.rounds[-1]),
        "write_bounds": _padded(slots.write_bounds, shape.positions + 2, np.int32, fill=slots.write_bounds[-1]),
        "write_slot": _padded(slots.write_slot, shape.writes, np.int32),
        "write_owner": _padded(slots.write_run * shape.num_clients + slots.write_client, shape.writes, np.int32),
        "write_run": _padded(slots.write_run, shape.writes, np.int32),
        "write_time": of_writes([s.dispatch_time for s in plan.schedules], real),
        "write_version": of_writes([s.version for s in plan.schedules], np.int32),
        "write_steps": of_writes([s.local_steps for s in plan.schedules], np.int32),
        "write_weight": of_writes([d.size[s.client] for d, s in zip(data, plan.schedules)], real),
    }
    spare = [keys[0]] * (shape.runs - len(keys))
    return World(**place(tables | pool | {"key": jnp.stack([*keys, *spare])}, sharding))


def corrupt(schedule: Schedule) -> np.ndarray:
    """Which arrivals bring a non-finite upload; bool[E]."""
    return with_outcomes(schedule).corrupt[schedule.job]


def client_data(world: World, position: Array) -> ClientData:
    """The data of the client that arrives at ``position`` (a scalar, or an array for a batch)."""
    return ClientData(world.x, world.y, world.order, world.offset[position], world.size[position])
