"""Tables: alignment, spreads, exact CSV."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from fedjax_async.results import comparison, final_accuracy, interval, mean_std, spread, table, write_comparison
from tests.results.folders import rows as read_rows
from tests.results.made_up import make_run

ROWS = [
    {"method": "fedavg", "accuracy": spread([0.5, 0.7]), "updates": 12},
    {"method": "a|b", "accuracy": spread([0.25, 0.25]), "updates": None},
]


def test_text_and_markdown_are_aligned():
    for style in ("text", "markdown"):
        lines = table(ROWS, style).splitlines()
        assert len(lines) == 4
        assert len({len(line) for line in lines}) == 1
        assert "0.60 ± 0.14" in lines[2] and lines[2].rstrip(" |").endswith("12")
    assert table(ROWS, "markdown").splitlines()[1].count(":") == 2  # numbers are right-aligned, names left-aligned


def test_markdown_escapes_the_column_sign():
    assert "a\\|b" in table(ROWS, "markdown")


def test_csv_keeps_every_digit():
    third = 1 / 3
    rows = [{"name": "a,b", "x": third, "y": spread([third, 1.0])}, {"name": "c", "x": 2.0, "y": spread([1.0, 1.0])}]
    back = list(csv.DictReader(table(rows, "csv").splitlines()))
    assert back[0]["name"] == "a,b" and float(back[0]["x"]) == third
    assert float(back[0]["y std"]) == spread([third, 1.0]).std


def test_spread_is_the_sample_standard_deviation():
    values = [1.0, 2.0, 4.0]
    assert spread(values).std == np.std(values, ddof=1)
    assert mean_std([75.0, 76.0]) == "75.50 ± 0.71"
    assert mean_std([75.0], decimals=1) == "75.0"
    assert mean_std([1.0, float("nan")]) == "-"


def test_comparison_by_hand():
    at = [0.0, 1.0, 4.0]
    runs = {
        "fedasync": [make_run([0.1, 0.6, 0.6], at), make_run([0.1, 0.6, 0.8], at)],
        "fedavg": [make_run([0.1, 0.2, 0.6], at), make_run([0.1, 0.2, 0.6], at)],
    }
    first, second = comparison(runs)
    scores = ["accuracy, mean of last tenth (%)", "95% interval (t)", "time to target (s)", "relative to fedavg"]
    assert list(first) == ["method", *scores, "updates", "sent (MB)"]
    assert first["method"] == "fedasync"
    np.testing.assert_allclose(first["accuracy, mean of last tenth (%)"].mean, 70.0, rtol=1e-6)
    assert first["relative to fedavg"].mean == 0.25 and second["relative to fedavg"] == (1.0, 0.0, 2)
    # By 4 s: 3 arrivals of client 0, 2 of client 1, 1 of client 2.
    assert first["updates"].mean == 6.0
    np.testing.assert_allclose(first["sent (MB)"].mean, (600 + 900) / 1e6)
    assert "relative to fedasync" in comparison(runs, "fedasync")[0]
    assert "relative to one" in comparison({"one": runs["fedavg"]})[0]


def test_work_has_columns_where_a_method_takes_more_gradients_than_local_steps():
    def counted(gradients):
        run = make_run()
        return [run._replace(counters={**run.counters, "local_steps": 60, "gradients": gradients})]

    rows = comparison({"fedavg": counted(60), "asynccurve": counted(120)})
    assert [(row["local_steps"].mean, row["gradients"].mean) for row in rows] == [(60, 60), (60, 120)]
    assert "gradients" not in comparison({"fedavg": counted(60)})[0]


TWENTY = [0.1, *np.linspace(0.2, 0.7, 17), 0.9, 0.5, 0.6]  # 21 evaluations: the last tenth is two of them


EXPECTED = {"last": (65.0, 60.0), "best": (90.0, 90.0), "tail": (57.5, 55.0), "tail:3": (68.3333333, 66.6666667)}
TITLES = {"last": "last", "best": "best", "tail": "mean of last tenth", "tail:3": "mean of last 3"}


@pytest.mark.parametrize("final", EXPECTED)
def test_the_table_shows_one_final_value_and_the_csv_all_three(final, tmp_path):
    runs = {"fedavg": [make_run(TWENTY), make_run([*TWENTY[:-1], 0.7])], "fedasync": [make_run(TWENTY)] * 2}
    write_comparison(runs, tmp_path, plots=False, final=final)
    title, markdown = f"accuracy, {TITLES[final]} (%)", (tmp_path / "comparison.md").read_text()
    assert markdown.count("accuracy, ") == 1 and f"| {title} |" in markdown
    rows = read_rows(tmp_path / "comparison.csv")
    assert list(rows[0])[1] == title
    for other in {final, "last", "best"} | ({"tail"} if not final.startswith("tail") else set()):
        found = [float(row[f"accuracy, {TITLES[other]} (%)"]) for row in rows]
        np.testing.assert_allclose(found, EXPECTED[other], rtol=1e-6)
    low, high = (float(rows[0][f"95% interval (t) {end}"]) for end in ("low", "high"))
    ends = interval([100 * final_accuracy(run, final) for run in runs["fedavg"]], limits=(0.0, 100.0))
    assert (low, high) == (ends.low, ends.high) and f"[{low:.2f}, {high:.2f}]" in markdown
    assert "accuracy, best (%) 95% interval (t) low" in rows[0] or final == "best"


@pytest.mark.parametrize(("final", "goal"), [("last", 57.0), ("best", 85.5), ("tail", 52.25)])
def test_the_target_is_a_share_of_the_final_value_that_is_shown(final, goal):
    (row,) = comparison({"fedavg": [make_run(TWENTY)]}, final=final, further=True)
    np.testing.assert_allclose(row["target (%)"].mean, goal, rtol=1e-6)


def test_comparison_without_accuracies_shows_the_final_loss():
    run = make_run([np.nan, np.nan], [0.0, 4.0])
    run.evaluations["loss"] = np.array([2.0, 0.5])
    (row,) = comparison({"asgd": [run]})
    assert list(row) == ["method", "loss, mean of last tenth", "updates", "sent (MB)"]
    assert row["loss, mean of last tenth"].mean == 0.5


def test_a_target_that_not_all_seeds_reach_is_counted(tmp_path):
    at = [0.0, 1.0, 4.0]
    runs = {
        "fedasync": [make_run([0.1, 0.6, 0.6], at), make_run([0.1, 0.2, 0.5], at), make_run([0.1, 0.2, 0.9], at)],
        "fedavg": [make_run([0.1, 0.2, 0.7], at)] * 3,
    }
    rows = comparison(runs, target=0.6)
    assert (rows[0]["time to target (s)"].reached, rows[0]["time to target (s)"].seeds) == (2, 3)
    assert rows[1]["time to target (s)"] == (4.0, 0.0, 3)
    lines = table(rows).splitlines()
    assert (
        lines[2].count("2 of 3 reached") == 2 and len({len(line) for line in table(rows, "markdown").splitlines()}) == 1
    )
    written = next(csv.DictReader(table(rows, "csv").splitlines()))
    assert written["time to target (s)"] == written["time to target (s) std"] == "nan"
    assert written["time to target (s) reached"] == "2"
    assert table(comparison({"fedavg": runs["fedavg"][:1]}, target=0.9)).splitlines()[2].split()[-4] == "-"  # one seed
