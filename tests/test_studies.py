"""Scripts of the experiments: the studies of OrthoFL, AsynFL, PushCen and AsyncManifold, methods at their defaults."""

from __future__ import annotations

import argparse
import csv
import functools
import sys
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


def own(paper, name):
    """A script with the ``study`` of its own folder, which does not stay imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "study", None)
        del sys.modules["study"]
        return module(paper, name)


@pytest.fixture(scope="module")
def orthofl():
    return module("orthofl", "study")


def of_orthofl(monkeypatch, orthofl, name):
    monkeypatch.setitem(sys.modules, "study", orthofl)
    return module("orthofl", name)


def test_the_open_numbers_are_those_with_the_highest_validation_accuracy(orthofl, monkeypatch):
    tuning = of_orthofl(monkeypatch, orthofl, "tuning")
    with (RESULTS / "tuning_laptop.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for method, (_, spec, values) in tuning.OPEN.items():
        found = {float(row["value"]): row for row in rows if row["method"] == method}
        assert tuple(found) == values
        best = max(found, key=lambda value: float(found[value]["validation accuracy (%)"]))
        assert [value for value, row in found.items() if row["chosen"]] == [best]
        assert orthofl.METHODS[method] == spec.format(f"{best:g}")


def test_a_row_has_numbers_of_its_evaluations(orthofl):
    """The mean of the last tenth, and dips below the best so far."""
    for accuracy, shown in (
        ([0.1] * 18 + [0.5, 0.9], {"accuracy (%)": 70, "last (%)": 90, "best (%)": 90}),
        ([0.2, 0.1, 0.5, 0.4, 0.3, 0.5], {"mean dip (points)": (0 + 10 + 0 + 10 + 20 + 0) / 6}),
    ):
        (row,) = orthofl.rows_of("mnist", {"orthofl": [make_run(accuracy)]}, "fedavg")
        np.testing.assert_allclose([row[name].mean for name in shown], list(shown.values()), rtol=1e-5)


def test_figure_10_compares_mixing_rates_with_as_many_epochs_of_fedavg(orthofl, monkeypatch):
    figure = of_orthofl(monkeypatch, orthofl, "figure_10")
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


def test_figure_2_records_what_an_update_changes_in_each_neuron():
    method = own("orthofl", "figure_2").watched("orthofl:mixing=0.6,exponent=0.5", "output")
    run = simulate(method=method, model="logistic", clients=2, steps=1, updates=3)
    assert np.abs(np.stack([run.updates[f"neuron {i}"] for i in range(10)])).min() > 0


def test_crowded_pictures_come_twice_the_second_time_with_bands(orthofl, monkeypatch, tmp_path):
    names = [*orthofl.METHODS, "one more"]
    variants = [orthofl.Variant(f"{name}, many", {}, "many") for name in names]
    variants.append(orthofl.Variant("orthofl, few", {}, "few"))
    drawn = {}
    monkeypatch.setattr(orthofl, "run_task", lambda *_, **__: {v.name: [make_run([0.1, 0.5])] for v in variants})
    monkeypatch.setattr(orthofl.shared, "save_figure", lambda figure, path: drawn.update({path.name: figure}))
    monkeypatch.setattr(sys, "argv", ["figure_8", "--scale", "smoke", "--out", str(tmp_path)])
    orthofl.study("about", "figure_8", ["mnist"], variants, baseline="fedavg, many")
    assert sorted(drawn) == ["figure_8_smoke_bands_many.png", "figure_8_smoke_few.png", "figure_8_smoke_many.png"]
    bands = [len(drawn[f"figure_8_smoke{name}_many.png"].axes[0].collections) for name in ("", "_bands")]
    assert bands[1] - len(orthofl.BANDS) == len(orthofl.BANDS), "a band and a final bar of each row"
    assert bands[0] == len(names), "final bars only"


@pytest.fixture(scope="module")
def asynfl():
    return module("asynfl", "study")


UNEQUAL = {"fedavg": made(SEEDS["one ends earlier"]), "fedbuff": made(SEEDS["more evaluations"])}


def test_a_figure_ends_at_the_numbers_of_the_table(orthofl, asynfl, tmp_path, monkeypatch):
    written, figures = [], {}
    for place in (orthofl.shared, asynfl):
        monkeypatch.setattr(place, "save_figure", lambda figure, path: figures.update({path.name: figure}))
    monkeypatch.setattr(orthofl, "run_task", lambda *arguments, **options: UNEQUAL)
    monkeypatch.setattr(orthofl, "report", lambda rows, given: written.extend(rows))
    monkeypatch.setattr(sys, "argv", ["figure", "--scale", "smoke", "--out", str(tmp_path)])
    orthofl.study("", "figure", ["mnist"], [orthofl.Variant(name, {}) for name in UNEQUAL], baseline="fedavg")
    shown = ends(figures["figure_smoke.png"])
    assert [row["variant"] for row in written] == list(shown)
    for row in written:
        check_end(shown[row["variant"]], row["accuracy (%)"])
    figures.clear()
    asynfl.draw(UNEQUAL, argparse.Namespace(out=tmp_path), "figure", "smoke")
    assert set(figures) == {"figure_smoke.png", "figure_smoke_loss.png"}
    for name, runs in UNEQUAL.items():
        check_end(ends(figures["figure_smoke.png"])[name], asynfl.summary("smoke", name, runs, 0.5)["final (%)"])


# --- AsyncManifold ------------------------------------------------------------------------------------

phases, corrections = (module("asynccurve", name) for name in ("phases", "corrections"))


@pytest.fixture
def asynccurve_study(nothing_stays_registered):
    return module("asynccurve", "study")


def test_losses_are_smoothed_and_relative_from_best_to_worst():
    values = np.random.default_rng(0).normal(size=40)
    got = phases.smoothed(values, sigma=3.0)
    for at in (0, 5, 20, 39):
        near = [j for j in range(40) if abs(j - at) <= 6]
        weights = np.exp([-((j - at) ** 2) / 18 for j in near])
        np.testing.assert_allclose(got[at], weights @ values[near] / weights.sum(), rtol=1e-12)
    np.testing.assert_allclose(phases.smoothed(np.full(4, 2.5), sigma=10.0), 2.5)
    mean, half = phases.interval(values)
    assert mean == pytest.approx(values.mean()) and half == pytest.approx(2.5758 * values.std(ddof=1) / 40**0.5)
    one = {"a": np.array([1.0, 5.0]), "b": np.array([3.0, 5.0]), "c": np.array([2.0, 5.0])}
    other = {"a": np.array([4.0, 0.0]), "b": np.array([2.0, 1.0])}
    found, over_runs = phases.normalised(one), phases.relative([one, other], sigma=0.1)
    assert {name: each.tolist() for name, each in found.items()} == {"a": [0, 0], "b": [1, 0], "c": [0.5, 0]}
    assert {name: each.tolist() for name, each in over_runs.items()} == {"a": [0.5, 0], "b": [0.5, 0.5]}


def test_a_phase_change_is_found_where_it_is_and_not_where_it_is_not():
    """Not the other way round, if the second phase is too short, in noise, and if a quarter of the first is worse."""
    first, second = np.arange(100.0), np.full(100, 29.5)
    assert phases.phase_change(first, second) == (30, 1.0, 1.0, True)
    noise, patchy = np.random.default_rng(1).normal(size=(2, 100)), np.where((first < 50) & (first % 10 < 7), 0, 99)
    for none in ((second, first), (first, second + 65), noise, (patchy, second)):
        assert not phases.phase_change(*none).found


def vector(seed, scale=1.0):
    return {"w": jnp.asarray(np.random.default_rng(seed).normal(size=6) * scale, jnp.float32)}


def arrival_of(upload, start):
    one = jnp.ones(())
    return Arrival(upload, start, jnp.int32(1), one, jnp.int32(0), one, jnp.bool_(True), jnp.int32(1), ())


def test_proposals_are_where_each_correction_leads():
    """On other curves too, where every inner point turns."""
    start, now, change, offset, second = (vector(seed) for seed in range(5))
    state, _ = corrections.observed(fedasync(mixing=0.5)).init(now)

    def proposals(offsets, *curve):
        found = corrections.proposals(now, state, arrival_of(Curve(change, offsets), start), 0.25, *curve)
        return {name: np.asarray(each["w"], np.float64) for name, each in found.items()}

    made, bent = proposals(offset), proposals({"w": jnp.stack([offset["w"], second["w"]])}, cubic())
    t, x, d, o, p = (np.asarray(each["w"], np.float64) for each in (start, now, change, offset, second))
    want = 3 * 0.25 * 0.75**2 * o + 3 * 0.25**2 * 0.75 * p
    np.testing.assert_allclose(bent["fedasync, curve"] - bent["fedasync"], want, rtol=1e-4, atol=1e-6)
    turned = np.linalg.norm(bent["fedasync, rotated curve"] - bent["fedasync"])
    assert turned == pytest.approx(np.linalg.norm(want), rel=1e-4)  # R is linear and keeps lengths
    b = x - t
    orthogonal = d - (d @ b) / (b @ b) * b
    against = d @ b <= 0
    chords = {"asgd": d, "fedasync": d - b, "orthostrict": orthogonal}
    chords |= {"orthograd": orthogonal if against else d, "orthopos": orthogonal if against else d - b}
    chords["dc_asgd_a"] = d - corrections.STRENGTH * d * d * b / np.sqrt(0.05 * d * d + 1e-7)
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


def test_a_finished_run_of_another_seed_or_setting_is_not_taken(monkeypatch, tmp_path, nothing_stays_registered):
    figures, none = own("asynccurve", "figure_1_3"), SimpleNamespace(components=SimpleNamespace(data=0, model=0))
    monkeypatch.setattr(figures, "prepare", lambda settings: none)
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
    # observing changes nothing and keeps the corrections' states
    plain, square = fedasync(mixing=0.5), np.zeros(6)
    (one, memory), (other, none) = plain.init(now), rule.init(now)
    for k in range(3):
        change = vector(k + 1, 0.1)
        one, memory, _ = plain.receive(one, memory, arrival_of(change, now))
        other, none, _ = rule.receive(other, none, arrival_of(change, now))
        square = 0.95 * square + 0.05 * np.square(np.asarray(change["w"], np.float64))
    np.testing.assert_array_equal(plain.params(one)["w"], rule.params(other)["w"])
    np.testing.assert_allclose(other.corrections["dc_asgd_a"][0], square, rtol=1e-5)


def test_the_table_of_made_up_runs(asynccurve_study):
    times = [0.0, 3.0, 6.0, 9.0, 12.0]
    slow, fast = [0.1, 0.2, 0.3, 0.5, 0.6], [0.1, 0.5, 0.7, 0.6, 0.7]
    runs = {"fedasync": [make_run(slow, times)] * 2, "new": [make_run(fast, times), make_run(slow, times)]}
    chosen = {name: {"method": name, "method.mixing": 0.4, "lr": 0.03} for name in runs}
    first, second = asynccurve_study.rows_of("mnist", runs, chosen, 0.5)
    of_slow, of_fast = 100 * np.mean(slow[1:]), 100 * np.mean(fast[1:])
    found = [row[name].mean for name in ("accuracy (%)", "minutes to 50 %") for row in (first, second)]
    assert found == pytest.approx([of_slow, (of_slow + of_fast) / 2, 9 / 60, (3 + 9) / 2 / 60], rel=1e-6)
    assert (second["local rate"], second["server rate"], second["seeds"]) == (0.03, 0.4, 2)
    missed, one_of_two = asynccurve_study.rows_of("mnist", runs, chosen, 0.65)
    reached = [str(row["minutes to 65 %"]) for row in (missed, one_of_two)]
    assert reached == ["0 of 2 reached", "1 of 2 reached"], "each row counts its own seeds"
    assert asynccurve_study.swing(np.array([0.0, 0.9, 0.5, 0.6, 0.4, 0.4])) == pytest.approx(0.1), "the second half's"
    assert np.isnan(asynccurve_study.swing(np.array([0.5])))
    # the table of seeds
    one = make_run(slow, times)._replace(counters={"rejected": 2})
    switched = one._replace(updates={**one.updates, "correction_phase": np.array([0, 0, 1, 1])})
    rows = asynccurve_study.rows_of_seeds("mnist", {"fedasync": [one], "orthodyn": [one, switched]}, 0.5)
    shown = [(row["variant"], row["seed"], row["updates before the switch"]) for row in rows]
    assert shown == [("fedasync", 0, None), ("orthodyn", 0, None), ("orthodyn", 1, 2)]
    assert rows[0]["accuracy (%)"] == pytest.approx(of_slow, rel=1e-6)
    assert rows[0]["minutes to 50 %"] == pytest.approx(9 / 60) and rows[0]["rejected uploads"] == 2


def test_every_row_of_the_table_is_tried_equally_often_and_can_be_run(asynccurve_study):
    """And files of other curves have their names."""

    def suffix(*given):
        parser = argparse.ArgumentParser()
        asynccurve_study.add_curve(parser)
        return asynccurve_study.curve_suffix(parser, parser.parse_args(given))

    chains = [suffix("--curve", "chain", "--bends", n) for n in ("1", "3")]
    assert [suffix(), suffix("--curve", "cubic"), *chains] == ["", "_cubic", "_chain_1", "_chain_3"]
    with pytest.raises(SystemExit):
        suffix("--bends", "3")
    tried = {name: asynccurve_study.trials(row) for name, row in asynccurve_study.METHODS.items()}
    assert {len(each) for each in tried.values()} == {4}
    for option in (asynccurve_study.ABLATIONS | asynccurve_study.CURVES).values():
        point = asynccurve_study.without({"method": "asynccurve", "lr": 1e-3}, option)
        assert point["lr"] == 1e-3 and method_of(point["method"])
        assert asynccurve_study.without(point, "momentum=0.5")["method"] == f"asynccurve:{option},momentum=0.5"


def test_a_spec_may_say_that_the_control_point_keeps_its_offset():
    start, now, change, offset = (vector(seed) for seed in range(4))
    after = []
    for rule in (method_of("asynccurve:control=none").rule.make(), asynccurve(control="none")):
        state, memory, _ = rule.receive(*rule.init(now), arrival_of(Curve(change, offset), start))
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
    assert {*claims.CLAIMS} <= {*claims.WORLDS}
    for world, pairs in claims.CLAIMS.items():
        assert {label for pair in pairs for label in pair} <= {*claims.WORLDS[world][1]}
    usual, slow = bind_delays("lognormal:mean=60,sigma=0.3", 3, 0), claims.one_slow(times=7.0)(3, 0)
    ratio = slow.durations(np.arange(3), 0) / usual.durations(np.arange(3), 0)
    np.testing.assert_allclose(ratio, [7, 1, 1])


def test_the_validation_part_chooses_and_a_tie_keeps_the_default(defaults):
    assert all(setting["validation_fraction"] > 0 for setting in defaults.SETTINGS.values())

    def found(*points):
        names = ("validation", "test", "swing", "updates")
        return {name: dict(zip(names, ([each, each + 1.0] for each in values))) for name, *values in points}

    default, better = ("asgd", 70, 60, 1, 5), ("asgd:server_lr=0.1", 71, 50, 2, 5)
    row = defaults.row("asgd", found(default, better, ("asgd:a=1", 3, 99, 0, 5)))
    assert row["tuned"] == "server_lr=0.1@every" and row["gained (points)"].mean == -10
    assert defaults.row("asgd", found(default, ("asgd:a=1", 70, 99, 0, 5)))["tuned"] == "the default"
    diverged = defaults.row("asgd", found(("asgd", np.nan, 10, 1, 5), ("asgd:a=1", 20, 30, 0, 5)))
    assert diverged["tuned"] == "a=1@every"
