"""The network: the seconds that messages take on each client's own link, added to those of the delay model.

A model is ``model(num_clients, seed) -> Network``. A job's two messages take

    (latency_i + bytes_down / down_i) * noise_down + (latency_i + bytes_up / up_i) * noise_up

seconds. A message from node i to node j, in a run without a server, takes

    latency_i + latency_j + bytes / min(up_i, down_j)

seconds times the noise of the sender. By default, each pair of nodes has a link of its own. The links' parameters are
drawn once per client, the noises (lognormal of mean 1) once per job or message.
The ``bandwidth`` options of the delay models are the simple case; use one or the other. The timing
``participation`` uses neither the delay model nor the network.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedjax_async.base import check, registry
from fedjax_async.base.notices import RunWarning
from fedjax_async.clock import chance, csv_tables
from fedjax_async.clock.durations import Delays


class Network(NamedTuple):
    """``seconds(clients, numbers, bytes_down, bytes_up) -> float64``: the time of both messages of these jobs.

    ``between(senders, receivers, numbers, size) -> (float64, float64)``, for runs without a server: the seconds that
    messages of ``size`` bytes from node to node occupy their links, and the further seconds until they arrive.
    ``numbers`` distinguishes the messages from one sender to one receiver; the arguments are arrays of one shape.
    ``shared``: a node sends one message at a time; the others wait.
    """

    num_clients: int
    seconds: Callable[..., np.ndarray]
    between: Callable[..., tuple[np.ndarray, np.ndarray]] | None = None
    shared: bool = False


NetworkModel = Callable[[int, int], Network]


class Links(NamedTuple):
    """One entry per client, float64: bytes a second (infinite: no limit), seconds a message, sigma of the noise."""

    down: np.ndarray
    up: np.ndarray
    latency: np.ndarray
    jitter: np.ndarray


LinksOf = Callable[[np.ndarray], Links]  # the links of these clients


def _from_links(bind_links: Callable[[int, int], LinksOf], shared: bool) -> NetworkModel:
    check.kind("shared", shared, bool, "true or false")

    def model(num_clients: int, seed: int) -> Network:
        links_of = bind_links(num_clients, seed)

        def noise(direction: int, clients: np.ndarray, numbers: np.ndarray, sigma: np.ndarray) -> np.ndarray | float:
            if not sigma.any():
                return 1.0
            drawn = chance.Draws(seed, "jitter", direction, clients, numbers).standard_normal()
            return np.exp(sigma * drawn.reshape(np.broadcast_shapes(clients.shape, numbers.shape)) - sigma**2 / 2)

        def seconds(
            clients: np.ndarray, numbers: np.ndarray, bytes_down: np.ndarray | int = 0, bytes_up: np.ndarray | int = 0
        ) -> np.ndarray:
            clients, numbers = np.asarray(clients, np.int64), np.asarray(numbers, np.int64)
            down, up, latency, sigma = links_of(clients)
            download = (latency + bytes_down / down) * noise(0, clients, numbers, sigma)
            return download + (latency + bytes_up / up) * noise(1, clients, numbers, sigma)

        def between(
            senders: np.ndarray, receivers: np.ndarray, numbers: np.ndarray, size: int
        ) -> tuple[np.ndarray, np.ndarray]:
            out, into = links_of(senders), links_of(receivers)
            occupied, travelling = size / np.minimum(out.up, into.down), out.latency + into.latency
            if not out.jitter.any():
                return occupied, travelling
            drawn = chance.Draws(seed, "message jitter", senders, receivers, numbers).standard_normal()
            factor = np.exp(out.jitter * drawn - out.jitter**2 / 2)
            return occupied * factor, travelling * factor

        return Network(num_clients, seconds, between, shared)

    return model


def link(
    *,
    down: float | None = None,
    up: float | None = None,
    latency: float = 0.0,
    jitter: float = 0.0,
    heterogeneity: float = 0.0,
    shared: bool = False,
) -> NetworkModel:
    """A link of `down` and `up` bytes a second and `latency` seconds a message for each client, with `jitter`.

    Without ``down`` or ``up`` messages in that direction take only the latency; without all three the link has no
    effect, and warns of it. ``heterogeneity`` is the sigma of the lognormal factors (mean 1) by which a client's links
    are slower; down and up have factors of their own. ``jitter`` is the sigma of the lognormal noise of each message.
    ``shared``, in runs without a server: a node sends its messages one after another.
    """
    for field, value in (("down", down), ("up", up)):
        check.optional(check.real_positive, field, value)
    check.real_non_negative("latency", latency)
    for field, value in (("jitter", jitter), ("heterogeneity", heterogeneity)):
        check.real_non_negative(field, value)
        check.in_range(field, value, 0, 10)  # as of delays: with more, hardly any message takes time

    if down is up is None and latency == 0:
        text = "network: a link without down, up and latency has no effect: its messages take no time"
        warnings.warn(text, RunWarning, stacklevel=2)
    elif down is up is None and heterogeneity > 0:
        text = f"network: heterogeneity = {heterogeneity} has no effect without down and up: latencies do not differ"
        warnings.warn(text, RunWarning, stacklevel=2)
    rates = [math.inf if rate is None else float(rate) for rate in (down, up)]

    def bind_links(num_clients: int, seed: int) -> LinksOf:
        def links_of(clients: np.ndarray) -> Links:
            draws = chance.Draws(seed, "links", clients)
            normals = (draws.standard_normal().reshape(clients.shape) for _ in rates)
            slower = [np.exp(heterogeneity * normal - heterogeneity**2 / 2) for normal in normals]
            ones = np.ones(clients.shape)
            return Links(rates[0] / slower[0], rates[1] / slower[1], latency * ones, jitter * ones)

        return links_of

    return _from_links(bind_links, shared)


def csv(*, path: str, shared: bool = False) -> NetworkModel:
    """Links from a CSV file: columns client (0, 1, ...), down and up (bytes/s), latency (s) and, if known, jitter.

    Every client needs one line. ``jitter`` is as for ``link``, 0 without the column; ``shared`` is as for ``link``.
    """
    rows = csv_tables.read(path, ("client", *Links._fields), required=("client", "down", "up", "latency"))
    owners = csv_tables.distinct_clients(rows)
    known = [name for name in Links._fields if name in rows[0][1]]
    columns = {
        name: [csv_tables.number(row, name, above_zero=name in ("down", "up")) for row in rows] for name in known
    }
    links = np.array([columns.get(name, [0.0] * len(rows)) for name in Links._fields])

    def bind_links(num_clients: int, seed: int) -> LinksOf:
        table = links[:, csv_tables.rows_of(owners, num_clients, path)]
        return lambda clients: Links(*table[:, clients])

    return _from_links(bind_links, shared)


def edges(*, path: str, directed: bool = False, shared: bool = False) -> NetworkModel:
    """Without a server, a rate for each pair of nodes, from a CSV: columns source, target, rate (bytes/s), latency (s).

    Every pair of nodes that exchange messages needs one line; `directed`: from source to target only, so that
    the way back needs another. ``shared`` as for ``link``.
    """
    check.kind("directed", directed, bool, "true or false")
    check.kind("shared", shared, bool, "true or false")
    columns = ("source", "target", "rate", "latency")
    rows = csv_tables.read(path, columns, required=columns)
    ends = np.array([[csv_tables.client(row, name) for name in columns[:2]] for row in rows], np.int64)
    rate, latency = (
        np.array([csv_tables.number(row, name, above_zero=name == "rate") for row in rows]) for name in columns[2:]
    )
    index = np.arange(len(rows))
    if not directed:
        ends, index = np.concatenate([ends, ends[:, ::-1]]), np.concatenate([index, index])

    def model(num_clients: int, seed: int) -> Network:
        nodes = max(num_clients, int(ends.max()) + 1)
        keys, first, times = np.unique(ends @ np.array([nodes, 1]), return_index=True, return_counts=True)
        if (times > 1).any():
            source, target = divmod(int(keys[times > 1][0]), nodes)
            both = "" if directed else " (a line counts for both directions)"
            raise ValueError(f"{path}: the link from {source} to {target} occurs twice{both}")

        def between(
            senders: np.ndarray, receivers: np.ndarray, numbers: np.ndarray, size: int
        ) -> tuple[np.ndarray, np.ndarray]:
            wanted = np.asarray(senders, np.int64) * nodes + receivers
            found = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            missing = wanted[keys[found] != wanted]
            if len(missing):
                source, target = divmod(int(missing[0]), nodes)
                raise ValueError(f"{path}: no line for messages from node {source} to node {target}")
            line = index[first][found]
            return size / rate[line], latency[line]

        def seconds(*jobs: object) -> np.ndarray:
            raise ValueError("network = 'edges': must be one with a link to the server, such as 'csv'")

        return Network(num_clients, seconds, between, shared)

    return model


NETWORKS: dict[str, Callable[..., NetworkModel]] = {"link": link, "csv": csv, "edges": edges}


def bind(model: NetworkModel | str, num_clients: int, seed: int) -> Network:
    """Bind a network model, or the one named by a spec, to ``num_clients`` clients and a seed."""
    bound: NetworkModel = registry.spec("network", NETWORKS, model).make() if isinstance(model, str) else model
    return bound(num_clients, seed)


def over(model: NetworkModel | str, delays: Delays, num_clients: int, seed: int) -> Delays:
    """``delays`` with the time of the messages on the network added; ``model`` may be a spec."""
    network = bind(model, num_clients, seed)

    def durations(
        clients: np.ndarray,
        numbers: np.ndarray,
        local_steps: np.ndarray | int = 1,
        bytes_down: np.ndarray | int = 0,
        bytes_up: np.ndarray | int = 0,
    ) -> np.ndarray:
        training = delays.durations(clients, numbers, local_steps, bytes_down, bytes_up)
        messages = network.seconds(clients, numbers, bytes_down, bytes_up)
        if not bool(np.all((messages >= 0) & np.isfinite(messages))):
            raise ValueError("network: the seconds of the messages of every job must be a finite number >= 0")
        return training + messages

    return Delays(num_clients, durations)
