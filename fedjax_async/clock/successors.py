"""Who trains next when a place becomes free: the sampling rules of policies with limited concurrency.

A rule is ``rule(num_clients, concurrency, seed) -> Idle``: who may start, and a container of the idle
clients. It costs O(1) a call where every client is always there, however many are idle.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count as counting
from itertools import islice, repeat
from typing import NamedTuple

import numpy as np

from fedjax_async.clock import chance
from fedjax_async.clock.stock import AHEAD, Ahead


class Idle(NamedTuple):
    """The clients without a job.

    ``candidates``: all that ever train, in the order in which they are tried for the first places; those
    that are not needed then are handed to ``fill``. ``add(client)`` takes in a client that returns from
    a job, ``draw()`` takes the next one out (of at least one), and ``restore(client)`` takes back one
    that was drawn but was away, as if it had never been drawn. ``swap(client)`` is ``add`` and ``draw``.
    ``ahead(client)``: those that will probably be drawn soon after ``client``, a guess that changes
    nothing; ``None``: those that return soon.

    ``places(count)`` are the same draws for who keeps the container himself, of always ``count`` idle clients:
    who returns is put into place ``count``, behind them; who is drawn leaves the next of ``places``, which comes
    in arrays, and the one behind moves there.
    """

    candidates: Sequence[int]
    fill: Callable[[Iterable[int]], None]
    add: Callable[[int], None]
    draw: Callable[[], int]
    restore: Callable[[int], None]
    swap: Callable[[int], int]
    places: Callable[[int], Iterator[np.ndarray]]
    ahead: Ahead | None = None


Rule = Callable[[int, int, int], Idle]

_DRAWS = 4096


def same(num_clients: int, concurrency: int, seed: int) -> Idle:
    """The returning client itself; the clients 0..C-1 are the only ones that ever train."""
    idle: list[int] = []

    def add(client: int) -> None:
        heapq.heappush(idle, client)

    def places(count: int) -> Iterator[np.ndarray]:
        return repeat(np.full(AHEAD, count))

    swap = partial(heapq.heappushpop, idle)
    return Idle(range(concurrency), idle.extend, add, lambda: heapq.heappop(idle), add, swap, places)


def round_robin(num_clients: int, concurrency: int, seed: int) -> Idle:
    """The client that has been idle longest, at first in order of number."""
    idle: deque[int] = deque()
    back: list[tuple[int, int]] = []  # clients that were away when it was their turn: (turn, client)
    turn = array("q", np.arange(num_clients).tobytes())
    turns = iter(range(num_clients, 1 << 62))

    def add(client: int) -> None:
        turn[client] = next(turns)
        idle.append(client)

    def draw() -> int:
        if back and not (idle and turn[idle[0]] < back[0][0]):
            return heapq.heappop(back)[1]
        return idle.popleft()

    def swap(client: int) -> int:
        add(client)
        return draw()

    def restore(client: int) -> None:
        heapq.heappush(back, (turn[client], client))

    def places(count: int) -> Iterator[np.ndarray]:
        return (np.arange(begin, begin + AHEAD) % count for begin in counting(0, AHEAD))

    candidates = array("i", np.arange(num_clients, dtype=np.int32).tobytes())
    return Idle(candidates, idle.extend, add, draw, restore, swap, places, lambda client: islice(idle, AHEAD))


def uniform(num_clients: int, concurrency: int, seed: int) -> Idle:
    """Any idle client with equal probability, the returning one included; random clients start."""
    rng = chance.generator(seed, "sampling")
    candidates = array("i", rng.permutation(num_clients).astype(np.int32).tobytes())
    idle = array("i")
    # Uniform numbers, the next one last, and the places for which they stand while there are ``count`` idle.
    numbers, picks = np.empty(0), list[int]()
    count, scale = 0, 2

    def scaled() -> None:
        picks[:] = (numbers * scale).astype(np.int64).tolist()

    def more() -> None:
        nonlocal numbers
        numbers = np.concatenate([rng.random(_DRAWS), numbers[: len(picks)]])
        scaled()

    def recount() -> None:
        # A number stands for the same place while the idle become a few more or less: so it can be foreseen.
        nonlocal count, scale, numbers
        count, before = len(idle), scale
        scale = 1 << (count + 1).bit_length()
        if scale != before:
            numbers = numbers[: len(picks)]
            scaled()

    def swap(client: int) -> int:
        if len(idle) != count:
            recount()
        while True:
            if not picks:
                more()
            pick = picks.pop()
            if pick < count:
                chosen, idle[pick] = idle[pick], client
                return chosen
            if pick == count:
                return client

    def places(count: int) -> Iterator[np.ndarray]:
        beyond = 1 << (count + 1).bit_length()
        while True:
            drawn = (rng.random(_DRAWS)[::-1] * beyond).astype(np.int64)
            yield drawn[drawn <= count]

    def ahead(client: int) -> Iterable[int]:
        recount()  # when the next is drawn, one more has returned
        if len(picks) < AHEAD:
            more()
        soon = np.array(picks[-AHEAD:])
        return np.frombuffer(idle, np.int32)[soon[soon < count]].tolist() if count else ()

    return Idle(candidates, idle.extend, idle.append, lambda: swap(idle.pop()), idle.append, swap, places, ahead)


SUCCESSORS: dict[str, Rule] = {"same": same, "uniform": uniform, "round_robin": round_robin}
