"""Tables and figures of the papers as commands, in order of worth: ``plan.py`` counts, ``verify.py`` checks them.

Minutes are those of one run. On a CPU they are of 2 cores: measured where a paper's page names them (PushCen, OrthoFL
on MNIST, HAR and CIFAR-10 at ``laptop`` scale, AsynFL on Fashion-MNIST), else scaled from those by local steps, batch
and model. On a GPU they are estimates from the rates of one H200 (``benchmarks/results/h200``) and of the runs of
OrthoFL and AsynFL on one H100; nothing there was timed at these settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from scripts import HERE

CURVES = "_curves.csv"


class Row(NamedTuple):
    """A table or figure, at one scale, with a number of seeds."""

    paper: str  # folder
    title: str
    script: str
    scale: str
    seeds: int
    options: str  # of the script, beside scale and seeds
    curves: str  # its file of curves in ``results``; empty if its script has no ``--known``
    minutes: float  # of a run, 2 CPU cores
    gpu_minutes: float  # of a run, one GPU
    table: str = ""  # the committed CSV file that the command makes, if the seeds are the same
    also: tuple[str, ...] = ()  # other files of curves with some of its runs

    @property
    def results(self) -> Path:
        """The folder of the paper's committed results."""
        return HERE / self.paper / "results"

    @property
    def known(self) -> list[Path]:
        """The committed files of curves with runs of this row."""
        names = dict.fromkeys((self.curves, *self.also))
        return [path for name in names if name and (path := self.results / name).is_file()]

    @property
    def command(self) -> str:
        """The command without ``--known``."""
        seeds = f" --seeds {self.seeds}" if self.seeds else ""
        options = f" {self.options}" if self.options else ""
        return f"python experiments/{self.paper}/{self.script} --scale {self.scale}{seeds}{options}"


def orthofl(title: str, script: str, scale: str, options: str, minutes: float, gpu: float, **more: object) -> Row:
    """A row of OrthoFL with three seeds; ``curves`` and ``table`` are named after script and scale if not given."""
    name = f"{script}_{scale}"
    given = {"curves": name + CURVES, "table": f"{name}.csv"} | more
    return Row("orthofl", title, f"{script}.py", scale, 3, options, minutes=minutes, gpu_minutes=gpu, **given)


def asynfl(title: str, script: str, scale: str, seeds: int, task: str, minutes: float, gpu: float) -> Row:
    """A row of AsynFL: one task."""
    name = f"{script}_{task}_{scale}"
    options, table = f"--tasks {task}", f"{name}.csv"
    also = (f"table_3_{task}_{scale}{CURVES}",)  # with some of the runs of the figures
    return Row("asynfl", title, f"{script}.py", scale, seeds, options, name + CURVES, minutes, gpu, table, also)


def pushcen(title: str, scale: str, seeds: int, tables: str, task: str, minutes: float, gpu: float, *more: str) -> Row:
    """A row of PushCen: some tables of one task. All tables of a task and scale share a file of curves."""
    options = " ".join((f"--tables {tables} --tasks {task}", *more))
    curves = f"tables_{task}_{scale}{CURVES}"
    return Row("pushcen", title, "tables.py", scale, seeds, options, curves, minutes, gpu)


def whole(paper: str, title: str, script: str, scale: str, options: str, minutes: float, gpu: float, table: str) -> Row:
    """A row whose script has no ``--known``: it is there if its table is."""
    return Row(paper, title, script, scale, 0, options, "", minutes, gpu, table)


def named(rows: list[str]) -> str:
    """The option ``--variants`` with these rows."""
    return "--variants " + " ".join(f'"{name}"' for name in rows)


RATES = ["fedavg, mixing", *(f"orthofl {rate}, mixing" for rate in ("0.2", "0.4", "0.6", "0.8"))]
EPOCHS = [f"{name}, epochs {epochs}" for epochs in (1, 5, 10) for name in ("fedavg", "orthofl")]
MEASURED = ("figure_8_laptop_curves.csv",)  # MNIST at laptop scale: the runs of Figure 8 with the measured delays
RELEASED = ("table_1_mnist_paper_curves.csv",)  # MNIST at the released settings
NEWS = "table_1_20newsgroups"

PUSHCEN_PAPER = [
    *(
        pushcen(f"Table 1, CIFAR-10, alpha {a}", "paper", 3, "1", "cifar10", 28, 1, f"--alphas {a}")
        for a in (0.1, 0.4, 1)
    ),
    pushcen("Table 5 and late nodes, CIFAR-10", "paper", 3, "1", "cifar10", 28, 1),
    pushcen("Table 1's methods as released, CIFAR-10", "paper", 1, "released", "cifar10", 28, 1),
    pushcen("released rule and masses, CIFAR-10", "paper", 1, "masses", "cifar10", 28, 1),
]
ORTHOFL_MISSING = [
    orthofl("Table 1, HAR", "table_1", "paper", "--tasks har", 120, 1, curves=f"table_1_har_paper{CURVES}", table=""),
    whole("orthofl", "Figure 2", "figure_2.py", "paper", "", 75, 3, "figure_2_paper.csv"),
    orthofl("Figure 6", "figure_6", "paper", "", 5, 0.3, also=RELEASED),
    orthofl("Figure 8", "figure_8", "paper", "", 5, 0.3, also=RELEASED),
    orthofl("Figure 9, MNIST", "figure_9", "paper", "--tasks mnist", 5, 0.3, also=RELEASED),
    orthofl(
        "Figure 9, CIFAR-10", "figure_9", "laptop", "--tasks cifar10", 2.5, 0.2, table="figure_9_cifar10_laptop.csv",
        curves=f"figure_9_cifar10_laptop{CURVES}", also=(f"table_1_cifar10_laptop{CURVES}",),
    ),
    orthofl(
        "Table 1, CIFAR-10, VGG-11", "table_1", "paper", "--tasks cifar10", 780, 7, table="table_1_cifar10_paper.csv",
        curves=f"table_1_cifar10_paper{CURVES}",
    ),
    orthofl(
        "Figure 9, CIFAR-10", "figure_9", "paper", "--tasks cifar10", 780, 7, table="figure_9_cifar10_paper.csv",
        curves=f"figure_9_cifar10_paper{CURVES}", also=(f"table_1_cifar10_paper{CURVES}",),
    ),
    orthofl(
        "Table 1, 20 Newsgroups, 320 arrivals", "table_1", "laptop", "--tasks 20newsgroups_long", 14, 0.5,
        curves=f"{NEWS}_long_laptop{CURVES}", table=f"{NEWS}_long_laptop.csv",
    ),
    orthofl(
        "Table 1, 20 Newsgroups", "table_1", "paper", "--tasks 20newsgroups", 900, 8,
        curves=f"{NEWS}_paper{CURVES}", table=f"{NEWS}_paper.csv",
    ),
    orthofl("Figure 10, with the released rule", "figure_10", "paper", "", 5, 0.3, table="", also=RELEASED),
]  # fmt: skip
ASYNFL_MISSING = [
    *(
        asynfl(f"{title}, CIFAR-10, {net}", script, "paper", 1, f"cifar10_{net.lower()}", minutes, gpu)
        for net, minutes, gpu in (("CNN", 3300, 20), ("AlexNet", 4400, 30))
        for title, script in (
            ("Table III, Figures 1 to 3", "table_3"),
            ("Figure 4", "figure_4"),
            ("Figure 5", "figure_5"),
        )
    ),
    asynfl("Figure 4, Fashion-MNIST", "figure_4", "paper", 3, "fashion_mnist", 1, 0.05),
    asynfl("Figure 5, Fashion-MNIST", "figure_5", "paper", 3, "fashion_mnist", 1, 0.05),
    asynfl("Table III, Figures 1 to 3, Fashion-MNIST", "table_3", "paper", 3, "fashion_mnist", 1, 0.05),
]
ASYNCCURVE = [
    *(
        whole(
            "asynccurve", f"Figures 1 and 3, Q, seed {seed}", "figure_1_3.py", "paper", f"--seed {seed}", 1500, 60,
            f"figure_1_3_seed_{seed}_paper.csv",
        )
        for seed in (0, 1, 2)
    ),
    whole("asynccurve", "Figure 2", "figure_2.py", "paper", "", 60, 5, "figure_2_paper.csv"),
    whole("asynccurve", "methods, 1,000 updates", "table_methods.py", "paper", "", 3e3, 120, "table_methods_paper.csv"),
    whole("asynccurve", "Figures 1 and 3, Q", "figure_1_3.py", "laptop", "", 60, 5, "figure_1_3_laptop.csv"),
    whole("asynccurve", "Figure 2", "figure_2.py", "laptop", "", 20, 3, "figure_2_laptop.csv"),
    whole("asynccurve", "methods", "table_methods.py", "laptop", "", 120, 20, "table_methods_laptop.csv"),
]  # fmt: skip
SMALL = "fashion_mnist_6k"
PUSHCEN_MORE = [
    *(pushcen(f"Table {t}, Fashion-MNIST", "laptop", 3, t, SMALL, 0.3, 0.3) for t in ("4", "6", "7")),
    *(pushcen(f"Table {t}, CIFAR-10", "laptop", 3, t, "cifar10", 1, 0.3) for t in ("4", "6", "7")),
    *(pushcen(f"Table {t}, CIFAR-10", "paper", 1, t, "cifar10", 28, 1) for t in ("4", "6", "7")),
    *(pushcen(f"{t}, Fashion-MNIST", "laptop", 3, t, SMALL, 0.3, 0.3) for t in ("masses", "topologies", "bandwidths")),
    pushcen("Table 1, Fashion-MNIST, 60 s", "laptop", 3, "1", f"{SMALL}_60s", 1.5, 0.5),
    pushcen("Table 1, Fashion-MNIST", "laptop", 3, "1", SMALL, 0.3, 0.3),
    pushcen("Table 1, CIFAR-10", "laptop", 3, "1", "cifar10", 1, 0.3),
]
# Tables that are there; without curves their runs would be trained again.
ORTHOFL_THERE = [
    orthofl(
        "Table 1, MNIST", "table_1", "paper", "--tasks mnist", 5, 0.3, table="table_1_mnist_paper.csv",
        curves=RELEASED[0],
    ),
    orthofl("Figure 10", "figure_10", "paper", named(RATES + EPOCHS), 5, 0.3),
    orthofl(
        "Table 1, MNIST", "table_1", "laptop", "--tasks mnist", 0.6, 0.2, table="table_1_mnist_laptop.csv",
        curves=MEASURED[0],
    ),
    orthofl(
        "Table 1, CIFAR-10", "table_1", "laptop", "--tasks cifar10", 2.5, 0.2, table="table_1_cifar10_laptop.csv",
        curves=f"table_1_cifar10_laptop{CURVES}",
    ),
    orthofl(
        "Table 1, 20 Newsgroups", "table_1", "laptop", "--tasks 20newsgroups", 3.5, 0.3, table=f"{NEWS}_laptop.csv",
        curves=f"{NEWS}_laptop{CURVES}", also=(f"{NEWS}_ceiling_laptop{CURVES}",),
    ),
    whole("orthofl", "Figure 2", "figure_2.py", "laptop", "", 6, 1, "figure_2_laptop.csv"),
    orthofl("Figure 6", "figure_6", "laptop", "", 1, 0.2, also=MEASURED),
    orthofl("Figure 8", "figure_8", "laptop", "", 0.6, 0.2),
    orthofl("Figure 9, MNIST", "figure_9", "laptop", "--tasks mnist", 0.6, 0.2, also=MEASURED),
    orthofl("buffers and rates, HAR", "times", "laptop", "", 0.2, 0.1),
    orthofl("local steps, CIFAR-10", "steps", "laptop", "", 7, 0.3)._replace(seeds=1),
    orthofl("tuning, MNIST", "tuning", "laptop", "", 1, 0.2)._replace(seeds=2),
    whole("orthofl", "Figure 3", "figure_3.py", "paper", "", 0.2, 0.2, "figure_3_paper.csv"),
    whole("orthofl", "Figures 11 and 12", "figure_11_12.py", "paper", "", 0.5, 0.5, "figure_11_12_paper.csv"),
    whole("orthofl", "Table 7", "table_7.py", "laptop", "", 5, 2, "table_7_laptop.csv"),
]  # fmt: skip
MLP, NETS = (
    ("mnist", "MNIST", "paper", 3, 0.6, 0.03),
    (("cifar10_cnn", "CNN", 2.4), ("cifar10_alexnet", "AlexNet", 0.3)),
)
ASYNFL_THERE = [
    *(
        asynfl(f"{title}, {MLP[1]}", script, MLP[2], MLP[3], MLP[0], MLP[4], MLP[5])
        for title, script in (
            ("Table III, Figures 1 to 3", "table_3"), ("Figure 4", "figure_4"), ("Figure 5", "figure_5"),
            ("quantisers", "quantisers"),
        )
    ),
    *(
        asynfl(f"{title}, CIFAR-10, {net}", script, "laptop", 1, task, minutes, 0.3)
        for task, net, minutes in NETS
        for title, script in (
            ("Table III", "table_3"), ("Figure 4", "figure_4"), ("Figure 5", "figure_5"), ("rates of signs", "signs"),
        )
    ),
    whole("asynfl", "Table II", "table_2.py", "paper", "", 0.3, 0.3, "table_2_paper.csv"),
]  # fmt: skip
# The whole command. ``small``: processor time measured, two processes; ``full``: an estimate of a minute a method in
# each of 19 blocks on a GPU, and fifty times that on two cores.
COMPARISON = [whole("comparison", "all methods, full", "comparison.py", "full", "", 41_000, 820, "full.csv")]
COMPARISON_THERE = [whole("comparison", "all methods, small", "comparison.py", "small", "", 30, 30, "small.csv")]

ROWS: list[Row] = [
    *PUSHCEN_PAPER,
    *ORTHOFL_MISSING,
    *COMPARISON,
    *ASYNFL_MISSING,
    *ASYNCCURVE,
    *PUSHCEN_MORE,
    *ORTHOFL_THERE,
    *ASYNFL_THERE,
    *COMPARISON_THERE,
]
