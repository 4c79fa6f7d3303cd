"""What folders keep beside results: labels, the names of methods in tables, curves and folders, and commands."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from fedjax_async import Method, Spec, cli, compare, named, simulate, sweep
from fedjax_async.config import sweeping
from fedjax_async.config.labelling import split
from fedjax_async.results import load, write_comparison
from fedjax_async.results.beside import LABELS, labelled, labels_in
from fedjax_async.results.compared import baseline_of, method_in
from fedjax_async.results.html_folders import read
from fedjax_async.results.reading import comparison_in
from fedjax_async.results.store import COMMAND
from fedjax_async.server import methods
from tests.cli.called import refused
from tests.refusals import refusals
from tests.results import sweep_engine
from tests.results.folders import contents, rows
from tests.results.made_up import make_run, of_group

trained = sweeping.execute_group
SMALL = {"model": "logistic", "clients": 4, "updates": 6, "steps": 2}
FLAGS = ("--model", "logistic", "--clients", "4", "--updates", "6", "--steps", "2", "--quiet", "--no-plots")
SAVED = {"plots": False, "progress": False, **SMALL}
NAMES = {"Ours": "fedasync:mixing=0.4", "Fed Avg": "fedavg@cohort:size=2", "asgd": "asgd"}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweeping, "execute_group", of_group)


def test_labels_name_rows_folders_and_evaluations_and_the_runs_keep_their_specs(tmp_path):
    runs = compare(NAMES, out=tmp_path, seeds=2, **SAVED)
    assert list(runs) == list(NAMES)
    assert [seeds[0].settings["method"] for seeds in runs.values()] == list(NAMES.values())
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["Fed_Avg", "Ours", "asgd"]
    assert json.loads((tmp_path / LABELS).read_bytes()) == {"Ours": "Ours", "Fed_Avg": "Fed Avg"}
    before = contents(tmp_path)
    text = write_comparison(runs, tmp_path, plots=False)
    assert contents(tmp_path) == before and {"comparison.csv", "comparison.md", "comparison.tex"} <= before.keys()
    assert "relative to Fed Avg" in text and [row["method"] for row in rows(tmp_path / "comparison.csv")] == [*NAMES]
    found = read(tmp_path)
    assert list(found.groups) == list(NAMES) and found.notes == []
    (tmp_path / "comparison.csv").unlink()
    assert set(read(tmp_path).groups) == set(NAMES)
    assert list(comparison_in(tmp_path)) == list(NAMES), "in the order in which they were compared"


def test_a_comparison_without_labels_has_no_file_of_them_and_a_later_one_keeps_those_of_an_earlier_one(tmp_path):
    for methods_, labels in ((["asgd"], {}), ({"Ours": "fedasync"}, {"Ours": "Ours"}), (["fedavg"], {"Ours": "Ours"})):
        compare(methods_, out=tmp_path, **SAVED)
        assert labels_in(tmp_path) == labels and (LABELS in contents(tmp_path)) == bool(labels)
    assert set(read(tmp_path).groups) == {"asgd", "Ours", "fedavg"}
    (tmp_path / LABELS).write_text("[1]")
    with pytest.raises(ValueError, match=r"labels\.json: must hold the labels"):
        read(tmp_path)


def test_a_comparison_that_ends_before_its_first_run_leaves_no_labels(tmp_path):
    def cut():
        with pytest.raises(KeyError), labelled(tmp_path, {"Ours": "fedasync"}):
            assert labels_in(tmp_path) == {"Ours": "Ours"}
            raise KeyError

    cut()
    assert contents(tmp_path) == {}
    (tmp_path / "runs" / "Ours").mkdir(parents=True)
    (tmp_path / "runs" / "Ours" / "manifest.json").touch()
    cut()
    assert labels_in(tmp_path) == {"Ours": "Ours"}


def test_texts_specs_and_objects_have_labels(tmp_path):
    given = {
        "A b": Spec(methods.fedasync, mixing=0.4),
        "C (d)": Method(methods.asgd()),
        "e": named("f", Method(methods.asgd())),
    }
    runs = compare(given | {"g": "fedasync"}, out=tmp_path, **SAVED)
    assert [seeds[0].settings["method"] for seeds in runs.values()] == ["fedasync:mixing=0.4", "C_d_", "f", "fedasync"]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"A_b", "C_d_", "e", "g"}


test_wrong_labels_are_refused_before_any_training = refusals(
    ({"a/b": "asgd"}, r"^label = 'a/b': must be 1 to 60 printable characters, .* without any of = : @ \+ / \\$"),
    *(({label: "asgd"}, f"label = {label!r}: must be 1 to 60") for label in ("a:b", "", " a", "..", 3)),
    ({"a\nb": "asgd"}, "^label = 'a.nb'"),
    ({"a" * 61: "asgd"}, "^label = 'aaa"),
    ({"a b": "asgd", "A_b": "fedavg"}, "methods = ['a b', 'A_b']: must be names of different folders"),
    ({"a": "fedasync:mixing=0.4", "b": "fedasync:mixing=.4"}, "two have the same name and options"),
    ({"a": 3}, "methods['a'] = '3': must be a name"),
    ({"a": "fedavgg"}, "method = 'fedavgg': unknown; did you mean 'fedavg'"),
    by=lambda given: compare(given, **SMALL),
)
test_wrong_labels_of_a_sweep_are_refused = refusals(
    ({"method": {"a": "asgd", "mixing": [0.1]}}, r"^method\.mixing = "),
    ({"method": {"a/b": "asgd"}}, "label in method = 'a/b': must be"),
    ({"method": {"a": "asgd", "b": "asgd"}}, "method = .*different from each other"),
    ({"lr": {"a": "high"}}, "lr.a = 'high': must be"),
    ({"method": {"a": "asgd"}, "lr": 0.1}, "a list of values in a grid"),
    by=lambda grid: sweep(SMALL, grid),
)


def test_a_label_stands_before_the_first_equals_sign_of_a_spec():
    assert split("Ours = fedasync:mixing=0.4") == ("Ours", "fedasync:mixing=0.4")
    for spec in ("fedasync:mixing=0.4", "fedbuff@buffer:size=5", "fedbuff+swa:start=3", "fedavg"):
        assert split(spec) == ("", spec)
    for word, label in {"Ours (a=0.4)=fedasync:mixing=0.4": "Ours (a=0.4)", "a=b=c": "a=b"}.items():
        with pytest.raises(ValueError, match=re.escape(f"label = {label!r}: must be")):
            split(word)


def test_a_method_is_found_by_its_label_its_spec_or_its_rule(tmp_path):
    assert method_in("Ours", NAMES) == method_in("fedasync:mixing=0.4", NAMES) == method_in("fedasync", NAMES) == "Ours"
    assert baseline_of(NAMES) == "Fed Avg" and baseline_of(NAMES, "asgd") == "asgd"
    assert baseline_of({"A": "fedavg@cohort", "B": "fedavg"}) == "B"
    assert method_in("fedavg", {"fedavg": "asgd", "B": "fedavg"}) == "fedavg"
    runs = {name: [make_run(method=spec)] for name, spec in NAMES.items()}
    assert "relative to Fed Avg" in write_comparison(runs, tmp_path, plots=False)
    with pytest.raises(ValueError, match="baseline = 'fedavg': must be one of A, B"):
        baseline_of({"A": "fedavg@cohort", "B": "fedavg@every"}, "fedavg")


def test_the_command_takes_labels(capsys):
    words = ("Ours=fedasync:mixing=0.4", "Avg=fedavg", "asgd", *FLAGS)
    assert cli.main(["compare", *words, "--target", "Ours", "--baseline", "asgd"]) == 0
    out = capsys.readouterr().out
    assert "the final accuracy of Ours" in out and "relative to asgd" in out
    assert load("runs/compare/runs/Ours/seed_0").settings["method"] == "fedasync:mixing=0.4"
    assert cli.main(["compare", "Fourth=fedbuff@buffer:size=2", *words]) == 0
    assert "saved in runs/compare:" in capsys.readouterr().out
    for wrong, says in (
        (("x=", "asgd"), "method = 'x=': must be LABEL=METHOD"),
        (("a/b=asgd",), "label = 'a/b': must be 1 to 60"),
        (("A=asgd", "A=fedavg"), "methods = ['A=asgd', 'A=fedavg']: must be different from each other, but A is there"),
        (("Ours=asgd", "--baseline", "fedavg"), "baseline = 'fedavg': must be one of Ours"),
        (("Ours=asgd", "--target", "fedavg"), "or one of Ours"),
        (("Ours=fedasync", "--mixing", "0.4"), "as in fedasync:mixing=0.4"),
    ):
        assert says in refused(capsys, "compare", *wrong, *FLAGS)


TOML = """
seeds = 3
base = {model = "logistic", clients = 4, steps = 1, updates = 6}
grid.lr = [0.05, 0.1]
grid.method = {Ours = "fedasync:mixing=0.4", FedBuff = "fedbuff@buffer:size=2"}
"""


def test_a_sweep_shows_labels_in_folders_and_tables(tmp_path, monkeypatch, capsys):
    sweep_engine.use(monkeypatch)
    Path("s.toml").write_text(TOML)
    words = ["sweep", "s.toml", "--out", "out", "--no-plots", "--quiet"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "Ours" in out and "fedasync:mixing" not in out
    assert {row["method"] for row in rows(tmp_path / "out" / "settings.csv")} == {"Ours", "FedBuff"}
    assert {row["first"] for row in rows(tmp_path / "out" / "pairs.csv")} == {"Ours"}
    assert load("out/runs/lr=0.05,method=Ours,seed=0").settings["method"] == "fedasync:mixing=0.4"
    assert cli.main([*words, "--collect"]) == 0, "the definition keeps the labels"
    assert set(read("out").groups) == {f"lr={lr}, {name}" for lr in (0.05, 0.1) for name in ("Ours", "FedBuff")}


def test_a_sweep_in_python_takes_labels_too():
    grid = {"method": {"Ours": "fedasync:mixing=0.4", "Own": Method(methods.asgd())}, "lr": {"low": 1e-3, "high": 0.1}}
    found = sweep(SMALL, grid, progress=False)
    assert [point.name for point in found.points][:2] == ["method=Ours,lr=low", "method=Ours,lr=high"]
    assert [str(settings.method) for settings in found.settings][::2] == ["fedasync:mixing=0.4", "Own"]
    assert found.points[1].shown(["method", "lr"]) == {"method": "Ours", "lr": "high"}
    found = sweep(SMALL, {"method": {"mixing": np.array([0.25, 0.5])}}, progress=False)
    assert [point.name for point in found.points] == ["mixing=0.25", "mixing=0.5"], "options, not labels"


def called(capsys, *words: str) -> list[str]:
    """The lines of the file after a command that must succeed; every word is kept, quoted."""
    assert cli.main(words) == 0
    capsys.readouterr()
    folder = words[1] if words[0] in ("resume", "redraw") else words[words.index("--out") + 1]
    lines = Path(folder, COMMAND).read_text().splitlines()
    assert shlex.split(lines[-1]) == ["fedjax-async", *words]
    return lines


def test_a_run_keeps_its_command_and_further_ones_below(capsys):
    own = ("run", *FLAGS, "--out", "my run")
    first = called(capsys, *own, "--method", "fedasync:mixing=0.4")
    assert first == [f"fedjax-async run {' '.join(FLAGS)} --out 'my run' --method fedasync:mixing=0.4"]
    assert called(capsys, *own, "--method", "fedasync:mixing=0.4") == first
    second = called(capsys, "redraw", "my run", "--no-plots")
    assert second == [*first, "fedjax-async redraw 'my run' --no-plots"]
    refused(capsys, *own)
    assert Path("my run", COMMAND).read_text().splitlines() == second
    for anew in ("--overwrite", "--again"):
        assert len(called(capsys, *own, anew)) == 1
    assert any(note.startswith("Command: fedjax-async run --model") for note in read("my run").notes)


def test_a_comparison_keeps_its_command_and_its_runs_none(capsys):
    lines = called(capsys, "compare", "Our method=fedasync", "asgd", *FLAGS, "--out", "two")
    assert len(lines) == 1 and "compare 'Our method=fedasync' asgd" in lines[0]
    assert [str(path) for path in Path().rglob(COMMAND)] == [f"two/{COMMAND}"]
    assert len(called(capsys, "compare", "fedavg", *FLAGS, "--out", "two")) == 2
    assert read("two").notes[-1] == f"Command: fedjax-async compare fedavg {' '.join(FLAGS)} --out two"
    refused(capsys, "compare", "asgd", *FLAGS, "--lr", "0.7", "--out", "two")
    assert len(Path("two", COMMAND).read_text().splitlines()) == 2, "a refused command adds no line"


def test_a_sweep_keeps_its_command(capsys, monkeypatch):
    sweep_engine.use(monkeypatch)
    words = ("sweep", "s.toml", "--out", "out", "--quiet", "--no-plots")
    for rate, further, count in ((0.05, (), 1), (0.05, ("--final", "best"), 2), (0.03, ("--overwrite",), 1)):
        Path("s.toml").write_text(TOML.replace("0.05", str(rate)))
        assert len(called(capsys, *words, *further)) == count


def test_an_interrupted_run_and_its_continuation_are_both_kept(capsys, monkeypatch):
    def cut(*arguments, **options):
        raise KeyboardInterrupt

    train = sweeping.execute
    monkeypatch.setattr(sweeping, "execute", cut)
    with monkeypatch.context() as patch:
        patch.setattr(sweeping, "execute_group", cut)
        assert cli.main(["run", *FLAGS, "--out", "none"]) == 130 and not Path("none").exists()
        patch.setattr(sweeping, "execute_group", trained)
        assert cli.main(["run", *FLAGS, "--checkpoint", "2", "--out", "one"]) == 130
        patch.setattr(sweeping, "execute", train)
        lines = called(capsys, "resume", "one", "--quiet", "--no-plots")
    assert [shlex.split(line)[1] for line in lines] == ["run", "resume"]


def test_calls_from_python_write_no_command_and_the_folders_are_the_same(capsys):
    called(capsys, "run", *FLAGS, "--out", "one")
    simulate(**SAVED, out="two")
    compare(["asgd"], **SAVED, out="three")
    assert contents(Path("one")) == contents(Path("two"))
    assert [str(path) for path in Path().rglob(COMMAND)] == [f"one/{COMMAND}"]


def test_a_folder_with_only_the_command_of_a_killed_process_is_free(capsys):
    for folder, words in (("one", ("run",)), ("two", ("compare", "asgd"))):
        Path(folder).mkdir()
        Path(folder, COMMAND).write_text("fedjax-async run --killed\n")
        assert len(called(capsys, *words, *FLAGS, "--out", folder)) == 2
