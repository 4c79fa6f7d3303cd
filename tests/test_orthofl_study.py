"""OrthoFL's experiments: values that the paper does not give are those that validation chose."""

from __future__ import annotations

import csv
import importlib.util
import sys
from pathlib import Path

import numpy as np

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
