"""The lessons of the comparison: paired effects, weights by gradients through a run, a rule that is learned."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import spearmanr

from fedjax_async import server, simulate
from fedjax_async.results.significance import interval
from fedjax_async.server import METHODS
from fedjax_async.types import Arrival
from tests.experiment import EXPERIMENTS, module

RESULTS = EXPERIMENTS / "lessons" / "results"
OWN = {path.stem for name in ("comparison", "lessons") for path in (EXPERIMENTS / name).glob("*.py")}


@pytest.fixture(scope="module")
def files():
    """The modules of the lessons and of the comparison by name; none of them stays imported."""
    before = set(sys.modules)
    main = {name: module("lessons", name) for name in ("ablation", "bound", "learned")}
    found = SimpleNamespace(**{name: sys.modules[name] for name in OWN & set(sys.modules)}, **main)
    yield found
    for name in OWN & (set(sys.modules) - before):
        del sys.modules[name]


def kept_run(files, method, seed, end, task="mlp", world="devices"):
    sent = np.arange(11.0)
    scores = np.array([0.0] * 9 + [end, end])
    return files.kept.Kept(world, task, method, seed, "asgd", 0.05, 100.0, 40, 20, 1.5, 7, 0.25, scores, sent)


# --- the ablation ------------------------------------------------------------------------------------


def test_every_configuration_has_equally_many_points_in_two_decades(files):
    for spec, kind, *_ in files.ablation.CONFIGURATIONS.values():
        low, high = files.study.RATES[kind]
        assert high / low == pytest.approx(100)
        found = files.study.points(spec.replace("{rate}", "{:g}").replace("{few}", "5"), kind, 0.1, 8)
        assert len({*found}) == 8 and all(0.04 <= point.lr <= 0.4 for point in found)
        rates = [float(point.spec.partition("=")[2].partition("@")[0].partition(",")[0]) for point in found]
        assert min(rates) >= low and max(rates) <= high and max(rates) / min(rates) > 30


def test_ranges_are_longer_by_what_weights_by_staleness_take_from_a_mean_delta(files):
    """Ten clients in flight: a delta of staleness 10 counts (1 + 10)^-0.5 times."""
    given = argparse.Namespace(scale="small", out=None)
    block = files.scenes.Block("devices", "logistic", "small")
    assert files.ablation.part_of("arrivals, weights", block, given).factor == pytest.approx(11**0.5)
    assert files.ablation.part_of("buffer, weights", block, given).factor == pytest.approx(3**0.5)
    assert files.ablation.part_of("arrivals", block, given).factor == 1.0
    first = files.study.points("asgd:server_lr={:g}", "every", 0.1, 1, 3.0)[0]
    assert first == ("asgd:server_lr=0.3", 0.0862)


def test_the_configurations_of_a_pair_differ_in_one_part(files):
    all_of = files.ablation.CONFIGURATIONS
    for part, pairs in files.ablation.PAIRS.items():
        for without, added in pairs:
            (rule, _, timing), (other, _, later) = (all_of[name].spec.partition("@") for name in (without, added))
            if part == "buffer of five":
                assert rule == other and later == files.ablation.BUFFER and timing in ("", "every")
                continue
            assert added.startswith(f"{without}, ") and (timing or "every") == (later or "every")
            if part in ("Oort", "power of choice"):
                assert rule == other and all_of[added].policy and not all_of[without].policy
            else:
                assert rule != other and not all_of[added].policy
    named = {name for pairs in files.ablation.PAIRS.values() for pair in pairs for name in pair}
    assert named == {*all_of}


def test_effects_are_differences_by_seed_and_positive_where_the_part_helps(files):
    """Accuracy 0.5 to 0.6 and 0.6 to 0.8: 10 and 20 points. Loss gaps -1 to -1.5 and -1 to -1.25: half a digit ..."""
    runs = [kept_run(files, name, seed, end) for name, ends in (("a", (0.5, 0.6)), ("b", (0.6, 0.8)))
            for seed, end in enumerate(ends)]  # fmt: skip
    runs += [kept_run(files, name, seed, end, "logistic") for name, ends in (("a", (-1, -1)), ("b", (-1.5, -1.25)))
             for seed, end in enumerate(ends)]  # fmt: skip
    found = files.effects.differences(runs, [("a", "b")])
    np.testing.assert_allclose(found["devices", "mlp"], [10, 20])
    np.testing.assert_allclose(found["devices", "logistic"], [0.5, 0.25])
    # two means m, m + d deviate by d / 2 from their middle
    assert files.effects.units(runs) == pytest.approx({("devices", "mlp"): 7.5, ("devices", "logistic"): 0.1875})
    (row,) = files.effects.rows(runs, {"b for a": [("a", "b")]}, "part")
    low, high = interval(np.array([10, 20, 0, 0]) / 7.5 + np.array([0, 0, 0.5, 0.25]) / 0.1875)
    assert row["effect"] == f"2.00 ± {(high - low) / 2:.2f}" and row["p (Holm)"] == "0.1250"
    assert row["blocks better"] == row["blocks worse"] == 0, "two seeds have wide intervals"


def test_an_effect_is_the_mean_over_its_pairs_and_holm_counts_all_effects(files):
    ends = {"a": 0.5, "b": 0.6, "c": 0.9}
    runs = [kept_run(files, name, seed, end + seed / 100) for name, end in ends.items() for seed in range(5)]
    rows = files.effects.rows(runs, {"both": [("a", "b"), ("a", "c")], "back": [("b", "a")]}, "part")
    assert [row["devices, mlp"] for row in rows] == ["25.00 ± 0.00", "-10.00 ± 0.00"]
    assert [(row["blocks better"], row["blocks worse"]) for row in rows] == [(1, 0), (0, 1)]
    assert [row["p (Holm)"] for row in rows] == ["0.1250", "0.1250"], "2 / 2^5, twice"


def test_options_depend_on_the_scale_and_wrong_ones_are_refused(files, monkeypatch, capsys):
    def parsed(*options):
        monkeypatch.setattr(sys, "argv", ["ablation", *options])
        return files.study.parsed(files.study.with_processes(files.study.options("", "ablation")))

    assert parsed("--scale", "smoke").processes == 0 and parsed().processes == files.parts.usual_processes()
    assert parsed("--processes", "3").processes == 3 and str(parsed().out) == "runs/lessons/ablation-small"
    with pytest.raises(SystemExit):
        parsed("--processes", "-1")
    assert "must be a whole number >= 0, not -1" in capsys.readouterr().err


# --- gradients through a run -------------------------------------------------------------------------

SETTING = {
    **{"model": "logistic", "clients": 3, "updates": 12, "steps": 2, "eval_updates": 4, "lr": 0.02, "seed": 1},
    **{"method": "asgd:server_lr=0.5", "validation_fraction": 0.1, "eval_examples": 100},
}


@pytest.fixture(scope="module")
def run(files):
    return files.bound.problem(SETTING)


def test_equal_weights_are_the_run_of_asgd(run):
    (loss, scores), _ = run.value(run.start)
    simulated = simulate(**SETTING, engine="reference")
    np.testing.assert_allclose(scores["loss"], simulated.evaluations["loss"], rtol=1e-5)
    assert float(loss) == pytest.approx(float(np.mean(simulated.evaluations["validation_loss"][-2:])), rel=1e-5)
    np.testing.assert_array_equal(run.staleness, simulated.updates["staleness"])


def test_the_gradient_by_weights_is_that_of_differences(run):
    (_, _), gradient = run.value(run.start)
    for place in (0, 7):
        moved = [
            run.value(run.start | {"weights": run.start["weights"].at[place].add(step)})[0][0] for step in (0.02, -0.02)
        ]
        assert float(moved[0] - moved[1]) / 0.04 == pytest.approx(float(gradient["weights"][place]), rel=0.02)


def test_each_family_ends_no_higher_than_the_one_before(files, run):
    first = before = files.bound.descended(run, files.bound.groups("one weight", run.staleness), run.start, 0)
    assert np.array_equal(first[1]["weights"], run.start["weights"])
    for family in files.bound.FAMILIES:
        index = files.bound.groups(family, run.staleness)
        after = files.bound.descended(run, index, before[1], 4)
        assert after[0] <= before[0]
        moved = np.asarray(after[1]["weights"] - before[1]["weights"])
        for group in np.unique(index):
            np.testing.assert_allclose(moved[index == group], moved[index == group][0], atol=1e-6)
        before = after
    assert before[0] < first[0] and len(np.unique(np.asarray(before[1]["weights"]))) > 3


def test_groups_of_staleness_are_half_octaves(files):
    assert files.bound.groups("by staleness", np.array([0, 1, 2, 3, 7, 100])).tolist() == [0, 2, 3, 4, 6, 13]
    assert files.bound.groups("by arrival", np.zeros(3)).tolist() == [0, 1, 2]
    assert files.bound.groups("one weight", np.arange(3)).tolist() == [0, 0, 0]


def test_distances_are_positive_for_methods_that_are_behind(files):
    def found(task, seed, score, family):
        return files.bound.Found("devices", task, seed, family, 0.5, score, 0.1, 0.1, 1.0, [])

    rows = [found("mlp", seed, 80.0 + seed, family) for seed in (0, 1) for family in files.bound.FAMILIES]
    rows += [found("logistic", seed, -2.0, family) for seed in (0, 1) for family in files.bound.FAMILIES]
    runs = [kept_run(files, "asgd", seed, 0.78 + seed / 100) for seed in (0, 1, 2)]
    runs += [kept_run(files, "asgd", seed, -2.5, "logistic") for seed in (0, 1, 2)]
    (row,) = files.bound.distances(rows, runs)
    assert row["devices, mlp, by arrival"] == "2.00 ± 0.00"
    assert row["devices, logistic, by staleness"] == "-0.50 ± 0.00"


# --- the learned rule --------------------------------------------------------------------------------


def test_the_rule_with_knee_one_is_fedbuffs(files):
    params = {"w": jnp.ones(3)}
    one = {"client": jnp.int32(0), "time": jnp.float32(1), "closes": jnp.bool_(True)}
    upload, age = {"w": jnp.arange(3.0)}, jnp.int32(8)
    arrival = Arrival(upload=upload, start=params, staleness=age, weight=jnp.float32(1), **one)

    def after(rule):
        state, memory = rule.init(params)
        state, memory, _ = rule.receive(state, memory, arrival)
        return rule.params(rule.close(state, memory)[0])

    own = after(files.learned.by_staleness(server_lr=0.7, exponent=0.5, knee=1.0))
    np.testing.assert_allclose(own["w"], after(server.fedbuff(server_lr=0.7))["w"], rtol=1e-6)
    half = after(files.learned.by_staleness(server_lr=0.7, exponent=1.0, knee=4.0))
    np.testing.assert_allclose(half["w"], 1 + 0.7 * np.arange(3) / 3, rtol=1e-6)


def test_a_candidate_is_a_method_with_its_numbers(files):
    spec = files.learned.spec_of([np.log(0.25), -0.5, np.log(2.0), 9.0, 0.0])
    assert spec == "by_staleness:server_lr=0.25,exponent=0,knee=2@buffer:size=16", "weights never grow with staleness"
    assert files.learned.spec_of([0.0, 0.5, 0.0, 2.2, 0.0], "{:g}").startswith("by_staleness:server_lr={:g},")


def test_the_search_finds_a_valley_and_continues_where_it_stopped(files, tmp_path, monkeypatch):
    """Losses in two blocks of other units: a factor is a constant of the logarithm."""

    def losses(block, candidates, seed):
        distance = np.sum((candidates[:, :2] - [-2.0, 1.0]) ** 2, axis=1)
        return list((1e-3 if block.task == "digits" else 1e-2) * (1 + distance))

    monkeypatch.setattr(files.learned, "losses", losses)
    monkeypatch.setitem(files.learned.GENERATIONS, "small", (12, 16))
    given = argparse.Namespace(scale="small", out=tmp_path / "whole", quiet=True)
    whole = files.learned.searched(given)
    assert whole["mean"][0] == pytest.approx(-2, abs=0.2) and whole["mean"][1] == pytest.approx(1, abs=0.3)
    assert len(files.learned.search_rows(whole)) == 13

    given.out = tmp_path / "stopped"
    monkeypatch.setitem(files.learned.GENERATIONS, "small", (5, 16))
    files.learned.searched(given)
    monkeypatch.setitem(files.learned.GENERATIONS, "small", (12, 16))
    again = files.learned.searched(given)
    assert again["mean"] == whole["mean"] and again["generations"] == whole["generations"]
    assert json.loads((given.out / "search.json").read_text())["mean"] == whole["mean"]
    monkeypatch.setitem(files.learned.GENERATIONS, "small", (12, 8))
    with pytest.raises(ValueError, match="must be empty or hold the same search"):
        files.learned.searched(given)


def test_training_and_test_share_no_world_no_task_and_no_seed(files):
    for scale in files.study.SCALES:
        learned, unseen = files.learned.LEARNING[scale], files.learned.UNSEEN[scale]
        assert not {world for world, _ in learned} & {world for world, _ in unseen}
        assert scale == "smoke" or not {task for _, task in learned} & {task for _, task in unseen}
        assert files.learned.SEEDS[scale] <= files.scenes.TUNING_SEED < files.learned.FIRST_SEED


def test_the_best_tuned_method_is_that_of_validation_examples(files):
    kept = files.kept
    runs = [kept_run(files, name, 0, end) for name, end in (("asgd", 0.9), ("fedbuff", 0.5), ("learned, frozen", 0.7))]
    tried = [kept.Tried("devices", "mlp", "asgd", "asgd", 0.1, 0.6, "yes"),
             kept.Tried("devices", "mlp", "fedbuff", "fedbuff", 0.1, 0.95, ""),
             kept.Tried("devices", "mlp", "fedbuff", "fedbuff", 0.1, 0.8, "yes"),
             kept.Tried("devices", "mlp", "learned, frozen", "x", 0.1, 0.99, "yes")]  # fmt: skip
    best = files.learned.with_best(kept.Results(runs, tried, []))[-1]
    assert best.method == files.learned.BEST and best.scores[-1] == 0.5


# --- what the page says ------------------------------------------------------------------------------


def rows_of(name):
    with (RESULTS / f"small_{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def mean(cell):
    return float(cell.partition(" ± ")[0])


def p_of(row):
    return float(row["p (Holm)"].lstrip("<"))


BLOCKS = ("devices, logistic", "devices, mlp", "lognormal, logistic", "lognormal, mlp")


@pytest.fixture(scope="module")
def pair():
    return {(row["without"], row["with"]): row for row in rows_of("pairs")}


@pytest.fixture(scope="module")
def part():
    return {row["part"]: row for row in rows_of("ablation")}


def test_the_tables_are_made_of_the_committed_runs(files):
    found = files.kept.read(RESULTS, "small_ablation")
    assert not found.refused and len(found.runs) == 4 * 5 * len(files.ablation.CONFIGURATIONS)
    tried = {}
    for row in found.tried:
        tried[row[:3]] = tried.get(row[:3], 0) + 1
    assert {*tried.values()} == {8}
    for name, made in (
        ("ablation", files.ablation.part_rows(found.runs)),
        ("pairs", files.ablation.pair_rows(found.runs)),
    ):
        assert [{k: str(v) for k, v in row.items()} for row in made] == [
            {k: v for k, v in row.items() if k not in ("scale", "hardware", "jax")} for row in rows_of(name)
        ]
    unseen = files.kept.read(RESULTS, "small_unseen")
    runs = files.learned.with_best(unseen)
    (row,) = files.effects.rows(runs, {"best tuned": [("best tuned", "learned, frozen")]}, "frozen against")
    assert row["effect"] == rows_of("learned")[0]["effect"] and {run.seed for run in unseen.runs} == {*range(5)}


def test_sentence_1_scaffold_is_the_part_that_matters(part, pair):
    good = [name for name, row in part.items() if p_of(row) < 0.05 and mean(row["effect"]) > 0]
    assert (
        good == ["SCAFFOLD"] and part["SCAFFOLD"]["blocks better"] == "3" and mean(part["SCAFFOLD"]["effect"]) == 0.74
    )
    for base in ("arrivals", "buffer"):
        row = pair[base, f"{base}, scaffold"]
        assert p_of(row) < 0.05 and all(0.3 <= mean(row[block]) <= 0.65 for block in BLOCKS[::2])
        assert 1.8 <= mean(row["lognormal, mlp"]) <= 2.6
    ranks = [row["configuration"] for row in rows_of("configurations")]
    assert {*ranks[:2]} == {"arrivals, scaffold", "buffer, scaffold"}
    with (EXPERIMENTS / "comparison" / "results" / "small_ranks.csv").open(encoding="utf-8", newline="") as file:
        order = [row["method"] for row in csv.DictReader(file)]
    assert order.index("scaffold") > len(order) / 2


def test_sentence_2_a_memory_that_corrects_and_one_that_replaces(pair):
    for base in ("arrivals", "buffer"):
        assert 0.4 <= mean(pair[base, f"{base}, memory"]["devices, logistic"]) <= 0.55
    assert all(p_of(pair[base, f"{base}, memory"]) < 0.05 for base in ("buffer", "rounds"))
    row = pair["arrivals", "arrivals, last deltas"]
    assert mean(row["devices, logistic"]) > 0.5
    assert (mean(row["lognormal, logistic"]), mean(row["lognormal, mlp"])) == (-0.41, -3.32)


def test_sentence_3_staleness_weights_cost_something(part, pair):
    assert mean(part["staleness weights"]["effect"]) == -0.31 and p_of(part["staleness weights"]) < 0.05
    assert all(row["blocks better"] == "0" for row in pair.values() if row["part"] == "staleness weights")
    found = []
    for row in rows_of("bound"):
        if row["world"] == "devices" and row["weights"] == "by staleness":
            table = [(k, float(value)) for k, value in enumerate(row["values"].split()) if value != "-"]
            found.append(float(spearmanr(*zip(*table, strict=True))[0]))
    assert len(found) == 6 and [round(end, 2) for end in (min(found), max(found))] == [0.06, 0.75]


def test_sentence_4_parts_without_an_effect(part, pair):
    for name in ("buffer of five", "delay correction", "Oort", "power of choice", "Adam at the server"):
        assert p_of(part[name]) > 0.05
    assert (
        p_of(pair["buffer", "buffer, orthogonal"]) < 0.05 and mean(pair["buffer", "buffer, orthogonal"]["effect"]) < 0
    )
    assert all(round(mean(part["Oort"][block]), 1) in (1.4, 1.5) for block in BLOCKS[1::2])
    assert (part["Oort"]["blocks better"], part["Oort"]["blocks worse"]) == ("1", "1")


def test_sentence_5_rates_come_before_weights(files):
    score = {(row["world"], row["task"], row["weights"]): float(row["score"]) for row in rows_of("families")}
    ends = [score["devices", "mlp", name] for name in (files.bound.START, *files.bound.FAMILIES)]
    np.testing.assert_allclose(np.diff(ends), [1.6, 2.2, 1.8], atol=0.05)
    assert ends[-1] - ends[0] == pytest.approx(5.6, abs=0.05)
    gains = [
        score["lognormal", task, "by staleness"] - score["lognormal", task, files.bound.START]
        for task in files.bound.TASKS
    ]
    np.testing.assert_allclose(gains, [-0.1, 0.5], atol=0.05)


def test_the_descent_begins_at_the_runs_of_the_comparison(files):
    committed = files.kept.read(files.bound.COMMITTED, "small").runs
    finals = {(*run[:2], run.seed): files.summary.final(run.scores) for run in committed if run.method == "asgd"}
    begun = [row for row in rows_of("bound") if row["weights"] == files.bound.START]
    assert len(begun) == 12
    for row in begun:
        unit = 1 if row["task"] == "logistic" else 100
        found = finals[row["world"], row["task"], int(row["seed"])] * unit
        assert float(row["score"]) == pytest.approx(found, abs=0.1 if unit > 1 else 0.01)


def test_sentence_6_rules_that_change_the_delta_are_ahead_of_weights():
    behind = {row["method"]: row for row in rows_of("distances")}
    released = behind["orthofl_released"]
    assert [mean(released[f"{block}, by staleness"]) for block in BLOCKS[1::2]] == [-0.68, -2.01]
    ahead = [name for name, row in behind.items() if mean(row["devices, logistic, by staleness"]) < 0]
    assert ahead == ["ace"]


def test_sentence_7_the_learned_rule_does_not_win():
    best, tuned, asgd, *_ = rows_of("learned")
    assert best["frozen against"] == "best tuned" and p_of(best) < 0.05 and best["blocks worse"] == "4"
    places = [name for name in best if name.startswith(("devices", "sessions"))]
    assert all(-12 < mean(best[place]) < -3 for place in places)
    assert asgd["frozen against"] == "asgd" and p_of(asgd) < 0.05 and mean(asgd["effect"]) < 0
    rows = {row["configuration"]: row for row in rows_of("unseen")}
    for place in places:
        own, other = (rows[name] for name in ("learned, rates tuned", "asgd"))
        assert abs(float(own[place]) - float(other[place])) < float(other[f"{place} std"])
    assert tuned["frozen against"] == "learned, rates tuned" and mean(tuned["devices, motion"]) == -9.87
    assert "learned" not in METHODS
