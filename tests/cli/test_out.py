"""Every command checks its output folder before anything is prepared, compiled or trained."""

from __future__ import annotations

import errno
import os
import re
import sys
from pathlib import Path

import pytest

from fedjax_async import cli
from fedjax_async.base import disk
from fedjax_async.cli import landscape as landscapes
from fedjax_async.cli import runs, saved, sweep
from fedjax_async.config import sweeping
from fedjax_async.engine import checkpoint
from fedjax_async.results import load, simulation
from fedjax_async.results.store import Occupied
from tests.cli.called import refused
from tests.results import sweep_engine
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
def test_a_bad_place_costs_no_work(capsys, tmp_path, idle, command):
    place = Path("sweep.toml") / "x"
    says = refused(capsys, *command, "--out", str(place))
    assert f"error: folder = {str(place)!r}: must be a folder" in says
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.toml"]


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_folder_in_use_costs_no_work(capsys, idle, command):
    with elsewhere("out"):
        assert f"in use by process {os.getpid()} on" in refused(capsys, *command, "--out", "out")


def begun(folder: str) -> None:
    """A run that was interrupted right after its start."""

    def cut(*arguments, **options):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweeping, "execute", cut)
        assert cli.main(["run", *SMALL, "--checkpoint", "2", "--out", folder]) == 130


def test_resume_looks_first_too(capsys, tmp_path, monkeypatch, request):
    begun("out")
    capsys.readouterr()
    request.getfixturevalue("idle")
    with elsewhere("out"):
        assert "in use by process" in refused(capsys, "resume", "out")
    monkeypatch.setattr(disk, "write", fail_to_write)
    assert "folder = 'out': must be a folder that can be written (Read-only" in refused(capsys, "resume", "out")
    assert "begun with --checkpoint" in refused(capsys, "resume", "no_such_folder")
    assert not (tmp_path / "no_such_folder").exists()


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_bad_settings_leave_no_folder(capsys, tmp_path, command):
    Path("sweep.toml").write_text(SWEEP.replace("clients = 4", "clients = 0"))
    bad = [*command]
    if "--clients" in bad:
        bad[bad.index("--clients") + 1] = "0"
    elif command[0] != "sweep":
        bad += ["--clients", "0"]
    assert "clients = 0" in refused(capsys, *bad, "--out", "deep/out")
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.toml"]


def test_an_interrupted_run_without_checkpoints_leaves_no_folder(capsys, tmp_path, monkeypatch):
    def cut(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(sweeping, "execute_group", cut)
    monkeypatch.setattr(simulation, "execute", cut)  # of a run in memory
    for command, says in (
        (("run", *SMALL, "--out", "deep/out"), "there is no checkpoint (see --checkpoint)"),
        (("compare", "fedasync", *SMALL, "--out", "deep/out"), "no run was finished"),
    ):
        assert cli.main([*command]) == 130
        assert capsys.readouterr().err == f"fedjax-async: interrupted; {says}\n"
    assert cli.main(["run", *SMALL]) == 130
    says = "nothing is kept without a folder (see --out and --checkpoint)"
    assert capsys.readouterr().err == f"fedjax-async: interrupted; {says}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.toml"]


def test_interrupted_before_the_first_checkpoint_it_says_that_none_was_due(capsys):
    begun("out")
    says = "no checkpoint was due yet (one is due every 2 updates)"
    assert capsys.readouterr().err == f"fedjax-async: interrupted; {says}\n"


@pytest.mark.parametrize("out", [(), ("--out", "out", "--no-plots")])
def test_a_run_without_a_folder_says_that_nothing_is_saved(capsys, out, made_at_once):
    assert cli.main(["run", *SMALL, *out]) == 0
    line = "nothing is saved: --out DIR keeps tables, pictures and model"
    found = capsys.readouterr().out.splitlines()
    assert (found[-1] == "saved in out" and line not in found) if out else found[-1] == line


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
        assert cli.main((*command, "--no-plots")) == 0
        assert "pictures" not in capsys.readouterr().out
        assert not list(Path(command[-1]).rglob("*.png"))
    assert load("one").settings["updates"] == 6 and Path("two/comparison.md").is_file()
    sweep_engine.use(monkeypatch)
    assert cli.main(("sweep", "sweep.toml", "--out", "three", "--quiet", "--no-plots")) == 0
    assert Path("three/best.md").is_file() and not list(Path("three").rglob("*.png"))
    capsys.readouterr()


def test_interrupted_it_says_how_to_continue(capsys, monkeypatch):
    """Ctrl-C at the second checkpoint; the printed command continues the run."""
    replacing = checkpoint.disk.replacing
    written = []

    def interrupt(path):
        written.append(path)
        if len(written) == 2:
            raise KeyboardInterrupt
        return replacing(path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.disk, "replacing", interrupt)
        patch.setattr(disk, "write", lambda path, content: Path(path).write_bytes(content))
        assert cli.main(["run", *SMALL, "--checkpoint", "2", "--out", "my out"]) == 130
    says = capsys.readouterr().err
    assert says == "fedjax-async: interrupted; continue with: fedjax-async resume 'my out'\n"
    assert cli.main(["resume", "my out", "--quiet"]) == 0
    assert load("my out").counters["updates"] == 6


def test_a_comparison_keeps_the_runs_that_were_finished(capsys, monkeypatch):
    calls = []

    def cut(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        of_group(*arguments, **options)

    monkeypatch.setattr(sweeping, "execute_group", cut)
    assert cli.main(["compare", "fedasync", "asgd", *SMALL, "--out", "out"]) == 130
    assert capsys.readouterr().err == "fedjax-async: interrupted; finished runs are kept in out\n"
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


def fail_to_write(path, *content):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


def test_a_picture_that_cannot_be_written_costs_no_plan(capsys, tmp_path, idle):
    path = Path("sweep.toml") / "gantt.png"
    says = refused(capsys, "plan", *SMALL[:-1], "--gantt", str(path))
    assert f"error: gantt = {str(path)!r}: must be a file that can be written (" in says
    assert "file ending" in refused(capsys, "plan", *SMALL[:-1], "--gantt", "gantt.gif")
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.toml"]


def test_a_comparison_without_out_keeps_the_one_before(capsys, monkeypatch, made_at_once):
    """The same comparison, or more methods in it, go on in its folder; others get the next number."""

    monkeypatch.setattr(runs, "write_comparison", lambda found, out, **options: Path(out, "comparison.csv").touch())

    def compared(*command: str) -> tuple[str, str]:
        assert cli.main(["compare", *command, *SMALL]) == 0
        out = capsys.readouterr().out
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
    assert "must be empty or hold a run of the same settings" in refused(
        capsys, "compare", "asgd", *SMALL, "--lr", "0.9", "--out", "runs/compare"
    )


def test_the_usual_folder_of_explain_is_numbered_too(capsys, monkeypatch):
    def explain(folder, *, out, **options):
        if Path(out).exists():
            raise Occupied(f"out = {out!r}: must be another")
        Path(out).mkdir(parents=True)

    monkeypatch.setattr(saved, "explain", explain)
    monkeypatch.setattr(saved, "_print_explanation", lambda found: None)
    for folder in ("one/explain", "one/explain_2"):
        assert cli.main(["explain", "one"]) == 0
        assert f"written: {folder}\n" in capsys.readouterr().out
    assert "out = 'one/explain': must be another" in refused(capsys, "explain", "one", "--out", "one/explain")


def test_the_usual_folder_of_landscape_is_numbered_too(capsys, monkeypatch):
    """The first folder without a landscape is that in which the work would begin."""
    looked_at = []
    monkeypatch.setattr(landscapes, "require_folder", looked_at.append)
    Path("landscape").mkdir()
    Path("landscape/paths.csv").touch()
    assert "folder = 'one': must hold a saved run" in refused(capsys, "landscape", "one", "two")
    assert looked_at == [Path("landscape"), Path("landscape_2")]
    said = refused(capsys, "landscape", "one", "two", "--out", "landscape")
    assert "out = 'landscape': must be a folder without a landscape, but it has paths.csv; --overwrite" in said
