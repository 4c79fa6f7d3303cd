"""The file of a sweep: an example, its tables, and its data sets; read without NumPy and JAX."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedjax_async.base import check, registry
from fedjax_async.config.settings import SWEEP_KEYS

SWEEP_EXAMPLE = """\
# mixing.toml: how much of an arriving model FedAsync should mix in. (16 + 2) settings x 4 seeds = 72 runs.
seeds = 4                      # 0, 1, 2, 3; or a list: seeds = [0, 7]
target = 0.7                   # optional: also measure what it takes to reach this test accuracy
final = "tail"                 # optional, as --final: last, best, tail or tail:K

[base]                         # settings of all runs: any flag of `fedjax-async run`, with _ for -
method = "fedasync"
dataset = "fashion_mnist_6k"
model = "lenet5"
clients = 10
validation_fraction = 0.1      # held out of training, to choose the best settings; else the test set chooses them
lr = 0.05
updates = 500
eval_updates = 50

[grid]                         # every combination is a run
method.mixing = [0.2, 0.4, 0.6, 0.8]
method.exponent = [0.0, 0.5, 1.0, 2.0]

[[points]]                     # optional: runs beside the grid; a list of values makes a small grid
method = "fedavg"
lr = [0.05, 0.1]

[roles]                        # optional: tuned, compared or world, to change the usual role of a setting
method.exponent = "tuned"      # the usual role of an option of the method
"""

SWEEP_EPILOG = f"""a complete FILE.toml:

{"".join(f"  {line}".rstrip() + chr(10) for line in SWEEP_EXAMPLE.splitlines())}
Swept settings have the same names as under [base]: lr, batch_size, delay, partition, model... An option of a name
follows a dot: method.mixing, timing.size, delay.sigma, partition.alpha, optimizer.momentum.
A table of labels in place of a list names the values in folders, tables and pictures:
  [grid.method]
  Ours = "fedasync:mixing=0.4"
  FedBuff = "fedbuff@buffer:size=5"
TOML's rules: seeds, target and final stand above the first [table]; an option in the same table as its
name, such as method = ..., must be quoted: "method.mixing" = [0.2, 0.4].

Every swept setting has a role:
  tuned     the best value is chosen, by the mean over seeds of the final accuracy on the validation part: usual for lr,
            batch_size, epochs, ... and options of the method
  compared  each value is a row of the tables: method, timing, compress, ...
  world     each value is another problem, and nothing is chosen across problems: dataset, partition, clients, delay,
            model, budgets, ...
best.md has the chosen values for each compared value in each world, the number of trials, and the scores on the test
set.

  fedjax-async sweep mixing.toml --dry-run
  fedjax-async sweep mixing.toml --out runs/mixing --memory-limit 4GB
  fedjax-async sweep mixing.toml --submit slurm:partition=gpu,gpus=1,time=120
  fedjax-async sweep mixing.toml --submit ray:cpus=4
  fedjax-async sweep mixing.toml --submit array
  fedjax-async sweep mixing.toml --collect

Each run is saved as soon as it is finished; the same command continues with the missing ones. With --submit every
stack of runs (runs that train side by side) becomes a job, and --collect writes the tables of the runs that are
finished so far. Ray's jobs end with the command, so it waits for them; jobs of lost workers run again. With array
nothing is started: a batch service runs `fedjax-async job DIR N` for each number N that is printed.
"""


def sweep_content(path: str | Path) -> dict[str, Any]:
    """The tables of a sweep's file; ``ValueError`` naming the file if it is not TOML or has unknown tables."""
    path = check.path("sweep file", path)
    if not path.is_file():
        raise ValueError(f"sweep file = {str(path)!r}: must be a TOML file (fedjax-async sweep --help shows one)")
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        # "Cannot overwrite a value": method = ... and method.mixing = ... in one table
        hint = '; quote an option beside its name, as in "method.mixing" = [0.4]' if "Cannot" in str(error) else ""
        raise ValueError(f"sweep file = {str(path)!r}: must be TOML; {error}{hint}") from error
    for key in found:
        registry.find(f"key of {path.name}", dict.fromkeys(SWEEP_KEYS), key)
    for key, kind, example in (
        ("base", dict, "[base]"),
        ("grid", dict, "[grid]"),
        ("roles", dict, "[roles]"),
        ("points", list, "[[points]]"),
    ):
        check.require(isinstance(found.get(key, kind()), kind), key, found.get(key), f"a table, {example}")
    return found


def sweep_datasets(found: Mapping[str, Any], default: str) -> list[str]:
    """The specs of the data sets that the tables of a sweep name; ``default`` where they name none."""
    base, grid, points = found.get("base", {}), found.get("grid", {}), found.get("points", [])
    tables = [*([grid] if grid or not points else []), *points]
    chosen = [table.get("dataset", base.get("dataset", default)) for table in tables if isinstance(table, dict)]
    chosen = [list(value.values()) if isinstance(value, dict) else value for value in chosen]  # labels and their specs
    specs = [spec for value in chosen for spec in (value if isinstance(value, list) else [value])]
    return [spec for spec in specs if isinstance(spec, str)]
