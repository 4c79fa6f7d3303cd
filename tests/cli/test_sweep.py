"""``fedjax-async sweep`` from the outside."""

from __future__ import annotations

import dataclasses
import re
import tomllib

import pytest

from fedjax_async import cli
from fedjax_async.cli import sweep, sweep_file
from fedjax_async.config import prepare
from fedjax_async.config.grid import expand
from fedjax_async.config.sweeping import SweepGroup
from fedjax_async.results import cluster, load, sweep_report
from fedjax_async.results.sweeps import SweepWork, collect, run_work
from tests.cli.called import ok, refused
from tests.results import sweep_engine
from tests.results.folders import contents

SMALL = """
seeds = 2
target = 0.05
[base]
model = "logistic"
clients = 4
steps = 1
updates = 6
eval_updates = 3
[grid]
method.mixing = [0.4, 0.8]
lr = [0.02, 0.1]
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mixing.toml"
    path.write_text(SMALL)
    return path


def test_a_byte_order_mark_is_no_part_of_the_table(file):
    plain = sweep_file.sweep_content(file)
    file.write_bytes("\ufeff".encode() + file.read_bytes().replace(b"\n", b"\r\n"))
    assert sweep_file.sweep_content(file) == plain


@pytest.fixture
def no_pictures(monkeypatch):
    """Pictures take longer than everything else."""
    monkeypatch.setattr(sweep_report, "pictures", lambda *given: {})


def test_a_file_becomes_tables_and_pictures(capsys, file, tmp_path, monkeypatch, engine):
    out = ok(capsys, "sweep", str(file), "--out", str(tmp_path / "out"), "--quiet")
    assert "8 runs: mixing (2), lr (2), seed (2)" in out
    assert f"0 finished, 8 to train: {8 * sweep_engine.UPDATES} updates" in out
    assert "Best of 4 settings by the test accuracy (mean of last tenth), averaged over 2 seeds" in out
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        *("runs", "sweep.json", "command.txt", "runs.csv", "runs.parquet", "evaluations.csv", "evaluations.parquet"),
        *("settings.csv", "settings.md", "settings.tex", "best.csv", "best.md", "best.tex"),
        *("accuracy.png", "accuracy_map.png", "loss.png", "loss_map.png"),
    }
    header, *rows = (tmp_path / "out" / "runs.csv").read_text().splitlines()
    assert header.startswith("run,mixing,lr,seed,tail_accuracy,last_accuracy,best_accuracy,tail_loss")
    assert len(rows) == 8 and "time_to_target" in header
    assert load(tmp_path / "out" / "runs" / "mixing=0.8,lr=0.1,seed=1").settings["method"] == "fedasync:mixing=0.8"
    before = contents(tmp_path / "out")
    monkeypatch.setattr(sweep_report, "pictures", lambda *given: {})  # other tests compare pictures
    again = ok(capsys, "sweep", str(file), "--out", str(tmp_path / "out"), "--quiet")
    assert "8 finished, 0 to train" in again and contents(tmp_path / "out") == before


def test_a_dry_run_says_what_would_happen_and_writes_nothing(capsys, file, tmp_path, monkeypatch, engine):
    monkeypatch.chdir(tmp_path)
    file.write_text(SMALL + '[[points]]\nmethod = "fedavg"\n')
    out = ok(capsys, "sweep", str(file), "--dry-run")
    assert out.splitlines()[:2] == [
        "10 runs: mixing (2), lr (3), method (2), seed (2)",
        f"0 finished, 10 to train: {10 * sweep_engine.UPDATES} updates",
    ]
    assert "2 groups, one compilation each" in out
    lines = [line.split() for line in out.splitlines() if "made up" in line]
    assert [line[:7] for line in lines] == [
        ["1", "8", "4", "2", "2.5", "GB", str(8 * sweep_engine.UPDATES)],
        ["2", "2", "1", "2", "2.5", "GB", str(2 * sweep_engine.UPDATES)],
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["mixing.toml"]


def test_groups_of_a_plan_have_different_titles():
    """What groups share is followed by the swept values that differ; other combinations of values by a run."""
    base = {"updates": 6, "model": "logistic", "method": "fedbuff"}
    points = expand(base, {"batch_size": [8, 16], "compute": ["float32", "bfloat16"], "lr": [0.1, 0.2, 0.3, 0.4]})
    index = {(p.settings.batch_size, p.settings.compute, p.settings.lr): i for i, p in enumerate(points)}

    def titles(*groups):
        made = [SweepGroup(tuple(group), ((0,),), 1, 1, 1, (1,), "the same") for group in groups]
        return sweep.titles(SweepWork(tuple(points), frozenset(), tuple(made)))

    by_size = [[i for key, i in index.items() if key[:2] == (size, "float32")] for size in (8, 16)]
    assert titles(*by_size) == ["the same, batch_size 8", "the same, batch_size 16"]
    halves = [[i for key, i in index.items() if key[1] == name] for name in ("float32", "bfloat16")]
    assert titles(*halves) == ["the same, compute float32", "the same, compute bfloat16"]
    assert titles(by_size[0], halves[1])[0] == "the same, batch_size 8, compute float32"
    pairs = ((8, "float32"), (16, "bfloat16")), ((8, "bfloat16"), (16, "float32"))
    crossed = [[index[*pair, 0.1] for pair in each] for each in pairs]
    assert titles(*crossed) == [f"the same, from {points[group[0]].name}" for group in crossed]
    assert titles([index[8, "float32", 0.1]], by_size[0])[1] == "the same, lr (4 values)"
    assert titles(by_size[0]) == ["the same"]


def test_an_option_beside_its_name_is_quoted(file):
    file.write_text(SMALL.replace("method.mixing", '"method.mixing"') + 'method = ["fedasync:clip=1"]\n')
    assert sweep.read(file).points[0].settings.method == "fedasync:clip=1,mixing=0.4"


def test_collect_makes_the_tables_of_what_is_there(capsys, file, tmp_path, monkeypatch, no_pictures):
    sweep_engine.use(monkeypatch, KeyboardInterrupt(), fail_after=3)
    arguments = (str(file), "--out", str(tmp_path / "out"), "--quiet")
    with pytest.raises(SystemExit) as ended:
        cli.main(["sweep", *arguments])
    assert ended.value.code == 130 and "the same command goes on" in capsys.readouterr().err
    for flag, says in (("--dry-run", "dry_run = True"), ("--submit=local", "submit = 'local'")):
        assert cli.main(["sweep", *arguments, "--collect", flag]) == 2
        assert f"{says}: must be left out with --collect" in capsys.readouterr().err
    out = ok(capsys, "sweep", *arguments, "--collect")
    assert "3 of 8 runs are finished; missing: mixing=0.4,lr=0.1,seed=1, mixing=0.8," in out
    assert len((tmp_path / "out" / "runs.csv").read_text().splitlines()) == 4
    sweep_engine.use(monkeypatch)
    assert "Best of 4 settings" in ok(capsys, "sweep", *arguments)
    assert "missing" not in ok(capsys, "sweep", *arguments, "--collect")


def test_roles_are_shown_and_the_test_set_is_warned_of(capsys, file, tmp_path, no_pictures, engine):
    arguments = (str(file), "--out", str(tmp_path / "out"), "--quiet")
    lines = ok(capsys, "sweep", *arguments, "--dry-run").splitlines()
    assert lines[2] == "tuned: mixing, lr; seed: seed"
    assert lines[3] == sweep.NO_VALIDATION and lines[3].startswith("WARNING: there is no validation part")
    file.write_text(SMALL.replace("[grid]", "validation_fraction = 0.1\n[grid]") + '[roles]\nmethod.mixing = "world"\n')
    lines = ok(capsys, "sweep", *arguments, "--dry-run").splitlines()
    assert lines[2] == "tuned: lr; world: mixing; seed: seed" and not any("WARNING" in line for line in lines)
    out = ok(capsys, "sweep", *arguments)
    assert "Tuned: lr; within each world (mixing)." in out and collect(tmp_path / "out")[0].roles
    file.write_text(file.read_text().replace('"world"', '"compared"'))  # the same runs with another role
    out = ok(capsys, "sweep", *arguments, "--collect")
    assert "Tuned: lr; separately for each mixing." in out and "8 finished" not in out
    assert collect(tmp_path / "out")[0].roles == {"method.mixing": "compared"}


def test_the_file_says_how_tables_are_made_and_flags_replace_it(capsys, file, tmp_path, no_pictures, engine):
    file.write_text('final = "best"\n' + SMALL)
    arguments = (str(file), "--out", str(tmp_path / "out"), "--quiet")
    out = ok(capsys, "sweep", *arguments)
    assert all(text in out for text in ("accuracy, best (%)", "95% interval (t)", "time to 5 % (s)"))
    flags_of = ("--final", "last", "--target", "0.2")
    out = ok(capsys, "sweep", *arguments, "--collect", *flags_of)
    assert all(text in out for text in ("accuracy, last (%)", "time to 20 % (s)"))


def test_submitting_names_the_jobs_and_how_to_go_on(capsys, file, tmp_path, monkeypatch, engine):
    given = {}

    def submit(work, folder, target, **limits):
        given.update(folder=folder, target=target, **limits)
        return [cluster.Job("77_0", (work.points[0].name, work.points[1].name), None)]

    monkeypatch.setattr(cluster, "submit", submit)
    flags = ("--overwrite", "--submit", "slurm:gpus=1", "--memory-limit", "2GB")
    out = ok(capsys, "sweep", str(file), "--out", str(tmp_path), *flags)
    assert "job 77_0: 2 runs, mixing=0.4,lr=0.02,seed=0..." in out
    assert f"fedjax-async sweep {file} --out {tmp_path} --collect" in out
    assert given == {"folder": str(tmp_path), "target": "slurm:gpus=1", "memory_limit": 2 * 10**9, "lanes": None}


def test_jobs_of_an_array_are_trained_by_number(capsys, file, tmp_path, no_pictures, engine):
    out = tmp_path / "the out"  # what is printed can be given to a shell
    said = ok(capsys, "sweep", str(file), "--out", str(out), "--submit", "array")
    assert "job 3: 2 runs, " in said and f"4 jobs; of each number N above: fedjax-async job '{out}' N" in said
    assert f"when they are done: fedjax-async sweep {file} --out '{out}' --collect" in said
    for number in range(4):
        assert cli.main(["job", str(out), str(number)]) == 0
    assert capsys.readouterr().out == "2 runs\n" * 4
    assert "runs.csv" in ok(capsys, "sweep", str(file), "--out", str(out), "--collect")
    assert "everything is finished" in ok(capsys, "sweep", str(file), "--out", str(out), "--submit", "array")


def test_the_command_waits_for_ray(capsys, file, tmp_path, monkeypatch, no_pictures, engine):
    ends = [[(1, "its machine is gone"), (0, None)], [(0, None)]]

    def submit(work, folder, target, **limits):
        run_work(work, folder=folder, progress=False)
        return [cluster.Job(str(k), (work.points[k].name,), k) for k in range(2)]

    monkeypatch.setattr(cluster, "submit", submit)
    monkeypatch.setattr(cluster, "finished", lambda handles: iter(ends.pop(0)))
    arguments = ["sweep", str(file), "--out", str(tmp_path / "out"), "--submit", "ray"]
    assert cli.main(arguments) == 2
    done = capsys.readouterr()
    assert "1 of 2: job 1 failed\n2 of 2: job 0 is done\n" in done.out
    assert "but 1 of 2 failed, the first of them job 1 (1 run, " in done.err and "its machine is gone" in done.err
    assert "saved in" in ok(capsys, "sweep", *arguments[1:])


def test_float64(capsys, file, tmp_path, no_pictures):
    file.write_text(SMALL.replace("[base]", '[base]\ncompute = "float64"').replace("seeds = 2", "seeds = 1"))
    file.write_text(re.sub(r"\[0\.\d+, (0\.\d+)\]", r"[\1]", file.read_text()))
    ok(capsys, "sweep", str(file), "--out", str(tmp_path / "out"), "--quiet")
    run = load(tmp_path / "out" / "runs" / "mixing=0.8,lr=0.1,seed=0")
    assert run.params["output"]["kernel"].dtype == "float64"
    ok(capsys, "sweep", str(file), "--out", str(tmp_path / "out"), "--quiet")  # its runs are finished: they are read


# --- the help teaches ---------------------------------------------------------------------------------


def test_the_example_of_the_help_is_a_whole_sweep(capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        cli.main(["sweep", "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    lines = [line.strip() for line in sweep_file.SWEEP_EXAMPLE.splitlines()]
    assert all(line in shown for line in lines)
    (tmp_path / "mixing.toml").write_text(sweep_file.SWEEP_EXAMPLE)
    file = sweep.read(tmp_path / "mixing.toml")
    assert len(file.points) == 72 and (file.target, file.final) == (0.7, "tail")
    assert file.roles == {"method.exponent": "tuned"}
    assert set(tomllib.loads(sweep_file.SWEEP_EXAMPLE)) == set(sweep_file.SWEEP_KEYS)
    prepare(dataclasses.replace(file.points[0].settings, model="logistic", updates=5, eval_updates=1))


# --- what cannot be used ------------------------------------------------------------------------------

BASE = '[base]\nmodel = "logistic"\nupdates = 5\n'
BAD = {
    "not TOML": ("[base\n", "must be TOML"),
    "an option beside its name": (SMALL + 'method = ["asgd"]\n', "quote an option beside its name"),
    "an unknown table": (SMALL + "[gird]\nlr = [1]\n", "'gird': unknown; did you mean 'grid'?"),
    "an unknown setting": (SMALL.replace("clients", "client"), "did you mean 'clients'?"),
    "an unknown name": (SMALL.replace('"logistic"', '"logistics"'), "did you mean 'logistic'?"),
    "a value out of range": (SMALL.replace("0.8]", "1.8]"), "mixing = 1.8: must be between 0.0 and 1.0"),
    "no budget": (SMALL.replace("updates = 6\neval_updates = 3\n", ""), "give at least one, or the run has no end"),
    "roles that are none": ("roles = 1\n" + SMALL, "roles = 1: must be a table, [roles]"),
    "an unknown final value": ("final = 3\n" + SMALL, "final = 3: must be last, best, tail"),
    "no list of seeds": ("seeds = [1, 1]\n" + BASE, "seeds = [1, 1]: must be different seeds"),
    "a target in percent": (SMALL.replace("0.05", "70"), "target = 70: must be between 0 and 1"),
    "a grid that is none": ("grid = 3\n", "grid = 3: must be a table, [grid]"),
    "points that are none": ("[points]\nlr = 1\n", "must be a table, [[points]]"),
    "an empty file": ("", "at least one setting with its values"),
    "seeds below base": (BASE + "seeds = 4\n[grid]\nlr = [0.1]\n", "seeds: must stand above the first [table]"),
    "seeds below grid": (BASE + "[grid]\nlr = [0.1]\nseeds = 4\n", "seeds: must stand above"),
    "target below base": (BASE + "target = 0.7\n[grid]\nlr = [0.1]\n", "target: must stand above"),
    "a grid inside base": (BASE + "[base.grid]\nlr = [0.1]\n", "grid.lr: must stand above"),
    "out": (
        BASE + 'out = "x"\n[grid]\nlr = [0.1]\n',
        "out: is not a setting of a run but a flag of the command, --out",
    ),
    "a number of 300 digits": (BASE + f"[grid]\nlr = [{'9' * 310}]\n", "characters): must be a finite number"),
}


@pytest.mark.parametrize(("text", "says"), BAD.values(), ids=BAD)
def test_a_bad_file_is_one_line(capsys, file, tmp_path, text, says):
    file.write_text(text)
    assert says in refused(capsys, "sweep", str(file), "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_bad_flags_are_one_line(capsys, file, tmp_path):
    out = ("--out", str(tmp_path / "out"))
    assert "must be a TOML file" in refused(capsys, "sweep", str(tmp_path / "none.toml"), *out)
    for size in ("4 elephants", "GB", "0GB", "-1GB", ""):
        assert "a size such as 4GB" in refused(capsys, "sweep", str(file), *out, f"--memory-limit={size}")
    assert "target = 3.0: must be between 0 and 1" in refused(capsys, "sweep", str(file), *out, "--target", "3")
    assert "lanes = 0" in refused(capsys, "sweep", str(file), *out, "--lanes", "0")
    assert "did you mean 'slurm'?" in refused(capsys, "sweep", str(file), *out, "--submit", "slurn")
    assert "no sweep.json" in refused(capsys, "sweep", str(file), *out, "--collect")
    assert not (tmp_path / "out").exists()


def test_a_changed_file_is_refused(capsys, file, tmp_path, no_pictures, engine):
    out = ("--out", str(tmp_path / "out"), "--quiet")
    ok(capsys, "sweep", str(file), *out)
    file.write_text(SMALL.replace("0.8", "0.9"))
    for more in ((), ("--dry-run",), ("--collect",)):
        assert "it holds another sweep" in refused(capsys, "sweep", str(file), *out, *more)
    assert "4 finished, 4 to train" in ok(capsys, "sweep", str(file), *out, "--overwrite")
