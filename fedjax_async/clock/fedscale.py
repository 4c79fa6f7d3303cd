"""FedScale's device traces as tables of this package: delays and links from capacities, availability from behaviour.

FedScale (Lai et al. 2022) has two traces, pickled dictionaries by device, which are read here as JSON (``fedjax-async
data fedscale --help`` has the line that converts them; nothing is unpickled):

- capacity: ``{device: {"computation": ms, "communication": kbit/s}}``. FedScale counts the inference time of one
  example, ``computation`` milliseconds, three times for a training step: a step on B examples takes
  ``3 B computation / 1000`` seconds. ``communication`` are kilobits of 1,024 bits a second, down and up.
- behaviour: ``{device: {"active": [s], "inactive": [s], "finish_time": s, ...}}``: from each of the times ``active`` to
  the next of ``inactive`` the device can take part; after ``finish_time`` the recording begins again. Sessions of
  length zero, which the published record has, are left out, and so is a device without any other.

Source: FedScale's ``ClientMetadata`` and its description of trace files.
"""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_async.base import disk, notices
from fedjax_async.base.check import is_real, optional, path, require, whole
from fedjax_async.base.grammar import quoted

TRAINING = 3.0  # times the inference of an example
KILOBIT = 1024 / 8  # bytes


def write_tables(
    folder: str | Path,
    *,
    capacity: str | Path | None = None,
    behaviour: str | Path | None = None,
    clients: int | None = None,
    batch_size: int = 32,
) -> str:
    """Write ``delay.csv`` and ``network.csv`` from capacities, ``availability.csv`` from behaviour; returns the flags.

    Args:
      folder: where the tables go; it may exist.
      capacity, behaviour: JSON files, one of them or both. Devices become clients 0, 1, ... in the order of the file.
      clients: how many devices, from the first on; by default all. A run needs a device for each of its clients.
      batch_size: examples per local step.

    Returns: the flags of a run that uses the tables. Raises ``ValueError`` naming file, device and field.
    """
    require(capacity is not None or behaviour is not None, "capacity, behaviour", None, "given, at least one of them")
    optional(whole, "clients", clients)
    whole("batch_size", batch_size)
    tables: dict[str, tuple[Sequence[str], Sequence[Sequence[object]]]] = {}
    flags = []
    where = path("folder", folder)
    if capacity is not None:
        found = capacities(capacity, clients)
        steps = [TRAINING * batch_size * ms / 1000 for ms, _ in found]
        tables["delay.csv"] = (("client", "mean", "std", "compute"), [(i, s, 0, s) for i, s in enumerate(steps)])
        rates = [KILOBIT * kilobits for _, kilobits in found]
        tables["network.csv"] = (("client", "down", "up", "latency"), [(i, r, r, 0) for i, r in enumerate(rates)])
        flags += ["--delay", f"csv:path={quoted(str(where / 'delay.csv'))},reference_steps=1"]
        flags += ["--network", f"csv:path={quoted(str(where / 'network.csv'))}"]
    if behaviour is not None:
        recorded = online_intervals(behaviour, clients)
        ends = {end for _, end in recorded}
        rows = [(i, *interval) for i, (own, _) in enumerate(recorded) for interval in own]
        tables["availability.csv"] = (("client", "start", "end"), rows)
        repeat = f",repeat={ends.pop():.15g}" if len(ends) == 1 else ""
        flags += ["--availability", f"csv:path={quoted(str(where / 'availability.csv'))}{repeat}"]
    where.mkdir(parents=True, exist_ok=True)
    for name, (header, lines) in tables.items():
        disk.write(where / name, _as_csv(header, lines))
    return shlex.join(flags)


def capacities(file: str | Path, clients: int | None = None) -> list[tuple[float, float]]:
    """(milliseconds of inference an example, kilobits a second) of each device in a JSON file."""
    names = ("computation", "communication")
    found = []
    for device, own in _devices(file, clients):
        inference, rate = (_number(f"'{file}', device {device}: {name}", own.get(name)) for name in names)
        found.append((inference, rate))
    return found


def online_intervals(file: str | Path, clients: int | None = None) -> list[tuple[list[tuple[float, float]], float]]:
    """(online intervals, length of the recording) of each device in a JSON file, seconds.

    Intervals after the end of the recording are left out, and so are those of length zero; one that crosses the end is
    cut. Devices that are never online are left out, with a warning, and do not count as ``clients``. If recordings
    differ in length, shorter ones are repeated up to the longest; such a table does not repeat.
    """
    recorded: list[tuple[list[tuple[float, float]], float]] = []
    never = []
    for device, own in _devices(file, None):
        if len(recorded) == clients:
            break
        where = f"'{file}', device {device}"
        end = _number(f"{where}: finish_time", own.get("finish_time"))
        active, inactive = (_times(f"{where}: {name}", own.get(name)) for name in ("active", "inactive"))
        require(len(active) == len(inactive), f"{where}: active", len(active), f"{len(inactive)} times, as in inactive")
        changes = [moment for pair in zip(active, inactive) for moment in pair]
        require(
            changes == sorted(changes), f"{where}: active and inactive", changes[:6], "in turn, in increasing order"
        )
        online = [(a, min(b, end)) for a, b in zip(active, inactive) if a < min(b, end)]
        if online:
            recorded.append((online, end))
        else:
            never.append(device)
    allowed = "from active to inactive for some seconds before finish_time, for at least one device"
    require(len(recorded) > 0, f"'{file}'", f"{len(never)} devices that are never online", allowed)
    require(
        len(recorded) >= (clients or 1), "clients", clients, f"at most {len(recorded)}, the devices online in '{file}'"
    )
    if never:
        shown = ", ".join(never[:3]) + (", ..." if len(never) > 3 else "")
        text = f"'{file}': {len(never)} devices that are never online are left out ({shown})"
        warnings.warn(text, notices.RunWarning, stacklevel=2)
    longest = max(end for _, end in recorded)
    return [(list(_repeated(online, end, longest)), end) for online, end in recorded]


def _number(where: str, value: Any) -> float:
    require(is_real(value) and value > 0, where, value, "a finite number > 0")
    return float(value)


def _times(where: str, values: Any) -> list[float]:
    good = isinstance(values, list) and all(is_real(value) and value >= 0 for value in values)
    require(good, where, values, "a list of finite numbers >= 0")
    return [float(value) for value in values]


def _repeated(online: list[tuple[float, float]], end: float, until: float) -> Iterable[tuple[float, float]]:
    """The intervals, repeated every ``end`` seconds up to ``until``."""
    for cycle in range(math.ceil(until / end)):
        for start, stop in online:
            if cycle * end + start < until:
                yield cycle * end + start, min(cycle * end + stop, until)


def _devices(file: str | Path, clients: int | None) -> list[tuple[str, Mapping[str, object]]]:
    """The first devices of a JSON file; ``ValueError`` if it is not JSON, or has fewer."""
    found = path("file", file)
    try:
        content = json.loads(found.read_bytes())
    except OSError as error:
        raise ValueError(f"'{file}': cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        remedy = "`fedjax-async data fedscale --help` tells how to make one from a pickle"
        raise ValueError(f"'{file}': must be a JSON file; {remedy}") from error
    require(isinstance(content, dict) and bool(content), f"'{file}'", f"a {type(content).__name__}", "devices by name")
    devices = list(content.items())[:clients]
    require(len(devices) >= (clients or 1), "clients", clients, f"at most {len(devices)}, the devices in '{file}'")
    for device, own in devices:
        require(isinstance(own, dict), f"'{file}', device {device}", f"a {type(own).__name__}", "an object")
    return devices


def _as_csv(header: Sequence[str], lines: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([f"{value:.15g}" for value in line] for line in lines)
    return text.getvalue().encode()
