"""Runs and sweeps that are killed at random times and continued: the final files are identical, byte for byte."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from fedjax_async.config import Settings, prepare
from fedjax_async.results import save
from fedjax_async.results.simulation import run_alone
from tests.cli.called import refused
from tests.results.folders import contents, ends_the_same
from tests.results.made_up import make_run

COMMAND = [sys.executable, "-m", "fedjax_async"]
RUN = ["--model", "mlp", "--clients", "10", "--delay", "exponential", "--eval-updates", "100",
       "--method", "fedbuff@buffer:size=3", "--checkpoint", "50", "--quiet", "--updates", "600"]  # fmt: skip
SWEEP = """
seeds = 2
[base]
method = "fedasync"
model = "mlp"
delay = "exponential"
updates = 300
eval_updates = 100
[grid]
lr = [0.01, 0.02]
"""


def killed(command: list[str], after: float) -> bool:
    """Start a command and kill it after some seconds; returns whether it was still running."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        _, error = process.communicate(timeout=after)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return True
    assert process.returncode == 0, error
    return False


def timed(command: list[str]) -> float:
    """Run a command to its end; returns the seconds that it took."""
    start = time.monotonic()
    assert not killed(command, 500)
    return time.monotonic() - start


def random_moments(whole: float) -> Iterator[float]:
    """Seconds after which to kill a command that takes ``whole`` seconds, each time others."""
    dice = random.Random(0)
    while True:
        yield dice.uniform(0.2, 0.9) * whole


def kill_until(first: list[str], again: list[str], folder: Path, kills: int, moments: Iterator[float]) -> int:
    """Kill a command at these times, at most ``kills`` times, and continue it; returns the number of kills."""
    done = 0
    while done < kills:
        begun = (folder / "checkpoints" / "settings.json").is_file()
        if not killed(again if begun else first, next(moments)):
            return done
        done += 1
    begun = (folder / "checkpoints" / "settings.json").is_file()
    assert not killed(again if begun else first, 500)
    return done


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run", "sweep"])
def test_a_command_killed_at_random_moments_ends_the_same(tmp_path, name, kills=50):
    (tmp_path / "sweep.toml").write_text(SWEEP)
    flags = RUN if name == "run" else [str(tmp_path / "sweep.toml"), "--quiet"]

    def begun(folder):
        return [*COMMAND, name, *flags, "--out", str(folder)]

    moments = random_moments(timed(begun(tmp_path / "whole")))
    want, total, attempts = contents(tmp_path / "whole"), 0, count()
    while total < kills:
        folder = tmp_path / "cut" / str(next(attempts))  # a new one: a finished one would end too fast to be killed
        again = [*COMMAND, "resume", str(folder), "--quiet"] if name == "run" else begun(folder)
        total += kill_until(begun(folder), again, folder, kills - total, moments)
        assert contents(folder) == want


def test_a_run_killed_in_any_of_its_writes_ends_the_same(tmp_path, blank_pictures):
    given = {"model": "logistic", "clients": 4, "updates": 8, "steps": 2, "method": "fedbuff@buffer:size=3"}
    experiment = prepare(Settings(**given, checkpoint=4))
    ends_the_same(lambda folder: run_alone(experiment, folder, plots=True), tmp_path, least=12)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ("runs", "but a sweep or comparison goes on when its command is given once more"),
        ("checkpoints", "cut off before it began: give the command that began it once more"),
        ("nothing", "begun with --checkpoint"),
        ("finished", "is finished"),
    ],
)
def test_what_cannot_be_resumed_says_why(capsys, tmp_path, made, says):
    if made == "finished":
        save(make_run(), tmp_path)
    elif made != "nothing":
        (tmp_path / made).mkdir()
    assert says in refused(capsys, "resume", str(tmp_path))
