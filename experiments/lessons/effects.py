"""Paired effects: differences of two configurations by world, task and seed, with intervals and Holm's correction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import ranks
import summary
from kept import Kept
from scenes import TASKS

from fedjax_async.results.metrics import spread
from fedjax_async.results.significance import PValue, holm, interval, paired

Pairs = Sequence[tuple[str, str]]  # (without, with)


def differences(runs: Iterable[Kept], pairs: Pairs) -> dict[tuple[str, str], np.ndarray]:
    """(world, task) -> the differences "with minus without" by seed, a mean over the pairs; positive is better.

    In points of accuracy, or in decimal digits of the loss gap.
    """
    finals = _finals(runs)
    blocks = dict.fromkeys((world, task) for world, task, _, _ in finals)
    found = {}
    for world, task in blocks:
        seeds = sorted({seed for w, t, _, seed in finals if (w, t) == (world, task)})
        found[world, task] = np.array([
            np.mean([finals[world, task, b, seed] - finals[world, task, a, seed] for a, b in pairs]) for seed in seeds
        ])  # fmt: skip
    return found


def units(runs: Iterable[Kept]) -> dict[tuple[str, str], float]:
    """(world, task) -> the deviation between the configurations' mean scores there, which makes blocks comparable."""
    finals = _finals(runs)
    means: dict[tuple[str, str], dict[str, list[float]]] = {}
    for (world, task, method, _), value in finals.items():
        means.setdefault((world, task), {}).setdefault(method, []).append(value)
    return {block: float(np.std([np.mean(each) for each in of.values()])) for block, of in means.items()}


def _finals(runs: Iterable[Kept]) -> dict[tuple[str, str, str, int], float]:
    """World, task, method, seed -> final score; larger is better."""
    return {
        (run.world, run.task, run.method, run.seed): summary.final(run.scores) * (-1 if TASKS[run.task].gap else 100)
        for run in runs
    }


def rows(runs: Sequence[Kept], groups: Mapping[str, Pairs], title: str) -> list[dict[str, Any]]:
    """A row for each group of pairs: its effect in every block and over all, with 95 % intervals (Student's t).

    *effect*: mean over blocks and seeds in units of the deviation between configurations; *p*: Wilcoxon's signed-rank
    test of these values, with Holm's correction over the groups.
    """
    unit, found, p = units(runs), [], []
    for name, pairs in groups.items():
        by_block = differences(runs, pairs)
        values = np.concatenate([each / (unit[block] or 1.0) for block, each in by_block.items()])
        p.append(paired(values).wilcoxon if np.any(values) else 1.0)
        better = sum(interval(each).low > 0 for each in by_block.values())
        worse = sum(interval(each).high < 0 for each in by_block.values())
        found.append({
            title: name,
            "pairs": len(pairs),
            **{", ".join(block): plus_minus(each) for block, each in by_block.items()},
            "effect": plus_minus(values),
            "blocks better": better,
            "blocks worse": worse,
        })  # fmt: skip
    return [row | {"p (Holm)": str(PValue(value))} for row, value in zip(found, holm(p), strict=True)]


def plus_minus(values: np.ndarray) -> str:
    """The mean with half of its 95 % interval."""
    found = interval(values)
    return f"{np.mean(values):.2f} ± {(found.high - found.low) / 2:.2f}"


def score_rows(runs: Sequence[Kept]) -> list[dict[str, Any]]:
    """A row for each configuration: its mean rank, and its score with one deviation over the seeds in every block."""
    table, methods, _, _ = summary.table_of_scores(runs)
    means = ranks.ranked(table).mean(axis=0)
    by_block = summary.grouped(runs)
    blocks = dict.fromkeys((run.world, run.task) for run in runs)
    found = [
        {
            "configuration": method,
            "mean rank": float(rank),
            **{
                ", ".join(block): spread([
                    (1 if TASKS[block[1]].gap else 100) * summary.final(run.scores) for run in by_block[*block, method]
                ])
                for block in blocks
            },
        }
        for method, rank in zip(methods, means, strict=True)
    ]  # fmt: skip
    return sorted(found, key=lambda row: row["mean rank"])
