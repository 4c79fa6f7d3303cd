"""Client data on disk: every batch of jobs is trained on a packed copy of its clients' examples."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from fedjax_async.data import Identity, pack, packed_offsets
from fedjax_async.engine.batches import Batch
from fedjax_async.engine.devices import to_devices
from fedjax_async.engine.layout import Layout
from fedjax_async.types import FederatedData


class Feed(NamedTuple):
    """Makes the packed copies, one per batch of jobs; all have the same number of rows."""

    data: FederatedData
    client: np.ndarray  # int32[E], whose job is trained at each position
    train_order: np.ndarray  # int32[E], positions, batch by batch
    offset: np.ndarray  # int32[E], where the data of each position begin in the copy of its batch
    rows: int  # of each copy
    x64: bool  # JAX keeps this setting per thread, and lanes are threads
    sharding: NamedSharding | None = None

    def batch(self, batch: Batch) -> dict[str, object]:
        """The copy for a batch, on the device: the tables ``x`` and ``y``."""
        positions = self.train_order[batch.first : batch.first + batch.jobs]
        x, y, _ = pack(self.data, self.client[positions], self.rows)
        with jax.enable_x64(self.x64):
            return to_devices({"x": x, "y": y}, self.sharding)

    def empty(self) -> dict[str, object]:
        """A copy of zeros and its ``order``, for compiling."""
        x, y = (np.zeros((self.rows, *pool.shape[1:]), pool.dtype) for pool in (self.data.x, self.data.y))
        return {"x": x, "y": y, "order": Identity((self.rows,))}


def make_feed(
    clients: Sequence[np.ndarray], layout: Layout, data: FederatedData, sharding: NamedSharding | None = None
) -> Feed:
    """Plan the copies. All are as long as the largest batch needs, rounded up, so that one program serves all.

    ``clients``: per run, whose job each arrival (without a server: each event) is.
    """
    client, dealt = np.concatenate(clients)[layout.source], layout.dealt
    offset = np.zeros(len(client), np.int32)
    longest = 1
    for batch in itertools.chain.from_iterable(dealt.turns):
        positions = dealt.train_order[batch.first : batch.first + batch.jobs]
        offset[positions] = packed_offsets(data, client[positions])
        longest = max(longest, int(data.size[client[positions]].sum(dtype=np.int64)))
    x64 = jnp.result_type(float) == jnp.float64
    return Feed(data, client, dealt.train_order, offset, 1 << (longest - 1).bit_length(), x64, sharding)
