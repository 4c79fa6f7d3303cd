"""The studies of OrthoFL and of AsynFL: values that the paper does not give are those that validation chose."""

from __future__ import annotations

import argparse
import csv
import functools
import hashlib
import json
import sys

import numpy as np
import pytest

from fedjax_async.data import load
from tests.experiment import EXPERIMENTS, module
from tests.results.made_up import make_run
from tests.results.test_seed_curves import SEEDS, check_end, ends, made

RESULTS = EXPERIMENTS / "orthofl" / "results"


def test_the_open_numbers_are_those_with_the_highest_validation_accuracy(monkeypatch):
    study = module("orthofl", "study")
    monkeypatch.setitem(sys.modules, "study", study)
    tuning = module("orthofl", "tuning")
    with (RESULTS / "tuning_laptop.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for method, (_, spec, values) in tuning.OPEN.items():
        found = {float(row["value"]): row for row in rows if row["method"] == method}
        assert tuple(found) == values
        best = max(found, key=lambda value: float(found[value]["validation accuracy (%)"]))
        assert [value for value, row in found.items() if row["chosen"]] == [best]
        assert study.METHODS[method] == spec.format(f"{best:g}")


@pytest.mark.parametrize(
    ("accuracy", "shown"),
    [
        ([0.1] * 18 + [0.5, 0.9], {"accuracy (%)": 70, "last (%)": 90, "best (%)": 90}),
        ([0.2, 0.1, 0.5, 0.4, 0.3, 0.5], {"mean dip (points)": (0 + 10 + 0 + 10 + 20 + 0) / 6}),
    ],
    ids=["the mean of the last tenth", "dips below the best so far"],
)
def test_a_row_has_numbers_of_its_evaluations(accuracy, shown):
    (row,) = module("orthofl", "study").rows_of("mnist", {"orthofl": [make_run(accuracy)]}, "fedavg")
    np.testing.assert_allclose([row[name].mean for name in shown], list(shown.values()), rtol=1e-5)


def test_figure_10_compares_mixing_rates_with_as_many_epochs_of_fedavg(monkeypatch):
    study = module("orthofl", "study")
    monkeypatch.setitem(sys.modules, "study", study)
    figure = module("orthofl", "figure_10")
    for scale in ("laptop", "paper"):
        mixing = [v for v in figure.variants("mnist", scale) if v.picture == "mixing"]
        assert [v.name.partition(",")[0] for v in mixing[:5]] == ["fedavg", *(f"orthofl {r}" for r in figure.RATES)]
        assert {(v.changes["epochs"], v.changes["batch_size"], v.changes["lr"]) for v in mixing} == {(5.0, 128, 0.01)}
        assert all(",reference_steps=234.375" in v.changes["delay"] for v in figure.variants("mnist", scale))
    rising = {"fedavg": 0.8, "orthofl": 0.9}
    runs = {f"{n}, mixing": [make_run([0.1, high, high])] for n, high in rising.items()}
    runs |= {f"{n}, epochs 5": [make_run([0.1, 0.1, 0.1, high / 2, high / 2])] for n, high in rising.items()}
    by_panel = functools.partial(
        study.rows_by_panel, "mnist", name="fedavg", baseline_of=figure.baseline_of, rows=study.rows_against
    )
    rows = by_panel(runs)
    assert [row["time / fedavg"].mean for row in rows] == [1.0, 1.0, 1.0, 1.0]
    np.testing.assert_allclose([row["above fedavg (points)"].mean for row in rows], [0, 10, 0, 5], atol=1e-4)
    del runs["fedavg, epochs 5"]
    rows = by_panel(runs)
    for column in ("time / fedavg", "above fedavg (points)"):
        assert [column in row for row in rows] == [True, True, False], "not without the baseline"


def test_figures_8_and_9_compare_the_rows_of_a_picture():
    study = module("orthofl", "study")
    accuracy = {"fedavg, a": [0.5, 0.6], "orthofl, a": [0.6, 0.7], "fedavg, b": [0.7, 0.8], "orthofl, b": [0.75, 0.85]}
    runs = {name: [make_run([0.1, last]) for last in each] for name, each in accuracy.items()}
    rows = study.rows_by_panel("mnist", runs, "fedavg")
    assert [row["variant"] for row in rows] == list(runs)
    np.testing.assert_allclose([row["above fedavg (points)"].mean for row in rows], [0, 10, 0, 5], atol=1e-4)
    np.testing.assert_allclose([row["above fedavg (points)"].std for row in rows], 0, atol=1e-4)
    assert [row["near best"] for row in rows] == ["no", "yes", "yes", "yes"], "within the picture"


def test_rows_with_the_same_settings_are_trained_once(monkeypatch, tmp_path):
    study = module("orthofl", "study")
    setting = {"dataset": "fashion_mnist_6k", "model": "logistic", "steps": 1, "updates": 6}
    variants = [study.Variant(name, {"method": "fedasync"}) for name in ("one", "two")]
    given = argparse.Namespace(name="table", out=tmp_path, seeds=2, quiet=True)
    trained = []
    monkeypatch.setattr(study.shared, "_train", lambda base, points, *rest: trained.extend(points) or points)
    runs = study.shared.run_variants("mnist", setting, variants, given)
    assert [point["seed"] for point in trained] == [0, 1]
    assert runs["one"] == runs["two"] == trained


def test_crowded_pictures_come_twice_the_second_time_with_bands(monkeypatch, tmp_path):
    study = module("orthofl", "study")
    names = [*study.METHODS, "one more"]
    variants = [study.Variant(f"{name}, many", {}, "many") for name in names] + [
        study.Variant("orthofl, few", {}, "few")
    ]
    drawn = {}
    monkeypatch.setattr(study, "run_task", lambda *_, **__: {v.name: [make_run([0.1, 0.5])] for v in variants})
    monkeypatch.setattr(study.shared, "save_figure", lambda figure, path: drawn.update({path.name: figure}))
    monkeypatch.setattr(sys, "argv", ["figure_8", "--scale", "smoke", "--out", str(tmp_path)])
    study.study("about", "figure_8", ["mnist"], variants, baseline="fedavg, many")
    assert sorted(drawn) == ["figure_8_smoke_bands_many.png", "figure_8_smoke_few.png", "figure_8_smoke_many.png"]
    bands = [len(drawn[f"figure_8_smoke{name}_many.png"].axes[0].collections) for name in ("", "_bands")]
    assert bands[1] - len(study.BANDS) == len(study.BANDS), "a band and a final bar of each row"
    assert bands[0] == len(names), "final bars only"


def test_known_runs_are_not_trained_again_and_give_the_same_table(monkeypatch, tmp_path):
    study = module("orthofl", "study")
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


def test_a_rate_that_was_once_the_default_has_the_key_of_older_files_and_todays_default_another():
    known_runs = module("orthofl", "study").known_runs
    before = {"method": "fedbuff@buffer:size=2", "lr": 0.1, "seed": 1}
    older = hashlib.sha256(json.dumps(before, sort_keys=True).encode()).hexdigest()[:12]  # as the files have it
    assert known_runs.key(before | {"method": "fedbuff:server_lr=1@buffer:size=2"}) == older
    assert len({older, known_runs.key(before), known_runs.key({**before, "method": "fedbuff"})}) == 3
    assert (
        known_runs.key({"method": "orthofl", "seed": 1})
        == hashlib.sha256(json.dumps({"method": "orthofl", "seed": 1}).encode()).hexdigest()[:12]
    )


def test_data_of_ones_own_count_by_their_content():
    known_runs = module("orthofl", "study").known_runs
    data = load("fashion_mnist_6k")
    found = [
        known_runs.key({"dataset": each})
        for each in (data, data._replace(x=data.x.copy()), data._replace(x=data.x + 1))
    ]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(("name", "why"), [("table.csv", "must be a file of curves"), ("nothing.csv", "no such file")])
def test_only_files_of_curves_are_known(tmp_path, name, why):
    (tmp_path / "table.csv").write_text("task,variant\nmnist,fedavg\n")
    with pytest.raises(argparse.ArgumentTypeError, match=why):
        module("orthofl", "study").known_runs.curves_file(str(tmp_path / name))


def test_columns_that_only_some_runs_have_are_kept(tmp_path):
    known_runs = module("orthofl", "study").known_runs
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


UNEQUAL = {"fedavg": made(SEEDS["one ends earlier"]), "fedbuff": made(SEEDS["more evaluations"])}


def test_a_figure_ends_at_the_numbers_of_the_table(tmp_path, monkeypatch):
    study, written, figures = module("orthofl", "study"), [], {}
    monkeypatch.setattr(study.shared, "save_figure", lambda figure, path: figures.update({path.name: figure}))
    monkeypatch.setattr(study, "run_task", lambda *arguments, **options: UNEQUAL)
    monkeypatch.setattr(study, "report", lambda rows, given: written.extend(rows))
    monkeypatch.setattr(sys, "argv", ["figure", "--scale", "smoke", "--out", str(tmp_path)])
    study.study("", "figure", ["mnist"], [study.Variant(name, {}) for name in UNEQUAL], baseline="fedavg")
    shown = ends(figures["figure_smoke.png"])
    assert [row["variant"] for row in written] == list(shown)
    for row in written:
        check_end(shown[row["variant"]], row["accuracy (%)"])


def test_a_figure_of_asynfl_ends_at_the_numbers_of_the_table(tmp_path, monkeypatch):
    study, figures = module("asynfl", "study"), {}
    monkeypatch.setattr(study, "save_figure", lambda figure, path: figures.update({path.name: figure}))
    study.draw(UNEQUAL, argparse.Namespace(out=tmp_path), "figure", "smoke")
    assert set(figures) == {"figure_smoke.png", "figure_smoke_loss.png"}
    for name, runs in UNEQUAL.items():
        check_end(ends(figures["figure_smoke.png"])[name], study.summary("smoke", name, runs, 0.5)["final (%)"])
