"""From settings to runs: budgets, data, refusals before anything compiles; noise, attackers and secure aggregation."""

import numpy as np
import pytest

from fedjax_async import Settings, data, simulate
from fedjax_async.base.notices import RunWarning
from fedjax_async.cli.runs import attackers_text
from fedjax_async.config import prepare
from fedjax_async.config.problem import data_of
from fedjax_async.config.resolving import length_of_batch
from fedjax_async.results.comparisons import comparison
from tests.refusals import refusals

SMALL = {"model": "logistic", "steps": 2, "delay": "exponential"}


@pytest.mark.parametrize(("budget", "times"), [
    ({"updates": 10**6, "time": 3.0}, 3.0), ({"time": 4.0, "eval_at": "0.5,2.25"}, [0, 0.5, 2.25, 4]),
    ({"updates": 40, "time": 1e5}, None),
])  # fmt: skip
def test_evaluations_end_where_the_first_budget_ends(budget, times):
    experiment = prepare(Settings(**budget, **SMALL))
    found, last = experiment.points.time, experiment.schedule.time[-1]
    if isinstance(times, list):
        np.testing.assert_array_equal(found, times)
    else:
        assert found[-1] == (last if times is None else times) < 100


def test_data_with_owners_keep_them_and_least_squares_find_the_optimum():
    """One shared optimum and no noise: the loss goes to zero. Clients are the owners, not a Dirichlet partition."""
    world = {"dataset": "quadratic:heterogeneity=0,clients=6", "clients": 6, "delay": "exponential"}
    run = simulate(model="linear", steps=5, lr=0.5, updates=900, **world)
    assert run.settings["partition"] == "natural"
    assert run.evaluations["loss"][-1] < 1e-4 * run.evaluations["loss"][0]
    assert np.isnan(run.evaluations["accuracy"]).all()


def test_a_batch_longer_than_every_shard_is_the_whole_shard():
    runs = [prepare(Settings(updates=4, batch_size=size, **SMALL)) for size in (10**9, 5000)]
    assert runs[0].components.client == runs[1].components.client
    assert length_of_batch(runs[0].settings, runs[0].components.data) == runs[0].components.data.size.max() < 5000


@pytest.mark.parametrize("method", ["fedasync", "dpsgd"])
def test_an_epoch_in_stored_order_has_the_whole_batches_alone(method):
    given = {"model": "logistic", "clients": 4, "updates": 8, "delay": "exponential", "epochs": 2, "batch_size": 32}
    shuffled, stored = (prepare(Settings(method=method + how, **given)) for how in ("", ":shuffle=false"))
    size = np.asarray(stored.components.data.size)[stored.schedule.client]
    np.testing.assert_array_equal(stored.schedule.local_steps, 2 * np.maximum(1, size // 32))
    np.testing.assert_array_equal(np.unique(shuffled.schedule.local_steps), np.unique(2 * -(-size // 32)))


test_refused_before_anything_compiles = refusals(
    ({"model": "logistic:num_classes=3"}, "model outputs = 3"),
    ({"model": "linear"}, "num_classes = 10: must be None"),
    ({"compute": "float64"}, "64-bit"),
    ({"per_client": True}, "test_fraction"),
    ({"method": 5}, "method"),
    ({"batching": "scan"}, "batching = 'scan'"),
    ({"metod": "fedavg"}, "did you mean 'method'"),
    ({"optimizer": "sgd:nesterov=true"}, "nesterov"),
    ({"steps": 10**12}, "steps"),
    *(({"eval_at": wrong}, "eval_at") for wrong in ("1,two", "-1", "1e400", "")),
    ({"eval_at": "1", "eval_updates": 2}, "at most one"),
    ({"checkpoint": 2}, "^checkpoint = 2: must be left out without a folder"),
    ({"eval_examples": 1001}, "^eval_examples = 1001: must be a whole number from 1 to 1000"),
    ({"eval_examples": 9, "per_client": True}, "^eval_examples = 9: must be left out where clients have tests"),
    ({"eval_examples": 9, "dataset": "population"}, "^eval_examples = 9: must be left out: population is already"),
    by=lambda change: simulate(**({"updates": 5} | SMALL | change)),
)


def test_fewer_test_examples_are_evenly_spaced_and_change_the_evaluation_only():
    plain = {"dataset": "fashion_mnist_6k", "model": "logistic", "clients": 4, "steps": 2, "updates": 8}
    whole, part = (prepare(Settings(**plain, eval_examples=count)).components for count in (None, 100))
    np.testing.assert_array_equal(part.data.test_x, whole.data.test_x[::10])
    np.testing.assert_array_equal(part.data.test_y, whole.data.test_y[::10])
    np.testing.assert_array_equal(part.data.order, whole.data.order)
    assert part.client == whole.client


RNG = np.random.default_rng(0)
LABELS = np.arange(80, dtype=np.int32) % 3
POINTS = (RNG.normal(size=(80, 5)) + 2 * np.eye(3, 5)[LABELS]).astype(np.float32)
BLOBS = data.Dataset("blobs", POINTS[:60], LABELS[:60], POINTS[60:], LABELS[60:])
PROTECTED = {
    **{"dataset": BLOBS, "model": "logistic", "clients": 5, "steps": 3, "batch_size": 4, "partition": "iid"},
    **{"method": "fedbuff@buffer:size=2", "delay": "exponential", "updates": 16, "eval_updates": 8},
}


def test_tables_and_lines_count_the_attackers():
    privacy = "dp:clip=0.3,noise=0.2,quantile=0.5+dp_sgd:clip=0.5,noise=0.3"
    run = simulate(**PROTECTED, privacy=privacy, attack="alie:clients=1+3", engine="reference")
    malicious = run.updates["malicious"]
    assert 0 < malicious.sum() < 16 and set(run.updates["client"][malicious]) == {1, 3}
    assert attackers_text(run) == [f"attackers: 2 of 5 clients; {malicious.sum()} of 16 uploads malicious"]
    row, _ = comparison({"fedbuff": [run], "plain": [run._replace(counters={})]})
    assert row["attackers"].mean == 2 and row["malicious"].mean == malicious.sum()
    assert len(set(run.updates["clip"])) == 8


def test_attackers_train_on_flipped_labels_and_others_do_not():
    given = {**PROTECTED, "updates": 4}
    one, plain = (data_of(Settings(**given, attack=attack)) for attack in ("label_flip:share=0.4", None))
    assert one is data_of(Settings(**given, attack="label_flip:share=0.4")), "equal settings, the same object"
    assert one.malicious.sum() == 2 and plain.malicious is None
    for client in range(5):
        rows = one.order[one.offset[client] : one.offset[client] + one.size[client]]
        before, after = plain.y[rows], one.y[rows]
        np.testing.assert_array_equal(after, 2 - before if one.malicious[client] else before)
    np.testing.assert_array_equal(one.test_y, plain.test_y)


QUADRATIC = {"dataset": "quadratic", "model": "linear", "partition": "natural"}
SECURE = {"method": "fedbuff", "timing": "buffer:size=3", "privacy": "secure:size=2"}
SUMS = "the server sees sums only"
ONE = "^uploads of the smallest server step = 1: must be at least 2"
# corrupt uploads are in no sum: all five clients come in each window, and in the first one is sound
SOUND = {"timing": "window:length=2", "delay": "constant", "faults": "corrupt:probability=0.7"}
test_wrong_values_and_what_needs_single_uploads_are_refused = refusals(
    ({"privacy": "dpp"}, "^privacy = 'dpp': unknown; did you mean 'dp'"),
    ({"privacy": "dp:clip=-1"}, "^privacy = 'dp:clip=-1': clip = -1: must be a finite number > 0"),
    (
        {"privacy": "dp+dp:noise=2"},
        r"^privacy = 'dp\+dp:noise=2': parts for uploads = 2: must be at most one of a kind",
    ),
    ({"privacy": 3}, "^privacy = 3: must be a text such as"),
    ({"privacy": "dp_sgd", "method": "scaffold"}, "^privacy = 'dp_sgd': must be without dp_sgd: the local training of"),
    ({"privacy": "dp_sgd", "optimizer": "sam"}, "^optimizer = 'one with 2 gradients a step'"),
    ({"attack": "sign"}, "^attack = 'sign': unknown"),
    ({"attack": "sign_flip:share=2"}, "^attack = 'sign_flip:share=2': share = 2: must be between 0 and 1"),
    ({"attack": "sign_flip:share=0.05"}, "share = 0.05: must be 0, or above 0.1: it rounds to no attacker among 5 cl"),
    ({"attack": "sign_flip:clients=7"}, "^attack = '.*=7': clients = 7: must be a whole number from 0 to 4"),
    ({"attack": "label_flip", **QUADRATIC}, "^attack = 'label_flip'"),
    (SECURE | {"method": "fedmedian"}, f"^method = 'fedmedian': must be one that uses only the weighted sum.*{SUMS}"),
    (SECURE | {"method": "ca2fl"}, "^method = 'ca2fl'"),
    (SECURE | {"method": "fedbuff+correction"}, "^method = 'fedbuff.correction'"),
    (SECURE | {"method": "fedbuff:clip=1"}, "^method = 'fedbuff:clip=1'"),
    (SECURE | {"norm_limit": 2.0}, f"^norm_limit = 2.0: must be left out .*{SUMS}"),
    (SECURE | {"compress": "topk", "feedback": "ef21"}, f"^feedback = 'ef21': must be off or ef, .*{SUMS}"),
    (SECURE | {"timing": "every"}, ONE),
    (SECURE | SOUND, ONE),
    (SECURE | {"privacy": "secure:size=4"}, "^uploads of the smallest server step = 3: must be at least 4"),
    (SECURE | {"privacy": "secure:size=2+dp:quantile=0.5"}, "^staleness with secure and an adaptive clip = "),
    by=lambda wrong: prepare(Settings(**{**PROTECTED, **wrong})),
)


def test_noise_is_refused_where_it_would_make_running_variances_negative():
    noised = {"model": "resnet18:width=0.1", "privacy": "dp:noise=0.1", "updates": 4}
    with pytest.raises(ValueError, match=r"^privacy = 'dp:noise=0.1': must be without noise: .* norm=group or "):
        prepare(Settings(**noised))
    prepare(Settings(**noised | {"privacy": "dp:noise=0"}))
    prepare(Settings(**noised | {"model": "resnet18:width=0.1,norm=local"}))


def test_secure_aggregation_takes_sums_and_no_probes():
    secure = {"method": "fedavg@cohort:size=3", "privacy": "secure:size=3+dp:quantile=0.5", "updates": 9}
    settings = Settings(**{**PROTECTED, **secure})
    assert prepare(settings).total == 9
    with pytest.raises(ValueError, match=r"probes = .*: must be left out .*sums only"):
        prepare(settings, probes={"norm": lambda state, memory, arrival, parts: {"weight": arrival.weight}})


def test_sums_of_fewer_uploads_because_some_were_rejected_are_said():
    given = {"privacy": "secure:size=2", "attack": "scaled:factor=3e38,clients=1", "engine": "reference"}
    with pytest.warns(RunWarning, match=r"the server saw \d+ sums of fewer than 2 uploads, the smallest of 1"):
        run = simulate(**PROTECTED, **given)
    assert run.counters["rejected"] > 0
