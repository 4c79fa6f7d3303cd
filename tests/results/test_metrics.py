"""Metrics compared with arithmetic by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.results import (
    area,
    comparison,
    final_accuracy,
    final_value,
    relative_time,
    spread,
    to_target,
)
from fedjax_async.results.compared import baseline_of
from fedjax_async.results.metrics import all_finals, mean_curve, running_mean, target_accuracy, window
from fedjax_async.results.timeline import staleness_of
from tests.results.made_up import make_run


def test_to_target_is_the_first_evaluation_that_reaches_it():
    run = make_run([0.1, 0.5, 0.4, 0.6], time=[0.0, 2.0, 5.0, 9.0])
    assert to_target(run, 0.5) == 2.0
    assert to_target(run, 0.55) == 9.0
    assert to_target(run, 0.05) == 0.0
    assert math.isnan(to_target(run, 0.61))
    # By 2 s client 0 has arrived at 1 and 2, client 1 at 2; by 9 s: 3 arrivals of client 0 (one lost), 4 and 3 of
    # others.
    assert to_target(run, 0.5, "update") == 3 and to_target(run, 0.5, "step") == 3
    assert to_target(run, 0.55, "update") == 10
    assert to_target(run, 0.5, "bytes") == 3 * 100 + 6 * 100


def test_a_target_equal_in_float32_counts_as_reached():
    run = make_run([0.1, 0.7])
    assert to_target(run, final_accuracy(run)) == 12.0
    for target in (np.float64(0.7), 0.7, "0.7"):  # as a comparison and as a sweep give it
        assert relative_time({"only": [run]}, "only", target=target).time["only"] == to_target(run, 0.7)


def test_area_and_scores_that_are_missing():
    run = make_run([0.1, 0.9, 0.5], time=[0.0, 1.0, 4.0])
    np.testing.assert_allclose(area(run), (0.1 * 1 + 0.9 * 3) / 4, rtol=1e-6)
    assert area(make_run([0.3], time=[0.0])) == np.float32(0.3)
    assert math.isnan(final_accuracy(make_run([math.nan, math.nan]), "best"))
    assert final_accuracy(make_run([math.nan, 0.5]), "best") == 0.5


@given(st.lists(st.floats(2**-10, 1, width=32), min_size=1, max_size=60), st.integers(1, 70))
def test_final_values_and_the_end_of_the_running_mean(scores, count):
    run, values = make_run(scores), np.float64(np.float32(scores))
    tenth = max(1, len(scores) // 10)
    assert final_value(run, final="last") == final_accuracy(run) == values[-1]
    trained = np.count_nonzero(run.evaluations["update"]) or len(scores)
    assert final_value(run) == final_value(run, final="tail") == np.mean(values[-min(tenth, trained) :])
    assert final_value(run, final=f"tail:{count}") == np.mean(values[-min(count, trained) :])
    assert final_value(run, final="best") == final_accuracy(run, "best") == values.max()
    for final in ("last", "tail", f"tail:{count}"):
        assert running_mean(values, window(final, len(scores)), len(scores) - trained)[-1] == final_value(
            run, final=final
        )
        assert mean_curve([run], factor=100.0, final=final).mean[-1] == 100 * final_value(run, final=final)
    np.testing.assert_array_equal(running_mean(values, 1), values)


def test_no_mean_joins_the_initial_model_with_trained_ones():
    """Five evaluations: two before any upload, one while an upload waits for its server step, two of trained models."""
    run = make_run([0.1, 0.1, 0.1, 0.5, 0.7], time=[0.0, 1.0, 2.0, 3.0, 4.0])
    counts = {"update": np.array([0, 0, 1, 2, 3]), "step": np.array([0, 0, 0, 1, 2])}
    run = run._replace(evaluations=run.evaluations | counts)
    for final in ("tail:2", "tail:3", "tail:100"):
        np.testing.assert_allclose(final_value(run, final=final), 0.6, rtol=1e-6)
        np.testing.assert_allclose(mean_curve([run], final=final).mean, [0.1, 0.1, 0.1, 0.5, 0.6], rtol=1e-6)
    waits = run._replace(evaluations=run.evaluations | {"loss": np.array([3.0, 3.0, 2.0, 1.0, 1.0])})
    changed = (0.1 + 0.5 + 0.7) / 3  # the upload changed the model
    np.testing.assert_allclose(final_value(waits, final="tail:3"), changed, rtol=1e-6)
    never = run._replace(evaluations=run.evaluations | {"update": np.zeros(5, int), "step": np.zeros(5, int)})
    np.testing.assert_allclose(final_value(never, final="tail:3"), changed, rtol=1e-6)


def test_final_losses_and_values_of_other_columns():
    run = make_run([0.1, 0.9, 0.5])
    losses = run.evaluations["loss"].astype(np.float64)
    assert final_value(run, "loss", "best") == losses[1] and final_value(run, "loss", "tail:2") == losses[1:].mean()
    assert math.isnan(final_value(make_run([0.1, math.nan, 0.5]), final="tail:2"))
    run.evaluations.update(dict.fromkeys(("average_loss", "average_precision"), np.array([0.4, 0.2, math.nan])))
    assert final_value(run, "average_loss") == 0.2  # a score of nodes: the last evaluation, which has none, is skipped
    assert math.isnan(final_value(run, "average_precision"))  # a metric of the user's own
    assert all_finals("tail:4") == ["tail:4", "last", "best"] and all_finals("best") == ["best", "tail", "last"]


def test_relative_time_by_hand():
    at = [0.0, 1.0, 2.0, 4.0]
    runs = {
        "fedavg": [make_run([0.1, 0.2, 0.3, 0.5], at), make_run([0.1, 0.2, 0.78, 0.8], at)],
        "fedasync": [make_run([0.1, 0.48, 0.6, 0.6], at), make_run([0.1, 0.2, 0.3, 0.8], at)],
    }
    found = relative_time(runs, "fedavg")
    np.testing.assert_allclose(found.target, [0.475, 0.76], rtol=1e-6)
    np.testing.assert_array_equal(found.time["fedavg"], [4.0, 2.0])
    np.testing.assert_array_equal(found.ratio["fedavg"], [1.0, 1.0])
    np.testing.assert_array_equal(found.ratio["fedasync"], [0.25, 2.0])


@pytest.mark.parametrize(
    ("methods", "given", "found"),
    [
        (["asgd", "fedavg@cohort:size=10"], None, "fedavg@cohort:size=10"),
        (["asgd", "fedavg:server_lr=0.5+swa"], None, "fedavg:server_lr=0.5+swa"),
        (["fedavg@cohort:size=10", "fedavg"], None, "fedavg"),
        (["asgd", "fedavg@cohort:size=5", "fedavg@cohort:size=10"], None, "fedavg@cohort:size=5"),
        (["fedavgm", "asgd"], None, "fedavgm"),
        (["asgd", "fedbuff@every"], "fedbuff", "fedbuff@every"),
        (["asgd", "fedbuff@every"], "fedbuff@every", "fedbuff@every"),
        (["asgd", "fedbuff@every", "fedbuff"], "fedbuff", "fedbuff"),
    ],
)
def test_a_decorated_method_is_the_baseline(methods, given, found):
    assert baseline_of(methods, given) == found


@pytest.mark.parametrize("given", ["fedprox", "fedavg", ""])
def test_a_baseline_that_could_be_two_methods_or_none_is_refused(given):
    with pytest.raises(ValueError, match=f"baseline = '{given}': must be one of asgd, fedavg@every, fedavg@cohort"):
        baseline_of(["asgd", "fedavg@every", "fedavg@cohort"], given)


def test_the_tables_of_a_comparison_are_relative_to_the_decorated_baseline():
    runs = {"asgd": [make_run([0.1, 0.6])], "fedavg@cohort:size=10": [make_run([0.1, 0.4])]}
    assert "relative to fedavg@cohort:size=10" in comparison(runs)[0]
    named = [
        comparison(runs, target=name, further=True)[0]["target (%)"] for name in ("fedavg", "fedavg@cohort:size=10")
    ]
    assert [spread.mean for spread in named] == pytest.approx([40, 40])


def test_there_is_no_relative_time_to_a_target_that_was_reached_before_it_began():
    flat = {"fedavg": [make_run([0.1, 0.1])], "other": [make_run([0.1, 0.9])]}
    assert np.isnan(relative_time(flat, "fedavg").ratio["other"]).all()
    rows = comparison({name: runs * 3 for name, runs in flat.items()})
    assert [row["relative to fedavg"] for row in rows] == [None, None], (
        "not 0 of 3 reached: the first reaches it at 0 s"
    )


def test_staleness_is_that_of_the_updates_that_were_applied():
    run = make_run()
    used = np.arange(len(run.updates["staleness"])) > 0
    for accepted in (np.ones_like(used), used[::-1]):
        left = staleness_of(run._replace(updates=run.updates | {"used": used, "accepted": accepted}))
        np.testing.assert_array_equal(left, run.updates["staleness"][used & accepted])
    np.testing.assert_array_equal(staleness_of(run._replace(updates={"staleness": np.arange(3)})), [0, 1, 2])


def test_a_mean_curve_is_the_mean_and_deviation_of_step_functions():
    seeds = [make_run([0.1, 0.4, 0.8], [0.0, 2.0, 4.0]), make_run([0.3, 0.6], [0.0, 3.5])]
    curve = mean_curve(seeds)
    assert curve.steps
    np.testing.assert_array_equal(curve.at, [0.0, 2.0, 4.0])  # 3.5 and 4 share a point, where both have begun
    np.testing.assert_allclose(curve.mean, [0.2, 0.35, 0.7], rtol=1e-6)
    np.testing.assert_allclose(curve.std, np.array([0.2, 0.1, 0.2]) / np.sqrt(2), rtol=1e-5)
    alone = mean_curve(seeds[:1], factor=100.0)
    assert not alone.steps and np.isnan(alone.std).all()
    np.testing.assert_allclose(alone.mean, [10.0, 40.0, 80.0], rtol=1e-6)


@pytest.mark.parametrize("unit", ["update", "step", "time", None])
def test_evaluations_match_by_updates_steps_or_time(unit):
    times = [[0.0, 4.0, 8.0], [0.0, 4.0, 8.0] if unit == "time" else [0.0, 4.1, 8.3]]
    counts = {"update": np.array([0, 5, 10]), "step": np.array([0, 2, 4])}
    runs = []
    for index, (scores, at) in enumerate(zip(([0.1, 0.3, 0.5], [0.1, 0.5, 0.9]), times, strict=True)):
        run = make_run(scores, at)
        shifted = {name: column + index * (name != unit) * np.arange(3) for name, column in counts.items()}
        runs.append(run._replace(evaluations=run.evaluations | shifted))
    curve = mean_curve(runs)
    assert curve.steps == (unit is None)
    if unit is not None:
        np.testing.assert_allclose(curve.at, np.mean(times, axis=0))
        np.testing.assert_allclose(curve.mean, [0.1, 0.4, 0.7], rtol=1e-6)


ONE_SEED = st.lists(st.tuples(st.floats(0.01, 50.0), st.floats(0.01, 1)), min_size=1, max_size=9)


@settings(max_examples=150, deadline=None)
@given(st.lists(ONE_SEED, min_size=1, max_size=12))
def test_a_mean_curve_averages_last_values_and_ends_with_the_spread_of_the_final_ones(seeds):
    runs = [
        make_run([0.1, *(score for _, score in seed)], [0.0, *np.cumsum([gap for gap, _ in seed])]) for seed in seeds
    ]
    curve = mean_curve(runs, factor=100.0)
    final = spread([100 * final_accuracy(run) for run in runs])
    assert curve.mean[-1] == final.mean
    assert curve.std[-1] == final.std or len(runs) == 1
    assert np.all(np.diff(curve.at) > 0)
    if curve.steps:
        assert curve.at[0] == 0 and curve.at[-1] == max(run.evaluations["time"][-1] for run in runs)
        for at, mean in zip(curve.at, curve.mean, strict=True):
            last = [run.evaluations["accuracy"][run.evaluations["time"] <= at][-1] for run in runs]
            np.testing.assert_allclose(mean, 100 * np.mean(np.asarray(last, np.float64)))


def test_a_target_is_a_value_a_method_or_a_share():
    final = {"fedavg": np.array([0.5, 0.8]), "fedasync": np.array([0.6, 0.7])}
    np.testing.assert_array_equal(target_accuracy(final), 0.95 * np.array([0.5, 0.7]))
    np.testing.assert_array_equal(target_accuracy(final, "50%"), [0.25, 0.35])
    np.testing.assert_array_equal(target_accuracy(final, "fedasync"), [0.6, 0.7])
    for value in (0.7, "0.7"):
        np.testing.assert_array_equal(target_accuracy(final, value), [0.7, 0.7])
    for wrong in ("70", "fedbuff", "0%", "120%", "nan", "", "%", 0, 1.5):
        with pytest.raises(ValueError, match=r"an accuracy in .* a share such as 95%, or one of fedavg, fedasync"):
            target_accuracy(final, wrong)


def test_a_label_that_looks_like_a_target_does_not_replace_it():
    """As of sparsities: the default target would be the final accuracy of the label ``95%``."""
    final = {"90%": np.array([0.4]), "95%": np.array([0.8]), "5": np.array([0.6])}
    assert target_accuracy(final) == 0.95 * 0.4 and target_accuracy(final, "5") == 0.6


def test_seeds_in_another_order_have_no_ratio():
    """The k-th runs of two methods would be of different seeds, with other data and delays."""
    zero, one = (make_run()._replace(settings={"method": "asgd", "seed": seed}) for seed in (0, 1))
    assert relative_time({"a": [zero, one], "b": [zero, one]}, "a").ratio.keys() == {"a", "b"}
    with pytest.raises(
        ValueError, match=r"seeds of runs\['b'\] = \['1', '0'\]: must be in the order of a's: \['0', '1'\]"
    ):
        relative_time({"a": [zero, one], "b": [one, zero]}, "a")
