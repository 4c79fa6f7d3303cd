"""The command line from the outside: what it writes, and one line on standard error for unusable input."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedjax_async import METHODS, cli, data
from fedjax_async.base import registry
from fedjax_async.cli import entry, flags, listing, planned
from fedjax_async.clock import DelayStatistics, WaveStatistics
from fedjax_async.peers import PeerStatistics
from fedjax_async.results import final_value, load
from tests.cli.called import ok, refused

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--model", "logistic", "--clients", "4", "--updates", "6", "--steps", "2", "--quiet")


# --- what works ---------------------------------------------------------------------------------


METHOD = ("--method", "fedbuff:server_lr=0.5@buffer:size=2")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder of a run, and what the command said."""
    folder, said = tmp_path_factory.mktemp("ran") / "one", io.StringIO()
    with contextlib.redirect_stdout(said):
        assert cli.main(("run", *SMALL, *METHOD, "--out", str(folder))) == 0
    return folder, said.getvalue()


def test_run_saves_a_folder(ran):
    folder, out = ran
    assert "fedbuff:server_lr=0.5@buffer:size=2: accuracy" in out and "6 updates, 3 server steps" in out
    assert {"accuracy.png", "staleness.png", "gantt.png"} <= {path.name for path in folder.iterdir()}
    run = load(folder)
    assert run.settings["method"] == "fedbuff:server_lr=0.5@buffer:size=2" and run.settings["clients"] == 4
    assert run.counters["updates"] == 6 and run.counters["server_steps"] == 3
    scores = {final: [final_value(run, name, final) for name in ("accuracy", "loss")] for final in ("tail", "last")}
    texts = {final: f"accuracy {100 * scores[final][0]:.2f} %, loss {scores[final][1]:.4f}" for final in scores}
    assert f"{texts['tail']} (mean of last tenth) after 6 updates" in out
    assert f"last of {len(run.evaluations['time'])} evaluations: {texts['last']}\n" in out


def test_pictures_of_a_finished_run_are_drawn_in_other_formats(ran, capsys, tmp_path):
    folder = shutil.copytree(ran[0], tmp_path / "one")
    out = ok(capsys, "run", *SMALL, *METHOD, "--out", str(folder), "--format", "svg", "--title", "Later")
    assert "finished already" in out
    assert b"Later" in (folder / "accuracy.svg").read_bytes() and (folder / "accuracy.png").exists()


def test_float64_is_float64(capsys, tmp_path):
    ok(capsys, "run", *SMALL, "--compute", "float64", "--out", str(tmp_path), "--no-plots")
    with np.load(tmp_path / "params.npz") as params:
        assert {params[name].dtype.name for name in params.files} == {"float64"}


def test_compare_writes_table_and_picture(made_at_once, capsys, tmp_path):
    methods = ("fedavg@cohort:size=2", "fedasync:mixing=0.3")
    out = ok(capsys, "compare", *methods, *SMALL, "--seeds", "2", "--out", str(tmp_path))
    assert "2 seed(s)" in out and "fedasync:mixing=0.3" in out
    tables = {f"comparison.{kind}" for kind in ("csv", "md", "tex")}
    assert tables | {"accuracy.png", "command.txt", "runs"} == {path.name for path in tmp_path.iterdir()}
    header, *rows = (tmp_path / "comparison.csv").read_text().splitlines()
    title = '"accuracy, mean of last tenth (%)"'
    assert header.startswith(f"method,{title},{title[:-1]} std") and len(rows) == 2
    assert "relative to fedavg@cohort:size=2" in header  # the first, since none is called fedavg
    saved = load(tmp_path / "runs" / "fedasync_mixing_0.3" / "seed_1")
    assert saved.settings["seed"] == 1 and saved.settings["method"] == "fedasync:mixing=0.3"


def test_compare_shows_the_final_value_that_is_asked_for(made_at_once, capsys, tmp_path):
    asked = ("--final", "best", "--format", "svg,pdf", "--width", "column", "--title", "Two")
    out = ok(capsys, "compare", "fedasync", "asgd", *SMALL, "--seeds", "3", *asked, "--out", str(tmp_path))
    names = {f"comparison.{kind}" for kind in ("csv", "md", "tex")} | {"pairs.csv", "pairs.md", "command.txt"}
    names |= {"accuracy.svg", "accuracy.pdf", "runs"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert "accuracy, best (%)" in out and "95% interval (t)" in out and "Wilcoxon" in out
    header = (tmp_path / "comparison.csv").read_text().splitlines()[0]
    assert all(f"accuracy, {way} (%)" in header for way in ("best", "mean of last tenth", "last"))
    assert "comparison.md, comparison.tex, pairs.csv, pairs.md, pictures" in out


COMMANDS = (("compare", "asgd"), ("quickstart",), ("sweep", "nothing.toml"))
BAD_DRAWINGS = {
    ("--final", "first"): "final = 'first': must be last, best, tail (the mean of the last tenth of the evaluations)",
    ("--final", "tail:0"): "final = 'tail:0': must be last",
    ("--format", "png,gif"): "format = 'gif': must be one of png, pdf, svg",
    ("--width", "wide"): "width = 'wide': must be one of column, page",
}


@pytest.mark.parametrize("flags", BAD_DRAWINGS, ids=" ".join)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_bad_finals_and_drawings_are_refused_before_the_work(capsys, monkeypatch, tmp_path, command, flags):
    monkeypatch.chdir(tmp_path)
    Path("nothing.toml").write_text("[base]\nupdates = 3\n")
    assert BAD_DRAWINGS[flags] in refused(capsys, *command, *flags)
    assert [path.name for path in Path().iterdir()] == ["nothing.toml"]


def test_quickstart_is_a_comparison_with_settings_of_its_own(made_at_once, capsys, tmp_path):
    small = ("--model", "logistic", "--epochs", "0.1", "--time", "1500", "--eval-time", "500", "--seeds", "1")
    out = ok(capsys, "quickstart", *small, "--quiet", "--out", str(tmp_path))
    lines = [line.split()[0] for line in out.splitlines() if line]
    assert [name for name in lines if name in flags.QUICKSTART_METHODS] == list(flags.QUICKSTART_METHODS)
    settings = json.loads((tmp_path / "runs/fedbuff_server_lr_1_buffer_size_3/seed_0/settings.json").read_text())
    assert settings["dataset"] == "fashion_mnist_6k" and settings["partition"] == "dirichlet:alpha=0.1"
    assert settings["time"] == 1500 and settings["updates"] is None


def test_plan_trains_nothing(capsys, tmp_path):
    picture = tmp_path / "deep" / "gantt.png"
    out = ok(capsys, "plan", "--clients", "4", "--updates", "40", "--delay", "constant", "--gantt", str(picture))
    figures = dict(line.split()[:2] for line in out.splitlines() if line.startswith("  "))
    assert "40 updates, 40 server steps" in out.splitlines()[0]
    assert figures["waves"] == figures["longest_chain"] == "10"  # equal delays: all four clients train together
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert all(
        set(kind._fields) <= planned.OF_NODES.keys() for kind in (DelayStatistics, WaveStatistics, PeerStatistics)
    )


def test_a_gantt_chart_has_the_asked_seconds(capsys, monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(planned, "save_figure", lambda figure, path: drawn.append(figure.axes[0].get_xlim()))
    small = ("--clients", "4", "--updates", "40", "--delay", "constant", "--gantt", str(tmp_path / "a.png"))
    for method in ("fedasync", "independent"):
        ok(capsys, "plan", *small, "--method", method, "--since", "2", "--until", "5")
        assert drawn.pop() == (2, 5)
    assert "until = 50.0: must be left out without --gantt" in refused(capsys, "plan", *small[:-2], "--until", "50")
    assert "until = 3.0: must be more than since = 4 s" in refused(
        capsys, "plan", *small, "--since", "4", "--until", "3"
    )
    assert "until = -1.0: must be a finite number > 0" in refused(capsys, "plan", *small, "--until", "-1")


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


def test_list_describes_every_name(capsys):
    lines = ok(capsys, "list", "--options").splitlines()
    described = {line.split()[0] for line in lines if line.startswith("  ") and len(line.split()) > 3}
    names = {name for kind in listing.REGISTRIES for name in listing.entries(kind)}
    assert names <= described and {f"{kind}:" for kind in listing.REGISTRIES} <= set(lines)
    assert any("options: path=..., family=normal" in line for line in lines)
    assert ok(capsys, "list", "timings").splitlines()[0] == "timings:"


def test_list_explains_one_name(capsys):
    out = ok(capsys, "list", "methods", "orthofl")
    first, *rest = out.splitlines()
    assert first == "orthofl: Clients keep their weights and add orthogonal shifts (OrthoFL 2025)."
    assert "usually: timing every, optimizer sgd, lr 0.01" in rest and "mixing=0.6, per=layer" in out
    for option in ("reference:", "keep_optimizer:", "overstale:", "option ``exponent``"):
        assert option in out, option  # of the rule, of its clients, of its guard rails, of its staleness
    assert "method = 'orthofll': unknown; did you mean 'orthofl'?" in refused(capsys, "list", "methods", "orthofll")


def test_list_explains_the_policy_that_a_method_brings(capsys):
    out = ok(capsys, "list", "methods", "pisces")
    assert "usually: timing pace:bound=20, policy pisces, optimizer sgd" in out
    assert "options after --policy pisces: penalty=0.5, recent=5" in out
    for line in ("Mean of the staleness-weighted deltas of a server step", "Clients of high score: number of examples"):
        assert out.count(line) == 1, line


def test_list_explains_several_names_and_the_options_of_what_they_are_joined_with(capsys):
    out = ok(capsys, "list", "methods", "fedbuff", "pushcen")
    assert "fedbuff: Mean of K" in out and "\npushcen: Push-sum of" in out
    assert f"options after fedbuff@buffer: {timing_of('fedbuff')}, concurrency=None, sampling=uniform\n" in out
    assert "options after --optimizer sgd: momentum=0.0, nesterov=False, weight_decay=0.0\n" in out
    assert "usually: exchange push_sum, topology gossip, optimizer adam, lr 0.001" in out
    assert "options after pushcen@push_sum: capacity=16, newest=True" in out
    assert "options after --topology gossip: receivers=None" in out
    assert "\nbuffer\n" in out and "\npush_sum\n" in out  # their docstrings explain these options
    assert "options after fedbuff@buffer: size=" in ok(capsys, "list", "methods", "--options")
    assert "method = 'x': unknown" in refused(capsys, "list", "methods", "fedbuff", "x")


def timing_of(method: str) -> str:
    """The options in a method's usual timing."""
    return METHODS[method].timing.partition(":")[2]


@pytest.mark.parametrize("kind", listing.REGISTRIES)
def test_list_explains_every_name(kind):
    short = [name for name in listing.entries(kind) if len(listing.explain(kind, name).splitlines()) < 4]
    assert short == []


def test_list_has_no_line_without_a_description(capsys, monkeypatch):
    monkeypatch.setitem(registry.ADDED, "delay", {"mine": registry.Addition(lambda *, mean: None, "")})
    assert ok(capsys, "list", "delays").splitlines()[-2] == f"  {'mine':<20} (its factory has no docstring)"
    assert ok(capsys, "list", "clients").splitlines()[:2] == ["clients:", "  (none; a plugin may register some)"]
    assert all(len(line.split()) > 1 for line in ok(capsys, "list").splitlines() if line.startswith("  "))


def test_help_teaches(capsys):
    for command, known in (("explain", "<grad F(x), x' - x>"), ("landscape", "barrier")):
        with pytest.raises(SystemExit):
            cli.main((command, "--help"))
        shown = capsys.readouterr().out
        assert known in shown and f"fedjax-async {command} runs/" in shown


def test_data_list(capsys, tmp_path):
    out = ok(capsys, "data", "list", "--data-dir", str(tmp_path))
    state = {line.split()[0]: line for line in out.splitlines()}
    assert "embedded" in state["fashion_mnist_6k"] and "to fetch" in state["cifar10"]


def test_every_setting_has_a_flag_and_the_defaults_of_its_command():
    for command, base in (("run", flags.RUN_BASE), ("quickstart", flags.QUICKSTART.__dict__)):
        arguments = cli.parser().parse_args([command])
        given = flags.settings_of(arguments, base)
        assert {name: getattr(given, name) for name in base} == base
    # a budget replaces the base's budget instead of joining it
    assert flags.settings_of(cli.parser().parse_args(["run", "--time", "9"]), flags.RUN_BASE).updates is None


# --- what cannot be used ------------------------------------------------------------------------


# Modules that a fast command must not import: on a busy machine they take seconds.
SLOW = ("numpy", "jax", "flax", "optax", "fedjax_async.config.experiment")
PROGRAM = f"""import sys
from fedjax_async import cli
try:
    code = cli.main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print("imported", *[name for name in {SLOW} if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""
QUICK = {
    "run": (("run", "--dataset", "mnist"), "dataset = 'mnist'"),
    "quickstart": (("quickstart", "--dataset", "har"), "dataset = 'har'"),
    "compare": (("compare", "fedavg", "--dataset", "cifar100"), "dataset = 'cifar100'"),
    "plan": (("plan", "--dataset", "tfds:name=kmnist"), "dataset = 'kmnist'"),
    "a folder": (("run", "--dataset", "folder:path=nowhere"), "folder = 'nowhere'"),
    "a sweep's base": (("sweep", "base.toml"), "dataset = 'cifar10'"),
    "a sweep's grid": (("sweep", "grid.toml"), "dataset = 'mnist'"),
    "a sweep's point": (("sweep", "point.toml"), "dataset = 'newsgroups20'"),
    "verify": (("data", "verify", "mnist"), "dataset = 'mnist'"),
    "verify a pretrained model": (("data", "verify", "minilm"), "pretrained = 'minilm'"),
    "version": (("--version",), None),
    "help": (("run", "--help"), None),
}
SWEEPS = {
    "base.toml": '[base]\ndataset = "cifar10"\n[grid]\nlr = [0.1]\n',
    "grid.toml": '[base]\ndataset = "har"\n[grid]\ndataset = ["digits", "mnist"]\n',
    "point.toml": '[grid]\nlr = [0.1]\n[[points]]\ndataset = "newsgroups20"\n',
}


@pytest.mark.parametrize(("arguments", "says"), QUICK.values(), ids=QUICK)
def test_missing_data_sets_help_and_version_cost_no_import(tmp_path, arguments, says):
    for name, text in SWEEPS.items():
        (tmp_path / name).write_text(text)
    places = {"FEDJAX_ASYNC_DATA": "nothing", "TFDS_DATA_DIR": "nothing", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=tmp_path,
        check=False,
        env=os.environ | places,
        capture_output=True,
        text=True,
    )
    *lines, imported = done.stderr.splitlines()
    assert imported == "imported"
    if says is None:
        assert done.returncode == 0 and lines == [] and done.stdout
    else:
        assert done.returncode == 2 and done.stdout == ""
        assert len(lines) == 1 and lines[0].startswith(f"fedjax-async: error: {says}")


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


def test_the_command_for_imported_data_can_be_given_to_a_shell(capsys, tmp_path):
    said = ok(capsys, "data", "import", "quadratic", "--out", str(tmp_path / "two words, one comma"))
    words = shlex.split(said.splitlines()[-1].removeprefix("run: "))
    assert data.load(words[words.index("--dataset") + 1]).name == "quadratic"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run --format svg,png", "format = 'svg,png': must be left out without a folder"),
        ("plan --title T", "title = 'T': must be left out without --gantt"),
        ("plan --width page", "width = 'page': must be left out without --gantt"),
        ("sweep f.toml --collect --keep-best", "keep_best = True: must be left out with --collect"),
        ("sweep f.toml --collect --stream csv", "stream = ('csv',): must be left out with --collect"),
        ("sweep f.toml --collect --lanes 2", "lanes = 2: must be left out with --collect"),
        ("sweep f.toml --collect --overwrite", "overwrite = True: must be left out with --collect"),
    ],
)
def test_flags_without_effect_are_refused(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f.toml").write_text("[base]\nupdates = 6\n[grid]\nlr = [0.02, 0.1]\n")
    assert message in refused(capsys, *words.split())
