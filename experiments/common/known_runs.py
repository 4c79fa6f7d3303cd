"""The evaluations of runs as one CSV file: several days, or several machines, can train the runs of one table.

A script with the option ``--known`` writes ``NAME_TASK_curves.csv`` beside its table. Given such files, it trains only
the runs that they lack, and its table and pictures have all of them. A run is known by a hash of its settings, seed and
time budget included; which version of the package trained it is not recorded. Only results are kept: these runs have
neither parameters nor a schedule.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_async.results import files
from fedjax_async.types import Run

# Types of the columns that are equal in all rows of a run, and of those of its evaluations; others, such as bytes, are
# float64.
RUN = {"settings": "U12", "variant": "U99", "seed": "i8", "updates": "i8"}
EVALUATIONS = {"update": "i8", "step": "i8", "accuracy": "f4", "loss": "f4"}


def with_known(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser with ``--known``."""
    about = "curves (NAME_TASK_curves.csv) of runs that need not be trained again"
    parser.add_argument("--known", nargs="+", type=existing, default=[], metavar="CSV", help=about)
    return parser


def existing(text: str) -> Path:
    """The path of a file that exists."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text}: there is no such file")
    return Path(text)


def key(settings: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits that stand for the settings of a run."""
    return hashlib.sha256(json.dumps(files.plain(settings), sort_keys=True).encode()).hexdigest()[:12]


def read(paths: Iterable[Path]) -> dict[str, Run]:
    """The runs in the files, by key; each has its evaluations and the number of its updates only."""
    found: dict[str, Run] = {}
    for path in paths:
        table = files.csv_columns(path.read_bytes(), collections.defaultdict(lambda: "f8", RUN | EVALUATIONS))
        for name in dict.fromkeys(table["settings"].tolist()):
            rows = table["settings"] == name
            evaluations = {column: values[rows] for column, values in table.items() if column not in RUN}
            evaluations = {column: values for column, values in evaluations.items() if not np.isnan(values).all()}
            updates = {"client": np.zeros(table["updates"][rows][0], np.int32)}
            found[name] = Run({}, (), evaluations, updates, {}, {}, None)
    return found


def write(path: Path, keys: Sequence[str], variants: Sequence[str], seeds: Sequence[int], runs: Sequence[Run]) -> None:
    """Write the evaluations of all runs. The file gets its name only when complete."""
    evaluated = list(dict.fromkeys(column for run in runs for column in run.evaluations))
    columns: dict[str, list[np.ndarray]] = {name: [] for name in [*RUN, *evaluated]}
    for name, variant, seed, run in zip(keys, variants, seeds, runs, strict=True):
        count = len(run.evaluations["time"])
        same = {"settings": name, "variant": variant, "seed": seed, "updates": len(run.updates["client"])}
        for column, value in same.items():
            columns[column].append(np.full(count, value))
        for column in evaluated:
            values = run.evaluations.get(column, np.full(count, np.nan))  # for example without compression
            columns[column].append(np.asarray(values).astype(EVALUATIONS.get(column, "f8")))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(files.csv_bytes({name: np.concatenate(parts) for name, parts in columns.items()}))
    part.replace(path)
