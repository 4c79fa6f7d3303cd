"""Runs and sweeps that are killed at random times and continued: the final files are identical, byte for byte."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from fedjax_async import cli
from fedjax_async.config import Settings, prepare
from fedjax_async.results import save
from fedjax_async.results.simulation import run_alone
from tests.results.folders import Killed, contents
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
def test_a_run_killed_at_random_moments_ends_the_same(tmp_path, kills=50):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    moments = random_moments(timed([*COMMAND, "run", *RUN, "--out", str(whole)]))
    want, total, attempts = contents(whole), 0, count()
    while total < kills:
        folder = cut / str(next(attempts))
        run = [*COMMAND, "run", *RUN, "--out", str(folder)]
        total += kill_until(run, [*COMMAND, "resume", str(folder), "--quiet"], folder, kills - total, moments)
        assert contents(folder) == want


@pytest.mark.slow
def test_a_sweep_killed_at_random_moments_ends_the_same(tmp_path, kills=50):
    definition = tmp_path / "sweep.toml"
    definition.write_text(SWEEP)
    whole, cut, total, attempts = tmp_path / "whole", tmp_path / "cut", 0, count()
    command = [*COMMAND, "sweep", str(definition), "--quiet", "--out"]
    moments = random_moments(timed([*command, str(whole)]))
    want = contents(whole)
    while total < kills:
        folder = cut / str(next(attempts))  # a new folder: a finished one would end too fast to be killed
        again = [*command, str(folder)]
        total += kill_until(again, again, folder, kills - total, moments)
        assert contents(folder) == want


def test_a_run_killed_in_any_of_its_writes_ends_the_same(tmp_path, monkeypatch):
    """Killed one write later each time. A killed process leaves half a temporary file, which carries its number."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, stream, **options: stream.write(b"drawn"))
    experiment = prepare(
        Settings(model="logistic", clients=4, updates=8, steps=2, method="fedbuff@buffer:size=3", checkpoint=4)
    )
    run_alone(experiment, tmp_path / "whole", plots=True)
    want, replace, deaths = contents(tmp_path / "whole"), os.replace, 0
    for last in count():
        folder = tmp_path / f"cut_{last}"
        left = iter(range(last, -1, -1))

        def dying(temporary, path, left=left):
            if next(left) == 0:
                content = Path(temporary).read_bytes()
                Path(path).with_name(f".{Path(path).name}.1234.tmp").write_bytes(content[: len(content) // 2])
                raise Killed
            replace(temporary, path)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", dying)
            try:
                run_alone(experiment, folder, plots=True)
            except Killed:
                deaths += 1
        ended = deaths == last  # not killed this time
        if not ended:
            run_alone(experiment, folder, plots=True)
        assert contents(folder) == want, last
        if ended:
            break
    assert deaths > 12


def test_a_sweep_is_continued_by_its_own_command(capsys, tmp_path):
    (tmp_path / "runs").mkdir()
    assert cli.main(["resume", str(tmp_path)]) == 2
    assert "but a sweep or comparison goes on when its command is given once more" in capsys.readouterr().err


def test_nothing_to_resume(capsys, tmp_path):
    assert cli.main(["resume", str(tmp_path)]) == 2
    assert "begun with --checkpoint" in capsys.readouterr().err
    save(make_run(), tmp_path)
    assert cli.main(["resume", str(tmp_path)]) == 2
    assert "is finished" in capsys.readouterr().err


def test_a_run_that_was_cut_off_before_its_settings_were_written_says_so(capsys, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    assert cli.main(["resume", str(tmp_path)]) == 2
    assert "cut off before it began: give the command that began it once more" in capsys.readouterr().err
