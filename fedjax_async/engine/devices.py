"""Several devices, of one process or of many: the mesh over which the jobs of a batch are spread."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_async import check

JOBS = "jobs"  # the only axis


def make_mesh(devices: int | None) -> Mesh | None:
    """A mesh of ``devices`` devices; ``None`` for one device.

    With several processes (``jax.distributed``) it holds the devices of all of them, and every process
    must run the same program: each trains its share and keeps the whole server state.
    """
    check.whole("devices", 1 if devices is None else devices, high=len(jax.devices()))
    if devices is None or devices == 1:
        return None
    return Mesh(np.asarray(jax.devices()[:devices]), (JOBS,))


def everywhere(mesh: Mesh | None) -> NamedSharding | None:
    """The sharding of what every device holds; ``None`` for a single device."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def spread(mesh: Mesh | None) -> NamedSharding | None:
    """The sharding of what is divided by leading rows among the devices."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec(JOBS))


def place(tree: Any, sharding: NamedSharding | None) -> Any:
    """``jax.device_put``, also onto devices that belong to other processes, which put the same values."""
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def one(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.jit(jax.random.wrap_key_data)(one(jax.random.key_data(leaf)))
        values = np.asarray(jnp.asarray(leaf))  # in the dtype that JAX keeps it in
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    return jax.tree.map(one, tree)
