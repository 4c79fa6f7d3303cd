"""The command ``landscape`` on saved runs: files, barriers, and one line for runs that do not go together."""

import jax
import numpy as np
import pytest

from fedjax_async import cli, simulate
from fedjax_async.results import save
from fedjax_async.results.landscape import LEVELS, levels_of
from tests.cli.called import refused
from tests.results.folders import rows
from tests.told import is_refused

FAST = ("--steps", "5", "--grid", "3", "--points", "3", "--examples", "20")
BASE = {"clients": 4, "updates": 3, "steps": 2, "test_fraction": 0.2, "model": "logistic"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    top = tmp_path_factory.mktemp("runs")
    run = simulate(**BASE, engine="reference")
    for name, by in zip("abc", (0.0, 1.0, -2.0)):
        params = jax.tree.map(lambda leaf, by=by: leaf + by * leaf**2 + abs(by) * leaf, run.params)
        save(run._replace(params=params), top / name)
    save(run._replace(settings={**run.settings, "model": "mlp"}), top / "other")
    save(run, top / "compared" / "runs" / "fedavg" / "seed0")
    return top


def test_two_runs_have_a_line_a_curve_and_a_plane(folders, tmp_path, capsys):
    out = tmp_path / "out"
    command = ("landscape", str(folders / "a"), str(folders / "b"), "--out", str(out), *FAST, "--format", "png,svg")
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert "measured on 20 of " in printed and "A to B, curve" in printed
    names = {"barriers.csv", "paths.csv", "plane.csv", "paths.png", "paths.svg", "plane.png", "plane.svg"}
    assert {path.name for path in out.iterdir()} == names
    assert [row["path"] for row in rows(out / "barriers.csv")] == ["A to B, line", "A to B, curve"]
    paths = rows(out / "paths.csv")
    assert [float(row["s"]) for row in paths] == [0.0, 0.5, 1.0] * 2
    assert paths[0]["loss"] == paths[3]["loss"] and paths[2]["loss"] == paths[5]["loss"]  # the same ends
    with np.load(folders / "a" / "params.npz") as a, np.load(folders / "b" / "params.npz") as b:
        between = np.sqrt(sum(np.sum((a[name].astype(float) - b[name]) ** 2) for name in a.files))
    assert float(rows(out / "barriers.csv")[0]["length"]) == pytest.approx(between, rel=1e-5)
    assert len(rows(out / "plane.csv")) == 9


def test_three_runs_of_one_client_and_no_curve(folders, tmp_path, capsys):
    runs = [str(folders / name) for name in "abc"]
    flags = ("--part", "train", "--client", "1", *FAST[2:], "--steps", "0")
    assert cli.main(("landscape", *runs, "--out", str(tmp_path), *flags)) == 0
    assert "of the train part of client 1 of" in capsys.readouterr().out
    assert [row["path"] for row in rows(tmp_path / "barriers.csv")] == ["A to B, line", "A to C, line", "B to C, line"]
    assert (tmp_path / "plane.png").exists()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("a", "runs = 1: must be two or three folders"),
        ("a missing", "there is no such folder"),
        ("a other", "must be 'logistic', as in"),
        ("a compared", "must hold a saved run"),
        ("a a", "must hold another model than"),
        ("a b --best", "run it with --keep-best"),
        ("a b --part exam", "part = 'exam'"),
        ("a b --part validation", "part = 'validation': must be a part with examples"),
        ("a b --client 4", "client = 4: must be"),
        ("a b --grid 1", "grid = 1: must be"),
        ("a b --lr 0", "lr = 0.0: must be"),
        ("a b --format gif", "format = 'gif'"),
    ],
)
def test_one_line_for_what_cannot_be_used(folders, tmp_path, capsys, monkeypatch, call, message):
    monkeypatch.chdir(folders)
    assert message in refused(capsys, "landscape", *call.split(), "--out", str(tmp_path / "out"))


def test_files_of_another_landscape_are_kept(folders, tmp_path, capsys):
    (tmp_path / "paths.csv").write_text("mine")
    command = ("landscape", str(folders / "a"), str(folders / "b"), "--out", str(tmp_path), *FAST[2:], "--steps", "0")
    assert cli.main(command) == 2
    assert "without a landscape, but it has paths.csv; --overwrite replaces it" in capsys.readouterr().err
    assert (tmp_path / "paths.csv").read_text() == "mine"
    assert cli.main((*command, "--overwrite")) == 0
    assert len(rows(tmp_path / "paths.csv")) == 3


LOSSES = [np.geomspace(0.1, 1e6, 12).reshape(3, 4), np.linspace(-1.0, 2.0, 12).reshape(3, 4), np.full((2, 2), 0.0)]


@pytest.mark.parametrize("loss", [*LOSSES, np.array([[np.nan, 1.0], [np.inf, 2.0]])])
def test_levels_increase_from_the_lowest_loss_and_reach_all_models(loss):
    finite = loss[np.isfinite(loss)]
    models = np.array([finite.max(), np.nan])
    levels = levels_of(loss, models)
    assert levels.shape == (LEVELS,) and (np.diff(levels) > 0).all()
    assert levels[0] == pytest.approx(finite.min()) and levels[-1] >= finite.max() * (1 - 1e-12)
    is_refused("finite somewhere on the grid", levels_of, np.full((2, 2), np.nan), np.array([1.0]))
