"""``--config``: settings from a TOML file or from a saved run, under the flags that are given."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedjax_async import cli
from fedjax_async.cli.flags import RUN_BASE, parser, settings_of
from fedjax_async.config import sweeping
from fedjax_async.config.settings import Settings
from fedjax_async.results import load
from tests.cli.called import ok, refused
from tests.results.made_up import of_group
from tests.results.test_claim import never


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweeping, "execute_group", of_group)


def written(text: str, name: str = "f.toml") -> str:
    Path(name).write_text(text)
    return name


def settings(*words: str) -> Settings:
    return settings_of(parser().parse_args(words), RUN_BASE)


def test_settings_of_a_file_under_the_given_flags():
    file = written(
        "clients = 4\nbatch-size = 16\nlr = 1\ntime = 50\nmethod.mixing = 0.4\n[delay]\nreplacement = true\n"
    )
    found = settings("run", "--config", file, "--clients", "7")
    assert found == Settings(
        clients=7,
        batch_size=16,
        lr=1.0,
        time=50.0,
        method="fedasync:mixing=0.4",
        delay=f"{Settings.delay}:replacement=true",
    )
    assert settings("run", "--config", file, "--updates", "9", "--method", "asgd").time is None
    assert settings("plan", "--config", file).time == 50.0
    assert settings("run", "--config", written("seed = 3")) == Settings(updates=200, seed=3)
    assert settings("run", "--config", written("eval_updates = 5\nepochs = 2"), "--steps", "3").epochs is None


def test_a_saved_run_is_repeated_by_its_settings(capsys):
    small = ("--model", "logistic", "--clients", "4", "--steps", "2", "--quiet", "--no-plots")
    ok(capsys, "run", *small, "--time", "900", "--method", "fedbuff@buffer:size=2", "--out", "one")
    ok(capsys, "run", "--config", "one/settings.json", "--quiet", "--no-plots", "--out", "two")
    assert Path("one/settings.json").read_bytes() == Path("two/settings.json").read_bytes()
    ok(capsys, "run", "--config", "one/settings.json", "--seed", "1", "--method", "fedasync", "--out", "three")
    found, first = load("three").settings, load("one").settings
    assert {name for name in first | found if found.get(name) != first.get(name)} <= {"seed", "method", "defaults"}


def test_the_methods_of_a_comparison(capsys):
    common = 'model = "logistic"\nclients = 4\nupdates = 6\nsteps = 1\n'
    table = written(common + '[methods]\nAvg = "fedavg"\n"Our method" = "fedasync:mixing=0.4"\n')
    flags = ("--quiet", "--no-plots", "--out")
    assert "relative to Avg" in ok(capsys, "compare", "--config", table, *flags, "one")
    assert load("one/runs/Our_method/seed_0").settings["method"] == "fedasync:mixing=0.4"
    listed = written('methods = ["asgd", "A=fedavg"]\n' + common)
    assert "relative to A" in ok(capsys, "compare", "--config", listed, *flags, "two")
    ok(capsys, "compare", "fedasync", "--config", listed, *flags, "three")
    assert [path.name for path in Path("three/runs").iterdir()] == ["fedasync"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lrr = 0.1", "setting = 'lrr': unknown; did you mean 'lr'?"),
        ("rounds = 5", "did you mean 'server_steps'?"),
        ("lr = 'fast'", "lr = 'fast': must be a number"),
        ("clients = 2.5", "clients = 2.5: must be a whole number"),
        ("clients = 0", "clients = 0: must be"),
        ("method.mixng = 0.4", "fedasync has no option 'mixng'; did you mean 'method.mixing'?"),
        ("seeds = 3", "seeds: is not a setting of a run but a flag of the command, --seeds"),
        ("out = 'x'", "out: is not a setting of a run but a flag of the command, --out"),
        ("methods = ['a']", "methods: must be left out in f.toml, because only compare has several methods"),
        ("[base]\nlr = 1", "base: is a table of a sweep; train f.toml with: fedjax-async sweep f.toml"),
        ("lr = [0.1, 0.2]", "lr = [0.1, 0.2]: must be a number"),
        ("lr 3", "config = 'f.toml': must be a TOML file of settings, or the settings.json of a saved run; "),
        ("dataset = 'mnistt'", "mnistt"),
    ],
)
def test_wrong_files_are_refused_in_a_line(capsys, monkeypatch, text, says):
    monkeypatch.setattr(sweeping, "execute_group", never)
    assert says in refused(capsys, "run", "--config", written(text), "--quiet")


def test_wrong_calls_with_a_file(capsys):
    told = refused(capsys, "run", "--config", "none.toml")
    assert "config = 'none.toml': must be a TOML file" in told and "there is no such file" in told
    Path("folder").mkdir()
    assert (
        "config = 'folder': must be a TOML file of settings, or the settings.json of a saved run; it is a folder"
        in refused(capsys, "run", "--config", "folder")
    )
    file = written('{"lrr": 1}', "settings.json")
    assert "lrr" in refused(capsys, "run", "--config", file)
    assert "config = 'settings.json': must be" in refused(capsys, "run", "--config", written("[1]", "settings.json"))
    compared = ("compare", "--config")
    assert "methods = []: must be at least one METHOD" in refused(capsys, *compared, written("lr = 1"))
    assert "methods = []: must be at least one METHOD" in refused(capsys, "compare")
    for text, says in (
        ("methods = 'asgd'", "methods = 'asgd': must be a list of methods"),
        ("methods = [3]", "methods = [3]: must be a list of methods"),
        ("methods = ['asgd', 'asgd']", "methods = ['asgd', 'asgd']: must be different from each other"),
        ("[methods]\n'a/b' = 'asgd'", "label = 'a/b': must be 1 to 60"),
        ("method = 'asgd'\nmethods = ['asgd']", "method = 'asgd': must be left out in a file for compare"),
        ("method.mixing = 0.1\nmethods = ['asgd']", "method = {'mixing': 0.1}: must be left out in a file for compare"),
    ):
        assert says in refused(capsys, *compared, written(text), "--quiet")


def test_the_help_shows_a_file(capsys):
    for command, shown in (("run", "method.mixing = 0.4"), ("compare", '"Our method" = '), ("plan", "settings.json")):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        text = capsys.readouterr().out
        assert shown in text
        if command == "compare":  # which refuses them
            assert "settings.json" not in text and "method.mixing" not in text.split("a FILE for --config")[1]


def test_a_setting_under_both_of_its_names_is_refused():
    with pytest.raises(ValueError, match="batch-size = 16: must be given once"):
        settings("run", "--config", written("batch-size = 16\nbatch_size = 64"))
