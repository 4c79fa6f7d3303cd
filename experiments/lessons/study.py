"""Shared by the lessons: options, points with one range of rates for all that is compared, parts that are kept.

Worlds, tasks, tuning and the files of runs are those of ``experiments/comparison``.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "comparison"))

import common
import jax
import kept
import page
import parts
import spaces
import training
from scenes import Block

from fedjax_async.base import disk, notices
from fedjax_async.results import tables

HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE / "results", HERE / "README.md"
Rows = list[dict[str, Any]]
SCALES = ("smoke", "small", "full")
# Ranges of the server's rate, two decades each: of arrivals, buffers of five and rounds; the same for Adam's rate.
RATES = {"every": (0.01, 1.0), "buffer": (0.04, 4.0), "rounds": (0.1, 10.0)}
RATES |= {"every, adam": (1e-4, 1e-2), "buffer, adam": (5e-4, 5e-2), "rounds, adam": (2e-3, 0.2)}


def options(about: str | None, name: str) -> argparse.ArgumentParser:
    """The parser of the options that the lessons share."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=SCALES, default="small", help="what is run [small]")
    parser.add_argument("--out", type=Path, default=None, metavar="DIR", help=f"results [runs/lessons/{name}-SCALE]")
    parser.add_argument("--keep", action="store_true", help="write the committed results and the tables of the page")
    parser.add_argument("--quiet", action="store_true", help="do not print what is finished")
    parser.set_defaults(name=name)
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the options; the defaults of ``--out`` and ``--processes`` depend on the scale."""
    given = parser.parse_args()
    given.out = given.out or Path("runs/lessons") / f"{given.name}-{given.scale}"
    if getattr(given, "processes", 0) is None:
        given.processes = 0 if given.scale == "smoke" else parts.usual_processes()
    if getattr(given, "processes", 0) < 0:
        parser.error(f"argument --processes: must be a whole number >= 0, not {given.processes}")
    return given


def with_processes(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser with ``--processes``."""
    about = "at a time [one per core; smoke: none beside this one]"
    parser.add_argument("--processes", type=int, default=None, metavar="N", help=about)
    return parser


def points(spec: str, kind: str, lr: float, count: int, factor: float = 1.0) -> list[spaces.Point]:
    """``count`` points of a Halton sequence: the server's rate in ``factor`` times ``RATES[kind]``, and the local rate.

    ``spec``: a method with a place for the rate.

    >>> [point.spec for point in points("asgd:server_lr={:g}", "every", 0.1, 3)]
    ['asgd:server_lr=0.1', 'asgd:server_lr=0.0316', 'asgd:server_lr=0.316']
    """
    found = []
    for number in range(1, count + 1):
        shares = (spaces.radical_inverse(number, prime) for prime in spaces.PRIMES)
        rate = spaces.Knob("rate", factor, RATES[kind]).value(next(shares))
        found.append(spaces.Point(spec.format(rate), spaces.Knob("lr", lr, spaces.LOCAL_RATE).value(next(shares))))
    return found


class Tuned(NamedTuple):
    """A part of a lesson: a configuration that is tuned in a block, and run with fresh seeds."""

    method: str  # the name of its rows
    spec: str  # with a place for the server's rate
    kind: str  # of RATES
    block: Block
    folder: Path
    count: int  # tuning runs
    seeds: int
    changes: tuple[tuple[str, Any], ...] = ()  # further settings
    factor: float = 1.0  # of the range of rates

    def results(self) -> kept.Results:
        """Train it; ``ValueError`` if the settings are refused."""
        base = self.block.settings() | dict(self.changes)
        tried = points(self.spec, self.kind, base["lr"], self.count, self.factor)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", notices.RunWarning)  # points of a search may end badly
            found = training.tuned(self.method, self.block, base, tried, self.seeds)
        jax.clear_caches()  # a process runs many configurations, which share no programs
        return found


def publish(
    rows: Rows, given: argparse.Namespace, name: str, shown: Rows | None = None, decimals: Mapping[str, int] = {}
) -> None:
    """Print a table and write it as ``OUT/NAME.csv``, with scale, hardware and version of JAX, and ``OUT/NAME.md``.

    With ``--keep`` it also becomes ``results/SCALE_NAME.csv``, and at the scale of the page its table of that name
    there. ``shown``: the rows of the page, by default all; if there are none, the page has no such table.
    """
    shown = rows if shown is None else shown
    about = {"scale": given.scale, "hardware": common.hardware(), "jax": jax.__version__}
    for path in [given.out / f"{name}.csv", *([RESULTS / f"{given.scale}_{name}.csv"] if given.keep else [])]:
        path.parent.mkdir(parents=True, exist_ok=True)
        tables.write([row | about for row in rows], path)
    print(tables.write(rows, given.out / f"{name}.md", decimals=decimals).read_text(encoding="utf-8"))
    if given.keep and given.scale == "small" and shown:
        disk.write(PAGE, page.put(PAGE.read_text(encoding="utf-8"), name, shown, decimals).encode())


def publish_runs(found: kept.Results, given: argparse.Namespace, name: str) -> None:
    """Write all runs, and with ``--keep`` commit them."""
    for folder in [given.out, *([RESULTS] if given.keep else [])]:
        kept.write(folder, f"{given.scale}_{name}", found)
