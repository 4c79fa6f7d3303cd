"""``fedjax-async sweep`` from the outside."""

import sys
from pathlib import Path

import pytest

from fedjax_async import cli
from fedjax_async.base import registry
from fedjax_async.base.notices import RunWarning
from fedjax_async.cli import sweep, sweep_file
from fedjax_async.config import plugins
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


FILE, OUT = Path("mixing.toml"), Path("the out")
SWEEP = ("sweep", str(FILE), "--out", str(OUT), "--quiet")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    FILE.write_text(SMALL)


@pytest.fixture
def no_pictures(monkeypatch):
    """Pictures take longer than everything else."""
    monkeypatch.setattr(sweep_report, "pictures", lambda *given: {})


def test_a_byte_order_mark_is_no_part_of_the_table_and_an_option_beside_its_name_is_quoted():
    plain = sweep_file.sweep_content(FILE)
    FILE.write_bytes("\ufeff".encode() + FILE.read_bytes().replace(b"\n", b"\r\n"))
    assert sweep_file.sweep_content(FILE) == plain
    FILE.write_text(SMALL.replace("method.mixing", '"method.mixing"') + 'method = ["fedasync:clip=1"]\n')
    assert sweep.read(FILE).points[0].settings.method == "fedasync:clip=1,mixing=0.4"


def test_a_file_becomes_tables_and_pictures(capsys, monkeypatch, engine):
    out = ok(capsys, *SWEEP)
    assert "8 runs: mixing (2), lr (2), seed (2)" in out
    assert f"0 finished, 8 to train: {8 * sweep_engine.UPDATES} updates" in out
    assert "Best of 4 settings by the test accuracy (mean of last tenth), averaged over 2 seeds" in out
    assert {path.name for path in OUT.iterdir()} == {
        *("runs", "sweep.json", "command.txt", "runs.csv", "runs.parquet", "evaluations.csv", "evaluations.parquet"),
        *("settings.csv", "settings.md", "settings.tex", "best.csv", "best.md", "best.tex"),
        *("accuracy.png", "accuracy_map.png", "loss.png", "loss_map.png"),
    }
    header, *rows = (OUT / "runs.csv").read_text().splitlines()
    assert header.startswith("run,mixing,lr,seed,tail_accuracy,last_accuracy,best_accuracy,tail_loss")
    assert len(rows) == 8 and "time_to_target" in header
    assert load(OUT / "runs" / "mixing=0.8,lr=0.1,seed=1").settings["method"] == "fedasync:mixing=0.8"
    before = contents(OUT)
    monkeypatch.setattr(sweep_report, "pictures", lambda *given: {})  # other tests compare pictures
    monkeypatch.setattr(sweep_report, "remove_pictures", lambda *given: None)
    assert "8 finished, 0 to train" in ok(capsys, *SWEEP) and contents(OUT) == before
    FILE.write_text(SMALL.replace("0.8", "0.9"))
    for more in ((), ("--dry-run",), ("--collect",)):
        assert "it holds another sweep" in refused(capsys, *SWEEP, *more)
    assert "4 finished, 4 to train" in ok(capsys, *SWEEP, "--overwrite")


def test_a_dry_run_says_what_would_happen_and_writes_nothing(capsys, tmp_path, engine):
    FILE.write_text(SMALL + '[[points]]\nmethod = "fedavg"\n')
    first, second, *lines = ok(capsys, "sweep", str(FILE), "--dry-run").splitlines()
    assert first == "10 runs: mixing (2), lr (3), method (2), seed (2)"
    assert second == f"0 finished, 10 to train: {10 * sweep_engine.UPDATES} updates"
    assert any("2 groups, one compilation each" in line for line in lines)
    groups = [" ".join(line.split()[:7]) for line in lines if "made up" in line]
    assert groups == [f"1 8 4 2 2.5 GB {8 * sweep_engine.UPDATES}", f"2 2 1 2 2.5 GB {2 * sweep_engine.UPDATES}"]
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


def test_collect_makes_the_tables_of_what_is_there(capsys, monkeypatch, no_pictures):
    sweep_engine.use(monkeypatch, KeyboardInterrupt(), fail_after=3)
    with pytest.raises(SystemExit) as ended:
        cli.main(SWEEP)
    assert ended.value.code == 130 and "the same command goes on" in capsys.readouterr().err
    out = ok(capsys, *SWEEP, "--collect")
    assert "3 of 8 runs are finished; missing: mixing=0.4,lr=0.1,seed=1, mixing=0.8," in out
    assert len((OUT / "runs.csv").read_text().splitlines()) == 4
    sweep_engine.use(monkeypatch)
    assert "Best of 4 settings" in ok(capsys, *SWEEP)
    assert "missing" not in ok(capsys, *SWEEP, "--collect")


def test_roles_are_shown_and_the_test_set_is_warned_of(capsys, no_pictures, engine):
    lines = ok(capsys, *SWEEP, "--dry-run").splitlines()
    assert lines[2] == "tuned: mixing, lr; seed: seed"
    assert lines[3] == sweep.NO_VALIDATION and lines[3].startswith("WARNING: there is no validation part")
    FILE.write_text(SMALL.replace("[grid]", "validation_fraction = 0.1\n[grid]") + '[roles]\nmethod.mixing = "world"\n')
    lines = ok(capsys, *SWEEP, "--dry-run").splitlines()
    assert lines[2] == "tuned: lr; world: mixing; seed: seed" and not any("WARNING" in line for line in lines)
    assert "Tuned: lr; within each world (mixing)." in ok(capsys, *SWEEP) and collect(OUT)[0].roles
    FILE.write_text(FILE.read_text().replace('"world"', '"compared"'))  # the same runs with another role
    out = ok(capsys, *SWEEP, "--collect")
    assert "Tuned: lr; separately for each mixing." in out and "8 finished" not in out
    assert collect(OUT)[0].roles == {"method.mixing": "compared"}


def test_options_of_a_plugins_methods_are_tuned_only_where_they_are_known(tmp_path, capsys, monkeypatch, engine):
    plugin, file, out = tmp_path / "own.py", tmp_path / "own.toml", tmp_path / "swept"
    plugin.write_text(
        "from fedjax_async import register, server\n\n\n"
        "@register('method', 'own_rule')\n"
        "def own_rule(*, c=1.0):\n"
        "    return server.fedasync(mixing=c)\n"
    )
    own = SMALL.replace("method.mixing", "method.c").replace("[base]", '[base]\nmethod = "own_rule"')
    file.write_text(own + '[[points]]\nmethod = "asgd"\n')
    monkeypatch.setattr(registry, "ADDED", {})
    monkeypatch.setattr(plugins, "LOADED", {})
    tuned = "4 for method=own_rule, 1 for method=asgd"  # trials
    assert tuned in ok(capsys, "sweep", str(file), "--out", str(out), "--plugin", str(plugin), "--quiet", "--no-plots")

    def forgotten():
        registry.ADDED.clear()
        plugins.LOADED.clear()
        registry.forget()
        for name in [name for name in sys.modules if name.startswith("own_")]:
            del sys.modules[name]

    forgotten()
    assert tuned in ok(capsys, "redraw", str(out), "--no-plots")
    forgotten()
    with pytest.warns(RunWarning, match="own_rule:c=0.4, own_rule:c=0.8: unknown here, so that each text"):
        collect(out)
    plugin.write_text("1 / 0")
    assert cli.main(["redraw", str(out), "--no-plots"]) == 0
    told = capsys.readouterr()
    assert tuned not in told.out and "own_rule:c=0.4, own_rule:c=0.8: unknown here" in told.err


def test_the_file_says_how_tables_are_made_and_flags_replace_it(capsys, no_pictures, engine):
    FILE.write_text('final = "best"\n' + SMALL)
    out = ok(capsys, *SWEEP)
    assert all(text in out for text in ("accuracy, best (%)", "95% interval (t)", "time to 5 % (s)"))
    out = ok(capsys, *SWEEP, "--collect", "--final", "last", "--target", "0.2")
    assert all(text in out for text in ("accuracy, last (%)", "time to 20 % (s)"))


def test_submitting_names_the_jobs_and_how_to_go_on(capsys, monkeypatch, engine):
    given = {}

    def submit(work, folder, target, **limits):
        given.update(folder=folder, target=target, **limits)
        return [cluster.Job("77_0", (work.points[0].name, work.points[1].name), None)]

    monkeypatch.setattr(cluster, "submit", submit)
    out = ok(capsys, *SWEEP[:-1], "--overwrite", "--submit", "slurm:gpus=1", "--memory-limit", "2GB")
    assert "job 77_0: 2 runs, mixing=0.4,lr=0.02,seed=0..." in out
    assert f"fedjax-async sweep {FILE} --out '{OUT}' --collect" in out
    assert given == {"folder": str(OUT), "target": "slurm:gpus=1", "memory_limit": 2 * 10**9, "lanes": None}


def test_jobs_of_an_array_are_trained_by_number(capsys, no_pictures, engine):
    said = ok(capsys, *SWEEP[:-1], "--submit", "array")  # what is printed can be given to a shell
    assert "job 3: 2 runs, " in said and f"4 jobs; of each number N above: fedjax-async job '{OUT}' N" in said
    assert f"when they are done: fedjax-async sweep {FILE} --out '{OUT}' --collect\n" in said
    for flags in ("--target 0.5 --final last --columns accuracy,time --format png,pdf", "--no-plots"):  # of the tables
        assert f"--collect {flags}\n" in ok(capsys, *SWEEP[:-1], "--submit", "array", *flags.split())
    assert "".join(ok(capsys, "job", str(OUT), str(number)) for number in range(4)) == "2 runs\n" * 4
    assert "runs.csv" in ok(capsys, *SWEEP[:-1], "--collect")
    assert "everything is finished" in ok(capsys, *SWEEP[:-1], "--submit", "array")


def test_the_command_waits_for_ray(capsys, monkeypatch, no_pictures, engine):
    ends = [[(1, "its machine is gone"), (0, None)], [(0, None)]]

    def submit(work, folder, target, **limits):
        run_work(work, folder=folder, progress=False)
        return [cluster.Job(str(k), (work.points[k].name,), k) for k in range(2)]

    monkeypatch.setattr(cluster, "submit", submit)
    monkeypatch.setattr(cluster, "finished", lambda handles: iter(ends.pop(0)))
    arguments = [*SWEEP[:-1], "--submit", "ray"]
    assert cli.main(arguments) == 2
    done = capsys.readouterr()
    assert "1 of 2: job 1 failed\n2 of 2: job 0 is done\n" in done.out
    assert "but 1 of 2 failed, the first of them job 1 (1 run, " in done.err and "its machine is gone" in done.err
    assert "saved in" in ok(capsys, *arguments)
