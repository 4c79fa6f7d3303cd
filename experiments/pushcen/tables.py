"""Tables 1, 4 to 7 and curves of all and of the late nodes; beyond the paper masses, topologies, bandwidths.

    python experiments/pushcen/tables.py --scale laptop                      # everything, see the README
    python experiments/pushcen/tables.py --scale laptop --tables 1 --tasks cifar10 --alphas 0.1 0.4
    python experiments/pushcen/tables.py --scale paper --tables 1 --tasks cifar10

Table 5 (late nodes) is in two columns of every row: a tenth of the nodes joins late in all runs. Figures 3 to 9 are the
curves of Table 1's runs.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from late import catching_up, late_curves
from study import (
    METHODS,
    PARTITION,
    RELEASED,
    SEEDS,
    TASKS,
    Rows,
    Variant,
    all_of,
    common,
    draw,
    missing,
    options,
    over_tasks,
    parse_tasks,
    report,
    run_task,
    summary,
    with_known,
)

ALPHAS = (0.1, 0.4, 1.0)
BANDWIDTHS = {"1 Mbit/s": 125e3, "10 Mbit/s": 1.25e6, "100 Mbit/s": 12.5e6}  # bytes per second, up and down


def row(name: str, kind: str = "pushcen", /, *, alpha: float = 0.4, picture: str = "", **changes: Any) -> Variant:
    """A row: a method of ``METHODS`` with changes. All rows set the same keys, so equal runs are trained only once."""
    usual = {"partition": PARTITION.format(alpha), "exchange": None, "network": None} | (METHODS | RELEASED)[kind]
    return Variant(name, usual | changes, picture)


def table_1(alphas: Sequence[float]) -> Iterable[Variant]:
    """Accuracy for three degrees of heterogeneity."""
    for alpha in alphas:
        for method in METHODS:
            yield row(f"{method}, alpha={alpha:g}", method, alpha=alpha, picture=f"alpha={alpha:g}")


def released(alphas: Sequence[float]) -> Iterable[Variant]:
    """Table 1 with the methods as the code has them that made it."""
    for alpha in alphas:
        for method in RELEASED:
            yield row(f"{method}, alpha={alpha:g}", method, alpha=alpha, picture=f"released, alpha={alpha:g}")


def table_4() -> Iterable[Variant]:
    """Ablations of PushCen."""
    yield row("pushcen")
    yield row("no regulariser", method="pushcen:anchor=0")
    yield row("no buffer", exchange="push_sum:newest=false,capacity=none")
    yield row("no push-sum", exchange="mean:capacity=16")
    yield row("full models", method="async_dfedavg", exchange="push_sum")


def table_6() -> Iterable[Variant]:
    """Numbers of centroids; 32 is the default."""
    for k in (8, 16, 32, 64):
        yield row(f"K={k}", **({} if k == 32 else {"method": f"pushcen:k={k}"}))


def table_7() -> Iterable[Variant]:
    """Weights of the regulariser, the squared distance as in the paper's text; 0.1 is the default."""
    for weight in (0.0, 0.001, 0.01, 0.1, 1.0):
        yield row(f"lambda={weight:g}", **({} if weight == 0.1 else {"method": f"pushcen:anchor={weight:g}"}))


def masses() -> Iterable[Variant]:
    """Buffer policies for superseded messages, for the paper's rule and that of the released code."""
    yield row("carry")
    yield row("merge", exchange="push_sum:policy=merge")
    yield row("discard", exchange="push_sum:policy=discard")
    yield row("discard, repeated senders", exchange="push_sum:policy=discard,newest=false")
    yield row("released", method="pushcen_released")
    kept = "push_sum:policy=merge,aggregate_at=end,reference=released"
    yield row("released, mass kept", method="pushcen_released", exchange=kept)


def topologies() -> Iterable[Variant]:
    """Fixed graphs instead of gossip."""
    yield row("gossip")
    for name in ("ring", "ring:directed=true", "exponential", "random_regular:degree=4", "small_world", "complete"):
        yield row(name, topology=name)


def bandwidths() -> Iterable[Variant]:
    """Nodes that send their messages one after another over a slow uplink."""
    for title, rate in BANDWIDTHS.items():
        for method in ("pushcen", "divshare", "async_dfedavg"):
            link = f"link:up={rate:g},down={rate:g},latency=0.01,shared=true"
            yield row(f"{method}, {title}", method, picture=title, network=link)


BY_ALPHA: dict[str, Callable[[Sequence[float]], Iterable[Variant]]] = {"1": table_1, "released": released}
TABLES: dict[str, Callable[[], Iterable[Variant]]] = {
    "4": table_4,
    "6": table_6,
    "7": table_7,
    "masses": masses,
    "topologies": topologies,
    "bandwidths": bandwidths,
}


def parsed() -> argparse.Namespace:
    """The parsed options."""
    parser = with_known(options(__doc__, "tables"))
    parser.add_argument("--tables", nargs="+", choices=[*BY_ALPHA, *TABLES], default=[*BY_ALPHA, *TABLES])
    parser.add_argument("--alphas", nargs="+", type=float, choices=ALPHAS, help="of Table 1 and released [all]")
    given = parse_tasks(parser, TASKS, ["fashion_mnist_6k"], SEEDS)
    if given.alphas and not BY_ALPHA.keys() & set(given.tables):
        parser.error("argument --alphas: must be given with --tables 1 or released, which alone have these rows")
    given.alphas = given.alphas or ALPHAS
    return given


def main() -> None:
    """Run and draw the chosen tables of each task; write the rows."""
    given = parsed()

    def rows(task: str, table: str) -> Rows:
        chosen = list(BY_ALPHA[table](given.alphas) if table in BY_ALPHA else TABLES[table]())
        chosen = chosen[:2] if given.scale == "smoke" else chosen
        runs = run_task(task, chosen, given)
        drawn = [variant for variant in chosen if variant.picture]
        stem = f"table_{table}" if table.isdigit() else table
        draw(f"{stem}_{task}", TASKS[task].title, drawn, runs, given)
        if table == "1":
            late = list(catching_up(runs))
            if late:  # with few nodes there may be no late one
                draw(f"late_{task}", TASKS[task].title, drawn, runs, given, late_curves)
                common.write_table(late, given.out / f"late_{task}.csv")
        return [{"table": table, "task": task, "variant": v.name, **summary(runs[v.name])} for v in chosen]

    def of_task(task: str) -> Rows:
        found = all_of(functools.partial(rows, task, table) for table in given.tables)
        return [row for each in found for row in each]

    report(over_tasks(given, lambda task: missing(task, given.scale), of_task), given)


if __name__ == "__main__":
    main()
