"""A number in two tables, pictures or pages is equal: curves over seeds, measured columns, scores of clients."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from fedjax_async.config import Settings
from fedjax_async.config.grid import expand
from fedjax_async.engine.client_scores import client_columns
from fedjax_async.results import accuracy_curve, clients, comparison, html_folders, html_report, metrics, runs, store
from fedjax_async.results.curves import loss_curve, measured_curve
from fedjax_async.results.html_figures import clients as client_figures
from fedjax_async.results.measured import curve_columns, measured
from fedjax_async.results.metrics import FINALS, final_title, final_value, mean_curve, percent, spread
from fedjax_async.results.runs import write_comparison, write_run
from fedjax_async.results.sweep_report import curves
from fedjax_async.results.sweep_table import by_setting, setting_rows, swept_run
from tests.results.folders import contents, rows
from tests.results.made_up import make_run

MODELS = ("", "own_", "tuned_")


def measured_run(method, seed, models=MODELS):
    rng = np.random.default_rng(seed)
    names = [f"{model}{kind}" for model in models for kind in ("accuracy", "loss", "macro_f1")]
    scores = {name: rng.random((5, 12)).astype(np.float32) for name in names}
    for values in scores.values():
        values[:, 3] = np.nan  # a client without test rows
    more = {name: rng.random(5) for name in ("train_loss", "macro_f1", "miss_error")}
    run = make_run([0.1, 0.3, 0.5, 0.45, 0.6], method=method, **more, **client_columns(scores))
    return run._replace(settings=run.settings | {"seed": seed}, per_client=scores)


RUNS = {
    "fedbuff": [measured_run("fedbuff", seed, MODELS[::2]) for seed in (1, 2)],
    "orthofl": [measured_run("orthofl", seed) for seed in (1, 2)],
}


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


def check_end(shown, spread, column="accuracy"):
    """Mean and deviation of a picture's end are exactly those of a table's cell; accuracies end at 0 and 100 %."""
    _, mean, low, high = shown
    assert mean == spread.mean
    if spread.seeds > 1:
        wanted = np.clip([spread.mean - spread.std, spread.mean + spread.std], *metrics.limits(column))
        assert (low, high) == tuple(wanted)
    else:
        assert np.isnan([low, high]).all()


def noisy(seed, rows=41, end=12.0):
    scores = np.random.default_rng(seed).uniform(0.2, 0.9, rows)
    return make_run(list(scores), list(np.linspace(0.0, end, rows)))


EARLIER = made(ENDS_EARLIER) * 2
COMPARED = {name: {"fedavg": made(seeds), "fedasync": EARLIER[: len(seeds)]} for name, seeds in SEEDS.items()}
COMPARED |= {
    "long": {"fedavg": [noisy(0), noisy(1), noisy(2)], "fedasync": [noisy(3), noisy(4), noisy(5)]},
    "long, unequal": {"fedavg": [noisy(0), noisy(1, 33, 11.0)], "fedasync": [noisy(2, 21, 12.0), noisy(3, 52, 9.0)]},
    "long, one seed": {"fedavg": [noisy(0)], "fedasync": [noisy(1)]},
    "measured": RUNS,
}


@pytest.mark.parametrize(
    ("compared", "x", "final", "column"),
    [
        *((name, "time", "tail", "accuracy") for name in COMPARED),
        *(("one ends earlier", x, "tail", "accuracy") for x in ("update", "step", "bytes")),
        *(("long, unequal", "time", final, column) for final in (*FINALS, "tail:7") for column in ("accuracy", "loss")),
        *(("measured", "time", "tail", column) for column in ("train_loss", "client_tuned_accuracy_worst")),
    ],
)
def test_line_marker_and_bar_end_at_the_number_of_the_table(compared, x, final, column):
    compared, factor = COMPARED[compared], percent(column)
    draw = {"accuracy": accuracy_curve, "loss": loss_curve}.get(column, partial(measured_curve, column=column))
    figure = draw(compared, x=x, final=final)
    lines = figure.axes[0].get_lines()
    dots = [line.get_ydata()[0] for line in lines if line.get_marker() == "o" and len(line.get_xdata()) == 1]
    table = {row["method"]: row for row in comparison(compared, final=final, further=True)}
    for (name, seeds), line, dot in zip(compared.items(), lines[: len(dots)], dots, strict=True):
        curve, (at, mean, low, high) = mean_curve(seeds, x, column, factor, final), ends(figure)[name]
        np.testing.assert_array_equal(line.get_ydata(), curve.mean)
        assert x == "bytes" or np.array_equal(line.get_xdata(), curve.at)
        assert line.get_drawstyle() == ("steps-post" if curve.steps else "default")
        cell = spread([factor * final_value(run, column, final) for run in seeds])
        check_end((at, cell.mean, low, high), cell, column)
        assert dot == cell.mean and (final == "best" or mean == cell.mean)
        if (title := final_title(column, final)) in table[name] or column == "accuracy":
            assert table[name][title].mean == cell.mean


def test_the_faint_line_is_the_mean_without_the_running_mean():
    seeds = COMPARED["long"]["fedavg"]
    lines = accuracy_curve({"fedavg": seeds}).axes[0].get_lines()
    raw = 100 * np.mean([run.evaluations["accuracy"].astype(np.float64) for run in seeds], axis=0)
    np.testing.assert_allclose(lines[1].get_ydata(), raw, rtol=1e-12)
    np.testing.assert_allclose(lines[0].get_ydata()[10], raw[7:11].mean(), rtol=1e-12)  # a tenth of 41: 4
    assert lines[1].get_linewidth() < 1 < lines[0].get_linewidth() and lines[1].get_alpha() < 0.5
    few = accuracy_curve({"fedavg": made(SEEDS["one seed"])}, final="tail").axes[0].get_lines()
    assert all(len(line.get_xdata()) < 3 for line in few[1:])  # a tenth of 3 is one: no second line


def test_a_seed_that_is_evaluated_a_moment_later_does_not_widen_the_band():
    """All seeds jump from 10 to 90 %, one of them 0.1 s later and after another number of updates."""
    first, later = [0.0, 3.0, 6.0], [0.0, 3.1, 6.1, 9.0]
    seeds = [make_run([0.1, 0.9, 0.9], first), make_run([0.1, 0.9, 0.9], first), make_run([0.1, 0.9, 0.9, 0.9], later)]
    axes = accuracy_curve({"fedavg": seeds}).axes[0]
    np.testing.assert_array_equal(axes.get_lines()[0].get_xdata(), [0.0, 3.1, 6.1, 9.0])
    corners = np.concatenate([path.vertices for path in axes.collections[0].get_paths()])
    assert set(np.round(corners[:, 1], 4)) == {10.0, 90.0}  # no deviation anywhere


def test_the_picture_of_a_comparison(tmp_path, monkeypatch):
    drawn, compared = {}, COMPARED["one ends earlier"]
    monkeypatch.setattr(runs, "save_formats", lambda figure, path, drawing: drawn.update({path.name: figure}))
    write_comparison(compared, tmp_path)
    assert ends(drawn["accuracy"]) == ends(accuracy_curve(compared))


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_curves_and_table_of_a_sweep_agree(metric):
    """Six settings with seeds that end at different times; at first the order of the settings is reversed."""
    found = []
    points = expand(Settings(updates=11), {"lr": [0.1, 0.2, 0.3], "method.mixing": [0.4, 0.8]}, seeds=2)
    for index, point in enumerate(points):
        times = [0.0, 3.0, 5.0 if point.settings.seed == 0 else 12.0]
        found.append(swept_run(point, make_run([0.1, 0.9 - 0.05 * index, 0.2 + 0.05 * index], times)))
    column = {"accuracy": "accuracy, mean of last tenth (%)", "loss": "loss, mean of last tenth"}[metric]
    rows = dict(zip(by_setting(found), setting_rows(found), strict=True))
    figure = curves(found, metric)
    shown = ends(figure)
    assert list(shown) == list(rows) and figure.axes[0].get_title(loc="left") == "", "all are shown"
    for name, row in rows.items():
        check_end(shown[name], row[column])


@pytest.mark.parametrize("final", ["best", "tail:3"])
def test_tables_have_the_final_values_of_the_columns(final, tmp_path):
    text = write_comparison(RUNS, tmp_path, plots=False, final=final)
    for row in rows(tmp_path / "comparison.csv"):
        for column in ("train_loss", "macro_f1", "miss_error"):
            values = [final_value(run, column, final) for run in RUNS[row["method"]]]
            cells = [float(row[f"{final_title(column, final)}{end}"]) for end in ("", " std")]
            np.testing.assert_allclose(cells, [np.mean(values), np.std(values, ddof=1)])
    found = rows(tmp_path / "clients.csv")
    prefix = {"global model": "", "own models": "own_", "fine-tuned models": "tuned_"}
    models = [*(("fedbuff", model) for model in [*prefix][::2]), *(("orthofl", model) for model in prefix)]
    assert [(row["method"], row["model"]) for row in found if row["score"] == "loss"] == models
    endings = {"mean over clients": "", "deviation between clients": "_std", "worst tenth": "_worst"}
    for row in found:
        for title, ending in endings.items():
            column = f"client_{prefix[row['model']]}{row['score']}{ending}"
            values = [percent(column) * final_value(run, column, final) for run in RUNS[row["method"]]]
            np.testing.assert_allclose(float(row[title]), np.mean(values))
    shown = (tmp_path / "clients.md").read_text()
    assert "worst tenth, accuracy (%)" in shown and "fine-tuned models" in text and "macro" not in shown


def test_best_is_the_lowest_of_losses_errors_and_deviations_and_the_highest_of_all_else():
    run = RUNS["orthofl"][0]
    for column in ("train_loss", "miss_error", "client_loss_worst", "client_accuracy_std", "client_own_loss"):
        assert final_value(run, column, "best") == run.evaluations[column].min()
    for column in ("macro_f1", "client_accuracy_worst", "client_tuned_macro_f1"):
        assert final_value(run, column, "best") == run.evaluations[column].max()


def test_the_distribution_orders_the_clients_from_the_worst_to_the_best():
    run = RUNS["orthofl"][0]
    ordered = clients.ordered_scores(run, "accuracy")
    np.testing.assert_allclose(ordered, 100 * np.sort(np.delete(run.per_client["accuracy"][-1].astype(float), 3)))
    np.testing.assert_allclose(ordered[:2].mean(), 100 * run.evaluations["client_accuracy_worst"][-1])
    losses = clients.ordered_scores(run, "loss")
    np.testing.assert_allclose(losses[:2].mean(), run.evaluations["client_loss_worst"][-1])
    drawn = [patch.get_data().values for patch in clients.distribution(RUNS).axes[0].patches]
    assert len(drawn) == 5, "fedbuff has no own models"
    both = [clients.ordered_scores(each, "accuracy") for each in RUNS["fedbuff"]]
    np.testing.assert_allclose(drawn[0], np.mean(both, axis=0))


def test_the_folder_of_a_run(tmp_path, blank_pictures):
    run, of_clients = RUNS["orthofl"][0], {"clients.csv", "clients.md", "clients.png"}
    names = set(contents(write_run(run, tmp_path / "run")))
    assert of_clients | {"train_loss.png", "macro_f1.png", "client_own_accuracy_worst.png"} <= names
    table = rows(tmp_path / "run" / "clients.csv")
    assert [row["client"] for row in table] == [str(i) for i in range(12)] and table[3]["tuned_loss"] == "nan"
    have = [float(row["tuned_accuracy"]) for row in table]
    np.testing.assert_array_equal(np.float32(have), run.per_client["tuned_accuracy"][-1])
    shown = (tmp_path / "run" / "clients.md").read_text()
    worst = 100 * final_value(run, "client_own_accuracy_worst")
    assert f"{worst:.2f} |" in next(line for line in shown.splitlines() if "own models" in line)
    assert not of_clients & set(contents(write_run(make_run()._replace(per_client={}), tmp_path / "bare")))


def test_the_report_has_the_numbers_of_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr(html_report, "AXES", ("time",))
    monkeypatch.setattr(html_report, "MOST_DETAILS", 1)
    for method, seeds in RUNS.items():
        for run in seeds:
            store.save(run, tmp_path / "runs" / method / f"seed_{run.settings['seed']}")
    write_comparison(RUNS, tmp_path, plots=False, final="last")
    page = html_report.content([tmp_path])
    tables = {table["title"]: table for table in page["sources"][0]["tables"]}
    assert tables["Clients"] == html_folders.table("Clients", (tmp_path / "clients.csv").read_text())
    figures, worst = page["curves"]["figures"], [f"client_{model}accuracy_worst" for model in ("", "tuned_", "own_")]
    assert list(figures) == ["accuracy", "loss", "train_loss", "macro_f1", "miss_error", *worst]
    names = [trace["name"] for trace in figures["client_own_accuracy_worst"]["time"]["data"] if "bdata" in str(trace)]
    assert set(names) and not any("fedbuff" in name for name in names)
    shown = client_figures(RUNS["orthofl"][0])[0].figure["data"]
    models = ("global model", "own models", "fine-tuned models")
    assert [trace["name"] for trace in shown] == [f"orthofl, {model}" for model in models]


def test_a_column_without_a_curve_is_not_drawn():
    """It is constant, or known only at the first and last evaluation."""
    more = {"ends_only": np.array([0.1, np.nan, 0.2]), "flat": np.zeros(3), "moving": np.array([0.0, 1.0, 3.0])}
    runs = {"a": [make_run(**more)]}
    assert set(measured(runs["a"])) == set(more)
    assert curve_columns(runs, "accuracy") == {"moving": ["a"]}
