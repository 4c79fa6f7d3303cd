"""Tables and pictures again from a folder, with other options, without training; curves against another axis."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fedjax_async import cli, compare, results
from fedjax_async.config import sweeping
from fedjax_async.config.grid import expand
from fedjax_async.results import html_folders, reading, redraw, sweep_folder, write_comparison, write_run, write_sweep
from fedjax_async.results.curves import accuracy_curve
from fedjax_async.results.figure import Drawing
from fedjax_async.results.store import save
from tests.cli.called import ok, refused
from tests.results import sweep_engine
from tests.results.folders import contents
from tests.results.made_up import make_run, of_group
from tests.results.test_claim import elsewhere, never

SMALL = ("--model", "logistic", "--clients", "4", "--updates", "6", "--steps", "2", "--quiet")
FEW = {"model": "logistic", "clients": 4, "steps": 1, "updates": 6}


def seeded(method: str, seed: int, *accuracies: float):
    run = make_run([0.1, *accuracies], method=method)
    return run._replace(settings=run.settings | {"seed": seed})


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A saved comparison with two methods and three seeds, one of the methods with a label."""
    runs = {
        "Ours": [seeded("fedasync:mixing=0.4", seed, 0.4, 0.6 + 0.01 * seed) for seed in range(3)],
        "fedavg": [seeded("fedavg", seed, 0.3, 0.5 - 0.01 * seed) for seed in range(3)],
    }
    folder = tmp_path_factory.mktemp("drawn") / "compared"
    for name, seeds in runs.items():
        for seed, run in enumerate(seeds):
            save(run, folder / "runs" / name / f"seed_{seed}")
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
    redraw(comparison)
    assert contents(comparison) == before
    for name in before:
        if "/" not in name and name != "labels.json":
            (comparison / name).unlink()
    text = redraw(comparison)
    assert "Ours" in text and contents(comparison) == before
    drawing = Drawing(x="bytes", formats=("svg",), title="T")
    text = redraw(
        comparison,
        final="last",
        target="Ours",
        baseline="Ours",
        columns=["time"],
        drawing=drawing,
    )
    assert "the final accuracy of Ours" in text and "relative to Ours" in text and "accuracy, last (%)" in text
    assert b"sent, both directions" in (comparison / "accuracy.svg").read_bytes()
    assert (comparison / "comparison.tex").read_text().count("&") == 3 * 1
    assert {name for name in contents(comparison) if "runs/" in name} == {name for name in before if "runs/" in name}


def test_the_methods_are_those_of_the_table_in_its_order(comparison):
    save(seeded("asgd", 0, 0.2), comparison / "runs" / "asgd" / "seed_0")
    assert list(reading.comparison_in(comparison)) == ["Ours", "fedavg", "asgd"]
    assert "asgd" not in redraw(comparison, plots=False)
    (comparison / "comparison.csv").unlink()
    with pytest.raises(ValueError, match=r"comparison with the same .*Ours has \[0, 1, 2\] and asgd has \[0\]"):
        redraw(comparison, plots=False)
    shutil.rmtree(comparison / "runs" / "asgd")
    assert "fedavg" in redraw(comparison, plots=False)


def test_a_run_is_redrawn(tmp_path):
    write_run(make_run(), tmp_path)
    before = contents(tmp_path)
    assert redraw(tmp_path) == "" and contents(tmp_path) == before
    redraw(tmp_path, final="last", drawing=Drawing(x="update"))
    changed = {name for name, content in contents(tmp_path).items() if before[name] != content}
    assert changed == {"accuracy.png"}


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
    assert (
        text.startswith("5 of 6 runs are finished\n\n") and "time to 20 % (s)" in (tmp_path / "settings.md").read_text()
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"target": 0.7}, "target = 0.7: must be left out for a run"),
        ({"columns": ["time"]}, r"columns = \['time'\]: must be left out for a run"),
        ({"baseline": "fedavg"}, "baseline = 'fedavg': must be left out for a run"),
        ({"final": "first"}, "final = 'first': must be last, best"),
        ({"columns": ["time", "time"]}, "columns = .*: must be a list of different names"),
        ({"drawing": Drawing(x="energy")}, "x = 'energy': must be time, update, step or bytes"),
    ],
)
def test_options_that_a_run_does_not_take(tmp_path, given, message):
    save(make_run(), tmp_path)
    with pytest.raises(ValueError, match=message):
        redraw(tmp_path, **given)


def test_folders_without_results_or_in_use_are_refused(tmp_path, comparison):
    with pytest.raises(ValueError, match="must hold a finished run, comparison or sweep, but there is no such folder"):
        redraw(tmp_path / "none")
    with pytest.raises(ValueError, match="must hold a finished run, comparison or sweep, but it is a file"):
        redraw(comparison / "comparison.md")
    with elsewhere(comparison), pytest.raises(ValueError, match="in use by"):
        redraw(comparison)
    with pytest.raises(ValueError, match=r"^target = '1.5': must be an accuracy in .* or one of Ours, fedavg"):
        redraw(comparison, plots=False, target="1.5")


def test_the_command(capsys, comparison):
    assert "x = 'update': must be left out with --no-plots" in refused(
        capsys, "redraw", str(comparison), "--x", "update", "--no-plots"
    )
    out = ok(capsys, "redraw", str(comparison), "--x", "step", "--format", "pdf,svg", "--columns", "accuracy,time")
    assert out.endswith(f"written: {comparison}\n") and "relative to fedavg" in out
    assert b"server steps" in (comparison / "accuracy.svg").read_bytes() and (comparison / "accuracy.pdf").is_file()
    assert "x = 'steps': must be one of time, update, step, bytes, energy" in refused(
        capsys, "redraw", str(comparison), "--x", "steps"
    )
    assert "x = 'energy': must be time" in refused(capsys, "redraw", str(comparison), "--x", "energy")


def test_the_axis_of_new_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("run", *SMALL, "--out", "one", "--x")
    assert "x = 'energy': must be time, update, step or bytes, as the run counts no energy" in refused(
        capsys, *words, "energy"
    )
    assert "x = 'energy': must be time" in refused(capsys, "compare", "asgd", *SMALL, "--x", "energy")
    nodes = ("asgd", "dpsgd", "--energy", "boards", "--x", "energy")  # which count none: not after the training
    assert "x = 'energy': must be time" in refused(capsys, "compare", *nodes, *SMALL)
    assert "x = 'bytes': must be left out without a folder" in refused(capsys, "run", *SMALL, "--x", "bytes")
    (tmp_path / "s.toml").write_text('[base]\nmodel = "logistic"\nupdates = 6\n[grid]\nlr = [0.02, 0.1]\n')
    assert "x = 'energy': must be time" in refused(capsys, "sweep", "s.toml", "--x", "energy")
    assert [path.name for path in tmp_path.iterdir()] == ["s.toml"]
    monkeypatch.setattr(sweeping, "execute_group", of_group)
    ok_run = cli.main([*words, "update", "--format", "svg"])
    capsys.readouterr()
    assert ok_run == 0 and b"client updates applied" in (tmp_path / "one" / "accuracy.svg").read_bytes()


def test_curves_against_energy():
    run = make_run()
    joules = run.evaluations["update"] * 30.0
    counted = run._replace(evaluations=run.evaluations | {"energy": joules, "carbon": joules})
    figure = accuracy_curve({"a": [counted]}, drawing=Drawing(x="energy"))
    assert figure.axes[0].get_xlabel() == "energy (J)"
    assert accuracy_curve({"a": [counted]}, "step", drawing=Drawing(x="energy")).axes[0].get_xlabel() == "server steps"
    with pytest.raises(ValueError, match="x = 'energy': must be another: the run has no energy"):
        accuracy_curve({"a": [run]}, drawing=Drawing(x="energy"))


def test_seeds_with_other_settings_are_not_averaged(comparison):
    """A folder may have them after another call with other seeds; the page has no table of methods then."""
    place = comparison / "runs" / "fedavg" / "seed_2"
    run = results.load(place)
    save(run._replace(settings=run.settings | {"time": 99.0}), place, overwrite=True)
    with pytest.raises(ValueError, match=r"but fedavg, seed 2 against 0: time = 99\.0, saved 12\.0"):
        redraw(comparison, plots=False)
    found = html_folders.read(comparison)
    assert found.tables == [] and "fedavg, seed 2 against 0" in found.notes[0]
    shutil.rmtree(place)
    shutil.copytree(comparison / "runs" / "fedavg", comparison / "runs" / "a copy")
    shutil.rmtree(comparison / "runs" / "Ours")
    with pytest.raises(ValueError, match="but fedavg has seed 0 twice"):
        redraw(comparison, plots=False)


def test_a_folder_that_is_overwritten_is_of_the_new_kind(tmp_path, monkeypatch):
    """Else the earlier sweep or run would be read in place of the new results."""
    sweep_folder.begin(tmp_path, expand(FEW, {"lr": [0.1, 0.2]}))
    save(make_run(), tmp_path, overwrite=True)
    assert reading.kind_of(tmp_path) == "run"
    sweep_folder.begin(tmp_path, expand(FEW, {"lr": [0.1, 0.2]}))
    monkeypatch.setattr(sweeping, "execute_group", of_group)
    for overwrite in (True, False):  # the second call reads what the first one wrote
        compare(["asgd"], out=tmp_path, overwrite=overwrite, plots=False, progress=False, **FEW)
        assert reading.kind_of(tmp_path) == "comparison"


def test_other_seeds_with_other_settings_take_no_place_beside_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(sweeping, "execute_group", of_group)
    given = FEW | {"out": tmp_path, "plots": False, "progress": False}
    compare(["asgd"], **given)
    assert len(compare(["asgd"], seed=1, **given)["asgd"]) == 1
    with pytest.raises(
        ValueError, match=r"differ in their seed only .*, but seed_0 holds another run: lr = 0\.5, saved"
    ):
        compare(["asgd"], seed=2, lr=0.5, **given)
