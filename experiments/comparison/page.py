"""The committed results of a scale, and the tables of ``README.md`` between their marks."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import heterogeneity
import kept
import numpy as np
import summary
from scenes import WORLDS, Block

from fedjax_async import Settings
from fedjax_async.base import disk
from fedjax_async.config.problem import data_of
from fedjax_async.config.resolving import resolved
from fedjax_async.results import tables
from fedjax_async.types import FederatedData

PAGE = Path(__file__).resolve().parent / "README.md"
DECIMALS = {"mean rank": 1, "seconds": 0, "updates": 0, "time to target (s)": 0, "sent to target (MB)": 2}
BEST = 8  # methods of each block in the table of details, and the columns that it leaves out
OF_MACHINE = ("hardware", "jax")
LEFT_OUT = ("largest staleness", "updates", "server steps", "seeds")


def mark(name: str, end: bool = False) -> str:
    """The comment before or after a written table."""
    return f"<!-- {'end of ' if end else ''}{name} -->"


def put(text: str, name: str, rows: Sequence[Mapping[str, Any]], decimals: Mapping[str, int] | None = None) -> str:
    """The page's text with a table between its marks; ``ValueError`` if they are missing."""
    begin, end = mark(name), mark(name, end=True)
    if begin not in text or end not in text:
        raise ValueError(f"{PAGE.name}: must have the marks {begin} and {end}")
    made = tables.table(list(rows), "markdown", decimals=DECIMALS | dict(decimals or {})) if rows else "Nothing.\n"
    made = re.sub(r" +", " ", re.sub(r"-{4,}", "---", made))
    return text.partition(begin)[0] + f"{begin}\n\n{made}\n{end}" + text.partition(end)[2]


def label_counts(data: FederatedData) -> np.ndarray:
    """How many training examples of each class every client has; int64 [clients, classes]."""
    classes = data.num_classes or 1 + int(np.max(data.y))
    owned = [data.y[data.order[low : low + size]] for low, size in zip(data.offset, data.size, strict=True)]
    return np.stack([np.bincount(np.asarray(each).ravel(), minlength=classes) for each in owned])


def world_rows() -> list[dict[str, Any]]:
    """A row for each world: its clients, virtual seconds and heterogeneity; labels are those of the logistic task.

    Ten digits, as the last ones of sums and exponentials depend on the processor.
    """
    rows: list[dict[str, Any]] = []
    for name, world in WORLDS.items():
        settings = Settings(**Block(name, "logistic", "small").settings())
        found = heterogeneity.measures(world.settings)
        rows.append({
            "world": name,
            "clients": world.clients,
            "mean job (s)": heterogeneity.clients_of(world.settings).mean,
            "speeds (c.v.)": heterogeneity.speed_spread(world.settings),
            "labels (distance)": heterogeneity.label_distance(label_counts(data_of(resolved(settings)))),
            **{one: found.get(one) for one in MEASURES},
        })  # fmt: skip
    return [{name: float(f"{cell:.10g}") if isinstance(cell, float) else cell for name, cell in row.items()}
            for row in rows]  # fmt: skip


MEASURES = ("DevMC-R", "DevMC-T", "StatMC-R", "StatMC-T", "InterMC-R", "InterMC-T")


def best_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The first rows of each block, without some of their columns."""
    places: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        places.setdefault((row["world"], row["task"]), []).append(row)
    first = [row for each in places.values() for row in each[:BEST]]
    return [{name: cell for name, cell in row.items() if name not in LEFT_OUT} for row in first]


def of_their_machines(table: str, before: str) -> str:
    """A CSV table of blocks; rows that were in ``before`` keep the machine and version that ran them."""

    def name_of(row: Mapping[str, str]) -> tuple[str, ...]:
        return row["world"], row["task"], row["method"], row["point"], f"{float(row['score']):.6g}"

    rows, older = (list(csv.DictReader(io.StringIO(text))) for text in (table, before))
    machines = {name_of(row): {name: row[name] for name in OF_MACHINE} for row in older}
    made = io.StringIO(newline="")
    writer = csv.DictWriter(made, list(rows[0]))
    writer.writeheader()
    writer.writerows(row | machines.get(name_of(row), {}) for row in rows)
    return made.getvalue()


def keep(found: kept.Results, scale: str, table: Path, folder: Path) -> None:
    """Write the results of a scale into ``folder``, and their tables into the page; ``table``: of all blocks."""
    kept.write(folder, scale, found)
    kept_table = folder / f"{scale}.csv"
    before = kept_table.read_bytes().decode() if kept_table.exists() else ""
    disk.write(kept_table, of_their_machines(table.read_bytes().decode(), before).encode())
    of_blocks, (of_ranks, numbers), worlds = summary.method_rows(found), summary.rank_rows(found), world_rows()
    for name, rows in {f"{scale}_ranks": of_ranks, f"{scale}_tests": [numbers], "worlds": worlds}.items():
        tables.write(rows, folder / f"{name}.csv")
    if scale != "small":
        return
    text = PAGE.read_text(encoding="utf-8")
    text = put(text, "worlds", worlds)
    text = put(text, "ranks", of_ranks)
    text = put(text, "tests", [numbers])
    text = put(text, "blocks", best_rows(of_blocks))
    text = put(text, "not run", [row._asdict() for row in found.refused])
    PAGE.write_text(text, encoding="utf-8")
