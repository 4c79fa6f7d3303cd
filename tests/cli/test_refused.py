"""Wrong calls of the command line: each ends early, with 2 and one line that names the flag, field or file."""

import shlex
from pathlib import Path

import jax
import pytest

from fedjax_async import cli
from fedjax_async.clock import job_outcomes
from fedjax_async.config import sweeping
from fedjax_async.results import save
from tests.cli.called import refused
from tests.results.made_up import make_run
from tests.results.test_claim import never

SMALL = "--model logistic --clients 4"
SHORT = f"{SMALL} --updates 8 --steps 1"
OUT = f"{SHORT} --out runs"
PLAN = "plan --clients 4"
LOGISTIC = f"{PLAN} --model logistic --steps 2"
LONG = f"{LOGISTIC} --updates 6"
MANY = "9" * 300
OUTLESS = {
    "--overwrite": "overwrite = True",
    "--keep-best": "keep_best = True",
    "--format svg,png": "format = 'svg,png'",
}
TRAINING = {
    "--stream csv": "stream = ('csv',)",
    "--lanes 2": "lanes = 2",
    "--overwrite": "overwrite = True",
    "--dry-run": "dry_run = True",
    "--submit=local": "submit = 'local'",
    "--keep-best": "keep_best = True",
}
SIZES = ("4 elephants", "GB", "0GB", "-1GB", "")
FINALS = "must be last, best, tail (the mean of the last tenth of the evaluations)"
OF_FILE = "must be a TOML file of settings, or the settings.json of a saved run; "

CALLS = [
    ("run --lr 0.1 --lr 0.2", "--lr 0.2: must be given once, not twice (see fedjax-async run --help)"),
    ("run --lr=0.1 --lr 0.1", "--lr 0.1: must be given once"),
    ("sweep a.toml --out x --out y", "--out y: must be given once"),
    ("data fetch mnist --data-dir x --data-dir y", "--data-dir y: must be given once"),
    ("run --format png --format pdf", "--format ('pdf',): must be given once"),
    ("run --clints 3", "unrecognized arguments: --clints 3; did you mean --clients?"),
    ("run --rounds 5", "unrecognized arguments: --rounds 5; did you mean --server-steps?"),
    ("run --num_clients=5", "did you mean --clients?"),
    ("run --learning-rate 0.1", "did you mean --lr?"),
    ("run --rondus 5", "did you mean --server-steps?"),
    ("run --fraction-fit 0.1", "did you mean --timing cohort:size=5?"),
    ("run -lr 0.1", "did you mean --lr?"),
    ("run lr=0.1", "did you mean --lr?"),
    ("run fedbuff@every", "did you mean --method fedbuff@every?"),
    ("run --gpu 0", "JAX chooses the device; the environment variable JAX_PLATFORMS"),
    ("run --gibberish", "--gibberish; the nearest names are --metrics, --engine, --global-tests (see"),
    ("run --seeds 3", "--seeds 3; --seeds is a flag of compare: fedjax-async compare ... --seeds 3 (see"),
    ("run --gantt x.png", "--gantt is a flag of plan: fedjax-async plan ... --gantt x.png"),
    ("run --mixing 0.4", "it is an option of the method, as in --method fedasync:mixing=0.4"),
    ("plan --method fedbuff:clip=1 --size 5", "as in --method fedbuff:clip=1@buffer:size=5"),
    ("compare fedavg fedasync --mixing 0.4", "option of the method, as in fedasync:mixing=0.4"),
    ("compare fedavg --method fedasync", "the methods are given without a flag: fedjax-async compare fed"),
    ("sweep a.toml --rounds 5", "server_steps stands in FILE.toml: a setting under [base]"),
    ("sweep a.toml --seeds 5", "seeds stands in FILE.toml"),
    ("resume x --updates 9", "a run is continued with the settings that its folder has"),
    ("run --compress topk --ratio 0.1", "an option of the setting compress, as in --compress topk:ratio=0.1"),
    ("run --method fedbuff --k 10", "an option of the timing, as in --method fedbuff@buffer:size=10"),
    ("Train", "argument COMMAND: unknown 'Train'; did you mean run?"),
    ("train", "argument COMMAND: unknown 'train'; did you mean run? (known: quickstart, run, resume"),
    ("comapre fedavg", "argument COMMAND: unknown 'comapre'; did you mean compare?"),
    ("help", "argument COMMAND: unknown 'help'; did you mean --help?"),
    ("data ftech mnist", "argument ACTION: unknown 'ftech'; did you mean fetch? (known: list, fetch"),
    ("run --per-client yes", "unrecognized arguments: yes; a flag without a NAME or N in --help"),
    ("run extra", "unrecognized arguments: extra (see fedjax-async run --help)"),
    ("--versions", "unrecognized arguments: --versions; did you mean --version?"),
    ("run --lr \u0661", "argument --lr: invalid float value: '\u0661'"),
    ("run --lr 1_0", "argument --lr: invalid float value: '1_0'"),
    ("run --clients \u0664", "argument --clients: invalid int value: '\u0664'"),
    ("run --out 'a\nb'", "argument --out: must be the name of a folder, without control characters"),
    ("run --stream csv,csv", "argument --stream: must be different names, not csv,csv"),
    ("resume ''", "argument DIR: must be the name of a folder"),
    ("plan --gantt ''", "argument --gantt: must be the name of a file"),
    ("report a --out ''", "argument --out: must be the name of a file"),
    # kinds, data sets and folders
    ("list methodss", "did you mean 'methods'?"),
    ("plan --partition dirichlet=0.3", "options follow a colon, as in dirichlet:OPTION=VALUE"),
    ("list methods orthofll", "method = 'orthofll': unknown; did you mean 'orthofl'?"),
    ("data fetch digits", "known: mnist"),
    ("report file", "folder = 'file': must hold a finished run"),
    ("data list --data-dir file", "data_dir = 'file': must be a folder"),
    ("resume begun", "but a sweep or comparison goes on when its command is given once more"),
    ("resume cut", "cut off before it began: give the command that began it once more"),
    ("resume empty", "begun with --checkpoint"),
    ("resume none", "there is no such folder"),
    ("resume done", "is finished"),
    # flags without effect
    (f"run --title One {SMALL}", "title = 'One': must be left out without a folder (--out)"),
    *((f"run {flag} {SMALL}", f"{of}: must be left out without a folder (--out)") for flag, of in OUTLESS.items()),
    (f"run --no-plots {OUT} --title T", "title = 'T': must be left out with --no-plots"),
    (f"run --no-plots {OUT} --format pdf", "must be left out with --no-plots"),
    ("plan --title T", "title = 'T': must be left out without --gantt"),
    ("plan --width page", "width = 'page': must be left out without --gantt"),
    (f"{LONG} --until 50", "until = 50.0: must be left out without --gantt"),
    *((f"sweep f.toml --collect {flag}", f"{of}: must be left out with --collect") for flag, of in TRAINING.items()),
    # final values and drawings
    *((f"{command} --final first", f"final = 'first': {FINALS}") for command in ("compare asgd", "quickstart")),
    ("sweep f.toml --final tail:0", "final = 'tail:0': must be last"),
    ("compare asgd --format png,gif", "format = 'gif': must be one of png, pdf, svg"),
    ("quickstart --format png,gif", "format = 'gif': must be one of png, pdf, svg"),
    ("sweep f.toml --width wide", "width = 'wide': must be one of column, page"),
    (f"{LONG} --gantt a.png --since 4 --until 3", "until = 3.0: must be more than since = 4 s"),
    (f"{LONG} --gantt a.png --until -1", "until = -1.0: must be a finite number > 0"),
    # comparisons
    ("compare", "methods = []: must be at least one METHOD"),
    (f"compare fedavg asgd --seeds {'9' * 13}", "seeds = 9999999999999: must be a whole number from 1 to"),
    (f"compare asgd asgd: {SMALL}", "two have the same name and options"),
    ("compare fedbuff@buffer:size=2 fedbuff@buffer:size=02", "two have the same name and options"),
    (f"compare fedasync fedbuf {OUT}", "did you mean 'fedbuff'?"),
    (f"compare asgd asgd {OUT}", "different from each other"),
    (f"compare asgd --baseline fedavg {OUT}", "baseline = 'fedavg': must be one of asgd"),
    (f"compare asgd --target fedavg {OUT}", "target = 'fedavg': must be an accuracy in (0, 1], a share such as"),
    (f"compare asgd --seeds 0 {OUT}", "seeds = 0"),
    # sweeps
    ("sweep none.toml", "must be a TOML file"),
    *((f"sweep f.toml --memory-limit='{size}'", "a size such as 4GB") for size in SIZES),
    ("sweep f.toml --target 3", "target = 3.0: must be between 0 and 1"),
    ("sweep f.toml --lanes 0", "lanes = 0"),
    ("sweep f.toml --submit slurn", "did you mean 'slurm'?"),
    ("sweep f.toml --out out --collect", "no sweep.json"),
    # settings
    (f"run {SHORT} --eval-at 1e9", "eval_at = '1e9': must be times with at least one in the run, which ends af"),
    (f"run {SHORT} --delay constant:mean=1e308", "delays: the jobs of client 0 are too long: their times are n"),
    (f"run {SHORT} --availability sessions:on=1e-9,off=1e9", "availability: of the last 1000"),
    (f"run {SHORT} --method fedasync:mixing=0_5", "mixing = '0_5': must be"),
    (f"run {SHORT} --lr 0.1 --update 9", "unrecognized arguments: --update 9; did you mean --updates?"),
    (f"{LOGISTIC} --time 1000 --eval-time 1e-9", "eval_time = 1e-09: must be 0.001 or more in a run of 1000, for"),
    (f"{LOGISTIC} --time 1000 --eval-time 1e-300", "instead of 1e+303"),
    (f"{LONG} --time 1000 --eval-time 1e-9", "eval_time = 1e-09: must be"),
    (f"{LOGISTIC} --updates 3000000000 --eval-updates 2", "eval_updates = 2: must be 3000 or more"),
    (f"{LOGISTIC} --server-steps 2000000 --eval-steps 1", "eval_steps = 1: must be 2 or more"),
    (f"{LONG} --eval-time 5 --eval-at 1", "eval_time = 5.0, eval_at = 1: give at most one of the four"),
    (f"{LONG} --eval-time 5 --eval-steps 2", "at most one of"),
    (f"{LONG} --eval-at ''", "eval_at = '': must be"),
    (f"{LONG} --epochs 1", "give at most one of the two"),
    (f"{LONG} --time 1e-9 --delay constant", "time = 1e-09: must be at least 1.0, when"),
    (f"{LONG} --per-client", "test_fraction"),
    (f"{LOGISTIC} --updates 1{'0' * 13}", "updates = 1e+13: must end within"),
    (f"{LOGISTIC} --time 1e300", "time = 1e+300: must end within"),
    (f"plan --updates {MANY}", "(300 characters): must be a whole number from 1 to 9223372036854775807"),
    (f"plan --clients {MANY}", "(300 characters): must be a whole number from 1 to"),
    ("plan --clients 100000", "error: clients = 100000: must be at most the number of examples, 5000"),
    (f"{LONG} --dataset quadratic", "model = 'logistic': must be such as linear: the targets of the data set are num"),
    (f"{PLAN} --model minilm_lora", "model = 'minilm_lora': does not fit the data; input_shape"),
    (f"{PLAN} --model mlp:hidden=1000000000", "hidden=1000000000': must be of at most a quarter of the device's"),
    (f"{LONG} --partition natural", "error: partition = 'natural': needs groups"),
    (f"{LONG} --timing ''", "timing = '': must be a text such as 'buffer:size=5'"),
    (f"{LONG} --availability ''", "availability = '': must be a text such as 'sessions:on=600,off=300'"),
    (f"{LONG} --late drop", "late = 'drop': must be left out without a timeout"),
    (f"{LONG} --devices 1000", "devices = 1000: must be a whole number from 1 to"),
    (f"{LONG} --delay lognormal:heterogeneity=1000", "heterogeneity = 1000: must be between 0 and 10"),
    (f"{LONG} --availability sessions:on=1e-12,off=1e-12", "sessions of 1e-12 s on, 1e-12 s off: must be longer"),
    (f"{LONG} --availability periodic:on=1e-9,off=1e-9,leaving=pause", "pauses more than 10,000 times"),
    ("plan --dataset population --clients 50000000", "error: clients = 50000000: must be at most about"),
]

SWEEP = '[base]\nmodel = "logistic"\nupdates = 5\n'
GRID = "[grid]\nlr = [0.1]\n"
# command -> the text of the file that it reads, and what it says
FILES = {
    "run --config f.toml": [
        ("lrr = 0.1", "setting = 'lrr': unknown; did you mean 'lr'?"),
        ("lr = 'fast'", "lr = 'fast': must be a number"),
        ("seeds = 3", "seeds: is not a setting of a run but a flag of the command, --seeds"),
        ("out = 'x'", "out: is not a setting of a run but a flag of the command, --out"),
        ("methods = ['a']", "methods: must be left out in f.toml, because only compare has several methods"),
        ("[base]\nlr = 1", "base: is a table of a sweep; train f.toml with: fedjax-async sweep f.toml"),
        ("lr = [0.1, 0.2]", "lr = [0.1, 0.2]: must be a number"),
        ("lr 3", f"config = 'f.toml': {OF_FILE}"),
        ("dataset = 'mnistt'", "mnistt"),
        ("batch-size = 16\nbatch_size = 64", "batch-size = 16: must be given once"),
        ("method = 'pisces'\npolicy = 'none'", "policy = 'none': must be left out, since none is the method's own, p"),
    ],
    "run --config none.toml": [("", "config = 'none.toml': must be a TOML file"), ("", "there is no such file")],
    "run --config empty": [("", f"config = 'empty': {OF_FILE}it is a folder")],
    "run --config f.json": [('{"lrr": 1}', "lrr"), ("[1]", "config = 'f.json': must be")],
    "compare --quiet --config f.toml": [
        ("lr = 1", "methods = []: must be at least one METHOD"),
        ("methods = 'asgd'", "methods = 'asgd': must be a list of methods"),
        ("methods = [3]", "methods = [3]: must be a list of methods"),
        ("methods = ['asgd', 'asgd']", "methods = ['asgd', 'asgd']: must be different from each other"),
        ("[methods]\n'a/b' = 'asgd'", "label = 'a/b': must be 1 to 60"),
        ("method = 'asgd'\nmethods = ['asgd']", "method = 'asgd': must be left out in a file for compare"),
        ("method.mixing = 0.1\nmethods = ['asgd']", "method = {'mixing': 0.1}: must be left out in a file for com"),
        ("compress = 'none'\nmethods = ['asgd', 'asynflc']", "compress = 'none': must be left out, since none is"),
    ],
    "sweep f.toml": [
        ("[base\n", "must be TOML"),
        (f'{SWEEP}{GRID}method.mixing = [0.4]\nmethod = ["asgd"]\n', "quote an option beside its name"),
        (f"{SWEEP}{GRID}[gird]\nlr = [1]\n", "'gird': unknown; did you mean 'grid'?"),
        (f"{SWEEP}{GRID}method.mixing = [1.8]\n", "mixing = 1.8: must be between 0.0 and 1.0"),
        (f"roles = 1\n{SWEEP}{GRID}", "roles = 1: must be a table, [roles]"),
        (f"final = 3\n{SWEEP}{GRID}", "final = 3: must be last, best, tail"),
        (f"target = 70\n{SWEEP}{GRID}", "target = 70: must be between 0 and 1"),
        ("grid = 3\n", "grid = 3: must be a table, [grid]"),
        ("[points]\nlr = 1\n", "must be a table, [[points]]"),
        (f"{SWEEP}{GRID}seeds = 4\n", "seeds: must stand above the first [table] of a sweep"),
        (f"{SWEEP}target = 0.7\n{GRID}", "target: must stand above"),
        (f"{SWEEP}[base.grid]\nlr = [0.1]\n", "grid.lr: must stand above"),
        (f"{SWEEP}[grid]\nlr = [{'9' * 310}]\n", "characters): must be a finite number"),
    ],
}
ROWS = [(call, SWEEP + GRID, says) for call, says in CALLS]
ROWS += [(call, text, says) for call, rows in FILES.items() for text, says in rows]


@pytest.mark.parametrize(("call", "text", "says"), ROWS, ids=[f"{call[:60]} {says[:30]}" for call, _, says in ROWS])
def test_a_wrong_call_is_one_line_and_leaves_nothing_behind(capsys, tmp_path, monkeypatch, call, text, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweeping, "execute_group", never)
    monkeypatch.setattr(job_outcomes, "_MOST_PAUSES", 10_000)
    for name, content in {"file": "no folder", "f.toml": text, "f.json": text}.items():
        Path(name).write_text(content)
    for name in ("begun/runs", "cut/checkpoints", "empty"):
        Path(name).mkdir(parents=True)
    if "done" in call:
        save(make_run(), "done")
    before = sorted(Path().rglob("*"))
    assert says in refused(capsys, *shlex.split(call))
    assert sorted(Path().rglob("*")) == before


def test_lists_and_flags_without_a_value_may_be_repeated():
    parse = cli.parser().parse_args
    assert parse(["run", "--plugin", "a.py", "--plugin", "b.py", "--quiet", "--quiet"]).plugin == ["a.py", "b.py"]
    assert parse(["compare", "fedavg", "asgd", "--lr", "0.1"]).methods == ["fedavg", "asgd"]
    for _ in range(2):  # a call does not depend on the one before
        assert parse(["run", "--lr", "0.1"]).lr == 0.1


def test_a_memory_error_is_one_line_and_keeps_the_checkpoint(capsys, tmp_path, monkeypatch):
    """The device fails after the first checkpoint; the message says how to save memory and how to continue."""

    def exhausted(*given, **options):
        (tmp_path / "one" / "checkpoints" / "1.npz").write_bytes(b"")
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes.\nmore\nlines")

    monkeypatch.setattr("fedjax_async.config.prepared.run_member", exhausted)
    command = f"run {SMALL} --steps 1 --updates 2 --quiet --checkpoint 1 --out"
    said = refused(capsys, *command.split(), str(tmp_path / "one"))
    assert "device memory: exhausted (RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes); use less with" in said
    assert all(knob in said for knob in ("max_width", "remat", "memory_limit", "fewer runs", "fedjax-async resume"))
    assert (tmp_path / "one" / "checkpoints" / "1.npz").exists()
