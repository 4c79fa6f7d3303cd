"""Intervals and paired tests, compared with SciPy and arithmetic by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedjax_async.results import holm, interval, paired, write_comparison
from fedjax_async.results.comparisons import comparison, method_pairs, write_pairs
from fedjax_async.results.html_folders import table as page_table
from fedjax_async.results.latex import latex
from fedjax_async.results.significance import Interval, PValue, pairs
from tests.results.folders import rows as read_rows
from tests.results.made_up import make_run

VALUES = st.lists(st.floats(-100, 100).map(lambda x: round(x, 3)), min_size=2, max_size=8)


@settings(max_examples=40)
@given(VALUES)
def test_the_t_interval_is_scipys(values):
    values = [*values, values[0] + 1.0]  # not all equal
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    np.testing.assert_allclose(interval(values), expected, rtol=1e-9, atol=1e-9)


def test_the_interval_of_a_percentage_stays_between_0_and_100():
    ends = {"bad": [0.01, 0.02, 0.09], "good": [0.9, 0.93, 0.9999]}
    assert all(outside(interval([100 * value for value in values])) for values in ends.values())
    runs = {name: [make_run([0.5, value]) for value in values] for name, values in ends.items()}
    for row in comparison(runs, final="last", further=True):
        found = [value for value in row.values() if isinstance(value, Interval)]
        assert len(found) == 3
        assert not any(map(outside, found))
    assert interval([0.1, 0.9], limits=(0.0, 1.0)) == (0.0, 1.0)
    assert np.isnan(interval([1.0], limits=(0.0, 1.0))).all()


def test_the_interval_of_a_difference_of_percentages_stays_between_minus_100_and_100():
    groups = {"": {"a": {0: 100.0, 1: 100.0, 2: 40.0}, "b": {0: 0.0, 1: 0.0, 2: 0.0}}}
    assert pairs(groups)[0]["95% interval (t)"].high > 100
    assert pairs(groups, limits=(0.0, 100.0))[0]["95% interval (t)"].high == 100
    (row,) = method_pairs({"a": seeded(1.0, 1.0, 0.4), "b": seeded(0.01, 0.01, 0.01)}, "last")
    assert row["95% interval (t)"].high == 100


def seeded(*scores, seeds=range(9)):
    """A run for each final accuracy, with the seeds 0, 1, ... or those given."""
    runs = [make_run([0.1, 0.2, score]) for score in scores]
    return [run._replace(settings=run.settings | {"seed": seed}) for run, seed in zip(runs, seeds)]


def outside(ends):
    return ends.low < 0 or ends.high > 100


def test_intervals_of_one_value_and_of_lost_ones():
    assert np.isnan(interval([1.0])).all() and np.isnan(interval([1.0, math.nan])).all()
    assert interval([2.0, 2.0]) == (2.0, 2.0)


@settings(max_examples=40)
@given(VALUES)
def test_the_paired_tests_are_scipys(values):
    values = [*values, values[0] + 1.0]
    found = paired(values)
    assert found.t == stats.ttest_rel(values, np.zeros(len(values))).pvalue
    left = [value for value in values if value]
    if len({abs(value) for value in left}) == len(left):  # no ties: SciPy's p is exact
        np.testing.assert_allclose(found.wilcoxon, stats.wilcoxon(left, method="exact").pvalue, rtol=1e-12)


def test_wilcoxon_counts_ties_and_zeros_by_hand():
    assert paired([1.0, 1.0, 1.0]).wilcoxon == 2 / 8
    assert paired([0.1 + 0.2, 0.3, -0.3]).wilcoxon == 1.0  # equal up to rounding: ranks 2, 2, 2
    assert paired([0.0, 1.0, 2.0]).wilcoxon == 2 / 4
    # ranks 1.5, 1.5, 3, 4: of 16 sign choices, sums of 0, 1.5, 1.5, 8.5, 8.5 and 10 are as far from 5 as 8.5
    assert paired([1.0, -1.0, 2.0, 3.0]).wilcoxon == 6 / 16


def test_no_difference_and_lost_runs():
    assert paired([0.0, 0.0, 0.0]) == (1.0, 1.0)
    assert np.isnan(paired([1.0, math.nan, 2.0])).all()
    many = np.linspace(-1.0, 3.0, 20)
    assert paired(many).wilcoxon == stats.wilcoxon(many).pvalue


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
RUNS = {name: seeded(*scores) for name, scores in SCORES.items()}


def test_a_row_for_each_pair_of_methods(tmp_path):
    text = write_comparison(RUNS, tmp_path, plots=False)
    rows = read_rows(tmp_path / "pairs.csv")
    assert [(row["first"], row["second"]) for row in rows] == list(itertools.combinations(SCORES, 2))
    tests = {"p (t)": [], "p (Wilcoxon)": []}
    for row in rows:
        first, second = (100 * np.float64(np.float32(SCORES[row[which]])) for which in ("first", "second"))
        np.testing.assert_allclose(float(row["first - second"]), np.mean(first - second))
        low, high = stats.ttest_rel(first, second).confidence_interval()
        np.testing.assert_allclose([float(row[f"95% interval (t) {end}"]) for end in ("low", "high")], [low, high])
        assert row["better"] == row["first" if np.mean(first) > np.mean(second) else "second"] and row["seeds"] == "3"
        np.testing.assert_allclose(float(row["p (t)"]), stats.ttest_rel(first, second).pvalue)
        for name, values in tests.items():
            values.append(float(row[name]))
    for name, values in tests.items():
        np.testing.assert_array_equal([float(row[f"{name[:-1]}, Holm)"]) for row in rows], holm(values))
    markdown = (tmp_path / "pairs.md").read_text()
    assert markdown in text and "accuracy, mean of last tenth (%)" in markdown.splitlines()[0]
    assert "corrected for 3 comparisons" in markdown and "never below 0.25" in markdown
    assert f"| {float(rows[0]['p (t)']):.4f} |" in markdown

    write_comparison({name: runs[:2] for name, runs in RUNS.items()}, tmp_path, plots=False)
    assert not list(tmp_path.glob("pairs.*"))  # two seeds are too few


@pytest.mark.parametrize(
    ("p", "text"), [(0.0, "<0.0001"), (1e-30, "<0.0001"), (0.0002, "0.0002"), (0.04, "0.0400"), (math.nan, "-")]
)
def test_no_p_value_is_printed_as_zero(tmp_path, p, text):
    rows = [{"first": "a", "second": "b", "seeds": 9, "first - second": 1.0, "p (t)": PValue(p)}]
    for printed in (write_pairs(rows, tmp_path, "accuracy"), (tmp_path / "pairs.md").read_text()):
        assert printed.splitlines()[-1].split("|")[-2].strip() == text
    assert latex(rows, ["first"], []).count(text.replace("<", r"\textless{}").replace("-", "--")) == 1
    saved = (tmp_path / "pairs.csv").read_text()
    assert float(read_rows(tmp_path / "pairs.csv")[0]["p (t)"]) == pytest.approx(p, nan_ok=True)  # all digits
    assert page_table("", saved)["rows"][0][-1][0] == text


def test_only_common_seeds_are_paired():
    other = seeded(*SCORES["fedasync"], seeds=(2, 0, 1))
    (row,) = method_pairs({"fedavg": RUNS["fedavg"], "fedasync": other}, "last")
    np.testing.assert_allclose(row["first - second"], 100 * np.mean([0.5 - 0.65, 0.6 - 0.8, 0.7 - 0.6]), rtol=1e-5)
    apart = seeded(*SCORES["fedasync"], seeds=(2, 3, 4))
    assert method_pairs({"fedavg": RUNS["fedavg"], "fedasync": apart}) == []


def test_the_lower_loss_is_better():
    values = {"a": {0: 1.0, 1: 2.0, 2: 3.0}, "b": {0: 2.0, 1: 3.5, 2: 3.5}, "c": {0: 2.0, 1: 3.5, 2: 3.5}}
    rows = pairs({"": values}, larger_is_better=False)
    assert [row["better"] for row in rows] == ["a", "a", "-"]
    assert rows[2]["p (t)"] == rows[2]["p (Wilcoxon)"] == 1.0


def test_of_many_pairs_those_with_the_smallest_p_are_printed(tmp_path):
    scores = {f"m{k}": [0.5 + 0.01 * seed + 0.002 * k**2 * (1 + seed) for seed in range(3)] for k in range(6)}
    many = {name: seeded(*values) for name, values in scores.items()}
    text = write_comparison(many, tmp_path, plots=False)
    rows = [row for row in text.splitlines() if row.startswith("| m") and row.count("| m") > 1]
    every = read_rows(tmp_path / "pairs.csv")
    least = sorted(every, key=lambda row: float(row["p (t)"]))[:10]
    assert len(every) == 15 and "and 5 pairs with larger p, in pairs.md" in text
    assert [tuple(cell.strip() for cell in row.split("|")[1:3]) for row in rows] == [
        (row["first"], row["second"]) for row in least
    ]
