"""One call writes all files of a run or a comparison; tables: alignment, spreads, exact CSV."""

from __future__ import annotations

import csv
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fedjax_async import compare
from fedjax_async.engine.client_scores import client_columns
from fedjax_async.results import (
    Drawing,
    comparison,
    final_accuracy,
    interval,
    load,
    mean_std,
    measured,
    metrics,
    spread,
    table,
    tables,
    write_comparison,
    write_run,
)  # fmt: skip
from fedjax_async.results.html_figures import clients
from fedjax_async.results.runs import draw_missing
from tests.results.folders import contents
from tests.results.folders import rows as read_rows
from tests.results.made_up import make_run

PICTURES = {"accuracy.png", "staleness.png", "gantt.png"}


def test_the_pictures_of_a_run(tmp_path, blank_pictures):
    """All, none if asked for, and that of the loss where there are no classes."""
    assert set(contents(write_run(make_run(), tmp_path / "all"))) > PICTURES
    assert not any(name.endswith(".png") for name in contents(write_run(make_run(), tmp_path / "a", plots=False)))
    names = set(contents(write_run(make_run([math.nan, math.nan]), tmp_path / "b")))
    assert "loss.png" in names and "accuracy.png" not in names


@pytest.mark.parametrize("column", ["used", "accepted"])
def test_a_run_without_applied_updates_has_all_pictures_but_that_of_the_staleness(tmp_path, column, blank_pictures):
    """As one that was stopped before its first server step, or whose uploads were all rejected."""
    run = make_run()
    none = {"used": np.ones(len(run.updates["staleness"]), bool), column: np.zeros(len(run.updates["staleness"]), bool)}
    run = run._replace(updates=run.updates | none)
    assert PICTURES - set(contents(write_run(run, tmp_path))) == {"staleness.png"}
    (tmp_path / "gantt.png").unlink()
    draw_missing(run, tmp_path, Drawing())
    assert (tmp_path / "gantt.png").is_file() and [shown.title for shown in clients(run)] == ["updates per client"]


@pytest.mark.parametrize("value", [math.inf, 1e300])
def test_the_losses_of_diverged_runs_raise_no_warning(tmp_path, value):
    """Warnings are errors here; ``interval`` and ``pairs`` see differences of such losses too."""

    def diverged(sign):
        run = make_run([math.nan] * 4)
        loss = np.array([2.0, sign * 1.0, value, sign * value if value < math.inf else value])
        evaluations = {"loss": loss, "client_loss": loss, "client_loss_std": loss, "client_loss_worst": loss}
        return run._replace(evaluations={**run.evaluations, **evaluations})

    runs = [diverged(sign) for sign in (1, -1, 1)]
    text = write_comparison({"one": runs, "two": runs[::-1]}, tmp_path / "both", final="last")
    assert "loss, last" in text and (tmp_path / "both" / "loss.png").is_file()
    assert write_run(runs[0], tmp_path / "run").is_dir()
    scores = client_columns({"loss": np.array([[1.0, value, 2.0], [value, value, value]])})
    assert scores["client_loss"][1] == value and not np.isfinite(scores["client_loss_std"][0])


def test_pictures_in_other_formats(tmp_path):
    drawing = Drawing(("pdf", "svg"), "column", "Two methods")
    names = set(contents(write_run(make_run(), tmp_path / "a", drawing=drawing)))
    assert {f"{name}.{ending}" for name in ("accuracy", "staleness", "gantt") for ending in drawing.formats} <= names
    assert not any(name.endswith(".png") for name in names)
    assert b"Two methods" in (tmp_path / "a" / "accuracy.svg").read_bytes()
    write_comparison({"fedavg": [make_run()]}, tmp_path / "b", drawing=drawing)
    assert set(contents(tmp_path / "b")) == {
        "comparison.csv",
        "comparison.md",
        "comparison.tex",
        "accuracy.pdf",
        "accuracy.svg",
    }


def test_data_is_safe_where_matplotlib_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="pip install"):
        write_run(make_run(), tmp_path / "run")
    assert load(tmp_path / "run").settings["seed"] == 0


def test_a_comparison(tmp_path):
    runs = {"fedavg": [make_run([0.1, 0.4]), make_run([0.1, 0.5])], "fedasync": [make_run([0.1, 0.6])] * 2}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".comparison.md.1234.tmp").write_text("half")  # from a killed process
    text = write_comparison(runs, tmp_path / "a")
    assert set(contents(tmp_path / "a")) == {"comparison.csv", "comparison.md", "comparison.tex", "accuracy.png"}
    assert "45.00 ± 7.07" in text and "45.00 ± 7.07" in (tmp_path / "a" / "comparison.md").read_text()
    target = "target: 42.75 ± 6.72 % (95 % of the lowest final accuracy among these methods; with others it may differ"
    for shown in (text, (tmp_path / "a" / "comparison.md").read_text()):  # a header: other methods may change the times
        assert shown.startswith(target) and shown.index("--target fixes it)") < shown.index("time to target (s)")
    row, _ = read_rows(tmp_path / "a" / "comparison.csv")
    assert float(row["target (%)"]) == pytest.approx(42.75)
    assert "target: 50.00 ± 0.00 % (as asked for)" in write_comparison(runs, tmp_path / "c", plots=False, target=0.5)
    text = write_comparison(runs, tmp_path / "c", plots=False, target="fedasync")
    assert "target: 60.00 ± 0.00 % (the final accuracy of fedasync)" in text and "0 of 2 reached" in text
    write_comparison(runs, tmp_path / "b", plots=False, baseline="fedasync")
    assert "relative to fedasync" in (tmp_path / "b" / "comparison.csv").read_text()
    assert not (tmp_path / "b" / "accuracy.png").exists()


@pytest.mark.parametrize(
    ("name", "found"), [("sweep.json", "a sweep"), ("settings.json", "a run"), ("thesis.tex", "other files")]
)
def test_a_comparison_takes_no_folder_of_something_else(tmp_path, name, found):
    (tmp_path / name).write_text("{}")
    small = {"model": "logistic", "clients": 4, "updates": 4, "out": tmp_path}
    with pytest.raises(ValueError, match=f"must be empty or hold a comparison, but it holds {found}"):
        compare(["fedasync"], **small)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == [name]


# --- tables -------------------------------------------------------------------------------------------

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
    assert "a\\|b" in table(ROWS, "markdown"), "the sign between columns is escaped"
    titled = table([{"method": "a", "relative to a|b": 2.0}], "markdown", decimals={"relative to a|b": 1})
    assert titled.splitlines()[0] == r"| method | relative to a\|b |" and "2.0 |" in titled


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
    assert table([{"a": 0.5, "b": 0.25}], decimals=1).split()[-2:] == ["0.5", "0.2"]
    assert table([{"a": 0.5, "b": 0.25}], decimals={"b": 1, "c": 0}).split()[-2:] == ["0.50", "0.2"]
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


def test_messages_between_nodes_count_once_and_small_sizes_have_two_digits():
    """With a server, bytes of both directions; the least size of a column decides its decimals."""
    served = make_run([0.1, 0.5])
    between = served._replace(schedule=SimpleNamespace(source=np.zeros(1)))
    up, down = served.evaluations["bytes_up"], served.evaluations["bytes_down"]
    np.testing.assert_array_equal(metrics.progress_in(served, "bytes"), up + down)
    np.testing.assert_array_equal(metrics.progress_in(between, "bytes"), up)
    units = [measured.shown_unit("bytes", runs) for runs in ([served], [between], [between, served])]
    assert units == ["bytes", "bytes_between", "bytes"]
    for sizes, places in {(0.0372, 12.0): 3, (37.0, 0.0): 1, (0.23,): 2, (): 1, (1e-9,): 6}.items():
        assert tables.decimals_of([{"method": "a", "sent (MB)": size} for size in sizes])["sent (MB)"] == places


def test_another_run_in_a_folder_takes_away_what_was_drawn_of_the_first(tmp_path):
    """Also where it has no pictures and no scores of single clients itself; the same run keeps them."""
    run, scores = make_run(), {f"client_accuracy{end}": np.array([0.1, 0.2, 0.3]) for end in ("", "_std", "_worst")}
    first = run._replace(evaluations={**run.evaluations, **scores})
    drawn = {*PICTURES, "clients.csv", "clients.md", "client_accuracy_worst.png"}
    for again in range(2):
        assert drawn <= set(contents(write_run(first, tmp_path, plots=not again))), again
    (tmp_path / "mine.png").write_bytes(b"")
    left = set(contents(write_run(make_run([0.1, 0.2, 0.3]), tmp_path, plots=False, overwrite=True)))
    assert not drawn & left and "mine.png" in left


@pytest.mark.parametrize(("seconds", "shown"), [((1800.0, 90.0), "90"), ((3.2, 3.4), "3.2"), ((0.04, 0.5), "0.040")])
def test_times_to_a_target_have_two_digits(seconds, shown):
    """A job may take a fraction of a second; of whole seconds nothing would be left."""
    runs = {str(end): [make_run([0.1, 0.5], time=[0.0, end])] for end in seconds}
    rows = comparison(runs, target=0.5)
    assert f" {shown} " in table(rows, decimals=tables.decimals_of(rows))


def test_a_metric_is_no_count_though_its_name_begins_like_one():
    title = metrics.final_title("lateness")
    assert tables.decimals_of([{"accuracy, last (%)": 1.0, title: 0.25, "late": 3.0}])[title] == 4


def test_counts_have_no_decimals():
    columns = ("updates", "local_steps", "gradients", "staleness")
    rows = [dict.fromkeys(columns, metrics.Spread(1654.2, 319.6, 2))]
    shown = table(rows, decimals=tables.decimals_of(rows)).splitlines()[2]
    assert [cell.strip() for cell in shown.split("  ") if cell] == ["1654 ± 320"] * 3 + ["1654.20 ± 319.60"]
