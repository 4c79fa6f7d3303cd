"""Training loss, metrics and fine-tuned models equal values by hand and the oracle, also in stacks and resumed runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from fedjax_async.engine import run_reference, run_waves
from fedjax_async.engine.checkpoint import Keeper
from fedjax_async.engine.client_scores import client_columns
from fedjax_async.engine.measures import FINE_TUNING, Measures, Sample, over_clients, training_rows
from fedjax_async.engine.run import run_stack
from fedjax_async.engine.stack import layout_of, make_member, make_stack, shape_of
from fedjax_async.local import job_key, local_training, run_job
from fedjax_async.models import METRICS, Metric
from fedjax_async.types import ClientData, Message
from tests.engine.problem import MODEL, data
from tests.engine.test_checkpoint import Killed, killer
from tests.engine.test_own import problem, scores_by_hand, with_test_rows

TUNER = local_training(MODEL, optimizer=optax.sgd(0.2), batch_size=4)
BRIER = Metric(lambda outputs, y: jnp.sum((jax.nn.softmax(outputs) - jax.nn.one_hot(y, 3)) ** 2, -1))
ALL = Measures(
    (("brier_error", BRIER), ("top2", METRICS["top"](k=2)), ("macro_f1", METRICS["macro_f1"]())),
    Sample(20, seed=5),
    fine_tune=3,
    tuner=TUNER,
)


def same(have, want):
    assert have.keys() == want.keys()
    for name, values in want.items():
        np.testing.assert_allclose(have[name], values, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.slow_cases("orthofl-False-loop", "fedbuff-True-vmap")
@pytest.mark.float64
@pytest.mark.parametrize(("rule", "private", "batching"), [
    ("fedbuff", True, "vmap"), ("orthofl", False, "loop"),
    pytest.param("orthofl", True, "vmap", marks=pytest.mark.slow),
])  # fmt: skip
def test_engine_equals_oracle_and_the_run_is_unchanged_to_the_last_bit(rule, private, batching):
    given = problem(rule, private=private, faults="drop:probability=0.3", updates=16)
    want = run_reference(*given, per_client=True, measures=ALL)
    have = run_waves(*given, per_client=True, measures=ALL, batching=batching)
    same(have.scores, want.scores)
    names = {"loss", "accuracy", "brier_error", "top2", "macro_f1"}
    clients = {f"client_{model}{name}" for name in names for model in ("", "own_", "tuned_")}
    assert set(have.scores) == names | {"train_loss"} | clients
    assert np.isnan(have.scores["client_tuned_macro_f1"][:, 3]).all(), "client 3 has no test rows"
    plain = run_waves(*given, per_client=True, batching=batching)
    jax.tree.map(np.testing.assert_array_equal, (have.params, have.records), (plain.params, plain.records))
    for name, values in plain.scores.items():
        np.testing.assert_array_equal(have.scores[name], values, err_msg=name)


@pytest.mark.float64
def test_metrics_and_a_training_loss_of_more_rows_than_the_oracle_evaluates_at_once_equal_the_oracle():
    given = problem("fedbuff", private=False, updates=3)
    assert len(given.components.data.test_y) == 20
    measures = Measures(ALL.metrics[:1], Sample(21, seed=5))
    same(run_waves(*given, measures=measures).scores, run_reference(*given, measures=measures).scores)


def test_the_examples_of_the_training_loss_are_not_drawn_as_a_partition_draws():
    who = data()  # each client's examples lie behind those of the one before
    chosen = np.sort(np.random.default_rng([5]).choice(len(who.order), 20, replace=False, shuffle=False))
    assert training_rows(who, Sample(20, seed=5)).tolist() != who.order[chosen].tolist()


@pytest.mark.float64
def test_training_loss_and_fine_tuning_by_hand():
    given = problem("fedbuff", private=False, updates=9)
    out = run_waves(*given, measures=ALL._replace(metrics=(), training=Sample()))
    assert {name for name in out.scores if name.startswith("client_")} == {
        "client_tuned_loss", "client_tuned_accuracy",
    }  # fmt: skip
    who, key, params = given.components.data, given.key, jax.tree.map(jnp.asarray, out.params)
    everything = ClientData(*map(jnp.asarray, (who.x, who.y, who.order)), None, None)
    root, models = jax.random.fold_in(key, jnp.uint32(FINE_TUNING)), []
    tune = jax.jit(lambda *given: run_job(TUNER, given[0], given[1], (), given[2], 3)[0])
    for i in range(5):
        part = everything._replace(offset=jnp.int32(who.offset[i]), size=jnp.int32(who.size[i]))
        message = Message(params, (), jnp.int32(given.schedule.closes.sum()))
        delta = tune(job_key(root, jnp.int32(i), jnp.int32(0)), message, part)
        models.append(jax.tree.map(np.add, params, delta))
    accuracy, loss = scores_by_hand(models, who)
    np.testing.assert_allclose(out.scores["client_tuned_loss"][-1], loss, rtol=1e-9)
    np.testing.assert_allclose(out.scores["client_tuned_accuracy"][-1], accuracy, rtol=1e-12)
    trained = who._replace(test_x=who.x, test_y=who.y, test_order=who.order, test_offset=[0], test_size=[33])
    np.testing.assert_allclose(out.scores["train_loss"][-1], scores_by_hand([params], trained)[1][0], rtol=1e-9)


@pytest.mark.float64
def test_the_number_of_clients_tuned_at_a_time_changes_nothing():
    given = problem("fedbuff", private=False, updates=4)
    asked = Measures(fine_tune=3, tuner=TUNER)
    one, two = (run_waves(*given, measures=asked, batching="vmap", max_width=width).scores for width in (1, 2))
    same(two, one)


@pytest.mark.parametrize(("count", "width"), [(1, 1), (1, 12), (5, 5), (6, 3), (9, 4), (9, 12)])
def test_every_client_is_visited_once(count, width):
    found = over_clients(lambda i: {"i": i, "pair": jnp.stack([i, 2 * i])}, count, width)
    np.testing.assert_array_equal(found["i"], np.arange(count))
    np.testing.assert_array_equal(found["pair"], np.stack([np.arange(count), 2 * np.arange(count)], 1))


@pytest.mark.slow
@pytest.mark.float64
def test_a_stack_of_two_runs_each_as_alone():
    cases = [problem("orthofl"), problem("orthofl", seed=4, updates=17)]
    components = cases[0].components._replace(data=with_test_rows(data(), [2, 0, 5, 3, 1]))
    cases[1] = cases[1]._replace(components=components)
    asked = [ALL, ALL._replace(training=Sample(20, seed=6))]
    members = [make_member(*one, measures=measures) for one, measures in zip(cases, asked)]
    made = layout_of(members, batching="vmap")
    stack = make_stack(members, made, shape_of(made), per_client=True)
    for have, one, measures in zip(run_stack(stack), cases, asked, strict=True):
        same(have.scores, run_reference(*one, per_client=True, measures=measures).scores)


def test_a_resumed_run_is_identical_bit_for_bit(tmp_path):
    given = problem("fedbuff", updates=20)
    want = run_waves(*given, per_client=True, measures=ALL)
    with pytest.raises(Killed):
        run_waves(*given, per_client=True, measures=ALL, keeper=Keeper(tmp_path, 5, {}), progress=killer(12))
    keeper = Keeper(tmp_path, 5, {})
    assert len(keeper.restore().scores) > 1
    have = run_waves(*given, per_client=True, measures=ALL, keeper=keeper)
    assert have.scores.keys() == want.scores.keys()
    for name, values in want.scores.items():
        np.testing.assert_array_equal(have.scores[name], values, err_msg=name)


@for_all(seed=st.integers(0, 5), examples=st.integers(1, 33))
@settings(max_examples=20, deadline=None)
def test_a_sample_is_drawn_by_its_seed_from_the_training_parts(seed, examples):
    who = data()
    who = who._replace(offset=who.offset[[1, 3]], size=who.size[[1, 3]])  # rows of other clients are no training rows
    total = int(who.size.sum())
    whole = training_rows(who, Sample())
    parts = [who.order[a : a + n] for a, n in zip(who.offset, who.size)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))
    if examples > total:
        with pytest.raises(ValueError, match=f"train_examples = {examples}: must be a whole number from 1 to {total}"):
            training_rows(who, Sample(examples, seed))
        return
    chosen = training_rows(who, Sample(examples, seed))
    np.testing.assert_array_equal(chosen, training_rows(who, Sample(examples, seed)))
    assert len(set(chosen.tolist())) == examples and set(chosen.tolist()) <= set(whole.tolist())


def test_another_seed_draws_another_sample_and_every_row_has_its_chance():
    drawn = [tuple(training_rows(data(), Sample(8, seed))) for seed in range(60)]
    assert len(set(drawn)) > 50
    counts = np.bincount(np.concatenate(drawn), minlength=33)
    assert counts.min() >= 4 and counts.max() <= 30  # expected count of each row: 60 * 8 / 33 = 14.5


# --- metrics ----------------------------------------------------------------------------------------


def f1_by_hand(predicted, y):
    scores = []
    for c in sorted({*predicted, *y}):
        tp = sum(p == c == t for p, t in zip(predicted, y))
        scores.append(2 * tp / (sum(p == c for p in predicted) + sum(t == c for t in y)))
    return np.mean(scores)


@for_all(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=9, max_size=9))
@settings(max_examples=30, deadline=None)
def test_named_metrics_against_their_definitions(pairs):
    """Four classes; the outputs rank them cyclically, beginning with the predicted one."""
    predicted, y = (np.array(each) for each in zip(*pairs))
    outputs = -((np.arange(4)[None] - predicted[:, None]) % 4).astype(np.float32)

    def value(metric):
        values = metric.values(jnp.asarray(outputs), jnp.asarray(y, jnp.int32))
        means = jax.tree.map(lambda leaf: jnp.mean(leaf.astype(jnp.float32), axis=0), values)
        return means if metric.finish is None else metric.finish(means)

    recalls = [np.mean(predicted[y == c] == c) for c in np.unique(y)]
    np.testing.assert_allclose(value(METRICS["balanced_accuracy"]()), np.mean(recalls), rtol=1e-5)
    np.testing.assert_allclose(value(METRICS["macro_f1"]()), f1_by_hand(predicted, y), rtol=1e-5, atol=1e-7)
    for k in (1, 2, 4):
        np.testing.assert_allclose(value(METRICS["top"](k=k)), np.mean((y - predicted) % 4 < k), rtol=1e-6)


# --- over clients -----------------------------------------------------------------------------------


def test_mean_deviation_and_worst_tenth_over_the_clients():
    rng = np.random.default_rng(0)
    accuracy, loss = rng.random((2, 3, 25)).astype(np.float32)
    accuracy[:, 7] = loss[:, 7] = np.nan  # no test rows; a tenth of the other 24 clients, rounded up, is 3
    loss[2, 9] = np.nan  # a model that diverged
    found = client_columns({"accuracy": accuracy, "own_loss": loss})
    kept = np.delete(accuracy, 7, axis=1).astype(np.float64)
    np.testing.assert_allclose(found["client_accuracy"], kept.mean(1))
    np.testing.assert_allclose(found["client_accuracy_std"], kept.std(1))
    np.testing.assert_allclose(found["client_accuracy_worst"], [np.mean(sorted(row)[:3]) for row in kept])
    losses = np.delete(loss, 7, axis=1).astype(np.float64)
    np.testing.assert_allclose(found["client_own_loss_worst"][:2], [np.mean(sorted(row)[-3:]) for row in losses[:2]])
    for name in ("client_own_loss", "client_own_loss_std", "client_own_loss_worst"):
        assert np.isnan(found[name]).tolist() == [False, False, True]
    assert client_columns({}) == {} and client_columns({"loss": np.full((2, 4), np.nan)}) == {}
