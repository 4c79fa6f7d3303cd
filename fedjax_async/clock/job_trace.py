"""Recorded seconds of single jobs, replayed in the order in which they were recorded."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fedjax_async.clock import chance, csv_tables
from fedjax_async.clock.durations import DelayModel, Delays


def trace(*, path: str) -> DelayModel:
    """Recorded seconds of single jobs: a CSV file with columns client or device, and seconds, a line for each job.

    A client takes its times in the order of the lines, and begins again with the first when they are used up. With a
    ``client`` column every client needs a line; with a ``device`` column clients draw devices as in ``csv``.
    Other columns are refused. Steps and bytes of a job change nothing.
    """
    file = str(path)
    rows = csv_tables.by_device(csv_tables.read(file, ("client", "device", "seconds"), required=("seconds",)))
    of_clients = "client" in rows[0][1]
    recorded: dict[object, list[float]] = {}
    for row in rows:
        owner = csv_tables.client(row) if of_clients else csv_tables.label(row, "device")
        recorded.setdefault(owner, []).append(csv_tables.number(row, "seconds", above_zero=True))
    owners = list(recorded)

    def model(num_clients: int, seed: int) -> Delays:
        if of_clients:
            chosen = csv_tables.rows_of(np.array(owners, np.int64), num_clients, file)
        else:
            chosen = chance.deck(seed, "devices", len(owners), num_clients)
        own = [recorded[owners[row]] for row in chosen]
        size = np.array([len(seconds) for seconds in own])
        first, every = np.cumsum(size) - size, np.concatenate(own)

        def durations(
            clients: ArrayLike,
            numbers: ArrayLike,
            local_steps: ArrayLike = 1,
            bytes_down: ArrayLike = 0,
            bytes_up: ArrayLike = 0,
        ) -> np.ndarray:
            who, number, *_ = np.broadcast_arrays(clients, numbers, local_steps, bytes_down, bytes_up)
            return np.asarray(every[first[who] + number % size[who]])

        return Delays(num_clients, durations)

    return model
