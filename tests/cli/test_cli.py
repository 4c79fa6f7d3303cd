"""The command line from the outside: what it writes and prints, settings from a file, help, and what it imports."""

import argparse
import dataclasses
import io
import json
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from fedjax_async import METHODS, Settings, cli, data, register, server
from fedjax_async.cli import entry, flags, listing, planned, sweep, sweep_file
from fedjax_async.clock import DelayStatistics, WaveStatistics
from fedjax_async.config import prepare
from fedjax_async.peers import PeerStatistics
from fedjax_async.results import final_value, load
from tests.cli.called import ok

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--model", "logistic", "--clients", "4", "--updates", "6", "--steps", "2", "--quiet")
METHOD = ("--method", "fedbuff:server_lr=0.5@buffer:size=2")


def test_a_run_is_saved_in_a_folder_and_drawn_again_in_another_format(capsys, tmp_path):
    out = ok(capsys, "run", *SMALL, *METHOD, "--out", str(tmp_path))
    assert "fedbuff:server_lr=0.5@buffer:size=2: accuracy" in out and "6 updates, 3 server steps" in out
    assert {"accuracy.png", "staleness.png", "gantt.png"} <= {path.name for path in tmp_path.iterdir()}
    run = load(tmp_path)
    assert run.settings["method"] == "fedbuff:server_lr=0.5@buffer:size=2" and run.settings["clients"] == 4
    assert run.counters["updates"] == 6 and run.counters["server_steps"] == 3
    scores = {final: [final_value(run, name, final) for name in ("accuracy", "loss")] for final in ("tail", "last")}
    texts = {final: f"accuracy {100 * scores[final][0]:.2f} %, loss {scores[final][1]:.4f}" for final in scores}
    assert f"{texts['tail']} (mean of last tenth) after 6 updates" in out
    assert f"last of {len(run.evaluations['time'])} evaluations: {texts['last']}\n" in out
    again = ok(capsys, "run", *SMALL, *METHOD, "--out", str(tmp_path), "--format", "svg", "--title", "Later")
    assert "finished already" in again
    assert b"Later" in (tmp_path / "accuracy.svg").read_bytes() and (tmp_path / "accuracy.png").exists()


def test_float64_is_float64(capsys, tmp_path):
    sweep = '[base]\nmodel = "logistic"\nclients = 4\nsteps = 2\nupdates = 6\ncompute = "float64"\n[grid]\nlr = [0.1]\n'
    (tmp_path / "f.toml").write_text(sweep)
    ok(capsys, "run", *SMALL, "--compute", "float64", "--out", str(tmp_path / "one"), "--no-plots")
    for _ in range(2):  # the second time, the finished run is read
        ok(capsys, "sweep", str(tmp_path / "f.toml"), "--out", str(tmp_path / "two"), "--quiet", "--no-plots")
    for folder in (tmp_path / "one", tmp_path / "two" / "runs" / "lr=0.1"):
        with np.load(folder / "params.npz") as params:
            assert {params[name].dtype.name for name in params.files} == {"float64"}


def test_compare_writes_tables_and_pictures_with_the_final_value_that_is_asked_for(made_at_once, capsys, tmp_path):
    methods = ("fedavg@cohort:size=2", "fedasync:mixing=0.3")
    asked = ("--final", "best", "--format", "svg,pdf", "--width", "column", "--title", "Two")
    out = ok(capsys, "compare", *methods, *SMALL, "--seeds", "3", *asked, "--out", str(tmp_path))
    assert "3 seed(s)" in out and "fedasync:mixing=0.3" in out
    assert "accuracy, best (%)" in out and "95% interval (t)" in out and "Wilcoxon" in out
    assert "comparison.md, comparison.tex, pairs.csv, pairs.md, accuracy.pdf, accuracy.svg, runs/\n" in out
    names = {f"comparison.{kind}" for kind in ("csv", "md", "tex")} | {"pairs.csv", "pairs.md", "command.txt"}
    names |= {"accuracy.svg", "accuracy.pdf", "runs"}
    assert {path.name for path in tmp_path.iterdir()} == names
    header, *rows = (tmp_path / "comparison.csv").read_text().splitlines()
    assert header.startswith('method,"accuracy, best (%)","accuracy, best (%) std') and len(rows) == 2
    assert all(f"accuracy, {way} (%)" in header for way in ("best", "mean of last tenth", "last"))
    assert "relative to fedavg@cohort:size=2" in header  # the first, since none is called fedavg
    saved = load(tmp_path / "runs" / "fedasync_mixing_0.3" / "seed_1")
    assert saved.settings["seed"] == 1 and saved.settings["method"] == "fedasync:mixing=0.3"


def test_quickstart_is_a_comparison_with_settings_of_its_own(made_at_once, capsys, tmp_path):
    small = ("--model", "logistic", "--epochs", "0.1", "--time", "1500", "--eval-time", "500", "--seeds", "1")
    out = ok(capsys, "quickstart", *small, "--quiet", "--out", str(tmp_path))
    lines = [line.split()[0] for line in out.splitlines() if line]
    assert [name for name in lines if name in flags.QUICKSTART_METHODS] == list(flags.QUICKSTART_METHODS)
    settings = json.loads((tmp_path / "runs/fedbuff_server_lr_1_buffer_size_3/seed_0/settings.json").read_text())
    assert settings["dataset"] == "fashion_mnist_6k" and settings["partition"] == "dirichlet:alpha=0.1"
    assert settings["time"] == 1500 and settings["updates"] is None
    assert "accuracy, mean of last tenth (%)" in out and (tmp_path / "accuracy.png").exists()


def test_plan_trains_nothing_and_draws_the_asked_seconds(capsys, monkeypatch, tmp_path):
    picture = tmp_path / "deep" / "gantt.png"
    command = ("plan", "--clients", "4", "--updates", "40", "--delay", "constant", "--gantt", str(picture))
    out = ok(capsys, *command)
    figures = dict(line.split()[:2] for line in out.splitlines() if line.startswith("  "))
    assert "40 updates, 40 server steps" in out.splitlines()[0]
    assert figures["waves"] == figures["longest_chain"] == "10"  # equal delays: all four clients train together
    assert picture.read_bytes().startswith(b"\x89PNG")
    drawn = []
    monkeypatch.setattr(planned, "save_figure", lambda figure, path: drawn.append(figure.axes[0].get_xlim()))
    for method in ("fedasync", "independent"):
        ok(capsys, *command, "--method", method, "--since", "2", "--until", "5")
    assert drawn == [(2, 5)] * 2
    for statistics in (DelayStatistics, WaveStatistics, PeerStatistics):
        assert set(statistics._fields) <= planned.OF_NODES.keys()


def test_paths_with_commas_and_plus_signs_are_quoted(capsys, tmp_path):
    folder = tmp_path / "a, b+drop"
    folder.mkdir()
    for name, text in {
        "delay.csv": "client,mean,std\n0,1,0\n1,1,0\n",
        "online.csv": "client,start,end\n0,0,9\n1,0,9\n",
        "shares.csv": f"id,{','.join(map(str, range(10)))}\n0{',3' * 10}\n1{',1' * 10}\n",
    }.items():
        (folder / name).write_text(text)
    out = ok(
        capsys, "plan", "--clients", "2", "--updates", "8", "--steps", "1",
        "--delay", f"csv:path='{folder}/delay.csv',reference_steps=1",
        "--availability", f'csv:path="{folder}/online.csv",repeat=9+leaves:share=0.5,by=100',
        "--partition", f'table:path="{folder}/shares.csv"',
    )  # fmt: skip
    assert "8 updates, 8 server steps" in out.splitlines()[0]


def test_list_takes_a_kind_as_the_settings_call_it(capsys):
    assert ok(capsys, "list", "dataset").splitlines()[1:] == ok(capsys, "list", "datasets").splitlines()[1:]
    assert ok(capsys, "list", "policy", "oort") == ok(capsys, "list", "policies", "oort")


def test_list_describes_every_name(capsys):
    lines = ok(capsys, "list", "--options").splitlines()
    described = {line.split()[0] for line in lines if line.startswith("  ") and len(line.split()) > 3}
    names = {(kind, name) for kind in listing.REGISTRIES for name in listing.entries(kind)}
    assert {name for _, name in names} <= described and {f"{kind}:" for kind in listing.REGISTRIES} <= set(lines)
    assert any("options: path=..., family=normal" in line for line in lines)
    assert min(len(listing.explain(kind, name).splitlines()) for kind, name in names) > 3
    assert ok(capsys, "list", "timings").splitlines()[0] == "timings:"
    assert "options after fedbuff@buffer: size=" in ok(capsys, "list", "methods", "--options")


SIZE = METHODS["fedbuff"].timing.partition(":")[2]
SHOWN = {  # names -> lines or parts of them, each of which is there once
    "orthofl": [
        "orthofl: Clients keep their weights and add orthogonal shifts (OrthoFL 2025).\n",
        "usually: timing every, optimizer sgd, lr 0.01\n",
        "mixing=0.6, per=layer",
        *("reference:", "keep_optimizer:", "overstale:"),  # of the rule, of its clients, of its guard rails
    ],
    "pisces": [
        "usually: timing pace:bound=20, policy pisces, optimizer sgd",
        "options after --policy pisces: penalty=0.5, recent=5",
        "Mean of the staleness-weighted deltas of a server step",
        "Clients of high score: number of examples",
    ],
    "fedbuff pushcen": [
        *("fedbuff: Mean of K", "\npushcen: Push-sum of"),
        f"options after fedbuff@buffer: {SIZE}, concurrency=None, sampling=uniform\n",
        "options after --optimizer sgd: momentum=0.0, nesterov=False, weight_decay=0.0\n",
        "usually: exchange push_sum, topology gossip, optimizer adam, lr 0.001",
        "options after pushcen@push_sum: capacity=16, newest=True",
        "options after --topology gossip: receivers=None",
        *("\nbuffer\n", "\npush_sum\n"),  # their docstrings explain these options
    ],
}


@pytest.mark.parametrize("names", SHOWN)
def test_list_explains_names_and_the_options_of_what_they_are_joined_with(capsys, names):
    out = ok(capsys, "list", "methods", *names.split())
    assert {text: out.count(text) for text in SHOWN[names]} == dict.fromkeys(SHOWN[names], 1)
    assert "option ``exponent``" in out or names != "orthofl"  # of its staleness


def test_list_has_no_line_without_a_description(capsys, nothing_stays_registered):
    register("delay", "mine")(lambda *, mean=1.0: None)
    rule = server.fedasync()
    register("method", "mine")(lambda: rule)  # not the docstring of the preset that stands for it
    for kind in ("delays", "methods"):
        assert f"  {'mine':<20} (its factory has no docstring)" in ok(capsys, "list", kind).splitlines()
    assert ok(capsys, "list", "clients").splitlines()[:2] == ["clients:", "  (none; a plugin may register some)"]
    assert all(len(line.split()) > 1 for line in ok(capsys, "list").splitlines() if line.startswith("  "))


TAUGHT = {
    "explain": ("<grad F(x), x' - x>", "fedjax-async explain runs/"),
    "landscape": ("barrier", "fedjax-async landscape runs/"),
    "run": ("method.mixing = 0.4",),
    "plan": ("settings.json",),
    "compare": ('"Our method" = ',),
    "sweep": [line.strip() for line in sweep_file.SWEEP_EXAMPLE.splitlines()],
}


@pytest.mark.parametrize("command", TAUGHT)
def test_help_teaches(capsys, command):
    with pytest.raises(SystemExit) as ended:
        cli.main((command, "--help"))
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and all(text in shown for text in TAUGHT[command])
    if command == "compare":  # which refuses them
        assert "settings.json" not in shown and "method.mixing" not in shown.split("a FILE for --config")[1]


def test_the_example_of_the_help_is_a_whole_sweep(tmp_path):
    (tmp_path / "mixing.toml").write_text(sweep_file.SWEEP_EXAMPLE)
    file = sweep.read(tmp_path / "mixing.toml")
    assert len(file.points) == 72 and (file.target, file.final) == (0.7, "tail")
    assert file.roles == {"method.exponent": "tuned"}
    assert set(tomllib.loads(sweep_file.SWEEP_EXAMPLE)) == set(sweep_file.SWEEP_KEYS)
    prepare(dataclasses.replace(file.points[0].settings, model="logistic", updates=5, eval_updates=1))


def test_data_sets_are_listed_and_the_command_for_imported_ones_can_be_given_to_a_shell(capsys, tmp_path):
    out = ok(capsys, "data", "list", "--data-dir", str(tmp_path))
    state = {line.split()[0]: line for line in out.splitlines()}
    assert "embedded" in state["fashion_mnist_6k"] and "to fetch" in state["cifar10"]
    said = ok(capsys, "data", "import", "quadratic", "--out", str(tmp_path / "two words, one comma"))
    words = shlex.split(said.splitlines()[-1].removeprefix("run: "))
    assert data.load(words[words.index("--dataset") + 1]).name == "quadratic"


def test_every_setting_has_a_flag_and_the_defaults_of_its_command():
    for command, base in (("run", flags.RUN_BASE), ("quickstart", flags.QUICKSTART.__dict__)):
        arguments = cli.parser().parse_args([command])
        given = flags.settings_of(arguments, base)
        assert {name: getattr(given, name) for name in base} == base
    # a budget replaces the base's budget instead of joining it
    assert flags.settings_of(cli.parser().parse_args(["run", "--time", "9"]), flags.RUN_BASE).updates is None


def written(text: str) -> str:
    Path("f.toml").write_text(text)
    return "f.toml"


def settings(*words: str) -> Settings:
    return flags.settings_of(cli.parser().parse_args(words), flags.RUN_BASE)


def test_settings_of_a_file_under_the_given_flags(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "clients = 4\nbatch-size = 16\nlr = 1\ntime = 50\nmethod.mixing = 0.4\n[delay]\nreplacement = true\n"
    changed = {"method": "fedasync:mixing=0.4", "delay": f"{Settings.delay}:replacement=true"}
    want = Settings(clients=7, batch_size=16, lr=1.0, time=50.0, **changed)
    assert settings("run", "--config", written(text), "--clients", "7") == want
    assert settings("run", "--config", "f.toml", "--updates", "9", "--method", "asgd").time is None
    assert settings("plan", "--config", "f.toml").time == 50.0
    assert settings("run", "--config", written("seed = 3")) == Settings(updates=200, seed=3)
    assert settings("run", "--config", written("eval_updates = 5\nepochs = 2"), "--steps", "3").epochs is None


def test_a_saved_run_is_repeated_by_its_settings(capsys, tmp_path, monkeypatch, made_at_once):
    monkeypatch.chdir(tmp_path)
    small = ("--model", "logistic", "--clients", "4", "--steps", "2", "--quiet", "--no-plots")
    ok(capsys, "run", *small, "--time", "900", "--method", "fedbuff@buffer:size=2", "--out", "one")
    ok(capsys, "run", "--config", "one/settings.json", "--quiet", "--no-plots", "--out", "two")
    assert Path("one/settings.json").read_bytes() == Path("two/settings.json").read_bytes()
    ok(capsys, "run", "--config", "one/settings.json", "--seed", "1", "--method", "fedasync", "--out", "three")
    found, first = load("three").settings, load("one").settings
    assert {name for name in first | found if found.get(name) != first.get(name)} <= {"seed", "method", "defaults"}


def test_the_methods_of_a_comparison(capsys, tmp_path, monkeypatch, made_at_once):
    monkeypatch.chdir(tmp_path)
    common = 'model = "logistic"\nclients = 4\nupdates = 6\nsteps = 1\n'
    table = written(common + '[methods]\nAvg = "fedavg"\n"Our method" = "fedasync:mixing=0.4"\n')
    flags = ("--quiet", "--no-plots", "--out")
    assert "relative to Avg" in ok(capsys, "compare", "--config", table, *flags, "one")
    assert load("one/runs/Our_method/seed_0").settings["method"] == "fedasync:mixing=0.4"
    listed = written('methods = ["asgd", "A=fedavg"]\n' + common)
    assert "relative to A" in ok(capsys, "compare", "--config", listed, *flags, "two")
    ok(capsys, "compare", "fedasync", "--config", listed, *flags, "three")
    assert [path.name for path in Path("three/runs").iterdir()] == ["fedasync"]


# Modules that a fast command must not import: on a busy machine they take seconds.
SLOW = ("numpy", "jax", "flax", "optax", "fedjax_async.config.experiment")
PROGRAM = f"""import contextlib, io, json, sys
from fedjax_async import cli
for command in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        try:
            code = cli.main(command.split())
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, bool(out.getvalue()), error.getvalue(), [x for x in {SLOW} if x in sys.modules]]))
"""
QUICK = {
    "run --dataset mnist": "dataset = 'mnist'",
    "quickstart --dataset har": "dataset = 'har'",
    "compare fedavg --dataset cifar100": "dataset = 'cifar100'",
    "plan --dataset tfds:name=kmnist": "dataset = 'kmnist'",
    "run --dataset folder:path=nowhere": "folder = 'nowhere'",
    "sweep base.toml": "dataset = 'cifar10'",
    "sweep grid.toml": "dataset = 'mnist'",
    "sweep point.toml": "dataset = 'newsgroups20'",
    "data verify mnist": "dataset = 'mnist'",
    "data verify minilm": "pretrained = 'minilm'",
    "--version": None,
    "run --help": None,
}
SWEEPS = {
    "base.toml": '[base]\ndataset = "cifar10"\n[grid]\nlr = [0.1]\n',
    "grid.toml": '[base]\ndataset = "har"\n[grid]\ndataset = ["digits", "mnist"]\n',
    "point.toml": '[grid]\nlr = [0.1]\n[[points]]\ndataset = "newsgroups20"\n',
}


def test_missing_data_sets_help_and_version_cost_no_import(tmp_path):
    for name, text in SWEEPS.items():
        (tmp_path / name).write_text(text)
    places = {"FEDJAX_ASYNC_DATA": "nothing", "TFDS_DATA_DIR": "nothing", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM, *QUICK]
    done = subprocess.run(command, cwd=tmp_path, check=False, env=os.environ | places, capture_output=True, text=True)
    assert done.stderr == ""
    for says, line in zip(QUICK.values(), done.stdout.splitlines(), strict=True):
        code, printed, error, imported = json.loads(line)
        assert (code, printed, imported) == ((0, True, []) if says is None else (2, False, []))
        assert error == "" if says is None else error.startswith(f"fedjax-async: error: {says}")
        assert error.count("\n") == (says is not None)


def test_a_reader_that_has_seen_enough_is_no_error():
    command = [sys.executable, "-m", "fedjax_async", "list", "delays", "--options"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == 0


def test_an_output_without_unicode_shows_what_it_can(monkeypatch):
    """As under LC_ALL=C without Python's UTF-8 mode: a table with ± must not end a command after its work."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", stream)
    name = b"caf\xc3\xa9".decode("ascii", "surrogateescape")
    action = argparse.Namespace(action=lambda arguments: print(f"1 ± 2, é, {name}"))
    monkeypatch.setattr(entry, "parser", lambda: argparse.Namespace(parse_args=lambda argv: action))
    assert cli.main([]) == 0
    assert stream.buffer.getvalue() == b"1 +- 2, \\xe9, caf\xc3\xa9\n"
