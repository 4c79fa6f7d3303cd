"""Runs that scripts of experiments know from files of curves: which are trained, what is kept, what tables say."""

from __future__ import annotations

import argparse
import csv
import functools
import hashlib
import json
import operator
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from fedjax_async.data import load
from fedjax_async.results.worlds import axis_title
from fedjax_async.types import Run
from tests.experiment import module
from tests.results.made_up import make_run

orthofl, asynfl = (module(paper, "study") for paper in ("orthofl", "asynfl"))
shared, known_runs = orthofl.shared, orthofl.known_runs


def options(out, known=(), seeds=1, minutes=None, began=None):
    """The options of a script that trains 1 seed at the smallest scale; ``--minutes`` are counted from now."""
    given = argparse.Namespace(name="table", out=out, scale="smoke", seeds=seeds, quiet=True, known=list(known))
    given.minutes, given.began, given.no_pictures = minutes, time.monotonic() if began is None else began, True
    return given


def test_known_runs_are_not_trained_again_and_give_the_same_table(engine, monkeypatch, tmp_path):
    setting = {"dataset": "fashion_mnist_6k", "model": "logistic", "steps": 1, "updates": 6, "eval_updates": 3}
    variants = [orthofl.Variant("fedasync", {"method": "fedasync"}), orthofl.Variant("orthofl", {"method": "orthofl"})]

    def file(out):
        return tmp_path / out / "table_mnist_curves.csv"

    def run(known, out, seeds=2, variants=variants):
        runs = shared.run_variants("mnist", setting, variants, options(tmp_path / out, known, seeds))
        return runs, repr(orthofl.rows_of("mnist", runs, "fedasync"))  # one seed has no deviation: NaN

    one = run([], "one", seeds=1)[1]
    rows = run([file("one")], "two")[1]
    trained = list((tmp_path / "two" / "runs" / "mnist" / "runs").iterdir())
    assert len(trained) == 2, "the second seed of each variant"
    assert rows == run([], "three")[1]
    monkeypatch.setattr(shared, "_train", None)
    assert rows == run([file("two")], "four")[1]
    assert file("four").read_bytes() == file("two").read_bytes()
    for known, out in (("two", "five"), ("one", "two")):
        assert one == run([file(known)], out, seeds=1)[1]
        assert len(known_runs.read([file(out)])) == 4, "also those of the known file, and of the file before"
    points, made = [], [make_run([0.1, 0.5]), make_run([0.2, 0.6])]
    monkeypatch.setattr(shared, "_train", lambda base, given, *rest: points.extend(given) or made)
    twice, _ = run([], "six", variants=[orthofl.Variant(name, {"method": "fedasync"}) for name in ("one", "fedasync")])
    assert [point["seed"] for point in points] == [0, 1], "rows with the same settings are trained once"
    assert all(map(operator.is_, [*twice["one"], *twice["fedasync"]], made * 2))


def test_curves_name_the_machine_of_each_run_and_tables_those_of_known_runs(monkeypatch, tmp_path):
    older, file = tmp_path / "older_curves.csv", tmp_path / "table_mnist_curves.csv"
    setting = {"dataset": "fashion_mnist_6k", "seed": 0}
    known_runs.write(older, {known_runs.key(setting): known_runs.Known("a", 0, make_run([0.1, 0.5]))})
    assert "machine" not in older.read_text(), "as in files without it"

    def run(known, seeds):
        given = options(tmp_path, known, seeds)
        shared.run_variants("mnist", {"dataset": "fashion_mnist_6k"}, [shared.Variant("a", {})], given)
        shared.report([{"rule": "a"}], given)
        return next(csv.DictReader((tmp_path / "table.csv").read_text().splitlines())).get("trained on")

    monkeypatch.setattr(shared, "_train", lambda base, points, folder, given: [make_run([0.1, 0.5])] * len(points))
    monkeypatch.setattr(shared.common, "machine", lambda: "one GPU, JAX 1")
    assert run([older], seeds=2) == "not recorded; one GPU, JAX 1"
    assert [known.machine for known in known_runs.read([file]).values()] == ["", "one GPU, JAX 1"]
    monkeypatch.setattr(shared.common, "machine", lambda: "two CPUs, JAX 2")
    assert run([file], seeds=3) == "not recorded; one GPU, JAX 1; two CPUs, JAX 2"
    assert run([], seeds=1) is None, "all on the machine of the column hardware"


def test_known_nodes_give_the_same_rows_as_trained_ones(monkeypatch, tmp_path):
    """PushCen's rows and late nodes need the nodes' own accuracies, and when they joined."""
    study = module("pushcen", "study")
    late = sys.modules["late"]
    variants = [study.Variant(n, study.METHODS[n] | {"partition": "iid"}) for n in ("async_dfedavg", "independent")]
    monkeypatch.setattr(study, "LATE", "joins:share=0.4,by={:g}")

    def rows(given):
        runs = study.run_task("smoke", variants, given)
        assert len(late.late_nodes(runs["independent"][0])) > 0
        return repr([study.summary(runs[v.name]) for v in variants]), repr(list(late.catching_up(runs)))

    trained = rows(options(tmp_path / "one"))
    curves = tmp_path / "one" / "table_smoke_curves.csv"
    monkeypatch.setattr(study.shared, "_train", None)
    assert rows(options(tmp_path / "two", known=[curves], minutes=0)) == trained
    for name in ("curves", "clients"):
        both = [(tmp_path / out / f"table_smoke_{name}.csv").read_bytes() for out in ("one", "two")]
        assert both[0] == both[1]
    curves.with_name("table_smoke_clients.csv").unlink()
    with pytest.raises(SystemExit) as ended:  # without the nodes the runs are not known
        rows(options(tmp_path / "three", known=[curves], minutes=0))
    assert ended.value.code == study.shared.known_runs.TIME_IS_UP


def test_known_clients_give_the_same_rows_of_asynfls_figure_4(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "study", asynfl)
    figure = module("asynfl", "figure_4")
    setting = {"dataset": "fashion_mnist_6k", "model": "logistic", "steps": 1, "clients": 6, "delay": "normal:mean=500"}
    setting |= {"time": 2000.0, "eval_time": 500.0}
    variants = [asynfl.Variant("fedbuff", asynfl.fedbuff(6)), asynfl.Variant("asynfl", asynfl.asynfl())]

    def rows(given):
        runs = asynfl.shared.run_variants("smoke", setting, variants, given, clients=figure.clients)
        found = [asynfl.summary("smoke", name, seeds, 0.1) for name, seeds in runs.items()]
        figure.finish("smoke", runs, found, given)
        return found

    trained = rows(options(tmp_path / "one", seeds=2))
    monkeypatch.setattr(asynfl.shared, "_train", None)
    known = [tmp_path / "one" / "table_smoke_curves.csv"]
    assert repr(rows(options(tmp_path / "two", known=known, seeds=2))) == repr(trained)
    assert trained[0]["uploads a step"].mean == 4 and trained[1]["mean staleness"].mean > 0


def test_uploads_of_an_incomplete_step_are_not_those_of_a_step(monkeypatch):
    monkeypatch.setitem(sys.modules, "study", asynfl)
    updates = {"client": [0, 2, 0, 2], "staleness": [0, 1, 2, 9], "used": [True, True, True, False]}
    run = SimpleNamespace(schedule=SimpleNamespace(num_clients=3), updates={k: np.array(v) for k, v in updates.items()})
    found = module("asynfl", "figure_4").clients(run)
    assert found["uploads"].tolist() == [2, 0, 1] and found["staleness"].tolist() == [2, 0, 1]


def test_what_can_be_run_is_found_without_a_word_about_a_run_that_nobody_asked_for(recwarn):
    assert asynfl.shared.missing(asynfl.setting_of("smoke", "smoke")[0] | {"method": "asynfl"}) is None
    assert not recwarn.list, "its one step ends before the first evaluation"


def test_a_script_begins_no_run_when_its_time_is_up(monkeypatch, tmp_path, capsys):
    variants = [orthofl.Variant(name, {"method": name}) for name in ("one", "two", "three")]
    clock = iter((0.0, 50.0, 70.0))  # seconds since the start when each run would begin
    given = options(tmp_path, minutes=1, began=0.0)
    monkeypatch.setattr(known_runs, "time", argparse.Namespace(monotonic=lambda: next(clock, 70.0)))
    monkeypatch.setattr(shared, "_train", lambda base, points, *rest: [make_run([0.1]) for _ in points])
    with pytest.raises(SystemExit) as ended:
        shared.run_variants("task", {"lr": 0.1}, variants, given)
    assert ended.value.code == known_runs.TIME_IS_UP == 3
    kept = known_runs.read([tmp_path / "table_task_curves.csv"])
    assert [known.variant for known in kept.values()] == ["one", "two"]
    assert "task: 0 of 3 runs are known" in (said := capsys.readouterr().err) and "1 runs are missing" in said
    again = options(tmp_path, minutes=0, known=[tmp_path / "table_task_curves.csv"], began=0.0)
    calls = [functools.partial(shared.run_variants, name, {"lr": 0.1}, variants, again) for name in ("task", "other")]
    with pytest.raises(SystemExit):
        shared.all_of(calls)
    assert "task: 2 of 3" in (said := capsys.readouterr().err) and "other: 2 of 3" in said, "both tasks are counted"


def test_keys_of_runs():
    """A rate that was once the default has the key of older files, and today's default another; own data count too."""
    key, before = known_runs.key, {"method": "fedbuff@buffer:size=2", "lr": 0.1, "seed": 1}

    def hashed(point):
        return hashlib.sha256(json.dumps(point, sort_keys=True).encode()).hexdigest()[:12]  # as older files have it

    assert key(before | {"method": "fedbuff:server_lr=1@buffer:size=2"}) == hashed(before)
    assert len({hashed(before), key(before), key({**before, "method": "fedbuff"})}) == 3
    plain = {"method": "orthofl", "seed": 1}
    assert key(plain) == hashed(plain)
    data = load("fashion_mnist_6k")
    given = (data, data._replace(x=data.x.copy()), data._replace(x=data.x + 1))
    found = [key({"dataset": each}) for each in given]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("of", "text", "why"),
    [
        ("curves_file", "table.csv", "must be a file of curves"),
        ("curves_file", "nothing.csv", "no such file"),
        *(("minutes", text, f"must be a number >= 0, not {text}") for text in ("-1", "soon", "nan")),
    ],
)
def test_wrong_arguments_are_named(monkeypatch, tmp_path, of, text, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text("task,variant\nmnist,fedavg\n")
    with pytest.raises(argparse.ArgumentTypeError, match=why):
        getattr(known_runs, of)(text)


def test_columns_that_only_some_runs_have_and_those_of_clients_are_kept(tmp_path):
    """Also of runs of unequal length."""
    rng, known = np.random.default_rng(0), {}
    for key, seed, evaluations, clients in (("a", 0, 2, 3), ("b", 3, 4, 2)):
        own = rng.random((evaluations, clients)).astype(np.float32)
        own[0, 1] = np.nan
        run = make_run(list(np.linspace(0.1, 0.5, evaluations)))
        run = run._replace(per_client={"joined": rng.random(clients), "own_accuracy": own})
        if key == "b":
            run = run._replace(evaluations=run.evaluations | {"values_bytes_up": rng.random(evaluations)})
        known[key] = known_runs.Known(f"variant {key}", seed, run)
    known_runs.write(tmp_path / "table_1_task_laptop_curves.csv", known)
    assert (tmp_path / "table_1_task_laptop_clients.csv").is_file()
    found = known_runs.read([tmp_path / "table_1_task_laptop_curves.csv"])
    for key, kept in known.items():
        assert found[key][:2] == kept[:2] and len(found[key].run.updates["client"]) == len(kept.run.updates["client"])
        for columns in ("evaluations", "per_client"):
            ours, theirs = getattr(found[key].run, columns), getattr(kept.run, columns)
            assert ours.keys() == theirs.keys()
            for column, values in theirs.items():
                np.testing.assert_array_equal(ours[column], values)
                assert columns == "evaluations" or ours[column].dtype == values.dtype


def test_the_axis_of_curves_without_a_schedule_tells_servers_from_nodes():
    scores = {"accuracy": np.ones(2), "loss": np.ones(2)}
    server, nodes = (Run({}, (), one, {}, {}, {}, None) for one in (scores, scores | {"consensus": np.ones(2)}))
    assert axis_title("accuracy", [server]) == "test accuracy (%)" and "nodes" in axis_title("accuracy", [nodes])
