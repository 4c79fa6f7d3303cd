"""Wrong calls of the command line: each ends early, with 2 and one line that names the flag or field."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedjax_async import cli
from tests.cli.called import refused

SMALL = ("--model", "logistic", "--clients", "4")
SHORT = (*SMALL, "--updates", "8", "--steps", "1")
OUT = (*SHORT, "--out", "runs")


WRONG = [
    (("run", "--lr", "0.1", "--lr", "0.2"), "--lr 0.2: must be given once, not twice (see fedjax-async run --help)"),
    (("run", "--lr=0.1", "--lr", "0.1"), "--lr 0.1: must be given once"),
    (("sweep", "a.toml", "--out", "x", "--out", "y"), "--out y: must be given once"),
    (("data", "fetch", "mnist", "--data-dir", "x", "--data-dir", "y"), "--data-dir y: must be given once"),
    (("run", "--format", "png", "--format", "pdf"), "--format ('pdf',): must be given once"),
    (("run", "--clints", "3"), "unrecognized arguments: --clints 3; did you mean --clients?"),
    (("run", "--rounds", "5"), "unrecognized arguments: --rounds 5; did you mean --server-steps?"),
    (("run", "--num_clients=5"), "did you mean --clients?"),
    (("run", "--learning-rate", "0.1"), "did you mean --lr?"),
    (("run", "--rondus", "5"), "did you mean --server-steps?"),
    (("run", "--fraction-fit", "0.1"), "did you mean --timing cohort:size=5?"),
    (("run", "-lr", "0.1"), "did you mean --lr?"),
    (("run", "lr=0.1"), "did you mean --lr?"),
    (("run", "fedbuff@every"), "did you mean --method fedbuff@every?"),
    (("run", "--gpu", "0"), "JAX chooses the device; the environment variable JAX_PLATFORMS"),
    (("run", "--gibberish"), "--gibberish; the nearest names are --metrics, --engine, --global-tests (see"),
    (("run", "--seeds", "3"), "--seeds 3; --seeds is a flag of compare: fedjax-async compare ... --seeds 3 (see"),
    (("run", "--gantt", "x.png"), "--gantt is a flag of plan: fedjax-async plan ... --gantt x.png"),
    (("run", "--mixing", "0.4"), "it is an option of the method, as in --method fedasync:mixing=0.4"),
    (("plan", "--method", "fedbuff:clip=1", "--size", "5"), "as in --method fedbuff:clip=1@buffer:size=5"),
    (("compare", "fedavg", "fedasync", "--mixing", "0.4"), "option of the method, as in fedasync:mixing=0.4"),
    (("compare", "fedavg", "--method", "fedasync"), "the methods are given without a flag: fedjax-async compare fed"),
    (("sweep", "a.toml", "--rounds", "5"), "server_steps stands in FILE.toml: a setting under [base]"),
    (("sweep", "a.toml", "--seeds", "5"), "seeds stands in FILE.toml"),
    (("resume", "x", "--updates", "9"), "a run is continued with the settings that its folder has"),
    (
        ("run", "--compress", "topk", "--ratio", "0.1"),
        "an option of the setting compress, as in --compress topk:ratio=0.1",
    ),
    (("run", "--method", "fedbuff", "--k", "10"), "an option of the timing, as in --method fedbuff@buffer:size=10"),
    (("Train",), "argument COMMAND: unknown 'Train'; did you mean run?"),
    (("train",), "argument COMMAND: unknown 'train'; did you mean run? (known: quickstart, run, resume"),
    (("comapre", "fedavg"), "argument COMMAND: unknown 'comapre'; did you mean compare?"),
    (("help",), "argument COMMAND: unknown 'help'; did you mean --help?"),
    (("data", "ftech", "mnist"), "argument ACTION: unknown 'ftech'; did you mean fetch? (known: list, fetch"),
    (("run", "--per-client", "yes"), "unrecognized arguments: yes; a flag without a NAME or N in --help"),
    (("run", "extra"), "unrecognized arguments: extra (see fedjax-async run --help)"),
    (("--versions",), "unrecognized arguments: --versions; did you mean --version?"),
    (("run", "--lr", "\u0661"), "argument --lr: invalid float value: '\u0661'"),
    (("run", "--lr", "1_0"), "argument --lr: invalid float value: '1_0'"),
    (("run", "--clients", "\u0664"), "argument --clients: invalid int value: '\u0664'"),
    (("run", "--out", "a\nb"), "argument --out: must be the name of a folder, without control characters"),
    (("run", "--stream", "csv,csv"), "argument --stream: must be different names, not csv,csv"),
    (("resume", ""), "argument DIR: must be the name of a folder"),
    (("plan", "--gantt", ""), "argument --gantt: must be the name of a file"),
    (("report", "a", "--out", ""), "argument --out: must be the name of a file"),
    # kinds, data sets and folders
    (("list", "method"), "did you mean 'methods'?"),
    (("data", "fetch", "digits"), "known: mnist"),
    (("report", "file"), "folder = 'file': must hold a finished run"),
    (("data", "list", "--data-dir", "file"), "data_dir = 'file': must be a folder"),
    (("run", "--overwrite", *SMALL), "overwrite = True: must be left out without a folder (--out)"),
    (("run", "--keep-best", *SMALL), "keep_best = True: must be left out without a folder (--out)"),
    (("run", "--title", "One", *SMALL), "title = 'One': must be left out without a folder (--out)"),
    (("run", "--no-plots", *SMALL), "no_plots = True: must be left out without a folder"),
    (("run", "--no-plots", *OUT, "--title", "T"), "title = 'T': must be left out with --no-plots"),
    (("run", "--no-plots", *OUT, "--format", "pdf"), "must be left out with --no-plots"),
    # comparisons
    (("compare", "fedavg", "asgd", "--seeds", "9" * 13), "seeds = 9999999999999: must be a whole number from 1 to"),
    (("compare", "asgd", "asgd:", *SMALL), "two have the same name and options"),
    (("compare", "fedbuff@buffer:size=2", "fedbuff@buffer:size=02"), "two have the same name and options"),
    (("compare", "fedasync", "fedbuf", *OUT), "did you mean 'fedbuff'?"),
    (("compare", "asgd", "asgd", *OUT), "different from each other"),
    (("compare", "asgd", "--baseline", "fedavg", *OUT), "baseline = 'fedavg': must be one of asgd"),
    (
        ("compare", "asgd", "--target", "fedavg", *OUT),
        "target = 'fedavg': must be an accuracy in (0, 1], a share such as",
    ),
    (("compare", "asgd", "--seeds", "0", *OUT), "seeds = 0"),
    # runs that have no sense
    (("run", *SHORT, "--eval-at", "1e9"), "eval_at = '1e9': must be times with at least one in the run, which ends af"),
    (("run", *SHORT, "--delay", "constant:mean=1e308"), "delays: the jobs of client 0 are too long: their times are n"),
    (("run", *SHORT, "--availability", "sessions:on=1e-9,off=1e9"), "availability: of the last 1000"),
    (("run", *SHORT, "--method", "fedasync:mixing=0_5"), "mixing = '0_5': must be"),
    (("run", *SHORT, "--lr", "0.1", "--update", "9"), "unrecognized arguments: --update 9; did you mean --updates?"),
]


@pytest.mark.parametrize(("arguments", "says"), WRONG, ids=lambda item: " ".join(item) if type(item) is tuple else "")
def test_a_wrong_call_is_one_line_and_leaves_nothing_behind(capsys, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("no folder")
    assert says in refused(capsys, *arguments)
    assert [path.name for path in Path().iterdir()] == ["file"]


def test_lists_and_flags_without_a_value_may_be_repeated():
    parse = cli.parser().parse_args
    assert parse(["run", "--plugin", "a.py", "--plugin", "b.py", "--quiet", "--quiet"]).plugin == ["a.py", "b.py"]
    assert parse(["compare", "fedavg", "asgd", "--lr", "0.1"]).methods == ["fedavg", "asgd"]
    for _ in range(2):  # a call does not depend on the one before
        assert parse(["run", "--lr", "0.1"]).lr == 0.1


MANY = "9" * 300
SETTINGS = [
    (
        ("--time", "1000", "--eval-time", "1e-9"),
        "eval_time = 1e-09: must be 0.001 or more in a run of 1000, for at most",
    ),
    (("--time", "1000", "--eval-time", "1e-300"), "instead of 1e+303"),
    (("--time", "1000", "--updates", "5", "--eval-time", "1e-9"), "eval_time = 1e-09: must be"),
    (("--updates", "3000000000", "--eval-updates", "2"), "eval_updates = 2: must be 3000 or more"),
    (("--server-steps", "2000000", "--eval-steps", "1"), "eval_steps = 1: must be 2 or more"),
    (("--eval-time", "5", "--eval-at", "1"), "eval_time = 5.0, eval_at = 1: give at most one of the four"),
    (("--eval-at", ""), "eval_at = '': must be"),
    (("--epochs", "1", "--steps", "2"), "give at most one of the two"),
    (("--time", "1e-9", "--delay", "constant"), "time = 1e-09: must be at least 1.0, when"),
    (("--eval-time", "5", "--eval-steps", "2"), "at most one of"),
    (("--per-client",), "test_fraction"),
    (("--updates", "1" + "0" * 13), "updates = 1e+13: must end within"),
    (("--time", "1e300"), "time = 1e+300: must end within"),
    (("--updates", MANY), "(300 characters): must be a whole number from 1 to 9223372036854775807"),
    (("--clients", MANY), "(300 characters): must be a whole number from 1 to"),
    (("--clients", "100000"), "error: clients = 100000: must be at most the number of examples, 5000"),
    (("--dataset", "quadratic"), "model = 'logistic': must be such as linear: the targets of the data set are numbers"),
    (("--model", "minilm_lora"), "model = 'minilm_lora': does not fit the data; input_shape"),
    (
        ("--model", "mlp:hidden=1000000000"),
        "model = 'mlp:hidden=1000000000': must be of at most a quarter of the device's",
    ),
    (("--partition", "natural"), "error: partition = 'natural': needs groups"),
    (("--timing", ""), "timing = '': must be a text such as 'buffer:size=5'"),
    (("--availability", ""), "availability = '': must be a text such as 'sessions:on=600,off=300'"),
    (("--late", "drop"), "late = 'drop': must be left out without a timeout"),
    (("--devices", "1000"), "devices = 1000: must be a whole number from 1 to"),
    (("--delay", "lognormal:heterogeneity=1000"), "heterogeneity = 1000: must be between 0 and 10"),
    (("--availability", "sessions:on=1e-12,off=1e-12"), "sessions of 1e-12 s on, 1e-12 s off: must be longer"),
    (("--availability", "periodic:on=1e-9,off=1e-9,leaving=pause"), "pauses more than 1,000,000 times"),
    (("--dataset", "population", "--clients", "50000000"), "error: clients = 50000000: must be at most about"),
]


@pytest.mark.parametrize(
    ("arguments", "says"), SETTINGS, ids=lambda item: " ".join(item)[:60] if type(item) is tuple else ""
)
def test_settings_that_cannot_be_used(capsys, arguments, says):
    base = {flag: value for flag, value in zip(SMALL[::2], SMALL[1::2]) if flag not in arguments}
    assert says in refused(capsys, "plan", *(part for pair in base.items() for part in pair), *arguments)


def test_a_memory_error_is_one_line_and_keeps_the_checkpoint(capsys, tmp_path, monkeypatch):
    """The device fails after the first checkpoint; the message says how to save memory and how to continue."""
    import jax

    def exhausted(*given, **options):
        (tmp_path / "one" / "checkpoints" / "1.npz").write_bytes(b"")
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes.\nmore\nlines")

    monkeypatch.setattr("fedjax_async.config.prepared.run_member", exhausted)
    command = ("run", *SMALL, "--steps", "1", "--updates", "2", "--quiet", "--checkpoint", "1")
    said = refused(capsys, *command, "--out", str(tmp_path / "one"))
    assert "device memory: exhausted (RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes); use less with" in said
    assert all(knob in said for knob in ("max_width", "remat", "memory_limit", "fewer runs", "fedjax-async resume"))
    assert (tmp_path / "one" / "checkpoints" / "1.npz").exists()
