"""Measured delays: the named table ``rpi`` and tables read from CSV files.

A table has a header line and one line a profile. Columns, in any order:

* ``client`` (0, 1, ...: the line belongs to that client) or ``device`` (any label: clients draw lines);
* ``mean``, ``std``: mean (> 0) and standard deviation (>= 0) of a whole round, seconds;
* ``compute``, optional: the part of ``mean`` spent on training, seconds; the rest is communication;
* ``group``, optional: a label, by which ``rpi`` selects.

Holes, words where numbers belong and impossible values are errors: missing timing is never taken as zero.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_async import check, registry
from fedjax_async.clock import chance
from fedjax_async.clock.csv_lines import read_lines
from fedjax_async.clock.distributions import DISTRIBUTIONS
from fedjax_async.clock.durations import (
    DelayModel,
    Delays,
    Profiles,
    Scaling,
    Speeds,
    from_profiles,
    measured_scaling_of,
    speeds_of,
)
from fedjax_async.registry import takes

_KNOWN = ("client", "device", "mean", "std", "compute", "group")


class Table(NamedTuple):
    """Profiles as read: float64[rows] columns; ``client`` is None when clients draw devices."""

    mean: np.ndarray
    std: np.ndarray
    compute: np.ndarray | None
    client: np.ndarray | None  # int64[rows]
    group: np.ndarray | None  # labels


def read_table(path: str | Path) -> Table:
    """Read a table of delays; ``ValueError`` naming file, line and column for anything amiss."""
    lines = read_lines(path)
    header = [name.strip().lower() for name in lines[0][1]]
    _check_header(path, header)
    columns: dict[str, list] = {name: [] for name in header}
    for number, cells in lines[1:]:
        if len(cells) > len(header):
            raise ValueError(f"{path}, line {number}: {len(cells)} cells for {len(header)} columns")
        for k, name in enumerate(header):
            columns[name].append(_cell(path, number, name, cells[k].strip() if k < len(cells) else ""))
    return Table(
        mean=np.array(columns["mean"]),
        std=np.array(columns["std"]),
        compute=np.array(columns["compute"]) if "compute" in columns else None,
        client=_client_column(path, lines, columns["client"]) if "client" in columns else None,
        group=np.array(columns["group"]) if "group" in columns else None,
    )


def _check_header(path: str | Path, header: list[str]) -> None:
    for name in header:
        if name not in _KNOWN:
            raise ValueError(f"{path}, line 1, column {name!r}: unknown (known: {', '.join(_KNOWN)})")
        if header.count(name) > 1:
            raise ValueError(f"{path}, line 1, column {name!r}: occurs twice")
    missing = [name for name in ("mean", "std") if name not in header]
    if missing:
        raise ValueError(f"{path}, line 1, column {missing[0]!r}: missing")
    if ("client" in header) == ("device" in header):
        raise ValueError(f"{path}, line 1: must have one of the columns 'client' and 'device'")


def _cell(path: str | Path, line: int, column: str, text: str) -> float | int | str:
    place = f"{path}, line {line}, column {column!r}"
    if not text:
        raise ValueError(f"{place}: empty")
    if column in ("device", "group"):
        return text
    if column == "client":
        if not text.isdecimal():
            raise ValueError(f"{place}: {text!r} must be a client number 0, 1, ...")
        return int(text)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    above_zero = column == "mean"
    if not math.isfinite(value) or value < 0 or (above_zero and value == 0):
        raise ValueError(f"{place}: {text!r} must be a finite number {'> 0' if above_zero else '>= 0'}")
    return value


def _client_column(path: str | Path, lines: list[tuple[int, list[str]]], clients: list[int]) -> np.ndarray:
    seen: set[int] = set()
    for (number, _), client in zip(lines[1:], clients):
        if client in seen:
            raise ValueError(f"{path}, line {number}, column 'client': {client} occurs twice")
        seen.add(client)
    return np.array(clients, np.int64)


def assign(table: Table, count: int, seed: int) -> np.ndarray:
    """The row of each of ``count`` clients: its own, or one from a shuffled deck; int64[count]."""
    if table.client is None:
        return chance.deck(seed, "devices", len(table.mean), count)
    rows = np.zeros(count, np.int64)
    inside = table.client < count
    rows[table.client[inside]] = np.flatnonzero(inside)
    return rows


def require_rows(table: Table, num_clients: int, source: str) -> None:
    """``ValueError`` naming the first of the clients 0..N-1 without a row in a table by client."""
    if table.client is None:
        return
    missing = np.setdiff1d(np.arange(num_clients), table.client)
    if len(missing):
        raise ValueError(f"{source}, column 'client': no line for client {missing[0]} of {num_clients}")


def rpi_table(profiles: str = "slow") -> Table:
    """The packaged table: ``slow`` (9 profiles), ``fast`` (5) or ``all``."""
    check.one_of("profiles", profiles, ("all", "slow", "fast"))
    table = read_table(Path(__file__).with_name("rpi.csv"))
    if profiles == "all":
        return table
    keep = np.flatnonzero(table.group == profiles)
    compute = None if table.compute is None else table.compute[keep]
    return table._replace(mean=table.mean[keep], std=table.std[keep], compute=compute, group=None)


def _from_table(table: Table, family: str, scaling: Scaling, clients: Speeds, source: str) -> DelayModel:
    if scaling.reference_bytes is not None and table.compute is None:
        raise ValueError(f"reference_bytes = {scaling.reference_bytes}: {source} has no column 'compute'")
    sample = registry.find("family", DISTRIBUTIONS, family)
    # Where a measured compute part exceeds the measured total, there is no communication left.
    share = np.ones(len(table.mean)) if table.compute is None else np.minimum(table.compute / table.mean, 1.0)

    def draw_profiles(count: int, seed: int) -> Profiles:
        rows = assign(table, count, seed)
        return Profiles(table.mean[rows], table.std[rows], share[rows])

    model = from_profiles(draw_profiles, sample, scaling, clients)

    def checked(num_clients: int, seed: int) -> Delays:
        require_rows(table, num_clients, source)
        return model(num_clients, seed)

    return checked


@takes(clients=speeds_of, scaling=measured_scaling_of)
def rpi(
    *,
    profiles: str = "slow",
    family: str = "normal",
    clients: Speeds,
    scaling: Scaling,
) -> DelayModel:
    """Measured rounds of Raspberry Pi clients, 9 profiles (`profiles`: slow, fast with 5 others, or all); seconds.

    Clients draw profiles without replacement from a deck that is reshuffled when it runs out, and each
    job draws a Gaussian, redrawn while <= 0 (any other ``family`` keeps the profiles' mean and std). By
    default a round takes its measured time whatever the model and the work; ``reference_steps`` and
    ``reference_bytes`` (down + up, of one round as measured) rescale the compute and the communication
    part of it. The communication part is total - compute. No split is known for the five fast
    profiles: they count as all compute.

    Source: the latency table released with OrthoFL (the released code replaces draws <= 0 by the
    mean instead).
    """
    table = rpi_table(profiles)
    return _from_table(table, family, scaling, clients, "rpi")


@takes(clients=speeds_of, scaling=measured_scaling_of)
def csv(
    *,
    path: str,
    family: str = "normal",
    clients: Speeds,
    scaling: Scaling,
) -> DelayModel:
    """Means and deviations from a CSV file: columns client or device, mean, std and, if known, compute.

    With a ``client`` column row ``i`` belongs to client ``i`` and every client needs a row; with a
    ``device`` column clients draw devices like ``rpi``'s profiles. Other options as for ``rpi``.
    """
    table = read_table(str(path))
    return _from_table(table, family, scaling, clients, str(path))
