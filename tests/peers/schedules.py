"""Random plans with any sources and any coefficients. The clock's own plans are tested with the clock."""

from __future__ import annotations

import numpy as np

from fedjax_async.clock.peer_schedule import Delivery, PeerSchedule


def made_up(
    events: int = 200, nodes: int = 5, fragments: int = 1, seed: int = 0, *, steps: int = 2, first_alone: bool = False
) -> PeerSchedule:
    """``events`` events one after the other, each of a random node with up to three messages of earlier events.

    ``first_alone``: a node's first inbox has weights that sum to 1, so that nothing of its own model is left.
    """
    rng = np.random.default_rng(seed)
    owner = rng.integers(0, nodes, events)
    entries, bounds, fresh = [], [0], set()
    for e, who in enumerate(owner):
        others = [s for s in range(max(0, e - 3 * nodes), e) if owner[s] != who]
        sources = rng.choice(others, min(len(others), rng.integers(0, 4)), replace=False) if others else []
        chosen = [(int(s), int(rng.integers(fragments))) for s in sources]
        shares = rng.uniform(0.05, 1.0, len(chosen) + 1)
        if first_alone and who not in fresh:
            shares[-1] = 0
        if chosen:
            fresh.add(who)
        entries += [(s, f, share / shares.sum()) for (s, f), share in zip(chosen, shares)]
        bounds.append(len(entries))
    source, fragment, weight = (np.array(column) for column in zip(*entries))
    reader = np.repeat(np.arange(events), np.diff(bounds))
    number = np.array([np.count_nonzero(owner[:e] == owner[e]) for e in range(events)])
    order = np.argsort(source, kind="stable")
    return PeerSchedule(
        num_clients=nodes,
        client=owner.astype(np.int32),
        number=number.astype(np.int32),
        local_steps=np.full(events, steps, np.int32),
        start=np.arange(events, dtype=float),
        end=np.arange(events) + 0.5,
        mixed_at=np.arange(events, dtype=float),
        mass=rng.uniform(0.3, 0.6, events),
        inbox_bounds=np.array(bounds, np.int64),
        source=source.astype(np.int64),
        fragment=fragment.astype(np.int32),
        weight=weight,
        push_event=source[order].astype(np.int64),
        push_fragment=fragment[order].astype(np.int32),
        receiver=owner[reader[order]].astype(np.int32),
        sent_mass=np.full(len(order), 0.1),
        arrival=source[order] + 0.5,
        outcome=np.full(len(order), Delivery.MIXED, np.int8),
        mixed_by=reader[order],
        corrupt=np.zeros(len(order), np.bool_),
        joined=np.zeros(nodes),
        left=np.full(nodes, np.inf),
        fragments=fragments,
    )
