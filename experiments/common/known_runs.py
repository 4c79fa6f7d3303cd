"""The evaluations of runs as one CSV file: several days, or several machines, can train the runs of one table.

A script with the option ``--known`` writes ``NAME_TASK_curves.csv`` beside its table. Given such files, it trains only
those of its runs that are not in them. A run is recognised by a hash of its settings (with seed and time budget); the
version of the package is not recorded, but the machine and the version of JAX are, in the column ``machine`` (older
files lack it). Only evaluations and the number of updates are kept: these runs have no settings, parameters, counters
or schedule.

What a table needs of single clients, such as their own accuracies, is in ``NAME_TASK_clients.csv`` beside the curves,
one row per run and client. It is read with them, as ``per_client`` of the runs.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_async.base import disk
from fedjax_async.base.fingerprints import fingerprint
from fedjax_async.config import earlier
from fedjax_async.data import Dataset
from fedjax_async.results import files
from fedjax_async.types import Run

# RUN: types of the columns with one value per run. EVALUATIONS: of those with one value per evaluation; all others,
# such as bytes, are float64.
RUN = {"settings": "U12", "variant": "U99", "seed": "i8", "updates": "i8"}
MACHINE = {"machine": "U199"}  # after these; left out if no run has one
EVALUATIONS = {"time": "f8", "update": "i8", "step": "i8", "accuracy": "f4", "loss": "f4"}
# Types of the columns with one value per client; those with one per evaluation, "own_accuracy 0", ..., are float32.
CLIENTS = {"settings": "U12", "client": "i8", "joined": "f8", "uploads": "i8", "staleness": "i8"}
CURVES_END, CLIENTS_END = "_curves.csv", "_clients.csv"
TIME_IS_UP = 3  # exit code of a script whose ``--minutes`` are over before all of its runs are trained


class TimeIsUp(SystemExit):
    """Ends a script with the code ``TIME_IS_UP``, before it writes a table."""

    def __init__(self) -> None:
        super().__init__(TIME_IS_UP)


class Known(NamedTuple):
    """A run with its row and its seed in a table."""

    variant: str
    seed: int
    run: Run
    machine: str = ""  # that trained it, and its version of JAX; empty: not recorded


def with_known(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser with ``--known``, ``--minutes`` and ``--no-pictures``."""
    about = "curves (NAME_TASK_curves.csv) of runs that need not be trained again"
    parser.add_argument("--known", nargs="+", type=curves_file, default=[], metavar="CSV", help=about)
    about = f"train one run after the other, begin none after M minutes; exit code {TIME_IS_UP}: some are missing, and "
    about += "there is no table; 0 minutes only count the known runs [no limit]"
    parser.add_argument("--minutes", type=minutes, default=None, metavar="M", help=about)
    parser.add_argument("--no-pictures", action="store_true", help="write tables only")
    parser.set_defaults(began=time.monotonic())
    return parser


def minutes(text: str) -> float:
    """A number of minutes, at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"must be a number >= 0, not {text}")
    return value


def time_left(given: argparse.Namespace) -> bool:
    """Whether another run may begin: ``--minutes`` are not over, or were not given."""
    limit = getattr(given, "minutes", None)
    return limit is None or time.monotonic() - given.began < 60 * limit


def curves_file(text: str) -> Path:
    """The path of an existing file of curves."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text}: there is no such file")
    with path.open(encoding="utf-8") as file:
        if file.readline().split(",")[: len(RUN)] != list(RUN):
            raise argparse.ArgumentTypeError(f"{text}: must be a file of curves, with columns {', '.join(RUN)}, ...")
    return path


# Runs in older files were made when these rates were the defaults, and specs did not give them.
ONCE_USUAL = {"fedbuff:server_lr=1@": "fedbuff@", "ca2fl:server_lr=1@": "ca2fl@"}


def key(settings: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits that stand for the settings of a run; floats count with ten digits, data by a digest.

    Rates that were once the default count as left out, and what is the default today counts as given.
    """
    rounded = {k: fingerprint(v) if isinstance(v, Dataset) else v for k, v in settings.items()}
    rounded |= {k: float(f"{v:.10g}") for k, v in settings.items() if isinstance(v, float)}
    method = str(settings.get("method", ""))
    if left := earlier.defaults_of(method, settings.get("timing")):
        rounded["defaults"] = left
    for given, without in ONCE_USUAL.items():
        if method.startswith(given):
            rounded["method"] = without + method.removeprefix(given)
    return hashlib.sha256(json.dumps(files.plain(rounded), sort_keys=True).encode()).hexdigest()[:12]


def clients_file(curves: Path) -> Path:
    """The file with the clients' columns beside a file of curves."""
    return curves.with_name(f"{curves.name.removesuffix('.csv').removesuffix('_curves')}{CLIENTS_END}")


def read(paths: Iterable[Path]) -> dict[str, Known]:
    """The runs in the files, by key; of two with the same key the last one, or the one with clients' columns."""
    found: dict[str, Known] = {}
    for path in paths:
        per_client = _read_clients(clients_file(path))
        table = files.csv_columns(path.read_bytes(), collections.defaultdict(lambda: "f8", RUN | MACHINE | EVALUATIONS))
        for name in dict.fromkeys(table["settings"].tolist()):
            rows = {column: values[table["settings"] == name] for column, values in table.items()}
            evaluations = {
                column: values
                for column, values in rows.items()
                if column in EVALUATIONS or (column not in RUN | MACHINE and not np.isnan(values).all())
            }
            updates = {"client": np.zeros(rows["updates"][0], np.int32)}
            # shorter runs have empty cells after their last evaluation
            of_clients = {k: v[: len(rows["time"])] if v.ndim > 1 else v for k, v in per_client.get(name, {}).items()}
            if name in found and found[name].run.per_client and not of_clients:
                continue
            run = Run({}, (), evaluations, updates, of_clients, {}, None)
            machine = str(rows["machine"][0]) if "machine" in rows else ""
            found[name] = Known(str(rows["variant"][0]), int(rows["seed"][0]), run, machine)
    return found


def _read_clients(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """Key of a run -> its clients' columns, [clients] or [evaluations, clients]; empty without such a file."""
    if not path.is_file():
        return {}
    table = files.csv_columns(path.read_bytes(), collections.defaultdict(lambda: "f4", CLIENTS))
    series: dict[str, list[str]] = {}
    for column in table:
        series.setdefault(column.rpartition(" ")[0] if column not in CLIENTS else column, []).append(column)
    found: dict[str, dict[str, np.ndarray]] = {}
    for name in dict.fromkeys(table["settings"].tolist()):
        rows = table["settings"] == name
        found[name] = {
            stem: table[stem][rows] if stem in CLIENTS else np.stack([table[column][rows] for column in columns])
            for stem, columns in series.items()
            if stem not in ("settings", "client")
        }
    return found


def write(path: Path, found: Mapping[str, Known]) -> None:
    """Write the evaluations of runs, by key, and their ``per_client`` beside. Files get their names when complete."""
    evaluated = list(dict.fromkeys(column for known in found.values() for column in known.run.evaluations))
    machine = list(MACHINE) if any(known.machine for known in found.values()) else []
    columns: dict[str, list[np.ndarray]] = {name: [] for name in [*RUN, *machine, *evaluated]}
    for name, (variant, seed, run, trained_on) in found.items():
        count = len(run.evaluations["time"])
        same = {"settings": name, "variant": variant, "seed": seed, "updates": len(run.updates["client"])}
        same |= dict.fromkeys(machine, trained_on)
        for column, value in same.items():
            columns[column].append(np.full(count, value))
        for column in evaluated:
            values = run.evaluations.get(column, np.full(count, np.nan))  # for example without compression
            columns[column].append(np.asarray(values).astype(EVALUATIONS.get(column, "f8")))
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.write(path, files.csv_bytes({name: np.concatenate(parts) for name, parts in columns.items()}))
    with_clients = {name: known.run.per_client for name, known in found.items() if known.run.per_client}
    if with_clients:
        disk.write(clients_file(path), files.csv_bytes(_clients_table(with_clients)))


def _clients_table(found: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The columns of ``NAME_TASK_clients.csv``; a column [evaluations, clients] becomes one for each evaluation."""
    flat = []
    for name, columns in found.items():
        clients = np.shape(next(iter(columns.values())))[-1]
        row: dict[str, np.ndarray] = {"settings": np.full(clients, name), "client": np.arange(clients)}
        for stem, values in columns.items():
            row |= {stem: values} if np.ndim(values) == 1 else {f"{stem} {e}": v for e, v in enumerate(values)}
        flat.append(row)
    longest = max(flat, key=len)
    parts = [{column: row.get(column, np.full(len(row["client"]), np.nan, "f4")) for column in longest} for row in flat]
    return {
        column: np.concatenate([np.asarray(part[column]).astype(CLIENTS.get(column, "f4")) for part in parts])
        for column in longest
    }
