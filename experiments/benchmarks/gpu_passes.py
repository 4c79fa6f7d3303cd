"""How often the loops of the engine's programs run in a call, from what the call is given (``gpu_programs.py``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def span_of(given: Any) -> np.ndarray:
    """The last argument of a training or receiving program."""
    return np.asarray(given[-1])


def finishing(given: Any) -> float:
    """Passes of ``run_segment``'s last loop: halves of a batch that hold a job that ends."""
    tables, width, (low, jobs, _, last) = given[0], len(given[2].norm), span_of(given)
    steps = np.asarray(tables.steps)[np.asarray(tables.train_order)[low : low + width]]
    part = -(-width // 2)
    return -(-width // part) - int(np.sum(steps[:jobs] > last)) // part


def arriving(given: Any) -> float:
    """Positions, or ranks, that a call receives."""
    return float(np.diff(span_of(given)[:2])[0])


def lengths_of_groups(given: Any) -> np.ndarray:
    """How many arrivals of each group a call receives."""
    low, high = span_of(given)[:2]
    return np.unique(np.asarray(given[0].group_end)[low:high], return_counts=True)[1]


def groups(given: Any) -> float:
    """Groups of arrivals of which a call receives at least one."""
    return float(len(lengths_of_groups(given)))


def sent(given: Any) -> float:
    """Messages that are due after the positions that a call receives."""
    bounds, (low, high) = np.asarray(given[0].write_bounds), span_of(given)[:2]
    return float(bounds[high + 1] - bounds[low + 1])


def first_sent(given: Any) -> float:
    """Messages that are due before the first position."""
    return float(np.asarray(given[0].write_bounds)[1])


def longest_inbox(given: Any) -> float:
    """Entries of the longest inbox of a batch of nodes, whose inboxes are read side by side."""
    tables, (low, jobs, _, _) = given[0], span_of(given)
    at = np.asarray(tables.train_order)[low : low + jobs]
    bounds = np.asarray(tables.inbox_bounds)
    return float(np.max(bounds[at + 1] - bounds[at], initial=0))


def read_in_batches(given: Any) -> float:
    """Passes of ``local.part_mean`` over all clients of a call, or over its one part of validation examples."""
    sizes = np.asarray(given[-1] if isinstance(given[-1], np.ndarray) else given[-1].size)
    return float(np.sum(-(-sizes // 256)))


ITERATIONS = 30  # of a clustering: it ends when the centroids stay, which is not known here
# (program, loop) -> passes in one call, or, as a number, passes each time that the loop is reached
PASSES: Mapping[tuple[str, str], Callable[[Any], float] | int] = {
    ("train", "local steps"): lambda given: float(span_of(given)[3] - span_of(given)[2]),
    ("train", "finish"): finishing,
    ("train", "inbox"): longest_inbox,
    ("train", "clustering"): ITERATIONS,
    ("receive", "arrivals"): arriving,
    ("receive", "arrivals by 4"): lambda given: -(-arriving(given) // 4),
    ("receive", "groups"): groups,
    ("receive", "arrivals of a group by 4"): lambda given: float(np.sum(-(-lengths_of_groups(given) // 4))),
    ("receive", "ranks"): arriving,
    ("receive", "messages"): sent,
    ("receive", "messages of a rank"): sent,
    ("start", "messages"): first_sent,
    ("start", "clustering"): ITERATIONS,
    ("receive", "batches"): 1,  # the examples of a client, where there are few
    ("send", "messages"): first_sent,
    ("evaluate", "batches"): read_in_batches,
    ("losses", "batches"): read_in_batches,
    ("own", "batches"): 1,  # the tests of a node, where there are few
}
