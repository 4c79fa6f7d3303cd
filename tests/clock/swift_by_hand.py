"""SWIFT's coefficients, found by nodes that exchange messages until all nodes have their coefficients."""

from __future__ import annotations


def coefficients_by_hand(graph):
    """``{node: {neighbour: coefficient}}``; each node acts as soon as it has the messages that it waits for."""
    nodes = range(len(graph.bounds) - 1)
    neighbours = {i: graph.receivers[graph.bounds[i] : graph.bounds[i + 1]].tolist() for i in nodes}
    degree = {i: len(neighbours[i]) for i in nodes}
    final, proposal = {}, {}  # what a node has sent to neighbours of lower degree, and of equal degree
    weights: dict[int, dict[int, float]] = {}
    while len(weights) < len(neighbours):
        before = len(weights), len(proposal)
        for i in nodes:
            above = [j for j in neighbours[i] if degree[j] > degree[i]]
            equal = [j for j in neighbours[i] if degree[j] == degree[i]]
            if not above:
                proposal[i] = final[i] = 1 / (degree[i] + 1)
            elif all(j in final for j in above):
                taken = sum(final[j] for j in above)
                proposal[i] = (1 - taken) / (degree[i] - len(above) + 1)
                if all(j in proposal for j in equal):
                    final[i] = min(proposal[j] for j in [i, *equal])
            if i in final:
                weights[i] = {j: final[j] if j in above else final[i] for j in neighbours[i]}
        assert before != (len(weights), len(proposal)), "nobody can go on"
    return weights
