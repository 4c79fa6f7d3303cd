"""The lessons of the comparison: paired effects, weights by gradients through a run, a rule that is learned."""

from __future__ import annotations

import argparse
import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async import server, simulate
from fedjax_async.results.metrics import final_value
from fedjax_async.results.significance import interval
from fedjax_async.types import Arrival
from tests.experiment import comparing


@pytest.fixture(scope="module")
def files():
    yield from comparing("lessons", "ablation", "bound", "learned")


def kept_run(files, method, seed, end, task="mlp"):
    scores = np.array([0.0] * 9 + [end, end])
    return files.kept.Kept(
        "devices", task, method, seed, "asgd", 0.05, 100.0, 40, 20, 1.5, 7, 0.25, scores, np.arange(11.0)
    )


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
    ends = {"mlp": {"a": (0.5, 0.6), "b": (0.6, 0.8)}, "logistic": {"a": (-1, -1), "b": (-1.5, -1.25)}}
    named = [(task, name, seed) for task in ends for name in "ab" for seed in (0, 1)]
    runs = [kept_run(files, name, seed, ends[task][name][seed], task) for task, name, seed in named]
    found = files.effects.differences(runs, [("a", "b")])
    np.testing.assert_allclose(found["devices", "mlp"], [10, 20])
    np.testing.assert_allclose(found["devices", "logistic"], [0.5, 0.25])
    # two means m, m + d deviate by d / 2 from their middle
    assert files.effects.units(runs) == pytest.approx({("devices", "mlp"): 7.5, ("devices", "logistic"): 0.1875})
    (row,) = files.effects.rows(runs, {"b for a": [("a", "b")]}, "part")
    low, high = interval(np.array([10, 20, 0, 0]) / 7.5 + np.array([0, 0, 0.5, 0.25]) / 0.1875)
    assert row["effect"] == f"2.00 ± {(high - low) / 2:.2f}" and row["p (Holm)"] == "0.1250"
    assert row["blocks better"] == row["blocks worse"] == 0, "two seeds have wide intervals"
    # an effect is the mean over its pairs, and Holm counts all effects
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
    assert float(loss) == pytest.approx(final_value(simulated, "validation_loss"), rel=1e-5)
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


@pytest.mark.parametrize(("scale", "compared"), [("small", True), ("full", False)])
def test_methods_are_behind_the_bound_of_their_own_scale(files, monkeypatch, tmp_path, capsys, scale, compared):
    """The comparison of another scale has other virtual times."""
    families = (files.bound.START, *files.bound.FAMILIES)

    def searched(block, seed, given):
        return [
            files.bound.Found(block.world, block.task, seed, name, 0.5, 1.0, 0.1, 0.1, 1.0, []) for name in families
        ]

    monkeypatch.setattr(files.bound, "searched", searched)
    monkeypatch.setattr(sys, "argv", ["bound", "--scale", scale, "--out", str(tmp_path)])
    files.bound.main()
    assert (tmp_path / "families.csv").is_file() and (tmp_path / "distances.csv").is_file() == compared
    said = capsys.readouterr().err
    assert compared or ("no distances from methods: known" in said and "results of the scale full" in said)


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
