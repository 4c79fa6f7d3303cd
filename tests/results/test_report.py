"""One call writes all files of a run or a comparison; tables: alignment, spreads, exact CSV, what readers must know."""

from __future__ import annotations

import csv
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fedjax_async import compare
from fedjax_async.clock import Until
from fedjax_async.engine.client_scores import client_columns
from fedjax_async.peers import plan_peers
from fedjax_async.results import Drawing, card, comparison, interval, load, measured, metrics, tables
from fedjax_async.results.curves import accuracy_curve, loss_curve, measured_curve
from fedjax_async.results.heat_map import Cells, heat_map
from fedjax_async.results.html_figures import clients
from fedjax_async.results.metrics import final_accuracy, spread
from fedjax_async.results.peer_gantt import age_histogram, mixed_ages, peer_gantt
from fedjax_async.results.runs import draw_missing, write_comparison, write_run
from fedjax_async.results.tables import mean_std, table
from fedjax_async.results.worlds import differences, end_text, faults_text, note_on_nodes, warn_of_differences
from fedjax_async.types import Stopped
from tests.results.folders import contents
from tests.results.folders import rows as read_rows
from tests.results.made_up import make_run
from tests.told import refusal

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
    every = np.ones(len(run.updates["staleness"]), bool)
    run = run._replace(updates=run.updates | {"used": every, column: ~every})
    assert PICTURES - set(contents(write_run(run, tmp_path))) == {"staleness.png"}
    (tmp_path / "gantt.png").unlink()
    draw_missing(run, tmp_path, Drawing())
    assert (tmp_path / "gantt.png").is_file() and [shown.title for shown in clients(run)] == ["updates per client"]


@pytest.mark.parametrize("value", [math.inf, 1e300])
def test_the_losses_of_diverged_runs_raise_no_warning(tmp_path, value):
    """Warnings are errors here; ``interval`` and ``pairs`` see differences of such losses too."""

    names = ("loss", "client_loss", "client_loss_std", "client_loss_worst")

    def diverged(sign):
        loss = np.array([2.0, sign * 1.0, value, sign * value if value < math.inf else value])
        return make_run([math.nan] * 4, **dict.fromkeys(names, loss))

    runs = [diverged(sign) for sign in (1, -1, 1)]
    text = write_comparison({"one": runs, "two": runs[::-1]}, tmp_path / "both", final="last")
    assert "loss, last" in text and (tmp_path / "both" / "loss.png").is_file()
    write_run(runs[0], tmp_path / "run", plots=False)
    for column in names:
        measured_curve({"one": runs[:1]}, column).draw_without_rendering()
    scores = client_columns({"loss": np.array([[1.0, value, 2.0], [value, value, value]])})
    assert scores["client_loss"][1] == value and not np.isfinite(scores["client_loss_std"][0])


def test_pictures_in_other_formats(tmp_path):
    names = set(contents(write_run(make_run(), tmp_path, drawing=Drawing(("svg",), "column", "Two methods"))))
    assert {"accuracy.svg", "staleness.svg", "gantt.svg"} <= names and not any(name.endswith(".png") for name in names)
    assert b"Two methods" in (tmp_path / "accuracy.svg").read_bytes()


def test_data_is_safe_where_matplotlib_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install" in refusal(write_run, make_run(), tmp_path / "run")
    assert load(tmp_path / "run").settings["seed"] == 0


def test_a_comparison(tmp_path):
    runs = {"fedavg": [make_run([0.1, 0.4]), make_run([0.1, 0.5])], "fedasync": [make_run([0.1, 0.6])] * 2}
    (tmp_path / ".comparison.md.1234.tmp").write_text("half")  # from a killed process
    text = write_comparison(runs, tmp_path, drawing=Drawing(("png", "pdf")))
    names = {"comparison.csv", "comparison.md", "comparison.tex", "accuracy.png", "accuracy.pdf"}
    markdown = (tmp_path / "comparison.md").read_text()
    assert set(contents(tmp_path)) == names and "45.00 ± 7.07" in text and "45.00 ± 7.07" in markdown
    target = "target: 42.75 ± 6.72 % (95 % of the lowest final accuracy among these methods; with others it may differ"
    for shown in (text, markdown):  # a header: other methods may change the times
        assert shown.startswith(target) and shown.index("--target fixes it)") < shown.index("time to target (s)")
    assert "target: 50.00 ± 0.00 % (as asked for)" in write_comparison(runs, tmp_path / "b", plots=False, target=0.5)
    text = write_comparison(runs, tmp_path / "b", plots=False, target="fedasync", baseline="fedasync")
    assert "target: 60.00 ± 0.00 % (the final accuracy of fedasync)" in text and "0 of 2 reached" in text
    assert "relative to fedasync" in (tmp_path / "b" / "comparison.csv").read_text()
    assert not (tmp_path / "b" / "accuracy.png").exists()


@pytest.mark.parametrize(
    ("name", "found"), [("sweep.json", "a sweep"), ("settings.json", "a run"), ("thesis.tex", "other files")]
)
def test_a_comparison_takes_no_folder_of_something_else(tmp_path, name, found):
    (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=f"must be empty or hold a comparison, but it holds {found}"):
        compare(["fedasync"], model="logistic", clients=4, updates=4, out=tmp_path)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == [name]


def test_another_run_in_a_folder_takes_away_what_was_drawn_of_the_first(tmp_path, blank_pictures):
    """Also where it has no pictures and no scores of single clients itself; the same run keeps them."""
    first = make_run(**{f"client_accuracy{end}": np.array([0.1, 0.2, 0.3]) for end in ("", "_std", "_worst")})
    drawn = {*PICTURES, "clients.csv", "clients.md", "client_accuracy_worst.png"}
    for again in range(2):
        assert drawn <= set(contents(write_run(first, tmp_path, plots=not again))), again
    (tmp_path / "mine.png").write_bytes(b"")
    left = set(contents(write_run(make_run([0.1, 0.2, 0.3]), tmp_path, plots=False, overwrite=True)))
    assert not drawn & left and "mine.png" in left


# --- tables -------------------------------------------------------------------------------------------


def test_text_and_markdown_are_aligned():
    rows = [
        {"method": "fedavg", "accuracy": spread([0.5, 0.7]), "updates": 12},
        {"method": "a|b", "accuracy": spread([0.25, 0.25]), "updates": None},
    ]
    for style in ("text", "markdown"):
        lines = table(rows, style).splitlines()
        assert len(lines) == 4 and len({len(line) for line in lines}) == 1
        assert "0.60 ± 0.14" in lines[2] and lines[2].rstrip(" |").endswith("12")
    assert lines[1].count(":") == 2  # numbers are right-aligned, names left-aligned
    assert "a\\|b" in lines[3], "the sign between columns is escaped"
    titled = table([{"method": "a", "relative to a|b": 2.0}], "markdown", decimals={"relative to a|b": 1})
    assert titled.splitlines()[0] == r"| method | relative to a\|b |" and "2.0 |" in titled


def test_spread_is_the_sample_standard_deviation():
    values = [1.0, 2.0, 4.0]
    assert spread(values).std == np.std(values, ddof=1)
    assert (mean_std([75.0, 76.0]), mean_std([75.0], decimals=1)) == ("75.50 ± 0.71", "75.0")
    assert mean_std([1.0, math.nan]) == "-"
    for decimals, shown in ((1, ["0.5", "0.2"]), ({"b": 1, "c": 0}, ["0.50", "0.2"])):
        assert table([{"a": 0.5, "b": 0.25}], decimals=decimals).split()[-2:] == shown


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
    assert "relative to one" in comparison({"one": runs["fedavg"]})[0]


def test_work_has_columns_where_a_method_takes_more_gradients_than_local_steps():
    run = make_run()
    counted = {
        name: [run._replace(counters={**run.counters, "local_steps": 60, "gradients": gradients})]
        for name, gradients in (("fedavg", 60), ("asynccurve", 120))
    }
    assert [(row["local_steps"].mean, row["gradients"].mean) for row in comparison(counted)] == [(60, 60), (60, 120)]
    assert "gradients" not in comparison({"fedavg": counted["fedavg"]})[0]


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
    np.testing.assert_allclose(float(rows[0]["target (%)"]), 0.95 * EXPECTED[final][1], rtol=1e-6)


def test_comparison_without_accuracies_shows_the_final_loss_and_no_target(tmp_path):
    runs = {"asgd": [make_run([np.nan, np.nan], [0.0, 4.0], loss=np.array([2.0, 0.5]))]}
    assert write_comparison(runs, tmp_path, False, target=0.5).startswith(
        "no times to the target 0.5: no run has class"
    )
    assert write_comparison(runs, tmp_path, False).startswith("method")
    (row,) = comparison(runs)
    assert list(row) == ["method", "loss, mean of last tenth", "updates", "sent (MB)"]
    assert row["loss, mean of last tenth"].mean == 0.5


def test_a_target_that_not_all_seeds_reach_is_counted():
    at, scores = [0.0, 1.0, 4.0], ([0.1, 0.6, 0.6], [0.1, 0.2, 0.5], [0.1, 0.2, 0.9])
    runs = {"fedasync": [make_run(one, at) for one in scores], "fedavg": [make_run([0.1, 0.2, 0.7], at)] * 3}
    rows = comparison(runs, target=0.6)
    assert (rows[0]["time to target (s)"].reached, rows[0]["time to target (s)"].seeds) == (2, 3)
    assert rows[1]["time to target (s)"] == (4.0, 0.0, 3)
    assert table(rows).splitlines()[2].count("2 of 3 reached") == 2
    assert len({len(line) for line in table(rows, "markdown").splitlines()}) == 1
    written = next(csv.DictReader(table(rows, "csv").splitlines()))
    assert written["time to target (s)"] == written["time to target (s) std"] == "nan"
    assert written["time to target (s) reached"] == "2"
    assert table(comparison({"fedavg": runs["fedavg"][:1]}, target=0.9)).splitlines()[2].split()[-4] == "-"  # one seed


def test_messages_between_nodes_count_once_and_with_a_server_bytes_of_both_directions():
    served = make_run([0.1, 0.5])
    between = served._replace(schedule=SimpleNamespace(source=np.zeros(1)))
    up, down = served.evaluations["bytes_up"], served.evaluations["bytes_down"]
    np.testing.assert_array_equal(metrics.progress_in(served, "bytes"), up + down)
    np.testing.assert_array_equal(metrics.progress_in(between, "bytes"), up)
    units = [measured.shown_unit("bytes", runs) for runs in ([served], [between], [between, served])]
    assert units == ["bytes", "bytes_between", "bytes"]
    assert (
        measured.shown_unit("step", [between]) == "event" and measured.shown_unit("step", [between, served]) == "step"
    )
    np.testing.assert_array_equal(metrics.progress_in(between, "step"), between.evaluations["step"])
    axes = loss_curve({"nodes": [RUN._replace(schedule=PLAN)]}, "step").axes[0]
    assert axes.get_xlabel() == "events of the nodes"  # which have no server step


@pytest.mark.parametrize(
    ("column", "values", "places"),
    [
        ("sent (MB)", (0.0372, 12.0), 3),  # the least number of a column has two digits
        ("sent (MB)", (37.0, 0.0), 1),
        ("sent (MB)", (0.23,), 2),
        ("sent (MB)", (), 1),
        ("sent (MB)", (1e-9,), 6),
        ("MB to 70 %", (0.0372, 12.0), 3),
        ("energy (kJ)", (120.0, 75.0), 2),
        ("carbon (g CO2e)", (0.0004,), 5),
        ("relative to fedavg", (0.006, 1.0), 4),
        ("time to target (s)", (1800.0, 90.0), 0),
        ("time to target (s)", (3.2, 3.4), 1),
        ("time to target (s)", (0.04, 0.5), 3),  # a job may take a fraction of a second
        *((count, (1654.2,), 0) for count in ("updates", "local_steps", "gradients", "late")),
        ("staleness", (1654.2,), 2),
        (metrics.final_title("loss"), (0.0000123, 2.0), 6),
        (metrics.final_title("loss"), (1e-14,), 10),
        (metrics.final_title("lateness"), (0.25,), 4),  # no count, though its name begins like one
    ],
)
def test_decimal_places(column, values, places):
    for cell in (float, lambda value: spread([value])):
        rows = [{"accuracy, last (%)": 1.0, column: cell(value)} for value in values]
        assert tables.decimals_of(rows)[column] == places
        assert not rows or f"{min(filter(None, values)):.{places}f}" in table(rows, decimals=tables.decimals_of(rows))


def test_small_losses_have_digits_in_intervals_pairs_and_cards_too(tmp_path):
    losses = {"a": [1e-6, 2e-6, 3e-6], "b": [3e-6, 6e-6, 9e-6]}
    runs = {
        name: [
            make_run([math.nan] * 2, loss=np.array([1.0, loss]))._replace(settings={"seed": seed})
            for seed, loss in enumerate(of)
        ]
        for name, of in losses.items()
    }
    text = write_comparison(runs, tmp_path, plots=False)
    assert "0.0000020 ± 0.0000010" in text and "[-0.0000005, 0.0000045]" in text and " -0.0000040 |" in text
    assert r"\mathbf{0.0000020" in (tmp_path / "comparison.tex").read_text() and "0.0000020 ±" in card(runs)
    maps = [Cells(("lr", [1]), ("steps", [1, 2]), np.array([[0.001, 0.02]]), np.full((1, 2), np.nan))]
    assert [text.get_text() for text in heat_map(maps, "loss").axes[0].texts] == ["0.0010", "0.0200"]


# --- in which worlds runs were made: other settings, no server, faults, early ends ---------------------

RUN = make_run()
PLAN = plan_peers("push_sum", "constant", num_clients=3, local_steps=1, until=Until(updates=6))
ALONE = RUN._replace(schedule=PLAN)
DELAYS = [f"lognormal:mean=60,sigma=0.3,heterogeneity={spread}" for spread in (0.5, 1)]


def test_pictures_of_nodes_end_with_their_run_and_leave_withheld_messages_out():
    """The plan of a run that was stopped goes on."""
    plan = plan_peers("push_sum", "constant", num_clients=3, local_steps=1, until=Until(updates=30))
    end = float(np.median(plan.end))
    done = np.flatnonzero(plan.end <= end)
    quiet = {int(event) for event in done if plan.number[event] % 2}
    found = []
    for reader in done:
        for source in plan.source[plan.inbox_bounds[reader] : plan.inbox_bounds[reader + 1]]:
            later = (plan.client == plan.client[source]) & (plan.number > plan.number[source])
            found += [int(sum(later & (plan.end <= plan.mixed_at[reader])))] if source not in quiet else []
    assert 0 < len(found) < len(plan.source) / 2
    updates = {"withheld": np.isin(done, list(quiet)), "staleness": np.zeros(len(done)), "accepted": done >= 0}
    run = RUN._replace(schedule=plan, evaluations={"time": np.array([0.0, end])}, updates=updates)
    assert np.sort(mixed_ages(run)).tolist() == sorted(found)
    title = age_histogram(run).axes[0].get_title(loc="left")
    assert title == f"mean {np.mean(found):.1f}, largest {max(found)}"
    run = run._replace(stopped=Stopped("stop_at", "it was reached", 1))
    assert peer_gantt(run, until=1e6).axes[0].get_xlim()[1] == pytest.approx(end)


@pytest.mark.parametrize(
    ("runs", "said", "line"),
    [
        ({"a": [RUN]}, "", ""),
        ({"a": [ALONE]}, "of nodes' own models", "accuracy (without a server): mean"),
        ({"a": [RUN], "b": [ALONE]}, "(without a server: nodes' own models)", "accuracy of b (without a server): mean"),
    ],
)
def test_axes_and_tables_name_the_nodes_own_models(tmp_path, runs, said, line):
    # a long label is broken into lines
    assert accuracy_curve(runs).axes[0].get_ylabel().split() == f"test accuracy (%) {said}".split()
    assert loss_curve(runs).axes[0].get_ylabel().split() == f"test loss {said}".split()
    text = write_comparison(runs, tmp_path, plots=False)
    assert note_on_nodes(runs).startswith(line) and bool(note_on_nodes(runs)) == bool(line)
    for shown in (text, (tmp_path / "comparison.md").read_text(), (tmp_path / "comparison.tex").read_text()):
        assert line in shown and ("without a server" in shown) == bool(line)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({"clients": 5, "lr": 0.1}, {"clients": 5, "lr": 0.2}, ""),
        ({"clients": 5, "delay": "rpi"}, {"clients": 6, "delay": "rpi"}, "clients (5, 6)"),
        ({"delay": DELAYS[0]}, {"delay": DELAYS[1]}, "delay (…a=0.3,heterogeneity=0.5, …gma=0.3,heterogeneity=1)"),
        ({"delay": "a:b=1", "time": 9}, {"delay": "a:b=1.0", "time": 9.0}, ""),
    ],
)
def test_curves_of_different_worlds_say_so_in_the_figure_and_on_standard_error(capsys, one, other, said):
    runs = {name: [RUN._replace(settings=RUN.settings | given)] for name, given in (("a", one), ("b", other))}
    warn_of_differences(runs)
    line = f"different worlds: {said}" if said else ""
    assert differences(runs) == line and accuracy_curve(runs).axes[0].get_title(loc="left").replace("\n", " ") == line
    warning = capsys.readouterr().err
    assert warning.startswith(f"warning: {line}; curves and tables") if said else warning == ""


def test_faults_and_early_ends_in_words():
    counted = {"lost": 3, "crashed": 1, "interrupted": 1, "dropped_stale": 2, "duplicates": 0}
    assert faults_text(counted) == "faults: 3 jobs lost (1 crashed, 1 interrupted), 2 dropped as stale"
    assert faults_text({"messages": 40, "lost": 9, "corrupt": 2}) == "faults: 9 messages lost, 2 corrupt"  # of nodes
    assert faults_text({}) == "" == end_text(RUN)
    early = RUN._replace(counters={"ended_early": "ended after 3 of 9 updates because no client could train"})
    assert end_text(early).startswith("ended after 3 of 9 updates because")
    stopped = RUN._replace(stopped=Stopped("stop_at", "accuracy 0.7 reached", 2))
    assert end_text(stopped) == "ended before its budget: stopped by stop_at at evaluation 2: accuracy 0.7 reached"
