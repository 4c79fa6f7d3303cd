"""Push-sum masses: how much of the weighted mean each node and each message carries.

Every node begins with mass 1. An event adds the masses of its inbox to the node's own, ``S = s + sum_j sigma_j``, mixes
each message with the coefficient ``sigma_j / S``, and splits S into equal parts for its receivers and itself.

Source: Kempe, Dobra and Gehrke, "Gossip-based computation of aggregate information" (2003); Assran et al., "Stochastic
gradient push for distributed deep learning" (2019).
"""

from __future__ import annotations

from array import array

import numpy as np

_CHUNK = 1 << 16  # events whose columns are lists at one time


def push_sum_masses(
    num_clients: int, client: np.ndarray, parts: np.ndarray, bounds: np.ndarray, source: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The mass with which each event mixes, S, and the part of it that each receiver and the node get; float64[E] both.

    Event e splits its mass into ``parts[e]`` and gets that of the events ``source[bounds[e]:bounds[e + 1]]``, which
    come before it.
    """
    masses = [1.0] * num_clients
    total, share = array("d"), array("d")
    for begin in range(0, len(client), _CHUNK):
        stop = min(begin + _CHUNK, len(client))
        sources = source[bounds[begin] : bounds[stop]].tolist()
        ends = (bounds[begin + 1 : stop + 1] - bounds[begin]).tolist()
        low = 0
        for node, into, high in zip(client[begin:stop].tolist(), parts[begin:stop].tolist(), ends):
            mass = masses[node]
            for k in range(low, high):
                mass += share[sources[k]]
            low = high
            total.append(mass)
            part = mass / into
            share.append(part)
            masses[node] = part
    return np.array(total), np.array(share)
