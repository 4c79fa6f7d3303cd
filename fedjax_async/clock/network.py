"""The network: what messages take on each client's own link, on top of what the delay model says.

A model is ``model(num_clients, seed) -> Network``. A job's two messages take

    (latency_i + bytes_down / down_i) * noise_down + (latency_i + bytes_up / up_i) * noise_up

seconds. The links' parameters are drawn once a client, the noises (lognormal of mean 1) once a job.
The delay models' own ``bandwidth`` options are the simple case; use one or the other. Policies that do
not ask the delay model (``participation``) do not ask the network either.
"""

from __future__ import annotations

import csv as csv_files
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_async import registry
from fedjax_async.clock import chance, inputs
from fedjax_async.clock.durations import Delays


class Network(NamedTuple):
    """``seconds(clients, numbers, bytes_down, bytes_up) -> float64``: what the messages of these jobs take."""

    num_clients: int
    seconds: Callable[..., np.ndarray]


NetworkModel = Callable[[int, int], Network]


class Links(NamedTuple):
    """One entry a client, float64: bytes a second (infinite: no matter), seconds a message, sigma of the noise."""

    down: np.ndarray
    up: np.ndarray
    latency: np.ndarray
    jitter: np.ndarray


LinksOf = Callable[[np.ndarray], Links]  # of clients


def _from_links(bind_links: Callable[[int, int], LinksOf]) -> NetworkModel:
    def model(num_clients: int, seed: int) -> Network:
        links_of = bind_links(num_clients, seed)

        def noise(direction: int, who: np.ndarray, which: np.ndarray, sigma: np.ndarray) -> np.ndarray | float:
            if not sigma.any():
                return 1.0
            drawn = chance.Draws(seed, "jitter", direction, who, which).standard_normal()
            return np.exp(sigma * drawn.reshape(np.broadcast_shapes(who.shape, which.shape)) - sigma**2 / 2)

        def seconds(
            clients: np.ndarray, numbers: np.ndarray, bytes_down: np.ndarray | int = 0, bytes_up: np.ndarray | int = 0
        ) -> np.ndarray:
            who, which = np.asarray(clients, np.int64), np.asarray(numbers, np.int64)
            down, up, latency, sigma = links_of(who)
            there = (latency + bytes_down / down) * noise(0, who, which, sigma)
            return there + (latency + bytes_up / up) * noise(1, who, which, sigma)

        return Network(num_clients, seconds)

    return model


def link(
    *,
    down: float | None = None,
    up: float | None = None,
    latency: float = 0.0,
    jitter: float = 0.0,
    heterogeneity: float = 0.0,
) -> NetworkModel:
    """A link of `down` and `up` bytes a second and `latency` seconds a message for each client, with `jitter`.

    Without ``down`` or ``up`` messages that way take no time but the latency. ``heterogeneity`` is the
    sigma of the lognormal factors (mean 1) by which a client's links are slower; down and up have
    factors of their own. ``jitter`` is the sigma of the lognormal noise of each message.
    """
    for field, value in (("down", down), ("up", up)):
        inputs.optional_positive(field, value)
    for field, value in (("latency", latency), ("jitter", jitter), ("heterogeneity", heterogeneity)):
        inputs.non_negative(field, value)

    rates = [math.inf if rate is None else float(rate) for rate in (down, up)]

    def bind_links(num_clients: int, seed: int) -> LinksOf:
        def links_of(clients: np.ndarray) -> Links:
            draws = chance.Draws(seed, "links", clients)
            normals = (draws.standard_normal().reshape(clients.shape) for _ in rates)
            slower = [np.exp(heterogeneity * normal - heterogeneity**2 / 2) for normal in normals]
            alike = np.ones(clients.shape)
            return Links(rates[0] / slower[0], rates[1] / slower[1], latency * alike, jitter * alike)

        return links_of

    return _from_links(bind_links)


def csv(*, path: str) -> NetworkModel:
    """Links from a CSV file: columns client (0, 1, ...), down and up (bytes/s), latency (s) and, if known, jitter.

    Every client needs one line. ``jitter`` is as for ``link``, 0 without the column.
    """
    rows = _read(path)

    def bind_links(num_clients: int, seed: int) -> LinksOf:
        missing = next((client for client in range(num_clients) if client not in rows), None)
        if missing is not None:
            raise ValueError(f"{path}, column 'client': no line for client {missing} of {num_clients}")
        table = np.array([rows[client] for client in range(num_clients)]).T
        return lambda clients: Links(*table[:, clients])

    return _from_links(bind_links)


def _read(path: str) -> dict[int, tuple[float, ...]]:
    try:
        with open(Path(path), newline="", encoding="utf-8-sig") as file:
            lines = [(number, cells) for number, cells in enumerate(csv_files.reader(file), 1) if any(cells)]
    except OSError as error:
        raise ValueError(f"path = {path!r}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"path = {path!r}: not a text file") from None
    header = [name.strip().lower() for name in lines[0][1]] if lines else []
    if sorted({*header, "jitter"}) != ["client", "down", "jitter", "latency", "up"] or len(set(header)) < len(header):
        raise ValueError(f"{path}, line 1: must have the columns client, down, up, latency and at most jitter")
    rows: dict[int, tuple[float, ...]] = {}
    for number, cells in lines[1:]:
        place = f"{path}, line {number}"
        if len(cells) != len(header):
            raise ValueError(f"{place}: {len(cells)} cells for {len(header)} columns")
        texts = dict(zip(header, map(str.strip, cells)))
        if not (texts["client"].isascii() and texts["client"].isdecimal()):
            raise ValueError(f"{place}, column 'client': {texts['client']!r} must be a client number 0, 1, ...")
        client = int(texts["client"])
        if client in rows:
            raise ValueError(f"{place}, column 'client': {client} occurs twice")
        texts.setdefault("jitter", "0")
        rows[client] = tuple(_number(place, name, texts[name]) for name in Links._fields)
    return rows


def _number(place: str, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    above_zero = column in ("down", "up")
    if not math.isfinite(value) or value < 0 or (above_zero and value == 0):
        allowed = f"a finite number {'> 0' if above_zero else '>= 0'}"
        raise ValueError(f"{place}, column {column!r}: {text!r} must be {allowed}")
    return value


NETWORKS: dict[str, Callable[..., NetworkModel]] = {"link": link, "csv": csv}


def over(model: NetworkModel | str | None, delays: Delays, num_clients: int, seed: int) -> Delays:
    """``delays`` with the messages' time on the network added; a spec string is looked up first."""
    if model is None:
        return delays
    bound: NetworkModel = registry.bind("network", NETWORKS, model)() if isinstance(model, str) else model
    network = bound(num_clients, seed)

    def durations(
        clients: np.ndarray,
        numbers: np.ndarray,
        local_steps: np.ndarray | int = 1,
        bytes_down: np.ndarray | int = 0,
        bytes_up: np.ndarray | int = 0,
    ) -> np.ndarray:
        training = delays.durations(clients, numbers, local_steps, bytes_down, bytes_up)
        return training + network.seconds(clients, numbers, bytes_down, bytes_up)

    return Delays(num_clients, durations)
