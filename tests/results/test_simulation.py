"""``simulate`` into a folder and ``resume``, with the user's own objects: continued bit for bit, never mixed."""

from __future__ import annotations

import json
import sys

import jax
import numpy as np
import pytest

from fedjax_async import Method, Settings, compare, named, resume, server, simulate, sweep
from fedjax_async.base import registry
from fedjax_async.cli import main
from fedjax_async.data import federate
from fedjax_async.data.embedded import fashion_mnist_6k
from fedjax_async.results import collect, load
from tests.results.folders import contents, killed_run
from tests.results.made_up import of_group

SMALL = {"model": "logistic", "clients": 4, "steps": 1, "updates": 12, "eval_updates": 4, "delay": "constant"}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
EXECUTE = "fedjax_async.config.sweeping.execute_group"
pytestmark = pytest.mark.usefixtures("nothing_stays_registered")


@pytest.fixture
def untrained(monkeypatch):
    """Make training an error."""
    monkeypatch.setattr(EXECUTE, lambda *args, **options: 1 / 0)


def fair(rate):
    return Method(server.fedbuff(server_lr=rate), timing="buffer:size=2")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    return folder, simulate(**SMALL, out=folder, plots=False)


def test_the_folder_is_that_of_the_command(finished, tmp_path):
    assert main(["run", *FLAGS, "--out", str(tmp_path), "--quiet", "--no-plots"]) == 0
    assert contents(tmp_path) == contents(finished[0])


def test_a_finished_run_is_read_and_not_trained_again(finished, untrained, capsys):
    folder, first = finished
    second = simulate(**SMALL, out=folder, plots=False)
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "finished already and was read" in said and "--again" in said
    jax.tree.map(np.testing.assert_array_equal, second.params, first.params)
    with pytest.raises(ZeroDivisionError):
        simulate(**SMALL, out=folder, plots=False, again=True)
    with pytest.raises(ValueError, match="must be empty or hold a run of the same settings"):
        simulate(**SMALL | {"lr": 0.5}, out=folder, plots=False)


def test_compare_and_the_commands_read_what_is_finished(tmp_path, capsys, monkeypatch):
    command = ["compare", "fedasync", "asgd", *FLAGS, "--out", str(tmp_path), "--quiet", "--no-plots"]
    with monkeypatch.context() as patch:
        patch.setattr(EXECUTE, of_group)
        assert main(command) == 0
    monkeypatch.setattr(EXECUTE, lambda *args, **options: 1 / 0)
    capsys.readouterr()
    assert main(command) == 0
    assert capsys.readouterr().out.count("finished already") == 2
    with pytest.raises(ZeroDivisionError):
        main([*command, "--again"])


def test_own_objects_are_continued_bit_for_bit_and_need_no_name_again(tmp_path):
    data = federate(fashion_mnist_6k()._replace(name="mine"), "iid", 4)
    given = SMALL | {"checkpoint": 4, "method": named("fair", fair(0.5)), "data": data}
    whole = simulate(**given, out=tmp_path / "whole", plots=False)
    killed_run(tmp_path / "cut", 8, **given)
    run = resume(tmp_path / "cut", method=fair(0.5), data=data, plots=False)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert run.settings == whole.settings and run.settings["dataset"] == "mine"


@pytest.mark.parametrize("way", ["simulate", "sweep", "compare"])
def test_a_folder_needs_a_name(tmp_path, way):
    message = r"method = '\(object: [0-9a-f]{12}\)': must have a name for .*; write method=fedjax_async.named"
    with pytest.raises(ValueError, match=message):
        if way == "simulate":
            simulate(**SMALL, method=fair(0.5), out=tmp_path, plots=False)
        elif way == "sweep":
            sweep(SMALL | {"method": fair(0.5)}, seeds=2, out=tmp_path, progress=False)
        else:
            compare([fair(0.5)], Settings(**SMALL), out=tmp_path, plots=False, progress=False)
    assert not list(tmp_path.iterdir())


def test_compare_keeps_own_objects(tmp_path, monkeypatch):
    monkeypatch.setattr(EXECUTE, of_group)
    runs = compare([named("fair", fair(0.5))], Settings(**SMALL), seeds=2, out=tmp_path, plots=False, progress=False)
    assert list(runs) == ["fair"] and load(tmp_path / "runs" / "fair" / "seed_1").settings["own"]


def test_a_sweep_keeps_own_objects(tmp_path, engine):

    def swept(rate):
        base = SMALL | {"method": named("fair", fair(rate))}
        return sweep(base, {"lr": [0.1, 0.2]}, out=tmp_path, progress=False)

    found, again = swept(0.5), swept(0.5)
    assert [run.settings for run in found.runs] == [run.settings for run in again.runs]
    collected, missing = collect(tmp_path)
    assert collected.points == found.points and not missing
    with pytest.raises(ValueError, match="must be empty or hold the same sweep, but it holds another sweep"):
        swept(0.6)


# --- plugins ----------------------------------------------------------------------------------------

PLUGIN = """
from fedjax_async import register, server

@register("method", "summed", timing="every")
def summed(*, server_lr: float = 1.0):
    "Add every delta, scaled."
    return server.fedbuff(server_lr={factor} * server_lr)
"""

SWEEP = """
[base]
method = "summed"
model = "logistic"
clients = 4
updates = 4
steps = 1

[grid]
method.server_lr = [0.5, 1.0]
"""


@pytest.mark.slow
def test_a_plugin_serves_every_command(tmp_path, capsys, monkeypatch):
    path = tmp_path / "own_rule.py"
    path.write_text(PLUGIN.format(factor=1.0))
    plugin = ["--plugin", str(path)]
    assert main(["list", "methods", "--options", *plugin]) == 0
    shown = capsys.readouterr().out
    assert "summed               Add every delta, scaled." in shown and "server_lr=1.0" in shown
    comparison = ["compare", "summed:server_lr=0.5", "fedasync", *FLAGS, *plugin, "--out", str(tmp_path / "c")]
    assert main([*comparison, "--quiet"]) == 0
    (tmp_path / "own.toml").write_text(SWEEP)
    assert main(["sweep", str(tmp_path / "own.toml"), *plugin, "--out", str(tmp_path / "s"), "--quiet"]) == 0
    assert json.loads((tmp_path / "s" / "plugins.json").read_text()) == [str(path)]
    killed_run(tmp_path / "r", 8, **SMALL, checkpoint=4, method="summed", privacy="dp:noise=3")

    def forget():
        registry.ADDED.clear()
        monkeypatch.setattr("fedjax_async.config.plugins.LOADED", {})
        for name in [name for name in sys.modules if name.startswith("own_rule")]:
            monkeypatch.delitem(sys.modules, name)

    forget()
    assert main(["resume", str(tmp_path / "r"), "--quiet"]) == 0  # the plugin is remembered
    forget()
    capsys.readouterr()
    assert main(["privacy", str(tmp_path / "r")]) == 2  # a finished run does not name its plugins
    assert "method = 'summed': is a part of your own" in (said := capsys.readouterr().err) and "--plugin FILE" in said
    assert main(["privacy", str(tmp_path / "r"), *plugin]) == 0
    fingerprint = registry.ADDED["method"]["summed"].fingerprint
    assert load(tmp_path / "r").settings["own"] == {"method": {"summed": fingerprint}}


def test_a_finished_run_is_not_resumed_and_the_message_says_how_to_go_on(tmp_path):
    simulate(**SMALL, checkpoint=4, out=tmp_path, plots=False)
    with pytest.raises(
        ValueError, match=r"unfinished run .* the run in it is finished \(a longer budget .* initial=FOL"
    ):
        resume(tmp_path, plots=False)


def test_resume_refuses_a_plugin_that_has_changed(tmp_path, capsys):
    path = tmp_path / "own_rule.py"
    path.write_text(PLUGIN.format(factor=1.0))
    assert main(["plan", *FLAGS, "--method", "summed", "--plugin", str(path)]) == 0
    killed_run(tmp_path / "r", 0, **SMALL, checkpoint=4, method="summed")
    registry.ADDED.clear()
    path.write_text(PLUGIN.format(factor=2.0))
    capsys.readouterr()
    assert main(["resume", str(tmp_path / "r"), "--quiet"]) == 2
    assert "method = 'summed': must be the code that the run began with, but it has changed" in capsys.readouterr().err
    path.unlink()
    registry.ADDED.clear()
    assert main(["resume", str(tmp_path / "r"), "--quiet"]) == 2
    assert "there is no such file any more; if it has moved: --plugin FILE.py" in capsys.readouterr().err
