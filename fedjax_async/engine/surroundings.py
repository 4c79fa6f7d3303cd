"""With what a run is computed, recorded with it: versions, device, cores, and JAX's own settings that change numbers.

They are compared when the run is continued or read: ``checkpoint.py`` and ``results.provenance``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from importlib import metadata

import jax
import jax.numpy as jnp

PACKAGES = ("fedjax-async", "jax", "jaxlib", "numpy")  # that compute numbers
DRAWS = ("jax_default_prng_impl", "jax_threefry_partitionable", "jax_random_seed_offset")
PRECISION = "jax_default_matmul_precision"


def package_versions(names: Iterable[str]) -> dict[str, str | None]:
    """Package -> its version; None for one that is not installed, such as this one where it runs from source."""
    return {name: _version(name) for name in names}


@functools.cache  # each reads and parses a file, and every run and folder asks for all of them
def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def kind_of_device() -> dict[str, str]:
    """Platform and model of the first device."""
    device = jax.devices()[0]
    return {"backend": device.platform, "device": device.device_kind}


def surroundings() -> dict[str, str | int]:
    """Versions, device and cores. A resumed run is exact only if these are the same as at its start."""
    found = {name: version for name, version in package_versions(PACKAGES).items() if version}
    # the number of cores decides how a wave is cut into batches
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {**found, **kind_of_device(), "cores": cores}


def numerics() -> dict[str, str | int | None]:
    """What decides which random numbers are drawn and how wide arrays are: under another value a run has others."""
    wide = jnp.result_type(float) == jnp.float64
    return {"jax_enable_x64": wide} | {name: getattr(jax.config, name) for name in DRAWS}


def rounding() -> dict[str, str | int | None]:
    """What decides how sums and products are rounded: under another value a run has the same numbers to rounding."""
    flags = {flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith("--xla_dump")}
    precision = getattr(jax.config, PRECISION)
    return {PRECISION: None if precision is None else str(precision), "XLA_FLAGS": " ".join(sorted(flags))}
