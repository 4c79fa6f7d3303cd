"""Sweeps without the training: what is saved and when, what is skipped, what is refused."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from fedjax_async.base.spec import Spec
from fedjax_async.config import Method, Settings, named
from fedjax_async.config.grid import expand
from fedjax_async.config.own import Named
from fedjax_async.results import load, sweep_folder
from fedjax_async.results.sweep_report import write_sweep
from fedjax_async.results.sweep_table import setting_rows, swept_runs
from fedjax_async.results.sweeps import CHECKPOINTS, collect, plan_sweep, resolved, run_work, sweep
from fedjax_async.server import asgd
from tests.results import sweep_engine
from tests.results.folders import contents, ends_the_same
from tests.told import refusal

BASE = Settings(updates=11)
GRID = {"method": ["fedasync", "fedbuff"], "lr": [0.1, 0.2]}


def start(folder=None, *, base=BASE, grid=GRID, seeds=2, **options):
    return sweep(base, grid, seeds=seeds, out=folder, progress=False, **options)


def test_runs_in_memory_come_back_in_order_and_their_table_shows_their_energy(engine):
    found = start()
    assert len(found.points) == len(engine.trained) == 8
    assert [run.settings["lr"] for run in found.runs] == [values["lr"] for values in found.values]
    assert [each.seed for each in found.settings] == [0, 1] * 4
    assert list(found.runs)[3].settings["seed"] == found.run(3).settings["seed"] == 1
    assert engine.folders == {None}
    counted = dict.fromkeys(("energy", "carbon"), np.arange(3.0))
    made = tuple(run._replace(evaluations=run.evaluations | counted) for run in found.runs)
    assert {"energy (kJ)", "carbon (g CO2e)"} <= set(setting_rows(swept_runs(found._replace(kept=made)))[0])


def test_each_run_has_a_folder_and_comes_back_exactly(engine, tmp_path):
    found = start(tmp_path / "sweep")
    names = {path.name for path in (tmp_path / "sweep" / "runs").iterdir()}
    assert names == {point.name for point in found.points} and "method=fedbuff,lr=0.2,seed=1" in names
    for point, run in zip(found.points, found.runs, strict=True):
        saved = load(tmp_path / "sweep" / "runs" / point.name)
        expected = sweep_engine.made_up(point.settings)
        assert saved.settings == run.settings == expected.settings
        np.testing.assert_array_equal(saved.evaluations["accuracy"], expected.evaluations["accuracy"])
    assert engine.folders == {tmp_path / "sweep" / CHECKPOINTS}
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text())["format"] == "fedjax_async sweep 1"
    assert sweep_folder.read_definition(tmp_path / "sweep") == list(found.points)


def test_interrupted_and_damaged_it_trains_whole_stacks_again(tmp_path, monkeypatch):
    """Finished runs of an interrupted stack are trained again, but not written."""
    sweep_engine.use(monkeypatch)
    start(tmp_path / "whole")
    want, cut = contents(tmp_path / "whole"), tmp_path / "cut"
    sweep_engine.use(monkeypatch, KeyboardInterrupt(), fail_after=3)
    with pytest.raises(KeyboardInterrupt):
        start(cut)
    finished, missing = collect(cut)
    assert len(finished.points) == 3 and len(missing) == 8 - 3
    again = sweep_engine.use(monkeypatch)
    start(cut)
    assert len(again.trained) == 8 - 3 + 3 % sweep_engine.STACK and contents(cut) == want
    (cut / "runs" / "method=fedbuff,lr=0.2,seed=1" / "updates.csv").write_bytes(b"half")
    (cut / "runs" / "method=fedasync,lr=0.1,seed=0" / "manifest.json").unlink()
    again.trained.clear()
    start(cut)
    assert len(again.trained) == 2 * sweep_engine.STACK and contents(cut) == want


def test_killed_at_any_write_it_goes_on_and_ends_the_same(engine, tmp_path):
    def begin(folder):
        write_sweep(start(folder, grid={"lr": [0.1]}, seeds=1), plots=False)

    ends_the_same(begin, tmp_path, least=15)


@pytest.mark.parametrize("content", [
    '{"runs": null}', '{"runs": [1]}', '{"runs": [{"name": "lr=0.1", "settings": 5}]}', "[]", '{"runs": {"a": 1}}',
    '{"format": "fedjax_async sweep 1", "runs": [{"name": "lr=0.1", "values": [], '
    '"settings": {"method": "fedbuff", "updates": 11, "defaults": 5}}]}',
    "{}", "{", '{"format": "another", "runs": []}', '{"format": "fedjax_async sweep 1"}',
])  # fmt: skip
def test_a_damaged_definition_is_refused_in_one_line(engine, tmp_path, content):
    assert "it has no sweep.json" in refusal(collect, tmp_path)
    (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(ValueError, match=r"must be empty or hold the same sweep, but it holds "):
        start(tmp_path, base={"method": "fedbuff", "updates": 11}, grid={"lr": [0.1]})
    assert "must hold a sweep ('fedjax_async sweep 1'), but sweep.json does not" in refusal(collect, tmp_path)


def test_another_sweep_is_refused_unless_told(engine, tmp_path):
    start(tmp_path, seeds=1)
    before = contents(tmp_path)
    holds = r"must be empty or hold the same sweep, but it holds another sweep: (runs \[|of \S+, \w+ = )"
    with pytest.raises(ValueError, match=holds):
        start(tmp_path)
    assert contents(tmp_path) == before
    engine.trained.clear()
    found = start(tmp_path, grid=GRID | {"lr": [0.1, 0.2, 0.3]}, seeds=1, overwrite=True)
    assert len(found.points) == 6
    assert {each.lr for each in engine.trained} >= {0.3}
    assert len(engine.trained) == 2  # finished stacks are not trained again
    for point in start(tmp_path, base=Settings(updates=12), seeds=1, overwrite=True).points:
        assert load(tmp_path / "runs" / point.name).settings["updates"] == 12
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    assert "but it holds other files" in refusal(start, tmp_path / "other")
    assert "must be a folder, not a file" in refusal(start, tmp_path / "other" / "thesis.tex")


def test_everything_is_checked_before_anything_trains(engine, tmp_path, monkeypatch):
    def refuse(settings, **limits):
        raise ValueError("mixing = 1.5: must be between 0.0 and 1.0")

    monkeypatch.setattr(engine, "plan_groups", refuse)
    with pytest.raises(ValueError, match=re.escape("mixing = 1.5")):
        start(tmp_path / "new")
    assert engine.trained == [] and not (tmp_path / "new").exists()


def test_a_plan_changes_nothing_and_counts_what_is_left(engine, tmp_path):
    points = resolved(expand(BASE, GRID, seeds=2))
    work = plan_sweep(points, folder=tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert len(work.groups) == 2 and work.updates == 8 * sweep_engine.UPDATES and not work.finished
    run_work(work._replace(groups=work.groups[:1]), folder=tmp_path / "new", progress=False)
    left = plan_sweep(points, folder=tmp_path / "new")
    assert left.finished == frozenset(range(4)) and left.updates == 4 * sweep_engine.UPDATES
    assert left.groups == work.groups[1:]
    for given, says in (({"memory_limit": 0}, "memory_limit = 0"), ({"lanes": 0}, "lanes = 0"), ({}, r"points = \[\]")):
        with pytest.raises(ValueError, match=says):
            plan_sweep(points if given else [], **given)


def test_the_bar_counts_all_updates(engine, capsys):
    sweep(BASE, GRID, progress=True)
    last = capsys.readouterr().err.rstrip("\n").split("\r")[-1]
    assert "4 runs" in last and f"{4 * sweep_engine.UPDATES}/{4 * sweep_engine.UPDATES}" in last


def test_float64_is_for_all_runs_or_none(engine):
    assert len(start(base=Settings(updates=1, compute="float64"), grid={"lr": [0.1]}).points) == 2
    assert "that of all runs of a sweep or of none" in refusal(start, grid={"compute": ["float64", "float32"]})


@pytest.mark.parametrize("earlier", [False, True], ids=["now", "in_a_folder_of_an_earlier_version"])
def test_objects_of_the_users_own_keep_their_names_in_the_folder(tmp_path, earlier):
    """So that the tables of the folder do not take the runs of two methods for seeds of one."""
    pair = {name: named(name, Method(asgd(server_lr=rate))) for name, rate in (("fair", 0.1), ("mine", 0.2))}
    points = expand(BASE, {"method": [*pair.values()]}, seeds=2)
    sweep_folder.begin(tmp_path, points)
    if earlier:
        path = tmp_path / sweep_folder.DEFINITION
        text = re.sub(r'("method",\s+)"\w+"', rf'\1"{Named.__module__}.Named"', path.read_text())
        assert text.count("own.Named") == 4
        path.write_text(text)
    titles = [point.title({"method": "method"}) for point in sweep_folder.read_definition(tmp_path)]
    assert titles == ["method=fair", "method=fair", "method=mine", "method=mine"]
    assert sweep_folder.is_defined(tmp_path, points)


def test_swept_options_beside_an_object_are_read_back(tmp_path):
    """A folder keeps no code: neither the defaults of a method of one's own nor the options of its rule are known."""
    own = named("own", Method(Spec(asgd, server_lr=0.1), timing="buffer:size=2"))
    grid = {"method": [own], "method.server_lr": [0.1, 0.2], "timing.size": [2, 3], "optimizer.momentum": [0.9]}
    points = expand(BASE, grid)
    sweep_folder.begin(tmp_path, points)
    read, paths = sweep_folder.read_definition(tmp_path), [path for path in grid if path != "method"]
    assert [point.shown(paths) for point in read] == [point.shown(paths) for point in points]
    assert read[-1].shown(paths) == {"method.server_lr": 0.2, "timing.size": 3, "optimizer.momentum": 0.9}
