"""What a run scores: its clients' own models, training loss, metrics, fine-tuned models, and validation parts.

``tests/config/test_measures.py`` has own and fine-tuned models by hand.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given as for_all
from hypothesis import settings as trials
from hypothesis import strategies as st

from fedjax_async import Settings, simulate
from fedjax_async.config import prepare
from fedjax_async.config.sweeping import plan_groups
from fedjax_async.data import Federation, fashion_mnist_6k, federate, population
from fedjax_async.data.federated import client_rows
from fedjax_async.engine import programs, reference_scores, run_reference, run_waves
from fedjax_async.engine.client_scores import client_columns
from fedjax_async.engine.evaluation import Metrics, Owned, over, owners, validation_part
from fedjax_async.engine.measures import FINE_TUNING, FineTuning, Measures, Sample, require_measurable, training_rows
from fedjax_async.local import job_key, local_training, run_job
from fedjax_async.models import METRICS, Metric
from fedjax_async.types import ClientData, Info, Message, Model, ServerAlgorithm
from tests.engine.problem import CLASSES, MODEL, case, changed, data, near, same
from tests.refusals import refusals

pytestmark = pytest.mark.float64
PRIVATE = MODEL._replace(private=lambda path: path[0] == "output")
CLIENT = local_training(PRIVATE, optimizer=optax.sgd(0.1, momentum=0.5), batch_size=4)


def with_test_rows(who, sizes):
    """The data with ``sizes[i]`` test rows for client i."""
    size = np.array(sizes, np.int32)
    offset = (np.cumsum(size) - size).astype(np.int32)
    return who._replace(test_order=np.arange(size.sum(), dtype=np.int32), test_offset=offset, test_size=size)


def problem(rule, timing="buffer:size=2", private=True, **options):
    """A case whose clients have 4, 3, 4, 0 and 4 test rows."""
    given = changed(case(rule, timing, "exponential:mean=1", **options), data=with_test_rows(data(), [4, 3, 4, 0, 4]))
    return changed(given, model=PRIVATE, client=CLIENT) if private else given


def on_rows(who, rows):
    """The data with these training rows as the test rows of a single client."""
    return who._replace(test_x=who.x, test_y=who.y, test_order=rows, test_offset=[0], test_size=[len(rows)])


def scores_by_hand(models, who):
    """(accuracy, loss) of each model on its client's own test rows, in NumPy."""
    found = []
    for model, offset, size in zip(models, who.test_offset, who.test_size):
        rows = who.test_order[offset : offset + size]
        x, y = who.test_x[rows], who.test_y[rows]
        w = jax.tree.map(np.asarray, model)
        logits = np.tanh(x @ w["hidden"]["kernel"]) @ w["output"]["kernel"] + w["output"]["bias"]
        loss = np.log(np.exp(logits).sum(1)) - logits[np.arange(size), y]
        found.append((np.mean(logits.argmax(1) == y), np.mean(loss)) if size else (np.nan, np.nan))
    return np.array(found).T


@pytest.mark.parametrize("engine", [run_waves, run_reference])
def test_the_request_says_when_and_for_whom(engine):
    """The message encodes its request in the model's weights; the loss of the own model is that number."""

    def init(params):
        return params, jnp.zeros(())

    def dispatch(state, memory, request):
        number = request.client + 10 * request.version + 1000 * request.local_steps
        asked = number.astype(memory.dtype) + 1e5 * request.weight + 1e-3 * request.time.astype(memory.dtype)
        return Message(jax.tree.map(lambda w: jnp.full_like(w, asked), state)), memory + 1

    def receive(state, memory, arrival):
        return state, memory, Info(arrival.weight)

    rule = ServerAlgorithm(init, receive, dispatch, lambda state: state)
    given = problem(rule, private=False)
    model = MODEL._replace(
        apply=lambda params, x, key=None: jnp.full((len(x), 3), params["output"]["bias"][0]),
        loss=lambda outputs, y: outputs[:, 0],
    )
    out = engine(*changed(given, model=model), per_client=True)
    schedule, points, size = given.schedule, given.points, given.components.data.size
    for row, position, time in zip(out.scores["client_own_loss"], points.position, points.time):
        for i in (0, 1, 2, 4):
            steps = schedule.local_steps[schedule.client == i][0]
            want = i + 10 * schedule.closes[:position].sum() + 1000 * steps + 1e5 * size[i] + 1e-3 * time
            np.testing.assert_allclose(row[i], want, rtol=1e-12)


def test_simulated_runs_have_them_by_name():
    run = simulate(
        method="orthofl", model="logistic", clients=4, updates=8, steps=2, batch_size=8, partition="iid",
        test_fraction=0.2, per_client=True, eval_updates=4, slots="bfloat16",
    )  # fmt: skip
    assert set(run.per_client) == {"loss", "accuracy", "own_loss", "own_accuracy"}
    for values in run.per_client.values():
        assert values.shape == (3, 4) and np.isfinite(values).all()


def test_test_parts_may_lie_in_any_order_and_leave_rows_out():
    who = data((3, 4))._replace(
        test_order=np.arange(20, dtype=np.int32)[::-1].copy(),
        test_offset=np.array([12, 2], np.int32),
        test_size=np.array([3, 4], np.int32),
    )
    found = owners(who)
    np.testing.assert_array_equal(found.row[:7], sorted([*who.test_order[12:15], *who.test_order[2:6]]))
    want = [0 if row in who.test_order[12:15] else 1 for row in found.row[:7]]
    np.testing.assert_array_equal(found.client, [*want, *[2] * 13])


NOBODY = with_test_rows(data(), [0, 0, 0, 0, 0])
test_scores_of_clients_need_test_rows_of_a_client = refusals(
    (lambda: owners(NOBODY), "per_client = True: must be left out: no client has a test row"),
    (lambda: require_measurable(NOBODY, ALL._replace(training=None)), "fine_tune = 3: must be left out"),
)


@pytest.mark.parametrize("engine", [run_waves, run_reference])
def test_clients_may_share_test_rows(engine):
    """The last client had them all to itself; the others had scores of the rest, or none. No own models."""
    given = problem("fedbuff", private=False)
    who = given[0].data
    shared = who._replace(
        test_offset=np.array([0, 0, 2, 0, 0], np.int32), test_size=np.array([15, 15, 4, 0, 3], np.int32)
    )
    out = engine(*changed(given, data=shared), per_client=True)
    assert {"client_loss", "client_accuracy"} == {name for name in out.scores if name.startswith("client_")}
    accuracy, loss = scores_by_hand([out.params] * len(who.size), shared)
    np.testing.assert_allclose(out.scores["client_accuracy"][-1], accuracy)
    np.testing.assert_allclose(out.scores["client_loss"][-1], loss, rtol=1e-9)


def test_models_in_bfloat16_are_scored_in_float32():
    """A client with 300 test rows: summed in bfloat16, they would count as 256."""
    model = Model(None, lambda params, x, key=None: x * params["w"], lambda outputs, y: outputs[:, 0])
    x = np.linspace(-1, 2, 320).reshape(-1, 1).astype(jnp.bfloat16)
    y, owner = (x[:, 0] > 1).astype(np.int32), np.repeat([0, 1], [300, 20]).astype(np.int32)
    params = {"w": jnp.ones((1, 1), jnp.bfloat16)}
    rows = Owned(np.arange(320), owner)
    found = Metrics(model, labels=True).whole(params, x, y, 320, rows, 2)
    oracle = reference_scores.Tests(model, x, y).whole(params, [np.flatnonzero(owner == who) for who in (0, 1)])
    for name, values in (("loss", x[:, 0].astype(np.float64)), ("accuracy", y == 0)):
        want = [values[owner == who].mean() for who in (0, 1)]
        for scores in (found, oracle):
            np.testing.assert_allclose(scores[f"client_{name}"], want, rtol=1e-5)
            np.testing.assert_allclose(scores[name], values.mean(), rtol=1e-5)
    first = Metrics(model, None, (("first", Metric(lambda outputs, y: outputs[:, 0])),))  # the loss of this model
    np.testing.assert_allclose(first.whole(params, x, y, 320, rows, 2)["client_first"], found["client_loss"], rtol=1e-5)


# --- measures ---------------------------------------------------------------------------------------

TUNER = local_training(MODEL, optimizer=optax.sgd(0.2), batch_size=4)
BRIER = Metric(lambda outputs, y: jnp.sum((jax.nn.softmax(outputs) - jax.nn.one_hot(y, 3)) ** 2, -1))
ALL = Measures(
    (("brier_error", BRIER), ("top2", METRICS["top"](k=2)), ("macro_f1", METRICS["macro_f1"]())),
    Sample(20, seed=5),
    fine_tune=3,
    tuner=TUNER,
)


def test_own_models_and_measures_equal_the_oracle_and_the_run_is_unchanged_to_the_last_bit():
    """Clients with models of their own, with a private layer, some of whose uploads are lost."""
    given = problem("orthofl", "window:length=0.7", faults="drop:probability=0.3")
    asked = {"per_client": True, "measures": ALL}
    want, have, plain = run_reference(*given, **asked), run_waves(*given, **asked), run_waves(*given)
    assert len(want.in_vain) > 0
    near(have.scores, want.scores)
    names = {"loss", "accuracy", "brier_error", "top2", "macro_f1"}
    clients = {f"client_{model}{name}" for name in names for model in ("", "own_", "tuned_")}
    assert set(have.scores) == names | {"train_loss"} | clients
    assert have.scores["client_own_loss"].shape == (len(given.points.time), 5)
    assert np.isnan(have.scores["client_tuned_macro_f1"][:, 3]).all(), "client 3 has no test rows"
    same((have.params, have.records), (plain.params, plain.records))
    same({name: have.scores[name] for name in plain.scores}, plain.scores)
    assert not [name for name in plain.scores if name.startswith("client_")]


def test_the_examples_of_the_training_loss_are_not_drawn_as_a_partition_draws():
    who = data()  # each client's examples lie behind those of the one before
    chosen = np.sort(np.random.default_rng([5]).choice(len(who.order), 20, replace=False, shuffle=False))
    assert training_rows(who, Sample(20, seed=5)).tolist() != who.order[chosen].tolist()


def test_training_loss_and_fine_tuning_by_hand(monkeypatch):
    """Two clients are tuned at a time, as in a batch; the loss is of more rows than the oracle reads at once."""
    monkeypatch.setattr(programs, "FineTuning", lambda metrics, tuner, steps, _: FineTuning(metrics, tuner, steps, 2))
    asked = Measures(ALL.metrics[:1], Sample(), fine_tune=3, tuner=TUNER)
    given = problem("fedbuff", private=False, updates=9)
    out = run_waves(*given, measures=asked)
    near(out.scores, run_reference(*given, measures=asked).scores)
    assert len(given.components.data.test_y) == 20 < len(given.components.data.y)
    names = {f"client_tuned_{name}" for name in ("loss", "accuracy", "brier_error")}
    assert {name for name in out.scores if name.startswith("client_")} == names
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
    trained = scores_by_hand([params], on_rows(who, who.order))
    np.testing.assert_allclose(out.scores["train_loss"][-1], trained[1][0], rtol=1e-9)


@pytest.mark.parametrize(("count", "width"), [(1, 1), (1, 12), (5, 5), (6, 3), (9, 4), (9, 12)])
def test_every_client_is_visited_once(count, width):
    found, i = over(lambda i: {"i": i, "pair": jnp.stack([i, 2 * i])}, count, width), np.arange(count)
    same(found, {"i": i, "pair": np.stack([i, 2 * i], 1)})


@for_all(seed=st.integers(0, 5), examples=st.integers(1, 33))
@trials(max_examples=20, deadline=None)
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
    counts = np.bincount(np.concatenate(drawn), minlength=33)  # 60 * 8 / 33 = 14.5 are expected
    assert len(set(drawn)) > 50 and counts.min() >= 4 and counts.max() <= 30


# --- metrics ----------------------------------------------------------------------------------------


def f1_by_hand(predicted, y):
    counts = [((predicted == c).sum(), (y == c).sum(), ((predicted == c) & (y == c)).sum()) for c in {*predicted, *y}]
    return np.mean([2 * both / (one + other) for one, other, both in counts])


@for_all(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=9, max_size=9))
@trials(max_examples=30, deadline=None)
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


# --- validation parts -------------------------------------------------------------------------------

SMALL = {"model": "logistic", "clients": 4, "updates": 4, "steps": 1}
ROWS = np.array([5, 17, 30, 2, 11, 8], np.int32)  # no client holds the entry 30


def held_out(rows=ROWS, sizes=(2, 0, 1, 2, 0)):
    """The data with ``rows`` held out, ``sizes`` of them by each client: 0, 2, 3 in turn, with a gap after 0."""
    size = np.array(sizes, np.int32)
    offset = np.array([0, 0, 3, 4, 0], np.int32)
    return data()._replace(validation_order=rows, validation_offset=offset, validation_size=size)


def experiment(who, **options):
    return changed(case("fedasync", updates=12, **options), data=who)


@pytest.mark.parametrize("engine", [run_waves, run_reference])
def test_the_scores_are_means_over_all_held_out_rows(engine):
    who, rows = held_out(), np.array([5, 17, 2, 11, 8])
    given = experiment(who)
    found = engine(*given)
    for at, params in ((0, given.params), (-1, found.params)):
        (accuracy,), (loss,) = scores_by_hand([params], on_rows(who, rows))
        np.testing.assert_allclose(found.scores["validation_loss"][at], loss, rtol=1e-9)
        np.testing.assert_allclose(found.scores["validation_accuracy"][at], accuracy, rtol=1e-12)
    assert len(found.scores["validation_loss"]) == len(given.points.time)
    assert np.ptp(found.scores["validation_loss"]) > 1e-3, "the run must have trained"


def test_validation_changes_nothing_else_and_nothing_else_changes_it():
    who = held_out()
    y, test_y = who.y.copy(), (who.test_y + 1) % CLASSES
    y[ROWS] = (y[ROWS] + 1) % CLASSES
    unseen = np.setdiff1d(np.arange(len(who.y)), ROWS).astype(np.int32)  # so that no client trains on the rows
    size = np.array([6, 4, 10, 6, 1], np.int32)
    trained = {"order": np.append(unseen, ROWS), "size": size, "offset": (np.cumsum(size) - size).astype(np.int32)}
    plain = run_waves(*experiment(data()._replace(**trained)))
    have, relabelled, retested = (
        run_waves(*experiment(one._replace(**trained))) for one in (who, who._replace(y=y), who._replace(test_y=test_y))
    )
    same([one.params for one in (have, relabelled, retested)], [plain.params] * 3)
    for name in ("loss", "accuracy"):
        same([one.scores[name] for one in (have, relabelled)], [plain.scores[name]] * 2)
        same(retested.scores[f"validation_{name}"], have.scores[f"validation_{name}"])
    assert not np.array_equal(relabelled.scores["validation_loss"], have.scores["validation_loss"])
    assert not np.array_equal(retested.scores["loss"], have.scores["loss"])
    assert "validation_loss" not in plain.scores


def test_no_rows_no_part_and_streamed_data_bring_their_own():
    assert validation_part(data()) is None and validation_part(held_out(sizes=(0,) * 5)) is None
    part = validation_part(held_out(), 8)
    assert part.x is None and part.size == 5
    np.testing.assert_array_equal(part.order, [5, 17, 2, 11, 8, 0, 0, 0])
    copied = validation_part(held_out()._replace(streamed=True))
    np.testing.assert_array_equal(copied.x[copied.order], data().x[part.order[:5]])
    np.testing.assert_array_equal(copied.y[copied.order], data().y[part.order[:5]])


def test_data_that_come_by_clients_are_cut_too():
    sizes = (9, 4, 13, 6)
    whole = data(sizes)._replace(x=data(sizes).x.astype(np.float32), test_x=data(sizes).test_x.astype(np.float32))

    def made(who, seed=0):
        return prepare(Settings(**SMALL, validation_fraction=0.25, seed=seed), data=who)

    cut, again, other = (made(whole, seed).components.data for seed in (0, 0, 1))
    by_federation = federate(Federation("blobs", lambda clients, seed: whole), None, 4, 0, validation_fraction=0.25)
    for one in (cut, by_federation):
        np.testing.assert_array_equal(one.validation_size, [2, 1, 3, 2])  # a quarter of each size; halves round to even
        held_out_of(one, whole)
    np.testing.assert_array_equal(cut.order, again.order)
    assert not np.array_equal(cut.order, other.order) and len(cut.order) == len(other.order) == 32
    with pytest.raises(ValueError, match=r"^validation_fraction = 0\.25: must be None: the clients of blobs have"):
        made(cut)
    with pytest.raises(ValueError, match=r"^validation_fraction = 0\.25: must be used with at least 2 examples"):
        made(whole._replace(size=np.array([9, 4, 13, 1], np.int32)))
    with pytest.raises(ValueError, match=r"^validation_fraction = 0\.1: must be None"):
        federate(population(), None, 4, validation_fraction=0.1)


def held_out_of(cut, whole):
    """Assert that the validation parts of the clients are held out of their training."""
    for i in range(len(whole.size)):
        held = cut.validation_order[cut.validation_offset[i] :][: cut.validation_size[i]]
        np.testing.assert_array_equal(np.sort([*client_rows(cut, i), *held]), np.sort(client_rows(whole, i)))


@pytest.mark.parametrize("test_fraction", [None, 0.2])
def test_the_validation_part_is_held_out_of_training(test_fraction):
    given = {"seed": 1, "test_fraction": test_fraction}
    whole, cut = (
        federate(fashion_mnist_6k(), "dirichlet:alpha=0.5", 5, **given, validation_fraction=f) for f in (None, 0.3)
    )
    np.testing.assert_array_equal(cut.x, whole.x)
    np.testing.assert_array_equal(cut.validation_size, np.round(0.3 * whole.size))
    held_out_of(cut, whole)


def test_runs_with_and_without_a_part_do_not_share_a_program():
    asked = [(fraction, seed) for fraction in (None, 0.2) for seed in (0, 1)]
    settings = [Settings(**SMALL, partition="iid", validation_fraction=f, seed=seed) for f, seed in asked]
    groups = plan_groups(settings, lanes=1)
    assert [group.members for group in groups] == [(0, 1), (2, 3)]
    assert prepare(settings[2]).components.data.validation_size.sum() == 1000
