"""JAX's own settings that change the numbers of a run: recorded with it, compared when it is continued or read."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp

DRAWS = ("jax_default_prng_impl", "jax_threefry_partitionable", "jax_random_seed_offset")
PRECISION = "jax_default_matmul_precision"


def numerics() -> dict[str, Any]:
    """What decides which random numbers are drawn and how wide arrays are: under another value a run has others."""
    wide = jnp.result_type(float) == jnp.float64
    return {"jax_enable_x64": wide} | {name: getattr(jax.config, name) for name in DRAWS}


def rounding() -> dict[str, Any]:
    """What decides how sums and products are rounded: under another value a run has the same numbers to rounding."""
    flags = {flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith("--xla_dump")}
    precision = getattr(jax.config, PRECISION)
    return {PRECISION: None if precision is None else str(precision), "XLA_FLAGS": " ".join(sorted(flags))}
