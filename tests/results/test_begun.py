"""Folders of runs from before a change of a method's defaults: read, resumed, compared and swept as they were begun."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from fedjax_async import Settings, compare, resume, simulate, sweep
from fedjax_async.config.settings import as_dict, from_dict
from fedjax_async.results import load
from fedjax_async.results.begun import as_begun
from fedjax_async.results.store import CHECKPOINTS
from tests.results.folders import killed_run

TINY = {"model": "logistic", "clients": 10, "steps": 1, "lr": 0.05, "partition": "iid", "delay": "constant"}
TINY |= {"updates": 24, "eval_updates": 12, "eval_examples": 50}
STATED = "fedbuff:server_lr=1@buffer:size=3"  # what fedbuff was


def before(**given):
    """The settings of a folder that the version before the change wrote."""
    content = as_dict(Settings(method="fedbuff", **TINY | given))
    content.pop("defaults", None)
    return from_dict(content)


def steps(run):
    return run.counters["server_steps"]


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """The folder of a finished run, and the run; its settings.json has no defaults."""
    folder = tmp_path_factory.mktemp("old") / "run"
    run = simulate(before(), out=folder, plots=False)
    saved = json.loads((folder / "settings.json").read_bytes())
    assert saved["method"] == "fedbuff" and "defaults" not in saved
    return folder, run


def test_the_earlier_run_is_the_stated_one_and_is_trained_anew_only_on_request(old, tmp_path, capsys):
    run, folder = old[1], shutil.copytree(old[0], tmp_path / "run")
    np.testing.assert_array_equal(run.evaluations["loss"], simulate(method=STATED, **TINY).evaluations["loss"])
    again = simulate(method="fedbuff", out=folder, plots=False, **TINY)
    said = capsys.readouterr().out
    assert f"{folder}: fedbuff means fedbuff:server_lr=1.0@buffer:size=3 here" in said and "was read" in said
    assert again.settings == load(folder).settings == run.settings and steps(again) == 8
    assert (folder / "manifest.json").read_bytes() == (old[0] / "manifest.json").read_bytes()
    new = simulate(method="fedbuff", out=folder, plots=False, overwrite=True, **TINY | {"updates": 20})
    assert steps(new) == 2 and "defaults" in new.settings


def test_other_settings_of_the_method_are_not_taken_from_the_folder(old):
    for given in ({"method": STATED}, {"method": "fedbuff:server_lr=0.5"}, {"timing": "buffer:size=5"}):
        other = Settings(**{"method": "fedbuff"} | given, **TINY)
        assert as_begun(other, [None, old[0], old[0] / "none"]) is other


@pytest.mark.parametrize(
    "again", [resume, lambda folder, **o: simulate(method="fedbuff", checkpoint=6, out=folder, **TINY, **o)]
)
def test_a_killed_run_goes_on_as_it_began(again, old, tmp_path):
    killed_run(tmp_path, 14, before(checkpoint=6))
    assert list((tmp_path / CHECKPOINTS).glob("*.npz")), "it has a checkpoint of the earlier settings"
    run = again(tmp_path, plots=False)
    np.testing.assert_array_equal(run.evaluations["loss"], old[1].evaluations["loss"])
    assert steps(run) == 8


def test_a_comparison_goes_on_with_more_seeds_as_it_began(old, tmp_path, capsys):
    shutil.copytree(old[0], tmp_path / "runs" / "fedbuff" / "seed_0")
    runs = compare(["fedbuff"], seeds=2, out=tmp_path, plots=False, progress=False, **TINY)["fedbuff"]
    assert capsys.readouterr().out.count("fedbuff means") == 1
    assert [steps(run) for run in runs] == [8, 8] and [run.settings["method"] for run in runs] == ["fedbuff"] * 2
    np.testing.assert_array_equal(runs[0].evaluations["loss"], old[1].evaluations["loss"])


def test_a_sweep_goes_on_as_it_began(tmp_path, capsys):
    points = [{"lr": 0.05}, {"lr": 0.1}]
    sweep(before(), points=points, out=tmp_path, progress=False)
    capsys.readouterr()
    saved = (tmp_path / "sweep.json").read_bytes()
    assert b"defaults" not in saved
    found = sweep({"method": "fedbuff", **TINY}, points=points, out=tmp_path, progress=False)
    assert "fedbuff means" in capsys.readouterr().out and (tmp_path / "sweep.json").read_bytes() == saved
    assert [steps(run) for run in found.runs] == [8, 8]


@pytest.mark.parametrize("content", [{"method": "a:b"}, {"method": "fedbuff", "defaults": 5}, {"method": ["fedbuff"]}])
def test_a_damaged_file_is_refused_with_its_folder(tmp_path, content):
    (tmp_path / "settings.json").write_text(json.dumps({"timing": None} | content))
    with pytest.raises(ValueError, match=r"folder = .*: must be empty or hold a run of the same settings"):
        simulate(method="fedbuff", out=tmp_path, plots=False, **TINY)
