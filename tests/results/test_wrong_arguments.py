"""Wrong arguments of the functions of ``results``: a one-line error names the argument and the allowed values."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedjax_async import results
from tests.results.made_up import make_run

TESTS = Path(__file__).parent
RUN = make_run()
RUNS = {"a": [RUN]}
OF_METHODS = "a dict, method -> list of its runs"
CALLS = [
    (lambda: results.comparison(3), f"runs = 3: must be {OF_METHODS}"),
    (lambda: results.comparison({"a": RUN}), "runs['a'] = 'a Run': must be a list of its runs"),
    (lambda: results.comparison({"a": [3]}), "runs['a'] = 'a list': must be a list of its runs"),
    (lambda: results.comparison(RUNS, interval="z"), "interval = 'z': must be one of t, bootstrap"),
    (lambda: results.relative_time([RUN], "a"), f"runs = 'a list': must be {OF_METHODS}"),
    (lambda: results.final_accuracy(3), "run = 3: must be a Run, as simulate returns"),
    (lambda: results.final_value(RUN, "acc"), "column = 'acc': must be one of time, update"),
    (lambda: results.to_target(RUN, "x"), "target = 'x': must be a number, such as 0.7"),
    (lambda: results.to_target("run", 0.5), "run = 'run': must be a Run"),
    (lambda: results.accuracy_curve([RUN]), f"runs = 'a list': must be {OF_METHODS}"),
    (lambda: results.gantt(RUN), "schedule = 'a Run': must be a Schedule; that of a run is run.schedule"),
    (lambda: results.staleness_histogram(3), "run = 3: must be a Run"),
    (lambda: results.choose(3), "sweep = 3: must be a Sweep, as sweep returns"),
    (lambda: results.table(3), "rows = 3: must be a list of at least one row, a dict"),
    (lambda: results.table([3]), "rows = [3]: must be a list of at least one row, a dict"),
    (lambda: results.table([{"a": 1.0}], decimals=2), "decimals = 2: must be a dict, column -> decimal places"),
    (lambda: results.write_report(["runs/one"], 3), "path = 3: must be a path"),
    (lambda: results.write_report("nosuch", "r.html"), "folders = 'nosuch': must be a list of folders"),
    (lambda: results.write_report([TESTS], "r.html", target="-1"), "target = '-1': must be an accuracy in (0, 1]"),
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
    with pytest.raises(ValueError) as raised:
        call()
    assert says in str(raised.value) and "\n" not in str(raised.value)
