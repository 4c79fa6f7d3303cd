"""The plan of runs, the check of committed tables, and data sets in parts."""

from __future__ import annotations

import json
import re
import sys
import types

import numpy as np
import pytest

import fedjax_async
from fedjax_async import config, results
from fedjax_async.config.grid import expand
from fedjax_async.config.methods import method_of
from fedjax_async.config.resolving import settings_from
from fedjax_async.results import sweeps
from tests.experiment import EXPERIMENTS, module
from tests.results.made_up import make_run

plan, verify, parcels = (module("", name) for name in ("plan", "verify", "parcels"))
known_runs = plan.known_runs
pytestmark = pytest.mark.usefixtures("nothing_stays_registered")


@pytest.fixture
def row(tmp_path, monkeypatch):
    """A row of a made-up paper, whose script and results are in a folder of their own."""
    monkeypatch.setattr(plan, "HERE", tmp_path)
    monkeypatch.setitem(plan.Row.results.fget.__globals__, "HERE", tmp_path)
    (tmp_path / "paper" / "results").mkdir(parents=True)
    return plan.Row("paper", "Table 1", "table_1.py", "smoke", 1, "--tasks a", "table_1_curves.csv", 2.0, 0.5)


def curves(path, *keys, per_client=()):
    path.parent.mkdir(exist_ok=True)
    run = make_run([0.1, 0.5])._replace(per_client=dict(per_client))
    known_runs.write(path, {key: known_runs.Known(key, 0, run) for key in keys})


def test_a_script_counts_its_runs_and_trains_none():
    row = plan.Row("orthofl", "Figure 6", "figure_6.py", "smoke", 2, "", "none_curves.csv", 1.0, 1.0)
    assert plan.count(row) == plan.Counted(row, 0, 14)


OF_SIMULATE = ("out", "overwrite", "probes", "progress")  # keywords that are no settings
TRAIN = {
    "asynccurve": ["table_methods"],
    "asynfl": ["figure_4", "figure_5", "quantisers", "signs", "table_3"],
    "methods": ["claims", "defaults"],
    "orthofl": ["figure_2", "figure_6", "figure_8", "figure_9", "figure_10", "table_1"],
    "policies": ["learn", "worlds"],
    "privacy": ["dp_fedavg"],
    "pushcen": ["tables"],
    "robustness": ["table"],
}


@pytest.mark.parametrize("script", [f"{paper}/{name}.py" for paper, names in TRAIN.items() for name in names])
def test_the_settings_of_a_script_are_accepted_at_each_scale(script, monkeypatch, tmp_path):
    found = []  # settings of runs, none of which is trained: the scripts themselves are slow tests

    def accept(*settings):
        for each in settings:
            method_of(each.method)
        found.extend(settings)
        raise sys.modules["known_runs"].TimeIsUp

    def sweep(base=None, grid=None, *, points=None, seeds=None, **_):
        accept(*(point.settings for point in expand(base, grid, points=points, seeds=seeds)))

    def simulate(settings=None, **changes):
        accept(settings_from(settings, {k: v for k, v in changes.items() if k not in OF_SIMULATE}))

    for place in (sweeps, results):
        monkeypatch.setattr(place, "sweep", sweep)
    monkeypatch.setattr(fedjax_async, "simulate", simulate)
    prepared = types.SimpleNamespace(schedule=types.SimpleNamespace(time=[60.0]))
    monkeypatch.setattr(config, "prepare", lambda settings: prepared)  # data need not be here
    counts = []
    for scale in ("smoke", "laptop", "paper"):
        found.clear()
        ended = verify.call(EXPERIMENTS / script, ["--scale", scale, "--quiet", "--out", str(tmp_path / scale)])
        assert ended.code == known_runs.TIME_IS_UP, ended.stderr
        counts.append(len(found))
    assert 0 < counts[0] <= counts[1] and counts[0] <= counts[2]


def test_counts_are_those_that_the_script_says(row):
    def counted(row, said, code):
        """The row's script says ``said`` on stderr."""
        text = f"import sys\nprint({said!r}, file=sys.stderr)\nsys.exit({code})\n"
        (plan.HERE / "paper" / "table_1.py").write_text(text)
        return plan.count(row)

    found = counted(row, "a: 2 of 5 runs are known\nb: 1 of 3 runs are known", known_runs.TIME_IS_UP)
    assert found[1:] == (3, 8, "") and found.missing == 5
    assert counted(row, "a: not run: there are no data", 0).unavailable == "there are no data"
    with pytest.raises(RuntimeError, match=r"--scale smoke --seeds 1 --tasks a: exit code 1\nKeyError"):
        counted(row, "KeyError", 1)
    whole = row._replace(curves="", table="table_1_smoke.csv")
    assert plan.count(whole)[1:3] == (0, 1)
    (row.results / whole.table).write_text("task\na\n")
    assert plan.count(whole)[1:3] == (1, 1)


def test_kept_curves_are_merged_with_those_that_are_there(row, tmp_path):
    curves(row.results / "table_1_curves.csv", "there")
    curves(row.results / "other_curves.csv", "elsewhere")
    curves(tmp_path / "out" / "table_1_a_curves.csv", "there", "elsewhere", "new")
    both = row._replace(also=("other_curves.csv", "not_there_curves.csv"))
    assert [path.name for path in both.known] == ["table_1_curves.csv", "other_curves.csv"]
    assert plan.keep(both, tmp_path / "out") == 1
    assert list(known_runs.read([row.results / "table_1_curves.csv"])) == ["there", "new"]
    assert plan.keep(both, tmp_path / "out") == 0
    # a run that is there without its clients is kept with them: else it was trained again and again
    curves(tmp_path / "out" / "table_1_a_curves.csv", "elsewhere", per_client={"uploads": np.array([3, 1])})
    assert (plan.keep(both, tmp_path / "out"), plan.keep(both, tmp_path / "out")) == (1, 0)
    for files in (both.known, both.known[::-1]):
        np.testing.assert_array_equal(known_runs.read(files)["elsewhere"].run.per_client["uploads"], [3, 1])


@pytest.mark.parametrize(("table", "code", "kept"), [("mnist,95", 0, 1), ("mnist,95", 1, 0), ("mnist,not run", 0, 0)])
def test_a_table_is_kept_when_it_is_whole(row, tmp_path, monkeypatch, table, code, kept):
    """Scripts write their tables after each task."""
    text = "import pathlib, sys\npathlib.Path(sys.argv[-1]).mkdir(parents=True)\n"
    text += f"(pathlib.Path(sys.argv[-1]) / 'table_1.csv').write_text('task,accuracy\\n{table}\\n')\nsys.exit({code})\n"
    (plan.HERE / "paper" / "table_1.py").write_text(text)
    whole = row._replace(curves="", table="table_1_smoke.csv", options="")
    monkeypatch.setattr(plan, "ROWS", [whole])
    assert plan.train(plan.Counted(whole, 0, 1), 5.0, tmp_path / "out") == kept
    assert (row.results / whole.table).is_file() == bool(kept)


def test_what_fits_is_trained_in_order_of_worth(row, monkeypatch, capsys):
    rows = [row._replace(title=name, minutes=minutes) for name, minutes in zip("abcd", (9, 2, 1, 1), strict=True)]
    missing = {"a": 1, "b": 2, "c": 0, "d": 3}
    trained = []
    monkeypatch.setattr(plan.jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(plan, "count", lambda row: plan.Counted(row, 3 - missing[row.title], 3))
    monkeypatch.setattr(plan, "train", lambda counted, minutes, out: trained.append(counted.row.title) or 1)
    assert plan.train_next(rows, 5.0, None) == 2
    assert trained == ["b", "d"], "the first does not fit into five minutes, the third is complete"
    assert "1 rows were not begun" in capsys.readouterr().out


def test_the_front_page_has_every_row_of_the_plan_in_order(row, tmp_path, monkeypatch):
    """Rows are chosen by words, and the table stands between its marks."""
    text = (EXPERIMENTS / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^\| \d+ \|.*\| `([^`]*)` \|$", text, re.MULTILINE)
    assert commands == [row.command.split("experiments/")[1] for row in plan.ROWS]
    assert text.count(plan.BEGIN) == text.count(plan.END) == 1
    (found,) = plan.chosen("pushcen PAPER alpha 0.4")
    assert found.options.endswith("--alphas 0.4")
    assert {row.title.partition(",")[0] for row in plan.chosen("pushcen table 6 fashion_mnist_6k")} == {"Table 6"}
    assert plan.chosen("") == plan.ROWS and plan.chosen("nothing has this") == []
    monkeypatch.setitem(plan.TITLES, "paper", "Paper")
    page = tmp_path / "README.md"
    page.write_text(f"before\n{plan.BEGIN}\nold\n{plan.END}\nafter\n")
    plan.write(plan.table([plan.Counted(row, 1, 601), plan.Counted(row, 3, 3)]), page)
    text = page.read_text()
    assert "old" not in text and text.startswith("before\n") and text.endswith("after\n")
    assert "| smoke | 1 | 1 of 601 | 1,200 | 300 | `paper/table_1.py" in text and "| 3 of 3 | - | - |" in text


@pytest.mark.parametrize(("script", "options", "why"), [
    ("asynccurve/table_methods.py", "--tasks har --ablate mnist", "must be among the tasks that are run: har"),
    ("asynccurve/table_methods.py", "--tasks fashion_mnist --curves", "must be given with an ablation"),
    ("asynccurve/figure_1_3.py", "--leaf folder", "must be given with the task femnist"),
    ("asynccurve/figure_2.py", "--leaf folder", "must be given with the task femnist"),
    ("pushcen/tables.py", "--tables 4 6 --alphas 0.1", "must be given with --tables 1 or released"),
    ("methods/defaults.py", "--scale smoke --methods krum", "at --scale smoke, which has fedavg and fedbuff"),
    ("plan.py", "--next --write", "must be given one at a time"),
    ("plan.py", "--keep nowhere --only 'orthofl figure 6 laptop'", "must be the folder of a script's --out"),
    ("verify.py", "--only orthofll", "must be words of a paper's name"),
])  # fmt: skip
def test_options_without_an_effect_are_refused(script, options, why):
    ended = verify.call(EXPERIMENTS / script, options)
    assert ended.code == 2 and why in ended.stderr


def test_verify_notices_a_changed_number(tmp_path):
    committed, made = tmp_path / "committed.csv", tmp_path / "made.csv"
    made.write_text("variant,accuracy (%),new,hardware\nfedavg,93.91666666666667,1,one\northofl,2e-15,2,one\n")

    def wrong(text):
        committed.write_text(text)
        return verify.differences(committed, made)

    head, second = "variant,accuracy (%),hardware\nfedavg,", "\northofl,0.0,another\n"
    assert wrong(f"{head}93.92,another{second}") == []
    assert wrong(f"{head}93.93,another{second}") == ["row 1, accuracy (%): 93.91666666666667 instead of 93.93"]
    assert wrong("variant,accuracy (%)\nfedavg,93.92\n") == ["2 rows instead of 1"]
    assert len(wrong("variant,best (%)\nfedprox,\northofl,1\n")) == 3


def test_tables_that_need_no_training_are_made_again():
    """What follows from committed files alone: the abstract's numbers, accuracies of single runs, and their tables."""
    (table, found), *others = verify.again("orthofl/abstract.py").items()
    assert table.is_file() and not found and not others
    runs = verify.again("from_runs.py")
    assert len(runs) == len(verify.OF_RUNS) and not any(runs.values())
    single = EXPERIMENTS / "asynccurve" / "results"
    assert not any(verify.of_seeds(single / f"table_{name}_laptop.csv") for name in ("methods", "ablation"))


def test_a_page_with_a_changed_number_is_wrong(tmp_path, monkeypatch):
    pages = verify.pages
    monkeypatch.setattr(pages, "PAPERS", tmp_path)
    (tmp_path / "paper" / "results").mkdir(parents=True)
    (tmp_path / "paper" / "results" / "a.csv").write_text("variant,accuracy (%),accuracy (%) std\nfedavg,93.92,1.69\n")
    page = tmp_path / "paper" / "README.md"
    text = "[CSV](results/a.csv)\n\n| variant | accuracy (%) |\n| --- | ---: |\n| fedavg | 93.9 ± 1.7 |\n"
    page.write_text(text)
    assert pages.wrong("paper") == []
    page.write_text(text.replace("93.9", "93.8"))
    assert any(line.startswith("93.8 of ['fedavg']") for line in pages.wrong("paper"))


def test_parcels_come_back_whole_and_a_damaged_part_is_refused(tmp_path):
    rng, root = np.random.default_rng(0), tmp_path / "one"
    files = {"arrays/mnist/1/x.npy": 70_000, "arrays/mnist/1/y.npy": 10, "pretrained/minilm/1/v": 5_000}
    for name, size in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(rng.bytes(size))
    made = parcels.split(["mnist", "minilm"], tmp_path / "parts", megabytes=0.02, root=root)
    sizes = [(tmp_path / "parts" / name).stat().st_size for name in made["parts"]]
    assert len(sizes) == 4 and max(sizes) <= 20_000
    assert parcels.split(["mnist", "minilm"], tmp_path / "again", megabytes=0.02, root=root) == made
    names = parcels.join(tmp_path / "parts", root=tmp_path / "two")
    assert sorted(names) == sorted(files)
    assert all((tmp_path / "two" / name).read_bytes() == (root / name).read_bytes() for name in names)
    part = tmp_path / "parts" / "part-002"
    content = bytearray(part.read_bytes())
    content[100] ^= 1
    for damage in (lambda: part.write_bytes(content), part.unlink):
        damage()
        with pytest.raises(ValueError, match=r"part-002: is missing or damaged"):
            parcels.join(tmp_path / "parts", root=tmp_path / "three")
    assert not (tmp_path / "three").exists()


def test_parcels_refuse_what_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"name = 'kmnist': must be a data set or model that was fetched"):
        parcels.split(["kmnist"], tmp_path / "parts", root=tmp_path)
    with pytest.raises(ValueError, match=r"megabytes = 0: must be at least one byte"):
        parcels.split([], tmp_path / "parts", megabytes=0, root=tmp_path)
    with pytest.raises(ValueError, match=r"must have a file parcels\.json"):
        parcels.join(tmp_path, root=tmp_path)
    for files, why in (({"../x": "0"}, "'../x' must be inside its folder"), ({"x": "0"}, "its parts are no archive")):
        (tmp_path / "parcels.json").write_text(json.dumps({"parts": {}, "files": files}))
        with pytest.raises(ValueError, match=why):
            parcels.join(tmp_path, root=tmp_path / "root")
