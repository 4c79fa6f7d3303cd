"""Folders keep the commands that made them, in a file that changes no result."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from fedjax_async import cli, compare, simulate
from fedjax_async.config import sweeping
from fedjax_async.results.html_folders import read
from fedjax_async.results.store import COMMAND
from tests.cli.called import refused
from tests.results import sweep_engine
from tests.results.folders import contents
from tests.results.made_up import of_group

trained = sweeping.execute_group
SMALL = ("--model", "logistic", "--clients", "4", "--updates", "6", "--steps", "2", "--quiet", "--no-plots")
FEW = {"model": "logistic", "clients": 4, "updates": 6, "steps": 2}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweeping, "execute_group", of_group)


def called(capsys, *words: str) -> list[str]:
    """The lines of the file after a command that must succeed; every word is kept, quoted."""
    assert cli.main(words) == 0
    capsys.readouterr()
    folder = words[1] if words[0] in ("resume", "redraw") else words[words.index("--out") + 1]
    lines = Path(folder, COMMAND).read_text().splitlines()
    assert shlex.split(lines[-1]) == ["fedjax-async", *words]
    return lines


def test_a_run_keeps_its_command_and_further_ones_below(capsys):
    first = called(capsys, "run", *SMALL, "--out", "my run", "--method", "fedasync:mixing=0.4")
    assert first == [f"fedjax-async run {' '.join(SMALL)} --out 'my run' --method fedasync:mixing=0.4"]
    assert called(capsys, "run", *SMALL, "--out", "my run", "--method", "fedasync:mixing=0.4") == first
    second = called(capsys, "redraw", "my run", "--no-plots")
    assert second == [*first, "fedjax-async redraw 'my run' --no-plots"]
    refused(capsys, "run", *SMALL, "--out", "my run")
    assert Path("my run", COMMAND).read_text().splitlines() == second
    assert len(called(capsys, "run", *SMALL, "--out", "my run", "--overwrite")) == 1
    assert len(called(capsys, "run", *SMALL, "--out", "my run", "--again")) == 1
    assert any(note.startswith("Command: fedjax-async run --model") for note in read("my run").notes)


def test_a_comparison_keeps_its_command_and_its_runs_none(capsys):
    lines = called(capsys, "compare", "Our method=fedasync", "asgd", *SMALL, "--out", "two")
    assert len(lines) == 1 and "compare 'Our method=fedasync' asgd" in lines[0]
    assert [str(path) for path in Path().rglob(COMMAND)] == [f"two/{COMMAND}"]
    assert len(called(capsys, "compare", "fedavg", *SMALL, "--out", "two")) == 2
    assert read("two").notes[-1] == f"Command: fedjax-async compare fedavg {' '.join(SMALL)} --out two"
    refused(capsys, "compare", "asgd", *SMALL, "--lr", "0.7", "--out", "two")
    assert len(Path("two", COMMAND).read_text().splitlines()) == 2, "a refused command adds no line"


def test_a_sweep_keeps_its_command(capsys, monkeypatch):
    sweep_engine.use(monkeypatch)
    Path("s.toml").write_text('[base]\nmodel = "logistic"\nupdates = 6\n[grid]\nlr = [0.02, 0.1]\n')
    assert len(called(capsys, "sweep", "s.toml", "--out", "out", "--quiet", "--no-plots")) == 1
    assert len(called(capsys, "sweep", "s.toml", "--out", "out", "--no-plots", "--quiet")) == 2
    Path("s.toml").write_text('[base]\nmodel = "logistic"\nupdates = 6\n[grid]\nlr = [0.03, 0.1]\n')
    assert len(called(capsys, "sweep", "s.toml", "--overwrite", "--out", "out", "--no-plots", "--quiet")) == 1


def test_an_interrupted_run_and_its_continuation_are_both_kept(capsys, monkeypatch):
    def cut(*arguments, **options):
        raise KeyboardInterrupt

    train = sweeping.execute
    monkeypatch.setattr(sweeping, "execute", cut)
    with monkeypatch.context() as patch:
        patch.setattr(sweeping, "execute_group", cut)
        assert cli.main(["run", *SMALL, "--out", "none"]) == 130 and not Path("none").exists()
        patch.setattr(sweeping, "execute_group", trained)
        assert cli.main(["run", *SMALL, "--checkpoint", "2", "--out", "one"]) == 130
        patch.setattr(sweeping, "execute", train)
        lines = called(capsys, "resume", "one", "--quiet", "--no-plots")
    assert [shlex.split(line)[1] for line in lines] == ["run", "resume"]


def test_calls_from_python_write_no_command_and_the_folders_are_the_same(capsys):
    called(capsys, "run", *SMALL, "--out", "one")
    simulate(**FEW, out="two", plots=False, progress=False)
    assert contents(Path("one")) == contents(Path("two")) and not Path("two", COMMAND).exists()
    compare(["asgd"], **FEW, out="three", plots=False, progress=False)
    assert not list(Path("three").rglob(COMMAND))


def test_a_folder_with_only_the_command_of_a_killed_process_is_free(capsys):
    for folder, words in (("one", ("run",)), ("two", ("compare", "asgd"))):
        Path(folder).mkdir()
        Path(folder, COMMAND).write_text("fedjax-async run --killed\n")
        assert len(called(capsys, *words, *SMALL, "--out", folder)) == 2
