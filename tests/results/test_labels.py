"""Labels: names of methods in tables, curves and folders, while the runs keep their specs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from fedjax_async import Method, Spec, cli, compare, named, sweep
from fedjax_async.config import sweeping
from fedjax_async.config.labelling import split
from fedjax_async.results import load, write_comparison
from fedjax_async.results.beside import LABELS, labelled, labels_in
from fedjax_async.results.compared import baseline_of, method_in
from fedjax_async.results.html_folders import read
from fedjax_async.results.reading import comparison_in
from fedjax_async.server import methods
from tests.cli.called import refused
from tests.results import sweep_engine
from tests.results.folders import contents, rows
from tests.results.made_up import make_run, of_group

SMALL = {"model": "logistic", "clients": 4, "updates": 6, "steps": 2}
FLAGS = ("--model", "logistic", "--clients", "4", "--updates", "6", "--steps", "2", "--quiet", "--no-plots")
NAMES = {"Ours": "fedasync:mixing=0.4", "Fed Avg": "fedavg@cohort:size=2", "asgd": "asgd"}


@pytest.fixture
def made_up(monkeypatch):
    monkeypatch.setattr(sweeping, "execute_group", of_group)


@pytest.mark.usefixtures("made_up")
def test_labels_name_rows_folders_and_evaluations_and_the_runs_keep_their_specs(tmp_path):
    runs = compare(NAMES, out=tmp_path, seeds=2, plots=False, progress=False, **SMALL)
    assert list(runs) == list(NAMES)
    assert [seeds[0].settings["method"] for seeds in runs.values()] == list(NAMES.values())
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["Fed_Avg", "Ours", "asgd"]
    assert json.loads((tmp_path / LABELS).read_bytes()) == {"Ours": "Ours", "Fed_Avg": "Fed Avg"}
    before = contents(tmp_path)
    text = write_comparison(runs, tmp_path, plots=False)
    assert contents(tmp_path) == before and {"comparison.csv", "comparison.md", "comparison.tex"} <= before.keys()
    assert "relative to Fed Avg" in text and [row["method"] for row in rows(tmp_path / "comparison.csv")] == [*NAMES]
    found = read(tmp_path)
    assert list(found.groups) == list(NAMES) and found.notes == []
    (tmp_path / "comparison.csv").unlink()
    assert set(read(tmp_path).groups) == set(NAMES)
    assert list(comparison_in(tmp_path)) == list(NAMES), "in the order in which they were compared"


@pytest.mark.usefixtures("made_up")
def test_a_comparison_without_labels_has_no_file_of_them_and_a_later_one_keeps_those_of_an_earlier_one(tmp_path):
    compare(["asgd"], out=tmp_path, plots=False, progress=False, **SMALL)
    assert LABELS not in contents(tmp_path)
    compare({"Ours": "fedasync"}, out=tmp_path, plots=False, progress=False, **SMALL)
    compare(["fedavg"], out=tmp_path, plots=False, progress=False, **SMALL)
    assert labels_in(tmp_path) == {"Ours": "Ours"}
    assert set(read(tmp_path).groups) == {"asgd", "Ours", "fedavg"}
    (tmp_path / LABELS).write_text("[1]")
    with pytest.raises(ValueError, match=r"labels\.json: must hold the labels"):
        read(tmp_path)


def test_a_comparison_that_ends_before_its_first_run_leaves_no_labels(tmp_path):
    with pytest.raises(KeyError), labelled(tmp_path / "new", {"Ours": "fedasync"}):
        assert labels_in(tmp_path / "new") == {"Ours": "Ours"}
        raise KeyError
    assert contents(tmp_path) == {}
    (tmp_path / "new" / "runs" / "Ours").mkdir(parents=True)
    (tmp_path / "new" / "runs" / "Ours" / "manifest.json").touch()
    with pytest.raises(KeyError), labelled(tmp_path / "new", {"Ours": "fedasync"}):
        raise KeyError
    assert labels_in(tmp_path / "new") == {"Ours": "Ours"}


@pytest.mark.usefixtures("made_up")
def test_texts_specs_and_objects_have_labels(tmp_path):
    rule = methods.fedasync
    given = {"A b": Spec(rule, mixing=0.4), "C (d)": Method(methods.asgd()), "e": named("f", Method(methods.asgd()))}
    runs = compare(given | {"g": "fedasync"}, out=tmp_path, plots=False, progress=False, **SMALL)
    assert [seeds[0].settings["method"] for seeds in runs.values()] == ["fedasync:mixing=0.4", "C_d_", "f", "fedasync"]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"A_b", "C_d_", "e", "g"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a/b": "asgd"}, r"^label = 'a/b': must be 1 to 60 printable characters, .* without any of = : @ \+ / \\$"),
        ({"a:b": "asgd"}, "^label = 'a:b'"),
        ({"a\nb": "asgd"}, "^label = 'a.nb'"),
        ({"": "asgd"}, "^label = ''"),
        ({" a": "asgd"}, "^label = ' a'"),
        ({"..": "asgd"}, "^label = '..'"),
        ({"a" * 61: "asgd"}, "^label = 'aaa"),
        ({3: "asgd"}, "^label = 3"),
        ({"a b": "asgd", "A_b": "fedavg"}, r"^methods = \['a b', 'A_b'\]: must be names of different folders"),
        ({"a": "fedasync:mixing=0.4", "b": "fedasync:mixing=.4"}, "two have the same name and options"),
        ({"a": 3}, r"^methods\['a'\] = '3': must be a name"),
        ({"a": "fedavgg"}, "^method = 'fedavgg': unknown; did you mean 'fedavg'"),
    ],
)
def test_wrong_labels_are_refused_before_any_training(given, message):
    with pytest.raises(ValueError, match=message):
        compare(given, **SMALL)


def test_a_label_stands_before_the_first_equals_sign_of_a_spec():
    assert split("Ours = fedasync:mixing=0.4") == ("Ours", "fedasync:mixing=0.4")
    for spec in ("fedasync:mixing=0.4", "fedbuff@buffer:size=5", "fedbuff+swa:start=3", "fedavg"):
        assert split(spec) == ("", spec)
    for word, label in {"Ours (a=0.4)=fedasync:mixing=0.4": "Ours (a=0.4)", "a=b=c": "a=b"}.items():
        with pytest.raises(ValueError, match=re.escape(f"label = {label!r}: must be")):
            split(word)


def test_a_method_is_found_by_its_label_its_spec_or_its_rule():
    assert method_in("Ours", NAMES) == method_in("fedasync:mixing=0.4", NAMES) == method_in("fedasync", NAMES) == "Ours"
    assert baseline_of(NAMES) == "Fed Avg" and baseline_of(NAMES, "asgd") == "asgd"
    assert baseline_of({"A": "fedavg@cohort", "B": "fedavg"}) == "B"
    assert method_in("fedavg", {"fedavg": "asgd", "B": "fedavg"}) == "fedavg"
    with pytest.raises(ValueError, match="baseline = 'fedavg': must be one of A, B"):
        baseline_of({"A": "fedavg@cohort", "B": "fedavg@every"}, "fedavg")


@pytest.mark.usefixtures("made_up")
def test_the_command_takes_labels(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("Ours=fedasync:mixing=0.4", "Avg=fedavg", "asgd", *FLAGS)
    assert cli.main(["compare", *words, "--target", "Ours", "--baseline", "asgd"]) == 0
    out = capsys.readouterr().out
    assert "the final accuracy of Ours" in out and "relative to asgd" in out
    assert load("runs/compare/runs/Ours/seed_0").settings["method"] == "fedasync:mixing=0.4"
    assert cli.main(["compare", "Fourth=fedbuff@buffer:size=2", *words]) == 0
    assert "saved in runs/compare:" in capsys.readouterr().out
    for wrong, says in (
        (("x=", "asgd"), "method = 'x=': must be LABEL=METHOD"),
        (("a/b=asgd",), "label = 'a/b': must be 1 to 60"),
        (("A=asgd", "A=fedavg"), "methods = ['A=asgd', 'A=fedavg']: must be different from each other"),
        (("Ours=asgd", "--baseline", "fedavg"), "baseline = 'fedavg': must be one of Ours"),
        (("Ours=asgd", "--target", "fedavg"), "or one of Ours"),
    ):
        assert says in refused(capsys, "compare", *wrong, *FLAGS)
    assert "as in fedasync:mixing=0.4" in refused(capsys, "compare", "Ours=fedasync", *FLAGS, "--mixing", "0.4")


TOML = """
seeds = 3
[base]
model = "logistic"
clients = 4
steps = 1
updates = 6
[grid]
lr = [0.05, 0.1]
[grid.method]
Ours = "fedasync:mixing=0.4"
FedBuff = "fedbuff@buffer:size=2"
"""


def test_a_sweep_shows_labels_in_folders_and_tables(tmp_path, monkeypatch, capsys):
    sweep_engine.use(monkeypatch)
    (tmp_path / "paper.toml").write_text(TOML)
    words = ["sweep", str(tmp_path / "paper.toml"), "--out", str(tmp_path / "out"), "--no-plots", "--quiet"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "Ours" in out and "fedasync:mixing" not in out
    assert {row["method"] for row in rows(tmp_path / "out" / "settings.csv")} == {"Ours", "FedBuff"}
    assert {row["first"] for row in rows(tmp_path / "out" / "pairs.csv")} == {"Ours"}
    run = tmp_path / "out" / "runs" / "lr=0.05,method=Ours,seed=0"
    assert json.loads((run / "settings.json").read_bytes())["method"] == "fedasync:mixing=0.4"
    assert cli.main([*words, "--collect"]) == 0, "the definition keeps the labels"
    assert set(read(tmp_path / "out").groups) == {
        f"lr={lr}, {name}" for lr in (0.05, 0.1) for name in ("Ours", "FedBuff")
    }


@pytest.mark.usefixtures("made_up")
def test_a_sweep_in_python_takes_labels_too():
    grid = {"method": {"Ours": "fedasync:mixing=0.4", "Own": Method(methods.asgd())}, "lr": {"low": 1e-3, "high": 0.1}}
    found = sweep(SMALL, grid, progress=False)
    assert [point.name for point in found.points][:2] == ["method=Ours,lr=low", "method=Ours,lr=high"]
    assert [str(settings.method) for settings in found.settings][::2] == ["fedasync:mixing=0.4", "Own"]
    assert found.points[1].shown(["method", "lr"]) == {"method": "Ours", "lr": "high"}
    objects = {"A": Method(methods.asgd()), "B": Method(methods.fedasync(mixing=0.4))}
    found = sweep(SMALL, {"method": objects}, progress=False)
    assert [point.name for point in found.points] == ["method=A", "method=B"]
    found = sweep(SMALL, {"method": {"mixing": np.array([0.25, 0.5])}}, progress=False)
    assert [point.name for point in found.points] == ["mixing=0.25", "mixing=0.5"], "options, not labels"
    for wrong, says in (
        ({"method": {"a": "asgd", "mixing": [0.1]}}, r"^method\.mixing = "),
        ({"method": {"a/b": "asgd"}}, "label in method = 'a/b': must be"),
        ({"method": {"a": "asgd", "b": "asgd"}}, "method = .*different from each other"),
        ({"lr": {"a": "high"}}, "lr.a = 'high': must be"),
        ({"method": {"a": "asgd"}, "lr": 0.1}, "a list of values in a grid"),
    ):
        with pytest.raises(ValueError, match=says):
            sweep(SMALL, wrong)


def test_rows_of_runs_made_by_hand_keep_their_names(tmp_path: Path):
    runs = {name: [make_run(method=spec)] for name, spec in NAMES.items()}
    assert "relative to Fed Avg" in write_comparison(runs, tmp_path, plots=False)
