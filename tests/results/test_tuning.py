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
from fedjax_async.results.sweep_report import best, curves
from fedjax_async.results.sweep_table import by_setting, evaluation_columns, swept_run
from fedjax_async.results.tuning import chosen_rows, pair_rows, rank, tunings
from tests.results.folders import rows as read_rows
from tests.results.made_up import make_run

METHODS, RATES, WORLDS, SEEDS = ("asgd", "fedavg"), (0.1, 0.2, 0.3), (5, 6), (0, 1, 2)
GRID = {"method": list(METHODS), "lr": list(RATES), "clients": list(WORLDS)}
TEST = "accuracy, mean of last tenth (%)"
VALIDATION = f"validation {TEST}"


def scored(point, test, validation):
    """A made-up run with these final accuracies; without a validation part if ``validation`` is None."""
    run = make_run([0.1, test])
    held_out = {} if validation is None else {
        "validation_accuracy": np.array([0.1, validation]), "validation_loss": np.array([2.0, 1 - validation])
    }  # fmt: skip
    return swept_run(point, run._replace(evaluations=run.evaluations | held_out))


def made_up(scores, grid=GRID, base=None, **options):
    """One run per point; ``scores(settings)``: its test and validation accuracy."""
    points = expand(base or Settings(updates=9), grid, seeds=list(SEEDS), **options)
    return [scored(point, *scores(point.settings)) for point in points]


def table(seed, validation=True):
    """Random scores by settings, in steps of 1/16, so that means are exact and ties occur."""
    rng = np.random.default_rng(seed)
    keys = itertools.product(METHODS, RATES, WORLDS, SEEDS)
    return {key: tuple(rng.integers(1, 16, 2) / 16) if validation else (rng.integers(1, 16) / 16, None) for key in keys}


def of(scores):
    return lambda s: scores[s.method, s.lr, s.clients, s.seed]


@given(st.integers(0, 10**6), st.booleans())
@profile(max_examples=25, deadline=None)
def test_the_best_mean_is_chosen_for_each_method_in_each_world(seed, validation):
    scores = table(seed, validation)
    found = made_up(of(scores))
    made = tunings(found)
    assert [(each.world, each.compared) for each in made] == [
        ({"clients": clients}, {"method": method}) for clients in WORLDS for method in METHODS
    ]
    which = 1 if validation else 0
    for each in made:
        assert (each.part, each.trials, each.runs) == ("validation" if validation else "test", 3, 9)
        method, clients = each.compared["method"], each.world["clients"]
        means = {lr: np.mean([scores[method, lr, clients, s][which] for s in SEEDS]) for lr in RATES}
        stds = {lr: np.std([scores[method, lr, clients, s][which] for s in SEEDS]) for lr in RATES}
        assert means[each.best.lr] == max(means.values())
        assert all(stds[each.best.lr] <= stds[lr] + 1e-9 for lr in RATES if means[lr] == max(means.values()))
        assert (each.best.method, each.best.clients) == (method, clients)
        assert [means[one.lr] for one in each.settings] == sorted(means.values(), reverse=True)
    order = rank(found).order
    assert sorted(order) == list(range(12)) and set(order[:4]) == {each.order[0] for each in made}


@given(st.integers(0, 10**6))
@profile(max_examples=10, deadline=None)
def test_test_scores_never_change_the_choice(seed):
    scores = table(seed)
    other = {key: (1.0 - test / 2, validation) for key, (test, validation) in scores.items()}
    orders = [[each.order for each in tunings(made_up(of(one)))] for one in (scores, other)]
    assert orders[0] == orders[1]


def test_the_table_reports_the_test_scores_of_the_choice():
    scores = table(3)
    rows = chosen_rows(made_up(of(scores)))
    assert len(rows) == 4
    for row in rows:
        cut = [scores[row["method"], float(row["lr"]), int(row["clients"]), s] for s in SEEDS]
        assert row[TEST].mean == pytest.approx(100 * np.mean([test for test, _ in cut]), rel=1e-6)
        assert row[VALIDATION].mean == pytest.approx(100 * np.mean([validation for _, validation in cut]), rel=1e-6)
        assert (row["chosen on"], row["trials"], row["runs"], row["seeds"]) == ("validation", 3, 9, 3)
    assert list(rows[0])[:7] == ["clients", "method", "lr", "chosen on", "trials", "runs", "seeds"]


def test_the_text_says_how_and_warns():
    text = best(made_up(of(table(0))))
    assert text.startswith("Best of 12 settings by the validation accuracy (mean of last tenth), averaged over 3 seeds")
    assert "Tuned: lr; separately for each method; within each world (clients)." in text and "WARNING" not in text
    blind = best(made_up(of(table(0, validation=False))))
    assert "by the test accuracy" in blind and blind.count("WARNING") == 1
    assert "the test set chose these settings" in blind and "validation_fraction = 0.1" in blind
    fixed = best(made_up(lambda s: (0.5, None), {"method": list(METHODS)}))
    assert fixed.startswith("2 settings, none tuned: nothing was chosen.") and "WARNING" not in fixed
    more = [{"method": "fedbuff", "lr": 0.1, "clients": [5]}]
    uneven = best(made_up(lambda s: (0.5, 0.5), points=more))
    assert "WARNING: unequal effort in clients=5, which favours methods with more trials: " in uneven
    assert "3 for method=asgd, 3 for method=fedavg, 1 for method=fedbuff." in uneven
    (row,) = [row for row in chosen_rows(made_up(lambda s: (0.5, 0.5), points=more)) if row["method"] == "fedbuff"]
    assert (row["chosen on"], row["trials"]) == ("-", 1)


def test_one_run_without_a_validation_part_leaves_the_choice_to_the_test_set():
    found = made_up(lambda s: (0.5, None if (s.method, s.seed) == ("asgd", 1) else 0.5))
    assert [each.part for each in tunings(found)] == ["test", "validation"] * 2
    assert rank(found).metric == TEST and "WARNING: the test set" in best(found)
    column = evaluation_columns(found)["validation_accuracy"]
    assert np.isnan(column).sum() == 2 * 6  # two evaluations of each of these six runs


def test_given_roles_decide():
    found = made_up(of(table(1)))
    together = tunings(found, roles={"method": "tuned", "clients": "tuned"})
    assert len(together) == 1 and together[0].trials == 12 and together[0].world == together[0].compared == {}
    apart = tunings(found, roles={"lr": "compared"})
    assert len(apart) == 12 and {each.trials for each in apart} == {1}
    assert len(tunings(found, roles={"momentum.of.no.run": "tuned"})) == 4  # a path that only unfinished runs set


def test_without_classes_the_validation_loss_decides():
    def blind(settings):
        point = expand(Settings(updates=9), {"lr": [settings]})[0]
        one = scored(point, 0.9 - settings, settings)
        evaluations = one.run.evaluations | {"accuracy": np.full(2, np.nan), "validation_accuracy": np.full(2, np.nan)}
        return one._replace(run=one.run._replace(evaluations=evaluations))

    (each,) = tunings([blind(lr) for lr in RATES])
    assert [s.lr for s in each.settings] == [0.3, 0.2, 0.1] and each.part == "validation"


def test_pairs_are_of_chosen_settings_of_the_same_world():
    scores = table(5)
    found = made_up(of(scores))
    rows = pair_rows(found)
    assert [(row["where"], row["first"], row["second"]) for row in rows] == [
        (f"clients={clients}", "method=asgd", "method=fedavg") for clients in WORLDS
    ]
    made = tunings(found)
    for row, first, second in zip(rows, made[::2], made[1::2], strict=True):
        values = [
            [100 * scores[each.best.method, each.best.lr, each.best.clients, s][0] for s in SEEDS]
            for each in (first, second)
        ]
        assert row["first - second"] == pytest.approx(np.mean(values[0]) - np.mean(values[1]), rel=1e-5)
        assert row["p (t)"] == pytest.approx(significance.paired(np.subtract(*values)).t, rel=1e-4)


def test_the_curves_show_the_chosen_ones():
    grid = GRID | {"lr": [round(0.05 * k, 2) for k in range(1, 8)]}
    found = made_up(lambda s: (0.5, s.lr if s.method == "asgd" else 1 - s.lr), grid)
    axes = curves(found, "accuracy").axes[0]
    names = [text.get_text() for text in axes.texts] or [t.get_text() for t in axes.figure.legends[0].get_texts()]
    titles = list(by_setting(found))
    assert names == [titles[k] for k in sorted(rank(found).order[:10])]
    assert {titles[each.order[0]] for each in tunings(found)} <= set(names)
    assert axes.get_title(loc="left") == "best 10 of 28 settings by validation accuracy (mean of last tenth)"


# --- a whole sweep ------------------------------------------------------------------------------------


def test_roles_are_kept_in_the_folder(tmp_path, engine):
    options = {"seeds": 2, "out": tmp_path, "progress": False}
    grid = {"lr": [0.1, 0.3], "clients": [5, 6]}
    with pytest.raises(ValueError, match=r"roles\['lr'\] = 'tune'"):
        sweep(Settings(updates=9), grid, roles={"lr": "tune"}, **options)
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
    with pytest.raises(ValueError, match=r"roles\.json: must hold the roles of the sweep's settings; roles\['lr'\]"):
        collect(tmp_path)


def test_the_axes_of_a_sweep_have_roles():
    found = made_up(of(table(1)))
    assert tuning.axes_of(found) == {"tuned": ["lr"], "compared": ["method"], "world": ["clients"]}


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

    def run_of(point):
        run = make_run([0.1, 0.5 + point.settings.lr])
        scores = {"accuracy": np.full(2, np.nan), "loss": np.array([2.0, 1 - point.settings.lr])}
        return run if point.settings.clients == 5 else run._replace(evaluations=run.evaluations | scores)

    points = expand(Settings(updates=9), {"clients": [5, 6], "lr": [0.1, 0.3]})
    found = [swept_run(point, run_of(point)) for point in points]
    made = tunings(found)
    assert [(each.best.lr, each.metric) for each in made] == [(0.3, "accuracy"), (0.3, "loss")]
    assert "or the loss where there are no class labels" in best(found)
