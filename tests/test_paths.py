"""Paths: ``~`` is expanded, and an unknown user is one line, wherever a path is taken."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import numpy as np
import pytest

from fedjax_async import bridges, clock, compare, data, keep_compiled, peers, results, resume, simulate, sweep
from fedjax_async.base import check
from fedjax_async.base.factories import options_of
from fedjax_async.base.registry import spec as spec_of
from fedjax_async.cli import main
from fedjax_async.clock.energy import ENERGY
from fedjax_async.clock.fedscale import write_tables
from fedjax_async.config import Settings, prepare
from fedjax_async.config.plugins import load_plugin
from fedjax_async.config.registries import REGISTRIES
from fedjax_async.data.formats.clients import existing
from fedjax_async.models import minilm_lora, read_arrays, read_safetensors, write_arrays
from fedjax_async.results.cluster import train_job

NOBODY = "~nosuchuser/x"
UNKNOWN = r"= '~nosuchuser/x[.\w]*': must be a path without ~nosuchuser \(no such user, or no home directory\)"
NAMES = {"path", "test", "data_dir"}  # options that are paths
OTHERS = {"tfds.test", "hugging_face.test", "flower.test"}  # two are splits; Flower's is read after its partitions
SPECS = [
    (kind, name, option)
    for kind, registry in {**REGISTRIES, "energy": ENERGY}.items()
    for name, factory in registry.items()
    if callable(factory)
    for option in options_of(factory)
    if option in NAMES and f"{name}.{option}" not in OTHERS
]
SMALL = {"dataset": "quadratic", "model": "linear", "clients": 3, "steps": 1, "updates": 4}


@pytest.fixture(scope="module")
def run():
    return simulate(**SMALL)


def planned(method):
    return prepare(Settings(method=method, **SMALL)).schedule


def test_a_path_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check.path("out", "~/runs") == tmp_path / "runs"
    assert check.path("out", Path("~")) == tmp_path
    assert check.path("out", "runs/~/a~b") == Path("runs/~/a~b")
    with pytest.raises(ValueError, match="^out " + UNKNOWN + "$"):
        check.path("out", NOBODY)


@pytest.mark.parametrize("spec", SPECS, ids=".".join)
def test_an_option_that_is_a_path_names_an_unknown_user(spec, tmp_path):
    kind, name, option = spec
    registry = {**REGISTRIES, "energy": ENERGY}[kind]
    (tmp_path / "a.parquet").touch()
    others = f"path={tmp_path}," if option == "test" else "name=kmnist," if name == "tfds" else ""
    with pytest.raises(ValueError, match=UNKNOWN):
        spec_of(kind, registry, f"{name}:{others}{option}={NOBODY}").make()


ARRAYS = {"w": np.zeros(2)}
# public function and its argument -> a call with NOBODY as the argument
CALLS = {
    "keep_compiled.folder": lambda run: keep_compiled(NOBODY),
    "compare.out": lambda run: compare(["fedavg"], out=NOBODY, **SMALL),
    "simulate.out": lambda run: simulate(out=NOBODY, **SMALL),
    "sweep.out": lambda run: sweep(SMALL, {"seed": [0]}, out=NOBODY),
    "resume.folder": lambda run: resume(NOBODY),
    "collect.folder": lambda run: results.collect(NOBODY),
    "explain.run": lambda run: results.explain(NOBODY),
    "explain.out": lambda run: results.explain(run, out=NOBODY),
    "export.run": lambda run: bridges.export(NOBODY, "a.npz"),
    "export.to": lambda run: bridges.export(run, NOBODY),
    "guarantees.run": lambda run: results.guarantees(NOBODY),
    "load.folder": lambda run: results.load(NOBODY),
    "redraw.folder": lambda run: results.redraw(NOBODY),
    "save.folder": lambda run: results.save(run, NOBODY),
    "save_figure.path": lambda run: results.save_figure(results.gantt(run.schedule), f"{NOBODY}.png"),
    "write.path": lambda run: results.write([{"a": 1}], f"{NOBODY}.csv"),
    "write_comparison.folder": lambda run: results.write_comparison({"a": [run]}, NOBODY),
    "write_report.folders": lambda run: results.write_report([NOBODY], "a.html"),
    "write_report.path": lambda run: results.write_report(["."], f"{NOBODY}.html"),
    "write_run.folder": lambda run: results.write_run(run, NOBODY),
    "write_sweep.folder": lambda run: results.write_sweep(sweep(SMALL, {"seed": [0]}), NOBODY),
    "fetch.data_dir": lambda run: data.fetch("mnist", NOBODY),
    "fetch.source": lambda run: data.fetch("mnist", ".", NOBODY),
    "list_datasets.data_dir": lambda run: data.list_datasets(NOBODY),
    "load.data_dir": lambda run: data.load("mnist", NOBODY),
    "tokenize.data_dir": lambda run: data.tokenize(["a"], data_dir=NOBODY),
    "tokenize.vocabulary": lambda run: data.tokenize(["a"], vocabulary=NOBODY),
    "verify.data_dir": lambda run: data.verify("mnist", NOBODY),
    "open_folder.folder": lambda run: data.open_folder(NOBODY),
    "write_clients.folder": lambda run: data.write_clients(NOBODY, [], test_x=ARRAYS["w"], test_y=ARRAYS["w"]),
    "write_folder.folder": lambda run: data.write_folder(NOBODY, data.federate(data.load("quadratic"), "natural")),
    "is_peer_schedule.path": lambda run: peers.is_peer_schedule(NOBODY),
    "load_peer_schedule.path": lambda run: peers.load_peer_schedule(NOBODY),
    "load_schedule.path": lambda run: clock.load_schedule(NOBODY),
    "load_schedule_csv.path": lambda run: clock.load_schedule_csv(NOBODY),
    "save_peer_schedule.path": lambda run: peers.save_peer_schedule(NOBODY, planned("dpsgd")),
    "save_schedule.path": lambda run: clock.save_schedule(NOBODY, run.schedule),
    "save_schedule_csv.path": lambda run: clock.save_schedule_csv(NOBODY, run.schedule),
    "minilm_lora.path": lambda run: minilm_lora(path=NOBODY),
    "read_arrays.path": lambda run: read_arrays(NOBODY),
    "read_safetensors.path": lambda run: read_safetensors(NOBODY),
    "write_arrays.path": lambda run: write_arrays(NOBODY, ARRAYS),
    # not among the public names
    "formats.test": lambda run: existing(NOBODY, "test"),
    "fedscale.capacity": lambda run: write_tables(".", capacity=NOBODY),
    "fedscale.behaviour": lambda run: write_tables(".", behaviour=NOBODY),
    "train_job.folder": lambda run: train_job(NOBODY, 0),
    "initial": lambda run: prepare(Settings(**SMALL, initial=NOBODY)),
    "plugin": lambda run: load_plugin(NOBODY),
}
ROOMS = ("", ".results", ".data", ".clock", ".models", ".config", ".engine")


def test_every_public_function_with_a_path_is_tried():
    inner = {"execute.checkpoints", "execute_group.folder"}  # called with paths that are checked already
    modules = [importlib.import_module(f"fedjax_async{room}") for room in ROOMS]
    functions = [(name, getattr(module, name)) for module in modules for name in module.__all__]
    found = set()
    for name, function in functions:
        for parameter in inspect.signature(function).parameters.values() if inspect.isfunction(function) else ():
            text = str(parameter.annotation)
            if ("Path" in text or "DataDir" in text) and "Callable" not in text:
                found.add(f"{name}.{parameter.name}")
    assert found - set(CALLS) == inner


@pytest.mark.parametrize("call", CALLS)
def test_an_argument_that_is_a_path_names_an_unknown_user(call, run):
    with pytest.raises(ValueError, match=UNKNOWN):
        CALLS[call](run)


LINES = (
    "run --out=PATH",
    "run --plugin=PATH.py",
    "run --initial=PATH --model=logistic",
    "run --delay=csv:path=PATH",
    "compare fedavg --out=PATH",
    "resume PATH",
    "plan --gantt=PATH.png",
    "sweep PATH",
    "sweep here.toml --out=PATH",
    "job PATH 0",
    "report PATH",
    "report . --out=PATH.html",
    "explain PATH",
    "explain . --out=PATH",
    "landscape PATH PATH",
    "landscape . . --out=PATH",
    "privacy PATH",
    "export PATH --to=a.npz",
    "export . --to=PATH.npz",
    "data list --data-dir=PATH",
    "data verify mnist --data-dir=PATH",
    "data fetch mnist --data-dir=PATH",
    "data fetch mnist --source=PATH",
    "data import leaf:path=PATH --out=here",
    "data import quadratic --out=PATH",
    "data fedscale --out=PATH --capacity=here",
    "data fedscale --out=here --capacity=PATH",
    "data fedscale --out=here --behaviour=PATH",
)


@pytest.mark.parametrize("line", LINES)
def test_a_command_names_an_unknown_user_in_one_line(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDJAX_ASYNC_DATA", str(tmp_path))
    try:
        code = main(line.replace("PATH", NOBODY).split())
    except SystemExit as end:
        code = end.code
    lines = capsys.readouterr().err.splitlines()
    assert code == 2 and len(lines) == 1 and "a path without ~nosuchuser (no such user" in lines[0], lines


def test_a_run_reads_and_writes_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "delays.csv").write_text("client,mean,std\n0,1,0\n1,2,0\n2,3,0\n")
    first = simulate(**SMALL, delay="csv:path=~/delays.csv", out="~/run", plots=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["delays.csv", "run"]
    bridges.export("~/run", "~/model.npz")
    again = simulate(**SMALL, initial="~/model.npz")
    (saved,) = read_arrays("~/model.npz").values()
    np.testing.assert_array_equal(saved, *first.params.values())
    assert results.load("~/run").counters["updates"] == again.counters["updates"] == 4
