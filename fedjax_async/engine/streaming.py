"""Client data that stay on disk: every batch of jobs is trained on a packed copy of its clients' examples."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.data import Identity, pack, packed_offsets
from fedjax_async.engine.devices import place
from fedjax_async.engine.plan import Plan
from fedjax_async.types import FederatedData


class Feed(NamedTuple):
    """Where each position's data lie in its batch's copy, and how long a copy is."""

    data: FederatedData
    client: np.ndarray  # int32[E]
    offset: np.ndarray  # int32[E]
    rows: int
    x64: bool  # JAX keeps this a setting of each thread, and lanes have their own
    sharding: Any = None

    def batch(self, low: int, high: int) -> dict[str, Any]:
        """The tables of the batch of positions ``low .. high-1``, on the device."""
        x, y, _ = pack(self.data, self.client[low:high], self.rows)
        with jax.enable_x64(self.x64):
            return place({"x": x, "y": y}, self.sharding)

    def empty(self) -> dict[str, Any]:
        """Tables of the same shapes before there is a batch."""
        x, y = (np.zeros((self.rows, *pool.shape[1:]), pool.dtype) for pool in (self.data.x, self.data.y))
        return {"x": x, "y": y, "order": Identity((self.rows,))}


def make_feed(plan: Plan, data: FederatedData, sharding: Any = None) -> Feed:
    """Plan the copies: as long as the longest batch needs, so that one program serves all."""
    client = np.concatenate([s.client[s.job] for s in plan.schedules])[plan.source]
    offset = np.zeros(len(client), np.int32)
    longest = 1
    for low, high in itertools.pairwise(plan.bounds.tolist()):
        offset[low:high] = packed_offsets(data, client[low:high])
        longest = max(longest, int(data.size[client[low:high]].sum(dtype=np.int64)))
    x64 = jnp.result_type(float) == jnp.float64
    return Feed(data, client, offset, 1 << (longest - 1).bit_length(), x64, sharding)
