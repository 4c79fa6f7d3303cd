"""Metrics, intervals and paired tests, compared with arithmetic by hand and with SciPy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedjax_async.results import comparison, final_accuracy, final_value, html_folders, relative_time, spread, to_target
from fedjax_async.results.compared import baseline_of
from fedjax_async.results.comparisons import method_pairs, write_pairs
from fedjax_async.results.latex import latex
from fedjax_async.results.metrics import all_finals, area, limits, mean_curve, running_mean, target_accuracy, window
from fedjax_async.results.runs import write_comparison
from fedjax_async.results.significance import Interval, PValue, holm, interval, paired, pairs
from fedjax_async.results.timeline import staleness_of
from tests.results.folders import rows as read_rows
from tests.results.made_up import make_run
from tests.results.page import seeded
from tests.told import refusal


def test_to_target_is_the_first_evaluation_that_reaches_it():
    run = make_run([0.1, 0.5, 0.4, 0.6], time=[0.0, 2.0, 5.0, 9.0])
    # By 2 s client 0 has arrived at 1 and 2, client 1 at 2; by 9 s: 3 arrivals of client 0 (one lost), 4 and 3 of
    # others.
    reached = {(0.5, "time"): 2, (0.55, "time"): 9, (0.05, "time"): 0, (0.5, "update"): 3, (0.5, "step"): 3}
    reached |= {(0.55, "update"): 10, (0.5, "bytes"): 3 * 100 + 6 * 100}
    assert {key: to_target(run, *key) for key in reached} == reached
    assert math.isnan(to_target(run, 0.61))
    equal = make_run([0.1, 0.7])  # in float32
    assert to_target(equal, final_accuracy(equal)) == 12.0
    for target in (np.float64(0.7), 0.7, "0.7"):  # as a comparison and as a sweep give it
        assert relative_time({"only": [equal]}, "only", target=target).time["only"] == to_target(equal, 0.7)


def test_area_and_scores_that_are_missing():
    run = make_run([0.1, 0.9, 0.5], time=[0.0, 1.0, 4.0])
    np.testing.assert_allclose(area(run), (0.1 * 1 + 0.9 * 3) / 4, rtol=1e-6)
    assert area(make_run([0.3], time=[0.0])) == np.float32(0.3)
    assert math.isnan(final_accuracy(make_run([math.nan, math.nan]), "best"))
    assert final_accuracy(make_run([math.nan, 0.5]), "best") == 0.5
    assert math.isnan(final_value(make_run([0.1, math.nan, 0.5]), final="tail:2"))


@given(st.lists(st.floats(2**-10, 1, width=32), min_size=1, max_size=60), st.integers(1, 70))
def test_final_values_and_the_end_of_the_running_mean(scores, count):
    run, values = make_run(scores), np.float64(np.float32(scores))
    trained = np.count_nonzero(run.evaluations["update"]) or len(scores)
    tail, tenth = (np.mean(values[-min(number, trained) :]) for number in (count, max(1, len(scores) // 10)))
    for final, want in {"last": values[-1], "tail": tenth, f"tail:{count}": tail}.items():
        assert final_value(run, final=final) == want
        assert running_mean(values, window(final, len(scores)), len(scores) - trained)[-1] == want
        assert mean_curve([run], factor=100.0, final=final).mean[-1] == 100 * want
    assert final_accuracy(run) == values[-1] and final_value(run) == tenth
    assert final_value(run, final="best") == final_accuracy(run, "best") == values.max()
    np.testing.assert_array_equal(running_mean(values, 1), values)


def test_no_mean_joins_the_initial_model_with_trained_ones():
    """Five evaluations: two before any upload, one while an upload waits for its server step, two of trained models."""
    given = [0.1, 0.1, 0.1, 0.5, 0.7], [0.0, 1.0, 2.0, 3.0, 4.0]
    counts = {"update": np.array([0, 0, 1, 2, 3]), "step": np.array([0, 0, 0, 1, 2])}
    run = make_run(*given, **counts)
    for final in ("tail:2", "tail:3", "tail:100"):
        np.testing.assert_allclose(final_value(run, final=final), 0.6, rtol=1e-6)
        np.testing.assert_allclose(mean_curve([run], final=final).mean, [0.1, 0.1, 0.1, 0.5, 0.6], rtol=1e-6)
    waits = make_run(*given, **counts, loss=np.array([3.0, 3.0, 2.0, 1.0, 1.0]))  # the upload changed the model
    never = make_run(*given, update=np.zeros(5, int), step=np.zeros(5, int))
    for other in (waits, never):
        np.testing.assert_allclose(final_value(other, final="tail:3"), (0.1 + 0.5 + 0.7) / 3, rtol=1e-6)


def test_final_losses_and_values_of_other_columns():
    missing = np.array([0.4, 0.2, np.nan])
    run = make_run([0.1, 0.9, 0.5], average_loss=missing, average_precision=missing)
    losses = run.evaluations["loss"].astype(np.float64)
    assert final_value(run, "loss", "best") == losses[1] and final_value(run, "loss", "tail:2") == losses[1:].mean()
    assert final_value(run, "average_loss") == 0.2  # a score of nodes: the last evaluation, which has none, is skipped
    assert math.isnan(final_value(run, "average_precision"))  # a metric of the user's own
    assert all_finals("tail:4") == ["tail:4", "last", "best"] and all_finals("best") == ["best", "tail", "last"]


def test_relative_time_by_hand():
    times = [[0.0, 1.0, 2.0, 4.0]] * 2
    runs = {
        "fedavg": seeded([[0.1, 0.2, 0.3, 0.5], [0.1, 0.2, 0.78, 0.8]], times=times),
        "fedasync": seeded([[0.1, 0.48, 0.6, 0.6], [0.1, 0.2, 0.3, 0.8]], times=times),
    }
    found = relative_time(runs, "fedavg")
    np.testing.assert_allclose(found.target, [0.475, 0.76], rtol=1e-6)
    np.testing.assert_array_equal(found.time["fedavg"], [4.0, 2.0])
    np.testing.assert_array_equal(found.ratio["fedavg"], [1.0, 1.0])
    np.testing.assert_array_equal(found.ratio["fedasync"], [0.25, 2.0])
    for order in ([1, 0], [1, 2]):  # with other data and delays
        others = runs | {"fedasync": [run._replace(settings={"seed": k}) for run, k in zip(runs["fedasync"], order)]}
        found = refusal(relative_time, others, "fedavg")
        wanted = f"seeds of runs['fedasync'] = {[*map(str, order)]}: must be in the order of fedavg's: ['0', '1']"
        assert wanted in found


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
        *((["asgd", "fedavg@every", "fedavg@cohort"], given, None) for given in ("fedprox", "fedavg", "")),
    ],
)
def test_a_decorated_method_is_the_baseline_unless_it_could_be_two(methods, given, found):
    if found is not None:
        assert baseline_of(methods, given) == found
    else:
        allowed = f"baseline = '{given}': must be one of asgd, fedavg@every, fedavg@cohort"
        assert allowed in refusal(baseline_of, methods, given)


def test_there_is_no_relative_time_to_a_target_that_was_reached_before_it_began():
    flat = {"fedavg": [make_run([0.1, 0.1])] * 3, "other": [make_run([0.1, 0.9])] * 3}
    assert np.isnan(relative_time(flat, "fedavg").ratio["other"]).all()
    first = [row["relative to fedavg"] for row in comparison(flat)]
    assert first == [None, None], "not 0 of 3 reached: the first reaches it at 0 s"


def test_staleness_is_that_of_the_updates_that_were_applied():
    run = make_run()
    used = np.arange(len(run.updates["staleness"])) > 0
    for accepted in (np.ones_like(used), used[::-1]):
        left = staleness_of(run._replace(updates=run.updates | {"used": used, "accepted": accepted}))
        np.testing.assert_array_equal(left, run.updates["staleness"][used & accepted])
    np.testing.assert_array_equal(staleness_of(run._replace(updates={"staleness": np.arange(3)})), [0, 1, 2])


@pytest.mark.parametrize("unit", ["update", "step", "time", None])
def test_evaluations_match_by_updates_steps_or_time(unit):
    times = [[0.0, 4.0, 8.0], [0.0, 4.0, 8.0] if unit == "time" else [0.0, 4.1, 8.3]]
    counts = {"update": np.array([0, 5, 10]), "step": np.array([0, 2, 4])}
    runs = []
    for index, (scores, at) in enumerate(zip(([0.1, 0.3, 0.5], [0.1, 0.5, 0.9]), times, strict=True)):
        shifted = {name: column + index * (name != unit) * np.arange(3) for name, column in counts.items()}
        runs.append(make_run(scores, at, **shifted))
    curve = mean_curve(runs)
    assert curve.steps == (unit is None)
    if unit is not None:
        np.testing.assert_allclose(curve.at, np.mean(times, axis=0))
        np.testing.assert_allclose(curve.mean, [0.1, 0.4, 0.7], rtol=1e-6)
        np.testing.assert_allclose(curve.std, np.array([0.0, 0.2, 0.4]) / np.sqrt(2), atol=1e-7)


ONE_SEED = st.lists(st.tuples(st.floats(0.01, 50.0), st.floats(0.01, 1)), min_size=1, max_size=9)


@settings(max_examples=100, deadline=None)
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
    if len(runs) == 1:
        np.testing.assert_allclose(curve.mean, 100 * runs[0].evaluations["accuracy"].astype(np.float64))
        assert not curve.steps and np.isnan(curve.std).all()
    if curve.steps:
        assert curve.at[0] == 0 and curve.at[-1] == max(run.evaluations["time"][-1] for run in runs)
        for at, mean, std in zip(curve.at, curve.mean, curve.std, strict=True):
            last = [100 * float(run.evaluations["accuracy"][run.evaluations["time"] <= at][-1]) for run in runs]
            np.testing.assert_allclose([mean, std], [np.mean(last), np.std(last, ddof=1)], atol=1e-12)


def test_a_target_is_a_value_a_method_or_a_share():
    final = {"fedavg": np.array([0.5, 0.8]), "fedasync": np.array([0.6, 0.7])}
    np.testing.assert_array_equal(target_accuracy(final), 0.95 * np.array([0.5, 0.7]))
    for target, want in {"50%": [0.25, 0.35], "fedasync": [0.6, 0.7], 0.7: [0.7, 0.7], "0.7": [0.7, 0.7]}.items():
        np.testing.assert_array_equal(target_accuracy(final, target), want)
    for wrong in ("70", "fedbuff", "0%", "120%", "nan", "", "%", 0, 1.5):
        with pytest.raises(ValueError, match=r"an accuracy in .* a share such as 95%, or one of fedavg, fedasync"):
            target_accuracy(final, wrong)
    decorated = {"asgd": np.array([0.6]), "fedavg@cohort:size=10": np.array([0.4])}
    assert target_accuracy(decorated, "fedavg") == target_accuracy(decorated, "fedavg@cohort:size=10") == 0.4
    # A label that looks like a target, as of sparsities, does not replace it.
    labels = {"90%": np.array([0.4]), "95%": np.array([0.8]), "5": np.array([0.6])}
    assert target_accuracy(labels) == 0.95 * 0.4 and target_accuracy(labels, "5") == 0.6


# --- intervals and paired tests -----------------------------------------------------------------------

VALUES = st.lists(st.floats(-100, 100).map(lambda x: round(x, 3)), min_size=2, max_size=8)


def ending(*scores):
    """A run for each final accuracy, with the seeds 0, 1, ..."""
    return seeded([[0.1, 0.2, score] for score in scores])


@settings(max_examples=40)
@given(VALUES)
def test_interval_and_tests_are_scipys(values):
    values = [*values, values[0] + 1.0]  # not all equal
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    np.testing.assert_allclose(interval(values), expected, rtol=1e-9, atol=1e-9)
    found = paired(values)
    assert found.t == stats.ttest_rel(values, np.zeros(len(values))).pvalue
    left = [value for value in values if value]
    if len({abs(value) for value in left}) == len(left):  # no ties: SciPy's p is exact
        np.testing.assert_allclose(found.wilcoxon, stats.wilcoxon(left, method="exact").pvalue, rtol=1e-12)


def test_intervals_of_percentages_and_of_their_differences_stay_within_their_limits():
    ends = {"bad": [0.01, 0.02, 0.09], "good": [0.9, 0.93, 0.9999]}

    def outside(found):
        return found.low < 0 or found.high > 100

    assert all(outside(interval([100 * value for value in values])) for values in ends.values())
    for row in comparison({name: ending(*values) for name, values in ends.items()}, final="last", further=True):
        found = [value for value in row.values() if isinstance(value, Interval)]
        assert len(found) == 3 and not any(map(outside, found))
    assert interval([0.1, 0.9], limits=(0.0, 1.0)) == (0.0, 1.0)
    assert limits("client_own_accuracy_worst") == (0, 100) and limits("accuracy_gap")[0] == -math.inf
    groups = {"": {"a": {0: 100.0, 1: 100.0, 2: 40.0}, "b": {0: 0.0, 1: 0.0, 2: 0.0}}}
    assert pairs(groups)[0]["95% interval (t)"].high > 100
    assert pairs(groups, limits=(0.0, 100.0))[0]["95% interval (t)"].high == 100
    (row,) = method_pairs({"a": ending(1.0, 1.0, 0.4), "b": ending(0.01, 0.01, 0.01)}, "last")
    assert row["95% interval (t)"].high == 100


def test_few_equal_and_lost_values():
    for values in ([1.0], [1.0, math.nan]):
        assert np.isnan(interval(values)).all() and np.isnan(interval(values, limits=(0.0, 1.0))).all()
    assert interval([2.0, 2.0]) == (2.0, 2.0)
    assert paired([0.0, 0.0, 0.0]) == (1.0, 1.0)
    assert np.isnan(paired([1.0, math.nan, 2.0])).all()
    many = np.linspace(-1.0, 3.0, 20)
    np.testing.assert_allclose(paired(many).wilcoxon, stats.wilcoxon(many).pvalue, rtol=1e-12)


@pytest.mark.parametrize(
    ("values", "p"),
    [
        ([1.0, 1.0, 1.0], 2 / 8),
        ([0.1 + 0.2, 0.3, -0.3], 1.0),  # equal up to rounding: ranks 2, 2, 2
        ([0.0, 1.0, 2.0], 2 / 4),
        # ranks 1.5, 1.5, 3, 4: of 16 sign choices, sums of 0, 1.5, 1.5, 8.5, 8.5 and 10 are as far from 5 as 8.5
        ([1.0, -1.0, 2.0, 3.0], 6 / 16),
        ([1.0] * 16, 2 / 2**16),  # many and tied, which SciPy approximates
        ([1.0] * 15 + [-1.0], 34 / 2**16),
    ],
)
def test_wilcoxon_counts_ties_and_zeros_by_hand(values, p):
    assert paired(values).wilcoxon == p


def test_holm_by_hand():
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    np.testing.assert_array_equal(holm([0.5, math.nan, 0.9]), [1.0, math.nan, 1.0])
    assert holm([]).size == 0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.floats(0.01, 0.2))
def test_holm_rejects_what_stepping_down_rejects(p, alpha):
    rejected = set()
    for rank, test in enumerate(sorted(range(len(p)), key=lambda test: p[test])):
        if p[test] * (len(p) - rank) > alpha:
            break
        rejected.add(test)
    assert {test for test, adjusted in enumerate(holm(p)) if adjusted <= alpha} == rejected


SCORES = {"fedavg": [0.5, 0.6, 0.7], "fedasync": [0.6, 0.65, 0.8], "fedbuff": [0.4, 0.6, 0.5]}
RUNS = {name: ending(*scores) for name, scores in SCORES.items()}


def test_a_row_for_each_pair_of_methods(tmp_path):
    text = write_comparison(RUNS, tmp_path, plots=False)
    rows = read_rows(tmp_path / "pairs.csv")
    assert [(row["first"], row["second"]) for row in rows] == list(itertools.combinations(SCORES, 2))
    for row in rows:
        first, second = (np.round(100 * np.float64(np.float32(SCORES[row[which]])), 4) for which in ("first", "second"))
        expected = stats.ttest_rel(first, second)
        ends = [float(row[f"95% interval (t) {end}"]) for end in ("low", "high")]
        np.testing.assert_allclose(ends, expected.confidence_interval())
        found = [float(row["first - second"]), float(row["p (t)"])]
        np.testing.assert_allclose(found, [np.mean(first - second), expected.pvalue])
        assert row["better"] == row["first" if np.mean(first) > np.mean(second) else "second"] and row["seeds"] == "3"
    for test in ("t", "Wilcoxon"):
        p, adjusted = ([float(row[f"p ({test}{how})"]) for row in rows] for how in ("", ", Holm"))
        np.testing.assert_array_equal(adjusted, holm(p))
    markdown = (tmp_path / "pairs.md").read_text()
    assert markdown in text and "accuracy, mean of last tenth (%)" in markdown.splitlines()[0]
    assert "corrected for 3 comparisons" in markdown and "never below 0.25" in markdown
    assert f"| {float(rows[0]['p (t)']):.4f} |" in markdown
    write_comparison({name: runs[:2] for name, runs in RUNS.items()}, tmp_path, plots=False)
    assert not list(tmp_path.glob("pairs.*"))  # two seeds are too few


@pytest.mark.parametrize(("p", "text"), [(0.0, "<0.0001"), (1e-30, "<0.0001"), (0.0002, "0.0002"), (math.nan, "-")])
def test_no_p_value_is_printed_as_zero(tmp_path, p, text):
    rows = [{"first": "a", "second": "b", "seeds": 9, "first - second": 1.0, "p (t)": PValue(p)}]
    for printed in (write_pairs(rows, tmp_path, "accuracy"), (tmp_path / "pairs.md").read_text()):
        assert printed.splitlines()[-1].split("|")[-2].strip() == text
    assert latex(rows, ["first"], []).count(text.replace("<", r"\textless{}").replace("-", "--")) == 1
    saved = (tmp_path / "pairs.csv").read_text()
    assert float(read_rows(tmp_path / "pairs.csv")[0]["p (t)"]) == pytest.approx(p, nan_ok=True)  # all digits
    assert html_folders.table("", saved)["rows"][0][-1][0] == text


def test_pairs_without_p_are_not_counted_as_comparisons(tmp_path):
    values = {"a": (1.0, 2.0, 4.0), "b": (2.0, 2.5, 3.0), "c": (1.0, math.inf, 2.0)}
    rows = pairs({"": {name: dict(enumerate(of)) for name, of in values.items()}})
    assert rows[0]["p (t, Holm)"] == rows[0]["p (t)"]
    assert "corrected for 1 comparison (2 without p: a value is not finite).\n" in write_pairs(rows, tmp_path, "loss")


def test_only_common_seeds_are_paired():
    zero, one, two, three, four = ending(0.65, 0.8, 0.6, 0.65, 0.8)
    (row,) = method_pairs({"fedavg": RUNS["fedavg"], "fedasync": [two, zero, one]}, "last")
    np.testing.assert_allclose(row["first - second"], 100 * np.mean([0.5 - 0.65, 0.6 - 0.8, 0.7 - 0.6]), rtol=1e-5)
    assert method_pairs({"fedavg": RUNS["fedavg"], "fedasync": [two, three, four]}) == []


def test_rounding_errors_of_accuracies_are_no_differences():
    """Accuracies are float32: 0.71 - 0.69 and 0.53 - 0.51 are equal numbers of test examples."""
    (row,) = method_pairs({"a": ending(0.87, 0.47, 0.78, 0.9), "b": ending(0.86, 0.46, 0.8, 0.91)}, "last")
    assert row["p (Wilcoxon)"] == 1.0  # ranks 2, 2, 4, 2: their sums are even, so that none is nearer to 5 than 4 is
    assert row["p (Wilcoxon)"] == paired([1.0, 1.0, -2.0, -1.0]).wilcoxon
    (row,) = method_pairs({"a": ending(0.1, 0.9, 0.7), "b": ending(0.1, np.nextafter(np.float32(0.9), 0), 0.7)}, "last")
    assert (row["better"], row["p (t)"], row["p (Wilcoxon)"]) == ("-", 1.0, 1.0)


def test_the_lower_loss_is_better():
    values = {"a": {0: 1.0, 1: 2.0, 2: 3.0}, "b": {0: 2.0, 1: 3.5, 2: 3.5}, "c": {0: 2.0, 1: 3.5, 2: 3.5}}
    rows = pairs({"": values}, larger_is_better=False)
    assert [row["better"] for row in rows] == ["a", "a", "-"]
    assert rows[2]["p (t)"] == rows[2]["p (Wilcoxon)"] == 1.0


def test_of_many_pairs_those_with_the_smallest_p_are_printed(tmp_path):
    many = {f"m{k}": ending(*(0.5 + 0.01 * seed + 0.002 * k**2 * (1 + seed) for seed in range(3))) for k in range(6)}
    text = write_comparison(many, tmp_path, plots=False)
    rows = [row for row in text.splitlines() if row.startswith("| m") and row.count("| m") > 1]
    every = read_rows(tmp_path / "pairs.csv")
    least = sorted(every, key=lambda row: float(row["p (t)"]))[:10]
    assert len(every) == 15 and "and 5 pairs with larger p, in pairs.md" in text
    shown = [tuple(cell.strip() for cell in row.split("|")[1:3]) for row in rows]
    assert shown == [(row["first"], row["second"]) for row in least]
