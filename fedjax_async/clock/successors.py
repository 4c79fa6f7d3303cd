"""Who trains next when a client comes back: the sampling rules of policies with limited concurrency.

A rule is ``rule(num_clients, concurrency, seed) -> (first, successor)``: the clients that start, and
``successor(returning) -> client``, called once for each client that becomes idle, which names the one
that leaves in its stead. A rule costs O(1) a call, however many clients are idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from fedjax_async.clock import chance

Successor = Callable[[int], int]
Rule = Callable[[int, int, int], tuple[list[int], Successor]]

_DRAWS = 4096


def same(num_clients: int, concurrency: int, seed: int) -> tuple[list[int], Successor]:
    """The returning client itself; the clients 0..C-1 are the only ones that ever train."""
    return list(range(concurrency)), lambda returning: returning


def round_robin(num_clients: int, concurrency: int, seed: int) -> tuple[list[int], Successor]:
    """The client that has been idle longest, at first in order of number."""
    idle = deque(range(concurrency, num_clients))

    def successor(returning: int) -> int:
        idle.append(returning)
        return idle.popleft()

    return list(range(concurrency)), successor


def uniform(num_clients: int, concurrency: int, seed: int) -> tuple[list[int], Successor]:
    """Any idle client with equal probability, the returning one included; random clients start."""
    if concurrency == num_clients:  # nobody else is ever idle
        return same(num_clients, concurrency, seed)
    rng = chance.generator(seed, "sampling")
    order = rng.permutation(num_clients).tolist()
    idle = order[concurrency:]
    draws: list[float] = []

    def successor(returning: int) -> int:
        if not draws:
            draws.extend(rng.random(_DRAWS).tolist())
        pick = int(draws.pop() * (len(idle) + 1))
        if pick == len(idle):
            return returning
        chosen, idle[pick] = idle[pick], returning
        return chosen

    return sorted(order[:concurrency]), successor


SUCCESSORS: dict[str, Rule] = {"same": same, "uniform": uniform, "round_robin": round_robin}
