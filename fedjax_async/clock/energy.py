"""Energy and carbon of a run: what its jobs and messages cost the devices, from a table of device classes.

A device draws ``training`` watts from the dispatch of a job until its upload has arrived or the job ends without one
(so the time of the messages counts too), and ``idle`` watts at all other times. It needs ``down`` and ``up`` joules for
each byte that it receives and sends, also of an upload that is lost on its way. Carbon is energy times the grams of CO2
equivalents of a kilowatt-hour. A table has the columns, in any order:

- ``client`` (0, 1, ...: the line belongs to that client) or ``device`` (any label: clients draw lines);
- ``training``: watts; ``idle`` (watts), ``down`` and ``up`` (joules a byte): 0 without the column;
- ``carbon``: g CO2e a kWh, optional: without it there is no carbon;
- ``source``, optional: where the numbers of the line come from.

Not counted: the server, the network between it and the devices, and the production of the devices.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_async.base import check, registry
from fedjax_async.clock import chance, csv_tables
from fedjax_async.clock.record import Outcome, at_or_before
from fedjax_async.types import Schedule

JOULES = 3.6e6  # of a kilowatt-hour
COLUMNS = ("training", "idle", "down", "up", "carbon")


class Devices(NamedTuple):
    """Power and energy of each client's device; float64[N] each."""

    training: np.ndarray  # W
    idle: np.ndarray  # W
    down: np.ndarray  # J a byte
    up: np.ndarray  # J a byte
    carbon: np.ndarray  # g CO2e a kWh


EnergyModel = Callable[[int, int], Devices]  # (num_clients, seed)


def _rows(path: str | Path) -> list[csv_tables.CsvRow]:
    return csv_tables.read(path, ("client", "device", "source", *COLUMNS), required=("training",))


def _from_table(path: str | Path, rows: list[csv_tables.CsvRow], stream: str) -> EnergyModel:
    by_client = "client" in rows[0][1]
    owners = csv_tables.distinct_clients(rows) if by_client else None
    given = [name for name in COLUMNS if name in rows[0][1]]
    table = {name: np.array([csv_tables.number(row, name) for row in rows]) for name in given}
    zeros = np.zeros(len(rows))

    def model(num_clients: int, seed: int) -> Devices:
        if owners is None:
            chosen = chance.deck(seed, stream, len(rows), num_clients)
        else:
            chosen = csv_tables.rows_of(owners, num_clients, path)
        return Devices(*(table.get(name, zeros)[chosen] for name in COLUMNS))

    return model


def boards(*, device: str | None = None) -> EnergyModel:
    """Measured power of Raspberry Pi boards (Zero, 2 B, 3 B, 3 B+, 4 B) and of WiFi; carbon of the world's average.

    Clients draw boards without replacement, from all again when none is left, or all have the board ``device``, such as
    raspberry_pi_4b. The packaged table ``energy.csv`` names the sources of its numbers. They give orders of magnitude
    only: for your own devices use ``csv``.
    """
    path = Path(__file__).with_name("energy.csv")
    rows = _rows(path)
    if device is not None:
        check.one_of("device", device, [csv_tables.label(row, "device") for row in rows])
        rows = [row for row in rows if row[1]["device"] == device]
    return _from_table(path, rows, "energy")


def csv(*, path: str) -> EnergyModel:
    """Watts and joules from a CSV file: columns client or device, training and, if known, idle, down, up, carbon.

    ``training`` and ``idle`` in watts, ``down`` and ``up`` in joules a byte, ``carbon`` in g CO2e a kWh; a column
    ``source`` may say where they come from. With ``client`` each client needs a line; with ``device`` they draw lines,
    the same device in each table that lists the same names (of delays and availability too).
    """
    return _from_table(str(path), csv_tables.by_device(_rows(str(path))), "devices")


def flat(
    *, training: float = 5.0, idle: float = 0.0, down: float = 0.0, up: float = 0.0, carbon: float = 0.0
) -> EnergyModel:
    """The same for all: `training` and `idle` watts, `down` and `up` joules a byte, `carbon` g CO2e a kWh."""
    values = (training, idle, down, up, carbon)
    for name, value in zip(COLUMNS, values):
        check.real_non_negative(name, value)
    return lambda num_clients, seed: Devices(*(np.full(num_clients, float(value)) for value in values))


ENERGY: dict[str, Callable[..., EnergyModel]] = {"boards": boards, "flat": flat, "csv": csv}


def bind(spec: str, num_clients: int, seed: int) -> Devices:
    """The devices of a run's clients, by the energy model that a spec names."""
    model: EnergyModel = registry.spec("energy", ENERGY, spec).make()
    return model(num_clients, seed)


def job_energy(
    devices: Devices, schedule: Schedule, bytes_down: int, bytes_up: np.ndarray | int
) -> tuple[np.ndarray, np.ndarray]:
    """Joules and g CO2e of each job, with its two messages; float64[J] both.

    ``bytes_down``: bytes of one message; ``bytes_up``: bytes of one upload, or of each job's, int64[J].
    """
    client = schedule.client
    joules = devices.training[client] * (_ends(schedule) - schedule.dispatch_time)
    joules = joules + devices.down[client] * bytes_down + _sent(devices, schedule, bytes_up)
    return joules, joules * devices.carbon[client] / JOULES


def energy_until(
    devices: Devices, schedule: Schedule, moments: np.ndarray, bytes_down: int, bytes_up: np.ndarray | int
) -> tuple[np.ndarray, np.ndarray]:
    """Joules and g CO2e that all clients have spent by each of V moments, idle times too; float64[V] both.

    A job under way counts up to the moment; a message counts as a whole when it begins (down) or has arrived (up).
    """
    client, ends = schedule.client, _ends(schedule)
    sent = _sent(devices, schedule, bytes_up)

    def spent(factor: np.ndarray) -> np.ndarray:
        of_job = factor[client]
        power = (devices.training - devices.idle)[client] * of_job
        running = _ramp(moments, schedule.dispatch_time, power) - _ramp(moments, ends, power)
        received = _steps(moments, schedule.dispatch_time, devices.down[client] * bytes_down * of_job)
        return running + received + _steps(moments, ends, sent * of_job) + moments * float(factor @ devices.idle)

    return spent(np.ones(len(devices.training))), spent(devices.carbon / JOULES)


def _ends(schedule: Schedule) -> np.ndarray:
    """When each job ends for its client, float64[J]: with its upload, or when it fails or is called off.

    A failure counts whether the server has noticed it or not. Where it is not known when a job failed, as the file is
    an old one, the job ends when the server stops waiting for it.
    """
    waited = np.where(np.isfinite(schedule.freed_time), schedule.freed_time, np.max(schedule.time, initial=0.0))
    if len(schedule.failure_time):
        waited = np.where(np.isfinite(schedule.failure_time), schedule.failure_time, waited)
    ends = np.where(np.isfinite(schedule.upload_time), schedule.upload_time, waited)
    return np.maximum(ends, schedule.dispatch_time)


def _sent(devices: Devices, schedule: Schedule, bytes_up: np.ndarray | int) -> np.ndarray:
    """Joules for the upload of each job that sends one, and for its further copies; float64[J].

    A lost upload counts once the server has noticed its loss.
    """
    sends = np.isfinite(schedule.upload_time) & (schedule.outcome != Outcome.WITHHELD)
    sends |= schedule.outcome == Outcome.LOST
    return np.where(sends, devices.up[schedule.client] * bytes_up * (1.0 + schedule.copies), 0.0)


def _ramp(moments: np.ndarray, starts: np.ndarray, power: np.ndarray) -> np.ndarray:
    """``sum_j power_j max(t - start_j, 0)`` at each moment t."""
    order = np.argsort(starts, kind="stable")
    slope, shift = (np.concatenate([[0.0], np.cumsum(v[order])]) for v in (power, power * starts))
    passed = np.searchsorted(starts[order], moments, side="right")
    return slope[passed] * moments - shift[passed]


def _steps(moments: np.ndarray, at: np.ndarray, amounts: np.ndarray) -> np.ndarray:
    """The sum of the amounts whose times are at or before each moment, up to rounding, as bytes are counted."""
    order = np.argsort(at, kind="stable")
    total: np.ndarray = np.concatenate([[0.0], np.cumsum(amounts[order])])
    return total[at_or_before(at[order], moments)]
