"""Scripts of the experiments: the studies of OrthoFL, AsynFL and AsyncManifold, methods at their defaults, the kit."""

from __future__ import annotations

import argparse
import csv
import functools
import hashlib
import json
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async import simulate
from fedjax_async.base import registry
from fedjax_async.base.registry import spec as spec_of
from fedjax_async.clock import TIMINGS, bind_delays
from fedjax_async.config.methods import method_of
from fedjax_async.config.registries import METHODS
from fedjax_async.data import load
from fedjax_async.geometry import cubic
from fedjax_async.local import Curve
from fedjax_async.models import linear
from fedjax_async.results import files
from fedjax_async.server import fedasync
from fedjax_async.server.asynccurve import asynccurve
from fedjax_async.types import Arrival
from tests.experiment import EXPERIMENTS, module
from tests.results.made_up import make_run
from tests.results.test_same_numbers import SEEDS, check_end, ends, made

RESULTS = EXPERIMENTS / "orthofl" / "results"


def script(monkeypatch, paper, name):
    """A script with the ``study`` of its own folder, which does not stay imported."""
    monkeypatch.delitem(sys.modules, "study", raising=False)
    loaded = module(paper, name)
    del sys.modules["study"]
    return loaded


@pytest.fixture(scope="module")
def orthofl():
    return module("orthofl", "study")


def test_the_open_numbers_are_those_with_the_highest_validation_accuracy(orthofl, monkeypatch):
    monkeypatch.setitem(sys.modules, "study", orthofl)
    tuning = module("orthofl", "tuning")
    with (RESULTS / "tuning_laptop.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for method, (_, spec, values) in tuning.OPEN.items():
        found = {float(row["value"]): row for row in rows if row["method"] == method}
        assert tuple(found) == values
        best = max(found, key=lambda value: float(found[value]["validation accuracy (%)"]))
        assert [value for value, row in found.items() if row["chosen"]] == [best]
        assert orthofl.METHODS[method] == spec.format(f"{best:g}")


@pytest.mark.parametrize(
    ("accuracy", "shown"),
    [
        ([0.1] * 18 + [0.5, 0.9], {"accuracy (%)": 70, "last (%)": 90, "best (%)": 90}),
        ([0.2, 0.1, 0.5, 0.4, 0.3, 0.5], {"mean dip (points)": (0 + 10 + 0 + 10 + 20 + 0) / 6}),
    ],
    ids=["the mean of the last tenth", "dips below the best so far"],
)
def test_a_row_has_numbers_of_its_evaluations(orthofl, accuracy, shown):
    (row,) = orthofl.rows_of("mnist", {"orthofl": [make_run(accuracy)]}, "fedavg")
    np.testing.assert_allclose([row[name].mean for name in shown], list(shown.values()), rtol=1e-5)


def test_figure_10_compares_mixing_rates_with_as_many_epochs_of_fedavg(orthofl, monkeypatch):
    monkeypatch.setitem(sys.modules, "study", orthofl)
    figure = module("orthofl", "figure_10")
    for scale in ("laptop", "paper"):
        mixing = [v for v in figure.variants("mnist", scale) if v.picture == "mixing"]
        assert [v.name.partition(",")[0] for v in mixing[:5]] == ["fedavg", *(f"orthofl {r}" for r in figure.RATES)]
        assert {(v.changes["epochs"], v.changes["batch_size"], v.changes["lr"]) for v in mixing} == {(5.0, 128, 0.01)}
        assert all(",reference_steps=234.375" in v.changes["delay"] for v in figure.variants("mnist", scale))
    rising = {"fedavg": 0.8, "orthofl": 0.9}
    runs = {f"{n}, mixing": [make_run([0.1, high, high])] for n, high in rising.items()}
    runs |= {f"{n}, epochs 5": [make_run([0.1, 0.1, 0.1, high / 2, high / 2])] for n, high in rising.items()}
    by_panel = functools.partial(
        orthofl.rows_by_panel, "mnist", name="fedavg", baseline_of=figure.baseline_of, rows=orthofl.rows_against
    )
    rows = by_panel(runs)
    assert [row["time / fedavg"].mean for row in rows] == [1.0, 1.0, 1.0, 1.0]
    np.testing.assert_allclose([row["above fedavg (points)"].mean for row in rows], [0, 10, 0, 5], atol=1e-4)
    del runs["fedavg, epochs 5"]
    rows = by_panel(runs)
    for column in ("time / fedavg", "above fedavg (points)"):
        assert [column in row for row in rows] == [True, True, False], "not without the baseline"


def test_figures_8_and_9_compare_the_rows_of_a_picture(orthofl):
    accuracy = {"fedavg, a": [0.5, 0.6], "orthofl, a": [0.6, 0.7], "fedavg, b": [0.7, 0.8], "orthofl, b": [0.75, 0.85]}
    runs = {name: [make_run([0.1, last]) for last in each] for name, each in accuracy.items()}
    rows = orthofl.rows_by_panel("mnist", runs, "fedavg")
    assert [row["variant"] for row in rows] == list(runs)
    np.testing.assert_allclose([row["above fedavg (points)"].mean for row in rows], [0, 10, 0, 5], atol=1e-4)
    np.testing.assert_allclose([row["above fedavg (points)"].std for row in rows], 0, atol=1e-4)
    assert [row["near best"] for row in rows] == ["no", "yes", "yes", "yes"], "within the picture"


def test_figure_2_records_what_an_update_changes_in_each_neuron(monkeypatch):
    method = script(monkeypatch, "orthofl", "figure_2").watched("orthofl:mixing=0.6,exponent=0.5", "output")
    run = simulate(method=method, model="logistic", clients=2, steps=1, updates=3)
    assert np.abs(np.stack([run.updates[f"neuron {i}"] for i in range(10)])).min() > 0


def test_rows_with_the_same_settings_are_trained_once(orthofl, monkeypatch, tmp_path):
    setting = {"dataset": "fashion_mnist_6k", "model": "logistic", "steps": 1, "updates": 6}
    variants = [orthofl.Variant(name, {"method": "fedasync"}) for name in ("one", "two")]
    given = argparse.Namespace(name="table", out=tmp_path, seeds=2, quiet=True)
    trained = []
    monkeypatch.setattr(orthofl.shared, "_train", lambda base, points, *rest: trained.extend(points) or points)
    runs = orthofl.shared.run_variants("mnist", setting, variants, given)
    assert [point["seed"] for point in trained] == [0, 1]
    assert runs["one"] == runs["two"] == trained


def test_crowded_pictures_come_twice_the_second_time_with_bands(orthofl, monkeypatch, tmp_path):
    names = [*orthofl.METHODS, "one more"]
    variants = [orthofl.Variant(f"{name}, many", {}, "many") for name in names] + [
        orthofl.Variant("orthofl, few", {}, "few")
    ]
    drawn = {}
    monkeypatch.setattr(orthofl, "run_task", lambda *_, **__: {v.name: [make_run([0.1, 0.5])] for v in variants})
    monkeypatch.setattr(orthofl.shared, "save_figure", lambda figure, path: drawn.update({path.name: figure}))
    monkeypatch.setattr(sys, "argv", ["figure_8", "--scale", "smoke", "--out", str(tmp_path)])
    orthofl.study("about", "figure_8", ["mnist"], variants, baseline="fedavg, many")
    assert sorted(drawn) == ["figure_8_smoke_bands_many.png", "figure_8_smoke_few.png", "figure_8_smoke_many.png"]
    bands = [len(drawn[f"figure_8_smoke{name}_many.png"].axes[0].collections) for name in ("", "_bands")]
    assert bands[1] - len(orthofl.BANDS) == len(orthofl.BANDS), "a band and a final bar of each row"
    assert bands[0] == len(names), "final bars only"


def test_known_runs_are_not_trained_again_and_give_the_same_table(orthofl, engine, monkeypatch, tmp_path):
    shared, known_runs = orthofl.shared, orthofl.known_runs
    setting = {"dataset": "fashion_mnist_6k", "model": "logistic", "steps": 1, "updates": 6, "eval_updates": 3}
    variants = [orthofl.Variant("fedasync", {"method": "fedasync"}), orthofl.Variant("orthofl", {"method": "orthofl"})]

    def run(known, out, seeds=2):
        given = argparse.Namespace(name="table", out=tmp_path / out, seeds=seeds, quiet=True, known=known)
        rows = orthofl.rows_of("mnist", shared.run_variants("mnist", setting, variants, given), "fedasync")
        return repr(rows)  # one seed has no deviation: NaN

    one = run([], "one", seeds=1)
    rows = run([tmp_path / "one" / "table_mnist_curves.csv"], "two")
    trained = list((tmp_path / "two" / "runs" / "mnist" / "runs").iterdir())
    assert len(trained) == 2, "the second seed of each variant"
    assert rows == run([], "three")
    monkeypatch.setattr(shared, "_train", None)
    assert rows == run([tmp_path / "two" / "table_mnist_curves.csv"], "four")
    assert one == run([tmp_path / "two" / "table_mnist_curves.csv"], "five", seeds=1)
    copy = (tmp_path / "four" / "table_mnist_curves.csv").read_bytes()
    assert copy == (tmp_path / "two" / "table_mnist_curves.csv").read_bytes()
    assert len(known_runs.read([tmp_path / "five" / "table_mnist_curves.csv"])) == 4, "also those of the known file"
    assert one == run([tmp_path / "one" / "table_mnist_curves.csv"], "two", seeds=1)
    assert len(known_runs.read([tmp_path / "two" / "table_mnist_curves.csv"])) == 4, "also those of the file before"


def test_a_rate_that_was_once_the_default_has_the_key_of_older_files_and_todays_default_another(orthofl):
    known_runs = orthofl.known_runs
    before = {"method": "fedbuff@buffer:size=2", "lr": 0.1, "seed": 1}
    older = hashlib.sha256(json.dumps(before, sort_keys=True).encode()).hexdigest()[:12]  # as the files have it
    assert known_runs.key(before | {"method": "fedbuff:server_lr=1@buffer:size=2"}) == older
    assert len({older, known_runs.key(before), known_runs.key({**before, "method": "fedbuff"})}) == 3
    plain = {"method": "orthofl", "seed": 1}
    assert known_runs.key(plain) == hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:12]


def test_data_of_ones_own_count_by_their_content(orthofl):
    known_runs = orthofl.known_runs
    data = load("fashion_mnist_6k")
    given = (data, data._replace(x=data.x.copy()), data._replace(x=data.x + 1))
    found = [known_runs.key({"dataset": each}) for each in given]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(("name", "why"), [("table.csv", "must be a file of curves"), ("nothing.csv", "no such file")])
def test_only_files_of_curves_are_known(orthofl, tmp_path, name, why):
    (tmp_path / "table.csv").write_text("task,variant\nmnist,fedavg\n")
    with pytest.raises(argparse.ArgumentTypeError, match=why):
        orthofl.known_runs.curves_file(str(tmp_path / name))


def test_curves_name_the_machine_of_each_run_and_tables_those_of_known_runs(orthofl, monkeypatch, tmp_path):
    shared, known_runs, common = orthofl.shared, orthofl.known_runs, orthofl.shared.common
    older, file = tmp_path / "older_curves.csv", tmp_path / "table_mnist_curves.csv"
    setting = {"dataset": "fashion_mnist_6k", "seed": 0}
    known_runs.write(older, {known_runs.key(setting): known_runs.Known("a", 0, make_run([0.1, 0.5]))})
    assert "machine" not in older.read_text(), "as in files without it"

    def run(known, seeds):
        given = argparse.Namespace(name="table", out=tmp_path, seeds=seeds, quiet=True, known=known, scale="smoke")
        shared.run_variants("mnist", {"dataset": "fashion_mnist_6k"}, [shared.Variant("a", {})], given)
        shared.report([{"rule": "a"}], given)
        return next(csv.DictReader((tmp_path / "table.csv").read_text().splitlines())).get("trained on")

    monkeypatch.setattr(shared, "_train", lambda base, points, folder, given: [make_run([0.1, 0.5])] * len(points))
    monkeypatch.setattr(common, "machine", lambda: "one GPU, JAX 1")
    assert run([older], seeds=2) == "not recorded; one GPU, JAX 1"
    assert [known.machine for known in known_runs.read([file]).values()] == ["", "one GPU, JAX 1"]
    monkeypatch.setattr(common, "machine", lambda: "two CPUs, JAX 2")
    assert run([file], seeds=3) == "not recorded; one GPU, JAX 1; two CPUs, JAX 2"
    assert run([], seeds=1) is None, "all on the machine of the column hardware"


def test_columns_that_only_some_runs_have_are_kept(orthofl, tmp_path):
    known_runs = orthofl.known_runs
    plain = make_run([0.1, 0.2])
    other = plain._replace(evaluations=plain.evaluations | {"values_bytes_up": np.array([0.0, 7.5])})
    known = {"a": known_runs.Known("plain", 0, plain), "b": known_runs.Known("other", 3, other)}
    known_runs.write(tmp_path / "curves.csv", known)
    found = known_runs.read([tmp_path / "curves.csv"])
    for key, run in (("a", plain), ("b", other)):
        assert found[key][:2] == known[key][:2]
        assert found[key].run.evaluations.keys() == run.evaluations.keys()
        for column, values in run.evaluations.items():
            np.testing.assert_array_equal(found[key].run.evaluations[column], values)
        assert len(found[key].run.updates["client"]) == len(run.updates["client"])


def known_of(tmp_path, name="table", minutes=None, known=(), seeds=1):
    """The options of a script that trains 1 seed at the smallest scale; ``--minutes`` are counted from now."""
    given = argparse.Namespace(name=name, out=tmp_path, scale="smoke", seeds=seeds, quiet=True, known=list(known))
    given.minutes, given.began, given.no_pictures = minutes, time.monotonic(), True
    return given


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

    trained = rows(known_of(tmp_path / "one"))
    curves = tmp_path / "one" / "table_smoke_curves.csv"
    monkeypatch.setattr(study.shared, "_train", None)
    assert rows(known_of(tmp_path / "two", known=[curves], minutes=0)) == trained
    for name in ("curves", "clients"):
        both = [(tmp_path / out / f"table_smoke_{name}.csv").read_bytes() for out in ("one", "two")]
        assert both[0] == both[1]
    curves.with_name("table_smoke_clients.csv").unlink()
    with pytest.raises(SystemExit) as ended:  # without the nodes the runs are not known
        rows(known_of(tmp_path / "three", known=[curves], minutes=0))
    assert ended.value.code == study.shared.known_runs.TIME_IS_UP


def test_known_clients_give_the_same_rows_of_asynfls_figure_4(monkeypatch, tmp_path):
    study = module("asynfl", "study")
    monkeypatch.setitem(sys.modules, "study", study)
    figure = module("asynfl", "figure_4")
    setting = {"dataset": "fashion_mnist_6k", "model": "logistic", "steps": 1, "clients": 6, "delay": "normal:mean=500"}
    setting |= {"time": 2000.0, "eval_time": 500.0}
    variants = [study.Variant("fedbuff", study.fedbuff(6)), study.Variant("asynfl", study.asynfl())]

    def rows(given):
        runs = study.shared.run_variants("smoke", setting, variants, given, clients=figure.clients)
        found = [study.summary("smoke", name, seeds, 0.1) for name, seeds in runs.items()]
        figure.finish("smoke", runs, found, given)
        return found

    trained = rows(known_of(tmp_path / "one", seeds=2))
    monkeypatch.setattr(study.shared, "_train", None)
    known = [tmp_path / "one" / "table_smoke_curves.csv"]
    assert repr(rows(known_of(tmp_path / "two", known=known, seeds=2))) == repr(trained)
    assert trained[0]["uploads a step"].mean == 4 and trained[1]["mean staleness"].mean > 0


def test_columns_of_clients_are_kept_also_of_runs_of_unequal_length(orthofl, tmp_path):
    known_runs, rng = orthofl.known_runs, np.random.default_rng(0)
    found = {}
    for key, evaluations, clients in (("a", 2, 3), ("b", 4, 2)):
        own = rng.random((evaluations, clients)).astype(np.float32)
        own[0, 1] = np.nan
        of_clients = {"joined": rng.random(clients), "own_accuracy": own}
        run = make_run(list(np.linspace(0.1, 0.5, evaluations)))._replace(per_client=of_clients)
        found[key] = known_runs.Known(key, 0, run)
    known_runs.write(tmp_path / "table_1_task_laptop_curves.csv", found)
    assert (tmp_path / "table_1_task_laptop_clients.csv").is_file()
    again = known_runs.read([tmp_path / "table_1_task_laptop_curves.csv"])
    for key, known in found.items():
        assert again[key].run.per_client.keys() == known.run.per_client.keys()
        for column, values in known.run.per_client.items():
            np.testing.assert_array_equal(again[key].run.per_client[column], values)
            assert again[key].run.per_client[column].dtype == values.dtype


def test_a_script_begins_no_run_when_its_time_is_up(orthofl, monkeypatch, tmp_path, capsys):
    shared, known_runs = orthofl.shared, orthofl.known_runs
    variants = [orthofl.Variant(name, {"method": name}) for name in ("one", "two", "three")]
    clock = iter((0.0, 50.0, 70.0))  # seconds since the start when each run would begin
    given = known_of(tmp_path, minutes=1)
    given.began = 0.0
    monkeypatch.setattr(known_runs, "time", argparse.Namespace(monotonic=lambda: next(clock, 70.0)))
    monkeypatch.setattr(shared, "_train", lambda base, points, *rest: [make_run([0.1]) for _ in points])
    with pytest.raises(SystemExit) as ended:
        shared.run_variants("task", {"lr": 0.1}, variants, given)
    assert ended.value.code == known_runs.TIME_IS_UP == 3
    kept = known_runs.read([tmp_path / "table_task_curves.csv"])
    assert [known.variant for known in kept.values()] == ["one", "two"]
    assert "task: 0 of 3 runs are known" in (said := capsys.readouterr().err) and "1 runs are missing" in said
    again = known_of(tmp_path, minutes=0, known=[tmp_path / "table_task_curves.csv"])
    again.began = 0.0
    calls = [functools.partial(shared.run_variants, name, {"lr": 0.1}, variants, again) for name in ("task", "other")]
    with pytest.raises(SystemExit):
        shared.all_of(calls)
    assert "task: 2 of 3" in (said := capsys.readouterr().err) and "other: 2 of 3" in said, "both tasks are counted"


@pytest.mark.parametrize("text", ["-1", "soon", "nan"])
def test_minutes_are_a_number_of_at_least_0(orthofl, text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"must be a number >= 0, not {text}"):
        orthofl.known_runs.minutes(text)


UNEQUAL = {"fedavg": made(SEEDS["one ends earlier"]), "fedbuff": made(SEEDS["more evaluations"])}


def test_a_figure_ends_at_the_numbers_of_the_table(orthofl, tmp_path, monkeypatch):
    written, figures = [], {}
    monkeypatch.setattr(orthofl.shared, "save_figure", lambda figure, path: figures.update({path.name: figure}))
    monkeypatch.setattr(orthofl, "run_task", lambda *arguments, **options: UNEQUAL)
    monkeypatch.setattr(orthofl, "report", lambda rows, given: written.extend(rows))
    monkeypatch.setattr(sys, "argv", ["figure", "--scale", "smoke", "--out", str(tmp_path)])
    orthofl.study("", "figure", ["mnist"], [orthofl.Variant(name, {}) for name in UNEQUAL], baseline="fedavg")
    shown = ends(figures["figure_smoke.png"])
    assert [row["variant"] for row in written] == list(shown)
    for row in written:
        check_end(shown[row["variant"]], row["accuracy (%)"])


def test_a_figure_of_asynfl_ends_at_the_numbers_of_the_table(tmp_path, monkeypatch):
    study, figures = module("asynfl", "study"), {}
    monkeypatch.setattr(study, "save_figure", lambda figure, path: figures.update({path.name: figure}))
    study.draw(UNEQUAL, argparse.Namespace(out=tmp_path), "figure", "smoke")
    assert set(figures) == {"figure_smoke.png", "figure_smoke_loss.png"}
    for name, runs in UNEQUAL.items():
        check_end(ends(figures["figure_smoke.png"])[name], study.summary("smoke", name, runs, 0.5)["final (%)"])


# --- AsyncManifold ------------------------------------------------------------------------------------

phases, corrections = (module("asynccurve", name) for name in ("phases", "corrections"))


@pytest.fixture
def asynccurve_study(nothing_stays_registered):
    return module("asynccurve", "study")


def test_smoothing_is_the_truncated_gaussian():
    values = np.random.default_rng(0).normal(size=40)
    got = phases.smoothed(values, sigma=3.0)
    for at in (0, 5, 20, 39):
        near = [j for j in range(40) if abs(j - at) <= 6]
        weights = np.exp([-((j - at) ** 2) / 18 for j in near])
        np.testing.assert_allclose(got[at], weights @ values[near] / weights.sum(), rtol=1e-12)
    np.testing.assert_allclose(phases.smoothed(np.full(4, 2.5), sigma=10.0), 2.5)


def test_relative_losses_are_from_best_to_worst_and_averaged_over_runs():
    one = {"a": np.array([1.0, 5.0]), "b": np.array([3.0, 5.0]), "c": np.array([2.0, 5.0])}
    other = {"a": np.array([4.0, 0.0]), "b": np.array([2.0, 1.0])}
    found = phases.normalised(one)
    assert {name: each.tolist() for name, each in found.items()} == {"a": [0, 0], "b": [1, 0], "c": [0.5, 0]}
    mean = phases.relative([one, other], sigma=0.1)
    assert {name: each.tolist() for name, each in mean.items()} == {"a": [0.5, 0], "b": [0.5, 0.5]}


def test_a_phase_change_is_found_where_it_is_and_not_where_it_is_not():
    first, second = np.arange(100.0), np.full(100, 29.5)
    change = phases.phase_change(first, second)
    assert change == (30, 1.0, 1.0, True)
    assert not phases.phase_change(second, first).found, "the other way round"
    assert not phases.phase_change(first, second + 65).found, "the second phase is too short"
    noise = np.random.default_rng(1).normal(size=(2, 100))
    assert not phases.phase_change(*noise).found


def test_the_interval_is_gaussian():
    values = np.random.default_rng(2).normal(1.0, 0.1, 400)
    mean, half = phases.interval(values)
    assert mean == pytest.approx(values.mean()) and half == pytest.approx(2.5758 * values.std(ddof=1) / 20)


def vector(seed, scale=1.0):
    return {"w": jnp.asarray(np.random.default_rng(seed).normal(size=6) * scale, jnp.float32)}


def arrival_of(upload, start):
    one = jnp.ones(())
    return Arrival(upload, start, jnp.int32(1), one, jnp.int32(0), one, jnp.bool_(True), jnp.int32(1), ())


def test_proposals_are_where_each_correction_leads():
    start, now, change, offset = (vector(seed) for seed in range(4))
    rule = corrections.observed(fedasync(mixing=0.5))
    state, _ = rule.init(now)
    made = corrections.proposals(now, state, arrival_of(Curve(change, offset), start), 0.25)
    made = {name: np.asarray(each["w"], np.float64) for name, each in made.items()}
    t, x, d, o = (np.asarray(each["w"], np.float64) for each in (start, now, change, offset))
    b = x - t
    orthogonal = d - (d @ b) / (b @ b) * b
    chords = {
        "asgd": d,
        "fedasync": d - b,
        "orthograd": orthogonal if d @ b <= 0 else d,
        "orthopos": orthogonal if d @ b <= 0 else d - b,
        "orthostrict": orthogonal,
        "dc_asgd_a": d - corrections.STRENGTH * d * d * b / np.sqrt(0.05 * d * d + 1e-7),
    }
    for name, chord in chords.items():
        np.testing.assert_allclose(made[name], x + 0.25 * chord, rtol=2e-5, atol=1e-6, err_msg=name)
        if name in corrections.CURVED:
            bend = made[f"{name}, curve"] - made[name]
            np.testing.assert_allclose(bend, 0.375 * o, rtol=2e-4, atol=1e-6, err_msg=name)
            turned = made[f"{name}, rotated curve"] - made[name]
            assert np.linalg.norm(turned) == pytest.approx(0.375 * np.linalg.norm(o), rel=1e-4)
            cosines = [u @ v / np.linalg.norm(u) / np.linalg.norm(v) for u, v in ((o, d), (turned, chord))]
            assert cosines[0] == pytest.approx(cosines[1], abs=1e-5), "the angle to the chord is kept"
    np.testing.assert_allclose(made["asgd, rotated curve"], made["asgd, curve"], atol=1e-6)
    np.testing.assert_allclose(made["fresh, curve"], t + 0.25 * d + 0.375 * o, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(made["fresh"], t + 0.25 * d, rtol=1e-5, atol=1e-6)


def test_proposals_on_other_curves_turn_every_inner_point():
    start, now, change, first, second = (vector(seed) for seed in range(5))
    rule = corrections.observed(fedasync(mixing=0.5))
    state, _ = rule.init(now)
    offsets = jax.tree.map(lambda *rows: jnp.stack(rows), first, second)
    made = corrections.proposals(now, state, arrival_of(Curve(change, offsets), start), 0.25, cubic())
    bend = np.asarray(made["fedasync, curve"]["w"]) - np.asarray(made["fedasync"]["w"])
    weights = 3 * 0.25 * 0.75**2, 3 * 0.25**2 * 0.75
    want = weights[0] * np.asarray(first["w"]) + weights[1] * np.asarray(second["w"])
    np.testing.assert_allclose(bend, want, rtol=1e-4, atol=1e-6)
    turned = np.asarray(made["fedasync, rotated curve"]["w"]) - np.asarray(made["fedasync"]["w"])
    assert np.linalg.norm(turned) == pytest.approx(np.linalg.norm(want), rel=1e-4)  # R is linear and keeps lengths


def test_files_of_other_curves_have_their_names(asynccurve_study):
    def suffix(*given):
        parser = argparse.ArgumentParser()
        asynccurve_study.add_curve(parser)
        return asynccurve_study.curve_suffix(parser, parser.parse_args(given))

    assert [suffix(), suffix("--curve", "cubic")] == ["", "_cubic"]
    assert [suffix("--curve", "chain", "--bends", n) for n in ("1", "3")] == ["_chain_1", "_chain_3"]
    with pytest.raises(SystemExit):
        suffix("--bends", "3")


def test_a_finished_run_of_another_seed_or_setting_is_not_taken(monkeypatch, tmp_path, nothing_stays_registered):
    figures = script(monkeypatch, "asynccurve", "figure_1_3")
    monkeypatch.setattr(
        figures, "prepare", lambda settings: SimpleNamespace(components=SimpleNamespace(data=0, model=0))
    )
    monkeypatch.setattr(figures, "examples_of", lambda data, count: {})
    monkeypatch.setattr(figures.corrections, "probe", lambda *given: None)
    monkeypatch.setattr(figures.results, "load", lambda folder: folder.name)

    def simulate(*, out, plots, probes, **setting):
        out.mkdir(parents=True)
        (out / "settings.json").write_bytes(files.json_bytes(figures.as_dict(figures.Settings(**setting))))
        (out / figures.store.MANIFEST).touch()

    monkeypatch.setattr(figures, "simulate", simulate)
    given = argparse.Namespace(out=tmp_path, scale="smoke", leaf=None, curve="quadratic", bends=None, suffix="", seed=0)
    first = figures.run_of("smoke", "fedasync", given)
    assert figures.run_of("smoke", "fedasync", given) == first
    given.seed = 1
    assert figures.run_of("smoke", "fedasync", given) != first
    monkeypatch.setitem(figures.SETTING, "lr", 0.01)
    with pytest.raises(ValueError, match="must be empty or hold a run of the same settings"):
        figures.run_of("smoke", "fedasync", given)


def test_observing_changes_nothing_and_keeps_the_corrections_states():
    plain = fedasync(mixing=0.5)
    seen = corrections.observed(plain)
    now = vector(0)
    (state, memory), (other, none) = plain.init(now), seen.init(now)
    square = np.zeros(6)
    for k in range(3):
        change = vector(k + 1, 0.1)
        arrival = arrival_of(change, now)
        state, memory, _ = plain.receive(state, memory, arrival)
        other, none, _ = seen.receive(other, none, arrival)
        square = 0.95 * square + 0.05 * np.square(np.asarray(change["w"], np.float64))
    np.testing.assert_array_equal(*(np.asarray(r.params(s)["w"]) for r, s in ((plain, state), (seen, other))))
    np.testing.assert_allclose(other.corrections["dc_asgd_a"][0], square, rtol=1e-5)


def test_a_probe_measures_each_proposal_on_each_part():
    model = linear(input_shape=(6,))
    x = np.random.default_rng(5).normal(size=(7, 6)).astype(np.float32)
    y = np.arange(7, dtype=np.float32)
    rule = corrections.observed(fedasync(mixing=0.5))
    now, start, change = vector(0), vector(1), vector(2)
    measured = corrections.probe(rule, model, {"test": (x, y), "train": (x[:3], y[:3])}, 0.5)
    state, memory = rule.init(now)
    found = jax.jit(measured)(state, memory, arrival_of(change, start), ())
    assert set(found) == {"staleness", *(f"{name} | {part}" for name in corrections.ENDS for part in ("test", "train"))}
    w = np.asarray(now["w"], np.float64) + 0.5 * np.asarray(change["w"], np.float64)
    for part, rows in (("test", 7), ("train", 3)):
        loss = np.mean((x[:rows] @ w - y[:rows]) ** 2) / 2
        assert float(found[f"asgd | {part}"]) == pytest.approx(loss, rel=1e-4)


def test_swing_is_the_mean_change_of_the_second_half(asynccurve_study):
    assert asynccurve_study.swing(np.array([0.0, 0.9, 0.5, 0.6, 0.4, 0.4])) == pytest.approx(0.1)
    assert np.isnan(asynccurve_study.swing(np.array([0.5])))


def test_the_table_of_made_up_runs(asynccurve_study):
    times = [0.0, 3.0, 6.0, 9.0, 12.0]
    slow, fast = [0.1, 0.2, 0.3, 0.5, 0.6], [0.1, 0.5, 0.7, 0.6, 0.7]
    runs = {"fedasync": [make_run(slow, times)] * 2, "new": [make_run(fast, times), make_run(slow, times)]}
    chosen = {name: {"method": name, "method.mixing": 0.4, "lr": 0.03} for name in runs}
    first, second = asynccurve_study.rows_of("mnist", runs, chosen, 0.5)
    assert first["accuracy (%)"].mean == pytest.approx(100 * np.mean(slow[1:]), rel=1e-6)
    assert second["accuracy (%)"].mean == pytest.approx(50 * (np.mean(slow[1:]) + np.mean(fast[1:])), rel=1e-6)
    assert first["minutes to 50 %"].mean == pytest.approx(9 / 60)
    assert second["minutes to 50 %"].mean == pytest.approx((3 + 9) / 2 / 60)
    assert (second["local rate"], second["server rate"], second["seeds"]) == (0.03, 0.4, 2)
    missed, one_of_two = asynccurve_study.rows_of("mnist", runs, chosen, 0.65)
    reached = [str(row["minutes to 65 %"]) for row in (missed, one_of_two)]
    assert reached == ["0 of 2 reached", "1 of 2 reached"], "each row counts its own seeds"


def test_the_table_of_seeds(asynccurve_study):
    slow = make_run([0.1, 0.2, 0.3, 0.5, 0.6], [0.0, 3.0, 6.0, 9.0, 12.0])._replace(counters={"rejected": 2})
    switched = slow._replace(updates={**slow.updates, "correction_phase": np.array([0, 0, 1, 1])})
    rows = asynccurve_study.rows_of_seeds("mnist", {"fedasync": [slow], "orthodyn": [slow, switched]}, 0.5)
    assert [row["variant"] for row in rows] == ["fedasync", "orthodyn", "orthodyn"]
    assert [row["seed"] for row in rows] == [0, 0, 1]
    assert [row["updates before the switch"] for row in rows] == [None, None, 2]
    assert rows[0]["accuracy (%)"] == pytest.approx(100 * np.mean([0.2, 0.3, 0.5, 0.6]), rel=1e-6)
    assert rows[0]["minutes to 50 %"] == pytest.approx(9 / 60) and rows[0]["rejected uploads"] == 2


def test_every_row_of_the_table_is_tried_equally_often_and_can_be_run(asynccurve_study):
    tried = {name: asynccurve_study.trials(row) for name, row in asynccurve_study.METHODS.items()}
    assert {len(each) for each in tried.values()} == {4}
    for option in (asynccurve_study.ABLATIONS | asynccurve_study.CURVES).values():
        point = asynccurve_study.without({"method": "asynccurve", "lr": 1e-3}, option)
        assert point["lr"] == 1e-3 and method_of(point["method"])
        assert asynccurve_study.without(point, "momentum=0.5")["method"] == f"asynccurve:{option},momentum=0.5"


def test_a_spec_may_say_that_the_control_point_keeps_its_offset():
    """The value ``none`` in a spec is ``None``."""
    start, now, change, offset = (vector(seed) for seed in range(4))
    after = []
    written = method_of("asynccurve:control=none")
    for rule in (written.rule.make(), asynccurve(control="none")):
        state, memory = rule.init(now)
        state, memory, _ = rule.receive(state, memory, arrival_of(Curve(change, offset), start))
        after.append(np.asarray(rule.params(rule.close(state, memory)[0])["w"]))
    np.testing.assert_array_equal(*after)
    assert not np.array_equal(after[0], np.asarray(now["w"]))


# --- methods at their defaults ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def defaults():
    return module("methods", "defaults")


def meaning(spec):
    """Rule, options of local training, and the timing with its defaults (a cohort of None is ten)."""
    chosen = method_of(spec)
    timing = spec_of("timing", TIMINGS, chosen.timing)
    name, full = timing.name, dict(timing.options)
    if name == "cohort" and full["size"] is None:
        full["size"] = 10
    return chosen._replace(timing=(name, full))


def test_every_method_with_a_server_has_a_grid_whose_first_values_are_its_default(defaults):
    assert list(defaults.GRIDS) == [name for name, usual in METHODS.items() if usual.has_server]
    for scale, grids in (("laptop", defaults.GRIDS), ("smoke", defaults.SMALLEST)):
        for method, grid in grids.items():
            first = defaults.spec(method, {name: values[0] for name, values in grid.items()})
            assert meaning(first) == meaning(method), first
            others = defaults.points(method, scale)[1:]
            assert len(others) == np.prod([len(values) for values in grid.values()]) - 1 > 0
            for other in others:
                assert meaning(other) != meaning(method), other


def test_the_methods_of_the_claims_are_methods_and_one_client_is_slow(monkeypatch):
    monkeypatch.setattr(registry, "ADDED", {})
    claims = module("methods", "claims")
    for _, methods in claims.WORLDS.values():
        for spec, rates in methods.values():
            changes = [claims.variant(spec.format(rate)).changes for rate in rates]
            methods_of = [(method_of(each.pop("method")), each) for each in changes]
            assert len({(each.rule, each.timing, str(others)) for each, others in methods_of}) == len(rates)
            assert len(rates) > 1 or "{}" not in spec, "a number to choose has several values"
    usual, slow = bind_delays("lognormal:mean=60,sigma=0.3", 3, 0), claims.one_slow(times=7.0)(3, 0)
    ratio = slow.durations(np.arange(3), 0) / usual.durations(np.arange(3), 0)
    np.testing.assert_allclose(ratio, [7, 1, 1])


def test_the_validation_part_chooses_and_a_tie_keeps_the_default(defaults):
    assert all(setting["validation_fraction"] > 0 for setting in defaults.SETTINGS.values())

    def found(*points):
        names = ("validation", "test", "swing", "updates")
        return {name: dict(zip(names, ([each, each + 1.0] for each in values))) for name, *values in points}

    row = defaults.row(
        "asgd", found(("asgd", 70, 60, 1, 5), ("asgd:server_lr=0.1", 71, 50, 2, 5), ("asgd:a=1", 3, 99, 0, 5))
    )
    assert row["tuned"] == "server_lr=0.1@every" and row["gained (points)"].mean == -10
    assert defaults.row("asgd", found(("asgd", 70, 60, 1, 5), ("asgd:a=1", 70, 99, 0, 5)))["tuned"] == "the default"
    diverged = defaults.row("asgd", found(("asgd", np.nan, 10, 1, 5), ("asgd:a=1", 20, 30, 0, 5)))
    assert diverged["tuned"] == "a=1@every"


# --- the kit for a new device -------------------------------------------------------------------------


@pytest.fixture
def kit(monkeypatch):
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(EXPERIMENTS / "benchmarks"))
    import accelerator

    yield accelerator
    for name in ("accelerator", "accelerator_parts", "accelerator_queue", "common", "conv", "population", "throughput"):
        if name not in before:
            sys.modules.pop(name, None)


def test_time_is_split_by_what_runs(kit):
    """Two threads train at once and the server overlaps with them; events without a program count as host time."""
    import accelerator_parts as parts

    def event(module, begin, duration):
        return {"ph": "X", "ts": begin, "dur": duration, "args": {"hlo_module": module} if module else {}}

    events = [event("jit_train", 0, 30), event("jit_train", 10, 30), event("jit_train", 12, 5)]
    events += [event("jit_receive", 35, 15), event("jit_evaluate", 60, 10), event("", 0, 100), {"ph": "M"}]
    assert parts.covered([]) == 0
    found = parts.shares(events, wall=100.0)
    assert list(found.values()) == pytest.approx([40, 10, 10, 40])
    rng = np.random.default_rng(0)
    spans = [(low, low + length) for low, length in rng.integers(0, 50, (30, 2)).tolist()]
    assert parts.covered(spans) == len({t for low, high in spans for t in range(low, high)})


def queue_of(kit, tmp_path, monkeypatch, measurements, *, minutes=1.0):
    """Exit code, rows and page of a queue whose measurements are made up: {name: what its process prints}."""

    class Process:
        def __init__(self, one, smoke):
            self.measurement, self.lines = one, ["ready", *measurements[one.name]]

        def line(self, until):
            return self.lines.pop(0)

        def go(self):
            pass

        def why(self):
            return "ValueError: width = 0"

        def stop(self):
            pass

    monkeypatch.setattr(kit, "Process", Process)
    results = kit.Results(tmp_path, "a card", "0123")
    every = [kit.Measurement(name, 30.0, None) for name in measurements]
    code = kit.run(every, results, minutes, smoke=False, together=2)
    rows = (tmp_path / "queue.csv").read_text().splitlines()[1:]
    return code, rows, (tmp_path / "queue.md").read_text()


def printed(value, **more):
    return [json.dumps([{"quantity": "updates / s", "value": value} | more])]


def test_what_is_measured_is_kept_by_card_and_sources(kit, tmp_path, monkeypatch):
    code, rows, page = queue_of(kit, tmp_path, monkeypatch, {"a": printed(1.5), "b": printed(2.0, least=1.0, most=3.0)})
    assert code == 0 and len(rows) == 2 and "1.5" in page
    assert rows[1].startswith("b,updates / s,2.0,1.0,3.0,a card,0123,")
    assert kit.known(tmp_path, "a card", "0123") == {"a", "b"}
    assert not kit.known(tmp_path, "another", "0123") | kit.known(tmp_path, "a card", "4567") | kit.known(None, "", "")


@pytest.mark.parametrize(
    ("prints", "minutes", "word"),
    [
        ([""], 1.0, "Failed: a: ValueError: width = 0."),  # an error while it is timed
        ([None], 1.0, "Failed: a: ended after its time."),
        (printed(1.0), 1e-9, "No time was left for: a."),
        (printed(1.0), 0.4, "No time was left for: a."),  # it would take 30 seconds
        (printed(2.0, ok=False), 1.0, "2"),  # it disagrees with the oracle
    ],
)
def test_what_failed_or_did_not_fit_is_named(kit, tmp_path, monkeypatch, prints, minutes, word):
    code, _, page = queue_of(kit, tmp_path, monkeypatch, {"a": prints}, minutes=minutes)
    assert word in page and code == ("No time" not in word)


def test_every_measurement_of_the_queue_has_a_name_of_its_own_and_fits_into_two_minutes(kit):
    every = kit.measurements()
    assert len({one.name for one in every}) == len(every) and max(one.seconds for one in every) <= kit.LONGEST
