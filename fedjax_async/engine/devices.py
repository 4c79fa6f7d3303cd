"""Devices: the mesh that shards the jobs of a batch, and the size of device memory."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled

from fedjax_async.base import check, tree
from fedjax_async.clock.budget import host_memory
from fedjax_async.types import Array, Params, Tree

JOBS = "jobs"  # the only axis of the mesh
LONGEST = 200  # at most so many characters of the original message are quoted


def require_backend() -> None:
    """``ValueError`` unless JAX finds a device: the variable ``JAX_PLATFORMS`` may name a backend that is not here."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # an assertion where JAX knows the backend but has no plugin for it
        reason = str(error).partition("\n")[0].partition(" (set JAX_PLATFORMS")[0][:LONGEST] or "JAX found no device"
        platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
        allowed = f"a backend that works on this machine, such as cpu ({reason})"
        check.require(False, "JAX_PLATFORMS", platforms, allowed)


def make_mesh(devices: int | None) -> Mesh | None:
    """A mesh of the first ``devices`` devices; ``None`` for one device or ``devices`` None.

    With several processes (``jax.distributed``) the mesh has the devices of all of them. Every process must run the
    same program: each trains its share and keeps the whole server state. Raises ``ValueError`` if there are fewer
    devices.
    """
    check.whole("devices", 1 if devices is None else devices, high=len(jax.devices()))
    if devices is None or devices == 1:
        return None
    return Mesh(np.asarray(jax.devices()[:devices]), (JOBS,))


def everywhere(mesh: Mesh | None) -> NamedSharding | None:
    """The sharding of arrays that are replicated on every device; ``None`` for a single device."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def spread(mesh: Mesh | None) -> NamedSharding | None:
    """The sharding of arrays that are split over the devices along the first axis; ``None`` for a single device."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec(JOBS))


def to_devices(tree: object, sharding: NamedSharding | None) -> Any:
    """``jax.device_put``, also for devices of other processes; every process must pass the same values."""
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def one(leaf: Array) -> Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.jit(jax.random.wrap_key_data)(one(jax.random.key_data(leaf)))
        values = np.asarray(jnp.asarray(leaf))  # in JAX's dtype for it
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    return jax.tree.map(one, tree)


def as_bytes(tree: Tree) -> Array:
    """All arrays of a tree as one, one after the other, within a program: the host fetches them in one transfer."""

    def plain(leaf: Array) -> Array:
        if jnp.iscomplexobj(leaf):
            return jnp.stack([leaf.real, leaf.imag], axis=-1)
        return leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf

    leaves = map(plain, jax.tree.leaves(tree))
    return jnp.concatenate([jax.lax.bitcast_convert_type(leaf, jnp.uint8).reshape(-1) for leaf in leaves])


def from_bytes(joined: Array | None, like: Tree) -> Any:
    """What :func:`as_bytes` has joined, on the host; ``like``: arrays of the same shapes. Zeros for ``None``."""
    leaves, structure = jax.tree.flatten(like)
    held = (
        np.zeros(sum(leaf.size * leaf.dtype.itemsize for leaf in leaves), np.uint8)
        if joined is None
        else np.asarray(joined)
    )
    found, begin = [], 0
    for leaf in leaves:
        end = begin + leaf.size * leaf.dtype.itemsize
        found.append(held[begin:end].view(leaf.dtype).reshape(leaf.shape))
        begin = end
    return jax.tree.unflatten(structure, found)


def placed(shapes: Tree, sharding: NamedSharding | None) -> Tree:
    """The same shapes and dtypes with this sharding, to compile for."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def parse_size(field: str, text: str) -> int:
    """Bytes from text such as ``4GB``, ``512 MiB`` or ``2e9``; ``ValueError``, naming ``field``, for other text.

    >>> parse_size("memory_limit", "1.5GB"), parse_size("memory_limit", "2 KiB")
    (1500000000, 2048)
    """
    allowed = "a size such as 4GB, 512MiB or 2e9 (bytes)"
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\d+)?)\s*((?:[KMG]I?)?)B?\s*", str(text).upper().replace("E", "e"))
    check.require(found is not None, field, text, allowed)
    number, unit = found.groups() if found is not None else ("0", "")
    size = float(number) * _UNITS[unit]
    check.require(1 <= size < math.inf, field, text, allowed)
    return int(size)


def temporary_bytes(compiled: Compiled) -> int:
    """Bytes of temporary memory of one call of a compiled program; 0 where the backend does not say."""
    found = compiled.memory_analysis()
    return 0 if found is None else int(found.temp_size_in_bytes)


def device_memory() -> int:
    """Bytes of memory that JAX may use on the first device; 8 GiB where the backend does not say, as on a CPU."""
    statistics = jax.devices()[0].memory_stats() or {}
    return int(statistics.get("bytes_limit", 2**33))


def require_fits(model: str, params: Params) -> None:
    """Raise ``ValueError`` unless four copies of the params (arrays or their shapes) fit the first device's memory.

    Training needs at least four: the global model, a start model, the local model and its gradient.
    ``model``: its name, for the error.
    """
    on_host = jax.devices()[0].platform == "cpu"
    memory, size = host_memory() if on_host else device_memory(), tree.num_bytes(params)
    allowed = f"of at most a quarter of the device's {memory / 1e9:.3g} GB, not {size / 1e9:.3g} GB of parameters"
    check.require(4 * size <= memory, "model", model, allowed)


REMEDIES = (
    "use less with lanes = 1, remat, slots = 'bfloat16', or a smaller batch_size or max_width (jobs in a batch); "
    "with memory_limit, batches are chosen to fit, and a sweep trains fewer runs at a time"
)


@contextlib.contextmanager
def naming_remedies() -> Iterator[None]:
    """Turn an out-of-memory error of device or host into a ``MemoryError`` that names settings that need less."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        first = str(error).partition("\n")[0].rstrip(". ")
        if "RESOURCE_EXHAUSTED" not in first:
            raise
        raise MemoryError(f"device memory: exhausted ({first[:LONGEST]}); {REMEDIES}") from error
    except MemoryError as error:
        if "memory: exhausted" in str(error):  # by an inner call
            raise
        first = str(error).partition("\n")[0].rstrip(". ") or "no reason given"
        advice = "fewer updates, clients or evaluations need less"
        raise MemoryError(f"memory: exhausted ({first[:LONGEST]}); {advice}; {REMEDIES}") from error


class TooLarge(Exception):
    """Runs need more device memory than they may use.

    ``needed``: bytes, as far as they are known by then; ``capacity``: the most jobs that a lane trains at a time.
    """

    def __init__(self, needed: int, capacity: int) -> None:
        super().__init__(f"{needed} bytes")
        self.needed, self.capacity = needed, capacity
