"""The command line from the outside: what it writes, and one line on standard error for unusable input."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedjax_async import METHODS, cli, registry
from fedjax_async.cli import flags, listing
from fedjax_async.results import final_value, load

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--model", "logistic", "--clients", "4", "--updates", "6", "--steps", "2", "--quiet")


def ok(capsys, *arguments: str, warned: str = "") -> str:
    """Standard output of a command that must succeed, with one line on standard error if it is ``warned``."""
    assert cli.main(arguments) == 0
    done = capsys.readouterr()
    assert done.err.count("\n") == bool(warned) and warned in done.err
    return done.out


def refused(capsys, *arguments: str) -> str:
    """The one line on standard error of a command that must end with 2 before it does anything."""
    assert cli.main(arguments) == 2
    done = capsys.readouterr()
    assert done.out == "" and done.err.count("\n") == 1 and done.err.startswith("fedjax-async: error: ")
    return done.err


# --- what works ---------------------------------------------------------------------------------


def test_run_saves_a_folder(capsys, tmp_path):
    folder = tmp_path / "one"
    out = ok(capsys, "run", *SMALL, "--method", "fedbuff:server_lr=0.5@buffer:size=2", "--out", str(folder))
    assert "fedbuff:server_lr=0.5@buffer:size=2: accuracy" in out and "6 updates, 3 server steps" in out
    assert {"accuracy.png", "staleness.png", "gantt.png"} <= {path.name for path in folder.iterdir()}
    run = load(folder)
    assert run.settings["method"] == "fedbuff:server_lr=0.5@buffer:size=2" and run.settings["clients"] == 4
    assert run.counters["updates"] == 6 and run.counters["server_steps"] == 3
    scores = {final: [final_value(run, name, final) for name in ("accuracy", "loss")] for final in ("tail", "last")}
    texts = {final: f"accuracy {100 * scores[final][0]:.2f} %, loss {scores[final][1]:.4f}" for final in scores}
    assert f"{texts['tail']} (mean of last tenth) after 6 updates" in out
    assert f"last of {len(run.evaluations['time'])} evaluations: {texts['last']}\n" in out


def test_a_folder_of_other_settings_is_not_overwritten_unless_told(capsys, tmp_path):
    command = ("run", *SMALL, "--out", str(tmp_path / "one"))
    ok(capsys, *command)
    first = (tmp_path / "one" / "params.npz").read_bytes()
    ok(capsys, *command)  # the same run again gives the same bytes
    assert (tmp_path / "one" / "params.npz").read_bytes() == first
    assert "overwrite" in refused(capsys, *command, "--lr", "0.1")  # refused before training, so without output
    assert (tmp_path / "one" / "params.npz").read_bytes() == first
    ok(capsys, *command, "--lr", "0.1", "--overwrite")
    assert load(tmp_path / "one").settings["lr"] == 0.1


@pytest.mark.slow
def test_the_engines_agree(capsys, tmp_path):
    for engine in ("waves", "reference"):
        ok(capsys, "run", *SMALL, "--engine", engine, "--out", str(tmp_path / engine))
    waves, reference = load(tmp_path / "waves"), load(tmp_path / "reference")
    np.testing.assert_array_equal(waves.updates["staleness"], reference.updates["staleness"])
    np.testing.assert_allclose(waves.params["output"]["kernel"], reference.params["output"]["kernel"], atol=1e-5)


def test_float64_is_float64(capsys, tmp_path):
    ok(capsys, "run", *SMALL, "--compute", "float64", "--out", str(tmp_path))
    with np.load(tmp_path / "params.npz") as params:
        assert {params[name].dtype.name for name in params.files} == {"float64"}


@pytest.mark.slow
def test_uploads_are_compressed_where_asked_for_or_usual(capsys, tmp_path):
    ok(capsys, "run", *SMALL, "--compress", "topk:ratio=0.2", "--feedback", "ef21", "--out", str(tmp_path / "one"))
    run = load(tmp_path / "one")
    assert run.settings["compress"] == "topk:ratio=0.2" and run.settings["compress_per"] == "whole"
    assert run.evaluations["values_bytes_up"][-1] == run.updates["upload_values_bytes"].sum() == 6 * 4 * 1570
    compressed = ("--compress", "topk:ratio=0.2", "--out", str(tmp_path / "two"))
    out = ok(capsys, "compare", "asynflc", "fedasync", *SMALL, *compressed, warned="asynflc seed 0: 1 upload came")
    assert "4 clients, dirichlet:alpha=0.1, rpi" in out
    for method, feedback in (("asynflc", "off"), ("fedasync", "ef")):  # each method fills in its own default
        saved = load(tmp_path / "two" / "runs" / method / "seed_0")
        assert saved.settings["feedback"] == feedback and saved.settings["compress"] == "topk:ratio=0.2"


def test_compare_writes_table_and_picture(capsys, tmp_path):
    methods = ("fedavg@cohort:size=2", "fedasync:mixing=0.3")
    out = ok(capsys, "compare", *methods, *SMALL, "--seeds", "2", "--out", str(tmp_path))
    assert "2 seed(s)" in out and "fedasync:mixing=0.3" in out
    assert {"comparison.csv", "comparison.md", "accuracy.png", "runs"} == {path.name for path in tmp_path.iterdir()}
    header, *rows = (tmp_path / "comparison.csv").read_text().splitlines()
    assert (
        header.startswith('method,"accuracy, mean of last tenth (%)","accuracy, mean of last tenth (%) std"')
        and len(rows) == 2
    )
    assert "relative to fedavg@cohort:size=2" in header  # the first, since none is called fedavg
    saved = load(tmp_path / "runs" / "fedasync_mixing_0.3" / "seed_1")
    assert saved.settings["seed"] == 1 and saved.settings["method"] == "fedasync:mixing=0.3"


def test_compare_shows_the_final_value_that_is_asked_for(capsys, tmp_path):
    asked = ("--final", "best", "--interval", "bootstrap", "--format", "svg,pdf", "--width", "column", "--title", "Two")
    out = ok(capsys, "compare", "fedasync", "asgd", *SMALL, "--seeds", "3", *asked, "--out", str(tmp_path))
    names = {"comparison.csv", "comparison.md", "pairs.csv", "pairs.md", "accuracy.svg", "accuracy.pdf", "runs"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert "accuracy, best (%)" in out and "95% interval (bootstrap)" in out and "Wilcoxon" in out
    header = (tmp_path / "comparison.csv").read_text().splitlines()[0]
    assert all(f"accuracy, {way} (%)" in header for way in ("best", "mean of last tenth", "last"))
    assert "comparison.md, pairs.csv, pairs.md, pictures" in out


def test_pictures_of_a_finished_run_are_drawn_in_other_formats(capsys, tmp_path):
    command = ("run", *SMALL, "--out", str(tmp_path))
    ok(capsys, *command)
    assert "finished already" in ok(capsys, *command, "--format", "svg", "--title", "Later")
    assert b"Later" in (tmp_path / "accuracy.svg").read_bytes() and (tmp_path / "accuracy.png").exists()


@pytest.mark.parametrize("command", [("compare", "asgd"), ("quickstart",), ("sweep", "nothing.toml")])
@pytest.mark.parametrize(
    "flags, says",
    [
        (
            ("--final", "first"),
            "final = 'first': must be last, best, tail (the mean of the last tenth of the evaluations)",
        ),
        (("--final", "tail:0"), "final = 'tail:0': must be last"),
        (("--interval", "normal"), "interval = 'normal': must be one of t, bootstrap"),
        (("--format", "png,gif"), "format = 'gif': must be one of png, pdf, svg"),
        (("--width", "wide"), "width = 'wide': must be one of column, page"),
    ],
)
def test_bad_finals_and_drawings_are_refused_before_the_work(capsys, monkeypatch, tmp_path, command, flags, says):
    monkeypatch.chdir(tmp_path)
    Path("nothing.toml").write_text("[base]\nupdates = 3\n")
    assert says in refused(capsys, *command, *flags)
    assert [path.name for path in Path().iterdir()] == ["nothing.toml"]


def test_quickstart_is_a_comparison_with_settings_of_its_own(capsys, tmp_path):
    # the same code with a smaller model and budget
    small = ("--model", "logistic", "--epochs", "0.1", "--time", "1500", "--eval-time", "500", "--seeds", "1")
    out = ok(
        capsys,
        "quickstart",
        *small,
        "--quiet",
        "--out",
        str(tmp_path),
        warned="fedbuff:server_lr=1@buffer:size=3 seed 0, ca2fl:server_lr=1@buffer:size=3 seed 0: 2 uploads",
    )
    lines = [line.split()[0] for line in out.splitlines() if line]
    assert [name for name in lines if name in flags.QUICKSTART_METHODS] == list(flags.QUICKSTART_METHODS)
    settings = json.loads(
        (tmp_path / "runs" / "fedbuff_server_lr_1_buffer_size_3" / "seed_0" / "settings.json").read_text()
    )
    assert settings["dataset"] == "fashion_mnist_6k" and settings["partition"] == "dirichlet:alpha=0.1"
    assert settings["time"] == 1500 and settings["updates"] is None


def test_plan_trains_nothing(capsys, tmp_path):
    picture = tmp_path / "deep" / "gantt.png"
    out = ok(capsys, "plan", "--clients", "4", "--updates", "40", "--delay", "constant", "--gantt", str(picture))
    figures = dict(line.split() for line in out.splitlines() if len(line.split()) == 2)
    assert "40 updates, 40 server steps" in out.splitlines()[0]
    assert figures["waves"] == figures["longest_chain"] == "10"  # equal delays: all four clients train together
    assert picture.read_bytes().startswith(b"\x89PNG")


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
    for kind in listing.REGISTRIES:
        assert f"{kind}:" in lines
        assert set(listing.entries(kind)) <= described, kind
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


def test_list_explains_every_name(capsys):
    for kind in listing.REGISTRIES:
        for name in listing.entries(kind):
            assert len(listing.explain(kind, name).splitlines()) >= 4, (kind, name)


def test_list_has_no_line_without_a_description(capsys, monkeypatch):
    monkeypatch.setitem(registry.ADDED, "delay", {"mine": registry.Addition(lambda *, mean: None, "")})
    assert ok(capsys, "list", "delays").splitlines()[-2] == f"  {'mine':<20} (its factory has no docstring)"
    assert ok(capsys, "list", "clients").splitlines()[:2] == ["clients:", "  (none; a plugin may register some)"]
    assert all(len(line.split()) > 1 for line in ok(capsys, "list").splitlines() if line.startswith("  "))


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

BAD = {
    "an unknown method, with the nearest": (("--method", "fedasink"), "did you mean 'fedasync'?"),
    "an unknown delay": (("--delay", "lognormel"), "did you mean 'lognormal'?"),
    "an unknown timing": (("--timing", "bufer"), "did you mean 'buffer'?"),
    "an unknown timing of a method": (("--method", "fedbuff@cohorte"), "did you mean 'cohort'?"),
    "an unknown data set": (("--dataset", "fashion_mnist_6"), "did you mean 'fashion_mnist_6k'?"),
    "an unknown partition": (("--partition", "dirichlett"), "did you mean 'dirichlet'?"),
    "an unknown model": (("--model", "lenet"), "did you mean 'lenet5'?"),
    "an unknown optimizer": (("--optimizer", "adm"), "did you mean 'adam'?"),
    "an unknown decay": (("--decay", "cosin"), "did you mean 'cosine'?"),
    "an unknown option of a name": (("--method", "fedasync:mixin=0.5"), "did you mean 'mixing'?"),
    "an option without a value": (("--delay", "constant:mean"), "key=value"),
    "a partition's number without its name": (("--partition", "dirichlet:0.3"), "as in dirichlet:alpha=0.3 (options:"),
    "a fault's number without its name": (
        ("--faults", "drop:0.1"),
        "as in drop:probability=0.1 (options: probability)",
    ),
    "a data set's path without its name": (("--dataset", "parquet:a.parquet"), "as in parquet:path=a.parquet (options"),
    "a comma in a path": (("--delay", "csv:path=a,b.csv"), '; a value that has a comma is quoted: path="a,b.csv"'),
    "a negative delay": (("--delay", "constant:mean=-1"), "mean = -1: must be a finite number > 0"),
    "a delay of zero": (("--delay", "lognormal:mean=0"), "mean = 0: must be a finite number > 0"),
    "a negative alpha": (("--partition", "dirichlet:alpha=-0.1"), "alpha = -0.1: must be a finite number > 0"),
    "an alpha of zero": (("--partition", "dirichlet:alpha=0"), "alpha = 0: must be a finite number > 0"),
    "more clients than examples": (("--clients", "5001", "--partition", "iid"), "at most the number of examples, 5000"),
    "no clients": (("--clients", "0"), "clients = 0: must be a whole number >= 1"),
    "a buffer that never fills": (("--timing", "buffer:size=5"), "at most the 4 clients in flight"),
    "a buffer above the concurrency": (("--timing", "buffer:size=3,concurrency=2"), "at most the 2 clients in flight"),
    "an empty cohort": (("--timing", "cohort:size=0"), "size = 0: must be a whole number >= 1"),
    "a cohort of too many": (("--timing", "cohort:size=5"), "at most 4, the number of clients"),
    "both epochs and steps": (("--epochs", "1"), "give at most one of the two"),
    "a learning rate of zero": (("--lr", "0"), "lr = 0.0: must be a finite number > 0"),
    "a learning rate that is none": (("--lr", "nan"), "lr = nan: must be a finite number > 0"),
    "a budget of nothing": (("--updates", "0"), "updates = 0: must be a whole number >= 1"),
    "a budget too small for one upload": (
        ("--time", "1e-9", "--delay", "constant"),
        "time = 1e-09: must be at least 1.0, when",
    ),
    "two kinds of evaluation": (("--eval-time", "5", "--eval-steps", "2"), "at most one of"),
    "per-client evaluation without test parts": (("--per-client",), "test_fraction"),
    "a mixing weight above one": (("--method", "fedasync:mixing=1.5"), "mixing = 1.5: must be between 0.0 and 1.0"),
}


@pytest.mark.parametrize(("arguments", "says"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line(capsys, arguments, says):
    pairs = zip(SMALL[:-1:2], SMALL[1::2])  # a flag is given once
    small = [part for pair in pairs if pair[0] not in arguments for part in pair]
    assert says in refused(capsys, "run", *(small[:4] if "--time" in arguments else small), *arguments)


HOLES = {
    "an empty cell": ("device,mean,std\na,3,1\nb,,1\n", "line 3, column 'mean': empty"),
    "a missing cell": ("device,mean,std\na,3\n", "line 2: 2 cells for 3 columns"),
    "a word": ("device,mean,std\na,fast,1\n", "line 2, column 'mean': 'fast' must be a finite number > 0"),
    "a missing client": ("client,mean,std\n0,3,1\n1,3,1\n3,3,1\n", "no line for client 2 of 4"),
}


@pytest.mark.parametrize(("text", "says"), HOLES.values(), ids=HOLES)
def test_a_table_of_delays_with_holes(capsys, tmp_path, text, says):
    (tmp_path / "delays.csv").write_text(text)
    assert says in refused(capsys, "run", *SMALL, "--delay", f"csv:path={tmp_path / 'delays.csv'}")


def test_a_missing_data_set_is_named(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDJAX_ASYNC_DATA", str(tmp_path))
    assert "fedjax-async data fetch mnist" in refused(capsys, "run", *SMALL, "--dataset", "mnist")
    assert "fedjax-async data fetch cifar10" in refused(capsys, "data", "verify", "cifar10")


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


def test_compression_that_does_nothing_is_refused(capsys):
    assert "did you mean 'topk'?" in refused(capsys, "run", *SMALL, "--compress", "top_k:ratio=0.1")
    assert "feedback = 'ef': must be left out without compress" in refused(capsys, "run", *SMALL, "--feedback", "ef")


def test_compare_looks_at_everything_first(capsys, tmp_path):
    small = (*SMALL, "--out", str(tmp_path / "runs"))
    assert "did you mean 'fedbuff'?" in refused(capsys, "compare", "fedasync", "fedbuf", *small)
    assert "different from each other" in refused(capsys, "compare", "asgd", "asgd", *small)
    assert "baseline = 'fedavg': must be one of asgd" in refused(
        capsys, "compare", "asgd", "--baseline", "fedavg", *small
    )
    assert "target = 'fedavg': must be an accuracy in (0, 1], a share such as 95%, or one of asgd" in refused(
        capsys, "compare", "asgd", "--target", "fedavg", *small
    )
    assert "seeds = 0" in refused(capsys, "compare", "asgd", "--seeds", "0", *small)
    (tmp_path / "file").write_text("not a folder")
    assert "not a file" in refused(capsys, "compare", "asgd", *SMALL, "--out", str(tmp_path / "file"))
    assert not (tmp_path / "runs").exists()


def test_what_the_operating_system_refuses_is_one_line_too(capsys, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    assert cli.main(["plan", *SMALL[:-1], "--gantt", str(tmp_path / "file" / "gantt.png")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("run", "--clints", "3"),
        ("run", "--clients", "three"),
        ("compare",),
        ("run", "--out", ""),
        ("sweep", "a.toml", "--out", ""),
    ],
)
def test_flags_that_do_not_exist_are_usage_errors(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2 and "error:" in capsys.readouterr().err


def test_unknown_kinds_and_data_sets(capsys):
    assert "did you mean 'methods'?" in refused(capsys, "list", "method")
    assert "known: mnist" in refused(capsys, "data", "fetch", "digits")


def test_a_reader_that_has_seen_enough_is_no_error():
    command = [sys.executable, "-m", "fedjax_async", "list", "--options"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == 0


def test_an_output_without_unicode_shows_what_it_can(monkeypatch):
    """As under LC_ALL=C without Python's UTF-8 mode: a table with ± must not end a command after its work."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", stream)
    name = b"caf\xc3\xa9".decode("ascii", "surrogateescape")
    action = argparse.Namespace(action=lambda arguments: print(f"1 ± 2, é, {name}"))
    monkeypatch.setattr(cli, "parser", lambda: argparse.Namespace(parse_args=lambda argv: action))
    assert cli.main([]) == 0
    assert stream.buffer.getvalue() == b"1 +- 2, \\xe9, caf\xc3\xa9\n"
