"""Measured columns in tables, pictures and the report: a number in two of them is equal."""

from __future__ import annotations

import numpy as np
import pytest

from fedjax_async.engine.client_scores import client_columns
from fedjax_async.results import clients, html_folders, html_report, store, write_comparison, write_run
from fedjax_async.results.curves import measured_curve
from fedjax_async.results.html_figures import clients as client_figures
from fedjax_async.results.measured import curve_columns, measured
from fedjax_async.results.metrics import final_title, final_value, mean_curve, percent
from tests.results.folders import rows
from tests.results.made_up import make_run

MODELS = ("", "own_", "tuned_")


def measured_run(seed=0, models=MODELS, count=12):
    rng = np.random.default_rng(seed)
    run = make_run([0.1, 0.3, 0.5, 0.45, 0.6])
    scores = {f"{model}{kind}": rng.random((5, count)).astype(np.float32) for model in models for kind in
              ("accuracy", "loss", "macro_f1")}  # fmt: skip
    for values in scores.values():
        values[:, 3] = np.nan  # a client without test rows
    more = {"train_loss": rng.random(5), "macro_f1": rng.random(5), "miss_error": rng.random(5)}
    return run._replace(
        settings=run.settings | {"seed": seed},
        evaluations=run.evaluations | more | client_columns(scores),
        per_client=scores,
    )


RUNS = {"fedbuff": [measured_run(1, MODELS[::2]), measured_run(2, MODELS[::2])],
        "orthofl": [measured_run(3), measured_run(4)]}  # fmt: skip


@pytest.mark.parametrize("final", ["best", "tail:3"])
def test_tables_have_the_final_values_of_the_columns(final, tmp_path):
    text = write_comparison(RUNS, tmp_path, plots=False, final=final)
    for row in rows(tmp_path / "comparison.csv"):
        for column in ("train_loss", "macro_f1", "miss_error"):
            values = [final_value(run, column, final) for run in RUNS[row["method"]]]
            np.testing.assert_allclose(float(row[final_title(column, final)]), np.mean(values))
            np.testing.assert_allclose(float(row[f"{final_title(column, final)} std"]), np.std(values, ddof=1))
    found = rows(tmp_path / "clients.csv")
    assert [(row["method"], row["model"]) for row in found if row["score"] == "loss"] == [
        ("fedbuff", "global model"), ("fedbuff", "fine-tuned models"),
        ("orthofl", "global model"), ("orthofl", "own models"), ("orthofl", "fine-tuned models"),
    ]  # fmt: skip
    prefix = {"global model": "", "own models": "own_", "fine-tuned models": "tuned_"}
    endings = {"mean over clients": "", "deviation between clients": "_std", "worst tenth": "_worst"}
    for row in found:
        for title, ending in endings.items():
            column = f"client_{prefix[row['model']]}{row['score']}{ending}"
            values = [percent(column) * final_value(run, column, final) for run in RUNS[row["method"]]]
            np.testing.assert_allclose(float(row[title]), np.mean(values))
    shown = (tmp_path / "clients.md").read_text()
    assert "worst tenth, accuracy (%)" in shown and "fine-tuned models" in text and "macro" not in shown


def test_best_is_the_lowest_of_losses_errors_and_deviations_and_the_highest_of_all_else():
    run = measured_run()
    for column in ("train_loss", "miss_error", "client_loss_worst", "client_accuracy_std", "client_own_loss"):
        assert final_value(run, column, "best") == run.evaluations[column].min()
    for column in ("macro_f1", "client_accuracy_worst", "client_tuned_macro_f1"):
        assert final_value(run, column, "best") == run.evaluations[column].max()


def test_a_curve_ends_at_the_number_of_the_table():
    for column in ("train_loss", "client_tuned_accuracy_worst"):
        axes = measured_curve(RUNS, column).axes[0]
        for line, seeds in zip(axes.get_lines(), RUNS.values()):
            want = percent(column) * np.mean([final_value(run, column) for run in seeds])
            np.testing.assert_allclose(line.get_ydata()[-1], want)
            np.testing.assert_allclose(mean_curve(seeds, "time", column, percent(column), "tail").mean[-1], want)


def test_the_distribution_orders_the_clients_from_the_worst_to_the_best():
    run = RUNS["orthofl"][0]
    last = run.per_client["accuracy"][-1].astype(float)
    ordered = clients.ordered_scores(run, "accuracy")
    np.testing.assert_allclose(ordered, 100 * np.sort(np.delete(last, 3)))
    np.testing.assert_allclose(ordered[:2].mean(), 100 * run.evaluations["client_accuracy_worst"][-1])
    losses = clients.ordered_scores(run, "loss")
    np.testing.assert_allclose(losses[:2].mean(), run.evaluations["client_loss_worst"][-1])
    figure = clients.distribution(RUNS)
    drawn = [patch.get_data().values for patch in figure.axes[0].patches]
    assert len(drawn) == 5, "fedbuff has no own models"
    both = [clients.ordered_scores(each, "accuracy") for each in RUNS["fedbuff"]]
    np.testing.assert_allclose(drawn[0], np.mean(both, axis=0))


TABLES = {"clients.csv", "clients.md", "clients.png"}


def test_the_folder_of_a_run(tmp_path, blank_pictures):
    run = measured_run()
    names = {path.name for path in write_run(run, tmp_path / "run").iterdir()}
    assert TABLES | {"train_loss.png", "macro_f1.png", "client_own_accuracy_worst.png"} <= names
    table = rows(tmp_path / "run" / "clients.csv")
    assert [row["client"] for row in table] == [str(i) for i in range(12)] and table[3]["tuned_loss"] == "nan"
    have = [float(row["tuned_accuracy"]) for row in table]
    np.testing.assert_array_equal(np.float32(have), run.per_client["tuned_accuracy"][-1])
    shown = (tmp_path / "run" / "clients.md").read_text()
    worst = 100 * final_value(run, "client_own_accuracy_worst")
    assert f"{worst:.2f} |" in next(line for line in shown.splitlines() if "own models" in line)
    store.save(run, tmp_path / "again")
    for name, values in store.load(tmp_path / "again").evaluations.items():
        np.testing.assert_array_equal(values, run.evaluations[name])
    bare = make_run()._replace(per_client={})
    assert not TABLES & {path.name for path in write_run(bare, tmp_path / "bare").iterdir()}


def test_the_report_has_the_numbers_of_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr(html_report, "AXES", ("time",))
    monkeypatch.setattr(html_report, "MOST_DETAILS", 1)
    for method, seeds in RUNS.items():
        for seed, run in enumerate(seeds):
            named = run._replace(settings=run.settings | {"method": method, "seed": seed})
            store.save(named, tmp_path / "runs" / method / f"seed_{seed}")
    write_comparison(RUNS, tmp_path, plots=False, final="last")
    page = html_report.content([tmp_path])
    tables = {table["title"]: table for table in page["sources"][0]["tables"]}
    assert tables["Clients"] == html_folders.table("Clients", (tmp_path / "clients.csv").read_text())
    figures = page["curves"]["figures"]
    assert list(figures) == [
        "accuracy", "loss", "train_loss", "macro_f1", "miss_error", "client_accuracy_worst",
        "client_tuned_accuracy_worst", "client_own_accuracy_worst",
    ]  # fmt: skip
    names = [trace["name"] for trace in figures["client_own_accuracy_worst"]["time"]["data"] if "bdata" in str(trace)]
    assert set(names) and not any("fedbuff" in name for name in names)
    run = RUNS["orthofl"][0]
    shown = client_figures(run)[0]
    models = ("global model", "own models", "fine-tuned models")
    method = run.settings["method"]
    assert [trace["name"] for trace in shown.figure["data"]] == [f"{method}, {model}" for model in models]


def test_a_column_without_a_curve_is_not_drawn():
    """It is constant, or known only at the first and last evaluation."""
    run = make_run()
    more = {"ends_only": np.array([0.1, np.nan, 0.2]), "flat": np.zeros(3), "moving": np.array([0.0, 1.0, 3.0])}
    runs = {"a": [run._replace(evaluations=run.evaluations | more)]}
    assert set(measured(runs["a"])) == set(more)
    assert curve_columns(runs, "accuracy") == {"moving": ["a"]}
