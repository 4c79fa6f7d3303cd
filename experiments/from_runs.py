"""The tables of the comparison and of the lessons, made again from their committed runs; nothing is trained.

    python experiments/from_runs.py --out DIR

It writes the files of ``comparison/results`` and ``lessons/results`` that are computed from others there, under the
same names; ``verify.py`` compares them.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "common"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "comparison"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "lessons"))

import ablation
import bound
import effects
import kept
import learned
import summary
import variants

from fedjax_async.results import tables

HERE = Path(__file__).resolve().parent
SCALE = "small"  # the scale that is committed
COMPARISON, LESSONS = (HERE / paper / "results" for paper in ("comparison", "lessons"))
Rows = list[dict[str, Any]]


def of_comparison(out: Path) -> None:
    """Write every method in every block, the ranks, and the tests."""
    found = kept.read(COMPARISON, SCALE)
    given = argparse.Namespace(out=out, name=SCALE, scale=SCALE)
    variants.report(summary.method_rows(found), given)
    ranks, numbers = summary.rank_rows(found)
    tables.write(ranks, out / f"{SCALE}_ranks.csv")
    tables.write([numbers], out / f"{SCALE}_tests.csv")


def found_weights() -> list[bound.Found]:
    """The rows of the searches for weights in hindsight."""
    with (LESSONS / f"{SCALE}_bound.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    numbers = ("validation", "score", "lr", "least", "most")
    return [
        bound.Found(
            row["world"], row["task"], int(row["seed"]), row["weights"], *(float(row[name]) for name in numbers), []
        )
        for row in rows
    ]


def of_lessons() -> dict[str, Rows]:
    """Table -> its rows."""
    parts, unseen = (kept.read(LESSONS, f"{SCALE}_{name}") for name in ("ablation", "unseen"))
    runs = learned.with_best(unseen)
    others = [learned.BEST, learned.TUNED_LEARNED, *learned.METHODS]
    pairs = {name: [(name, learned.LEARNED)] for name in others}
    compared, weights = kept.read(COMPARISON, SCALE).runs, found_weights()
    return {
        "ablation": ablation.part_rows(parts.runs),
        "pairs": ablation.pair_rows(parts.runs),
        "configurations": effects.score_rows(parts.runs),
        "learned": effects.rows(runs, pairs, "frozen against"),
        "unseen": effects.score_rows(unseen.runs),
        "families": bound.family_rows(weights),
        "distances": bound.by_rank(bound.distances(weights, compared), compared),
    }


def main() -> None:
    """Read and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="of comparison/ and lessons/")
    given = parser.parse_args()
    of_comparison(given.out / "comparison")
    for name, rows in of_lessons().items():
        tables.write([row | {"scale": SCALE} for row in rows], given.out / "lessons" / f"{SCALE}_{name}.csv")


if __name__ == "__main__":
    main()
