"""``simulate`` into a folder and ``resume``, with the user's own objects: continued bit for bit, never mixed."""

from __future__ import annotations

import json
import os
import shutil
import sys

import jax
import numpy as np
import pytest

from fedjax_async import Method, Settings, Stop, compare, named, resume, server, simulate, sweep
from fedjax_async.base import notices, registry
from fedjax_async.cli import main
from fedjax_async.config import plugins
from fedjax_async.data import federate
from fedjax_async.data.embedded import fashion_mnist_6k
from fedjax_async.engine import checkpoint
from fedjax_async.engine.checkpoint import Keeper, Snapshot
from fedjax_async.results import collect, explain, load, provenance
from tests.results import sweep_engine
from tests.results.folders import contents, killed_run
from tests.results.made_up import of_group
from tests.results.test_input_files import SMALL as TINY
from tests.results.test_input_files import as_by_an_older_version, delays
from tests.told import refusal, same

SMALL = {"model": "logistic", "clients": 4, "steps": 1, "updates": 12, "eval_updates": 4, "delay": "constant"}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
SILENT = {"plots": False, "progress": False}
EXECUTE = "fedjax_async.config.sweeping.execute_group"
pytestmark = pytest.mark.usefixtures("nothing_stays_registered")


def fair(rate):
    return Method(server.fedbuff(server_lr=rate), timing="buffer:size=2")


def test_a_finished_run_is_read_and_not_trained_again(tmp_path, capsys, monkeypatch):
    given = SMALL | {"out": tmp_path / "run", "plots": False}
    first = simulate(**given)
    assert main(["run", *FLAGS, "--out", str(tmp_path / "command"), "--quiet", "--no-plots"]) == 0
    assert contents(tmp_path / "command") == contents(tmp_path / "run")
    monkeypatch.setattr(EXECUTE, lambda *args, **options: 1 / 0)
    capsys.readouterr()
    second = simulate(**given)
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "finished already and was read" in said and "--again" in said
    same(second.params, first.params)
    with pytest.raises(ZeroDivisionError):
        simulate(**given, again=True)
    assert "must be empty or hold a run of the same settings" in refusal(simulate, **given | {"lr": 0.5})
    message = r"unfinished run .* the run in it is finished \(a longer budget .* initial=FOL"
    with pytest.raises(ValueError, match=message):
        resume(tmp_path / "run", plots=False)


def test_the_command_of_a_comparison_reads_what_is_finished(tmp_path, capsys, monkeypatch):
    command = ["compare", "fedasync", "asgd", *FLAGS, "--out", str(tmp_path), "--quiet", "--no-plots"]
    monkeypatch.setattr(EXECUTE, of_group)
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
            compare([fair(0.5)], Settings(**SMALL), out=tmp_path, **SILENT)
    assert not list(tmp_path.iterdir())


def test_comparisons_and_sweeps_keep_own_objects(tmp_path, monkeypatch):
    monkeypatch.setattr(EXECUTE, of_group)
    runs = compare([named("fair", fair(0.5))], Settings(**SMALL), seeds=2, out=tmp_path / "both", **SILENT)
    assert list(runs) == ["fair"] and load(tmp_path / "both" / "runs" / "fair" / "seed_1").settings["own"]
    sweep_engine.use(monkeypatch)

    def swept(rate):
        base = SMALL | {"method": named("fair", fair(rate))}
        return sweep(base, {"lr": [0.1, 0.2]}, out=tmp_path / "swept", progress=False)

    found, again = swept(0.5), swept(0.5)
    assert [run.settings for run in found.runs] == [run.settings for run in again.runs]
    collected, missing = collect(tmp_path / "swept")
    assert collected.points == found.points and not missing
    assert "must be empty or hold the same sweep, but it holds another sweep" in refusal(swept, 0.6)


# --- plugins ----------------------------------------------------------------------------------------

PLUGIN = """
from fedjax_async import register, server

@register("method", "summed", timing="every")
def summed(*, server_lr: float = 1.0):
    "Add every delta, scaled."
    return server.fedbuff(server_lr={factor} * server_lr)
"""

SWEEP = """
base = {method = "summed", model = "logistic", clients = 4, updates = 4, steps = 1}
grid = {method.server_lr = [0.5, 1.0]}
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


# --- with what a run was computed: another value is refused, or said where only rounding differs --------

OTHER = {
    **{"jax_enable_x64": True, "jax_default_prng_impl": "rbg"},
    **{"jax_threefry_partitionable": False, "jax_random_seed_offset": 1},
}
ROUNDED = {"jax_default_matmul_precision": "highest", "XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}


def test_packages_and_the_settings_of_jax_that_change_numbers_are_recorded(monkeypatch):
    assert set(OTHER) == set(checkpoint.numerics()) and set(ROUNDED) == set(checkpoint.rounding())
    usual, recorded = checkpoint.numerics() | checkpoint.rounding(), provenance.versions()
    assert usual.items() <= recorded.items() and recorded["numpy"] == np.__version__
    assert {"python", "jax", "jaxlib", "flax", "optax", "fedjax-async", "revision", "backend"} <= set(recorded)
    assert os.uname().nodename not in json.dumps(recorded)
    monkeypatch.setenv("XLA_FLAGS", f"{ROUNDED['XLA_FLAGS']} --xla_dump_to=somewhere")
    draws = jax.default_prng_impl("rbg"), jax.threefry_partitionable(False)
    with jax.enable_x64(True), draws[0], draws[1], jax.default_matmul_precision("highest"):
        found = checkpoint.numerics() | checkpoint.rounding()
    assert found == OTHER | ROUNDED | {"jax_random_seed_offset": 0}


@pytest.mark.parametrize("name", [*OTHER, *ROUNDED])
def test_a_checkpoint_under_another_setting_of_jax_is_refused_or_said_by_name(tmp_path, monkeypatch, name):
    Keeper(tmp_path, 1, {}).save(1, Snapshot(1, [], {}))
    which, value = ("numerics", OTHER[name]) if name in OTHER else ("rounding", ROUNDED[name])
    usual = getattr(checkpoint, which)()
    monkeypatch.setattr(checkpoint, which, lambda: usual | {name: value})
    text = f"{name} = {value!r}, saved {usual[name]!r}"
    raised = pytest.raises(ValueError) if name in OTHER else pytest.warns(notices.RunWarning)
    with raised as said:
        Keeper(tmp_path, 1, {}).restore()
    if name in OTHER:
        assert f"its JAX settings differ: {text};" in str(said.value)
    else:
        assert len(said) == 1 and f"other rounding: {text} (the same numbers to rounding" in str(said[0].message)


def test_a_finished_run_of_other_numbers_is_not_read(tmp_path, monkeypatch, capsys, made_at_once):
    given = TINY | {"out": tmp_path / "run", "plots": False}
    simulate(**given)
    shutil.copytree(tmp_path / "run", tmp_path / "two" / "runs" / "fedasync" / "seed_0")
    with monkeypatch.context() as other:
        usual = provenance.numerics()
        other.setattr(provenance, "numerics", lambda: usual | {"jax_threefry_partitionable": False})
        refused = r"jax_threefry_partitionable = False, saved True.*--again"
        with pytest.raises(ValueError, match=refused):
            simulate(**given)
        with pytest.raises(ValueError, match=refused):  # beside one with other numbers
            compare(["fedasync", "asgd"], **given | {"out": tmp_path / "two"}, progress=False)
        capsys.readouterr()
        simulate(**given, again=True)
        assert "was read" not in capsys.readouterr().out
        simulate(**given)  # it was recorded with these
    simulate(**given, again=True)
    rounded = checkpoint.rounding() | {"jax_default_matmul_precision": "highest"}
    monkeypatch.setattr(provenance, "rounding", lambda: rounded)
    simulate(**given)
    told = capsys.readouterr().out
    assert "computed with jax_default_matmul_precision = 'highest', saved None (the same numbers to rounding" in told


def test_a_plugin_that_changed_besides_its_code_is_said(tmp_path, monkeypatch):
    for content in ("one", "two"):
        monkeypatch.setattr(plugins, "LOADED", {str(tmp_path / "mine.py"): content})
        keeper = Keeper(tmp_path / "kept", 1, {"plugins": plugins.digests()})
        if content == "one":
            keeper.save(1, Snapshot(1, [], {}))
            before = provenance.versions()
    with pytest.warns(notices.RunWarning, match=r"other plugins: mine\.py = .*have the same code"):
        keeper.restore()
    assert before["plugin mine.py"] != provenance.versions()["plugin mine.py"]


def test_a_repeated_run_with_other_arrivals_is_far_from_the_saved_one(tmp_path, capsys):
    given = {name: value for name, value in TINY.items() if name != "updates"} | {"time": 3.5}
    simulate(**given, **delays(tmp_path, 3), out=tmp_path / "run", plots=False)
    as_by_an_older_version(tmp_path / "run")
    delays(tmp_path, 1)
    assert main(["explain", str(tmp_path / "run"), "--quiet", "--examples", "20"]) == 0
    told = next(line for line in capsys.readouterr().out.splitlines() if "away from the saved" in line)
    assert "delays.csv changed since is not known" in told and "machine" not in told


def test_an_explanation_of_a_stopped_run_is_read_again(tmp_path):
    stops = [lambda evaluation: Stop("enough") if evaluation.number == 2 else None]
    simulate(**TINY | {"eval_updates": 1}, callbacks=stops, out=tmp_path / "run", plots=False)
    first, second = (explain(tmp_path / "run", examples=20, out=tmp_path / "why", say=str) for _ in range(2))
    assert np.isnan(first.drift) and np.isnan(second.drift) and second[1:4] == first[1:4]
