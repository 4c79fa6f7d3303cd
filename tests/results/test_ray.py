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
from pathlib import Path

import pytest

from fedjax_async.base import disk

SWEEP = """
[base]
model = "logistic"
clients = 4
steps = 2
updates = 120
eval_updates = 30
[grid]
method = ["fedavg", "fedprox", "fedadam", "fedasync", "fedbuff@buffer:size=3", "ca2fl@buffer:size=3", "orthofl", "asgd"]
"""  # one group each
pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Starts the sweep into a folder."""
    assert importlib.util.find_spec("ray") is not None, "this test needs Ray: pip install '.[ray]'"
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    monkeypatch.setenv("RAY_worker_niceness", "0")  # with Ray's default of 15, workers starve on a busy machine
    file = tmp_path / "methods.toml"
    file.write_text(SWEEP)

    def started(out: Path, *flags: str) -> subprocess.Popen[str]:
        words = ["sweep", str(file), "--out", str(out), "--quiet", "--lanes", "1", *flags]
        command = [sys.executable, "-m", "fedjax_async", *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    return started


def kill_one(out: Path, process: subprocess.Popen[str]) -> Path:
    """Send SIGKILL to the first worker that trains, the owner of its run's lock; returns the folder of this run."""
    while process.poll() is None:
        for lock in out.glob(f"runs/*/{disk.LOCK}"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the lock of a worker killed before
                owner = re.search(r"process (\d+)", lock.read_text())
                if owner is not None and not (lock.parent / "manifest.json").exists():
                    os.kill(int(owner[1]), signal.SIGKILL)
                    assert not (lock.parent / "manifest.json").exists()
                    return lock.parent
        time.sleep(0.01)
    raise AssertionError(process.communicate()[0])


def test_the_group_of_a_killed_worker_is_run_again_at_once_or_later(start, tmp_path):
    out = tmp_path / "ray"
    process = start(out, "--submit", "ray:retries=0")
    unfinished = kill_one(out, process)
    said = process.communicate()[0]
    assert process.returncode == 2, said
    assert "1 of 8 failed" in said.splitlines()[-1] and unfinished.name in said.splitlines()[-1], said
    process = start(out, "--submit", "ray")
    assert kill_one(out, process) == unfinished
    said = process.communicate()[0]
    assert process.returncode == 0, said
    assert "1 of 1: job" in said and re.search("job . failed", said) is None, said
    assert len(list(out.glob("runs/*/manifest.json"))) == 8
    alone = start(tmp_path / "alone")
    assert alone.communicate()[0] and alone.returncode == 0
    names = ["runs.csv", "evaluations.csv", "best.md", "settings.md"]
    names += [f"runs/{unfinished.name}/{name}" for name in ("params.npz", "evaluations.csv", "updates.csv")]
    assert filecmp.cmpfiles(out, tmp_path / "alone", names, shallow=False) == (names, [], [])
