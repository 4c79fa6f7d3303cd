"""Sweeps as jobs: real subprocesses through submitit's local executor, and what would be sent to SLURM."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from fedjax_async.config.grid import expand
from fedjax_async.results import cluster, load, sweep_folder
from fedjax_async.results.sweeps import collect, plan_sweep, resolved, sweep
from tests.results import sweep_engine

ROOT = Path(__file__).resolve().parents[2]
BASE = {"model": "logistic", "clients": 4, "steps": 1, "updates": 3}
GRID = {"method": ["fedasync", "fedbuff"], "lr": [0.02, 0.1]}


def test_local_jobs_train_in_processes_of_their_own(tmp_path, monkeypatch, commands_compile_as_here):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    points = resolved(expand(BASE, GRID))
    work = plan_sweep(points, folder=tmp_path / "jobs", lanes=1)
    jobs = cluster.submit(work, tmp_path / "jobs", "local:time=5", lanes=1)
    assert len(jobs) == 2  # one stack a method
    assert sorted(name for job in jobs for name in job.runs) == sorted(point.name for point in points)
    for job in jobs:
        job.handle.wait()
        assert job.handle.state == "FINISHED", job.handle.stderr()
        assert str(os.getpid()) != job.id
    finished, missing = collect(tmp_path / "jobs")
    assert not missing, jobs[0].handle.stderr()
    here = sweep(BASE, GRID, progress=False, lanes=1)
    for there, alone in zip(finished.runs, here.runs, strict=True):
        assert there.settings == alone.settings
        np.testing.assert_array_equal(there.evaluations["loss"], alone.evaluations["loss"])
    again = plan_sweep(points, folder=tmp_path / "jobs", lanes=1)
    assert cluster.submit(again, tmp_path / "jobs", "local") == []


def test_a_job_trains_its_own_runs_and_skips_finished_ones(tmp_path, monkeypatch):
    engine = sweep_engine.use(monkeypatch)
    points = resolved(expand({"updates": 11}, {"lr": [0.1, 0.2, 0.3]}))
    sweep_folder.begin(tmp_path, points)
    assert cluster.train_members(str(tmp_path), "2,0", "", "") == "2 runs"
    assert [each.lr for each in engine.trained] == [0.3, 0.1]
    assert load(tmp_path / "runs" / "lr=0.3").settings["lr"] == 0.3
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"lr=0.1", "lr=0.3"}
    engine.trained.clear()
    assert cluster.train_members(str(tmp_path), "2,0", "4000", "1") == "0 runs"
    assert cluster.train_members(str(tmp_path), "1", "", "") == "1 runs"
    assert [each.lr for each in engine.trained] == [0.2]


FAKE = """#!{python}
import pathlib, sys
text = pathlib.Path(sys.argv[-1]).read_text() if sys.argv[0].endswith("sbatch") else ""
pathlib.Path({log!r}).write_text(text)
print("Submitted batch job 4321")
"""


def _scheduler(tmp_path, monkeypatch, script):
    """``srun`` and ``sbatch`` on the path, made up."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("srun", "sbatch"):
        (tools / name).write_text(script.format(python=sys.executable, log=str(tmp_path / f"{name}.txt")))
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")


def test_slurm_gets_one_array_with_the_options(tmp_path, monkeypatch):
    """A made-up sbatch that writes down what it is given."""
    _scheduler(tmp_path, monkeypatch, FAKE)
    sweep_engine.use(monkeypatch)
    work = plan_sweep(expand({"updates": 11}, {"lr": [0.1, 0.2, 0.3, 0.4, 0.5]}))
    options = "slurm:partition=gpu,time=90,gpus=1,memory=16,cpus=4,account=lab7,at_once=2"
    jobs = cluster.submit(work, tmp_path / "sweep", options, memory_limit=10**9)
    assert [job.id for job in jobs] == ["4321_0", "4321_1", "4321_2"]
    assert [job.runs for job in jobs] == [("lr=0.1", "lr=0.2"), ("lr=0.3", "lr=0.4"), ("lr=0.5",)]
    sent = (tmp_path / "sbatch.txt").read_text()
    for line in (
        "--partition=gpu",
        "--time=90",
        "--gpus-per-node=1",
        "--mem=16GB",
        "--cpus-per-task=4",
        "--account=lab7",
        "--array=0-2%2",
        "--job-name=fedjax-async-sweep",
    ):
        assert f"#SBATCH {line}\n" in sent, line


def test_what_slurm_refuses_is_one_line_in_its_words(tmp_path, monkeypatch):
    says = ("sbatch: error: invalid partition specified: gpu", "sbatch: error: Batch job submission failed")
    _scheduler(tmp_path, monkeypatch, f"#!{{python}}\nimport sys\nsys.exit({chr(10).join(says)!r})\n")
    sweep_engine.use(monkeypatch)
    work = plan_sweep(expand({"updates": 11}, {"lr": [0.1, 0.2, 0.3]}))
    with pytest.raises(ValueError, match=re.escape("submit = 'slurm:partition=gpu'")) as raised:
        cluster.submit(work, tmp_path / "sweep", "slurm:partition=gpu")
    assert str(raised.value).endswith(" ".join(says))


def test_a_stack_that_was_cut_short_is_submitted_whole(tmp_path, monkeypatch):
    """Otherwise its job would be another stack, without the checkpoint of the one that was killed."""
    _scheduler(tmp_path, monkeypatch, FAKE)
    engine = sweep_engine.use(monkeypatch)
    points = expand({"updates": 11}, {"lr": [0.1, 0.2, 0.3, 0.4, 0.5]})  # stacks of two: (0, 1), (2, 3), (4,)
    sweep_folder.begin(tmp_path / "sweep", points)
    cluster.train_members(str(tmp_path / "sweep"), "0,2,3", "", "")
    jobs = cluster.submit(plan_sweep(points, folder=tmp_path / "sweep"), tmp_path / "sweep", "slurm")
    assert [job.runs for job in jobs] == [("lr=0.2",), ("lr=0.5",)]
    assert [job.handle.submission().args[1] for job in jobs] == ["0,1", "4"]
    saved = tmp_path / "sweep" / "runs" / "lr=0.1" / "manifest.json"
    before = saved.stat().st_mtime_ns
    engine.trained.clear()
    assert cluster.train_members(str(tmp_path / "sweep"), "0,1", "", "") == "1 runs"
    assert [each.lr for each in engine.trained] == [0.1, 0.2]  # as one stack
    assert saved.stat().st_mtime_ns == before  # and what was finished is left alone


def test_options_are_checked():
    assert cluster.parse_target("local") == ("local", {"time": 60})
    assert cluster.parse_target("slurm:account=7,time=5") == ("slurm", {"time": 5, "account": "7"})
    for spec, says in (
        ("slrm", "did you mean 'slurm'?"),
        ("slurm:partion=gpu", "did you mean 'partition'?"),
        ("slurm:time=2h", "time = '2h': must be a whole number"),
        ("slurm:memory=0", "memory = 0"),
        ("slurm:gpu", "key=value"),
    ):
        with pytest.raises(ValueError, match=re.escape(says)):
            cluster.parse_target(spec)


def test_no_scheduler_or_no_submitit(tmp_path, monkeypatch):
    sweep_engine.use(monkeypatch)
    work = plan_sweep(expand({"updates": 11}, {"lr": [0.1]}))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="must be a scheduler of this machine"):
        cluster.submit(work, tmp_path / "a", "slurm")
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ValueError, match="pip install"):
        cluster.submit(work, tmp_path / "b", "local")
    assert not (tmp_path / "b").exists()
