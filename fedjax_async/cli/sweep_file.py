"""The flags of ``fedjax-async sweep FILE.toml``, and its file as TOML."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedjax_async import check, registry

EXAMPLE = """\
# mixing.toml: how much of an arriving model FedAsync should mix in. (16 + 2) settings x 4 seeds = 72 runs.
seeds = 4                      # 0, 1, 2, 3; or a list: seeds = [0, 7]
target = 0.7                   # optional: what it takes to this test accuracy

[base]                         # what all runs share: any flag of `fedjax-async run`, with _ for -
method = "fedasync"
dataset = "fashion_mnist_6k"
model = "lenet5"
clients = 10
lr = 0.05
updates = 500
eval_updates = 50

[grid]                         # every combination is a run
method.mixing = [0.2, 0.4, 0.6, 0.8]
method.exponent = [0.0, 0.5, 1.0, 2.0]

[[points]]                     # optional: runs beside the grid; a list of values makes a small grid
method = "fedavg"
lr = [0.05, 0.1]
"""

EPILOG = f"""a complete FILE.toml:

{"".join(f"  {line}".rstrip() + chr(10) for line in EXAMPLE.splitlines())}
What is swept is named as under [base]: lr, batch_size, delay, partition, model... An option inside a name
is reached by a dot: method.mixing, timing.size, delay.sigma, partition.alpha, optimizer.momentum.
TOML's rules: seeds and target stand above the first [table], and beside method = ... in the same table
its options are quoted: "method.mixing" = [0.2, 0.4].

  fedjax-async sweep mixing.toml --dry-run
  fedjax-async sweep mixing.toml --out runs/mixing --memory-limit 4GB
  fedjax-async sweep mixing.toml --submit slurm:partition=gpu,gpus=1,time=120
  fedjax-async sweep mixing.toml --collect

Each finished run is saved at once; the same command again goes on with what is missing. With --submit
every stack of runs becomes a job, and --collect makes the tables of what the jobs have finished so far.
"""

KEYS = ("base", "grid", "points", "seeds", "target")


def content(path: str | Path) -> dict[str, Any]:
    """A sweep's file as it stands; ``ValueError`` naming the file where it is no TOML or has unknown tables."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"sweep file = {str(path)!r}: must be a TOML file (fedjax-async sweep --help shows one)")
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        # method = ... and method.mixing = ... in one table
        hint = '; quote an option beside its name, as in "method.mixing" = [0.4]' if "Cannot" in str(error) else ""
        raise ValueError(f"sweep file = {str(path)!r}: must be TOML; {error}{hint}") from error
    for key in found:
        registry.find(f"key of {path.name}", dict.fromkeys(KEYS), key)
    for key, kind, example in (("base", dict, "[base]"), ("grid", dict, "[grid]"), ("points", list, "[[points]]")):
        check.require(isinstance(found.get(key, kind()), kind), key, found.get(key), f"a table, {example}")
    return found


def datasets(found: dict[str, Any], usual: str) -> list[str]:
    """The specs of the data sets of all runs, as far as the tables name them; ``usual`` where nothing is said."""
    base, grid, points = found.get("base", {}), found.get("grid", {}), found.get("points", [])
    tables = [*([grid] if grid or not points else []), *points]
    chosen = [table.get("dataset", base.get("dataset", usual)) for table in tables if isinstance(table, dict)]
    specs = [spec for value in chosen for spec in (value if isinstance(value, list) else [value])]
    return [spec for spec in specs if isinstance(spec, str)]


def add(
    command: Callable[[str, str, Callable[[argparse.Namespace], None]], argparse.ArgumentParser],
    action: Callable[[argparse.Namespace], None],
) -> None:
    """Add the command; ``command(name, about, action)`` makes a parser."""
    sub = command("sweep", "many runs from one file: a grid over any settings, side by side", action)
    sub.epilog, sub.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    sub.add_argument("file", metavar="FILE.toml", help="what to sweep")
    sub.add_argument("--out", metavar="DIR", help="folder for the results [runs/FILE]")
    sub.add_argument("--dry-run", action="store_true", help="check and plan everything, say what would happen, stop")
    sub.add_argument("--memory-limit", metavar="SIZE", help="device memory in use at a time, e.g. 4GB [the device's]")
    sub.add_argument("--lanes", type=int, metavar="N", help="stacks trained at the same time [one a CPU core]")
    sub.add_argument(
        "--overwrite", action="store_true", help="take the place of another sweep in DIR; equal runs are kept"
    )
    sub.add_argument("--quiet", action="store_true", help="no progress bar")
    sub.add_argument(
        "--submit",
        metavar="SCHEDULER",
        help="as jobs: slurm or local, with options partition=, time= "
        "(minutes), memory= (GB), cpus=, gpus=, account=, qos=, constraint=, at_once=",
    )
    sub.add_argument("--collect", action="store_true", help="train nothing: tables and pictures of what is finished")
