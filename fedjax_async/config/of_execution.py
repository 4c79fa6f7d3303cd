"""The settings of the machine: they change how a run is computed, and up to rounding no result."""

from __future__ import annotations

import dataclasses
from typing import TypedDict

from fedjax_async.base import check
from fedjax_async.config.fields import MOST_LANES, known, one_of, setting, size, whole


@dataclasses.dataclass(frozen=True)
class OfExecution:
    """How it is computed."""

    seed: int = setting(
        0,
        "seed of all that is random: partition, delays, initial weights, minibatches... [0]",
        "seed",
        requires=whole(low=0, high=2**31 - 1),
    )
    engine: str = setting(
        "waves",
        "waves (jobs in batches) or reference (one event at a time, slow)",
        "compared",
        without="trajectory",
        requires=one_of("waves", "reference"),
    )
    max_width: int | None = setting(
        None, "most jobs in one batch [by backend]", "compared", without="reference trajectory", requires=check.whole
    )
    lanes: int | None = setting(
        None,
        "batches trained at a time, a thread each [one per CPU core]",
        "compared",
        without="reference sweep trajectory",
        requires=whole(high=MOST_LANES),
    )
    batching: str | None = setting(
        None,
        "how a batch is trained: vmap or loop [loop on a CPU, else vmap]",
        "compared",
        without="reference trajectory",
        requires=known,
        example="a text such as 'vmap'",
    )
    devices: int | None = setting(
        None,
        "devices that share the jobs of a batch [one]",
        "compared",
        without="reference sweep trajectory adaptive",
        requires=check.whole,
    )
    memory_limit: str | None = setting(
        None,
        "most device memory of a run, e.g. 4GB: batches shrink to fit",
        "compared",
        without="reference sweep trajectory adaptive",
        requires=size,
    )
    slots: str = setting(
        "full",
        "precision of the start models kept for clients: full or bfloat16",
        "compared",
        without="nodes trajectory",
        requires=known,
    )
    remat: bool = setting(
        False,
        "recompute activations instead of keeping them: less memory, more work; saves nothing in models of other "
        "layers than flax.linen's",
        "compared",
        without="own_client",
    )
    checkpoint: int | None = setting(
        None,
        "save a checkpoint every N updates (with --out)",
        "compared",
        without="reference sweep trajectory explain",
        requires=check.whole,
    )
    on_bad: str = setting(
        "reject",
        "what happens to a non-finite upload: reject (and count) or raise (an error)",
        "compared",
        without="trajectory",
        requires=one_of("reject", "raise"),
    )


class ExecutionKeywords(TypedDict, total=False):
    """The same as typed keywords."""

    seed: int
    engine: str
    max_width: int | None
    batching: str | None
    slots: str
    remat: bool
    on_bad: str


class AloneKeywords(TypedDict, total=False):
    """Not of ``sweep``, which decides them for all its runs together."""

    lanes: int | None
    devices: int | None
    memory_limit: str | None
    checkpoint: int | None
