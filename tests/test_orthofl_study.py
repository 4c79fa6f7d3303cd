"""OrthoFL's experiments: values that the paper does not give are those that validation chose."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.results.made_up import make_run

FOLDER = Path(__file__).resolve().parent.parent / "experiments" / "orthofl"


def module(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_the_open_numbers_are_those_with_the_highest_validation_accuracy(monkeypatch):
    study = module("study")
    monkeypatch.setitem(sys.modules, "study", study)
    tuning = module("tuning")
    with (FOLDER / "results" / "tuning_laptop.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for method, (_, spec, values) in tuning.OPEN.items():
        found = {float(row["value"]): row for row in rows if row["method"] == method}
        assert tuple(found) == values
        best = max(found, key=lambda value: float(found[value]["validation accuracy (%)"]))
        assert [value for value, row in found.items() if row["chosen"]] == [best]
        assert study.METHODS[method] == spec.format(f"{best:g}")


def test_the_accuracy_of_a_row_is_the_mean_of_the_last_tenth_of_its_evaluations():
    accuracy = [0.1] * 18 + [0.5, 0.9]
    (row,) = module("study").rows_of("mnist", {"orthofl": [make_run(accuracy)]}, "fedavg")
    found = [row[f"{name} (%)"].mean for name in ("accuracy", "last", "best")]
    np.testing.assert_allclose(found, [70, 90, 90], rtol=1e-6)


def test_known_runs_are_not_trained_again_and_give_the_same_table(monkeypatch, tmp_path):
    study = module("study")
    shared, known_runs = study.shared, study.known_runs
    setting = {"dataset": "fashion_mnist_6k", "model": "logistic", "steps": 1, "updates": 6, "eval_updates": 3}
    variants = [study.Variant("fedasync", {"method": "fedasync"}), study.Variant("orthofl", {"method": "orthofl"})]

    def run(known, out, seeds=2):
        given = argparse.Namespace(name="table", out=tmp_path / out, seeds=seeds, quiet=True, known=known)
        rows = study.rows_of("mnist", shared.run_variants("mnist", setting, variants, given), "fedasync")
        return repr(rows)  # one seed has no deviation: NaN

    one = run([], "one", seeds=1)
    rows = run([tmp_path / "one" / "table_mnist_curves.csv"], "two")
    trained = list((tmp_path / "two" / "runs" / "mnist" / "runs").iterdir())
    assert len(trained) == 2, "the second seed of each variant"
    assert rows == run([], "three")
    monkeypatch.setattr(shared, "_train", None)
    assert rows == run([tmp_path / "two" / "table_mnist_curves.csv"], "four")
    assert one == run([tmp_path / "two" / "table_mnist_curves.csv"], "five", seeds=1)
    copy = (tmp_path / "four" / "table_mnist_curves.csv").read_bytes()
    assert copy == (tmp_path / "two" / "table_mnist_curves.csv").read_bytes()
    assert len(known_runs.read([tmp_path / "five" / "table_mnist_curves.csv"])) == 4, "also those of the known file"
    assert one == run([tmp_path / "one" / "table_mnist_curves.csv"], "two", seeds=1)
    assert len(known_runs.read([tmp_path / "two" / "table_mnist_curves.csv"])) == 4, "also those of the file before"


def test_only_files_of_curves_are_known(tmp_path):
    known_runs = module("study").known_runs
    (tmp_path / "table.csv").write_text("task,variant\nmnist,fedavg\n")
    for name, why in (("table.csv", "must be a file of curves"), ("nothing.csv", "no such file")):
        with pytest.raises(argparse.ArgumentTypeError, match=why):
            known_runs.curves_file(str(tmp_path / name))


def test_columns_that_only_some_runs_have_are_kept(tmp_path):
    known_runs = module("study").known_runs
    plain = make_run([0.1, 0.2])
    other = plain._replace(evaluations=plain.evaluations | {"values_bytes_up": np.array([0.0, 7.5])})
    known = {"a": known_runs.Known("plain", 0, plain), "b": known_runs.Known("other", 3, other)}
    known_runs.write(tmp_path / "curves.csv", known)
    found = known_runs.read([tmp_path / "curves.csv"])
    for key, run in (("a", plain), ("b", other)):
        assert found[key][:2] == known[key][:2]
        assert found[key].run.evaluations.keys() == run.evaluations.keys()
        for column, values in run.evaluations.items():
            np.testing.assert_array_equal(found[key].run.evaluations[column], values)
        assert len(found[key].run.updates["client"]) == len(run.updates["client"])
