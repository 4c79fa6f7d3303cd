"""What is drawn for each job, drawn for many jobs at once and kept until a client asks for its next one.

Events ask one job at a time, arrays are filled by the thousand. So each refill draws for the client that asks
and for those that will probably ask soon, several jobs each where clients are few; for all, where they are
very few. A wrong guess costs time and changes nothing: what a job gets depends on its client and number alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np

_ITEMS, _DEEPEST = 1 << 16, 64  # drawn at once at the most, in all and of one client
_DEEP = 4  # from so many jobs of a client on, all clients are drawn for

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

    def prepare(self, clients: Collection[int]) -> None:
        """Where one of these clients has nothing left, draw for those that have little left."""
        ready, depth = self._ready, len(self._numbers)
        if all(client in ready for client in clients):
            return
        if len(ready) > 2 * _ITEMS:
            for client, left in ready.items():
                self._drawn[client] -= 1 if self._bare else len(left)
            ready.clear()
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
