"""A sweep on a local Ray, while a worker is killed: its group runs again, and the tables are the same.

A slow test, because it needs the extra ``ray``: ``python -m pytest -m slow tests/results/test_ray.py``.
"""

from __future__ import annotations

import contextlib
import filecmp
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedjax_async.base import disk

INSTALL = "this test needs Ray: pip install '.[ray]'"
# one group each
METHODS = (
    "fedavg",
    "fedprox",
    "fedadam",
    "fedasync",
    "fedbuff@buffer:size=3",
    "ca2fl@buffer:size=3",
    "orthofl",
    "asgd",
)
SWEEP = f"""
[base]
model = "logistic"
clients = 4
steps = 2
updates = 120
eval_updates = 30
[grid]
method = {[*METHODS]}
"""
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    assert importlib.util.find_spec("ray") is not None, INSTALL
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("RAY_worker_niceness", "0")  # with Ray's default of 15, workers starve on a busy machine
    path = tmp_path / "methods.toml"
    path.write_text(SWEEP)
    return path


def started(file: Path, out: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fedjax_async", "sweep", str(file), "--out", str(out), "--quiet", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def training(out: Path) -> Iterator[tuple[Path, int]]:
    """The folders of the runs in training, and the worker of each: the owner of the folder's lock."""
    for lock in out.glob(f"runs/*/{disk.LOCK}"):
        with contextlib.suppress(FileNotFoundError):
            owner = re.search(r"process (\d+)", lock.read_text())
            if owner is not None and not (lock.parent / "manifest.json").exists():
                yield lock.parent, int(owner[1])


def kill_one(out: Path, process: subprocess.Popen[str]) -> Path:
    """Send SIGKILL to the first worker that trains; returns the folder of its unfinished run."""
    while process.poll() is None:
        for folder, worker in training(out):
            os.kill(worker, signal.SIGKILL)
            assert not (folder / "manifest.json").exists()
            return folder
        time.sleep(0.01)
    raise AssertionError(process.communicate()[0])


def tables(out: Path) -> dict[str, bytes]:
    return {name: (out / name).read_bytes() for name in ("runs.csv", "evaluations.csv", "best.md", "settings.md")}


def test_the_group_of_a_killed_worker_is_run_again(file, tmp_path):
    process = started(file, tmp_path / "ray", "--submit", "ray", "--lanes", "1")
    unfinished = kill_one(tmp_path / "ray", process)
    said = process.communicate()[0]
    assert process.returncode == 0, said
    assert "8 of 8: job" in said and re.search("job . failed", said) is None, said
    assert (unfinished / "manifest.json").exists()  # which the killed worker did not write
    alone = started(file, tmp_path / "alone", "--lanes", "1")
    assert alone.communicate()[0] and alone.returncode == 0
    assert tables(tmp_path / "ray") == tables(tmp_path / "alone")
    for name in ("params.npz", "evaluations.csv", "updates.csv"):
        whole = tmp_path / "alone" / "runs" / unfinished.name / name
        assert filecmp.cmp(unfinished / name, whole, shallow=False), name


def test_without_retries_the_sweep_says_what_failed_and_goes_on_later(file, tmp_path):
    out = tmp_path / "ray"
    process = started(file, out, "--submit", "ray:retries=0", "--lanes", "1")
    unfinished = kill_one(out, process)
    said = process.communicate()[0]
    assert process.returncode == 2, said
    assert "1 of 8 failed" in said.splitlines()[-1] and unfinished.name in said.splitlines()[-1], said
    again = started(file, out, "--submit", "ray", "--lanes", "1")
    said = again.communicate()[0]
    assert again.returncode == 0 and "1 of 1" in said, said
    assert len(list(out.glob("runs/*/manifest.json"))) == 8
