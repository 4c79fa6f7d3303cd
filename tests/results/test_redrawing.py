"""Tables and pictures again from a folder, with other options, without training; curves against another axis."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from fedjax_async import cli, compare, results
from fedjax_async.config import sweeping
from fedjax_async.config.grid import expand
from fedjax_async.engine.client_scores import client_columns
from fedjax_async.results import html_folders, reading, redraw, sweep_folder, write_comparison, write_run, write_sweep
from fedjax_async.results.curves import accuracy_curve
from fedjax_async.results.figure import Drawing
from fedjax_async.results.store import save
from tests.cli.called import ok, refused
from tests.results import sweep_engine
from tests.results.folders import contents
from tests.results.made_up import make_run, of_group
from tests.results.page import save_comparison, seeded
from tests.results.test_claim import elsewhere, never
from tests.told import refusal

SMALL = ("--model", "logistic", "--clients", "4", "--updates", "6", "--steps", "2", "--quiet")
FEW = {"model": "logistic", "clients": 4, "steps": 1, "updates": 6}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A saved comparison with two methods and three seeds, one of the methods with a label."""
    runs = {
        "Ours": seeded([[0.1, 0.4, 0.6 + 0.01 * seed] for seed in range(3)], "fedasync:mixing=0.4"),
        "fedavg": seeded([[0.1, 0.3, 0.5 - 0.01 * seed] for seed in range(3)]),
    }
    folder = save_comparison(tmp_path_factory.mktemp("drawn") / "compared", runs)
    (folder / "labels.json").write_text('{"Ours": "Ours"}')
    write_comparison(runs, folder)
    return folder


@pytest.fixture
def comparison(drawn, tmp_path):
    return Path(shutil.copytree(drawn, tmp_path / "compared"))


@pytest.fixture(autouse=True)
def untrained(monkeypatch):
    monkeypatch.setattr(sweeping, "execute_group", never)


def test_a_comparison_is_redrawn_to_the_same_bytes_or_with_other_options(comparison):
    before = contents(comparison)
    for name in before:
        if "/" not in name and name != "labels.json":
            (comparison / name).unlink()
    text = redraw(comparison)
    assert "Ours" in text and contents(comparison) == before
    options = {"final": "last", "target": "Ours", "baseline": "Ours", "columns": ["time"]}
    text = redraw(comparison, **options, drawing=Drawing(x="bytes", formats=("svg",), title="T"))
    assert "the final accuracy of Ours" in text and "relative to Ours" in text and "accuracy, last (%)" in text
    assert b"sent, both directions" in (comparison / "accuracy_bytes.svg").read_bytes()
    assert (comparison / "accuracy.png").read_bytes() == before["accuracy.png"], "against time"
    assert (comparison / "comparison.tex").read_text().count("&") == 3 * 1
    assert {name for name in contents(comparison) if "runs/" in name} == {name for name in before if "runs/" in name}


def test_the_methods_are_those_of_the_table_in_its_order(comparison):
    save(*seeded([[0.1, 0.2]], "asgd"), comparison / "runs" / "asgd" / "seed_0")
    assert list(reading.comparison_in(comparison)) == ["Ours", "fedavg", "asgd"]
    assert "asgd" not in redraw(comparison, plots=False)
    (comparison / "comparison.csv").unlink()
    with pytest.raises(ValueError, match=r"comparison with the same .*Ours has \[0, 1, 2\] and asgd has \[0\]"):
        redraw(comparison, plots=False)
    shutil.rmtree(comparison / "runs" / "asgd")
    assert "fedavg" in redraw(comparison, plots=False)


def test_methods_and_seeds_that_new_tables_leave_out_are_said(comparison, capsys):
    """Their runs stay, but tables and pictures of them would be gone without a word."""
    runs = dict(reading.comparison_in(comparison))
    redraw(comparison, drawing=Drawing(formats=("pdf",)))
    write_comparison(runs, comparison, plots=False)
    assert capsys.readouterr().err == "" and (comparison / "accuracy.pdf").exists()
    shutil.copytree(comparison / "runs" / "Ours" / "seed_2", comparison / "runs" / "Ours" / "seed_2 copy")
    write_comparison({"Ours": runs["Ours"][:2]}, comparison)
    said = capsys.readouterr().err
    assert "its tables and pictures had also fedavg, which is not compared now" in said
    assert "the tables leave out seed 2, 2 copy of Ours" in said
    shutil.rmtree(comparison / "runs" / "Ours" / "seed_2 copy")
    assert (comparison / "accuracy.png").exists() and not (comparison / "accuracy.pdf").exists(), "one of both methods"
    write_comparison(runs, comparison, plots=False)
    assert capsys.readouterr().err == "" and not (comparison / "accuracy.png").exists(), "one without fedavg"


def test_a_run_is_redrawn(tmp_path):
    write_run(make_run(), tmp_path)
    before = contents(tmp_path)
    assert redraw(tmp_path) == "" and contents(tmp_path) == before
    redraw(tmp_path, final="last", drawing=Drawing(x="update"))
    changed = {name for name, content in contents(tmp_path).items() if before.get(name) != content}
    assert changed == {"accuracy_update.png"}


def test_the_clients_of_a_redrawn_run_have_the_final_value_that_was_asked_for(tmp_path):
    scores = {"accuracy": np.linspace(0.1, 0.9, 60).reshape(20, 3)}
    run = make_run(np.linspace(0.1, 0.9, 20).tolist())
    write_run(run._replace(per_client=scores, evaluations=run.evaluations | client_columns(scores)), tmp_path, False)
    for final, worst in (("tail", scores["accuracy"][-2:, 0].mean()), ("last", scores["accuracy"][-1, 0])):
        redraw(tmp_path, plots=False, final=final)
        assert f"| {100 * worst:.2f} |" in " ".join((tmp_path / "clients.md").read_text().split())


def test_a_sweep_is_redrawn(tmp_path, monkeypatch):
    sweep_engine.use(monkeypatch)
    found = results.sweep(FEW, {"lr": [0.02, 0.1]}, seeds=3, out=tmp_path, progress=False)
    write_sweep(found, tmp_path)
    before = contents(tmp_path)
    monkeypatch.undo()
    redraw(tmp_path)
    assert contents(tmp_path) == before
    shutil.rmtree(tmp_path / "runs" / "lr=0.1,seed=2")
    text = redraw(tmp_path, plots=False, target="0.2", columns=["time"])
    assert text.startswith("5 of 6 runs are finished\n\n")
    assert "time to 20 % (s)" in (tmp_path / "settings.md").read_text()


RUN = "runs/Ours/seed_0"


def test_a_sweep_that_replaces_another_removes_its_tables_and_pictures(tmp_path, monkeypatch):
    """Before it trains: a killed one would have the best settings of the other."""
    sweep_engine.use(monkeypatch)
    first = results.sweep(FEW, {"lr": [0.02, 0.1], "steps": [1, 2]}, seeds=3, out=tmp_path, progress=False)
    write_sweep(first, tmp_path)
    found = {path.name for path in tmp_path.iterdir()}
    assert {"best.md", "settings.tex", "accuracy.png", "accuracy_map.png"} < found
    results.sweep(FEW, {"lr": [0.02, 0.1]}, seeds=3, out=tmp_path, progress=False, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "sweep.json"}


def test_a_comparison_that_is_overwritten_and_killed_has_no_tables_of_the_other(comparison):
    with pytest.raises(pytest.fail.Exception):  # as soon as it trains
        compare(["fedavg"], out=comparison, overwrite=True, plots=False, progress=False, **FEW)
    assert {path.name for path in comparison.iterdir()} & {"comparison.md", "comparison.csv", "pairs.md"} == set()


@pytest.mark.parametrize(
    ("place", "given", "message"),
    [
        ("none", {}, "must hold a finished run, comparison or sweep, but there is no such folder"),
        ("comparison.md", {}, "must hold a finished run, comparison or sweep, but it is a file"),
        ("", {"target": "1.5"}, "^target = '1.5': must be an accuracy in .* or one of Ours, fedavg"),
        (RUN, {"target": 0.7}, "target = 0.7: must be left out for a run"),
        (RUN, {"columns": ["time"]}, r"columns = \['time'\]: must be left out for a run"),
        (RUN, {"baseline": "fedavg"}, "baseline = 'fedavg': must be left out for a run"),
        (RUN, {"final": "first"}, "final = 'first': must be last, best"),
        (RUN, {"columns": ["time", "time"]}, "columns = .*: must be a list of different names"),
        (RUN, {"drawing": Drawing(x="energy")}, "x = 'energy': must be time, update, step or bytes"),
    ],
)
def test_wrong_folders_and_options_that_a_run_does_not_take(drawn, place, given, message):
    with pytest.raises(ValueError, match=message):
        redraw(drawn / place, plots=False, **given)


def test_the_command(capsys, comparison):
    place = str(comparison)
    said = refused(capsys, "redraw", place, "--x", "update", "--no-plots")
    assert "x = 'update': must be left out with --no-plots" in said
    out = ok(capsys, "redraw", place, "--x", "step", "--format", "pdf,svg", "--columns", "accuracy,time")
    assert out.endswith(f"written: {comparison}\n") and "relative to fedavg" in out
    assert b"server steps" in (comparison / "accuracy_step.svg").read_bytes()
    assert (comparison / "accuracy_step.pdf").is_file()
    for axis, says in (("steps", "one of time, update, step, bytes, energy"), ("energy", "time")):
        assert f"x = '{axis}': must be {says}" in refused(capsys, "redraw", place, "--x", axis)
    with elsewhere(comparison), pytest.raises(ValueError, match="in use by"):
        redraw(comparison)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("run", "--out", "one", "--x", "energy"), "time, update, step or bytes, as the run counts no energy"),
        (("compare", "asgd", "--x", "energy"), "time"),
        # nodes count none: not after the training
        (("compare", "asgd", "dpsgd", "--energy", "boards", "--x", "energy"), "time"),
        (("run", "--x", "bytes"), "left out without a folder"),
        (("sweep", "s.toml", "--x", "energy"), "time"),
    ],
)
def test_an_axis_that_new_runs_lack_is_refused(capsys, tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.toml").write_text('[base]\nmodel = "logistic"\nupdates = 6\n[grid]\nlr = [0.02, 0.1]\n')
    more = () if words[0] == "sweep" else SMALL
    assert f"x = '{words[-1]}': must be {says}" in refused(capsys, *words, *more)
    assert [path.name for path in tmp_path.iterdir()] == ["s.toml"]


def test_the_axis_of_new_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(sweeping, "execute_group", of_group)
    assert cli.main(["run", *SMALL, "--out", str(tmp_path / "one"), "--x", "update", "--format", "svg"]) == 0
    assert b"client updates applied" in (tmp_path / "one" / "accuracy_update.svg").read_bytes()
    run = make_run()
    joules = run.evaluations["update"] * 30.0
    counted, energy = {"a": [make_run(energy=joules, carbon=joules)]}, Drawing(x="energy")
    assert accuracy_curve(counted, drawing=energy).axes[0].get_xlabel() == "energy (J)"
    assert accuracy_curve(counted, "step", drawing=energy).axes[0].get_xlabel() == "server steps"
    with pytest.raises(ValueError, match="x = 'energy': must be another: the run has no energy"):
        accuracy_curve({"a": [run]}, drawing=energy)


def test_seeds_with_other_settings_are_not_averaged(comparison):
    """A folder may have them after another call with other seeds; the page has no table of methods then."""
    place = comparison / "runs" / "fedavg" / "seed_2"
    run = results.load(place)
    save(run._replace(settings=run.settings | {"time": 99.0}), place, overwrite=True)
    assert "but fedavg, seed 2 against 0: time = 99.0, saved 12.0" in refusal(redraw, comparison, plots=False)
    found = html_folders.read(comparison)
    assert found.tables == [] and "fedavg, seed 2 against 0" in found.notes[0]
    shutil.rmtree(place)
    shutil.copytree(comparison / "runs" / "fedavg", comparison / "runs" / "a copy")
    shutil.rmtree(comparison / "runs" / "Ours")
    assert "but fedavg has seed 0 twice" in refusal(redraw, comparison, plots=False)


def test_an_overwritten_folder_is_of_the_new_kind_and_takes_no_seeds_of_other_settings(tmp_path, monkeypatch):
    """Else the earlier sweep or run would be read in place of the new results."""
    sweep_folder.begin(tmp_path, expand(FEW, {"lr": [0.1, 0.2]}))
    save(make_run(), tmp_path, overwrite=True)
    assert reading.kind_of(tmp_path) == "run"
    sweep_folder.begin(tmp_path, expand(FEW, {"lr": [0.1, 0.2]}))
    monkeypatch.setattr(sweeping, "execute_group", of_group)
    given = FEW | {"out": tmp_path, "plots": False, "progress": False}
    for overwrite in (True, False):  # the second call reads what the first one wrote
        compare(["asgd"], overwrite=overwrite, **given)
        assert reading.kind_of(tmp_path) == "comparison"
    assert len(compare(["asgd"], seed=1, **given)["asgd"]) == 1
    message = r"differ in their seed only .*, but seed_0 holds another run: lr = 0\.5, saved"
    with pytest.raises(ValueError, match=message):
        compare(["asgd"], seed=2, lr=0.5, **given)
