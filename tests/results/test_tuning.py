"""The chosen settings: on validation, in each world, for each method; compared with plain loops."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as profile

from fedjax_async.config import Settings
from fedjax_async.config.grid import expand
from fedjax_async.results import choose, collect, significance, sweep, tuning, write_sweep
from fedjax_async.results.heat_map import BEST, CHOSEN, MARKS, ON_TEST, cells, heat_map
from fedjax_async.results.sweep_report import MOST_CURVES, best, curves, pictures
from fedjax_async.results.sweep_table import TableOptions, by_setting, evaluation_columns, setting_rows, swept_run
from fedjax_async.results.tuning import chosen_rows, pair_rows, rank, tunings
from tests.results.folders import rows as read_rows
from tests.results.made_up import make_run
from tests.told import refusal

METHODS, RATES, WORLDS, SEEDS = ("asgd", "fedavg"), (0.1, 0.2, 0.3), (5, 6), (0, 1, 2)
GRID = {"method": list(METHODS), "lr": list(RATES), "clients": list(WORLDS)}
TEST = "accuracy, mean of last tenth (%)"
VALIDATION = f"validation {TEST}"


def made_up(scores, grid=GRID, base=None, **options):
    """One run per point; ``scores(settings)``: its test and validation accuracy, None without a validation part."""
    found = []
    for point in expand(base or Settings(updates=9), grid, seeds=list(SEEDS), **options):
        test, validation = scores(point.settings)
        columns = {"validation_accuracy": [0.1, validation], "validation_loss": [2.0, 1 - (validation or 0)]}
        held_out = {name: np.array(values) for name, values in columns.items() if validation is not None}
        found.append(swept_run(point, make_run([0.1, test], **held_out)))
    return found


def table(seed, validation=True, diverged=0.0):
    """Random scores by settings, in steps of 1/16, so that means are exact and ties occur."""
    rng = np.random.default_rng(seed)
    keys = list(itertools.product(METHODS, RATES, WORLDS, SEEDS))
    scores = np.where(rng.random((len(keys), 2)) < diverged, np.nan, rng.integers(1, 16, (len(keys), 2)) / 16)
    return {key: (test, held_out if validation else None) for key, (test, held_out) in zip(keys, scores)}


def of(scores):
    return lambda s: scores[s.method, s.lr, s.clients, s.seed]


@given(st.integers(0, 10**6), st.booleans())
@profile(max_examples=25, deadline=None)
def test_the_best_mean_is_chosen_for_each_method_in_each_world_whatever_the_test_scores(seed, validation):
    scores = table(seed, validation, diverged=0.05)
    found = made_up(of(scores))
    made = tunings(found)
    assert [(each.world, each.compared) for each in made] == [
        ({"clients": clients}, {"method": method}) for clients in WORLDS for method in METHODS
    ]
    which = 1 if validation else 0
    for each in made:
        assert (each.part, each.trials, each.runs) == ("validation" if validation else "test", 3, 9)
        method, clients = each.compared["method"], each.world["clients"]
        values = {lr: [scores[method, lr, clients, s][which] for s in SEEDS] for lr in RATES}
        means, stds = (
            {lr: np.nan_to_num(function(values[lr]), nan=lost) for lr in RATES}  # a diverged setting is the worst
            for function, lost in ((np.mean, -1.0), (np.std, 0.0))
        )
        assert means[each.best.lr] == max(means.values())
        assert all(stds[each.best.lr] <= stds[lr] + 1e-9 for lr in RATES if means[lr] == max(means.values()))
        assert (each.best.method, each.best.clients) == (method, clients)
        assert [means[one.lr] for one in each.settings] == sorted(means.values(), reverse=True)
    order = rank(found).order
    assert sorted(order) == list(range(12)) and set(order[:4]) == {each.order[0] for each in made}
    if validation:
        other = {key: (1.0 - test / 2, held_out) for key, (test, held_out) in scores.items()}
        assert [each.order for each in tunings(made_up(of(other)))] == [each.order for each in made]


def test_the_tables_report_the_test_scores_of_the_choice():
    scores = table(3)
    found = made_up(of(scores))
    rows, cuts = chosen_rows(found), {}
    assert len(rows) == 4
    for row in rows:
        cut = np.array([scores[row["method"], float(row["lr"]), int(row["clients"]), s] for s in SEEDS])
        assert [row[TEST].mean, row[VALIDATION].mean] == pytest.approx(100 * cut.mean(axis=0), rel=1e-6)
        assert (row["chosen on"], row["trials"], row["runs"], row["seeds"]) == ("validation", 3, 9, 3)
        cuts[f"clients={row['clients']}", f"method={row['method']}"] = 100 * cut[:, 0]
    assert list(rows[0])[:7] == ["clients", "method", "lr", "chosen on", "trials", "runs", "seeds"]
    paired = pair_rows(found)
    pairs = [(row["where"], row["first"], row["second"]) for row in paired]
    assert pairs == [(f"clients={clients}", "method=asgd", "method=fedavg") for clients in WORLDS]
    for row in paired:
        differences = cuts[row["where"], row["first"]] - cuts[row["where"], row["second"]]
        assert row["first - second"] == pytest.approx(np.mean(differences), rel=1e-5)
        assert row["p (t)"] == pytest.approx(significance.paired(differences).t, rel=1e-4)


def test_the_text_says_how_and_warns():
    text = best(made_up(of(table(0))))
    assert text.startswith("Best of 12 settings by the validation accuracy (mean of last tenth), averaged over 3 seeds")
    assert "Tuned: lr; separately for each method; within each world (clients)." in text and "WARNING" not in text
    blind = best(made_up(of(table(0, validation=False))))
    assert "by the test accuracy" in blind and blind.count("WARNING") == 1
    assert "the test set chose these settings" in blind and "validation_fraction = 0.1" in blind
    fixed = best(made_up(lambda s: (0.5, None), {"method": list(METHODS)}))
    assert fixed.startswith("2 settings, none tuned: nothing was chosen.") and "WARNING" not in fixed
    found = made_up(lambda s: (0.5, 0.5), points=[{"method": "fedbuff", "lr": 0.1, "clients": [5]}])
    uneven = best(found)
    assert "WARNING: unequal effort in clients=5, which favours methods with more trials: " in uneven
    assert "3 for method=asgd, 3 for method=fedavg, 1 for method=fedbuff." in uneven
    (row,) = [row for row in chosen_rows(found) if row["method"] == "fedbuff"]
    assert (row["chosen on"], row["trials"]) == ("-", 1)


def test_one_run_without_a_validation_part_leaves_the_choice_to_the_test_set():
    found = made_up(lambda s: (0.5, None if (s.method, s.seed) == ("asgd", 1) else 0.5))
    assert [each.part for each in tunings(found)] == ["test", "validation"] * 2
    assert rank(found).metric == TEST and "WARNING: the test set" in best(found)
    column = evaluation_columns(found)["validation_accuracy"]
    assert np.isnan(column).sum() == 2 * 6  # two evaluations of each of these six runs


def test_given_roles_decide():
    found = made_up(of(table(1)))
    assert tuning.axes_of(found) == {"tuned": ["lr"], "compared": ["method"], "world": ["clients"]}
    (together,) = tunings(found, roles={"method": "tuned", "clients": "tuned"})
    assert together.trials == 12 and together.world == together.compared == {}
    apart = tunings(found, roles={"lr": "compared"})
    assert len(apart) == 12 and {each.trials for each in apart} == {1}
    assert len(tunings(found, roles={"momentum.of.no.run": "tuned"})) == 4  # a path that only unfinished runs set


@pytest.mark.parametrize("part", ["validation", "test"])
def test_the_curves_show_the_chosen_ones(part):
    def scores(settings):
        score = settings.lr if settings.method == "asgd" else 1 - settings.lr
        return (0.5, score) if part == "validation" else (score, None)

    found = made_up(scores, GRID | {"lr": [round(0.05 * k, 2) for k in range(1, 8)]})
    axes = curves(found, "loss").axes[0]
    names = [text.get_text() for text in axes.texts] or [t.get_text() for t in axes.figure.legends[0].get_texts()]
    titles = list(by_setting(found))
    assert names == [titles[k] for k in sorted(rank(found).order[:MOST_CURVES])] and MOST_CURVES == 10
    assert {titles[each.order[0]] for each in tunings(found)} <= set(names)
    by = f"{part} accuracy (mean of last tenth)"
    assert axes.get_title(loc="left") == f"10 of 28 settings, the best of each tuning by {by}"
    alone = curves(found, "loss", options=TableOptions(roles={"method": "tuned", "clients": "tuned"})).axes[0]
    assert alone.get_title(loc="left") == f"best 10 of 28 settings by {by}"


# --- a whole sweep ------------------------------------------------------------------------------------


def test_roles_are_kept_in_the_folder(tmp_path, engine):
    options = {"seeds": 2, "out": tmp_path, "progress": False}
    grid = {"lr": [0.1, 0.3], "clients": [5, 6]}
    assert "roles['lr'] = 'tune'" in refusal(sweep, Settings(updates=9), grid, roles={"lr": "tune"}, **options)
    assert not list(tmp_path.iterdir())
    found = sweep(Settings(updates=9), grid, roles={"clients": "tuned"}, **options)
    assert [each.trials for each in choose(found)] == [4]
    assert collect(tmp_path)[0].roles == {"clients": "tuned"}
    write_sweep(found, plots=False)
    rows = read_rows(tmp_path / "best.csv")
    assert [row["rank"] for row in rows] == ["1", "2", "3", "4"] and rows[0]["lr"] == "0.3"
    again = sweep(Settings(updates=9), grid, **options)  # it is the same sweep with other roles
    assert again.roles == {} and not (tmp_path / "roles.json").exists()
    assert [each.trials for each in choose(again)] == [2, 2]
    (tmp_path / "roles.json").write_text('{"lr": "best"}')
    assert "roles.json: must hold the roles of the sweep's settings; roles['lr']" in refusal(collect, tmp_path)


GRID_OF_NUMBERS = {"method.mixing": [0.3, 0.6], "lr": [0.1, 0.2, 0.3]}
HERE = {"0.3, 0.1": (0.9, 0.3), "0.6, 0.2": (0.5, 0.8)}  # mixing and rate: test and validation accuracy


def test_a_heat_map_marks_what_validation_chose_apart_from_the_best_on_test():
    def scores(settings):
        mixing = str(settings.method).partition("mixing=")[2]
        return HERE.get(f"{mixing}, {settings.lr}", (0.4, 0.2))

    base = Settings(updates=9, method="fedasync:mixing=0.1")
    (grid,) = cells(made_up(scores, GRID_OF_NUMBERS, base), "accuracy")
    assert grid.marks == {CHOSEN: [(1, 1)], BEST: [(0, 0)]}
    figure = heat_map([grid], "accuracy")
    (frame,), (star,) = figure.axes[0].patches, figure.axes[0].get_lines()
    assert frame.get_bbox().contains(1, 1) and not frame.get_bbox().contains(0, 0)
    assert (round(star.get_xdata()[0]), round(star.get_ydata()[0])) == (0, 0)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [CHOSEN, f"{BEST} (accuracy)"]
    (alone,) = cells(made_up(lambda settings: (scores(settings)[0], None), GRID_OF_NUMBERS, base), "accuracy")
    assert alone.marks == {ON_TEST: [(0, 0)]} and set(MARKS) == {CHOSEN, BEST, ON_TEST}
    compared = {"method.mixing": "compared", "lr": "compared"}
    assert cells(made_up(scores, GRID_OF_NUMBERS, base), "accuracy", roles=compared)[0].marks == {}


def test_a_world_without_class_labels_is_tuned_by_its_loss():
    """Beside one with labels its accuracies are all NaN, so that the first setting would be chosen."""
    found, validated, missing = [], [], np.full(2, np.nan)
    for point in expand(Settings(updates=9), {"clients": [5, 6], "lr": list(RATES)}):
        loss, labelled = np.array([2.0, 1 - point.settings.lr]), point.settings.clients == 5
        run = make_run([0.1, 0.5 + point.settings.lr]) if labelled else make_run(missing, loss=loss)
        found.append(swept_run(point, run))
        if not labelled:
            other = make_run(missing, loss=1 / loss, validation_loss=loss, validation_accuracy=missing)
            validated.append(swept_run(point, other))
    assert [(each.best.lr, each.metric) for each in tunings(found)] == [(0.3, "accuracy"), (0.3, "loss")]
    assert "or the loss where there are no class labels" in best(found)
    blind = found[len(RATES) :]
    assert rank(blind).metric == "loss, mean of last tenth" and rank(blind).order == [2, 1, 0]
    assert TEST not in setting_rows(blind)[0] and set(pictures(blind)) == {"loss"}
    asked = TableOptions(target=0.5)
    assert "No costs of the target 0.5" in best(blind, asked) and "to 50 %" not in str(setting_rows(blind, asked))
    (each,) = tunings(validated)
    assert [s.lr for s in each.settings] == [0.3, 0.2, 0.1] and each.part == "validation"
