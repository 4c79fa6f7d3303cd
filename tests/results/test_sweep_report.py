"""The tables and pictures of a sweep, compared with arithmetic by hand; the same results give the same bytes."""

from __future__ import annotations

import io
import math
import sys

import numpy as np
import pyarrow.parquet
import pytest

from fedjax_async.config import Method, Settings, named
from fedjax_async.config.grid import expand
from fedjax_async.results import interval, metrics
from fedjax_async.results.figure import WIDTHS, Drawing
from fedjax_async.results.heat_map import Cells, cells, heat_map
from fedjax_async.results.sweep_report import MOST_CURVES, as_columns, curves, parquet_writer, pictures, write_sweep
from fedjax_async.results.sweep_table import (
    TableOptions,
    by_setting,
    columns_of,
    evaluation_columns,
    run_rows,
    setting_rows,
    swept_run,
    swept_runs,
)
from fedjax_async.results.sweeps import Sweep
from fedjax_async.results.tuning import chosen_rows, rank
from fedjax_async.server import asgd
from tests.results.folders import rows as read_rows
from tests.results.made_up import make_run
from tests.results.sweep_engine import made_up

BASE = Settings(updates=11)
FILES = {f"{name}.{ending}" for name in ("runs", "evaluations") for ending in ("csv", "parquet")}
FILES |= {f"{name}.{ending}" for name in ("settings", "best") for ending in ("csv", "md")}
FILES |= {"accuracy.png", "loss.png", "settings.tex", "best.tex"}


def a_sweep(grid, *, base=BASE, run=made_up, **options) -> Sweep:
    points = tuple(expand(base, grid, **options))
    return Sweep(points, None, tuple(run(point.settings) for point in points))


TWO = a_sweep({"lr": [0.1, 0.3]}, seeds=3)  # accuracies 0.3, 0.29, 0.3 and 0.5, 0.49, 0.5


# --- tables ---------------------------------------------------------------------------------------


def test_runs_that_ended_before_their_budget_are_marked():
    first, *others = TWO.runs
    early = first._replace(counters=first.counters | {"ended_early": "ended after 11 of 99"})
    found = swept_runs(Sweep(TWO.points, None, (early, *others)))
    assert [row.get("ended_early") for row in run_rows(found)] == ["ended after 11 of 99", *[None] * 5]
    assert [row["ended before budget"] for row in setting_rows(found)] == ["1 of 3", "0 of 3"]
    assert not any("ended before budget" in row for row in setting_rows(swept_runs(TWO)))
    assert as_columns(run_rows(found))["ended_early"].count(None) == 5


def test_the_table_of_settings_has_the_bytes_that_were_sent():
    """In megabytes, in both directions, as in the table of a comparison."""
    sent = [np.mean([metrics.progress_in(TWO.run(k), "bytes")[-1] for k in ks]) / 1e6 for ks in ((0, 1, 2), (3, 4, 5))]
    np.testing.assert_allclose([row["sent (MB)"].mean for row in setting_rows(swept_runs(TWO))], sent)


def test_one_tidy_row_a_run():
    rows = run_rows(swept_runs(TWO, target=0.4))
    assert [row["run"] for row in rows] == [point.name for point in TWO.points]
    row = rows[4]
    assert (row["lr"], row["seed"], row["rejected"]) == (0.3, 1, 1)
    assert row["tail_accuracy"] == row["last_accuracy"] == row["best_accuracy"] == np.float32(0.49)
    assert row["mean_accuracy"] == metrics.area(TWO.run(4))
    staleness = TWO.run(4).updates["staleness"]
    assert row["staleness_mean"] == staleness.mean() and row["staleness_max"] == staleness.max()
    assert row["time_to_target"] == 12.0 == row["virtual_time"]
    assert row["updates_to_target"] == TWO.run(4).evaluations["update"][-1]
    assert row["bytes_to_target"] == row["bytes_up"] + row["bytes_down"]
    assert math.isnan(rows[0]["time_to_target"])  # never reached
    assert not {"programs", "waves", "mean_width"} & set(row)  # counters of the execution are not results
    assert "time_to_target" not in run_rows(swept_runs(TWO))[0]


def test_what_is_swept_never_hides_what_is_measured():
    found = swept_runs(a_sweep({"time": [5.0, 7.0], "updates": [11], "method.mixing": [0.4, 0.8]}))
    assert columns_of(found) == {"time": "setting.time", "updates": "setting.updates", "method.mixing": "mixing"}
    row = run_rows(found)[-1]
    assert (row["setting.time"], row["setting.updates"], row["updates"], row["mixing"]) == (7.0, 11, 11, 0.8)


def test_a_run_without_an_option_has_an_empty_cell(tmp_path):
    found = a_sweep({"method.mixing": [0.4]}, points=[{"method": "fedavg"}])
    write_sweep(found, tmp_path, plots=False)
    rows = read_rows(tmp_path / "runs.csv")
    assert [(row["method"], row["mixing"]) for row in rows] == [("fedasync", "0.4"), ("fedavg", "")]
    table = pyarrow.parquet.read_table(tmp_path / "runs.parquet")
    assert table["mixing"].to_pylist() == [0.4, None]


def test_the_long_table_has_a_row_an_evaluation():
    found = swept_runs(TWO)
    long = evaluation_columns(found)
    assert {len(column) for column in long.values()} == {18}
    np.testing.assert_array_equal(long["accuracy"][3:6], TWO.run(1).evaluations["accuracy"])
    assert long["run"][3:6] == ["lr=0.1,seed=1"] * 3 and long["seed"][3:6] == [1] * 3
    assert long["accuracy"].dtype == np.float32 and long["bytes_up"].dtype.kind == "i"


def test_a_sweep_over_compression_counts_values_alone_too():
    """An uncompressed upload is values only: all its bytes are in the column of values."""

    def run(settings):
        one = made_up(settings)
        if settings.compress is None:
            return one
        return one._replace(evaluations=one.evaluations | {"values_bytes_up": one.evaluations["bytes_up"] // 2})

    found = swept_runs(a_sweep({"compress": ["none", "topk"]}, run=run))
    long, bytes_up = evaluation_columns(found), found[0].run.evaluations["bytes_up"]
    np.testing.assert_array_equal(long["values_bytes_up"], [*bytes_up, *(bytes_up // 2)])
    assert [row.get("values_bytes_up") for row in run_rows(found)] == [None, bytes_up[-1] // 2]
    amounts = [metrics.progress_in(each.run, "values_bytes_up")[-1] for each in found]
    assert amounts == [bytes_up[-1], bytes_up[-1] // 2]
    assert metrics.progress_in(found[1].run, "bytes_up")[-1] == bytes_up[-1]


def test_parquet_and_csv_hold_the_same(tmp_path):
    write_sweep(TWO, tmp_path, plots=False, target=0.4)
    for name, expected in (
        ("runs", as_columns(run_rows(swept_runs(TWO, 0.4)))),
        ("evaluations", evaluation_columns(swept_runs(TWO, 0.4))),
    ):
        table = pyarrow.parquet.read_table(tmp_path / f"{name}.parquet")
        rows = read_rows(tmp_path / f"{name}.csv")
        assert table.column_names == list(expected) == list(rows[0])
        for column, values in expected.items():
            texts = [row[column] for row in rows]
            if column == "run":
                assert texts == list(values) == table[column].to_pylist()
            else:
                for found in (np.array(texts, np.float64), table[column].to_numpy()):
                    np.testing.assert_array_equal(found.astype(np.asarray(values).dtype), values)


def test_parquet_columns_of_mixed_types(tmp_path):
    write = parquet_writer()
    columns = {"a": [1, 0.5, None], "b": [1, "rpi", None], "c": [True, 2, 0.5], "d": [None, None, None]}
    table = pyarrow.parquet.read_table(io.BytesIO(write(columns)))
    assert table.to_pydict() == {
        "a": [1.0, 0.5, None],
        "b": ["1", "rpi", None],
        "c": ["True", "2", "0.5"],
        "d": [None, None, None],
    }


# --- the best -------------------------------------------------------------------------------------


def with_scores(scores):
    """Settings lr = 1, 2, ... with the given final accuracies, one per seed."""
    points = expand(BASE, {"lr": [float(k + 1) for k in range(len(scores))]}, seeds=len(scores[0]))
    flat = [value for row in scores for value in row]
    return [swept_run(point, make_run([0.1, value])) for point, value in zip(points, flat, strict=True)]


def test_the_best_mean_wins_and_the_smaller_spread_breaks_ties():
    nan = float("nan")
    found = with_scores([[0.5, 0.5], [0.25, 0.75], [0.5, 0.75], [nan, 1.0], [0.375, 0.625]])
    assert rank(found).metric == "accuracy, mean of last tenth (%)"
    assert rank(found).order == [2, 0, 4, 1, 3]  # 62.5; 50 with spreads 0, 17.7, 35.4; diverged


def test_without_classes_the_loss_decides():
    points = expand(BASE, {"lr": [0.1, 0.2]})
    runs = [make_run([0.5, 0.25]), make_run([0.5, 0.4])]  # losses -log
    blind = [run._replace(evaluations=run.evaluations | {"accuracy": np.full(2, np.nan, np.float32)}) for run in runs]
    found = [swept_run(point, run) for point, run in zip(points, blind)]
    assert rank(found).metric == "loss, mean of last tenth" and rank(found).order == [1, 0]
    assert "accuracy, mean of last tenth (%)" not in setting_rows(found)[0]
    assert set(pictures(found)) == {"loss"}


# --- pictures -------------------------------------------------------------------------------------


def test_many_settings_show_the_best():
    found = swept_runs(a_sweep({"lr": [round(0.01 * k, 2) for k in range(1, 16)]}))
    axes = curves(found, "loss").axes[0]
    names = [text.get_text() for text in axes.texts]
    assert names == [f"lr={0.01 * k:.2g}" for k in range(6, 16)] and len(names) == MOST_CURVES
    assert axes.get_title(loc="left") == "best 10 of 15 settings by test accuracy (mean of last tenth)"


def test_a_heat_map_of_two_numbers():
    found = swept_runs(a_sweep({"method.mixing": [0.8, 0.4], "lr": [0.3, 0.1, 0.2]}, seeds=2))
    (grid,) = cells(found, "accuracy")
    assert grid.rows == ("mixing", [0.4, 0.8]) and grid.columns == ("lr", [0.1, 0.2, 0.3])
    np.testing.assert_allclose(grid.mean, [[29.5, 39.5, 49.5]] * 2, rtol=1e-5)
    axes = heat_map([grid], "accuracy").axes
    assert [text.get_text() for text in axes[0].texts] == ["29.5\n± 0.7", "39.5\n± 0.7", "49.5\n± 0.7"] * 2
    assert [label.get_text() for label in axes[0].get_xticklabels()] == ["0.1", "0.2", "0.3"]
    assert axes[0].get_xlabel() == "lr" and axes[0].get_ylabel() == "mixing"
    assert axes[1].get_ylabel() == "test accuracy,\nmean of last tenth (%)"
    np.testing.assert_allclose(axes[0].images[0].get_array(), grid.mean)
    assert set(pictures(found)) == {"accuracy", "accuracy_map", "loss", "loss_map"}


@pytest.mark.parametrize(
    "grid",
    [
        {"lr": [0.1, 0.2]},
        {"lr": [0.1], "clients": [5, 6]},
        {"lr": [0.01 * k for k in range(1, 22)], "clients": list(range(2, 22))},
    ],
    ids=["one number", "a single value", "420 cells"],
)
def test_no_heat_map_where_it_would_say_nothing(grid):
    assert cells(swept_runs(a_sweep(grid)), "accuracy") == []


def test_a_heat_map_has_a_facet_for_each_combination_of_the_other_axes():
    grid = {"method": ["asgd", "fedasync"], "lr": [0.3, 0.1, 0.2], "clients": [5, 6], "batch_size": [1, 2, 4]}
    found = swept_runs(a_sweep(grid, seeds=2))
    rows = dict(zip(((row["method"], row["lr"], row["clients"], row["batch_size"]) for row in setting_rows(found)),
                    setting_rows(found), strict=True))  # fmt: skip
    maps = cells(found, "accuracy")
    assert [each.title for each in maps] == [f"method={m}, clients={c}" for m in ("asgd", "fedasync") for c in (5, 6)]
    figure = heat_map(maps, "accuracy")
    figure.canvas.draw()
    *facets, bar = figure.axes
    assert len(facets) == 4 and bar.get_ylabel() == "test accuracy,\nmean of last tenth (%)"
    for axes, each in zip(facets, maps, strict=True):
        method, clients = (part.partition("=")[2] for part in each.title.split(", "))
        assert axes.get_title() == f"method={method}\nclients={clients}"
        for (row, column), text in zip(np.ndindex(3, 3), axes.texts, strict=True):
            name = (method, str(each.rows[1][row]), clients, str(each.columns[1][column]))
            cell = rows[name]["accuracy, mean of last tenth (%)"]
            assert (each.mean[row, column], each.std[row, column]) == (cell.mean, cell.std)
            assert text.get_text() == f"{cell.mean:.1f}\n± {cell.std:.1f}"
        assert axes.images[0].get_clim() == facets[0].images[0].get_clim()


def test_a_facet_has_only_its_own_rows_and_columns():
    grid = {"method.mixing": [0.4, 0.8], "method.exponent": [0.5, 1.0]}
    maps = cells(swept_runs(a_sweep(grid, points=[{"method": "fedavg"}])), "accuracy")
    assert [(each.title, each.mean.shape) for each in maps] == [("method=fedasync", (2, 2)), ("method=fedavg", (1, 1))]
    texts = [label.get_text() for label in heat_map(maps, "accuracy").axes[1].get_yticklabels()]
    assert texts == ["-"]


def test_names_stay_in_the_order_of_the_sweep():
    (grid,) = cells(swept_runs(a_sweep({"method": ["fedavg", "asgd", "fedbuff"], "lr": [0.3, 0.1]})), "accuracy")
    assert grid.rows == ("method", ["fedavg", "asgd", "fedbuff"]) and grid.columns == ("lr", [0.1, 0.3])


def facets_of(figure):
    """The drawn maps of a heat map's figure, without the colour scale."""
    figure.draw_without_rendering()
    return figure.axes[:-1]


@pytest.mark.parametrize("width", [None, "column"])
def test_numbers_and_names_fit_whatever_the_width(width):
    grid = {"method": ["asgd", "fedbuff@buffer:size=5"], "lr": [0.3, 0.1, 0.2, 0.4], "delay": ["rpi", "lognormal"]}
    figure = heat_map(cells(swept_runs(a_sweep(grid, seeds=2)), "accuracy"), "accuracy", drawing=Drawing(width=width))
    assert width is None or figure.get_figwidth() == WIDTHS[width]
    every = facets_of(figure)
    whole = figure.get_window_extent()
    for axes in every:
        cell = axes.get_window_extent().width / 4
        assert max(text.get_window_extent().width for text in axes.texts) < cell
        row = axes.get_window_extent().height / 2
        assert max(text.get_window_extent().height for text in axes.texts) < row
        outer = axes.get_tightbbox()
        assert whole.x0 <= outer.x0 + 1 and outer.x1 <= whole.x1 + 1 and whole.y0 <= outer.y0 + 1
    bar = figure.axes[-1].get_tightbbox()
    assert whole.x0 <= bar.x0 and bar.x1 <= whole.x1 + 1 and whole.y0 <= bar.y0 + 1 and bar.y1 <= whole.y1 + 1


def test_names_that_two_maps_share_stand_once():
    grid = {"method": ["asgd", "fedbuff@buffer:size=5"], "lr": [0.3, 0.1, 0.2], "clients": [5, 6, 7, 8]}
    maps = cells(swept_runs(a_sweep(grid)), "accuracy")
    every = facets_of(heat_map(maps, "accuracy"))
    rows = [[label.get_text() for label in axes.get_yticklabels()] for axes in every]
    columns = [[label.get_text() for label in axes.get_xticklabels()] for axes in every]
    assert [axes.get_title() for axes in every] == ["method=asgd", "method=fedbuff@buffer:size=5"]
    assert rows == [["0.1", "0.2", "0.3"], [""] * 3] and columns == [["5", "6", "7", "8"]] * 2
    assert [(axes.get_ylabel(), axes.get_xlabel()) for axes in every] == [("lr", "clients"), ("", "clients")]
    stacked = facets_of(
        heat_map(cells(swept_runs(a_sweep(grid)), "accuracy"), "accuracy", drawing=Drawing(width="column"))
    )
    assert [axes.get_xlabel() for axes in stacked] == ["", "clients"] and {a.get_ylabel() for a in stacked} == {"lr"}


# --- final values and paired tests ----------------------------------------------------------------


def long_run(settings):
    scores = np.random.default_rng([settings.seed, round(1000 * settings.lr)]).uniform(0.2, 0.9, 21)
    return make_run(list(scores))._replace(settings={"seed": settings.seed})


@pytest.mark.parametrize("final", ["best", "tail:3"])
def test_every_table_has_the_same_final_value(final, tmp_path):
    found = a_sweep({"lr": [0.1, 0.2, 0.3]}, seeds=3, run=long_run)
    write_sweep(found, tmp_path, plots=False, final=final)
    title, way = metrics.final_title(final=final), final.partition(":")[0]
    runs, rows = read_rows(tmp_path / "runs.csv"), read_rows(tmp_path / "settings.csv")
    assert {f"{each}_{column}" for each in metrics.FINALS for column in ("accuracy", "loss")} < set(runs[0])
    for row in rows:
        values = [100 * float(run[f"{way}_accuracy"]) for run in runs if run["lr"] == row["lr"]]
        assert float(row[title]) == metrics.spread(values).mean and float(row[f"{title} std"]) == np.std(values, ddof=1)
        ends = [float(row[f"95% interval (t) {end}"]) for end in ("low", "high")]
        assert ends == list(interval(values, limits=(0.0, 100.0)))
        assert {
            metrics.final_title(column, other) for column in ("accuracy", "loss") for other in ("last", "best")
        } < set(row)
    best_lr = max(rows, key=lambda row: float(row[title]))["lr"]
    lines = (tmp_path / "best.md").read_text().splitlines()
    assert title.removesuffix(" (%)").replace(", ", " (") + ")" in lines[0] and title in lines[4]
    assert lines[6].split("|")[2].strip() == best_lr
    found = swept_runs(a_sweep({"lr": [0.1, 0.2], "clients": [5, 6]}, seeds=3, run=long_run))
    (grid,) = cells(found, "accuracy", final)
    np.testing.assert_array_equal(grid.mean[:, 0], [float(row[title]) for row in rows[:2]])


def test_methods_are_paired_within_each_world(tmp_path):
    write_sweep(a_sweep({"method": ["asgd", "fedavg"], "clients": [5, 6]}, seeds=3), tmp_path, plots=False)
    rows = read_rows(tmp_path / "pairs.csv")
    assert [row["where"] for row in rows] == ["clients=5", "clients=6"]
    assert {row["p (t, Holm)"] for row in rows} == {"1.0"} and "clients=6" in (tmp_path / "pairs.md").read_text()
    write_sweep(a_sweep({"method": ["asgd", "fedavg"]}, seeds=2), tmp_path, plots=False)
    assert not list(tmp_path.glob("pairs.*"))


def test_cells_that_the_sweep_leaves_out_stay_empty():
    found = swept_runs(a_sweep(None, points=[{"lr": 0.1, "clients": [5, 6]}, {"lr": 0.2, "clients": 5}]))
    (grid,) = cells(found, "accuracy")
    assert np.isnan(grid.mean[1, 1]) and np.isfinite(grid.mean).sum() == 3
    assert "-" in [text.get_text() for text in heat_map([grid], "accuracy").axes[0].texts]


# --- files ----------------------------------------------------------------------------------------


def test_the_same_results_give_the_same_bytes(tmp_path):
    texts = [write_sweep(TWO, tmp_path / name, target=0.4) for name in "ab"]
    written = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "ab"]
    assert texts[0] == texts[1] and written[0] == written[1] and set(written[0]) == FILES
    assert (tmp_path / "a" / "best.md").read_text() == texts[0]
    assert "49.67 ± 0.58" in (tmp_path / "a" / "settings.md").read_text().splitlines()[3]


def test_without_pyarrow_there_is_csv_and_a_line_about_it(tmp_path, monkeypatch):
    write_sweep(TWO, tmp_path, plots=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    text = write_sweep(TWO, tmp_path, plots=False)
    assert "run: pip install pyarrow" in text.splitlines()[-1]
    assert {path.name for path in tmp_path.iterdir()} == {
        name for name in FILES if name.endswith((".csv", ".md", ".tex"))
    }


def test_the_label_of_the_colour_scale_is_not_cut_off_by_long_names_below():
    names = [f"fedbuff:server_lr={k}@buffer:size=3" for k in range(2)]
    one = Cells(("lr", [0.1]), ("method", names), np.array([[30.0, 60.0]]), np.full((1, 2), np.nan))
    for width in (None, "page"):
        figure = heat_map([one], "accuracy", drawing=Drawing(width=width))
        figure.draw_without_rendering()
        label = figure.axes[-1].yaxis.label.get_window_extent()
        assert label.y0 >= 0 and label.y1 <= figure.bbox.y1


def test_a_swept_option_with_the_name_of_a_column_has_its_whole_path():
    """The measured staleness and the rank of a setting are other columns."""
    weights = a_sweep({"method.staleness": ["constant", "hinge"]}, base=Settings(method="fedasync", updates=11))
    rows = setting_rows(swept_runs(weights))
    assert [row["method.staleness"] for row in rows] == ["constant", "hinge"] and rows[0]["staleness"].mean == 1.0
    adapted = swept_runs(a_sweep({"model.rank": [2, 8]}, base=Settings(model="minilm_lora", updates=11)))
    ranks = chosen_rows(adapted, TableOptions(roles={"model.rank": "tuned"}))
    assert sorted(row["model.rank"] for row in ranks) == ["2", "8"] and [row["rank"] for row in ranks] == [1, 2]


def test_a_setting_whose_title_is_a_label_stays_apart():
    """A point that changes nothing is called base, and so may be a label."""
    found = swept_runs(a_sweep({"method": {"base": "fedavg", "other": "asgd"}}, points=[{}]))
    assert [len(group) for group in by_setting(found).values()] == [1, 1, 1]
    assert [row["seeds"] for row in setting_rows(found)] == [1, 1, 1]


def test_objects_of_the_users_own_are_names_in_every_table():
    """Parquet has no type for the objects themselves."""
    methods = [named(name, Method(asgd(server_lr=rate))) for name, rate in (("fair", 0.1), ("mine", 0.2))]
    found = swept_runs(a_sweep({"method": methods}))
    for columns in (as_columns(run_rows(found)), evaluation_columns(found)):
        read = pyarrow.parquet.read_table(io.BytesIO(parquet_writer()(columns)))
        assert set(read.column("method").to_pylist()) == {"fair", "mine"}
