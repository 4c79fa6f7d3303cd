"""Sweeps as jobs: real subprocesses by submitit's local executor; what SLURM, Ray and arrays get."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from fedjax_async.config.grid import expand
from fedjax_async.results import cluster, sweep_folder
from fedjax_async.results.sweeps import collect, plan_sweep, resolved, sweep
from tests.refusals import refusals
from tests.told import refusal

ROOT = Path(__file__).resolve().parents[2]
RATES = (0.1, 0.2, 0.3, 0.4, 0.5)  # stacks of two: (0, 1), (2, 3), (4,)


def points_of(count=5):
    """The points of a sweep over so many learning rates, whose defaults are filled in."""
    return resolved(expand({"updates": 11}, {"lr": list(RATES[:count])}))


def test_local_jobs_train_in_processes_of_their_own(tmp_path, monkeypatch, commands_compile_as_here):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    given = {"model": "logistic", "clients": 4, "steps": 1, "updates": 3, "engine": "reference"}
    points = resolved(expand(given, {"lr": [0.02]}))
    work = plan_sweep(points, folder=tmp_path / "jobs", lanes=1)
    (job,) = cluster.submit(work, tmp_path / "jobs", "local:time=5", lanes=1)
    assert job.runs == ("lr=0.02",)
    job.handle.wait()
    assert job.handle.state == "FINISHED", job.handle.stderr()
    assert str(os.getpid()) != job.id
    finished, missing = collect(tmp_path / "jobs")
    assert not missing, job.handle.stderr()
    here = sweep(given, {"lr": [0.02]}, progress=False, lanes=1)
    assert finished.run(0).settings == here.run(0).settings
    np.testing.assert_array_equal(finished.run(0).evaluations["loss"], here.run(0).evaluations["loss"])
    again = plan_sweep(points, folder=tmp_path / "jobs", lanes=1)
    assert cluster.submit(again, tmp_path / "jobs", "local") == []


FAKE = """#!{python}
import pathlib, sys
text = pathlib.Path(sys.argv[-1]).read_text() if sys.argv[0].endswith("sbatch") else ""
pathlib.Path({log!r}).write_text(text)
print("Submitted batch job 4321")
"""


def _scheduler(tmp_path, monkeypatch, script=FAKE):
    """Put made-up ``srun`` and ``sbatch`` on the path; the latter records what it gets."""
    for name in ("srun", "sbatch"):
        (tmp_path / name).write_text(script.format(python=sys.executable, log=str(tmp_path / f"{name}.txt")))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def test_slurm_gets_one_array_with_the_options(tmp_path, monkeypatch, engine):
    _scheduler(tmp_path, monkeypatch)
    work = plan_sweep(points_of())
    options = "slurm:partition=gpu,time=90,gpus=1,memory=16,cpus=4,account=lab7,at_once=2"
    jobs = cluster.submit(work, tmp_path / "sweep", options, memory_limit=10**9)
    assert [job.id for job in jobs] == ["4321_0", "4321_1", "4321_2"]
    assert [job.runs for job in jobs] == [("lr=0.1", "lr=0.2"), ("lr=0.3", "lr=0.4"), ("lr=0.5",)]
    lines = "partition=gpu time=90 gpus-per-node=1 mem=16GB cpus-per-task=4 account=lab7 array=0-2%2"
    wanted = {f"#SBATCH --{line}" for line in (*lines.split(), "job-name=fedjax-async-sweep")}
    assert wanted <= set((tmp_path / "sbatch.txt").read_text().splitlines())


def test_what_slurm_refuses_is_one_line_in_its_words(tmp_path, monkeypatch, engine):
    says = ("sbatch: error: invalid partition specified: gpu", "sbatch: error: Batch job submission failed")
    _scheduler(tmp_path, monkeypatch, f"#!{{python}}\nimport sys\nsys.exit({chr(10).join(says)!r})\n")
    message = refusal(cluster.submit, plan_sweep(points_of(3)), tmp_path / "sweep", "slurm:partition=gpu")
    assert message.startswith("submit = 'slurm:partition=gpu'") and message.endswith(" ".join(says))


def test_a_stack_that_was_cut_short_is_submitted_whole(tmp_path, monkeypatch, engine):
    """Otherwise its job would be another stack, and would not find the checkpoint of the killed job."""
    _scheduler(tmp_path, monkeypatch)
    points, folder = points_of(), tmp_path / "sweep"
    sweep_folder.begin(folder, points)
    assert cluster.train_members(str(folder), "3,0,2", "", "") == "3 runs"
    assert [each.lr for each in engine.trained] == [0.4, 0.1, 0.3]
    assert {path.name for path in (folder / "runs").iterdir()} == {"lr=0.1", "lr=0.3", "lr=0.4"}
    jobs = cluster.submit(plan_sweep(points, folder=folder), folder, "slurm")
    assert [job.runs for job in jobs] == [("lr=0.2",), ("lr=0.5",)]
    assert [job.handle.submission().args[1] for job in jobs] == ["0,1", "4"]
    saved = folder / "runs" / "lr=0.1" / "manifest.json"
    before = saved.stat().st_mtime_ns
    engine.trained.clear()
    assert cluster.train_members(str(folder), "2,0", "4000", "1") == "0 runs"
    assert cluster.train_members(str(folder), "0,1", "", "") == "1 runs"
    assert [each.lr for each in engine.trained] == [0.1, 0.2]  # as one stack
    assert saved.stat().st_mtime_ns == before  # the finished run is not written again


def test_options_are_read():
    assert cluster.parse_target("local") == ("local", {"time": 60})
    assert cluster.parse_target("ray:gpus=0,retries=0") == ("ray", {"cpus": 1, "gpus": 0, "retries": 0})
    assert cluster.parse_target("slurm:account=7,time=5") == ("slurm", {"time": 5, "account": "7"})


test_wrong_options_are_named = refusals(
    ("slrm", "did you mean 'slurm'?"),
    ("slurm:partion=gpu", "did you mean 'partition'?"),
    ("slurm:time=2h", "time = '2h': must be a whole number"),
    ("slurm:memory=0", "memory = 0"),
    ("slurm:gpu", "key=value"),
    ("slurm:retries=1", "option of slurm = 'retries'"),
    ("ray:retries=-1", "retries = -1: must be a whole number >= 0"),
    ("ray:time=5", "option of ray = 'time'"),
    ("array:cpus=1", "option of array = 'cpus'"),
    by=cluster.parse_target,
)


def test_without_scheduler_or_package_no_folder_is_made(tmp_path, monkeypatch, engine):
    monkeypatch.setenv("PATH", str(tmp_path))
    given = plan_sweep(points_of(1)), tmp_path / "sweep"
    assert "must be a scheduler of this machine" in refusal(cluster.submit, *given, "slurm")
    shutil.rmtree(tmp_path / "sweep", ignore_errors=True)  # submitit's
    for module, target in (("submitit", "local"), ("ray", "ray")):
        monkeypatch.setitem(sys.modules, module, None)
        assert "pip install" in refusal(cluster.submit, *given, target)
    assert not (tmp_path / "sweep").exists()


def test_an_array_has_numbered_jobs_that_any_copy_of_the_folder_knows(tmp_path, engine):
    folder, copy = tmp_path / "sweep", tmp_path / "copy"
    points = points_of()
    jobs = cluster.submit(plan_sweep(points, folder=folder), folder, "array", lanes=1)
    assert [job.id for job in jobs] == ["0", "1", "2"]
    assert [job.runs for job in jobs] == [("lr=0.1", "lr=0.2"), ("lr=0.3", "lr=0.4"), ("lr=0.5",)]
    assert engine.trained == []
    shutil.copytree(folder, copy)
    assert cluster.train_job(copy, 0) == "2 runs"
    shutil.copytree(copy / "runs", folder / "runs")
    assert len(collect(folder)[1]) == 3
    again = cluster.submit(plan_sweep(points, folder=folder), folder, "array", lanes=1)
    assert [job.id for job in again] == ["1", "2"], "a job keeps its number"
    assert [cluster.train_job(folder, number) for number in (2, 1, 0)] == ["1 runs", "2 runs", "0 runs"]
    assert collect(folder)[1] == ()


def test_jobs_of_an_array_that_are_not_there(tmp_path, engine):
    assert "must hold a sweep that was submitted with --submit array" in refusal(cluster.train_job, tmp_path, 0)
    for count in (5, 2):  # another sweep in the same folder has jobs of its own
        cluster.submit(plan_sweep(points_of(count)), tmp_path, "array")
    assert "index = 1: must be a whole number from 0 to 0" in refusal(cluster.train_job, tmp_path, 1)


def fake_ray(wanted):
    """What ``cluster`` uses of Ray: calls run immediately, and the last one ends first."""

    def options(function, given):
        wanted.update(given)
        return SimpleNamespace(remote=lambda *call: (function, call))

    return SimpleNamespace(
        exceptions=SimpleNamespace(RayError=ArithmeticError),
        is_initialized=lambda: True,
        remote=lambda function: SimpleNamespace(options=lambda **given: options(function, given)),
        wait=lambda left, num_returns: (left[-1:], left[:-1]),
        get=lambda reference: reference[0](*reference[1]),
    )


def test_ray_gets_a_task_for_each_stack_and_one_that_fails_says_why(tmp_path, monkeypatch, engine):
    wanted = {}
    monkeypatch.setitem(sys.modules, "ray", fake_ray(wanted))
    jobs = cluster.submit(plan_sweep(points_of(3)), tmp_path, "ray:cpus=2,memory=0.5,retries=1")
    assert wanted == {"num_cpus": 2, "num_gpus": 0, "max_retries": 1, "memory": 5 * 10**8}
    assert [(job.id, job.runs) for job in jobs] == [("0", ("lr=0.1", "lr=0.2")), ("1", ("lr=0.3",))]
    assert jobs[0].handle[1] == (str(tmp_path), "0,1", "", "2", "", "")  # as many lanes as processors
    assert list(cluster.finished([job.handle for job in jobs])) == [(1, None), (0, None)]
    assert collect(tmp_path)[1] == ()
    tasks = cluster.start_tasks(lambda top: int(top) / 0, [("1",)], {})
    assert list(cluster.finished(tasks)) == [(0, "division by zero")]
