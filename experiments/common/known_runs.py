"""The evaluations of runs as one CSV file: several days, or several machines, can train the runs of one table.

A script with the option ``--known`` writes ``NAME_TASK_curves.csv`` beside its table. Given such files, it trains only
those of its runs that are not in them. A run is recognised by a hash of its settings (with seed and time budget); the
version of the package is not recorded. Only evaluations and the number of updates are kept: these runs have no
settings, parameters, counters or schedule.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
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
EVALUATIONS = {"time": "f8", "update": "i8", "step": "i8", "accuracy": "f4", "loss": "f4"}


class Known(NamedTuple):
    """A run with its row and its seed in a table."""

    variant: str
    seed: int
    run: Run


def with_known(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser with ``--known``."""
    about = "curves (NAME_TASK_curves.csv) of runs that need not be trained again"
    parser.add_argument("--known", nargs="+", type=curves_file, default=[], metavar="CSV", help=about)
    return parser


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


def read(paths: Iterable[Path]) -> dict[str, Known]:
    """The runs in the files, by key; of two with the same key the last one."""
    found: dict[str, Known] = {}
    for path in paths:
        table = files.csv_columns(path.read_bytes(), collections.defaultdict(lambda: "f8", RUN | EVALUATIONS))
        for name in dict.fromkeys(table["settings"].tolist()):
            rows = {column: values[table["settings"] == name] for column, values in table.items()}
            evaluations = {
                column: values
                for column, values in rows.items()
                if column in EVALUATIONS or (column not in RUN and not np.isnan(values).all())
            }
            updates = {"client": np.zeros(rows["updates"][0], np.int32)}
            run = Run({}, (), evaluations, updates, {}, {}, None)
            found[name] = Known(str(rows["variant"][0]), int(rows["seed"][0]), run)
    return found


def write(path: Path, found: Mapping[str, Known]) -> None:
    """Write the evaluations of runs, by key. The file gets its name only when complete."""
    evaluated = list(dict.fromkeys(column for known in found.values() for column in known.run.evaluations))
    columns: dict[str, list[np.ndarray]] = {name: [] for name in [*RUN, *evaluated]}
    for name, (variant, seed, run) in found.items():
        count = len(run.evaluations["time"])
        same = {"settings": name, "variant": variant, "seed": seed, "updates": len(run.updates["client"])}
        for column, value in same.items():
            columns[column].append(np.full(count, value))
        for column in evaluated:
            values = run.evaluations.get(column, np.full(count, np.nan))  # for example without compression
            columns[column].append(np.asarray(values).astype(EVALUATIONS.get(column, "f8")))
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.write(path, files.csv_bytes({name: np.concatenate(parts) for name, parts in columns.items()}))
