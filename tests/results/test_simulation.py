"""``simulate`` into a folder and ``resume``, with the user's own objects: continued bit for bit, never mixed."""

from __future__ import annotations

import json
import sys

import jax
import numpy as np
import pytest

from fedjax_async import Method, Settings, compare, named, register, registry, resume, server, simulate, sweep
from fedjax_async.cli import main
from fedjax_async.clock import DELAYS
from fedjax_async.data import federate
from fedjax_async.data.embedded import fashion_mnist_6k
from fedjax_async.results import collect, load

SMALL = {"model": "logistic", "clients": 4, "steps": 1, "updates": 12, "eval_updates": 4, "delay": "constant"}


@pytest.fixture(autouse=True)
def nothing_stays_registered(monkeypatch):
    monkeypatch.setattr(registry, "ADDED", {})
    monkeypatch.setattr("fedjax_async.config.plugins.LOADED", {})
    registry.forget()
    yield
    registry.forget()


def fair(rate):
    return Method(server.fedbuff(server_lr=rate), timing="buffer:size=2")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


class Killed(Exception):
    pass


def killer(done, total, **status):
    if done >= 8:
        raise Killed


def begin(folder, **changes):
    with pytest.raises(Killed):
        simulate(**SMALL | {"checkpoint": 4} | changes, out=folder, plots=False, progress=killer)


def test_the_folder_is_that_of_the_command(tmp_path, capsys):
    simulate(**SMALL, out=tmp_path / "python")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    assert main(["run", *flags, "--out", str(tmp_path / "command"), "--quiet"]) == 0
    assert contents(tmp_path / "python") == contents(tmp_path / "command")
    assert {"accuracy.png", "settings.json", "params.npz", "manifest.json"} <= set(contents(tmp_path / "python"))


def test_a_finished_run_is_read_and_not_trained_again(tmp_path, capsys, monkeypatch):
    first = simulate(**SMALL, out=tmp_path, plots=False)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("fedjax_async.results.runs.execute", lambda *args, **options: 1 / 0)
    second = simulate(**SMALL, out=tmp_path, plots=False)
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "finished already and was read" in said and "--again" in said
    for x, y in zip(jax.tree.leaves(first.params), jax.tree.leaves(second.params), strict=True):
        np.testing.assert_array_equal(x, y)
    with pytest.raises(ZeroDivisionError):
        simulate(**SMALL, out=tmp_path, plots=False, again=True)
    with pytest.raises(ValueError, match="must be empty or hold a run of the same settings"):
        simulate(**SMALL | {"lr": 0.5}, out=tmp_path, plots=False)


def test_compare_and_the_commands_read_what_is_finished(tmp_path, capsys, monkeypatch):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    command = ["compare", "fedasync", "asgd", *flags, "--out", str(tmp_path / "c"), "--quiet"]
    assert main(command) == 0
    monkeypatch.setattr("fedjax_async.results.runs.execute", lambda *args, **options: 1 / 0)
    capsys.readouterr()
    assert main(command) == 0
    assert capsys.readouterr().out.count("finished already") == 2
    with pytest.raises(ZeroDivisionError):
        main([*command, "--again"])


def test_two_own_methods_never_share_a_folder_or_a_checkpoint(tmp_path):
    simulate(**SMALL, method=named("fair", fair(0.5)), out=tmp_path / "one", plots=False)
    assert json.loads((tmp_path / "one" / "settings.json").read_text())["method"] == "fair"
    with pytest.raises(ValueError, match="must be empty or hold a run of the same settings"):
        simulate(**SMALL, method=named("fair", fair(0.6)), out=tmp_path / "one", plots=False)
    begin(tmp_path / "two", method=named("fair", fair(0.5)))
    with pytest.raises(ValueError, match="must be empty or hold a run of the same settings"):
        simulate(**SMALL, checkpoint=4, method=named("fair", fair(0.6)), out=tmp_path / "two", plots=False)


@pytest.mark.slow_cases("resume with a bare object", "simulate")
@pytest.mark.parametrize("again", ["simulate", "resume", "resume with a bare object"])
def test_an_own_method_is_continued_bit_for_bit(tmp_path, again):
    whole = simulate(**SMALL, checkpoint=4, method=named("fair", fair(0.5)), out=tmp_path / "whole", plots=False)
    begin(tmp_path / "cut", method=named("fair", fair(0.5)))
    if again == "simulate":
        run = simulate(**SMALL, checkpoint=4, method=named("fair", fair(0.5)), out=tmp_path / "cut", plots=False)
    else:
        thing = fair(0.5) if "bare" in again else named("fair", fair(0.5))
        run = resume(tmp_path / "cut", method=thing, plots=False)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert run.settings == whole.settings and not (tmp_path / "cut" / "checkpoints").exists()


def test_resume_refuses_other_objects_by_name(tmp_path):
    begin(tmp_path, method=named("fair", fair(0.5)))
    with pytest.raises(
        ValueError, match="method = 'fair': must be the code that the run began with, but it has changed"
    ):
        resume(tmp_path, method=fair(0.6), plots=False)
    with pytest.raises(ValueError, match="method = 'fair': is a part of your own; give it again"):
        resume(tmp_path, plots=False)
    with pytest.raises(ValueError, match="method = 'other': must be named 'fair'"):
        resume(tmp_path, method=named("other", fair(0.5)), plots=False)
    with pytest.raises(ValueError, match=r"delay = .*: must be left out: the run has no object of your own there"):
        resume(tmp_path, method=fair(0.5), delay=DELAYS["constant"](), plots=False)
    assert resume(tmp_path, method=fair(0.5), plots=False).counters["updates"] == 12


def test_own_data_and_delays_are_continued_too(tmp_path):
    data = federate(fashion_mnist_6k()._replace(name="mine"), "iid", 4)
    begin(tmp_path, data=data, delay=named("slow", DELAYS["lognormal"](mean=9)))
    run = resume(tmp_path, data=data, delay=DELAYS["lognormal"](mean=9), plots=False)
    assert run.settings["dataset"] == "mine" and run.settings["delay"] == "slow"


@pytest.mark.parametrize("way", ["simulate", "sweep", "compare"])
def test_a_folder_needs_a_name(tmp_path, way):
    message = r"method = '\(object: [0-9a-f]{12}\)': must have a name for .*; write method=fedjax_async.named"
    with pytest.raises(ValueError, match=message):
        if way == "simulate":
            simulate(**SMALL, method=fair(0.5), out=tmp_path, plots=False)
        elif way == "sweep":
            sweep(SMALL | {"method": fair(0.5)}, seeds=2, out=tmp_path, progress=False)
        else:
            compare([fair(0.5)], Settings(**SMALL), out=tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


def test_compare_and_sweep_keep_own_objects(tmp_path):
    own = named("fair", fair(0.5))
    runs = compare(["fedasync", own], Settings(**SMALL), seeds=2, out=tmp_path / "c", progress=False)
    assert list(runs) == ["fedasync", "fair"] and load(tmp_path / "c" / "runs" / "fair" / "seed_1").settings["own"]
    found = sweep(SMALL | {"method": own}, {"lr": [0.1, 0.2]}, out=tmp_path / "s", progress=False)
    again = sweep(SMALL | {"method": named("fair", fair(0.5))}, {"lr": [0.1, 0.2]}, out=tmp_path / "s", progress=False)
    assert [run.settings for run in found.runs] == [run.settings for run in again.runs]
    collected, missing = collect(tmp_path / "s")
    assert collected.points == found.points and not missing
    with pytest.raises(ValueError, match="must be empty or hold the same sweep, but it holds another sweep"):
        sweep(SMALL | {"method": named("fair", fair(0.6))}, {"lr": [0.1, 0.2]}, out=tmp_path / "s", progress=False)


@pytest.mark.parametrize("name", ["overwrite", "again"])
def test_what_needs_a_folder(name):
    with pytest.raises(ValueError, match=rf"{name} = True: must be left out without a folder \(out\)"):
        simulate(**SMALL, **{name: True})


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
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    assert (
        main(["compare", "summed:server_lr=0.5", "fedasync", *flags, *plugin, "--out", str(tmp_path / "c"), "--quiet"])
        == 0
    )
    (tmp_path / "own.toml").write_text(SWEEP)
    assert main(["sweep", str(tmp_path / "own.toml"), *plugin, "--out", str(tmp_path / "s"), "--quiet"]) == 0
    assert json.loads((tmp_path / "s" / "plugins.json").read_text()) == [str(path)]
    begin(tmp_path / "r", method="summed", privacy="dp:noise=3")

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
    assert load(tmp_path / "r").settings["own"] == {
        "method": {"summed": registry.ADDED["method"]["summed"].fingerprint}
    }


def test_resume_refuses_a_plugin_that_has_changed(tmp_path, capsys):
    path = tmp_path / "own_rule.py"
    path.write_text(PLUGIN.format(factor=1.0))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    assert main(["plan", *flags, "--method", "summed", "--plugin", str(path)]) == 0
    begin(tmp_path / "r", method="summed")
    registry.ADDED.clear()
    path.write_text(PLUGIN.format(factor=2.0))
    capsys.readouterr()
    assert main(["resume", str(tmp_path / "r"), "--quiet"]) == 2
    assert "method = 'summed': must be the code that the run began with, but it has changed" in capsys.readouterr().err
    path.unlink()
    registry.ADDED.clear()
    assert main(["resume", str(tmp_path / "r"), "--quiet"]) == 2
    assert "there is no such file any more; if it has moved: --plugin FILE.py" in capsys.readouterr().err


def test_registered_names_need_no_object(tmp_path):
    @register("method", "summed")
    def summed(*, server_lr: float = 1.0):
        return server.fedbuff(server_lr=server_lr)

    begin(tmp_path, method="summed:server_lr=0.5")
    assert resume(tmp_path, plots=False).settings["method"] == "summed:server_lr=0.5"
