"""Wrong arguments of the functions of ``results``: a one-line error names the argument and the allowed values."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedjax_async import results, simulate
from fedjax_async.config import Settings
from fedjax_async.config.grid import expand
from fedjax_async.results.figure import Drawing
from fedjax_async.results.metrics import mean_curve
from fedjax_async.results.sweep_table import swept_runs
from fedjax_async.results.sweeps import Sweep
from tests.results.made_up import make_run
from tests.told import refusal

TESTS = Path(__file__).parent
RUN = make_run()
RUNS, ROWS = {"a": [RUN]}, [{"a": 1.0}]
SWEEP = Sweep(tuple(expand(Settings(updates=1), {"lr": [0.1]})), None, (RUN,))
OF_METHODS = "a dict, method -> list of its runs"
SCHEDULE = RUN.schedule
NO_ARRIVALS = RUN._replace(updates={name: column[:0] for name, column in RUN.updates.items()})
FINALS = "must be last, best, tail"
CALLS = [
    (lambda: results.comparison(RUNS, "fedprox"), "baseline = 'fedprox': must be"),
    (lambda: results.relative_time({"fedavg": [RUN], "third": []}, "fedavg"), "equally many seeds"),
    (lambda: results.final_accuracy(make_run([])), "at least one evaluation"),
    *(
        (lambda final=final: results.final_value(RUN, final=final), f"final = {final!r}: {FINALS}")
        for final in ("first", "tail:0", "tail:x", "best:2", None)
    ),
    (lambda: results.to_target(RUN, 0.5, "hours"), "unit = 'hours'"),
    (lambda: mean_curve([]), "runs = []"),
    (lambda: results.bar(-1), "total_updates = -1"),
    (lambda: results.accuracy_curve({}), "runs = {}"),
    (lambda: results.accuracy_curve(RUNS, "hour"), "x = 'hour'"),
    (lambda: results.gantt(SCHEDULE, clients=0), "clients = 0"),
    (lambda: results.gantt(SCHEDULE, clients=[3]), "clients = [3]"),
    (lambda: results.gantt(SCHEDULE, clients=[]), "clients = []"),
    (lambda: results.gantt(SCHEDULE, until=-1.0), "until = -1"),
    (lambda: results.staleness_histogram(NO_ARRIVALS), "at least one arrival"),
    (lambda: results.save_figure(results.gantt(SCHEDULE), "a.bmp"), "file ending = '.bmp'"),
    (lambda: results.Drawing(formats=("bmp",)), "format = 'bmp'"),
    (lambda: results.Drawing(formats=()), "format = "),
    (lambda: results.Drawing(width="thin"), "width = 'thin'"),
    (lambda: results.table(ROWS, "html"), "style = 'html'"),
    (lambda: results.table([]), "at least one row"),
    (lambda: results.write(ROWS, "t.html"), "file ending = '.html'"),
    (lambda: results.spread([]), "at least one number"),
    (lambda: results.interval([]), "at least one number"),
    (lambda: results.write_sweep(SWEEP), "folder = None"),
    (lambda: results.write_sweep(Sweep((), None), TESTS), "at least one finished run"),
    (lambda: swept_runs(SWEEP, target=70), "target = 70"),
    (lambda: simulate(overwrite=True, updates=1), "overwrite = True: must be left out without a folder (out)"),
    (lambda: simulate(drawing=Drawing(x="bytes"), updates=1), "must be left out without a folder (out) or with plots"),
    (lambda: simulate(again=True, updates=1), "again = True: must be left out without a folder (out)"),
    (lambda: results.comparison(3), f"runs = 3: must be {OF_METHODS}"),
    (lambda: results.comparison({"a": RUN}), "runs['a'] = 'a Run': must be a list of its runs"),
    (lambda: results.comparison({"a": [3]}), "runs['a'] = 'a list': must be a list of its runs"),
    (lambda: results.frame({"a": RUN}), "runs['a'] = 'a Run': must be a list of its runs"),
    (lambda: results.relative_time([RUN], "a"), f"runs = 'a list': must be {OF_METHODS}"),
    (lambda: results.final_accuracy(3), "run = 3: must be a Run, as simulate returns"),
    (lambda: results.final_value(RUN, "acc"), "column = 'acc': must be one of time, update"),
    (lambda: results.to_target(RUN, "x"), "target = 'x': must be a number, such as 0.7"),
    (lambda: results.to_target("run", 0.5), "run = 'run': must be a Run"),
    (lambda: results.accuracy_curve([RUN]), f"runs = 'a list': must be {OF_METHODS}"),
    (lambda: results.gantt(3), "schedule = 3: must be a Schedule, or a run with a server"),
    (lambda: results.gantt(RUN._replace(schedule=None)), "schedule = None: must be a Schedule, or a run with a server"),
    (lambda: results.staleness_histogram(3), "run = 3: must be a Run"),
    (lambda: results.choose(3), "sweep = 3: must be a Sweep, as sweep returns"),
    (lambda: results.table(3), "rows = 3: must be a list of at least one row, a dict"),
    (lambda: results.table([3]), "rows = [3]: must be a list of at least one row, a dict"),
    (lambda: results.table(ROWS, decimals="2"), "decimals = '2': must be a whole number, or a dict, column"),
    (lambda: results.table(ROWS, decimals={"a": -1}), "decimals['a'] = -1: must be a whole number from 0 to 17"),
    (lambda: results.table(ROWS, decimals=2.5), "decimals = 2.5: must be a whole number"),
    (lambda: results.write_report(["runs/one"], 3), "path = 3: must be a path"),
    (lambda: results.write_report("nosuch", "r.html"), "folders = 'nosuch': must be a list of folders"),
    (lambda: results.write_report([], "r.html"), "folders = []"),
    (lambda: results.write_report([TESTS, TESTS / "."], "r.html"), "different"),
    (lambda: results.write_report([TESTS / "none"], "r.html"), "must hold a finished run, comparison or sweep, but"),
    (lambda: results.write_report([TESTS], "r.txt"), "file ending = '.txt'"),
    (lambda: results.write_report([TESTS], f"{__file__}/r.html"), "must be a file that can be written"),
    (lambda: results.write_report([3], "r.html"), "folder = 3: must be a path"),
    (lambda: results.write_comparison(RUNS, __file__), "must be a folder, but it is a file"),
    (lambda: results.Drawing(formats="png,gif"), "format = 'png,gif': must be a tuple of formats"),
    (lambda: results.spread("abc"), "values = 'abc': must be a list of at least one number"),
    (lambda: results.spread([1, "a"]), "values = [1, 'a']: must be a list of at least one number"),
    (lambda: results.holm(["a"]), "p_values = ['a']: must be a list of numbers"),
    (lambda: results.holm([2.0]), "p_values = [2.0]: must be numbers in [0, 1], or NaN"),
    (lambda: results.paired([1.0]), "differences = [1.0]: must be a list of at least two numbers"),
    (lambda: results.interval(["a"]), "values = ['a']: must be a list of at least one number"),
]


@pytest.mark.parametrize(("call", "says"), CALLS, ids=[says[:50] for _, says in CALLS])
def test_wrong_arguments_are_named(call, says):
    assert says in refusal(call)
