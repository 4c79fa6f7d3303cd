"""What is drawn for each job, drawn for many jobs at once and kept until a client asks for its next one.

Events ask one job at a time, arrays are filled by the thousand. So each refill draws for the client that asks
and for those that will probably ask soon, several jobs each where clients are few; for all, where they are
very few. A wrong guess costs time and changes nothing: what a job gets depends on its client and number alone.

``Stock`` keeps anything, ``Table`` numbers alone, for all clients at once and quicker to take from.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np

_ITEMS, _DEEPEST = 1 << 16, 64  # drawn at once at the most, in all and of one client
_DEEP = 4  # from so many jobs of a client on, all clients are drawn for

_CELLS, _SHALLOWEST = 1 << 19, 4  # of a table, at the most, and in a row of it, at the least

AHEAD = 1024  # clients foreseen at once

Draw = Callable[[np.ndarray, np.ndarray], np.ndarray]
Ahead = Callable[[int], Iterable[int]]


def nobody(client: int) -> Iterable[int]:
    """Foresee nothing."""
    return ()


class Stock:
    """The next jobs of clients: ``draw(clients, numbers)`` of arrays that broadcast gives what each job gets.

    ``ahead(client)`` are the clients that will probably ask soon after ``client``.
    """

    def __init__(self, draw: Draw, num_clients: int, ahead: Ahead = nobody):
        depth = max(1, min(_DEEPEST, _ITEMS // num_clients))
        self._draw, self._ahead = draw, ahead
        self._everyone = range(num_clients) if depth >= _DEEP else None
        self._numbers = np.arange(depth)[::-1]
        self._drawn = np.zeros(num_clients, np.int32)  # how many jobs of each client
        # By client, what is drawn and not yet taken: a list whose last is the next, or of depth 1 the thing itself,
        # since making so many lists would cost more than drawing what is in them.
        self._ready: dict[int, Any] = {}
        self._bare = depth == 1

    def take(self, client: int) -> Any:
        """What the client's next job gets: of its first job when first asked, then of its second, and so on."""
        if client not in self._ready:
            self.prepare(self._everyone or (client, *self._ahead(client)))
        if self._bare:
            return self._ready.pop(client)
        own = self._ready[client]
        item = own.pop()
        if not own:
            del self._ready[client]
        return item

    def take_each(self, clients: np.ndarray) -> np.ndarray:
        """What ``take`` would give each of these clients, all different, as an array; what is ready is forgotten."""
        self._forget()
        drawn = self._draw(clients[:, None], self._drawn[clients][:, None]).reshape(-1)
        self._drawn[clients] += 1
        return drawn

    def _forget(self) -> None:
        if self._bare:
            self._drawn[np.fromiter(self._ready, np.int64, len(self._ready))] -= 1
        else:
            for client, left in self._ready.items():
                self._drawn[client] -= len(left)
        self._ready.clear()

    def prepare(self, clients: Collection[int]) -> None:
        """Where one of these clients has nothing left, draw for those that have little left."""
        ready, depth = self._ready, len(self._numbers)
        if all(client in ready for client in clients):
            return
        if len(ready) > 2 * _ITEMS:
            self._forget()
        if self._bare:
            lacking = list(set(clients).difference(ready))
        else:
            lacking = [client for client in self._everyone or set(clients) if len(ready.get(client, ())) <= depth // 2]
        who = np.array(lacking)
        drawn = self._draw(who[:, None], self._drawn[who][:, None] + self._numbers)
        self._drawn[who] += depth
        if self._bare:
            ready.update(zip(lacking, drawn.reshape(-1).tolist()))
        else:
            ready.update((client, row + ready.get(client, [])) for client, row in zip(lacking, drawn.tolist()))


class Table:
    """A stock for few clients and numbers > 0: a row of the next jobs of each client, taken one by one or by arrays.

    ``jobs`` are about as many as will be asked for in all.
    """

    def __init__(self, draw: Draw, num_clients: int, jobs: float):
        self._depth = int(min(_DEEPEST, _CELLS // num_clients, max(_SHALLOWEST, 2 * jobs / num_clients)))
        self._draw = draw
        width = self._depth + 1
        # Every row ends with a 0, on which the cursor of a client stands that has nothing left.
        self._cells = array("d", bytes(8 * num_clients * width))
        self._cursor = array("q", np.arange(num_clients * width).reshape(-1, width)[:, -1].tobytes())
        # The same memory for whole arrays.
        self._at, self._rows = np.frombuffer(self._cursor, np.int64), np.frombuffer(self._cells).reshape(-1, width)
        self._ends = self._at.copy()
        self._drawn = np.zeros(num_clients, np.int64)  # how many jobs of each client

    def take(self, client: int) -> float:
        """What the client's next job gets."""
        place = self._cursor[client]
        item = self._cells[place]
        if not item:
            self._refill()
            place = self._cursor[client]
            item = self._cells[place]
        self._cursor[client] = place + 1
        return item

    def take_each(self, clients: np.ndarray) -> np.ndarray:
        """What ``take`` would give each of these clients, all different, as an array."""
        cells, at = self._rows.reshape(-1), self._at[clients]
        if not cells[at].all():
            self._refill()
            at = self._at[clients]
        self._at[clients] = at + 1
        return cells[at]

    def _refill(self) -> None:
        """Draw for all clients that have little left, what is left to them included."""
        left = self._ends - self._at
        low = np.flatnonzero(left <= self._depth // 2)
        begin = self._drawn[low] - left[low]
        self._rows[low, :-1] = self._draw(low[:, None], begin[:, None] + np.arange(self._depth))
        self._at[low] = self._ends[low] - self._depth
        self._drawn[low] = begin + self._depth


def stocked(draw: Draw, num_clients: int, jobs: float, ahead: Ahead) -> Table | Stock:
    """The stock of numbers > 0 from which single clients and arrays of them can take: see ``Table`` and ``Stock``."""
    if _CELLS // num_clients >= _SHALLOWEST and _SHALLOWEST * jobs >= num_clients:
        return Table(draw, num_clients, jobs)
    return Stock(draw, num_clients, ahead)
