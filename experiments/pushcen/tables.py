"""Tables 1, 4, 5, 6 and 7 and the accuracy curves, and beyond the paper: masses, topologies, bandwidths.

    python experiments/pushcen/tables.py --scale laptop                      # everything, see the README
    python experiments/pushcen/tables.py --scale laptop --tables 1 masses
    python experiments/pushcen/tables.py --scale paper --tables 1 --tasks cifar10

Table 5, the late clients, is a column of every row: a tenth of the nodes joins late in all runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from study import (
    METHODS,
    SEEDS,
    TASKS,
    Rows,
    Variant,
    missing,
    options,
    over_tasks,
    parse_tasks,
    report,
    run_task,
    summary,
)

from fedjax_async.results.curves import accuracy_curve
from fedjax_async.results.figure import save_figure

USUAL = {"partition": "dirichlet:alpha=0.4,min_size=10"}
BANDWIDTHS = {"1 Mbit/s": 125e3, "10 Mbit/s": 1.25e6, "100 Mbit/s": 12.5e6}  # bytes a second, up and down


def table_1() -> Iterable[Variant]:
    """Accuracy for three degrees of heterogeneity."""
    for alpha in (0.1, 0.4, 1.0):
        partition = f"dirichlet:alpha={alpha:g},min_size=10"
        for method in METHODS:
            changes = METHODS[method] | {"partition": partition}
            yield Variant(f"{method}, alpha={alpha:g}", changes, f"alpha={alpha:g}")


def table_4() -> Iterable[Variant]:
    """Ablations."""
    changes = {
        "pushcen": {},
        "no regulariser": {"method": "pushcen:anchor=0"},
        "no buffer": {"exchange": "push_sum:newest=false,capacity=none"},
        "no push-sum": {"exchange": "mean:capacity=16"},
        "full models": {"method": "async_dfedavg", "exchange": "push_sum"},
    }
    for name, change in changes.items():
        yield Variant(name, USUAL | METHODS["pushcen"] | change)


def table_6() -> Iterable[Variant]:
    """The number of centroids."""
    for k in (8, 16, 32):
        yield Variant(f"K={k}", USUAL | METHODS["pushcen"] | {"method": f"pushcen:k={k}"})


def table_7() -> Iterable[Variant]:
    """The weight of the regulariser: of the squared distance, as the text has it."""
    for weight in (0.0, 0.001, 0.01, 0.1, 1.0):
        yield Variant(f"lambda={weight:g}", USUAL | METHODS["pushcen"] | {"method": f"pushcen:anchor={weight:g}"})


def masses() -> Iterable[Variant]:
    """What the buffer does with superseded messages, and the paper's reading beside the released code's."""
    for policy in ("carry", "merge", "discard"):
        yield Variant(policy, USUAL | METHODS["pushcen"] | {"exchange": f"push_sum:policy={policy}"})
    repeated = {"exchange": "push_sum:policy=discard,newest=false"}
    yield Variant("discard, repeated senders", USUAL | METHODS["pushcen"] | repeated)
    yield Variant("released", USUAL | METHODS["pushcen"] | {"method": "pushcen_released"})
    kept = {"method": "pushcen_released", "exchange": "push_sum:policy=merge,aggregate_at=end,reference=released"}
    yield Variant("released, mass kept", USUAL | METHODS["pushcen"] | kept)


def topologies() -> Iterable[Variant]:
    """Fixed graphs instead of gossip."""
    for name in ("ring", "ring:directed=true", "exponential", "random_regular:degree=4", "small_world", "complete"):
        yield Variant(name, USUAL | {"method": "pushcen", "topology": name})


def bandwidths() -> Iterable[Variant]:
    """Nodes that send their messages one after another over a slow uplink."""
    for title, rate in BANDWIDTHS.items():
        for method in ("pushcen", "divshare", "async_dfedavg"):
            link = f"link:up={rate:g},down={rate:g},latency=0.01,shared=true"
            yield Variant(f"{method}, {title}", USUAL | METHODS[method] | {"network": link}, title)


TABLES: dict[str, Callable[[], Iterable[Variant]]] = {
    "1": table_1,
    "4": table_4,
    "6": table_6,
    "7": table_7,
    "masses": masses,
    "topologies": topologies,
    "bandwidths": bandwidths,
}


def main() -> None:
    """Train, tabulate, draw."""
    parser = options(__doc__, "tables")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    given = parse_tasks(parser, TASKS, ["fashion_mnist_6k"], SEEDS)

    def rows(task: str) -> Rows:
        found: Rows = []
        for table in given.tables:
            chosen = list(TABLES[table]())
            chosen = chosen[:2] if given.scale == "smoke" else chosen
            runs = run_task(task, chosen, given)
            for picture in dict.fromkeys(one.picture for one in chosen if one.picture):
                figure = accuracy_curve({v.name: runs[v.name] for v in chosen if v.picture == picture}, final="last")
                figure.axes[0].set_title(f"{TASKS[task].title}, {picture}")
                save_figure(figure, given.out / f"{'_'.join((table, task, *picture.replace('/', ' ').split()))}.png")
            found += [{"table": table, "task": task, "variant": v.name, **summary(runs[v.name])} for v in chosen]
            report(found, given)
        return found

    report(over_tasks(given, lambda task: missing(task, given.scale), rows), given)


if __name__ == "__main__":
    main()
