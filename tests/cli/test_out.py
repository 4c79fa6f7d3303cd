"""Output folders are checked before any work; what is interrupted or killed goes on and ends the same."""

import errno
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest

from fedjax_async import cli
from fedjax_async.base import disk
from fedjax_async.cli import landscape as landscapes
from fedjax_async.cli import runs, saved, sweep
from fedjax_async.config import Settings, prepare, sweeping
from fedjax_async.engine import checkpoint
from fedjax_async.results import load, simulation
from fedjax_async.results.simulation import run_alone
from fedjax_async.results.store import Occupied
from tests.cli.called import ok, refused
from tests.results import sweep_engine
from tests.results.folders import contents, ends_the_same
from tests.results.made_up import of_group
from tests.results.test_claim import elsewhere, never

SMALL = ("--model", "logistic", "--clients", "4", "--updates", "6", "--steps", "2", "--quiet")
SWEEP = '[base]\nmodel = "logistic"\nclients = 4\nsteps = 1\nupdates = 6\n[grid]\nlr = [0.02, 0.1]\n'
COMMANDS = {
    "run": ("run", *SMALL),
    "compare": ("compare", "fedasync", "asgd", *SMALL),
    "quickstart": ("quickstart", "--quiet"),
    "sweep": ("sweep", "sweep.toml", "--quiet"),
    "submit": ("sweep", "sweep.toml", "--submit", "local"),
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.toml").write_text(SWEEP)


@pytest.fixture
def idle(monkeypatch):
    """Make preparing (which compiles the first model), planning and training fail the test."""
    monkeypatch.setattr(simulation, "prepare", never)
    monkeypatch.setattr(sweeping, "prepare", never)
    monkeypatch.setattr(sweeping, "execute", never)
    monkeypatch.setattr(sweep, "read", never)
    monkeypatch.setattr(sweep, "plan_sweep", never)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_folder_in_use_or_that_cannot_be_made_costs_no_work(capsys, tmp_path, idle, command):
    with elsewhere("used"):
        assert f"in use by process {os.getpid()} on" in refused(capsys, *command, "--out", "used")
    says = refused(capsys, *command, "--out", "sweep.toml/x")
    assert "error: folder = 'sweep.toml/x': must be a folder" in says
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.toml"]


cut, fail_to_write = (Mock(side_effect=error) for error in (KeyboardInterrupt, OSError(errno.EROFS, "Read-only")))


def once(function):
    """A function whose second call is interrupted."""
    return Mock(wraps=function, side_effect=[DEFAULT, KeyboardInterrupt])


def interrupted(capsys, *command):
    """What an interrupted command says."""
    assert cli.main([*command]) == 130
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said.strip().removeprefix("fedjax-async: interrupted; ")


def test_resume_looks_first_too(capsys, tmp_path, monkeypatch, request):
    with monkeypatch.context() as patch:
        patch.setattr(sweeping, "execute", cut)
        said = interrupted(capsys, "run", *SMALL, "--checkpoint", "2", "--out", "out")
    assert said == "no checkpoint was due yet (one is due every 2 updates)"
    request.getfixturevalue("idle")
    with elsewhere("out"):
        assert "in use by process" in refused(capsys, "resume", "out")
    monkeypatch.setattr(disk, "write", fail_to_write)
    assert "folder = 'out': must be a folder that can be written (Read-only" in refused(capsys, "resume", "out")


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_bad_settings_leave_no_folder(capsys, tmp_path, command):
    Path("sweep.toml").write_text(SWEEP.replace("clients = 4", "clients = 0"))
    bad = ["0" if before == "--clients" else word for before, word in zip(("", *command), command)]
    bad += ["--clients", "0"] * (command[0] == "quickstart")
    assert "clients = 0" in refused(capsys, *bad, "--out", "deep/out")
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.toml"]


def test_an_interrupted_run_without_checkpoints_leaves_no_folder(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sweeping, "execute_group", cut)
    monkeypatch.setattr(simulation, "execute", cut)  # of a run in memory
    out = ("--out", "deep/out")
    assert interrupted(capsys, "run", *SMALL, *out) == "there is no checkpoint (see --checkpoint)"
    assert interrupted(capsys, "compare", "fedasync", *SMALL, *out) == "no run was finished"
    assert interrupted(capsys, "run", *SMALL) == "nothing is kept without a folder (see --out and --checkpoint)"
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.toml"]


def test_a_run_without_a_folder_says_that_nothing_is_saved(capsys, made_at_once):
    line = "nothing is saved: --out DIR keeps tables, pictures and model"
    assert ok(capsys, "run", *SMALL).splitlines()[-1] == line
    found = ok(capsys, "run", *SMALL, "--out", "out", "--no-plots").splitlines()
    assert found[-1] == "saved in out" and line not in found


def test_a_run_that_cannot_be_saved_prints_its_result_and_names_the_file(capsys, monkeypatch, made_at_once):
    write = disk.write

    def full(path, content):
        if Path(path).name == "params.npz":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, content)

    monkeypatch.setattr(disk, "write", full)
    assert cli.main(("run", *SMALL, "--out", "out")) == 2
    done = capsys.readouterr()
    assert done.out.startswith("fedasync: accuracy ") and "saved in" not in done.out
    assert done.err.count("\n") == 1 and "params.npz cannot be written (No space left on device)" in done.err
    assert (Path("out") / "evaluations.csv").is_file()


def test_without_matplotlib_everything_but_pictures_is_written(capsys, monkeypatch, made_at_once):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for command in (("run", *SMALL, "--out", "one"), ("compare", "fedasync", "asgd", *SMALL, "--out", "two")):
        advice = "matplotlib = not installed: needed for pictures, which --no-plots leaves out; run: pip install matp"
        assert advice in refused(capsys, *command) and not Path(command[-1]).exists()
        assert "pictures" not in ok(capsys, *command, "--no-plots")
        assert not list(Path(command[-1]).rglob("*.png"))
    assert load("one").settings["updates"] == 6 and Path("two/comparison.md").is_file()
    sweep_engine.use(monkeypatch)
    ok(capsys, "sweep", "sweep.toml", "--out", "three", "--quiet", "--no-plots")
    assert Path("three/best.md").is_file() and not list(Path("three").rglob("*.png"))


def test_interrupted_it_says_how_to_continue(capsys, monkeypatch):
    """Ctrl-C at the second checkpoint; the printed command continues the run."""
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.disk, "replacing", once(checkpoint.disk.replacing))
        patch.setattr(disk, "write", lambda path, content: Path(path).write_bytes(content))
        said = interrupted(capsys, "run", *SMALL, "--checkpoint", "2", "--out", "my out")
    assert said == "continue with: fedjax-async resume 'my out'"
    assert cli.main(["resume", "my out", "--quiet"]) == 0
    assert load("my out").counters["updates"] == 6


def test_a_comparison_keeps_the_runs_that_were_finished(capsys, monkeypatch):
    monkeypatch.setattr(sweeping, "execute_group", once(of_group))
    said = interrupted(capsys, "compare", "fedasync", "asgd", *SMALL, "--out", "out")
    assert said == "finished runs are kept in out"
    assert load("out/runs/fedasync/seed_0").settings["updates"] == 6


def test_the_report_of_a_comparison_is_written_under_the_same_lock(monkeypatch, made_at_once):
    def report(*arguments, **options):
        with pytest.raises(ValueError, match="in use"), elsewhere("out"):
            never()
        return "a table"

    monkeypatch.setattr(runs, "write_comparison", report)
    assert cli.main(["compare", "fedasync", *SMALL, "--out", "out"]) == 0


def test_a_dry_run_and_a_collection_need_no_lock(capsys, monkeypatch, engine):
    monkeypatch.setattr("fedjax_async.results.sweep_report.pictures", lambda *given: {})
    command = ["sweep", "sweep.toml", "--out", "out", "--quiet"]
    assert cli.main(command) == 0
    with elsewhere("out"):  # the same sweep is still running
        assert cli.main([*command, "--dry-run"]) == cli.main([*command, "--collect"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(sweep, "collect", never)
    monkeypatch.setattr("fedjax_async.results.claim.disk.prove", fail_to_write)
    says = refused(capsys, *command, "--collect")
    assert "file = 'out/runs.csv': must be a file that can be written (Read-only" in says


def test_a_picture_that_cannot_be_written_costs_no_plan(capsys, tmp_path, idle):
    written = "error: gantt = 'sweep.toml/a.png': must be a file that can be written ("
    for path, says in (("sweep.toml/a.png", written), ("a.gif", "file ending")):
        assert says in refused(capsys, "plan", *SMALL[:-1], "--gantt", path)
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.toml"]


def test_a_comparison_without_out_keeps_the_one_before(capsys, monkeypatch, made_at_once):
    """The same comparison, or more methods in it, go on in its folder; others get the next number."""
    monkeypatch.setattr(runs, "write_comparison", lambda found, out, **options: Path(out, "comparison.csv").touch())

    def compared(*command: str) -> tuple[str, str]:
        out = ok(capsys, "compare", *command, *SMALL)
        return re.findall(r"saved in (\S+):", out)[0], out

    assert compared("asgd")[0] == "runs/compare"
    Path("runs/compare/runs/.DS_Store").touch()  # some systems leave files of their own
    folder, out = compared("asgd", "--lr", "0.5")
    assert folder == "runs/compare_2" and "runs/compare holds other results, which are kept (--overwrite" in out
    assert compared("fedasync")[0] == "runs/compare_3"
    assert compared("asgd", "--lr", "0.5")[0] == "runs/compare_2"  # the finished run is read
    assert compared("asgd", "fedasync")[0] == "runs/compare"
    assert compared("asgd", "--lr", "0.7", "--overwrite")[0] == "runs/compare"
    assert sorted(path.name for path in Path("runs").iterdir()) == ["compare", "compare_2", "compare_3"]
    says = refused(capsys, "compare", "asgd", *SMALL, "--lr", "0.9", "--out", "runs/compare")
    assert "must be empty or hold a run of the same settings" in says


def test_the_usual_folder_of_explain_is_numbered_too(capsys, monkeypatch):
    def explain(folder, *, out, **options):
        if Path(out).exists():
            raise Occupied(f"out = {out!r}: must be another")
        Path(out).mkdir(parents=True)

    monkeypatch.setattr(saved, "explain", explain)
    monkeypatch.setattr(saved, "_print_explanation", lambda found: None)
    for folder in ("one/explain", "one/explain_2"):
        assert f"written: {folder}\n" in ok(capsys, "explain", "one")
    assert "out = 'one/explain': must be another" in refused(capsys, "explain", "one", "--out", "one/explain")


def test_the_usual_folder_of_landscape_is_numbered_too(capsys, monkeypatch):
    """The first folder without a landscape is that in which the work would begin."""
    looked_at = []
    monkeypatch.setattr(landscapes, "require_folder", looked_at.append)
    Path("landscape").mkdir()
    Path("landscape/paths.csv").touch()
    assert "folder = 'one': must hold a saved run" in refused(capsys, "landscape", "one", "two")
    assert looked_at == [Path("landscape"), Path("landscape_2")]


COMMAND = [sys.executable, "-m", "fedjax_async"]
RUN = ["--model", "mlp", "--clients", "10", "--delay", "exponential", "--eval-updates", "100",
       "--method", "fedbuff@buffer:size=3", "--checkpoint", "50", "--quiet", "--updates", "600"]  # fmt: skip
LONG = """
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
    # one that was killed between its last write and its end has nothing to resume
    assert process.returncode == 0 or "the run in it is finished" in error, error
    return False


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run", "sweep"])
def test_a_command_killed_at_random_moments_ends_the_same(tmp_path, name, kills=50):
    Path("long.toml").write_text(LONG)
    flags = RUN if name == "run" else ["long.toml", "--quiet"]
    dice, done, start = random.Random(0), 0, time.monotonic()
    assert not killed([*COMMAND, name, *flags, "--out", "whole"], 500)
    whole, want = time.monotonic() - start, contents(tmp_path / "whole")
    while done < kills:
        folder = tmp_path / f"cut_{done}"  # a new one: a finished one would end too fast to be killed
        command = [*COMMAND, name, *flags, "--out", str(folder)]
        while killed(command, dice.uniform(0.2, 0.9) * whole if done < kills else 500):
            done += 1
            assert done <= kills
            if name == "run" and (folder / "checkpoints" / "settings.json").is_file():
                command = [*COMMAND, "resume", str(folder), "--quiet"]
        assert contents(folder) == want


def test_a_run_killed_in_any_of_its_writes_ends_the_same(tmp_path, blank_pictures):
    given = {"model": "logistic", "clients": 4, "updates": 8, "steps": 2, "method": "fedbuff@buffer:size=3"}
    experiment = prepare(Settings(**given, checkpoint=4))
    ends_the_same(lambda folder: run_alone(experiment, folder, plots=True), tmp_path, least=12)
