"""Curves over seeds: every picture ends at the numbers of its table, and bands show only differences of seeds."""

from __future__ import annotations

import numpy as np
import pytest

from fedjax_async.config import Settings
from fedjax_async.config.grid import expand
from fedjax_async.results import (
    accuracy_curve,
    comparison,
    loss_curve,
    runs,
    spread,
    write_comparison,
)
from fedjax_async.results.heat_map import cells, heat_map
from fedjax_async.results.metrics import FINALS, final_title, final_value, limits, mean_curve
from fedjax_async.results.sweep_report import curves
from fedjax_async.results.sweep_table import by_setting, setting_rows, swept_run
from tests.results.made_up import make_run

# (accuracies, virtual seconds) of each seed; made-up runs last 12 seconds
SEEDS = {
    "matching evaluations": [([0.1, 0.4, 0.7], [0.0, 4.0, 12.0]), ([0.1, 0.6, 0.5], [0.0, 4.0, 12.0])],
    "equally many updates": [([0.1, 0.4, 0.7], [0.0, 4.0, 8.0]), ([0.1, 0.6, 0.5], [0.0, 4.1, 8.1])],
    "one ends earlier": [([0.1, 0.4, 0.7], [0.0, 3.0, 6.0]), ([0.1, 0.3, 0.4, 0.5], [0.0, 3.0, 6.0, 11.0])],
    "more evaluations": [([0.1, 0.2, 0.4, 0.9], [0.0, 2.0, 4.0, 6.0]), ([0.1, 0.3], [0.0, 12.0])],
    "three seeds": [([0.1, 0.8], [0.0, 5.0]), ([0.1, 0.5, 0.3], [0.0, 5.2, 9.0]), ([0.1, 0.7, 0.6], [0.0, 7.0, 7.5])],
    "one seed": [([0.1, 0.8, 0.6], [0.0, 5.0, 7.0])],
}
ENDS_EARLIER = SEEDS["one ends earlier"]


def made(seeds):
    return [make_run(accuracy, time) for accuracy, time in seeds]


def ends(figure):
    """Name -> the last point of its line, and the lower and upper end of the bar that shows its deviation."""
    axes = figure.axes[0]
    names = [text.get_text() for text in axes.texts]
    bars = [each.get_segments() for each in axes.collections if hasattr(each, "get_segments")]
    shown = {}
    for name, line, segments in zip(names, axes.get_lines(), bars):
        bar = np.reshape(segments, (-1, 2))  # none for a single seed
        low, high = bar[:, 1] if len(bar) else (np.nan, np.nan)
        shown[name] = (line.get_xdata()[-1], line.get_ydata()[-1], low, high)
    return shown


def markers(figure):
    """Name -> the height of the marker at the end of its line."""
    axes = figure.axes[0]
    dots = [line for line in axes.get_lines() if line.get_marker() == "o" and len(line.get_xdata()) == 1]
    return {text.get_text(): dot.get_ydata()[0] for text, dot in zip(axes.texts, dots, strict=True)}


def check_end(shown, spread, column="accuracy"):
    """Mean and deviation of a picture's end are exactly those of a table's cell; accuracies end at 0 and 100 %."""
    _, mean, low, high = shown
    assert mean == spread.mean
    if spread.seeds > 1:
        wanted = np.clip([spread.mean - spread.std, spread.mean + spread.std], *limits(column))
        assert (low, high) == tuple(wanted)
    else:
        assert np.isnan([low, high]).all()


@pytest.mark.parametrize(
    ("seeds", "x"),
    [*((seeds, "time") for seeds in SEEDS.values()), *((ENDS_EARLIER, x) for x in ("update", "step", "bytes"))],
    ids=[*SEEDS, "update", "step", "bytes"],
)
def test_a_curve_ends_at_the_number_of_the_table(seeds, x):
    compared = {"fedavg": made(seeds), "fedasync": (made(ENDS_EARLIER) * 3)[: len(seeds)]}
    shown = ends(accuracy_curve(compared, x))
    for row in comparison(compared):
        check_end(shown[row["method"]], row["accuracy, mean of last tenth (%)"])
    losses = ends(loss_curve(compared, x))["fedavg"][1]
    assert losses == np.mean([run.evaluations["loss"][-1].astype(np.float64) for run in compared["fedavg"]])


def noisy(seed, rows=41, end=12.0):
    scores = np.random.default_rng(seed).uniform(0.2, 0.9, rows)
    return make_run(list(scores), list(np.linspace(0.0, end, rows)))


LONG = {
    "equal": {"fedavg": [noisy(0), noisy(1), noisy(2)], "fedasync": [noisy(3), noisy(4), noisy(5)]},
    "unequal": {"fedavg": [noisy(0), noisy(1, 33, 11.0)], "fedasync": [noisy(2, 21, 12.0), noisy(3, 52, 9.0)]},
    "one": {"fedavg": [noisy(0)], "fedasync": [noisy(1)]},
}


@pytest.mark.parametrize(
    ("compared", "final", "column"),
    [
        *(("unequal", final, column) for final in (*FINALS, "tail:7") for column in ("accuracy", "loss")),
        *((compared, "tail", "accuracy") for compared in ("equal", "one")),
    ],
)
def test_marker_bar_and_bold_line_end_at_every_final_value(compared, final, column):
    compared = LONG[compared]
    figure = (accuracy_curve if column == "accuracy" else loss_curve)(compared, final=final)
    dots, shown = markers(figure), ends(figure)
    for name, seeds in compared.items():
        factor = 100 if column == "accuracy" else 1
        cell = spread([factor * final_value(run, column, final) for run in seeds])
        assert dots[name] == cell.mean
        at, mean, low, high = shown[name]
        check_end((at, cell.mean, low, high), cell, column)
        assert final == "best" or mean == cell.mean
    if column == "accuracy":
        for row in comparison(compared, final=final):
            assert dots[row["method"]] == row[final_title(column, final)].mean


def test_the_faint_line_is_the_mean_without_the_running_mean():
    seeds = LONG["equal"]["fedavg"]
    lines = accuracy_curve({"fedavg": seeds}).axes[0].get_lines()
    raw = 100 * np.mean([run.evaluations["accuracy"].astype(np.float64) for run in seeds], axis=0)
    np.testing.assert_allclose(lines[1].get_ydata(), raw, rtol=1e-12)
    np.testing.assert_allclose(lines[0].get_ydata()[10], raw[7:11].mean(), rtol=1e-12)  # a tenth of 41: 4
    assert lines[1].get_linewidth() < 1 < lines[0].get_linewidth() and lines[1].get_alpha() < 0.5
    few = accuracy_curve({"fedavg": made(SEEDS["one seed"])}, final="tail").axes[0].get_lines()
    assert all(len(line.get_xdata()) < 3 for line in few[1:])  # a tenth of 3 is one: no second line


@pytest.mark.parametrize("seeds", SEEDS.values(), ids=SEEDS)
def test_a_line_is_the_mean_curve_in_steps_where_evaluations_do_not_match(seeds):
    curve = mean_curve(made(seeds), factor=100.0)
    (line, *_) = accuracy_curve({"fedavg": made(seeds)}).axes[0].get_lines()
    np.testing.assert_array_equal(line.get_xdata(), curve.at)
    np.testing.assert_array_equal(line.get_ydata(), curve.mean)
    assert line.get_drawstyle() == ("steps-post" if curve.steps else "default")


def test_a_seed_that_is_evaluated_a_moment_later_does_not_widen_the_band():
    """All seeds jump from 10 to 90 %, one of them 0.1 s later and after another number of updates."""
    first, later = [0.0, 3.0, 6.0], [0.0, 3.1, 6.1, 9.0]
    seeds = [make_run([0.1, 0.9, 0.9], first), make_run([0.1, 0.9, 0.9], first), make_run([0.1, 0.9, 0.9, 0.9], later)]
    axes = accuracy_curve({"fedavg": seeds}).axes[0]
    np.testing.assert_array_equal(axes.get_lines()[0].get_xdata(), [0.0, 3.1, 6.1, 9.0])
    corners = np.concatenate([path.vertices for path in axes.collections[0].get_paths()])
    assert set(np.round(corners[:, 1], 4)) == {10.0, 90.0}  # no deviation anywhere


@pytest.fixture
def drawn(monkeypatch):
    """File name -> the figure that was saved under it."""
    figures = {}
    monkeypatch.setattr(runs, "save_formats", lambda figure, path, drawing: figures.update({path.name: figure}))
    return figures


def test_the_picture_of_a_comparison(tmp_path, drawn):
    compared = {name: made(SEEDS["one ends earlier"])[::order] for name, order in (("fedavg", 1), ("fedasync", -1))}
    text = write_comparison(compared, tmp_path)
    for row in comparison(compared):
        cell = row["accuracy, mean of last tenth (%)"]
        check_end(ends(drawn["accuracy"])[row["method"]], cell)
        assert f"{cell.mean:.2f} ± {cell.std:.2f}" in text


# --- sweeps -------------------------------------------------------------------------------------------


def swept():
    """Six settings with seeds that end at different times; at first the order of the settings is reversed."""
    points = expand(Settings(updates=11), {"lr": [0.1, 0.2, 0.3], "method.mixing": [0.4, 0.8]}, seeds=2)
    found = []
    for index, point in enumerate(points):
        early, late = 0.9 - 0.05 * index, 0.2 + 0.05 * index
        first = point.settings.seed == 0
        found.append(swept_run(point, make_run([0.1, early, late], [0.0, 3.0, 5.0 if first else 12.0])))
    return found


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_curves_heat_map_and_table_of_a_sweep_agree(metric):
    found = swept()
    column = {"accuracy": "accuracy, mean of last tenth (%)", "loss": "loss, mean of last tenth"}[metric]
    rows = dict(zip(by_setting(found), setting_rows(found), strict=True))
    figure = curves(found, metric)
    shown = ends(figure)
    assert list(shown) == list(rows) and figure.axes[0].get_title(loc="left") == "", "all are shown"
    (grid,) = cells(found, metric)
    for number, (name, row) in enumerate(rows.items()):
        check_end(shown[name], row[column])
        assert grid.mean[divmod(number, 2)] == row[column].mean
    texts = [text.get_text() for text in heat_map([grid], metric).axes[0].texts]
    decimals = 1 if metric == "accuracy" else 2
    assert texts == [f"{row[column].mean:.{decimals}f}\n± {row[column].std:.{decimals}f}" for row in rows.values()]
