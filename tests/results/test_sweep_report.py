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
from fedjax_async.results import interval, metrics, sweep_table
from fedjax_async.results.figure import WIDTHS, Drawing
from fedjax_async.results.heat_map import cells, heat_map
from fedjax_async.results.sweep_report import as_columns, parquet_writer, pictures, write_sweep
from fedjax_async.results.sweep_table import evaluation_columns, run_rows, setting_rows, swept_runs
from fedjax_async.results.sweeps import Sweep
from fedjax_async.results.tuning import chosen_rows
from fedjax_async.server import asgd
from tests.results.folders import contents
from tests.results.folders import rows as read_rows
from tests.results.made_up import make_run
from tests.results.sweep_engine import made_up

BASE = Settings(updates=11)
TEXTS = {f"{name}.csv" for name in ("runs", "evaluations", "settings", "best")}
TEXTS |= {f"{name}.{ending}" for name in ("settings", "best") for ending in ("md", "tex")}
PARQUET = {"runs.parquet", "evaluations.parquet"}
FINAL = metrics.final_title()


def a_sweep(grid, *, base=BASE, run=made_up, **options) -> Sweep:
    points = tuple(expand(base, grid, **options))
    return Sweep(points, None, tuple(run(point.settings) for point in points))


def swept(grid, **options):
    return swept_runs(a_sweep(grid, **options))


TWO = a_sweep({"lr": [0.1, 0.3]}, seeds=3)  # accuracies 0.3, 0.29, 0.3 and 0.5, 0.49, 0.5


# --- tables ---------------------------------------------------------------------------------------


def test_runs_that_ended_before_their_budget_are_marked():
    first, *others = TWO.runs
    early = first._replace(counters=first.counters | {"ended_early": "ended after 11 of 99"})
    found = swept_runs(Sweep(TWO.points, None, (early, *others)))
    assert as_columns(run_rows(found))["ended_early"] == ["ended after 11 of 99", *[None] * 5]
    assert [row["ended before budget"] for row in setting_rows(found)] == ["1 of 3", "0 of 3"]
    assert not any("ended before budget" in row for row in setting_rows(swept_runs(TWO)))


def test_the_largest_staleness_of_nodes_is_a_mean_over_messages():
    run = make_run()
    nodes = run._replace(updates=run.updates | {"staleness": np.linspace(0, 1.75, 11)})
    found = [sweep_table.swept_run(TWO.points[0], each).numbers["staleness_max"] for each in (nodes, run)]
    assert found == [1.75, 4] and isinstance(found[1], int)


def test_one_tidy_row_a_run_and_one_an_evaluation():
    rows = run_rows(swept_runs(TWO, target=0.4))
    assert [row["run"] for row in rows] == [point.name for point in TWO.points]
    row, run = rows[4], TWO.run(4)
    assert (row["lr"], row["seed"], row["rejected"]) == (0.3, 1, 1)
    assert row["tail_accuracy"] == row["last_accuracy"] == row["best_accuracy"] == np.float32(0.49)
    assert row["mean_accuracy"] == metrics.area(run)
    staleness = run.updates["staleness"]
    assert row["staleness_mean"] == staleness.mean() and row["staleness_max"] == staleness.max()
    assert row["time_to_target"] == 12.0 == row["virtual_time"]
    assert row["updates_to_target"] == run.evaluations["update"][-1]
    assert row["bytes_to_target"] == row["bytes_up"] + row["bytes_down"]
    assert math.isnan(rows[0]["time_to_target"])  # never reached
    assert not {"programs", "waves", "mean_width"} & set(row)  # counters of the execution are not results
    assert "time_to_target" not in run_rows(swept_runs(TWO))[0]
    # The table of settings has the sent bytes in megabytes, in both directions, as that of a comparison.
    sent = [np.mean([metrics.progress_in(TWO.run(k), "bytes")[-1] for k in ks]) / 1e6 for ks in ((0, 1, 2), (3, 4, 5))]
    np.testing.assert_allclose([row["sent (MB)"].mean for row in setting_rows(swept_runs(TWO))], sent)
    # The long table has one row an evaluation.
    long = evaluation_columns(swept_runs(TWO))
    assert {len(column) for column in long.values()} == {18}
    np.testing.assert_array_equal(long["accuracy"][3:6], TWO.run(1).evaluations["accuracy"])
    assert long["run"][3:6] == ["lr=0.1,seed=1"] * 3 and long["seed"][3:6] == [1] * 3
    assert long["accuracy"].dtype == np.float32 and long["bytes_up"].dtype.kind == "i"


def test_what_is_swept_never_hides_what_is_measured():
    """The measured staleness and the rank of a setting are other columns than the options of these names."""
    found = swept({"time": [5.0, 7.0], "updates": [11], "method.mixing": [0.4, 0.8]})
    columns = {"time": "setting.time", "updates": "setting.updates", "method.mixing": "mixing"}
    assert sweep_table.columns_of(found) == columns
    row = run_rows(found)[-1]
    assert (row["setting.time"], row["setting.updates"], row["updates"], row["mixing"]) == (7.0, 11, 11, 0.8)
    weighted = swept({"method.staleness": ["constant", "hinge"]}, base=Settings(method="fedasync", updates=11))
    rows = setting_rows(weighted)
    assert [row["method.staleness"] for row in rows] == ["constant", "hinge"] and rows[0]["staleness"].mean == 1.0
    adapted = swept({"model.rank": [2, 8]}, base=Settings(model="minilm_lora", updates=11))
    ranks = chosen_rows(adapted, sweep_table.TableOptions(roles={"model.rank": "tuned"}))
    assert sorted(row["model.rank"] for row in ranks) == ["2", "8"] and [row["rank"] for row in ranks] == [1, 2]


def test_a_sweep_over_compression_counts_values_alone_too():
    """An uncompressed upload is values only: all its bytes are in the column of values."""

    def run(settings):
        one = made_up(settings)
        less = {} if settings.compress is None else {"values_bytes_up": one.evaluations["bytes_up"] // 2}
        return one._replace(evaluations=one.evaluations | less)

    found = swept({"compress": ["none", "topk"]}, run=run)
    long, bytes_up = evaluation_columns(found), found[0].run.evaluations["bytes_up"]
    np.testing.assert_array_equal(long["values_bytes_up"], [*bytes_up, *(bytes_up // 2)])
    assert [row.get("values_bytes_up") for row in run_rows(found)] == [None, bytes_up[-1] // 2]
    amounts = [metrics.progress_in(each.run, "values_bytes_up")[-1] for each in found]
    assert amounts == [bytes_up[-1], bytes_up[-1] // 2]
    assert metrics.progress_in(found[1].run, "bytes_up")[-1] == bytes_up[-1]


def test_parquet_and_csv_hold_the_same(tmp_path):
    """A run without an option has an empty cell."""
    both = a_sweep({"method.mixing": [0.4, 0.8]}, points=[{"method": "fedavg"}])
    write_sweep(both, tmp_path, plots=False, target=0.2)
    found = swept_runs(both, 0.2)
    for name, expected in {"runs": as_columns(run_rows(found)), "evaluations": evaluation_columns(found)}.items():
        table = pyarrow.parquet.read_table(tmp_path / f"{name}.parquet")
        rows = read_rows(tmp_path / f"{name}.csv")
        assert table.column_names == list(expected) == list(rows[0])
        for column, values in expected.items():
            texts = [row[column] for row in rows]
            if column in ("run", "method"):
                assert texts == list(values) == table[column].to_pylist()
            elif column != "mixing":
                for numbers in (np.array(texts, np.float64), table[column].to_numpy()):
                    np.testing.assert_array_equal(numbers.astype(np.asarray(values).dtype), values)
        assert [row["mixing"] for row in rows][:: len(rows) // 3] == ["0.4", "0.8", ""]
        assert table["mixing"].to_pylist()[:: len(rows) // 3] == [0.4, 0.8, None]


def test_parquet_columns_of_mixed_types_and_of_objects():
    """Parquet has no type for objects of the user's own: in every table they are their names."""

    def read(columns):
        return pyarrow.parquet.read_table(io.BytesIO(parquet_writer()(columns))).to_pydict()

    mixed = read({"a": [1, 0.5, None], "b": [1, "rpi", None], "c": [True, 2, 0.5], "d": [None, None, None]})
    assert mixed == {"a": [1.0, 0.5, None], "b": ["1", "rpi", None], "c": ["True", "2", "0.5"], "d": [None] * 3}
    methods = [named(name, Method(asgd(server_lr=rate))) for name, rate in (("fair", 0.1), ("mine", 0.2))]
    found = swept({"method": methods})
    for columns in (as_columns(run_rows(found)), evaluation_columns(found)):
        assert set(read(columns)["method"]) == {"fair", "mine"}


def test_a_setting_whose_title_is_a_label_stays_apart():
    """A point that changes nothing is called base, and so may be a label."""
    found = swept({"method": {"base": "fedavg", "other": "asgd"}}, points=[{}])
    assert [len(group) for group in sweep_table.by_setting(found).values()] == [1, 1, 1]
    assert [row["seeds"] for row in setting_rows(found)] == [1, 1, 1]


# --- heat maps ------------------------------------------------------------------------------------


def ticks(axes):
    return [[label.get_text() for label in axis.get_ticklabels()] for axis in (axes.yaxis, axes.xaxis)]


def test_a_heat_map_of_two_numbers_and_one_with_names_in_the_order_of_the_sweep():
    found = swept({"method.mixing": [0.8, 0.4], "lr": [0.3, 0.1, 0.2]}, seeds=2)
    (grid,) = cells(found, "accuracy")
    assert grid.rows == ("mixing", [0.4, 0.8]) and grid.columns == ("lr", [0.1, 0.2, 0.3])
    np.testing.assert_allclose(grid.mean, [[29.5, 39.5, 49.5]] * 2, rtol=1e-5)
    axes, bar = heat_map([grid], "accuracy").axes
    assert [text.get_text() for text in axes.texts] == ["29.5\n± 0.7", "39.5\n± 0.7", "49.5\n± 0.7"] * 2
    assert ticks(axes) == [["0.4", "0.8"], ["0.1", "0.2", "0.3"]]
    assert axes.get_xlabel() == "lr" and axes.get_ylabel() == "mixing"
    assert bar.get_ylabel() == "test accuracy,\nmean of last tenth (%)"
    np.testing.assert_allclose(axes.images[0].get_array(), grid.mean)
    assert set(pictures(found)) == {"accuracy", "accuracy_map", "loss", "loss_map"}
    (named,) = cells(swept({"method": ["fedavg", "asgd", "fedbuff"], "lr": [0.3, 0.1]}), "accuracy")
    assert named.rows == ("method", ["fedavg", "asgd", "fedbuff"]) and named.columns == ("lr", [0.1, 0.3])


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
    assert cells(swept(grid), "accuracy") == []


def test_a_heat_map_has_a_facet_for_each_combination_of_the_other_axes():
    grid = {"method": ["asgd", "fedasync"], "lr": [0.3, 0.1, 0.2], "clients": [5, 6], "batch_size": [1, 2, 4]}
    found = swept(grid, seeds=2)
    rows = {(row["method"], row["lr"], row["clients"], row["batch_size"]): row[FINAL] for row in setting_rows(found)}
    maps = cells(found, "accuracy")
    assert [each.title for each in maps] == [f"method={m}, clients={c}" for m in ("asgd", "fedasync") for c in (5, 6)]
    *facets, _ = heat_map(maps, "accuracy").axes
    for axes, each in zip(facets, maps, strict=True):
        method, clients = (part.partition("=")[2] for part in each.title.split(", "))
        assert axes.get_title() == f"method={method}\nclients={clients}"
        for (row, column), text in zip(np.ndindex(3, 3), axes.texts, strict=True):
            cell = rows[method, str(each.rows[1][row]), clients, str(each.columns[1][column])]
            assert (each.mean[row, column], each.std[row, column]) == (cell.mean, cell.std)
            assert text.get_text() == f"{cell.mean:.1f}\n± {cell.std:.1f}"
        assert axes.images[0].get_clim() == facets[0].images[0].get_clim()


def test_a_facet_has_only_its_own_rows_and_columns_and_empty_cells():
    grid = {"method.mixing": [0.4, 0.8], "method.exponent": [0.5, 1.0]}
    maps = cells(swept(grid, points=[{"method": "fedavg"}]), "accuracy")
    assert [(each.title, each.mean.shape) for each in maps] == [("method=fedasync", (2, 2)), ("method=fedavg", (1, 1))]
    assert ticks(heat_map(maps, "accuracy").axes[1])[0] == ["-"]
    (left_out,) = cells(swept(None, points=[{"lr": 0.1, "clients": [5, 6]}, {"lr": 0.2, "clients": 5}]), "accuracy")
    assert np.isnan(left_out.mean[1, 1]) and np.isfinite(left_out.mean).sum() == 3
    assert "-" in [text.get_text() for text in heat_map([left_out], "accuracy").axes[0].texts]


def facets_of(found, width=None):
    """The drawn maps of a sweep's heat map, without the colour scale."""
    figure = heat_map(cells(found, "accuracy"), "accuracy", drawing=Drawing(width=width))
    assert width is None or figure.get_figwidth() == WIDTHS[width]
    figure.draw_without_rendering()
    return figure.axes[:-1]


def test_names_that_two_maps_share_stand_once():
    found = swept({"method": ["asgd", "fedbuff@buffer:size=5"], "lr": [0.3, 0.1, 0.2], "clients": [5, 6, 7, 8]})
    every, stacked = facets_of(found), facets_of(found, "column")
    assert [axes.get_title() for axes in every] == ["method=asgd", "method=fedbuff@buffer:size=5"]
    assert [ticks(axes) for axes in every] == [[["0.1", "0.2", "0.3"], [*"5678"]], [[""] * 3, [*"5678"]]]
    assert [(axes.get_ylabel(), axes.get_xlabel()) for axes in every] == [("lr", "clients"), ("", "clients")]
    assert [axes.get_xlabel() for axes in stacked] == ["", "clients"] and {a.get_ylabel() for a in stacked} == {"lr"}


# --- final values, paired tests and files -------------------------------------------------------------


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
    others = {metrics.final_title(column, other) for column in ("accuracy", "loss") for other in ("last", "best")}
    for row in rows:
        values = [100 * float(run[f"{way}_accuracy"]) for run in runs if run["lr"] == row["lr"]]
        assert float(row[title]) == metrics.spread(values).mean and float(row[f"{title} std"]) == np.std(values, ddof=1)
        ends = [float(row[f"95% interval (t) {end}"]) for end in ("low", "high")]
        assert ends == list(interval(values, limits=(0.0, 100.0))) and others < set(row)
    best_lr = max(rows, key=lambda row: float(row[title]))["lr"]
    lines = (tmp_path / "best.md").read_text().splitlines()
    assert title.removesuffix(" (%)").replace(", ", " (") + ")" in lines[0] and title in lines[4]
    assert lines[6].split("|")[2].strip() == best_lr
    (grid,) = cells(swept({"lr": [0.1, 0.2], "clients": [5, 6]}, seeds=3, run=long_run), "accuracy", final)
    np.testing.assert_array_equal(grid.mean[:, 0], [float(row[title]) for row in rows[:2]])


def test_methods_are_paired_within_each_world(tmp_path):
    write_sweep(a_sweep({"method": ["asgd", "fedavg"], "clients": [5, 6]}, seeds=3), tmp_path, plots=False)
    rows = read_rows(tmp_path / "pairs.csv")
    assert [row["where"] for row in rows] == ["clients=5", "clients=6"]
    assert {row["p (t, Holm)"] for row in rows} == {"1.0"} and "clients=6" in (tmp_path / "pairs.md").read_text()
    write_sweep(a_sweep({"method": ["asgd", "fedavg"]}, seeds=2), tmp_path, plots=False)
    assert not list(tmp_path.glob("pairs.*"))


def test_the_same_results_give_the_same_bytes_and_without_pyarrow_there_is_csv(tmp_path, monkeypatch):
    texts = [write_sweep(TWO, tmp_path / name, target=0.4) for name in "ab"]
    written = contents(tmp_path / "a")
    assert texts[0] == texts[1] == written["best.md"].decode() and written == contents(tmp_path / "b")
    assert set(written) == TEXTS | PARQUET | {"accuracy.png", "loss.png"}
    assert "49.67 ± 0.58" in written["settings.md"].decode().splitlines()[3]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    text = write_sweep(TWO, tmp_path / "b", plots=False)
    assert "run: pip install pyarrow" in text.splitlines()[-1]
    assert set(written) - set(contents(tmp_path / "b")) == PARQUET
