"""Runs whose targets are numbers: no file has an accuracy, which would be NaN throughout."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest

from fedjax_async import simulate
from fedjax_async.config import Settings
from fedjax_async.config.grid import expand
from fedjax_async.results import explain, files, load
from fedjax_async.results.sweep_report import write_tables
from fedjax_async.results.sweep_table import swept_run
from tests.results.made_up import make_run

SMALL = {
    **{"dataset": "quadratic:clients=3", "model": "linear", "steps": 1, "updates": 6, "eval_updates": 3},
    **{"delay": "constant:mean=10", "clients": 3},
}


def header(path):
    with path.open(newline="") as lines:
        return next(csv.reader(lines))


def accuracies(folder):
    """The columns of the CSV files of a folder that hold an accuracy, by file."""
    found = {path.name: [name for name in header(path) if "accuracy" in name] for path in folder.rglob("*.csv")}
    assert found
    return {name: columns for name, columns in found.items() if columns}


PARTS = SMALL | {"test_fraction": 0.5, "validation_fraction": 0.2, "engine": "reference"}


@pytest.mark.parametrize("settings", [{"method": "fedasync", "per_client": True}, {"method": "dpsgd"}])
def test_a_runs_files_have_no_accuracy_and_its_tables_read_back(tmp_path, settings):
    run = simulate(**PARTS | settings, out=tmp_path / "run", plots=False, stream="csv")
    assert accuracies(tmp_path) == {}
    assert {"evaluations.csv", "stream.csv", "clients.csv"} <= {path.name for path in (tmp_path / "run").iterdir()}
    again = load(tmp_path / "run")
    assert set(again.evaluations) == set(run.evaluations)
    for name, values in run.evaluations.items():
        np.testing.assert_array_equal(again.evaluations[name], values)
        assert again.evaluations[name].dtype == np.asarray(values).dtype
    assert np.isnan(again.evaluations["accuracy"]).all()  # in Python the column is always there


def test_a_sweeps_tables_have_no_accuracy(tmp_path):
    point = expand(Settings(**SMALL), {"lr": [0.01]})[0]
    write_tables([swept_run(point, make_run([math.nan, math.nan]))], tmp_path)
    assert accuracies(tmp_path) == {}
    assert "tail_loss" in header(tmp_path / "runs.csv")


def test_an_explanation_has_no_accuracy(tmp_path):
    out = tmp_path / "run"
    simulate(**SMALL, out=out, plots=False)
    explain(out, out=tmp_path / "why", say=lambda line: None)
    assert accuracies(tmp_path) == {}
    assert np.isnan(explain(out, out=tmp_path / "why", say=lambda line: None).arrivals["accuracy"]).all()  # read back


def test_only_accuracies_that_are_missing_throughout_are_left_out():
    nothing, some = [math.nan, math.nan], [math.nan, 0.5]
    given = {"accuracy": some, "global_accuracy": nothing, "client_own_accuracy_worst": nothing, "top5": nothing}
    given |= {"my_accuracy": nothing, "smallest_mass": nothing}
    assert list(files.applicable(given)) == ["accuracy", "top5", "my_accuracy", "smallest_mass"]


def test_files_written_with_the_column_are_read_as_before():
    types = {"loss": "<f4", "accuracy": "<f4", "top": "<f8"}
    old = files.csv_columns(b"accuracy,loss\nnan,1.5\n", types)
    new = files.csv_columns(b"loss\n1.5\n", types)
    for name in ("loss", "accuracy"):
        np.testing.assert_array_equal(old[name], new[name])
        assert old[name].dtype == new[name].dtype == np.float32
    assert "top" not in new
